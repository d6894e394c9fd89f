"""`foretoken ab` from the command line: its options, and what is refused before anything is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.measure.endpoint import Fake, serving


@pytest.fixture
def replay(tmp_path: Path) -> Path:
    path = tmp_path / "replay.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return path


def test_two_servers_are_compared(foretoken: Run, replay: Path) -> None:
    with serving(Fake()) as fake:
        words = ("ab", "--a", fake.url, "--b", fake.url, "--replay", str(replay), "--price-per-hour", "1,2", "--json")
        found = foretoken(*words)
    assert found.code == 0
    report = json.loads(found.out.splitlines()[-1])
    assert (report["kind"], report["verdict"], len(report["pairs"])) == ("ab", "go on", 2)
    assert report["options"]["price_per_hour"] == [1.0, 2.0]
    assert report["command"].startswith("foretoken")


def test_a_server_that_does_not_answer_is_named(foretoken: Run, replay: Path) -> None:
    found = foretoken("ab", "--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9", "--replay", replay)
    assert found.code == 1
    assert "http://127.0.0.1:9/v1/models gave no model" in found.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--a", "nobody", "--b", "local"), "a='nobody': choose from local"),
        (("--a", "local", "--b", "local"), "target=None"),
        (("--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9", "--pairs-per-block", "3"), "must be even"),
        (("--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9", "--price-per-hour", "x"), "price_per_hour"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(foretoken: Run, replay: Path, words: tuple[str, ...], named: str) -> None:
    found = foretoken("ab", "--replay", str(replay), *words)
    assert found.code == 2
    assert named in found.err


@pytest.mark.parametrize(("content", "code"), [(None, 4), ("{}\n", 2), ('{"prompt": 3}\n', 2), ("\n", 2)])
def test_a_file_of_requests_that_cannot_be_used_is_named_by_its_option(
    foretoken: Run, tmp_path: Path, content: str | None, code: int
) -> None:
    path = tmp_path / "requests.jsonl"
    if content is not None:
        path.write_text(content)
    found = foretoken("ab", "--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9", "--replay", path)
    assert found.code == code
    assert "replay" in found.err
    assert "prompts" not in found.err
