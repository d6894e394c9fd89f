from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from studies.before_after import __main__ as command
from studies.before_after import grid, mixed
from studies.before_after.checkout import Checkout, CheckoutError
from studies.before_after.grid import Grid, GridPlan, Sample
from studies.before_after.mixed import MixedPlan, Traces
from studies.before_after.pair import AFTER, BEFORE, Pair, rotated, setting_fields
from studies.before_after.report import Run, report_of

HERE = Path(__file__).resolve().parents[2]
TOKENS = 10


class FakeChild:
    """Answers in a fixed time by setting."""

    def __init__(self, side: str, seconds: dict[str, float], calls: list[tuple[str, str]]) -> None:
        self.side, self.seconds, self.calls = side, seconds, calls

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        setting, seconds = message["setting"], self.seconds[message["setting"]]
        self.calls.append((self.side, setting))
        phases = {"schedule_s": 0.02 * seconds, "observe_s": 0.01 * seconds, "step_s": seconds, "num_steps": 10.0}
        if message["do"] == "trace":
            tokens = [sum(most for _, most in phase["jobs"]) for phase in message["phases"]]
            return {"seconds": [seconds * count / 100 for count in tokens], "tokens": tokens, "phases": phases}
        last = 1 if (self.side, setting) == (AFTER, "auto") else 0
        return {
            "seconds": seconds,
            "answers": [[*range(TOKENS - 1), last]] * message["count"],
            "near_ties": [0] * message["count"],
            "request_tokens_per_s": [TOKENS / seconds] * message["count"],
            "num_drafted": 5,
            "num_accepted": 3,
            "num_rounds": 7,
            "phases": phases,
        }

    def cpu_s(self) -> float:
        return 0.0


def fake_pair(calls: list[tuple[str, str]], **seconds: float) -> Pair:
    before = {"plain": 2.0, "auto": 1.0}
    after = {"plain": 2.0, "auto": 0.5} | seconds
    children: Any = {BEFORE: FakeChild(BEFORE, before, calls), AFTER: FakeChild(AFTER, after, calls)}
    return Pair(children, {})


def measured(repeats: int = 2) -> list[Sample]:
    samples: list[Sample] = []
    plan = GridPlan((1, 4), ("code",), ("plain", "auto"), repeats, TOKENS, 2)
    grid.measure(fake_pair([]), plan, samples, lambda _words: None)
    return samples


def test_checkouts_of_a_setting_are_neighbours_and_swap_places() -> None:
    assert rotated(("b", "a"), ("plain", "auto"), 0) == [("b", "plain"), ("a", "plain"), ("b", "auto"), ("a", "auto")]
    assert rotated(("b", "a"), ("plain", "auto"), 1) == [("a", "auto"), ("b", "auto"), ("a", "plain"), ("b", "plain")]


def test_ratios_compare_checkouts_and_settings() -> None:
    found = Grid(measured())
    faster = found.ratio((4, "code"), (AFTER, "auto"), (BEFORE, "auto"))
    assert faster is not None
    assert (faster.median, faster.low, faster.high) == (2.0, 2.0, 2.0)
    to_plain = found.mean_ratio((AFTER, "auto"), (AFTER, "plain"))
    assert to_plain is not None
    assert to_plain.median == pytest.approx(4.0)
    assert found.speed((4, "code"), AFTER, "auto") == 4 * TOKENS / 0.5
    assert found.speed((1, "code"), AFTER, "auto") == 2 * TOKENS / 0.5  # two requests at least


def test_answers_that_differ_are_counted() -> None:
    found = Grid(measured())
    assert found.answers((4, "code"), "plain") == (8, 8, 0)
    assert found.answers((4, "code"), "auto") == (8, 0, 8)


def test_time_of_the_policy_is_a_share_of_a_step() -> None:
    found = Grid(measured()).policy(AFTER, "auto", 1)
    assert found is not None
    ms, beyond_ms, share = found
    assert ms == pytest.approx(1.5)
    assert beyond_ms == pytest.approx(1.5 - 6.0)
    assert share == pytest.approx(0.03)


def test_best_fixed_setting_is_chosen_by_other_runs_than_it_is_judged_by() -> None:
    calls: list[tuple[str, str]] = []
    samples: list[mixed.TraceSample] = []
    plan = MixedPlan(("ngram-2", "ngram-5"), finalists=1, repeats=2, max_tokens=8, phase_s=0.5)
    mixed.measure(fake_pair(calls, **{"ngram-2": 1.0, "ngram-5": 4.0}), plan, samples, lambda _words: None)
    found = Traces(samples)
    assert found.best_fixed == "ngram-2"
    assert [one.setting for one in found.screened] == ["ngram-2", "ngram-5"]
    assert calls.count((AFTER, "ngram-5")) == 1  # screened, and no finalist
    assert calls.count((AFTER, "ngram-2")) == 3
    ratio = found.ratio((AFTER, "auto"), (AFTER, "ngram-2"))
    assert ratio is not None
    assert ratio.median == pytest.approx(2.0)


def test_settings_by_name() -> None:
    assert setting_fields("plain", None) == {}
    assert setting_fields("auto", "d") == {"drafter": "auto", "draft": "d", "num_draft": "auto"}
    assert setting_fields("ngram-5", "d") == {"drafter": "ngram", "draft": None, "num_draft": 5}
    for wrong in ("ngram", "ngram-many", "draft_model-2"):
        with pytest.raises(CheckoutError):
            setting_fields(wrong, None)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match="not a checkout"):
        Checkout("before", tmp_path, None)


@pytest.mark.release
def test_a_checkout_compared_with_itself(tmp_path: Path) -> None:
    words = f"--before {HERE} --after {HERE} --draft reference:draft --batches 2 --slices code --repeats 1"
    words += f" --max-tokens 6 --prompt-tokens 16 --profile off --out {tmp_path}"
    assert command.main(words.split()) == 0
    (page,) = tmp_path.glob("*.md")
    text = page.read_text(encoding="utf-8")
    assert "| plain | 2 | 2 | 0 | 0 |" in text
    assert "| auto | 2 | 2 | 0 | 0 |" in text
    assert str(tmp_path) not in text


def test_a_report_has_the_ratios_of_every_cell_and_keeps_the_samples() -> None:
    run = Run("command", {"grid": None}, fake_pair([]), measured(), (), False, 0.0)
    found = report_of(run)
    by_title = {table.title: table for table in found.tables}
    assert by_title["auto: tokens/s"].lines[0][:4] == ("1 code", "20.0", "40.0", "2.000 (2.00-2.00)")
    assert by_title["Answers of both checkouts compared"].lines[1] == ("auto", "12", "0", "12", "12")
    assert found.results["summary"]["auto: after/before"]["mean"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert len(found.results["samples"]) == 16
    assert found.json_line()
