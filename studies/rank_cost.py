"""What a target divided among processes gains or loses beside one process with as many threads.

    python -m studies.rank_cost --target DIR --ranks 2 --requests 1,4,16 --drafters none,ngram

Both sides answer the same prompts in turns, each with all `--threads`: one process with that many, ranks with their
share of them. Prompts are random tokens; answers must be equal, and the study says whether they are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import product
from typing import Any

import torch

from foretoken.config import PLAIN, SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file, setting_of, whole_numbers, words

_WARM_UP_TURNS = 1


def main() -> int:
    """Measure, print the table, and with `--out` write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.rank_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder, hub id or reference:target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--requests", type=whole_numbers, default=(1, 4, 16), help="answers at once")
    parser.add_argument("--drafters", type=words, default=(PLAIN, "ngram"), help="drafters that need no draft model")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    before, found = torch.get_num_threads(), list[dict[str, Any]]()
    torch.set_num_threads(options.threads)
    try:
        sides = {"one process": _opened(options, 1), "ranks": _opened(options, options.ranks)}
        try:
            for drafter, count in product(options.drafters, options.requests):
                found.append(_measured(sides, drafter, count, options))
        finally:
            for llm in sides.values():
                llm.close()
    finally:
        torch.set_num_threads(before)
    record("rank_cost", {**setting_of(options), "results": found}, options.out)
    Console().line("| drafter | requests | one process, tokens/s | ranks, tokens/s | ratio | tokens |")
    for one in found:
        first, second = (statistics.median(one["tokens_per_s"][side]) for side in sides)
        same = "equal" if one["equal"] else "differ"
        row = f"{one['drafter']} | {one['requests']} | {first:.1f} | {second:.1f} | {second / first:.2f} | {same}"
        Console().line(f"| {row} |")
    return 0


def _opened(options: argparse.Namespace, ranks: int) -> LLM:
    room = max(options.requests) * (options.prompt + options.tokens + 64)
    return LLM(options.target, SpecConfig(), dtype=options.dtype, cache_tokens=room, tensor_parallel=ranks)


def _measured(sides: dict[str, LLM], drafter: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every turn on both sides, and whether all answers were equal."""
    generator = torch.Generator().manual_seed(count)
    some = torch.randint(next(iter(sides.values())).target.vocab_size, (count, options.prompt), generator=generator)
    prompts = some.tolist()
    params, spec = SamplingParams(max_tokens=options.tokens, ignore_eos=True), SpecConfig(drafter)
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    answers = set[tuple[tuple[int, ...], ...]]()
    for turn in range(options.repeats + _WARM_UP_TURNS):
        for side in sorted(sides, reverse=bool(turn % 2)):
            llm = sides[side]
            if side == "one process":
                torch.set_num_threads(options.threads)  # ranks set their own
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, spec)
            elapsed_s = time.perf_counter() - began
            answers.add(tuple(out.token_ids for out in outputs))
            if turn >= _WARM_UP_TURNS:
                speeds[side].append(count * options.tokens / elapsed_s)
    return {"drafter": drafter, "requests": count, "tokens_per_s": speeds, "equal": len(answers) == 1}


if __name__ == "__main__":
    sys.exit(main())
