"""One check of an engine with its outcome, table and verdict of many, and the comparison of two sets of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.kv.prefix import shared_length
from foretoken.measure.report import Table

Result = Literal["pass", "fail", "undecided", "not claimed", "info", "not asked"]
_COLUMNS = ("result", "check", "where", "tokens", "found", "demanded", "sees with probability 0.99")
_JUSTIFY = "lllrl"
_STYLES: Mapping[str, str] = {
    "pass": "green",
    "fail": "bold red",
    "undecided": "yellow",
    "not claimed": "yellow",
    "info": "dim",
    "not asked": "dim",
}


@dataclass(frozen=True)
class Check:
    """One check.

    `found` is the measured value, `demanded` the required one, `sees` the smallest error that the check misses with
    probability 0.01 at most. "undecided" had too few tokens, "not claimed" is what a lossy rule does not guarantee,
    "info" is reported without a verdict. "not asked" cannot be asked of an engine; `found` says why.
    """

    name: str
    where: str
    result: Result
    num_tokens: int = 0
    found: str = ""
    demanded: str = ""
    sees: str = ""
    detail: str = ""


def read_checks(values: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Checks that a file holds as plain values."""
    return [Check(**one) for one in values]


def failed(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks that failed."""
    return tuple(check for check in checks if check.result == "fail")


def verdict(checks: Sequence[Check], interrupted: bool = False) -> tuple[str, bool]:
    """The outcome in one line, and whether the checks passed: one was made, none failed, none is missing."""
    count = {result: sum(check.result == result for check in checks) for result in _STYLES}
    judged = count["pass"] + count["fail"]
    text = f"FAIL: {count['fail']} of {judged} checks failed" if count["fail"] else f"PASS: {judged} checks"
    if count["undecided"]:
        text += f"; {count['undecided']} undecided"
    if count["not claimed"]:
        text += "; lossy rule: distribution not claimed"
    if count["not asked"]:
        text += f"; {count['not asked']} could not be asked"
    passed = not interrupted and count["pass"] > 0 and not count["fail"]
    if not passed and not count["fail"]:
        text = f"No verdict: {'the run was interrupted' if interrupted else 'no check could be made'}; {text}"
    return text, passed


def check_table(checks: Sequence[Check], title: str = "") -> Table:
    """A line for each check, and below them the details of those that have some."""
    styles = tuple(None if check.result == "pass" else _STYLES[check.result] for check in checks)
    details = tuple(f"{check.name} ({check.where}): {check.detail}" for check in checks if check.detail)
    lines = [(c.result, c.name, c.where, str(c.num_tokens or ""), c.found, c.demanded, c.sees) for c in checks]
    return Table(title, _COLUMNS, tuple(lines), details, _JUSTIFY, styles)


def equality(
    name: str,
    where: str,
    base: Sequence[Sequence[object]],
    again: Sequence[Sequence[object]],
    exact: bool,
    gap: Callable[[int, int], tuple[float, float]] = lambda *_: (math.inf, 0.0),
    unit: str = "token",
    num_tokens: int | None = None,
) -> Check:
    """Compare two sets of answers, each a row of units. Unless `exact`, an answer may differ where the two choices lie
    within rounding. `num_tokens` are those of `again`, where a unit is no token.

    `gap(i, place)` returns how far apart the choices of answers i are at that position, and how far rounding could move
    them.
    """
    told, num_beyond = [], 0
    for i, (one, other) in enumerate(zip(base, again, strict=True)):
        if tuple(one) == tuple(other):
            continue
        place = shared_length(one, other)
        if place == min(len(one), len(other)):
            told.append(f"one ends at {unit} {place}")
            num_beyond += 1
            continue
        apart, rounding = gap(i, place)
        why = f": {apart:.2g} apart, rounding explains {rounding:.2g}" if apart < math.inf else ""
        told.append(f"{unit} {place}{why}")
        num_beyond += exact or not apart <= rounding
    ties = len(told) - num_beyond
    return Check(
        name,
        where,
        "fail" if num_beyond else "pass",
        sum(map(len, again)) if num_tokens is None else num_tokens,
        f"{len(base) - len(told)} of {len(base)} equal" + (f", {ties} differ at near ties" if ties else ""),
        "all equal" if exact else "all equal except at near ties",
        detail=f"first differences at {'; '.join(told)}" if told else "",
    )
