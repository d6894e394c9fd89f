"""The package as users get it: source archive, wheel made of that archive, installed into an empty folder and run.

Built with the hooks that pip and build call, from a copy of the tracked files, without network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import foretoken

ROOT = Path(__file__).resolve().parents[1]
NAME = f"foretoken-{foretoken.__version__}"
MAX_BYTES = 6_000_000


def call(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """Run a command in `folder` without this checkout on the path; its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an `sdist` or `wheel` of a folder."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    return out / call([sys.executable, "-c", code, out], source).splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the project without what git ignores."""
    folder = tmp_path_factory.mktemp("checkout") / "copy"
    hidden = shutil.ignore_patterns(
        *(".git", ".venv*", "node_modules", ".browser", "out", ".dev"),
        *("__pycache__", "*.egg-info", "build", "dist", ".*cache", ".hypothesis"),
    )
    shutil.copytree(ROOT, folder, ignore=hidden)
    return folder


@pytest.fixture(scope="module")
def archive(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the source archive alone, as pip does it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return build("wheel", folder / NAME, folder)


def package_files() -> set[str]:
    """What the package must hold: its modules, and its marker for type checkers."""
    kinds = (".py", ".json", ".safetensors", ".md", ".typed", ".html", ".css", ".js", ".cpp", ".h")
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "foretoken").rglob("*") if path.suffix in kinds}


def test_the_source_archive(archive: Path) -> None:
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert package_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "SECURITY.md", "CITATION.cff", "CHANGELOG.md"} <= names
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"foretoken", "foretoken.egg-info"}


def test_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = file.read(f"{NAME}.dist-info/METADATA").decode()
    about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    assert names - about == package_files()
    assert "foretoken/py.typed" in names
    tensors = [name for name in names if name.endswith(".safetensors")]
    assert tensors == ["foretoken/draft/ngrams/smollm2.safetensors"]  # models and heads are fetched or named
    assert wheel.stat().st_size < MAX_BYTES
    assert f"{NAME}.dist-info/licenses/LICENSE" in about
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata


def test_the_installed_package_runs(wheel: Path, tmp_path: Path) -> None:
    """Out of a folder of its own: the command, and an answer of a model that is named."""
    installed = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", installed, wheel]
    call([*pip, "--disable-pip-version-check"], tmp_path)
    run = [sys.executable, "-m", "foretoken"]
    assert call([*run, "--version"], tmp_path, PYTHONPATH=str(installed)) == f"foretoken {foretoken.__version__}\n"
    assert (installed / "bin" / "foretoken").is_file()
    answer = [
        *run,
        "generate",
        "--target",
        str(ROOT / "tests" / "reference" / "target"),
        "--prompt",
        "def add(a, b):",
        "--max-tokens",
        "4",
        "--drafter",
        "ngram",
        "--json",
    ]
    found = json.loads(call(answer, tmp_path, PYTHONPATH=str(installed)).splitlines()[-1])
    assert found["stats"]["num_emitted"] == 4
    where = call(
        [sys.executable, "-c", "import foretoken; print(foretoken.__file__)"], tmp_path, PYTHONPATH=str(installed)
    )
    assert Path(where.strip()).is_relative_to(installed)
