"""`foretoken advise` from the command line: the answer last on a terminal, whole as JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run
from tests.helpers.checkpoints import token_ids


@pytest.fixture
def words(pair: SimpleNamespace, tmp_path: Path) -> list[object]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt_ids": token_ids(6, seed=number), "slice": "xy"[number % 2]} for number in range(4)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    found = ["advise", "--target", pair.target, "--drafts", f"suffix,{pair.draft}", "--prompts", prompts]
    return [*found, "--concurrency", "1,2", "--num-drafts", "1,2", "--max-tokens", "6", "--budget-s", "1"]


def test_the_answer_with_figures_and_their_sources(foretoken: Run, words: list[object]) -> None:
    found = foretoken(*words, "--memory", "2GiB", "--price-per-hour", "3", "--slo-ms", "1000000", "--json")
    assert found.code == 0, found.err
    report = json.loads(found.lines[-1])
    assert report["kind"] == "advise"
    assert report["answer"] in ("yes", "only under this load", "only for these slices", "no")
    assert {(row["candidate"], row["slice"], row["concurrency"]) for row in report["rows"]} == {
        (name, slice_name, load) for name in ("suffix", "draft") for slice_name in ("", "x", "y") for load in (1, 2)
    }
    assert [row["plain"] > 0 for row in report["costs_per_million"]] == [True] * 3
    assert set(report["sources"].values()) & {"given by you"}
    assert report["settings"]["target"] == report["options"]["target"]


def test_the_verdict_is_the_last_line_and_the_heading_of_a_page(
    foretoken: Run, words: list[object], tmp_path: Path
) -> None:
    page = tmp_path / "advice.md"
    found = foretoken(*words, "--out", page)
    assert found.code == 0, found.err
    assert found.lines[-1].startswith(("Speculate", "Don't speculate"))
    assert page.read_text().splitlines()[0] == f"# {found.lines[-1]}"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--drafts", "auto"), "drafts='auto'"),
        (("--memory", "lots"), "memory='lots'"),
        (("--concurrency", "0"), "concurrency=0"),
        (("--num-drafts", "1,x"), "num_drafts"),
        (("--slices", "z"), "slices='z'"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    foretoken: Run, words: list[object], more: tuple[str, str], named: str
) -> None:
    found = foretoken(*words, *more)
    assert found.code == 2
    assert named in found.err
