"""What a pass costs by the length of the text that it stands behind, over that of a short one.

    python -m studies.context_cost --models smollm2,DIR@int4 --contexts 100,512,2048,4096 --rows 1,4,8 --before DIR

Models are named as in `step_cost`. Keys and values are random numbers: no prompt is run. With `--before`, the compiled
layers of another checkout, whose root that is, take turns with this one's over the same weights and the same cache:
both must take the same structs, and give the same bits. Contexts, rows and layers take turns, so that drift hits all
alike, and ratios are those of passes of one turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import InputError
from foretoken.kernels.build import built
from foretoken.model import row_kernels
from foretoken.model.interface import Segment
from foretoken.model.paged import PagedModel
from foretoken.model.row_kernels import FLAGS, SOURCE, RowKernels
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file, whole_numbers, words
from studies.step_cost import opened

_NOW, _BEFORE = "now", "before"
_WARM_UP_TURNS = 2
Cell = tuple[str, int, int]  # layers, context, rows


def main() -> int:
    """Measure, print the tables, and with `--out` write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.context_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", type=words, required=True, help="MODEL or MODEL@FORMAT, separated by commas")
    parser.add_argument("--contexts", type=whole_numbers, default=(100, 512, 2048, 4096), help="the shortest first")
    parser.add_argument("--rows", type=whole_numbers, default=(1, 4, 8), help="of a chain of draft tokens")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--before", type=Path, help="root of another checkout")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    console, found = Console(stderr=True), []
    layers = _layers(options.before)
    for name in options.models:
        console.line(f"loading {name}")
        room = sum(context + max(options.rows) + 64 for context in options.contexts)
        model = opened(name, "cpu", room)
        if not isinstance(model, PagedModel) or model.numerics != "strict":
            raise InputError("models", name, "name one whose layers are all compiled, such as smollm2")
        times_ms: dict[Cell, list[float]] = defaultdict(list)
        for cell, elapsed_ms in measure(model, layers, options.contexts, options.rows, options.repeats):
            times_ms[cell].append(elapsed_ms)
        found.append(summary(name, model, options.contexts, times_ms))
    about = {"repeats": options.repeats, "threads": torch.get_num_threads()}
    record("context_cost", {**about, "models": found}, options.out)
    for one in found:
        Console().line(f"{one['model']}: {one['step_bytes'] / 1e6:.0f} MB of weights, cache in {one['cache_dtype']}")
        for row in one["cells"]:
            Console().line(_line(row))
    return 0


def _line(row: Mapping[str, Any]) -> str:
    over_before = f" | {_spread(row['over_before'])}" if "over_before" in row else ""
    numbers = f"{row['median_ms']:.2f} ms | {row['cache_bytes'] / 1e6:.0f} MB | {_spread(row['over_shortest'])}"
    return f"| {row['layers']} | {row['context']} | {row['rows']} | {numbers}{over_before} |"


def _spread(quantiles: Mapping[str, float]) -> str:
    return f"{quantiles['median']:.2f} ({quantiles['low']:.2f}-{quantiles['high']:.2f})"


def _layers(before: Path | None) -> dict[str, RowKernels]:
    """The compiled layers of this checkout, and of the one at `before`.

    Raises:
        BuildError: they cannot be compiled, or take other structs.
    """
    own = {_NOW: row_kernels.load(built(SOURCE, FLAGS))}
    if before is None:
        return own
    source = before / SOURCE.relative_to(SOURCE.parents[2])
    if not source.is_file():
        raise InputError("before", str(before), "give the root of a checkout of foretoken")
    return {_BEFORE: row_kernels.load(built(source, FLAGS)), **own}


@contextmanager
def _running(kernels: RowKernels) -> Iterator[None]:
    """Forwards inside run `kernels`."""
    usual = row_kernels.row_kernels
    setattr(row_kernels, "row_kernels", lambda: kernels)  # noqa: B010  a function is no variable to mypy
    try:
        yield
    finally:
        setattr(row_kernels, "row_kernels", usual)  # noqa: B010


def measure(
    model: PagedModel, layers: Mapping[str, RowKernels], contexts: Sequence[int], counts: Sequence[int], repeats: int
) -> Iterator[tuple[Cell, float]]:
    """Milliseconds of single passes, the cells of a turn behind one another; the first turns warm up."""
    generator = torch.Generator().manual_seed(0)
    for own in (*model.pool.keys, *model.pool.values):
        own.normal_(generator=generator)
    for sequence, context in enumerate(contexts):
        model.open(sequence)
        assert model.reserve(sequence, context)
        model.commit(sequence, context)
    for turn in range(repeats + _WARM_UP_TURNS):
        for (sequence, context), count in product(enumerate(contexts), counts):
            tokens = torch.randint(model.vocab_size, (count,), generator=generator)
            segment = Segment(sequence, 1, tuple(range(-1, count - 2)), count)
            logits = []
            in_turns = list(layers.items())[:: -1 if turn % 2 else 1]  # who is second finds more in the caches
            for name, kernels in in_turns:
                with _running(kernels):
                    began = time.perf_counter()
                    logits.append(model.forward(tokens, [segment]).logits)
                    elapsed_ms = (time.perf_counter() - began) * 1e3
                if turn >= _WARM_UP_TURNS:
                    yield (name, context, count), elapsed_ms
            assert all(torch.equal(logits[0], other) for other in logits[1:]), "other bits than before"


def summary(
    name: str, model: PagedModel, contexts: Sequence[int], times_ms: Mapping[Cell, Sequence[float]]
) -> dict[str, Any]:
    """Medians by cell; ratios to the shortest context and to the layers before, turn by turn."""
    cells = []
    for (layers, context, rows), own in times_ms.items():
        cell: dict[str, Any] = {"layers": layers, "context": context, "rows": rows, "median_ms": statistics.median(own)}
        cell["cache_bytes"] = context * model.kv_bytes_per_token
        cell["over_shortest"] = _quantiles(own, times_ms[layers, contexts[0], rows])
        if layers == _NOW and (_BEFORE, context, rows) in times_ms:
            cell["over_before"] = _quantiles(own, times_ms[_BEFORE, context, rows])
        cells.append({**cell, "milliseconds": list(own)})
    about = {"step_bytes": model.step_bytes, "cache_dtype": str(model.dtype).removeprefix("torch.")}
    return {"model": name, **about, "cells": cells}


def _quantiles(some: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Of the ratios of `some` to `others`: the median, and what a tenth of them is below and above."""
    ratios = sorted(one / other for one, other in zip(some, others, strict=True))
    tenth = len(ratios) // 10
    return {"median": statistics.median(ratios), "low": ratios[tenth], "high": ratios[-1 - tenth]}


if __name__ == "__main__":
    sys.exit(main())
