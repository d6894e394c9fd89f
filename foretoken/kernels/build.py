"""From a C++ file to a shared library: one that the wheel brought along, else compiled with this machine's compiler on
first use and kept.

A compiled library is `kernels/NAME-HASH.so` in the cache folder, named by the sources, the compiler with its flags, and
the processor, because `-march=native` makes code for this one only. Its last 32 bytes are the SHA-256 of the rest: a
file that was cut short is built anew rather than mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from foretoken.errors import warn
from foretoken.files import CACHE_VARIABLE, cache_folder
from foretoken.kernels import prebuilt
from foretoken.machine import identity

# No fused multiplications: the twin in torch rounds products and sums on their own.
FLAGS = ("-std=c++17", "-O3", prebuilt.NATIVE, "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("g++", "c++", "clang++")  # looked for in this order where CXX names none
_DIGEST_BYTES = 32
_MAX_S = 300.0  # it takes ten seconds, more on a busy machine; a compiler that hangs must not hang us
_MAX_WORDS = 300  # characters of a compiler's complaint
_LOCK = ".lock"  # in the cache folder: workers that start together compile a source once

_Library = TypeVar("_Library")


class BuildError(Exception):
    """There is no library; the message says why, and what to do about it."""


class KernelWarning(UserWarning):
    """A kernel could not be compiled and a slower one stands in; the message ends with a remedy."""


def loaded(
    source: Path, load: Callable[[Path], _Library], without: str, flags: tuple[str, ...] = FLAGS
) -> _Library | None:
    """What `load` makes of the library of `source`; None, with a warning that says what happens `without` it, where
    there is none. Whoever asks keeps the answer.
    """
    try:
        return load(built(source, flags))
    except BuildError as error:
        warn(KernelWarning(f"{without}: {error}"), stacklevel=3)
        return None


def built(source: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """The library made of `source`: prebuilt, from the cache, or compiled now.

    Raises:
        BuildError: no compiler, one that fails, or a cache folder that cannot be written.
    """
    brought = prebuilt.library(source, flags)
    if brought is not None:
        return brought
    compiler = _compiler()
    named = (*prebuilt.texts(source), *compiler, *flags, _processor())
    key = hashlib.sha256("\0".join(named).encode()).hexdigest()[:24]
    path = cache_folder("kernels") / f"{source.stem}-{key}.so"
    try:
        if not _is_whole(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(path.parent / _LOCK, timeout=_MAX_S):
                if not _is_whole(path):  # nobody else compiled it meanwhile
                    _compile_to(path, source, flags)
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
    except OSError as error:  # a file system mounted noexec, which another copy would not help, or a broken file
        raise BuildError(
            f"the compiled library cannot be loaded ({error}); set {CACHE_VARIABLE} to a folder that programs may run "
            f"from, or delete {path}"
        ) from error
    try:
        found: int = getattr(library, interface)()
    except AttributeError as error:
        raise BuildError(f"the compiled library is none of ours ({error}); delete {path}") from error
    if found != number:
        raise BuildError(f"{path} has interface {found}, not {number}; delete it")
    return library


def kernels_from() -> str:
    """Where the libraries come from on this machine, in words."""
    best = prebuilt.best_of(identity.flags()) if prebuilt.FOLDER.is_dir() else None
    if best is not None:
        return f"in the wheel, for {best.name}"
    compiler = found_compiler()
    is_there = compiler is not None and shutil.which(compiler[0]) is not None
    return "compiled on first use" if is_there else "torch's slower operations: no compiler"


def found_compiler() -> list[str] | None:
    """The words that start the compiler; None where none was found."""
    given = shlex.split(os.environ.get("CXX", ""))
    found = next((found for found in map(shutil.which, COMPILERS) if found is not None), None)
    return given or (None if found is None else [found])


def _compiler() -> list[str]:
    compiler = found_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found; install g++ (Debian: apt install g++), or name one in CXX")
    return compiler


def compile_library(source: Path, flags: tuple[str, ...], path: Path) -> None:
    """Compile `source` into the library `path`.

    Raises:
        BuildError: no compiler, or one that fails.
    """
    command = [*_compiler(), *flags, str(source)]
    try:
        returncode, complaint = _run([*command, "-o", str(path)])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]} cannot be run ({error}); name another in CXX") from error
    if returncode != 0 or not path.exists():
        words = " ".join(complaint.split())[:_MAX_WORDS]
        raise BuildError(f"the C++ compiler {command[0]} failed ({words}); install g++, or name another one in CXX")


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and complaints of a compiler that has `_MAX_S`; the processes that it started end with it."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            complaint = process.communicate(timeout=_MAX_S)[1]
        except BaseException:  # also a signal that ends us, which its own session does not get
            with contextlib.suppress(ProcessLookupError):  # all have ended meanwhile
                os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
            raise
    return process.returncode, complaint


def _compile_to(path: Path, source: Path, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
        made = Path(folder) / path.name
        compile_library(source, flags, made)
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
        os.replace(made, path)


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    data = path.read_bytes()
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


@functools.cache
def _processor() -> str:
    """What code for this processor depends on."""
    told = (identity.processor(), identity.stepping() or "", *sorted(identity.flags()))
    return "\n".join((platform.machine(), platform.processor(), *told))
