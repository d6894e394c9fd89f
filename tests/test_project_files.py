"""Files at the root that tools read: they say the same as the package, and name what exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import foretoken

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == foretoken.__version__ == read("CITATION.cff")["version"]


def test_extras_that_errors_name_exist() -> None:
    named = {
        extra
        for path in (ROOT / "foretoken").rglob("*.py")
        for extra in re.findall(r"(?:foretoken\[|\binstall\([\"'])(\w+)", path.read_text(encoding="utf-8"))
    }
    assert {"otel", "server", "structured"} <= named
    assert named <= set(PROJECT["project"]["optional-dependencies"])


def test_the_citation_is_valid() -> None:
    """The required keys of CFF 1.2.0, their types, and no key that it does not have."""
    found = read("CITATION.cff")
    assert found["cff-version"] == "1.2.0"
    assert isinstance(found["message"], str)
    assert found["title"].startswith(PROJECT["project"]["name"])
    assert [set(author) for author in found["authors"]] == [{"name"}]  # an entity
    assert found["type"] in ("software", "dataset")
    assert found["license"] == PROJECT["project"]["license"]
    assert all(isinstance(found[name], str) for name in ("abstract", "version"))
    assert all(isinstance(word, str) for word in found["keywords"])
    known = {"cff-version", "message", "title", "type", "authors", "version", "license", "abstract", "keywords"}
    assert set(found) <= known


def test_ci_runs_the_script_of_the_project() -> None:
    workflow = read(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / commands[0], os.X_OK)
    assert workflow["permissions"] == {"contents": "read"}
    versions = [entry["python"] for entry in job["strategy"]["matrix"]["include"]]
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    named = {line.rpartition(" :: ")[2] for line in PROJECT["project"]["classifiers"]}
    assert set(versions) <= named


def test_hooks_run_the_pinned_tools_of_make_check() -> None:
    packages = {"lint-imports": "import-linter"}
    makefile = (ROOT / "Makefile").read_text()
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    for hook in hooks:
        program, *_ = shlex.split(hook["entry"])
        name = Path(program).name
        assert program == f".venv/bin/{name}"
        assert packages.get(name, name) in PINNED
        assert f"$(BIN)/{name}" in makefile.split("\ncheck:")[1].split("\n\n")[0]
    assert {"ruff-check", "ruff-format", "mypy"} <= {hook["id"] for hook in hooks}


@pytest.mark.parametrize("name", ["SECURITY.md", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_source_archives_hold_what_readers_look_for(name: str) -> None:
    assert (ROOT / name).is_file()
    assert name in (ROOT / "MANIFEST.in").read_text().split()


def test_the_container_file_names_the_pins_and_files_that_exist() -> None:
    """It cannot be built in a test: at least what it names is there."""
    text = (ROOT / "deploy" / "Containerfile").read_text()
    own = set(re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"torch==([\d.]+)", text)) == own
    assert len(set(re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE))) == 1  # built and run on the same Python
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY") and "--from" not in line]
    assert all((ROOT / name).exists() for names in copied for name in names)
    assert ["requirements.txt"] in copied
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, flags=re.MULTILINE)
    assert json.loads(entry)[:2] == ["foretoken", "serve"]
    assert "foretoken" in PROJECT["project"]["scripts"]
    (port,) = re.findall(r"^EXPOSE (\d+)$", text, flags=re.MULTILINE)
    assert json.loads(entry)[-1] == port
    assert f":{port}/ready" in text
    assert "-f deploy/Containerfile" in text  # the command that builds it
