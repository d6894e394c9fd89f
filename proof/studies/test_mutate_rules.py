"""The run over all mutants: it can be stopped at any time, goes on from there, and hides nothing that was not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.mutate_rules import __main__ as mutate_rules
from studies.mutate_rules.__main__ import judge_all, known_verdicts, open_mutants
from studies.mutate_rules.mutants import Mutant, mutants_of

CODE = "def f(a, b):\n    return a + b if a < b else 0\n"


@pytest.fixture
def mutants(tmp_path: Path) -> list[Mutant]:
    path = tmp_path / "rule.py"
    path.write_text(CODE)
    return list(mutants_of(path))


def killed(_mutant: Mutant) -> tuple[str, float]:
    return "killed", 0.5


def test_mutants_are_different_from_the_code_and_from_each_other(mutants: list[Mutant]) -> None:
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 5
    assert ("rule.py", "f", "a + b if a < b else 0", "a - b if a < b else 0") in {mutant.name for mutant in mutants}


def test_a_stopped_run_goes_on_with_what_is_left(mutants: list[Mutant], tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    calls: list[Mutant] = []

    def until_the_third(mutant: Mutant) -> tuple[str, float]:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(mutant)
        return "killed", 0.5

    assert not judge_all(mutants, until_the_third, {}, "tests", state)
    with state.open("a") as file:
        file.write('{"key": "cut off')  # the process died within a line
    known = known_verdicts(state)
    assert set(known) == {mutant.key for mutant in mutants[:2]}
    left = open_mutants(mutants, known, "tests")
    assert left == mutants[2:]
    assert judge_all(left, killed, known, "tests", state)
    assert set(known_verdicts(state)) == {mutant.key for mutant in mutants}
    assert not open_mutants(mutants, known_verdicts(state), "tests")


def test_time_may_be_limited(mutants: list[Mutant], tmp_path: Path) -> None:
    ticks = iter(range(1000))
    known: dict[str, tuple[str, str]] = {}
    assert not judge_all(mutants, killed, known, "tests", tmp_path / "s", max_s=5.0, clock=lambda: next(ticks))
    assert 0 < len(known) < len(mutants)


def test_a_survivor_is_judged_again_when_the_tests_change(mutants: list[Mutant]) -> None:
    known = {mutants[0].key: ("survived", "old"), mutants[1].key: ("killed", "old")}
    assert open_mutants(mutants[:2], known, "new") == [mutants[0]]
    assert open_mutants(mutants[:2], known, "old") == []


def test_the_report_counts_what_was_not_run_and_asks_for_reasons(
    mutants: list[Mutant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, reasons = tmp_path / "report.md", tmp_path / "reasons.md"
    monkeypatch.setattr(mutate_rules, "REPORT", report)
    monkeypatch.setattr(mutate_rules, "REASONS", reasons)
    monkeypatch.setattr(mutate_rules, "_test_hash", lambda: "tests")
    known = {mutants[0].key: ("survived", "tests"), mutants[1].key: ("killed", "tests")}
    assert mutate_rules._report(mutants, known, 1.0) == 1
    page = report.read_text()
    assert f"{len(mutants) - 2} not run" in page
    (row,) = (line for line in page.splitlines() if mutate_rules.NO_REASON in line)
    reasons.write_text(row.replace(mutate_rules.NO_REASON, "same value") + "\n")
    assert mutate_rules._report(mutants, known, 1.0) == 0
    assert "same value" in report.read_text()
