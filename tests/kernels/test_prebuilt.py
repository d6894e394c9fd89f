"""Libraries that a wheel brings along: the best one that the processor runs, and never one of other sources."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest

from foretoken.kernels import prebuilt
from foretoken.kernels.build import FLAGS, BuildError, built, compile_library
from foretoken.kernels.prebuilt import INSTRUCTION_SETS, InstructionSet, best_of, flags_for, library, library_name

ZEN_3 = "fpu sse4_2 abm movbe f16c fma avx avx2 bmi1 bmi2 adx vaes"
CASCADE_LAKE = ZEN_3 + " avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
SAPPHIRE_RAPIDS = CASCADE_LAKE + " avx512_bf16 amx_tile amx_int8 amx_bf16"


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source, whose libraries stand in the wheel's folder for every instruction set; nothing can be compiled anew."""
    source, folder = tmp_path / "small.cpp", tmp_path / "prebuilt"
    source.write_text('#include "small.h"\nextern "C" { int answer() { return ANSWER; } }\n')
    (tmp_path / "small.h").write_text("#define ANSWER 42\n")
    folder.mkdir()
    for instructions in INSTRUCTION_SETS:
        own = flags_for(instructions, FLAGS)
        compile_library(source, own, folder / library_name(source, own))
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    return source


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (SAPPHIRE_RAPIDS, "cooperlake"),
        (CASCADE_LAKE, "cascadelake"),
        (ZEN_3, "haswell"),
        (CASCADE_LAKE.replace(" avx512_vnni", ""), "haswell"),
        (ZEN_3.replace(" fma", ""), None),
        ("", None),
    ],
)
def test_a_processor_gets_the_best_set_that_it_runs(features: str, name: str | None) -> None:
    found = best_of(features.split())
    assert (None if found is None else found.name) == name


def test_better_sets_come_first() -> None:
    for better, worse in itertools.pairwise(INSTRUCTION_SETS):
        assert better.features > worse.features


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS, ids=lambda one: one.name)
def test_what_was_brought_is_used(brought: Path, monkeypatch: pytest.MonkeyPatch, instructions: InstructionSet) -> None:
    monkeypatch.setattr(prebuilt.identity, "flags", lambda: instructions.features)
    own = flags_for(instructions, FLAGS)
    assert built(brought) == prebuilt.FOLDER / library_name(brought, own)
    assert "-march=native" not in own


def test_other_sources_flags_and_processors_are_compiled(brought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt.identity, "flags", lambda: INSTRUCTION_SETS[0].features)
    assert library(brought, FLAGS) is not None
    for flags in ((*FLAGS, "-DOTHER"), tuple(flag.replace("native", "x86-64") for flag in FLAGS)):
        assert library(brought, flags) is None
    monkeypatch.setattr(prebuilt.identity, "flags", frozenset)
    assert library(brought, FLAGS) is None
    monkeypatch.setattr(prebuilt.identity, "flags", lambda: INSTRUCTION_SETS[0].features)
    (brought.parent / "small.h").write_text("#define ANSWER 43\n")
    assert library(brought, FLAGS) is None
    with pytest.raises(BuildError, match="cannot be run"):
        built(brought)


def test_the_wheel_gets_every_kernel() -> None:
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "wheel.py"))
    assert {source for source, _ in script["LIBRARIES"]} == set(prebuilt.FOLDER.parent.glob("*.cpp"))


def test_a_checkout_has_none() -> None:
    assert not prebuilt.FOLDER.exists()
    assert library(Path(prebuilt.__file__), FLAGS) is None
