"""Answers of 1 to 64 requests at once: tokens per second of all, and what the slowest requests wait for.

Settings take turns in a fresh engine each; greedy answers that differ from plain's are counted, near ties beside them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.measure.workload import slices
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file, whole_numbers, words

_PLAIN = "plain"
_WARM_TOKENS = 8


def main() -> int:
    """Measure, print a line for each cell, and with `--out` write the record."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.batches", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=whole_numbers, default=(1, 2, 4, 8, 16, 32, 64))
    parser.add_argument("--drafters", type=words, default=("ngram", "auto"))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    texts = [prompt.text for prompt in slices(per_slice=math.ceil(max(options.batches) / 5))]
    answers: dict[tuple[int, str], list[Sequence[int]]] = {}
    rows = []
    for name in (_PLAIN, *options.drafters):
        spec = SpecConfig(None if name == _PLAIN else name)
        with LLM(options.target, spec=spec, dtype=options.dtype, device=options.device, profile="off") as llm:
            for batch in options.batches:
                prompts = list(itertools.islice(itertools.cycle(texts), batch))
                llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=_WARM_TOKENS))
                row, answers[batch, name] = _cell(llm, prompts, options.max_tokens)
                pairs = zip(answers[batch, name], answers[batch, _PLAIN], strict=True)
                rows.append(
                    {"setting": name, "batch": batch, **row, "differing": sum(own != plain for own, plain in pairs)}
                )
                Console().line(f"{name}, {batch} at once: {row['tokens_per_s']:.0f} tokens/s")
    about = {"target": Path(options.target).name, "dtype": options.dtype, "max_tokens": options.max_tokens}
    record("gpu.batches", {**about, "rows": rows}, options.out)
    return 0


def _cell(llm: LLM, prompts: Sequence[str], max_tokens: int) -> tuple[dict[str, Any], list[Sequence[int]]]:
    """One batch of answers: its row, and the answers' tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params)
    took_s = time.perf_counter() - began
    stats = [output.stats for output in outputs]
    row = {
        "seconds": took_s,
        "tokens_per_s": sum(len(output.token_ids) for output in outputs) / took_s,
        "request_p95_s": _p95([one.total_s for one in stats]),
        "ttft_p95_s": _p95([one.ttft_s for one in stats]),
        "gap_p95_s": _p95([one.longest_gap_s for one in stats]),
        "emitted_per_step": sum(one.emitted_per_step for one in stats) / len(stats),
        "near_ties": sum(one.num_near_ties for one in stats),
    }
    return row, [output.token_ids for output in outputs]


def _p95(values: Sequence[float]) -> float:
    """The least value that at least 95 of 100 do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


if __name__ == "__main__":
    sys.exit(main())
