"""The result of an evaluation: a JSON file with a versioned schema, and its rows of rates and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.errors import InputError
from foretoken.files import read_json, replace_text, to_json
from foretoken.measure.eval.counts import AnswerCounts
from foretoken.measure.stats import (
    CONFIDENCE,
    MIN_GROUPS,
    Counts,
    Interval,
    drawn,
    drawn_ratios,
    ends,
    expanded_interval,
    ratio,
    ratio_interval,
)

SCHEMA = "foretoken.acceptance/1"
BACKEND_SCHEMA = "foretoken.acceptance/2"  # of another engine: its identity has no hashes, and counts may be unknown
_MAY_BE_UNKNOWN = ("num_rounds", "num_drafts")
_METHOD = "bootstrap over prompts, percentiles expanded for few prompts"


@dataclass(frozen=True)
class EvalSample:
    """The counts of one answer: `prompt` is the key of its prompt, `rule` what judged its drafts ("": unknown).

    `timed` holds the tokens and the seconds of the whole answer and the mean time between two tokens (None: there are
    no two), where they were taken; files do not hold it.
    """

    drafter: str
    slice: str
    temperature: float
    prompt: str
    rule: str
    counts: AnswerCounts
    timed: tuple[int, float, float | None] | None = field(default=None, compare=False)

    @property
    def cell(self) -> Cell:
        """Where it belongs."""
        return Cell(self.drafter, self.slice, self.temperature)


@dataclass(frozen=True)
class Cell:
    """What is compared: one drafter on one slice at one temperature."""

    drafter: str
    slice: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.drafter} on {self.slice or 'no slice'} at temperature {self.temperature:g}"


@dataclass(frozen=True)
class EvalResult:
    """All answers, with what they are of and what is needed to repeat them.

    `identity` holds under `target` the hashes of the target, under `drafts` those of each drafter's draft models; of
    another engine under `backend` its name, its version and the name of its model.
    `settings` are the values that must be equal for two results to be compared. `complete` is False if the run was
    stopped.
    """

    samples: Sequence[EvalSample]
    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    complete: bool = True
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def cells(self) -> dict[Cell, list[EvalSample]]:
        """The answers by drafter, slice and temperature, in the order of the run."""
        found: dict[Cell, list[EvalSample]] = {}
        for sample in sorted(self.samples, key=lambda one: (self._drafters.index(one.drafter), one.temperature)):
            found.setdefault(sample.cell, []).append(sample)
        return found

    @property
    def _drafters(self) -> list[str]:
        return list(dict.fromkeys(sample.drafter for sample in self.samples))

    def as_dict(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The object of the file, with `rows`, which summarise the answers."""
        emitted: dict[str, float | None] = {}
        for drafter in self._drafters:
            own = [sample.counts for sample in self.samples if sample.drafter == drafter]
            rounds = _total([one.num_rounds for one in own])
            emitted[drafter] = None if rounds is None else sum(one.num_emitted for one in own) / max(1, rounds)
        head = {"schema": BACKEND_SCHEMA if "backend" in self.identity else SCHEMA, "complete": self.complete}
        names = ("date", "command", "machine", "versions", "identity", "settings", "options", "notes")
        interval = {"method": _METHOD, "confidence": CONFIDENCE}
        answers = [asdict(sample) for sample in self.samples]
        for answer in answers:
            del answer["timed"]
        about = {name: getattr(self, name) for name in names}
        return (
            head | about | {"interval": interval, "emitted_per_step": emitted, "rows": list(rows), "answers": answers}
        )


def write_result(found: Mapping[str, Any], path: Path) -> None:
    """Write the object of a result, replacing the file at once.

    Raises:
        StorageError: the file cannot be written.
    """
    replace_text("out", path, to_json(found, indent=1) + "\n")


