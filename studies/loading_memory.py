"""Memory that loading a model takes at its peak, beside the size of its files.

    python -m studies.loading_memory target-Q4_K_M.gguf target-Q8_0.gguf --out benchmarks/loading-memory.json

Each model is loaded in a process of its own, which has compiled its kernels before. The peak is the largest resident
set since then (VmHWM of /proc; Linux only): it counts pages of mapped files too. Nothing is timed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from foretoken.errors import ForetokenError, StorageError
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file, setting_of

_LOAD = """
import sys
from pathlib import Path
from foretoken.model.matrices import grouped_kernel
from foretoken.model.matrices import dense as dense_kernel
from foretoken.model.loader import load_decoder

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

grouped_kernel.kernel()
dense_kernel.kernel()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
decoder = load_decoder(Path(sys.argv[1]))
print(status("VmHWM") - before, status("VmRSS") - before, decoder.weight_bytes)
"""


def main() -> int:
    """Measure, print a line for each model, and write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.loading_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", help="folders of checkpoints, hub ids or GGUF files")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    return exit_code_of(lambda: _run(parser.parse_args()))


def _run(options: argparse.Namespace) -> int:
    if not Path("/proc/self/clear_refs").exists():
        raise StorageError("this system does not tell the peak of a process; run the study on Linux")
    rows = []
    for name in options.models:
        row = measure(model_folder(name))
        rows.append(row)
        Console().line(
            f"{row['model']}: {row['file_bytes'] / 2**20:,.0f} MiB on disk, at most {row['peak_bytes'] / 2**20:,.0f} "
            f"in memory while loading ({row['peak_over_file']:.3f} times), {row['kept_bytes'] / 2**20:,.0f} after it"
        )
    record("loading_memory", {"setting": setting_of(options), "rows": rows}, options.out)
    return 0


def measure(path: Path) -> dict[str, Any]:
    """Bytes of one model: its files, the peak while it is loaded, what is resident then, and its weights.

    Raises:
        ForetokenError: it cannot be loaded.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    done = subprocess.run([sys.executable, "-c", _LOAD, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForetokenError(
            f"{path} cannot be loaded: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    size = sum(file.stat().st_size for file in files)
    peak, kept, weights = map(int, done.stdout.split())
    return {
        "model": path.name,
        "file_bytes": size,
        "peak_bytes": peak,
        "kept_bytes": kept,
        "weight_bytes": weights,
        "peak_over_file": round(peak / size, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
