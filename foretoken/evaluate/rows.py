"""The rows of a result: each cell's rates with their intervals, over all positions and position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from foretoken.evaluate.result import Cell, EvalResult, EvalSample
from foretoken.measure.stats import Counts, Interval, drawn, drawn_ratios, expanded_interval, ratio, ratio_interval


def rows_of(result: EvalResult) -> list[dict[str, Any]]:
    """One row for each drafter, slice and temperature.

    `positions` holds for each position of the draft the chance that its token is accepted given that the one before it
    was (`rate`). `accepted_at_length` is what follows from these for drafts of exactly 1, 2, ... tokens: the expected
    number of accepted ones. A lookup's drafts are often shorter than asked for; then `accepted_per_draft`, measured
    over the drafts as they were, is smaller. What another engine does not report is None.
    """
    return [_row(cell, samples) for cell, samples in result.cells.items()]


def overall(samples: Sequence[EvalSample]) -> Counts:
    """(accepted, drafted) of each answer."""
    return _pairs([(one.counts.num_accepted, one.counts.num_drafted) for one in samples])


def at_position(samples: Sequence[EvalSample], position: int) -> Counts:
    """(passed, reached) of each answer at a position, counted from 0."""
    return _pairs(
        [
            (one.counts.passed[position], one.counts.reached[position])
            if position < len(one.counts.reached)
            else (0, 0)
            for one in samples
        ]
    )


def num_positions(samples: Sequence[EvalSample]) -> int:
    """The deepest position that was reached."""
    return max(len(one.counts.reached) for one in samples)


def _row(cell: Cell, samples: Sequence[EvalSample]) -> dict[str, Any]:
    totals = {
        name: _total([getattr(one.counts, name) for one in samples])
        for name in ("num_rounds", "num_drafts", "num_drafted", "num_accepted", "num_emitted")
    }
    has_positions = all(one.counts.has_positions for one in samples)
    places = range(num_positions(samples))
    positions = [{"position": place + 1} | _counted(at_position(samples, place)) for place in places]
    counted = _counted(overall(samples))
    per_draft = _known_pairs([(one.counts.num_accepted, one.counts.num_drafts) for one in samples])
    per_step = _known_pairs([(one.counts.num_emitted, one.counts.num_rounds) for one in samples])
    return {
        **asdict(cell),
        "rules": sorted({one.rule for one in samples} - {""}),
        "num_prompts": len(samples),
        **totals,
        "acceptance_rate": counted["rate"],
        "acceptance_interval": counted["interval"],
        "accepted_per_draft": ratio(per_draft),
        "accepted_per_draft_interval": _ends(per_draft),
        "emitted_per_step": ratio(per_step),
        "emitted_per_step_interval": _ends(per_step),
        "accepted_at_length": _accepted_at_length(samples) if has_positions else None,
        "positions": positions if has_positions else None,
    }


def _accepted_at_length(samples: Sequence[EvalSample]) -> list[dict[str, Any]]:
    """E[accepted] of drafts of 1, 2, ... tokens."""
    places = [at_position(samples, place) for place in range(num_positions(samples))]
    chances = [chance for counts in places if (chance := ratio(counts)) is not None]
    return [
        {
            "length": length,
            "expected": expected_accepted(chances[:length]),
            "interval": _pair(expected_interval(places[:length])),
        }
        for length in range(1, len(chances) + 1)
    ]


def expected_accepted(chances: Sequence[float]) -> float:
    """E[accepted] of a draft with one position for each chance: the sum of their products."""
    return float(np.cumprod(chances).sum())


def expected_interval(positions: Sequence[Counts]) -> Interval | None:
    """The interval of the expected number of accepted tokens of a draft with these positions (`expected_accepted`).

    `positions[k]` holds (passed, reached) of every prompt, all in the same order; None for fewer than two prompts.
    """
    weights = drawn(len(positions[0]))
    chances = np.stack([drawn_ratios(counts, weights) for counts in positions])
    return expanded_interval(np.cumprod(chances, axis=0).sum(axis=0), int((positions[0][:, 1] > 0).sum()))


def _counted(counts: Counts) -> dict[str, Any]:
    accepted, tried = (int(total) for total in counts.sum(axis=0).tolist())
    return {"num_reached": tried, "num_accepted": accepted, "rate": ratio(counts), "interval": _ends(counts)}


def _ends(counts: Counts) -> list[float] | None:
    return _pair(ratio_interval(counts))


def _pair(found: Interval | None) -> list[float] | None:
    return None if found is None else [found.low, found.high]


def _total(numbers: Sequence[int | None]) -> int | None:
    """The sum; None if one is unknown."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _known_pairs(pairs: Sequence[tuple[int, int | None]]) -> Counts:
    """`_pairs`; none at all if one is unknown, of which no ratio is made."""
    known = [(above, below) for above, below in pairs if below is not None]
    return _pairs(known if len(known) == len(pairs) else [])


def _pairs(pairs: Sequence[tuple[int, int]]) -> Counts:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)
