"""Answers of `studies.equal_answers`: what is compared, a difference that is found, a run that was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ConfigError, InputError
from foretoken.text.tokenizer import load_tokenizer
from studies.equal_answers import folder
from studies.equal_answers.__main__ import _parser, compare
from studies.equal_answers.answers import Answerer, Turn, spec_of
from studies.equal_answers.tables import differing, rows, tables


def answers(name: str, *tokens: list[int]) -> list[dict[str, Any]]:
    return [
        {"place": place, "pass": name, "token_ids": own, "num_drafted": 4, "num_accepted": 2, "num_cached_tokens": 16}
        for place, own in enumerate(tokens)
    ]


def test_an_answer_that_differs_is_counted_in_its_condition() -> None:
    plain, other = {"target": "t", "setting": "plain"}, {"target": "t", "setting": "ngram"}
    lines = [
        {**plain, "num_requests": 1, "answers": answers("cold", [1, 2], [3])},
        {**other, "num_requests": 16, "answers": [*answers("cold", [1, 2], [3]), *answers("cached", [1, 2], [4])]},
    ]
    expected = {"t": {0: (1, 2), 1: (3,)}}
    found = rows(lines, expected)
    assert [(row["setting"], row["pass"], row["num_differing"]) for row in found] == [
        ("plain", "cold", 0),
        ("ngram", "cold", 0),
        ("ngram", "cached", 1),
    ]
    (one,) = differing(lines, expected)
    assert (one["place"], one["pass"], one["token_ids"], one["expected"]) == (1, "cached", [4], [3])
    (table,) = tables(found)
    assert table.headings[1:4] == ("alone, cold", "among 16, cold", "among 16, cached")
    assert table.lines == (
        ("plain", "0 / 2", "-", "-", "4 / 8", "32", "0"),
        ("ngram", "-", "0 / 2", "1 / 2", "8 / 16", "64", "0"),
    )


def test_settings() -> None:
    assert spec_of("best_first", "d", 5).tree == "best_first"
    assert (spec_of("cascade", "d", 5).draft, spec_of("ngram", "d", 5).draft) == ("d", None)
    assert spec_of("auto", "d", 5).num_draft == "auto"
    with pytest.raises(InputError, match="draft"):
        spec_of("mix", None, 5)
    with pytest.raises(ConfigError, match="drafter"):
        spec_of("ngrams", None, 5)


def given(tmp_path: Path) -> list[str]:
    texts = tmp_path / "prompts.jsonl"
    code = ["import os\nimport", "def add(a, b):\n    return", "class A:\n    def __init__(self):\n        self.x ="]
    texts.write_text("".join(json.dumps({"prompt": text, "slice": "code"}) + "\n" for text in code))
    return [
        *("--prompts", str(texts), "--kinds", "code", "--requests", "1,2", "--max-tokens", "12"),
        *("--draft", "reference:draft", "--settings", "plain,auto,predicted,best_first@2", "--dtype", "float32"),
        *("--keep", str(tmp_path / "keep.jsonl")),
    ]


def test_a_run_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.equal_answers.__main__.with_template", lambda prompts, llm, chat: tuple(prompts))
    options = given(tmp_path)
    stopped = compare(_parser().parse_args([*options, "--time-budget", "0"]))
    assert not stopped.results["turns"]
    assert "time budget" in stopped.caveats[-1]
    whole = compare(_parser().parse_args(options))
    turns = whole.results["turns"]
    assert [(turn["setting"], turn["num_requests"], len(turn["answers"])) for turn in turns] == [
        (setting, n, 4 if setting == "best_first" else 6)
        for setting in ("plain", "auto", "predicted", "best_first")
        for n in (1, 2)
    ]
    assert not whole.results["differing"]
    drafted = {row["setting"]: row["num_drafted"] for row in whole.results["rows"]}
    assert drafted["plain"] == 0
    assert min(drafted["predicted"], drafted["best_first"]) > 0
    kept = (tmp_path / "keep.jsonl").read_text()
    assert compare(_parser().parse_args(options)).results["turns"] == turns
    assert (tmp_path / "keep.jsonl").read_text() == kept
    with pytest.raises(InputError, match="num_draft"):
        compare(_parser().parse_args([*options, "--num-draft", "4"]))
    with pytest.raises(InputError, match="from 1 to 3"):
        compare(_parser().parse_args([*options, "--settings", "ngram@4"]))


def test_a_drafter_that_changes_answers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.equal_answers.__main__.with_template", lambda prompts, llm, chat: tuple(prompts))
    right = Answerer.answer

    def wrong(self: Answerer, turn: Turn, *others: Any) -> list[dict[str, Any]]:
        found = right(self, turn, *others)
        if (turn.setting, turn.num_requests) == ("ngram", 2):
            found[-1]["token_ids"][0] += 1
        return found

    monkeypatch.setattr(Answerer, "answer", wrong)
    report = compare(_parser().parse_args([*given(tmp_path), "--settings", "plain,ngram"]))
    assert [(one["setting"], one["num_requests"], one["pass"]) for one in report.results["differing"]] == [
        ("ngram", 2, "cached")
    ]


def test_transformers_is_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.equal_answers.__main__.with_template", lambda prompts, llm, chat: tuple(prompts))
    options = [*given(tmp_path), "--reference", "transformers", "--settings", "plain,ngram"]
    report = compare(_parser().parse_args(options))
    assert {row["setting"] for row in report.results["rows"]} == {"transformers", "plain", "ngram"}
    assert not report.results["differing"]


def test_a_file_becomes_a_folder_with_its_tokenizer_and_template(smollm2_file: Path, tmp_path: Path) -> None:
    assert folder.write(str(smollm2_file), "bfloat16", tmp_path / "folder") == 0
    file, written = load_tokenizer(smollm2_file), load_tokenizer(tmp_path / "folder")
    assert file is not None
    assert written is not None
    assert written.chat_template == file.chat_template
    assert written.encode("Hello, 123 world") == file.encode("Hello, 123 world")
    with pytest.raises(InputError, match="GGUF"):
        folder.write(str(tmp_path / "folder"), "bfloat16", tmp_path / "again")
