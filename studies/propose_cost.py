"""What proposing costs: each drafter that asks no model, for one request and step, at a given length of context and
store.

    python -m studies.propose_cost --context 32000 --store 200000 --num-draft 8 --out benchmarks/propose-cost.json

Texts are the running Python's library, cut into words and signs, so that common ones are as common as in practice; a
random text would match nowhere. Timed are propose and commit of one request, over many places of the text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Drafter, Feedback
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from studies.command import record, setting_of

VOCAB = 32_000
_TOP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32_000)
    parser.add_argument("--store", type=int, default=200_000)
    parser.add_argument("--num-draft", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = source_tokens(options.store + options.context + options.steps)
    context, answer = text[options.store : options.store + options.context], text[options.store + options.context :]
    found = {}
    for name, make in makers(text[: options.store], context).items():
        found[name] = cost(make(), context, answer, options.num_draft)
        row = found[name]
        print(
            f"{name:28s} propose {row['propose_ms']:6.3f} ms (middle 80 %: {row['low_ms']:.3f} to {row['high_ms']:.3f})"
            f"  commit {row['commit_ms']:6.3f} ms  {row['nodes']:.1f} nodes  start {row['start_ms']:.0f} ms"
        )
    print(json.dumps(record("propose_cost", {"setting": setting_of(options), "costs": found}, options.out)))


def source_tokens(count: int) -> list[int]:
    """Words, runs of space and signs of the standard library, numbered as they come; rare ones share the last
    numbers.
    """
    numbers: dict[str, int] = {}
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for word in re.findall(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8", errors="replace")):
            tokens.append(numbers.setdefault(word, len(numbers)) % VOCAB)
        if len(tokens) >= count:
            return tokens[:count]
    raise SystemExit(f"the library holds only {len(tokens)} tokens; ask for a smaller store or context")


def makers(store: Sequence[int], context: Sequence[int]) -> dict[str, Callable[[], Drafter]]:
    """Every drafter as it stands after a while of use."""

    def suffix_with_store() -> Drafter:
        drafter = SuffixDrafter(store_tokens=len(store) + 4096)
        for start in range(0, len(store), 1000):
            request = Request(1, (0,), SamplingParams(), SpecConfig("suffix"), 0)
            drafter.start(request)
            piece = tuple(store[start : start + 1000])
            verdict = Verdict(((),), (piece[:-1],), piece[-1:], ("bonus",))
            drafter.commit(
                Batch((BatchEntry(request, 0, (0,), True, 0),)), NOTHING, verdict, Feedback(torch.empty(0, 0), ())
            )
            drafter.finish(1)
        print(f"  store of {drafter.num_stored_tokens} tokens takes {drafter.num_bytes / 2**20:.0f} MiB")
        return drafter

    def recycling() -> Drafter:
        drafter = RecyclingDrafter(VOCAB)
        followers: dict[int, list[int]] = {}
        for before, after in itertools.pairwise(context):
            row = followers.setdefault(before, [])
            if after not in row and len(row) < _TOP:
                row.append(after)
        for before, row in followers.items():
            drafter.successors[before, : len(row)] = row
        return drafter

    return {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "suffix, corpus": lambda: SuffixDrafter(corpus=store),
        "suffix, store": suffix_with_store,
        "recycling": recycling,
    }


NOTHING = Draft(torch.empty(0, dtype=torch.int64), (), (0, 0), (None,))


def cost(drafter: Drafter, context: Sequence[int], answer: Sequence[int], num_draft: int) -> dict[str, float]:
    """Milliseconds per propose and commit, one token of `answer` a step."""
    request = Request(0, tuple(context), SamplingParams(), SpecConfig(drafter.name), 0)
    start = time.perf_counter()
    drafter.start(request)
    started = time.perf_counter()
    logits = torch.randn(1, VOCAB)
    proposing, committing, nodes = [], [], 0
    position, anchor = len(context) - 1, context[-1]
    for token in answer:
        batch = Batch((BatchEntry(request, position, (anchor,), True, num_draft),))
        before = time.perf_counter()
        draft = drafter.propose(batch)
        between = time.perf_counter()
        drafter.commit(batch, NOTHING, Verdict(((),), ((),), (token,), ("residual",)), Feedback(logits, (0,)))
        committing.append(time.perf_counter() - between)
        proposing.append(between - before)
        nodes += draft.num_nodes
        position, anchor = position + 1, token
    ordered = sorted(proposing)
    tenth = len(ordered) // 10
    return {
        "propose_ms": 1e3 * statistics.median(ordered),
        "low_ms": 1e3 * ordered[tenth],
        "high_ms": 1e3 * ordered[-1 - tenth],
        "commit_ms": 1e3 * statistics.median(committing),
        "start_ms": 1e3 * (started - start),
        "nodes": nodes / len(answer),
    }


if __name__ == "__main__":
    main()
