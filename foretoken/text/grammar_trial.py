"""A grammar compiled in a process of its own, because llguidance has fuel for most of its work but no clock.

Run as a script: a job as JSON on stdin, one line of JSON on stdout. Imports nothing but llguidance, so that it starts
in 50 ms. `{"multipleOf": 99400891}`, or thirty patterns that must all match, would otherwise never come back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


class StandIn:
    """As many tokens as the model has columns: its special tokens under their own ids, and every byte under some id."""

    eos_token_id = None
    bos_token_id = None

    def __init__(self, size: int, special: Mapping[int, str]) -> None:
        single = (bytes([byte]) for byte in range(255))  # 0xff marks special tokens
        self.tokens = [special[i].encode() if i in special else next(single, b"") for i in range(size)]
        self.special_token_ids = sorted(special)

    def __call__(self, text: str) -> list[int]:
        """Nothing is ever tokenised here."""
        raise TypeError(text)


def main() -> None:
    """Compile the grammar of the job and take one step; write llguidance's complaint, empty when there is none."""
    job: dict[str, Any] = json.load(sys.stdin)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (job["processor_s"], job["processor_s"] + 1))
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (job["memory_bytes"] if most < 0 else min(job["memory_bytes"], most), most)
        )
    sys.path.insert(0, job["library"])
    import llguidance

    special = {int(token_id): text for token_id, text in job["special"].items()}
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(StandIn(job["size"], special)), slices=[])
    matcher = llguidance.LLMatcher(
        tokenizer, job["grammar"], log_level=0, limits=llguidance.LLParserLimits(**job["limits"])
    )
    complaint = matcher.get_error()
    matcher.compute_bitmask()  # its outcome depends on the vocabulary, whether it comes back does not
    print(json.dumps(complaint))


if __name__ == "__main__":
    main()
