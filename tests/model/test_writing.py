"""Folders that are being written, and what a killed writer leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.files import writing_folder

PREFIX = ".m.writing-"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_removed_or_has_a_name(tmp_path: Path) -> None:
    with writing_folder(tmp_path / "new", PREFIX) as folder:
        (folder / "x").write_text("")
    assert names(tmp_path / "new") == []
    with writing_folder(tmp_path, PREFIX) as folder:
        (folder / "x").write_text("")
        os.replace(folder, tmp_path / "m")
    assert names(tmp_path) == ["m", "new"]
    with pytest.raises(KeyError), writing_folder(tmp_path, PREFIX):
        raise KeyError
    assert names(tmp_path) == ["m", "new"]


def test_l3_what_a_killed_writer_left_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from foretoken.files import writing_folder\n"
        f"with writing_folder(Path({str(tmp_path)!r}), {PREFIX!r}):\n"
        "    print('ready', flush=True); time.sleep(60)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    (other,) = names(tmp_path)
    (tmp_path / ".m.other").mkdir()
    with writing_folder(tmp_path, PREFIX):
        assert len(names(tmp_path)) == 3  # the living one's stays
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert names(tmp_path) == sorted([other, ".m.other"])
    with writing_folder(tmp_path, PREFIX) as own:
        assert names(tmp_path) == sorted([own.name, ".m.other"])
