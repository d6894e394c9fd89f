"""Libraries that a wheel brings along, compiled for common instruction sets; a checkout has none.

A library is `prebuilt/NAME-HASH.so` beside the sources, named by them and by the flags it was compiled with: of another
version it is not found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from foretoken.machine import identity

FOLDER = Path(__file__).resolve().parent / "prebuilt"
NATIVE = "-march=native"
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class InstructionSet:
    """What a library may use: a processor as GCC's `-march` names it, and the features it needs of another one, as
    `/proc/cpuinfo` names them.
    """

    name: str
    features: frozenset[str]


_HASWELL = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_CASCADE_LAKE = _HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "adx"}
# The best one first.
INSTRUCTION_SETS = (
    InstructionSet("cooperlake", _CASCADE_LAKE | {"avx512_bf16"}),
    InstructionSet("cascadelake", _CASCADE_LAKE),
    InstructionSet("haswell", _HASWELL),
)


def best_of(features: Iterable[str]) -> InstructionSet | None:
    """The best instruction set that a processor with `features` runs."""
    own = frozenset(features)
    return next((one for one in INSTRUCTION_SETS if one.features <= own), None)


def flags_for(instructions: InstructionSet, flags: tuple[str, ...]) -> tuple[str, ...]:
    """`flags` with `instructions` in place of this machine's own, for processors of any maker."""
    own = (f"-march={instructions.name}", "-mtune=generic")
    return (*(flag for flag in flags if flag != NATIVE), *own)


def library_name(source: Path, flags: tuple[str, ...]) -> str:
    """The file name of the library that these `flags` make of `source`."""
    key = hashlib.sha256("\0".join((*texts(source), *flags)).encode()).hexdigest()[:24]
    return f"{source.stem}-{key}.so"


def library(source: Path, flags: tuple[str, ...]) -> Path | None:
    """The wheel's library for this processor, if there is one and `flags` ask for this processor's."""
    if NATIVE not in flags or not FOLDER.is_dir():
        return None
    instructions = best_of(identity.flags())
    path = None if instructions is None else FOLDER / library_name(source, flags_for(instructions, flags))
    return path if path is not None and path.is_file() else None


def texts(source: Path) -> list[str]:
    """The text of `source` and of what it includes from its own folder."""
    text = source.read_text(encoding="utf-8")
    return [text, *(other for name in _INCLUDED.findall(text) for other in texts(source.parent / name))]
