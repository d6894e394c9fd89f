"""How many threads compute and how they wait, on machines and control groups that the tests lay out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretoken.machine import threads as module
from foretoken.machine.neighbours import OtherLoad
from foretoken.machine.threads import LONG_RUNNING, Cores, choose, find_cores, waiting_of, watch_neighbours

ROOT = Path(__file__).resolve().parents[2]
CORES = Cores(8, 8, 4, None)


def lay_out(folder: Path, siblings: list[str], cpu_max: dict[str, str]) -> dict[str, Path]:
    for core, text in enumerate(siblings):
        (folder / f"cpu{core}" / "topology").mkdir(parents=True)
        (folder / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(text + "\n")
    for group, text in cpu_max.items():
        (folder / group).mkdir(parents=True, exist_ok=True)
        (folder / group / "cpu.max").write_text(text + "\n")
    (folder / "own").write_text("0::/a/b\n")
    return {"topology": folder, "groups": folder, "own_group": folder / "own"}


def test_hyperthreads_share_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: (0, 1, 2))
    files = lay_out(tmp_path, ["0,2", "1,3", "0,2", "1,3"], {})
    found = find_cores(**files)
    assert (found.num_allowed, found.num_physical, found.quota, found.num_threads) == (3, 2, None, 2)
    assert find_cores(tmp_path / "none", tmp_path / "none", tmp_path / "none").num_physical == 3


@pytest.mark.parametrize(
    ("cpu_max", "quota", "num_threads"),
    [
        ({"a/b": "max 100000"}, None, 4),
        ({"a/b": "350000 100000"}, 3.5, 3),
        ({"a/b": "350000 100000", "a": "150000 100000"}, 1.5, 1),
        ({".": "50000 100000"}, 0.5, 1),
        ({"a/b": "garbage"}, None, 4),
    ],
)
def test_the_least_quota_of_a_group_and_those_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_max: dict[str, str], quota: float | None, num_threads: int
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: (0, 1, 2, 3))
    found = find_cores(**lay_out(tmp_path, ["0", "1", "2", "3"], cpu_max))
    assert (found.quota, found.num_threads) == (quota, num_threads)


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    for granted, quota in (("200000", 2.0), ("-1", None)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(granted)
        assert find_cores(groups=tmp_path, own_group=tmp_path / "none").quota == quota


def test_threads_sleep_where_a_neighbour_is_seen_or_may_come() -> None:
    assert choose({}, "generate", CORES, 0.0).settings == {"OMP_NUM_THREADS": "4"}
    assert choose({}, "generate", CORES, 0.0).waiting == "spin"
    beside = choose({}, "generate", CORES, 1.0)
    assert (beside.waiting, beside.settings["OMP_WAIT_POLICY"]) == ("sleep", "passive")
    assert "1.0 cores" in beside.why_waiting
    assert choose({}, "generate", CORES, None).waiting == "sleep"
    for verb in LONG_RUNNING:
        assert choose({}, verb, CORES, 0.0).waiting == "sleep"


@pytest.mark.parametrize(
    ("variable", "value", "waiting"),
    [("OMP_WAIT_POLICY", "ACTIVE", "spin"), ("GOMP_SPINCOUNT", "0", "sleep"), ("KMP_BLOCKTIME", "200", "spin")],
)
def test_what_the_user_set_stands(variable: str, value: str, waiting: str) -> None:
    found = choose({variable: value, "OMP_NUM_THREADS": "3"}, "serve", CORES, 2.0)
    assert (found.settings, found.waiting, found.num_threads) == ({}, waiting, None)
    assert variable in found.why_waiting
    assert waiting_of({variable: value}) == waiting


def test_neighbours_are_watched_for_a_tenth_of_a_second() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] = 0.1

    load = OtherLoad(lambda: now[0], lambda: 2 * now[0], lambda: 0.5 * now[0], lambda: None, 4)
    began_s = time.perf_counter()
    assert watch_neighbours(load, began_s, sleep) == pytest.approx(1.5)
    assert len(slept) == 1
    assert 0.0 < slept[0] <= 0.1


def test_the_command_sets_them_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os\nprint(os.environ.get('OMP_WAIT_POLICY'), os.environ['OMP_NUM_THREADS'])\nraise SystemExit(7)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "foretoken", "train", "lm", "--out", str(tmp_path / "lm")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (7, ["passive", str(find_cores().num_threads)]), done.stderr
