"""Comparison of two results: which drafter lost acceptance on which slice, beyond a bound and beyond chance.

The bound is absolute: 0.05 are five points of acceptance rate. At a fixed number of draft tokens the tokens per step
change in proportion to that difference. A relative bound would fail a drafter that went from 0.04 to 0.03, which costs
one token in a hundred.

A cell *lost* if the whole interval of its loss lies above the bound, is *kept* if none of it does, and *undecided*
otherwise. The intervals hold for all compared cells together (Bonferroni): where no cell lost more than the bound, one
is reported as lost with probability of about 0.05 at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from foretoken.errors import InputError
from foretoken.measure.eval.identity import backend_changes, changes
from foretoken.measure.eval.result import Cell, EvalResult, EvalSample, at_position, num_positions, overall
from foretoken.measure.stats import CONFIDENCE, MIN_GROUPS, Interval, difference_interval, ratio

Outcome = Literal["lost", "undecided", "kept"]
# What the models ran in, with the values of files that do not say it: acceptance may be compared across them, and then
# they are named as what changed.
_RUN_OPTIONS = {"weights": "auto", "dtype": "auto", "numerics": "default"}
_ROUNDING = 1e-9  # a loss of exactly the bound is kept


@dataclass(frozen=True)
class CellChange:
    """The change of one cell: acceptance rates, the loss with its interval, and the position that lost most.

    `num_prompts` are the common ones if `paired`, otherwise the smaller number of both. `position` counts from 1, with
    its chance before and after; None if nothing was reached in both.
    """

    cell: Cell
    outcome: Outcome
    before: float | None
    after: float | None
    loss: float | None
    interval: Interval | None
    paired: bool
    num_prompts: int
    position: tuple[int, float, float] | None = None

    def __str__(self) -> str:
        if self.before is None or self.after is None or self.loss is None:
            return f"{self.cell}: nothing was drafted"
        text = f"{self.cell}: {self.before:.3f} -> {self.after:.3f}"
        if self.interval is not None:
            text += f", lost {self.loss:.3f} ({self.interval.low:.3f} to {self.interval.high:.3f})"
        if self.position is not None and self.outcome == "lost":
            place, old, new = self.position
            text += f", most at position {place} ({old:.3f} -> {new:.3f})"
        return text


@dataclass(frozen=True)
class EvalComparison:
    """The cells of two results, what differs in their identities, and what only one of them has."""

    max_lost: float
    cells: Sequence[CellChange]
    changed: Sequence[str]
    notes: Sequence[str]

    @property
    def lost(self) -> list[CellChange]:
        """The cells that lost more than the bound."""
        return [one for one in self.cells if one.outcome == "lost"]

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        undecided = sum(one.outcome == "undecided" for one in self.cells)
        text = f"{len(self.lost)} of {len(self.cells)} lost more than {self.max_lost:g} of acceptance rate"
        return text + (f"; {undecided} undecided: measure more prompts" if undecided else "")


def check_comparable(
    before: EvalResult, settings: Mapping[str, object], drafters: Sequence[str], slices: Sequence[str]
) -> None:
    """Check that results of these settings can be compared with an earlier one, before minutes of work.

    Raises:
        InputError: a setting that acceptance depends on differs, or no drafter or slice is in both.
    """
    for name, value in settings.items():
        if before.settings.get(name) != value:
            remedy = f"acceptance depends on {name}, which is {value!r} here; measure both with the same"
            raise InputError("against", f"{name}={before.settings.get(name)!r}", remedy)
    for kind, there, here in (
        ("drafter", {one.drafter for one in before.samples}, drafters),
        ("slice", {one.slice for one in before.samples}, slices),
    ):
        if there.isdisjoint(here):
            names = ", ".join(sorted(set(here)))
            remedy = f"no {kind} in common with this run ({names}); name one that the earlier file has"
            raise InputError("against", ", ".join(sorted(there)), remedy)


def compare(before: EvalResult, after: EvalResult, max_lost: float) -> EvalComparison:
    """Compare every drafter, slice and temperature that both have.

    Prompts are paired by their content where at least `MIN_GROUPS` are in both.

    Raises:
        InputError: no drafter, slice and temperature is in both.
    """
    old, new = before.cells, after.cells
    common = [cell for cell in new if cell in old]
    if not common:
        raise InputError("against", before.command, "has no drafter, slice and temperature in common with this run")
    tail = (1 - CONFIDENCE) / len(common)
    cells = [_change(cell, old[cell], new[cell], max_lost, tail) for cell in common]
    changed = _changed(before, after)
    notes = [f"{cell} is only in the earlier file" for cell in old if cell not in new]
    notes += [f"{cell} is not in the earlier file" for cell in new if cell not in old]
    for result, name in ((before, "the earlier file"), (after, "this run")):
        if not result.complete:
            notes.append(f"{name} is incomplete: it was interrupted")
    if any(not one.paired for one in cells):
        notes.append("some cells have other prompts than before: their intervals are those of two samples")
    return EvalComparison(max_lost, cells, changed, notes)


def _change(
    cell: Cell, before: Sequence[EvalSample], after: Sequence[EvalSample], max_lost: float, tail: float
) -> CellChange:
    old = {sample.prompt: sample for sample in before}
    new = {sample.prompt: sample for sample in after}
    common = [key for key in new if key in old]
    paired = len(common) >= min(MIN_GROUPS, len(old), len(new))
    if paired:
        before, after = [old[key] for key in common], [new[key] for key in common]
    counts = overall(before), overall(after)
    if ratio(counts[1]) is None and ratio(counts[0]) is not None:  # a drafter that stopped drafting lost all
        counts[1][:, 1] = 1
    rates = ratio(counts[0]), ratio(counts[1])
    interval = difference_interval(*counts, paired, tail)
    num_prompts = min(len(before), len(after))
    outcome: Outcome = "kept" if rates[0] is None else _outcome(interval, num_prompts, max_lost)
    loss = None if rates[0] is None or rates[1] is None else rates[0] - rates[1]
    return CellChange(cell, outcome, *rates, loss, interval, paired, num_prompts, _worst_position(before, after))


def _outcome(interval: Interval | None, num_prompts: int, max_lost: float) -> Outcome:
    if interval is None or num_prompts < MIN_GROUPS:
        return "undecided"
    bound = max_lost + _ROUNDING
    return "lost" if interval.low > bound else "kept" if interval.high <= bound else "undecided"


def _worst_position(before: Sequence[EvalSample], after: Sequence[EvalSample]) -> tuple[int, float, float] | None:
    found = []
    for place in range(min(num_positions(before), num_positions(after))):
        old, new = ratio(at_position(before, place)), ratio(at_position(after, place))
        if old is not None and new is not None:
            found.append((place + 1, old, new))
    return max(found, key=lambda one: one[1] - one[2], default=None)


def _changed(before: EvalResult, after: EvalResult) -> list[str]:
    """What differs between the identities, `target: weights (... -> ...)` or `backend: version (... -> ...)`, and in
    what the models ran in, `weights ('auto' -> 'int8')`.
    """
    pairs = [("target", before.identity.get("target"), after.identity.get("target"))]
    old_drafts, new_drafts = before.identity.get("drafts", {}), after.identity.get("drafts", {})
    for name in new_drafts:
        pairs += [(f"draft of {name}", *both) for both in zip(old_drafts.get(name, ()), new_drafts[name], strict=False)]
    found = [f"{name}: {', '.join(told)}" for name, old, new in pairs if (told := changes(old or {}, new or {}))]
    if differing := backend_changes(before.identity.get("backend", {}), after.identity.get("backend", {})):
        found.append(f"backend: {', '.join(differing)}")
    both = ((name, before.versions.get(name), now) for name, now in after.versions.items())
    versions = [f"{name} {old} -> {now}" for name, old, now in both if old != now]
    for name, default in _RUN_OPTIONS.items():
        old, new = before.options.get(name, default), after.options.get(name, default)
        if old != new:
            found.append(f"{name} ({old!r} -> {new!r})")
    return found + ([f"versions: {', '.join(versions)}"] if versions else [])
