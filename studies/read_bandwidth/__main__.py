"""How many bytes per second are read from memory, by threads and by pages.

    python -m studies.read_bandwidth --mebibytes 1024 --threads 1,2 --repeats 5 --out bandwidth.json

The memory holds random numbers and is far larger than the caches; the sum of what was read is checked. A buffer of
equal bytes, or a sum that nobody looks at, gave figures three times as high. Kinds of pages and numbers of threads
take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from foretoken.kernels.build import built, opened
from foretoken.model.matrices.codes import large_page_tensor
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file, whole_numbers

_PAGES = ("ordinary", "large")


def main() -> int:
    """Measure, print the medians, and with `--out` write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.read_bandwidth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mebibytes", type=int, default=1024, help="memory that is read")
    parser.add_argument("--threads", type=whole_numbers, default=(1, 2))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    library, memory = reader(), buffers(options.mebibytes << 18)
    seconds = defaultdict[tuple[str, int], list[float]](list)
    for _ in range(options.repeats):
        for pages, words in memory.items():
            for threads in options.threads:
                seconds[pages, threads].append(read_s(library, words, threads))
    size = options.mebibytes << 20
    rows = [
        {"pages": pages, "threads": threads, "median_gb_per_s": size / statistics.median(own) / 1e9, "seconds": own}
        for (pages, threads), own in seconds.items()
    ]
    for row in rows:
        Console().line(f"{row['pages']} pages, {row['threads']} threads: {row['median_gb_per_s']:.1f} GB/s")
    record("read_bandwidth", {"bytes": size, "repeats": options.repeats, "rows": rows}, options.out)
    return 0


def reader() -> ctypes.CDLL:
    """The compiled function that reads."""
    library = opened(built(Path(__file__).with_name("read.cpp")), "foretoken_read_interface", 1)
    library.foretoken_read.restype = ctypes.c_uint32
    library.foretoken_read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    return library


def buffers(num_words: int) -> dict[str, torch.Tensor]:
    """The same random words [num_words] int32 in both kinds of pages."""
    large = large_page_tensor((num_words,), torch.int32)
    large.random_(-(2**31), 2**31, generator=torch.Generator().manual_seed(0))
    return dict(zip(_PAGES, (large.clone(), large), strict=True))


def read_s(library: ctypes.CDLL, words: torch.Tensor, threads: int) -> float:
    """Seconds of one pass over `words`."""
    wanted = int(words.sum(dtype=torch.int64)) % 2**32
    began = time.perf_counter()
    found = library.foretoken_read(words.data_ptr(), len(words), threads)
    elapsed_s = time.perf_counter() - began
    assert found == wanted, "not all of the memory was read"
    return elapsed_s


if __name__ == "__main__":
    sys.exit(main())
