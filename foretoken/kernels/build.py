"""From a C++ file to a shared library: compiled with this machine's compiler on first use, then kept.

A library is `kernels/NAME-HASH.so` in the cache folder, named by the sources, the compiler with its flags, and the
processor, because `-march=native` makes code for this one only. Its last 32 bytes are the SHA-256 of the rest: a file
that was cut short is built anew rather than mapped.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from foretoken.files import CACHE_VARIABLE, cache_folder

# No fused multiplications: the twin in torch rounds products and sums on their own.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("g++", "c++", "clang++")  # looked for in this order where CXX names none
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_DIGEST_BYTES = 32
_MAX_S = 120.0  # it takes a few seconds; a compiler that hangs must not hang us
_MAX_WORDS = 300  # characters of a compiler's complaint


class BuildError(Exception):
    """There is no library; the message says why, and what to do about it."""


def built(source: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """The library made of `source`, from the cache or compiled now.

    Raises:
        BuildError: no compiler, one that fails, or a cache folder that cannot be written.
    """
    compiler = _compiler()
    named = (*_texts(source), *compiler, *flags, _processor())
    key = hashlib.sha256("\0".join(named).encode()).hexdigest()[:24]
    path = cache_folder("kernels") / f"{source.stem}-{key}.so"
    try:
        if not _is_whole(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
                _compile([*compiler, *flags, str(source)], Path(folder) / path.name)
                os.replace(Path(folder) / path.name, path)
    except OSError as error:
        raise BuildError(
            f"cannot keep a library in {path.parent} ({error}); set {CACHE_VARIABLE} to a folder"
        ) from error
    return path


def opened(path: Path, interface: str, number: int) -> ctypes.CDLL:
    """The compiled library `path`, whose function `interface` must return `number`: what its functions take.

    Its functions run without the interpreter's lock.

    Raises:
        BuildError: it cannot be loaded here, or is none of ours.
    """
    try:
        library = ctypes.CDLL(str(path))
        found: int = getattr(library, interface)()
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled library cannot be loaded ({error}); delete {path}") from error
    if found != number:
        raise BuildError(f"{path} has interface {found}, not {number}; delete it")
    return library


def _texts(source: Path) -> list[str]:
    """The text of `source` and of what it includes from its own folder."""
    text = source.read_text(encoding="utf-8")
    return [text, *(other for name in _INCLUDED.findall(text) for other in _texts(source.parent / name))]


def _compiler() -> list[str]:
    """The words that start the compiler."""
    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        return given
    found = next((found for found in map(shutil.which, COMPILERS) if found is not None), None)
    if found is None:
        raise BuildError("no C++ compiler was found; install g++ (Debian: apt install g++), or name one in CXX")
    return [found]


def _compile(command: list[str], path: Path) -> None:
    """Run the compiler, and append the digest to what it made."""
    try:
        done = subprocess.run(
            [*command, "-o", str(path)], capture_output=True, text=True, errors="replace", timeout=_MAX_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} cannot be run ({error}); name another in CXX") from error
    if done.returncode != 0 or not path.exists():
        words = " ".join(done.stderr.split())[:_MAX_WORDS]
        raise BuildError(f"the C++ compiler {command[0]} failed ({words}); install g++, or name another one in CXX")
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    data = path.read_bytes()
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


@functools.cache
def _processor() -> str:
    """What code for this processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)])
