"""Comparison of results: what counts as lost, and what does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import InputError, StorageError
from foretoken.measure.eval.compare import check_comparable, compare
from foretoken.measure.eval.counts import AnswerCounts
from foretoken.measure.eval.result import EvalResult, EvalSample, read_result, rows_of, write_result

SETTINGS = {"rule": "auto", "max_tokens": 64}
IDENTITY = {
    "target": {"name": "t", "weights": "aaaaaaaaaa", "config": "c", "tokenizer": None, "template": "x"},
    "drafts": {"draft_model-2": [{"name": "d", "weights": "bbbbbbbbbb", "config": "c"}]},
}


def answer(accepted: int, drafted: int = 40, number: int = 0, **other: Any) -> EvalSample:
    """Half of the accepted tokens at each of two positions."""
    first = accepted - accepted // 2
    counts = AnswerCounts(
        num_rounds=drafted // 2,
        num_drafts=drafted // 2,
        num_drafted=drafted,
        num_accepted=accepted,
        num_emitted=accepted + drafted // 2,
        reached=[drafted // 2, first] if drafted else [],
        passed=[first, accepted // 2] if drafted else [],
    )
    values = {"drafter": "draft_model-2", "slice": "code", "temperature": 0.0, "prompt": f"p{number}", "rule": "greedy"}
    return EvalSample(**{**values, **other}, counts=counts)


def result(samples: Sequence[EvalSample], **changes: Any) -> EvalResult:
    whole = EvalResult(
        samples=samples,
        identity=IDENTITY,
        settings=SETTINGS,
        options={},
        command="foretoken eval",
        machine={},
        versions={"torch": "2.13"},
        date="2026-01-01",
    )
    return replace(whole, **changes)


def answers(rates: Sequence[int], **other: Any) -> list[EvalSample]:
    return [answer(rate, number=number, **other) for number, rate in enumerate(rates)]


USUAL = (30, 28, 33, 25, 31, 29, 27, 32, 30, 26)


def test_the_same_counts_are_kept() -> None:
    found = compare(result(answers(USUAL)), result(answers(USUAL)), max_lost=0.0)
    assert [(one.outcome, one.loss) for one in found.cells] == [("kept", 0.0)]
    assert (found.lost, found.changed) == ([], [])


def test_what_the_models_ran_in_is_named() -> None:
    """A file that does not say it is of the defaults; options that acceptance does not depend on are not named."""
    after = result(answers(USUAL), options={"weights": "int8", "dtype": "auto", "numerics": "default", "seed": 3})
    assert compare(result(answers(USUAL)), after, 0.0).changed == ["weights ('auto' -> 'int8')"]
    before = result(answers(USUAL), options={"weights": "int4", "dtype": "float32"})
    assert compare(before, after, 0.0).changed == ["weights ('int4' -> 'int8')", "dtype ('float32' -> 'auto')"]


def test_a_loss_beyond_the_bound_is_named_with_its_position() -> None:
    identity = copy.deepcopy(IDENTITY)
    identity["target"]["template"] = "yyyyyyyyyyyy"  # type: ignore[index]
    identity["drafts"]["draft_model-2"][0]["weights"] = None  # type: ignore[index]
    after = result(
        answers([rate - 8 for rate in USUAL]) + answers(USUAL, slice="chat"), identity=identity, versions={"torch": "3"}
    )
    before = result(answers(USUAL) + answers(USUAL, slice="chat"))
    found = compare(before, after, max_lost=0.05)
    assert [str(one.cell) for one in found.lost] == ["draft_model-2 on code at temperature 0"]
    assert "0.728 -> 0.527, lost 0.200 (0.200 to 0.200), most at position 1 (0.740 -> 0.540)" in str(found.lost[0])
    assert found.changed == [
        "target: template (x -> yyyyyyyy)",
        "draft of draft_model-2: weights (bbbbbbbb -> none)",
        "versions: torch 2.13 -> 3",
    ]
    assert found.verdict == "1 of 2 lost more than 0.05 of acceptance rate"
    assert not compare(before, after, max_lost=0.21).lost
    assert not compare(after, before, max_lost=0.05).lost  # a gain


def test_noise_is_no_loss() -> None:
    """The same loss on average, with prompts that went up as well as down: chance could do that."""
    noisy = [rate + change for rate, change in zip(USUAL, (-28, 8, -25, 10, -20, 9, -22, 7, -15, 12), strict=True)]
    found = compare(result(answers(USUAL)), result(answers(noisy)), max_lost=0.05)
    assert found.cells[0].loss == pytest.approx(0.16)
    assert [one.outcome for one in found.cells] == ["undecided"]
    assert "1 undecided: measure more prompts" in found.verdict


def test_few_prompts_decide_nothing_and_other_prompts_are_two_samples() -> None:
    low = [rate - 12 for rate in USUAL]
    few = compare(result(answers(USUAL[:4])), result(answers(low[:4])), max_lost=0.05)
    assert [one.outcome for one in few.cells] == ["undecided"]
    others = [replace(one, prompt=f"other {one.prompt}") for one in answers(low)]
    found = compare(result(answers(USUAL)), result(others), max_lost=0.05)
    assert [(one.outcome, one.paired) for one in found.cells] == [("lost", False)]
    assert any("other prompts" in note for note in found.notes)


def test_a_drafter_that_stopped_drafting_lost_all() -> None:
    silent = [answer(0, drafted=0, number=number) for number in range(10)]
    found = compare(result(answers(USUAL)), result(silent), max_lost=0.05)
    assert [(one.outcome, one.after) for one in found.cells] == [("lost", 0.0)]
    neither = compare(result(silent), result(silent), max_lost=0.05)
    assert [one.outcome for one in neither.cells] == ["kept"]


def test_what_only_one_has_is_noted() -> None:
    before = result(answers(USUAL) + answers(USUAL, slice="chat"), complete=False)
    found = compare(before, result(answers(USUAL) + answers(USUAL, drafter="ngram-2")), max_lost=0.05)
    assert len(found.cells) == 1
    assert found.notes == [
        "draft_model-2 on chat at temperature 0 is only in the earlier file",
        "ngram-2 on code at temperature 0 is not in the earlier file",
        "the earlier file is incomplete: it was interrupted",
    ]
    with pytest.raises(InputError, match="no drafter, slice and temperature in common"):
        compare(before, result(answers(USUAL, temperature=0.8)), max_lost=0.05)


def test_what_cannot_be_compared_is_refused() -> None:
    before = result(answers(USUAL))
    check_comparable(before, SETTINGS, ["draft_model-2", "ngram-2"], ["code"])
    for settings, drafters, slices, message in (
        (
            {**SETTINGS, "max_tokens": 32},
            ["draft_model-2"],
            ["code"],
            "acceptance depends on max_tokens, which is 32 here",
        ),
        (SETTINGS, ["draft_model-5"], ["code"], r"no drafter in common with this run \(draft_model-5\)"),
        (SETTINGS, ["draft_model-2"], ["chat"], r"no slice in common with this run \(chat\)"),
    ):
        with pytest.raises(InputError, match=message):
            check_comparable(before, settings, drafters, slices)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    whole = result(answers(USUAL))
    write_result(whole.as_dict(rows_of(whole)), tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    again = read_result(tmp_path / "a.json")
    assert again.samples == whole.samples
    assert again.as_dict(rows_of(again)) == json.loads((tmp_path / "a.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "foretoken.acceptance/9"}, "has schema 'foretoken.acceptance/9', and this version reads"),
        ({"schema": "foretoken.trace/1"}, "is no result of foretoken eval"),
        ({"schema": 3}, "is no result of foretoken eval"),
        ({"answers": []}, "it holds no answer"),
        ({"answers": [{}]}, "is damaged"),
        ({"answers": {}}, "answers must be of type list"),
        ({"identity": None}, "identity must be of type dict"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    whole = result(answers(USUAL))
    path = tmp_path / "a.json"
    write_result(whole.as_dict(rows_of(whole)) | change, path)
    with pytest.raises(InputError, match=message):
        read_result(path)


def test_counts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    whole = result(answers(USUAL))
    for name, value in (("num_drafted", 3), ("num_accepted", -1), ("reached", [1]), ("passed", 2.5), ("odd", 1)):
        found = json.loads(json.dumps(whole.as_dict([])))
        found["answers"][3]["counts"][name] = value
        write_result(found, tmp_path / "a.json")
        with pytest.raises(InputError, match="is damaged"):
            read_result(tmp_path / "a.json")


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "list.json").write_text("[1]")
    for name in ("nowhere.json", "text.json"):
        with pytest.raises(StorageError, match="against: cannot read"):
            read_result(tmp_path / name)
    with pytest.raises(InputError, match="is no result of foretoken eval"):
        read_result(tmp_path / "list.json")
    with pytest.raises(StorageError, match="out: cannot write"):
        write_result({}, tmp_path / "no folder" / "a.json")
