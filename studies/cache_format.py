"""What attention of a step costs by the format of the cache, with keys and values that lie in memory, not in a cache.

    python -m studies.cache_format --shapes 1x170,16x170,4x1500 --layers 30 --repeats 9 --out cache-format.json

`RxT`: R requests of T tokens, one row each. The heads are SmolLM2's (9, of 64 numbers, in 3 groups). Formats take
turns; before each measurement as much other memory is read as the processor's caches could hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict

import torch
from torch import Tensor

from foretoken.model.row_kernels import RowKernels, Scoring, SegmentRows, row_kernels
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file

_HEADS, _GROUPS, _SIZE = 9, 3, 64
_SPARE = 16  # slots between the texts of two requests
_FORMATS = (torch.float32, torch.float16)


def main() -> int:
    """Measure, print the medians, and with `--out` write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.cache_format",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", default="1x170,4x170,16x170,1x1500,4x1500")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    kernels = row_kernels()
    assert kernels is not None, "there is no compiler here"
    shapes = [tuple(map(int, one.split("x"))) for one in options.shapes.split(",")]
    seconds = defaultdict[tuple[str, str], list[float]](list)
    with torch.inference_mode():
        for requests, tokens in shapes:
            pools = {dtype: _pools(requests, tokens, dtype, options.layers) for dtype in _FORMATS}
            for _ in range(options.repeats):
                for dtype, pool in pools.items():
                    seconds[f"{requests}x{tokens}", str(dtype)].append(_pass_s(kernels, pool, requests, tokens))
    rows = [
        {"shape": shape, "format": dtype, "median_ms": 1e3 * statistics.median(own), "seconds": own}
        for (shape, dtype), own in seconds.items()
    ]
    for row in rows:
        Console().line(f"{row['shape']} {row['format']}: {row['median_ms']:.2f} ms")
    record("cache_format", {"layers": options.layers, "repeats": options.repeats, "rows": rows}, options.out)
    return 0


def _pools(requests: int, tokens: int, dtype: torch.dtype, layers: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, [groups, slots, size]."""
    shape = (_GROUPS, requests * (tokens + _SPARE), _SIZE)
    return [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(layers)]


def _pass_s(kernels: RowKernels, pools: list[tuple[Tensor, Tensor]], requests: int, tokens: int) -> float:
    """Seconds of the attention of one step, behind a read of 256 MB."""
    torch.ones(1 << 26).sum()
    query, key, value = (torch.randn(requests, heads, _SIZE) for heads in (_HEADS, _GROUPS, _GROUPS))
    first = [request * (tokens + _SPARE) for request in range(requests)]
    slots, out = torch.tensor(first) + tokens - 1, torch.empty(requests, _HEADS, _SIZE)
    segments = [
        SegmentRows(first_slot=slot, num_columns=tokens, num_rows=1, shared=tokens - 1, first_row=request)
        for request, slot in enumerate(first)
    ]
    began = time.perf_counter()
    for pool in pools:
        kernels.attend(pool, slots, (query, key, value), segments, Scoring(_SIZE**-0.5), out)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
