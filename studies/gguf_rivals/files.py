"""GGUF files of a checkpoint, made by llama.cpp's own converter and quantiser.

    python -m studies.gguf_rivals.files --checkpoint DIR --types f16,Q8_0,Q4_0,Q4_K_M --out DIR

writes `NAME-TYPE.gguf` for the checkpoint folder NAME. What f16 does not name is quantised from it. Files that are
newer than the checkpoint are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from foretoken.backend.llama_programs import LlamaCpp, run_program
from foretoken.errors import StorageError
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from studies.command import exit_code_of, words

_PLAIN = ("f32", "f16", "bf16")  # what the converter writes itself
_BASE = "f16"  # of quantised files: what most published ones are made from


def main() -> int:
    """Write the files; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.gguf_rivals.files",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", default="reference:target", help="folder, hub id or reference:NAME")
    parser.add_argument("--types", type=words, default=("f16", "Q8_0", "Q4_0", "Q4_K_M"))
    parser.add_argument("--threads", type=int, default=1, help="of the quantiser")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    write_files(programs(), model_folder(options.checkpoint), options.types, options.out, options.threads)
    return 0


def programs() -> LlamaCpp:
    """The programs in the folder that FORETOKEN_LLAMA_CPP names.

    Raises:
        StorageError: it names none, or programs are missing there.
    """
    folder = os.environ.get("FORETOKEN_LLAMA_CPP")
    if not folder:
        raise StorageError("FORETOKEN_LLAMA_CPP does not name the folder of llama.cpp's programs")
    return LlamaCpp.find(Path(folder))


def write_files(llama: LlamaCpp, checkpoint: Path, types: Sequence[str], out: Path, threads: int) -> list[Path]:
    """The checkpoint in every type, in the folder `out`.

    Raises:
        StorageError: no converter, or `out` cannot be made.
        ForetokenError: the converter or the quantiser failed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {out}: {error}") from error
    console, found = Console(stderr=True), []
    for kind in types:
        console.line(f"{checkpoint.name} in {kind}")
        if kind in _PLAIN:
            found.append(llama.convert(checkpoint, kind, out / f"{checkpoint.name}-{kind}.gguf"))
            continue
        base = llama.convert(checkpoint, _BASE, out / f"{checkpoint.name}-{_BASE}.gguf")
        path = out / f"{checkpoint.name}-{kind}.gguf"
        if not path.is_file() or path.stat().st_mtime < base.stat().st_mtime:
            part = path.with_suffix(".part")
            run_program([str(llama.program("llama-quantize")), str(base), str(part), kind, str(threads)])
            part.replace(path)
        found.append(path)
    return found


if __name__ == "__main__":
    sys.exit(main())
