"""How far a pass is from what memory and arithmetic of this machine allow, by rows: the roofline of a model.

    python -m studies.roofline --target smollm2 --rows 1,2,4,8,16,64,512 --out roofline.json --plot roofline.svg

For each number of rows: a whole pass, its matrix products alone, the time in which memory is read once
(`read_bandwidth`), and the time in which the processor could multiply numbers that are in its registers already, with
AMX in tiles from 9 rows on. The four take turns. A pass computes logits of every row, as a verification does.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import InputError
from foretoken.kernels.build import built, opened
from foretoken.model.layers import Linear
from foretoken.model.paged import PagedModel
from foretoken.printing.console import Console
from studies import step_cost
from studies.command import exit_code_of, record, record_file, whole_numbers
from studies.read_bandwidth.__main__ import buffers as read_buffers
from studies.read_bandwidth.__main__ import read_s, reader

_READ_WORDS = 1 << 26  # 256 MiB: more than the caches of most processors
_PEAK_ROUNDS = 1 << 20
_VECTOR_ROWS = 12  # `MAX_ROWS` of block_vnni.h: more are multiplied in tiles where there are some
_FLOORS = ("memory", "vectors", "tiles")
_PARTS = ("pass", "products", "memory", "arithmetic")


def main() -> int:
    """Measure, print the table, and with `--out` and `--plot` write the record and the plot."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2", help="as `step_cost` names models")
    parser.add_argument("--rows", type=whole_numbers, default=(1, 2, 4, 8, 16, 64, 512))
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    parser.add_argument("--plot", type=Path, help="an image of the table")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    model = step_cost.opened(options.target, "cpu", options.context + max(options.rows))
    if not isinstance(model, PagedModel):
        raise InputError("--target", options.target, "name a model of the native decoder (docs/models.md)")
    matrices = [one for one in model.decoder.modules() if isinstance(one, Linear)]
    num_products = sum(one.in_features * one.out_features for one in matrices)
    times_ms, floors = _measured(options.target, model, matrices, options)
    bytes_per_s, vectors_per_s, tiles_per_s = (statistics.median(floors[name]) for name in _FLOORS)

    def products_per_s(count: int) -> float:
        return tiles_per_s if tiles_per_s and count > _VECTOR_ROWS else vectors_per_s

    rows = [
        {
            "rows": count,
            "pass_ms": statistics.median(times_ms["pass", count]),
            "products_ms": statistics.median(times_ms["products", count]),
            "memory_ms": 1e3 * model.step_bytes / bytes_per_s,
            "arithmetic_ms": 1e3 * num_products * count / products_per_s(count),
            "times_ms": {part: times_ms[part, count] for part in ("pass", "products")},
        }
        for count in options.rows
    ]
    about = {"target": options.target, "context": options.context, "threads": torch.get_num_threads()}
    sizes = {"step_bytes": model.step_bytes, "products_a_row": num_products}
    speeds = {
        "bytes_per_s": floors["memory"],
        "products_per_s": floors["vectors"],
        "products_per_s_in_tiles": floors["tiles"],
    }
    record("roofline", {**about, **sizes, **speeds, "rows": rows}, options.out)
    for row in rows:
        cells = " | ".join(f"{row[f'{part}_ms']:.2f}" for part in _PARTS)
        Console().line(f"| {row['rows']} | {cells} |")
    if options.plot is not None:
        _draw(rows, options.plot, f"{Path(options.target).name}, {torch.get_num_threads()} threads")
    return 0


def _floors(threads: int) -> Mapping[str, Callable[[], float]]:
    """What measures bytes and products per second of this machine."""
    words, read = read_buffers(_READ_WORDS)["large"], reader()
    peak = opened(built(Path(__file__).with_name("peak.cpp")), "foretoken_peak_interface", 2)

    def products_per_s(multiply: Callable[[int, int], int]) -> float:
        began = time.perf_counter()
        count = multiply(_PEAK_ROUNDS, threads)
        return count / (time.perf_counter() - began)

    for function in (peak.foretoken_peak, peak.foretoken_peak_tiles):
        function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_int64, ctypes.c_int)
    return {
        "memory": lambda: 4 * _READ_WORDS / read_s(read, words, threads),
        "vectors": lambda: products_per_s(peak.foretoken_peak),
        "tiles": lambda: products_per_s(peak.foretoken_peak_tiles),
    }


def _measured(
    name: str, model: PagedModel, matrices: Sequence[Linear], options: argparse.Namespace
) -> tuple[Mapping[tuple[str, int], Sequence[float]], Mapping[str, Sequence[float]]]:
    """Milliseconds by part and rows, after each pass its products alone; the floors' rates, once in every turn."""
    found, rates = defaultdict[tuple[str, int], list[float]](list), defaultdict[str, list[float]](list)
    floors = _floors(torch.get_num_threads())
    for _, count, elapsed_ms in step_cost.measure({name: model}, options.rows, options.context, options.repeats):
        found["pass", count].append(elapsed_ms)
        found["products", count].append(_products_ms(matrices, count))
        if count == options.rows[-1]:
            for part, rate in floors.items():
                rates[part].append(rate())
    return found, rates


def _products_ms(matrices: Sequence[Linear], count: int) -> float:
    # Few and large buffers: what hundreds of small ones leave to be returned is charged to the next pass.
    inputs = {width: torch.randn(count, width) for width in {one.in_features for one in matrices}}
    out = torch.ones(count * max(one.out_features for one in matrices))  # its pages are there before the time is taken
    calls = [_call(one, inputs[one.in_features], out) for one in matrices]
    began = time.perf_counter()
    with torch.inference_mode():
        for call in calls:
            call()
    return (time.perf_counter() - began) * 1e3


def _call(matrix: Linear, x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """The product of `x` [T, in] with `matrix`, into the beginning of `out`, with as little Python as can be."""
    product = None if matrix.packed is None else matrix.packed.product
    if product is None:
        return partial(matrix, x)
    function, threads = product.function, torch.get_num_threads()
    about = (product.width, product.parts, len(product.parts))

    def multiply() -> None:
        function(x.data_ptr(), len(x), *about, out.data_ptr(), product.num_outputs, False, threads)

    return multiply


def _draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    from matplotlib import pyplot as plt  # heavy, and only for this

    figure, axes = plt.subplots(figsize=(7, 4.2))
    labels = ("whole pass", "its products", "reading every weight once", "multiplying in registers")
    for part, label, style in zip(_PARTS, labels, ("o-", "s-", "--", ":"), strict=True):
        axes.plot([row["rows"] for row in rows], [row[f"{part}_ms"] for row in rows], style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="ms", title=title)
    axes.set_xticks([row["rows"] for row in rows], [str(row["rows"]) for row in rows], minor=False)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
