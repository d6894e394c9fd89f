"""What /proc says of the processor and of other processes, from files that the tests write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretoken.machine.features import features, precision_advice, processor
from foretoken.machine.processes import neighbours


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
