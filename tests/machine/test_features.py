"""What /proc says of the processor and of other processes, from files that the tests write."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from foretoken.machine.identity import PrecisionWarning, features, precision_advice, processor, warn_of_slow_bf16
from foretoken.machine.neighbours import neighbours
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from tests.helpers.checkpoints import tiny_checkpoint


@pytest.mark.parametrize(
    ("line", "has", "advice"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16", {"avx512", "vnni", "bf16", "amx_bf16"}, "AMX"),
        ("flags\t\t: avx2 avx512f avx512_vnni avx512_bf16", {"vnni", "bf16"}, "int8 too"),
        ("flags\t\t: avx2 avx_vnni", {"avx2", "vnni"}, "float32, or int8"),
        ("Features\t: fp asimd asimddp bf16", {"vnni", "bf16"}, "bfloat16"),
        ("flags\t\t: sse2", set(), "no bfloat16 arithmetic: float32"),
    ],
)
def test_instructions_decide_the_precision(tmp_path: Path, line: str, has: set[str], advice: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: A Processor\n{line}\n")
    found = features(tmp_path / "cpuinfo")
    assert found is not None
    assert has <= {name for name, there in found.items() if there}
    assert advice in precision_advice(found)
    assert processor(tmp_path / "cpuinfo") == "A Processor"


def test_nothing_is_known_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert features(tmp_path / "none") is None
    assert "unknown" in precision_advice(None)
    assert neighbours(proc=tmp_path / "none") is None


def test_the_busiest_processes_come_first(tmp_path: Path) -> None:
    def write(pid: int, name: str, ticks: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) R " + " ".join(["0"] * 10) + f" {ticks} 0 0\n")

    hertz = os.sysconf("SC_CLK_TCK")
    before = {1: ("init", 5), 7: ("a (b) c", 100), 8: ("loop", 100), os.getpid(): ("own", 0)}
    for pid, (name, ticks) in before.items():
        write(pid, name, ticks)
    (tmp_path / "9").mkdir()  # ended meanwhile

    def sleep(_seconds: float) -> None:
        write(7, "a (b) c", 100 + 5 * hertz)
        write(8, "loop", 100 + 10 * hertz)
        write(os.getpid(), "own", 10 * hertz)

    found = neighbours(10.0, proc=tmp_path, sleep=sleep)
    assert found is not None
    assert [(one.pid, one.name, one.cores) for one in found] == [(8, "loop", 1.0), (7, "a (b) c", 0.5)]


@pytest.mark.parametrize(("flags", "is_slow"), [("avx2 avx512f", True), ("avx512_bf16", False), ("amx_bf16", False)])
def test_a_bf16_model_on_a_processor_without_bf16_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, is_slow: bool
) -> None:
    """With the remedy, for a model whose matrices are in bfloat16, and not for the remedies themselves."""
    info = tmp_path / "cpuinfo"
    info.write_text(f"model name\t: A Processor\nflags\t\t: {flags}\n")
    monkeypatch.setattr("foretoken.model.open.warn_of_slow_bf16", lambda: warn_of_slow_bf16(info))
    gpt2 = tiny_checkpoint(tmp_path / "gpt2", "gpt2", dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for options in ({"dtype": "float32"}, {"weights": "int8"}):
            open_model(model_folder("reference:draft"), cache_tokens=64, device="cpu", **options)
        assert not heard
        open_model(model_folder("reference:draft"), cache_tokens=64, device="cpu")
        open_model(gpt2, cache_tokens=64, device="cpu")
    messages = [str(one.message) for one in heard if one.category is PrecisionWarning]
    assert len(messages) == is_slow
    assert all("A Processor" in text and "'float32'" in text and "weights='int8'" in text for text in messages)


def test_nobody_is_warned_where_the_system_does_not_say(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    warn_of_slow_bf16(tmp_path / "none")
    assert not recwarn.list
