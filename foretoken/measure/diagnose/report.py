"""The verdict of a diagnosis and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from foretoken.measure.diagnose.options import DiagnoseOptions
from foretoken.measure.diagnose.reading import FileFinding, Reported
from foretoken.measure.diagnose.reference import Accepted
from foretoken.measure.diagnose.repairs import Repair
from foretoken.measure.report import Report, Table, interruption_notes
from foretoken.measure.stats import TAIL, Interval, difference_interval, ends

_MIN_GAIN, _SURE_GAIN = 0.15, 0.05  # tokens per draft that a cause costs, and that it costs beyond chance
_CHANCE = 0.1  # an untrained head hits the most frequent token at most that often
EXPLAINED = (
    "Accepted: tokens of a draft that the target accepts, the mean over all places of its own answers at which a draft "
    "can begin (teacher-forced, float32), with a 95 % interval over prompts. By place: share of drafts accepted up to "
    "there. A cause is named where its repair gains at least 0.15 tokens per draft, and more than chance explains; the "
    "intervals of gains hold for all repairs together."
)


@dataclass(frozen=True)
class Trial:
    """A repair with what is accepted before and after it. `has_same_texts`: both along as many texts, one by one."""

    repair: Repair
    before: Accepted
    after: Accepted
    has_same_texts: bool = True

    @property
    def gain(self) -> float:
        """Tokens per draft."""
        return self.after.per_draft - self.before.per_draft

    def gain_interval(self, num_trials: int) -> Interval | None:
        """Of the gain, for `num_trials` together (Bonferroni)."""
        return difference_interval(self.after.counts, self.before.counts, self.has_same_texts, TAIL / num_trials)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found: what was read, what the drafter accepts as it is, the trials, what a server reports.

    `base` is None where the files alone decided; `interrupted`: not every repair was tried.
    """

    findings: tuple[FileFinding, ...] = ()
    base: Accepted | None = None
    trials: tuple[Trial, ...] = ()
    reported: Reported | None = None
    interrupted: bool = False

    @cached_property
    def causes(self) -> list[Trial]:
        """The repairs that gain enough, the best first."""
        return sorted(filter(self._is_cause, self.trials), key=lambda one: -one.gain)

    def _is_cause(self, trial: Trial) -> bool:
        interval = trial.gain_interval(len(self.trials))
        return interval is not None and trial.gain >= _MIN_GAIN and interval.low > _SURE_GAIN

    @property
    def nearest(self) -> Trial | None:
        """The wiring whose acceptance is that of the server, within `_MIN_GAIN`; the closest one."""
        if self.reported is None:
            return None
        distances = [(abs(one.after.per_draft - self.reported.per_draft), one) for one in self.trials]
        close = [pair for pair in distances if pair[0] <= _MIN_GAIN and pair[1].repair.head is not None]
        return min(close, key=lambda pair: pair[0])[1] if close else None


def diagnose_report(options: DiagnoseOptions, found: Diagnosis, command: str) -> Report:
    """The report of a diagnosis."""
    conclusion = conclusion_of(options, found)
    rows = [_row("as it is", found.base)] if found.base is not None else []
    rows += [_trial_row(one, len(found.trials)) for one in found.trials]
    results = {
        "kind": "diagnose",
        "cause": conclusion.cause,
        "verdict": conclusion.verdict,
        "remedy": conclusion.remedy,
        "findings": found.findings,
        "rows": rows,
        "reported": None if found.reported is None else asdict(found.reported),
        "interrupted": found.interrupted,
    }
    return Report(
        title="Diagnosis of acceptance",
        command=command,
        options=asdict(options),
        results=results,
        tables=tuple(_tables(options, found)),
        explained=EXPLAINED if found.base is not None else "",
        caveats=(*interruption_notes(found.interrupted, options.resume), *_caveats(options, found)),
        conclusions=(f"Remedy: {conclusion.remedy}",) if conclusion.remedy else (),
        verdict=conclusion.verdict,
        passed=conclusion.cause is None and not found.interrupted,
    )


@dataclass(frozen=True)
class Conclusion:
    """The name of what is wrong (None: nothing was found), the same in plain words, and what to do."""

    cause: str | None
    verdict: str
    remedy: str = ""


