"""`foretoken bench --url` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.measure.url.plan import UrlOptions
from tests.cli.conftest import Run

URL = "http://127.0.0.1:8000"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[UrlOptions]:
    """The options of the runs, in place of runs."""
    found: list[UrlOptions] = []

    def run(options: UrlOptions, command: str) -> SimpleNamespace:
        found.append(options)
        return SimpleNamespace(
            interrupted=options.requests == 7, results={}, json_line=lambda: json.dumps({"command": command})
        )

    monkeypatch.setattr("foretoken.measure.url.run.run_url", run)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "--url", URL),
        ("bench", "url", "--url", URL),
        ("bench", f"--url={URL}"),
        ("bench", "load", "--url", URL),
        ("bench", "load", "--rate", "1", f"--url={URL}"),
    ],
)
def test_an_address_chooses_the_command(foretoken: Run, asked: list[UrlOptions], words: tuple[str, ...]) -> None:
    assert foretoken(*words, "--json").code == 0
    assert asked == [UrlOptions(URL)]


def test_options_reach_the_run(foretoken: Run, asked: list[UrlOptions]) -> None:
    given = ("--rate", "0.5,2", "--requests", "9", "--chat", "--ttft-deadline-s", "0.4", "--slices", "code", "--json")
    assert foretoken("bench", "--json", "--url", URL, *given).code == 0
    (options,) = asked
    assert (options.rates, options.requests, options.chat, options.ttft_deadline_s) == ((0.5, 2.0), 9, True, 0.4)
    assert options.slices == ("code",)
    assert foretoken("bench", "load", "--url", URL, "--resume", "kept.jsonl", "--json").code == 0
    assert asked[1].resume == Path("kept.jsonl")


def test_an_interrupted_run_prints_and_ends_with_130(foretoken: Run, asked: list[UrlOptions]) -> None:
    done = foretoken("bench", "--url", URL, "--requests", "7", "--json")
    assert done.code == 130
    assert json.loads(done.lines[-1])


@pytest.mark.parametrize("option", [("--rate", "2"), ("--requests", "3")])
def test_a_trace_says_the_arrivals(foretoken: Run, asked: list[UrlOptions], option: tuple[str, str]) -> None:
    done = foretoken("bench", "--url", URL, "--trace", "trace.jsonl", *option, "--json")
    assert done.code == 2
    assert option[0].strip("-") in done.err
    assert not asked


def test_without_an_address_speed_runs_and_the_command_refuses(foretoken: Run, asked: list[UrlOptions]) -> None:
    assert foretoken("bench", "url", "--json").code == 2
    assert foretoken("bench", "--rate", "1").code == 2
    assert not asked