def read_result(path: Path) -> EvalResult:
    """The result in a file that `write_result` wrote.

    Raises:
        StorageError: the file cannot be read, or is not JSON.
        InputError: it is no result of `foretoken eval`, has another schema, or is damaged.
    """
    found = read_json("against", path)
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, str) or schema.partition("/")[0] != SCHEMA.partition("/")[0]:
        raise InputError("against", str(path), f"is no result of foretoken eval: it must say schema {SCHEMA!r}")
    if schema not in (SCHEMA, BACKEND_SCHEMA):
        remedy = f"has schema {schema!r}, and this version reads {SCHEMA!r} and {BACKEND_SCHEMA!r}; measure it again"
        raise InputError("against", str(path), remedy)
    try:
        return _result(found)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("against", str(path), f"is damaged ({error!r}); measure it again") from error


def _result(found: Mapping[str, Any]) -> EvalResult:
    for name in ("identity", "settings", "options", "machine", "versions"):
        _check(found[name], dict, name)
    _check(found["complete"], bool, "complete")
    unknown = _MAY_BE_UNKNOWN if found["schema"] == BACKEND_SCHEMA else ()
    samples = [sample_of(one, unknown) for one in _check(found["answers"], list, "answers")]
    if not samples:
        raise ValueError("it holds no answer")
    names = [one.name for one in fields(EvalResult) if one.name != "samples"]
    return EvalResult(samples=samples, **{name: found[name] for name in names})


def sample_of(found: Mapping[str, Any], unknown: Sequence[str] = _MAY_BE_UNKNOWN) -> EvalSample:
    """One written answer; the counts `unknown` may be None.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    for name in ("drafter", "slice", "prompt", "rule"):
        _check(found[name], str, name)
    _check(found["temperature"], float, "temperature")
    counts = AnswerCounts(**found["counts"])
    for one in fields(counts):
        value = getattr(counts, one.name)
        if value is None and one.name in unknown:
            continue
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{one.name} must be a count")
    if len(counts.reached) != len(counts.passed) or counts.num_accepted > counts.num_drafted:
        raise ValueError("its counts contradict each other")
    timed = found.get("timed")
    return EvalSample(**{**found, "counts": counts, "timed": None if timed is None else tuple(timed)})


def _check(value: Any, kind: type, name: str) -> Any:  # noqa: ANN401 - whatever the file holds
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}")
    return value


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
        "accepted_per_draft_interval": ends(ratio_interval(per_draft)),
        "emitted_per_step": ratio(per_step),
        "emitted_per_step_interval": ends(ratio_interval(per_step)),
        "accepted_at_length": _accepted_at_length(samples) if has_positions else None,
        "positions": positions if has_positions else None,
    }


def _accepted_at_length(samples: Sequence[EvalSample]) -> list[dict[str, Any]]:
    """E[accepted] of drafts of 1, 2, ... tokens."""
    places = [at_position(samples, place) for place in range(num_positions(samples))]
    chances = [chance for counts in places if (chance := ratio(counts)) is not None]
    found = []
    for length in range(1, len(chances) + 1):
        expected = float(np.cumprod(chances[:length]).sum())
        interval = ends(expected_interval(places[:length]))
        found.append({"length": length, "expected": expected, "interval": interval})
    return found


def expected_interval(positions: Sequence[Counts]) -> Interval | None:
    """The interval of the expected number of accepted tokens of a draft with these positions: of the sum of the
    products of their chances.

    `positions[k]` holds (passed, reached) of every prompt, all in the same order; None for fewer than `MIN_GROUPS`
    prompts.
    """
    num_groups = int((positions[0][:, 1] > 0).sum())
    if num_groups < MIN_GROUPS:
        return None
    weights = drawn(len(positions[0]))
    chances = np.stack([drawn_ratios(counts, weights) for counts in positions])
    return expanded_interval(np.cumprod(chances, axis=0).sum(axis=0), num_groups)


def _counted(counts: Counts) -> dict[str, Any]:
    accepted, tried = (int(total) for total in counts.sum(axis=0).tolist())
    found = {"num_reached": tried, "num_accepted": accepted}
    return found | {"rate": ratio(counts), "interval": ends(ratio_interval(counts))}


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
