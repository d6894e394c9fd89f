"""Values that nobody can mean, given to every option of every verb: exit 2, the option named, no traceback, no model
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import foretoken.model.open
import foretoken.train.recipes
from foretoken.cli import origins
from foretoken.cli.app import app
from tests.cli.conftest import Run

SURROGATE = "a\udcff"
NEGATIVE_IS_FINE = {"generate --priority"}  # smaller is served earlier
# Options that hold several values, or one of a grammar of their own.
EMPTY_IS_WRONG = {
    "advise": ("drafts", "slices", "concurrency", "num_drafts", "name"),
    "audit": ("temperatures",),
    "bench": (
        "drafters",
        "num_drafts",
        "rule",
        "slices",
        "temperatures",
        "peer_drafters",
        "peer_num_drafts",
        "name",
    ),
    "bench load": ("batches", "settings", "slices", "name"),
    "bench profile": ("drafters", "name"),
    "bench url": ("url", "rate", "slices", "name"),
    "certify": ("only", "name"),
    "simulate": ("arrivals", "settings"),
    "train lm": ("shape",),
}
NEEDED = {
    "ab": ["--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9", "--replay", "replay.jsonl"],
    "acceptance": ["missing.db"],
    "ab-live": ["--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9"],
    "bench url": ["--url", "http://127.0.0.1:9"],
    "diagnose": ["--target", "reference:target", "--head", "reference:eagle"],
    "certify": ["--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9"],
    "generate": ["--prompt", "x"],
    "report": ["run.json", "--out", "page.html"],
    "train lm": ["--out", "run"],
    "train answers": ["--target", "reference:target", "--prompts", "prompts.jsonl", "--out", "answers.jsonl"],
    "train ngrams": ["--target", "reference:target", "--answers", "answers.jsonl", "--out", "table"],
    **{
        f"train {kind}": ["--target", "reference:target", "--out", "run"]
        for kind in ("eagle", "medusa", "block", "adapter", "draft")
    },
    "export": ["--head", "head", "--to", "vllm", "--out", "out"],
    "simulate": ["--profile", "profile.json", "--arrivals", "poisson:1", "--requests", "2"],
}
PROFILE = {"format": "foretoken-profile-1", "rows": [[1, 0.01], [8, 0.02]]}


def options() -> Iterator[tuple[str, str, str, type]]:
    """(verb, name, flag, type) of every option that takes a value."""
    for verb, name, option, kind in origins._options(typer.main.get_command(app)):  # type: ignore[arg-type]
        if not option.is_flag:
            yield verb, name, option.opts[0], kind.item


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever loads or makes a model here has checked too late."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(foretoken.model.open, "load_decoder", loaded)
    monkeypatch.setattr(foretoken.train.recipes, "prepare", loaded)
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))


def refused(foretoken: Run, verb: str, name: str, flag: str, value: str) -> None:
    done = foretoken(*verb.split(), *NEEDED.get(verb, ()), f"{flag}={value}" if flag.startswith("--") else flag)
    assert done.code == 2, (verb, flag, value, done.err)
    assert name in done.err or flag in done.err, (verb, flag, value, done.err)
    assert done.out == ""


def test_w1_a_number_that_is_none_is_refused(foretoken: Run) -> None:
    for verb, name, flag, kind in options():
        if kind is float:
            for value in ("nan", "inf", "-inf", "1e400", "x", ""):
                refused(foretoken, verb, name, flag, value)


def test_w1_a_whole_number_that_is_none_or_has_no_end_is_refused(foretoken: Run) -> None:
    for verb, name, flag, kind in options():
        if kind is int:
            for value in ("1.5", "9" * 30, *(() if f"{verb} {flag}" in NEGATIVE_IS_FINE else ("-1",))):
                refused(foretoken, verb, name, flag, value)


def test_c2_a_text_that_is_not_utf8_is_refused(foretoken: Run) -> None:
    for verb, name, flag, kind in options():
        if kind not in (int, float):
            refused(foretoken, verb, name, flag, SURROGATE)
    assert foretoken("models", SURROGATE).code == 2


def test_w1_an_empty_list_is_refused(foretoken: Run) -> None:
    flags = {(verb, name): flag for verb, name, flag, _ in options()}
    for verb, names in EMPTY_IS_WRONG.items():
        for name in names:
            for value in ("", ","):
                refused(foretoken, verb, name, flags[verb, name], value)
    for name in ("prompt_tokens", "output_tokens"):
        refused(foretoken, "simulate", name, flags["simulate", name], "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "--temperatures", "nan"),
        ("audit", "--temperatures", "0,-1"),
        ("audit", "--temperatures", "inf"),
        ("audit", "--num-prompts", "1000000000000"),
        ("audit", "--numerics", "foo"),
        ("audit", "--dtype", "int8"),
        ("audit", "--device", "toaster"),
        ("bench", "--temperatures", "nan"),
        ("bench", "--temperatures", "-0.5"),
        ("bench", "--num-drafts", "0"),
        ("bench", "--num-drafts", "3,-1"),
        ("bench", "--peer-num-drafts", "1,0"),
        ("bench", "--threads", "100000"),
        ("bench", "--dtype", "int8"),
        ("bench", "profile", "--seed", "-1"),
        ("bench", "--price-per-hour", "0"),
        ("bench", "load", "--price-per-hour", "nan"),
        ("bench", "load", "--batches", "1000000"),
        ("bench", "load", "--batches", "1,2", "--settings", ","),
        ("bench", "load", "--batches", "2", "--settings", "ngram-²"),
        ("bench", "load", "--batches", "1,2", "--prompts-per-slice", "1000000000000"),
        ("generate", "--prompt", "x", "--numerics", "foo"),
        ("generate", "--prompt", "x", "--dtype", "int8"),
        ("plan", "--memory", "9" * 400 + "GiB"),
        ("plan", "--num-draft", "²"),
        ("plan", "--fleet", "profile.json", "--peak-rate", "0"),
        ("plan", "--fleet", "profile.json", "--max-replicas", "1000000000"),
        ("plan", "--fleet", "profile.json", "--max-batch-size", "1000000000"),
        ("plan", "--fleet", "profile.json", "--price-per-hour", "-1"),
        ("plan", "--fleet", "profile.json", "--mtbf-h", "1e-9"),
        ("simulate", "--profile", "profile.json", "--arrivals", "steady", "--duration-s", "0"),
        ("simulate", "--profile", "profile.json", "--arrivals", "steady", "--seed", "-1"),
        ("simulate", "--profile", "profile.json", "--arrivals", "steady", "--max-batch-size", "1000000000"),
        ("simulate", "--profile", "profile.json", "--arrivals", "poisson:1", "--replicas", "1000000000"),
        ("simulate", "--profile", "profile.json", "--arrivals", "poisson:1", "--requests", "1000000000000"),
        ("simulate", "--profile", "profile.json", "--arrivals", "poisson:1e-320"),
        ("simulate", "--profile", "profile.json", "--arrivals", "poisson:1", "--prompt-tokens", "²"),
        ("simulate", "--profile", "profile.json", "--arrivals", "poisson:1", "--price-per-hour", "-1"),
        ("train", "lm", "--out", "run", "--length", "4096", "--batch-tokens", "8192"),
        ("train", "lm", "--out", "run", "--device", "toaster"),
        ("demo", "--drafter", "predicted"),
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_w1_values_that_only_some_options_refuse(foretoken: Run, arguments: tuple[str, ...]) -> None:
    done = foretoken(*arguments)
    assert (done.code, done.out) == (2, ""), done.err


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (4, ("train", "lm", "--out", "file")),
        (4, ("bench", "--out", "file")),
        (4, ("bench", "--out", "file/below")),
        (4, ("bench", "profile", "--out", "file")),
        (4, ("bench", "load", "--batches", "1", "--out", "file")),
        (4, ("audit", "--out", "file")),
        (4, ("audit", "--out", "file/below/report.md")),
        (4, ("generate", "--prompt", "x", "--trace", "nowhere/t.jsonl")),
        (4, ("generate", "--prompt", "x", "--trace", "folder.md")),
        (4, ("generate", "--prompt", "x", "--corpus", "folder.md")),
        (3, ("generate", "--prompt", "x", "--draft", "/nowhere")),
        (3, ("audit", "--draft", "/nowhere")),
        (3, ("bench", "load", "--batches", "1", "--draft", "/nowhere")),
        (3, ("bench", "profile", "--draft", "/nowhere")),
        (3, ("train", "lm", "--out", "run", "--teacher", "")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_w1_a_place_that_cannot_be_used_is_refused_before_the_work(
    foretoken: Run, tmp_path: Path, code: int, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.md").mkdir()
    done = foretoken(*arguments)
    assert (done.code, done.out) == (code, ""), done.err
    assert "Traceback" not in done.err
