"""Where llama.cpp's programs are, what they can do, and GGUF copies of checkpoints that its converter makes.

They are found through two settings of the environment:

    FORETOKEN_LLAMA_CPP          folder with the programs llama-bench and llama-speculative-simple
    FORETOKEN_LLAMA_CPP_CONVERT  convert_hf_to_gguf.py; not needed where it lies in a folder above the programs
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from foretoken.errors import ForetokenError, StorageError
from foretoken.files import read_json
from foretoken.model.gguf.header import is_gguf

LLAMA_CPP = "llama.cpp"
FOLDER_VARIABLE = "FORETOKEN_LLAMA_CPP"
_TIMEOUT_S = 1800
_MAX_RUNS = 3
_Result = TypeVar("_Result")
_GGUF_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass
class LlamaCpp:
    """Where llama.cpp's programs are, and its converter."""

    bench: Path
    speculative: Path
    converter: Path | None

    @classmethod
    def find(cls, folder: Path) -> LlamaCpp:
        """Look for the programs in `folder`, its `bin` and `build/bin`.

        Raises:
            StorageError: a program is missing.
        """
        for place in (folder, folder / "bin", folder / "build" / "bin"):
            bench, speculative = place / "llama-bench", place / "llama-speculative-simple"
            if bench.is_file() and speculative.is_file():
                break
        else:
            raise StorageError(
                f"FORETOKEN_LLAMA_CPP={folder}: no llama-bench and llama-speculative-simple there, in "
                "bin/ or in build/bin/"
            )
        named = os.environ.get("FORETOKEN_LLAMA_CPP_CONVERT")
        near = (
            [Path(named)]
            if named
            else [above / "convert_hf_to_gguf.py" for above in (place, *place.resolve().parents[:4])]
        )
        return cls(bench, speculative, next((path for path in near if path.is_file()), None))

    def program(self, name: str) -> Path:
        """Where a program lies, or would."""
        return self.speculative.with_name(name)

    @cached_property
    def spec_types(self) -> frozenset[str]:
        """The kinds of speculation that the program names in its help."""
        listed = re.search(r"--spec-type\s+(\S+)", "\n".join(run_program([str(self.speculative), "--help"])))
        return frozenset(listed.group(1).split(",")) if listed else frozenset()

    def version(self) -> str:
        """What the program says about itself."""
        found = re.search(r"version:\s*(.+)", "\n".join(run_program([str(self.speculative), "--version"])))
        return found.group(1).strip() if found else "unknown"

    def as_gguf(self, checkpoint: Path, dtype: str = "auto") -> Path:
        """A GGUF file as it is; a folder converted to `dtype` ("auto": its own), see `convert`."""
        if is_gguf(checkpoint):
            return checkpoint
        config = _object_of(checkpoint / "config.json")
        named = str(config.get("dtype") or config.get("torch_dtype")) if dtype == "auto" else dtype
        return self.convert(checkpoint, _GGUF_TYPES.get(named, "bf16"))

    def convert(self, checkpoint: Path, outtype: str, gguf: Path | None = None) -> Path:
        """The checkpoint in a folder as a GGUF file, by default next to it; made again when the checkpoint is newer.

        Raises:
            StorageError: no converter; ForetokenError: the converter failed.
        """
        gguf = gguf or checkpoint.resolve().with_name(f"{checkpoint.resolve().name}-{outtype}.gguf")
        sources = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.json")]
        if gguf.is_file() and all(gguf.stat().st_mtime >= source.stat().st_mtime for source in sources):
            return gguf
        return self.converted(checkpoint, outtype, gguf, tokenizer=checkpoint)

    def converted(self, checkpoint: Path, outtype: str, gguf: Path, tokenizer: Path, *more: str) -> Path:
        """What the converter makes of a folder, whose tokenizer is in the folder `tokenizer`, with `more` arguments.

        Raises:
            StorageError, ForetokenError: see `convert`.
        """
        if self.converter is None:
            raise StorageError("convert_hf_to_gguf.py was not found; name it in FORETOKEN_LLAMA_CPP_CONVERT")
        part = gguf.with_suffix(f".{os.getpid()}.part")  # two processes may convert the same checkpoint
        wrapper = ["-c", _CONVERT] if _is_gpt2_style(tokenizer) else []
        command = [sys.executable, *wrapper, str(self.converter), str(checkpoint), *more]
        try:
            run_program([*command, "--outtype", outtype, "--outfile", str(part)])
            part.replace(gguf)
        finally:
            part.unlink(missing_ok=True)
        return gguf


# The converter knows a byte-level BPE by a hash of what it makes of a sample text, so any newly trained one is unknown
# to it. `_is_gpt2_style` has made sure that such a one splits text as GPT-2's does. The second change spares the
# sentencepiece package, which the converter imports only to find that the checkpoint has no such model.
_CONVERT = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
folder = Path(sys.argv[0]).resolve().parent
sys.path[:0] = [str(folder), str(folder / "gguf-py")]
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def pre(self, tokenizer):
    try:
        return known(self, tokenizer)
    except RuntimeError:  # the kind of it that the converter raises for a tokenizer it does not know
        return "gpt-2"
def no_sentencepiece(self):
    raise FileNotFoundError("tokenizer.model")
TextModel.get_vocab_base_pre = pre
TextModel._set_vocab_sentencepiece = no_sentencepiece
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _is_gpt2_style(checkpoint: Path) -> bool:
    """Whether the tokenizer is a byte-level BPE that splits text by GPT-2's own expression and nothing else."""
    tokenizer = _object_of(checkpoint / "tokenizer.json")
    before = tokenizer.get("pre_tokenizer") or {}
    plain = (
        before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space", True)
    )
    return bool(plain) and tokenizer.get("model", {}).get("type") == "BPE" and tokenizer.get("normalizer") is None


def parsed(command: list[str], parse: Callable[[str, str], _Result]) -> _Result:
    """What `parse` makes of the output and error stream of a program that ended well.

    The programs write their log from a thread of its own and may end before it is done (ggml-org/llama.cpp issue
    22142), so a program whose result is missing is run again.

    Raises:
        ForetokenError: see `run_program`; or `parse` found no result in any of the runs.
    """
    for left in reversed(range(_MAX_RUNS)):
        output, log = run_program(command)
        try:
            return parse(output, log)
        except ForetokenError:
            if not left:
                raise
    raise AssertionError("the last run returns or raises")


def run_program(command: list[str]) -> tuple[str, str]:
    """Standard output and error stream of a program that ended well.

    Raises:
        ForetokenError: it cannot be started, ran for half an hour, or ended with a code.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ForetokenError(f"{Path(command[0]).name}: {error}") from error
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode != 0:
        raise ForetokenError(
            f"{Path(command[0]).name} ended with code {done.returncode}: {' | '.join(err.strip().splitlines()[-3:])}"
        )
    return out, err


def _object_of(path: Path) -> dict[str, Any]:
    content = read_json("model", path)
    return content if isinstance(content, dict) else {}
