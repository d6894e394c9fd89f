"""How many bytes per second a device reads and writes when it copies: the limit that a plain step is held against."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from foretoken.errors import InputError
from foretoken.model.open import open_device
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file


def main() -> int:
    """Measure, print the median, and with `--out` write the record."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.copy_bandwidth", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mebibytes", type=int, default=2048, help="memory that is copied")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    device = open_device(options.device)
    seconds = copy_s(device, options.mebibytes << 20, options.repeats)
    moved = 2 * (options.mebibytes << 20)  # read, and written
    speed = moved / statistics.median(seconds)
    record("gpu.copy_bandwidth", {"moved_bytes": moved, "seconds": seconds, "bytes_per_s": speed}, options.out)
    Console().line(f"{speed / 1e9:.0f} GB/s")
    return 0


def copy_s(device: torch.device, size_bytes: int, repeats: int) -> list[float]:
    """Seconds of each copy of so many bytes; the first two are not counted.

    Raises:
        InputError: nothing to copy.
    """
    if size_bytes <= 0 or repeats <= 0:
        raise InputError("mebibytes", size_bytes >> 20, "copy at least one mebibyte, at least once")
    source = torch.randint(-128, 127, (size_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    found = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        found.append(time.perf_counter() - began)
    if not torch.equal(source, target):
        raise InputError("device", str(device), "what was copied is not what was read")
    return found[2:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
