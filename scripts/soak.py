"""Random requests against one engine for a while: nothing may leak, nothing may differ from the same request alone.

    python scripts/soak.py --minutes 10 --out soak.json

Requests come from several threads, with random prompts, lengths, drafters and sampling; some are left half-way. Every so often the
memory of the process and the blocks of every cache are written down; a share of the answers is compared with plain decoding.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from foretoken import LLM, AsyncEngine, CapacityError, SamplingParams, SpecConfig

_TEXTS = (
    "def main(",
    "import os\n\n\nclass Reader:\n",
    "for name in sorted(names):\n    print(name",
    "    return [",
    "# A list of\n",
    "x = {\n    'a': 1,\n",
)


@dataclass
class Tally:
    """What the threads did."""

    finished: int = 0
    left: int = 0
    refused: int = 0
    compared: int = 0
    differing: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def specs(draft: str | None) -> list[SpecConfig]:
    """Every way to draft that needs no more than the draft model."""
    free = [SpecConfig(), *(SpecConfig(name) for name in ("ngram", "suffix", "recycling"))]
    return free if draft is None else [*free, SpecConfig("draft_model", draft), SpecConfig("draft_model", draft, num_draft=3)]


def worker(engine: AsyncEngine, tally: Tally, kinds: list[SpecConfig], stop_at_s: float, most: int, seed: int) -> None:
    """Ask until the time or the number of requests is up."""
    rng = random.Random(seed)
    while time.monotonic() < stop_at_s and tally.finished + tally.left < most:
        prompt = "".join(rng.choices(_TEXTS, k=rng.randint(1, 4)))
        temperature = rng.choice((0.0, 0.0, 0.7, 1.0))
        params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=temperature, seed=rng.randrange(2**32), ignore_eos=rng.random() < 0.5)
        try:
            ticket = engine.submit(prompt, params, rng.choice(kinds))
            if rng.random() < 0.15:
                pieces = iter(ticket)
                next(pieces)
                pieces.close()
                with tally.lock:
                    tally.left += 1
                continue
            out = ticket.result()
        except CapacityError:
            with tally.lock:
                tally.refused += 1
            continue
        with tally.lock:
            tally.finished += 1
        if rng.random() < 0.05:  # greedy and seeded (coupled) answers do not depend on who drafts or who else is there
            alone = engine.submit(prompt, params, SpecConfig()).result()
            with tally.lock:
                tally.compared += 1
                if alone.token_ids != out.token_ids:
                    tally.differing.append(f"{prompt!r} {params}")


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    """Run the soak; 1 if something leaked or differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="reference:target")
    parser.add_argument("--draft", default="reference:draft")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=10**9)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tally, began = Tally(), time.monotonic()
    samples: list[dict[str, float]] = []
    with LLM(options.target, dtype="float32", max_batch_size=8, cache_tokens=4096) as llm, AsyncEngine(llm) as engine:
        stop_at_s = began + 60 * options.minutes
        arguments = (engine, tally, specs(options.draft), stop_at_s, options.requests)
        threads = [threading.Thread(target=worker, args=(*arguments, options.seed + i)) for i in range(options.workers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(5.0, 6 * options.minutes))
            gc.collect()
            samples.append({"s": round(time.monotonic() - began, 1), "resident_mb": resident_bytes() / 1e6, "requests": tally.finished + tally.left})
            print(f"\r{samples[-1]}", end="", file=sys.stderr, flush=True)
        engine.submit("x", SamplingParams(max_tokens=1)).result()
        free, whole = llm.target.num_free_tokens(), llm.target.capacity_tokens
        idle = not llm.engine.states and not engine._tickets
    third = max(1, len(samples) // 3)
    growth = sum(s["resident_mb"] for s in samples[-third:]) / third - sum(s["resident_mb"] for s in samples[third : 2 * third]) / third
    report = {
        "command": " ".join(sys.argv),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "finished": tally.finished,
        "left": tally.left,
        "refused": tally.refused,
        "compared": tally.compared,
        "differing": tally.differing,
        "blocks_conserved": free == whole and idle,
        "growth_mb_second_to_last_third": growth,
        "samples": samples,
    }
    print("\n" + json.dumps({key: value for key, value in report.items() if key != "samples"}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1))
    return 0 if report["blocks_conserved"] and not tally.differing else 1


if __name__ == "__main__":
    sys.exit(main())