def conclusion_of(options: DiagnoseOptions, found: Diagnosis) -> Conclusion:
    """What follows from everything that was found."""
    what = "head" if options.head is not None else "draft model"
    if found.causes:
        one = found.causes[0]
        before, after = f"{one.before.per_draft:.2f}", f"{one.after.per_draft:.2f}"
        gain = f"{before} accepted tokens per draft, {after} with"
        verdict = f"Cause: {one.repair.cause}. {gain} {one.repair.changed} (gain {_gain(one, len(found.trials))})."
        return Conclusion(one.repair.cause, verdict, one.repair.remedy)
    if found.interrupted:
        tried = f"of {len(found.trials)} repairs that were tried none helps"
        return Conclusion(None, f"No verdict: the run was interrupted; {tried}.")
    if found.findings:
        first = found.findings[0]
        by_trial = ""
        if found.base is not None:
            by_trial = f" It accepts {found.base.per_draft:.2f} per draft, and no repair helps."
        verdict = f"Cause{'' if first.is_certain else ' (likely)'}: {first.cause}. {first.found}.{by_trial}"
        return Conclusion(first.cause, verdict, first.remedy)
    assert found.base is not None
    accepts = f"accepts {_figure(found.base.per_draft, found.base.interval)} tokens per draft"
    if found.base.places[0] < _CHANCE:
        why = "near chance, and no repair helps: it is not trained, or for another target"
        remedy = "take the head that was trained for this very checkpoint, or train one (foretoken train eagle)"
        return Conclusion("other target", f"Cause (likely): other target. The {what} {accepts}, {why}.", remedy)
    low = found.base.per_draft if found.base.interval is None else found.base.interval.low
    if found.reported is not None and found.reported.per_draft < low - _MIN_GAIN:
        near = f"; with {found.nearest.repair.changed} the {what} would accept as much" if found.nearest else ""
        served = f"by itself, the server {found.reported.per_draft:.2f}{near}"
        remedy = "compare how the server reads the head with the table: its config, number format and chat template"
        return Conclusion("endpoint", f"Cause: the endpoint. The {what} {accepts} {served}.", remedy)
    steps = f"({1 + found.base.per_draft:.2f} tokens per step)"
    return Conclusion(None, f"Nothing wrong found; this {what} {accepts} by itself {steps}.")


def _row(name: str, accepted: Accepted) -> dict[str, Any]:
    interval = ends(accepted.interval)
    row = {"setting": name, "accepted_per_draft": accepted.per_draft, "interval": interval, "places": accepted.places}
    return row | {"num_drafts": sum(accepted.num_drafts), "num_broken": accepted.num_broken}


def _trial_row(trial: Trial, num_trials: int) -> dict[str, Any]:
    return _row(trial.repair.changed, trial.after) | {
        "cause": trial.repair.cause,
        "remedy": trial.repair.remedy,
        "before": trial.before.per_draft,
        "gain": trial.gain,
        "gain_interval": ends(trial.gain_interval(num_trials)),
    }


def _tables(options: DiagnoseOptions, found: Diagnosis) -> list[Table]:
    tables = []
    if found.findings:
        read = tuple((one.cause, one.found, one.remedy) for one in found.findings)
        tables.append(Table("Read from the files", ("", "found", "remedy"), read, justify="l"))
    if found.base is None:
        return tables
    num_places = len(found.base.places)
    headings = ("", "accepted", "gain", *(f"place {place + 1}" for place in range(num_places)))
    lines = [("as it is", _figure(found.base.per_draft, found.base.interval), "", *_shares(found.base.places))]
    if found.reported is not None:
        reported = _shares(found.reported.places)
        filled = (*reported, *[""] * (num_places - len(reported)))
        lines.append((f"reported by {options.url}", f"{found.reported.per_draft:.2f}", "", *filled))
    for one in sorted(found.trials, key=lambda trial: -trial.gain):
        after = _figure(one.after.per_draft, one.after.interval)
        lines.append((one.repair.changed, after, _gain(one, len(found.trials)), *_shares(one.after.places)))
    return [*tables, Table("Accepted as it is, and with each repair", headings, tuple(lines))]


def _caveats(options: DiagnoseOptions, found: Diagnosis) -> list[str]:
    caveats = []
    if found.reported is not None:
        caveats.append(f"{options.url} is {found.reported.server}; read were {found.reported.source}.")
    for one in found.causes[1:]:
        gain = _gain(one, len(found.trials))
        caveats.append(f"Also better with {one.repair.changed} (gain {gain}): {one.repair.remedy}.")
    if found.base is not None and found.causes and found.findings:
        caveats.extend(f"{one.found}: {one.remedy}." for one in found.findings)
    return caveats


def _gain(trial: Trial, num_trials: int) -> str:
    interval = trial.gain_interval(num_trials)
    return f"{trial.gain:+.2f}" + ("" if interval is None else f" [{interval.low:+.2f}, {interval.high:+.2f}]")


def _figure(value: float, interval: Interval | None) -> str:
    return f"{value:.2f}" + ("" if interval is None else f" [{interval.low:.2f}, {interval.high:.2f}]")


def _shares(places: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{share:.0%}" for share in places)
