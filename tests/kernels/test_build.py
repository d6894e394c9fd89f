"""Kernels are compiled once, kept, built anew when their file is broken, and done without where that cannot be."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.kernels import build
from foretoken.kernels.build import BuildError, KernelWarning, built
from foretoken.kernels.sampling import sampling_kernel
from foretoken.model.chain_kernel import chain_library
from foretoken.model.matrices.dense import kernel as dense_kernel
from foretoken.model.matrices.grouped_kernel import GroupedWeight, kernel, load
from foretoken.model.row_kernels import row_kernels
from tests.helpers.grouped import grouped

KERNELS: dict[str, tuple[Any, str]] = {
    "chain": (chain_library, "heads draft"),
    "dense": (dense_kernel, "plain matrices"),
    "grouped": (kernel, "quantised weights"),
    "rows": (row_kernels, "attention, norms and gates"),
    "sampling": (sampling_kernel, "tokens are sampled"),
}
SOURCE = """extern "C" {
int foretoken_grouped_interface() { return 99; }
bool foretoken_grouped_multiply() { return true; }
}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that compiles in no time, and an empty cache folder."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE)
    return path


def no_compiler(*args: object, **options: object) -> object:
    raise AssertionError("the compiler was started")


def test_a_library_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built(source)
    assert path.parent == source.parent / "cache" / "kernels"
    assert {one.name for one in path.parent.iterdir()} == {path.name, build._LOCK}
    monkeypatch.setattr(subprocess, "Popen", no_compiler)
    assert built(source) == path


def test_workers_that_start_together_compile_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_library, asked, compiled = build.compile_library, threading.Barrier(2), list[Path]()

    def counted(*arguments: Any) -> None:
        compiled.append(source)
        compile_library(*arguments)

    def ask() -> Path:
        asked.wait()
        return built(source)

    monkeypatch.setattr(build, "compile_library", counted)
    with ThreadPoolExecutor(2) as workers:
        paths = [future.result() for future in [workers.submit(ask) for _ in range(2)]]
    assert paths[0] == paths[1]
    assert compiled == [source]


def test_another_source_or_other_flags_are_another_library(source: Path) -> None:
    first, other = built(source), built(source, (*build.FLAGS, "-DOTHER"))
    source.write_text(SOURCE + "// changed\n")
    assert len({first, other, built(source)}) == 3


def test_what_is_included_belongs_to_the_source(source: Path) -> None:
    outer, inner = source.parent / "outer.h", source.parent / "inner.h"
    source.write_text('#include <vector>\n#include "outer.h"\n' + SOURCE)
    outer.write_text('#include "inner.h"\n')
    inner.write_text("")
    first = built(source)
    inner.write_text("// changed\n")
    assert built(source) != first


@pytest.mark.parametrize("harm", ["cut", "changed", "empty"])
def test_a_broken_file_is_built_anew(source: Path, harm: str) -> None:
    path = built(source)
    data = path.read_bytes()
    broken = {"cut": data[: len(data) // 2], "changed": data[:100] + bytes([data[100] ^ 1]) + data[101:], "empty": b""}
    path.unlink()  # not in place: another test may have it mapped
    path.write_bytes(broken[harm])
    assert built(source) == path
    assert build._is_whole(path)
    with pytest.raises(BuildError, match="interface 99"):
        load(path)


def test_no_compiler_and_a_failing_one_say_what_to_do(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(BuildError, match=r"cannot be run .* name another in CXX"):
        built(source)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match=r"false failed .* install g\+\+"):
        built(source)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(source.parent / "empty"))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found; install g\+\+"):
        built(source)
    assert os.listdir(source.parent / "cache" / "kernels") == [build._LOCK]


def test_what_a_compiler_started_ends_with_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `cc1plus`, which works on when the `g++` that started it is gone."""
    alive, compiler = source.parent / "alive", source.parent / "compiler"
    os.mkfifo(alive)
    compiler.write_text(f"#!/bin/sh\nexec 3>{alive}\nsleep 3 &\nwait\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "_MAX_S", 0.1)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(alive, os.O_WRONLY)
    with pytest.raises(BuildError, match="timed out"):
        built(source)
    os.close(writer)
    is_closed = bool(select.select([reader], [], [], 1)[0])
    os.close(reader)
    assert is_closed, "another process has the other end"


def test_a_folder_that_no_program_may_run_from(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> object:
        raise OSError(f"{path}: failed to map segment from shared object")

    path = built(source)
    monkeypatch.setattr(ctypes, "CDLL", refused)
    with pytest.raises(BuildError, match=r"failed to map .* set FORETOKEN_CACHE to a folder that programs may run"):
        load(path)


def test_a_folder_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent / "file").write_text("")
    monkeypatch.setenv("FORETOKEN_CACHE", str(source.parent / "file"))
    with pytest.raises(BuildError, match="set FORETOKEN_CACHE to a folder"):
        built(source)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_no_kernel_is_missing_in_silence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.warns(KernelWarning, match=f"{KERNELS[name][1]}.*slower.*: .*name another in CXX"):
        assert KERNELS[name][0].__wrapped__() is None


def test_a_kernel_is_done_without_where_filters_make_an_error_of_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unheard: list[str]
) -> None:
    """The step that asks for a kernel first failed, and every later one, too."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    for asked, words in KERNELS.values():
        assert asked.__wrapped__() is None
        assert words in unheard.pop()


def test_without_a_compiler_there_is_one_warning_and_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = GroupedWeight.of(grouped("Q4_0", 33, 64), torch.float32), torch.randn(3, 64)
    expected = weight.multiply(x, None)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    weight = replace(weight)  # a weight looks for the kernel once
    kernel.cache_clear()
    try:
        with pytest.warns(KernelWarning, match="name another in CXX") as heard:
            found = [weight.multiply(x, None) for _ in range(2)]
        assert len(heard) == 1
        assert all(torch.equal(one, expected) for one in found)
    finally:
        kernel.cache_clear()
