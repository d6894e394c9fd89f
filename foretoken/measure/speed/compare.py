"""Rows compared: ratios between engines and drafters, and the best setting of each drafter by slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foretoken.measure.options import DEFAULT_NUMERICS, PLAIN
from foretoken.measure.speed.plan import ENGINE
from foretoken.measure.speed.rows import SpeedRow
from foretoken.measure.stats import best_fixed

_LLAMA_CPP = "llama.cpp"
_NGRAM = "ngram"  # the counterpart of every lookup of another engine
SUMMARY_NOTE = (
    "Speedup over plain and tokens a step, each at its best number of draft tokens (in brackets) on the slice."
)


def best(rows: Iterable[SpeedRow]) -> SpeedRow | None:
    """The fastest row, the first of equal ones; None where there is none."""
    return max(rows, key=lambda row: row.tokens_per_s, default=None)


def against_peer(row: SpeedRow, rows: Sequence[SpeedRow]) -> tuple[float, str] | None:
    """Our speed over that of the fastest other engine with the same drafter on the same slice, greedy, and that one's
    name.

    Plain is compared with plain; None where no other engine has the drafter.
    """
    if row.engine != ENGINE or row.temperature != 0.0:
        return None
    like = [
        other
        for other in rows
        if other.engine != ENGINE
        and (other.slice, other.temperature) == (row.slice, row.temperature)
        and (other.drafter is None if row.drafter is None else other.counterpart == row.drafter)
    ]
    fastest = best(like)
    return (
        None
        if fastest is None or not fastest.tokens_per_s
        else (row.tokens_per_s / fastest.tokens_per_s, fastest.setting)
    )


def ratios(rows: Sequence[SpeedRow]) -> dict[str, dict[str, float]]:
    """Per slice, greedy: how our plain, our best and each of our drafters compare with every kind of decoding of every
    engine.

    A kind is plain or one drafter, taken at its best setting; plain is compared with plain alone. `best free` is our
    fastest drafter that needs nothing but the target and the text.
    """
    return {
        name: _ratios([row for row in _of_one_numerics(rows) if row.slice == name and row.temperature == 0.0])
        for name in dict.fromkeys(row.slice for row in rows)
    }


def _of_one_numerics(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """The rows of the default numerics, or of the only ones; those of other engines stay."""
    own = [row.numerics for row in rows if row.engine == ENGINE]
    wanted = DEFAULT_NUMERICS if DEFAULT_NUMERICS in own or not own else own[0]
    return [row for row in rows if row.engine != ENGINE or row.numerics == wanted]


def _ratios(rows: Sequence[SpeedRow]) -> dict[str, float]:
    kinds: dict[tuple[str, str | None], float] = {}
    for row in rows:
        kinds[row.engine, row.drafter] = max(row.tokens_per_s, kinds.get((row.engine, row.drafter), 0.0))
    ours = [row for row in rows if row.engine == ENGINE and row.drafter is not None]
    plain, speculative, free = kinds.get((ENGINE, None)), best(ours), best(row for row in ours if row.free)
    found: dict[str, float] = {}

    def add(key: str, over: float | None, under: float | None) -> None:
        if over and under:
            found[key] = over / under

    for (engine, drafter), speed in kinds.items():
        if engine != ENGINE and drafter is None:
            add(f"plain / {engine} {PLAIN}", plain, speed)
        if engine != ENGINE or drafter is None:
            add(f"speculative / {engine} {drafter or PLAIN}", _speed(speculative), speed)
    add(f"best free / {ENGINE} {PLAIN}", _speed(free), plain)
    lookups = best(row for row in rows if row.engine == _LLAMA_CPP and row.counterpart == _NGRAM)
    add(f"best free / {_LLAMA_CPP} best n-gram", _speed(free), _speed(lookups))
    own = [row for row in rows if row.engine == ENGINE and not row.lossy]
    fixed = best_fixed(own, lambda row: row.num_draft == "auto", lambda row: row.tokens_per_s)
    for row in own:
        if row.num_draft == "auto" and fixed is not None:
            add(f"{row.setting} / best fixed ({fixed.setting})", row.tokens_per_s, fixed.tokens_per_s)
    for drafter in dict.fromkeys(row.drafter for row in ours):
        for engine in dict.fromkeys(row.engine for row in rows if row.counterpart == drafter):
            other = best(row for row in rows if row.engine == engine and row.counterpart == drafter)
            add(f"{drafter} / {engine} best {drafter}", kinds.get((ENGINE, drafter)), _speed(other))
    return found


def _speed(row: SpeedRow | None) -> float | None:
    return None if row is None else row.tokens_per_s


def kind_of(row: SpeedRow) -> str:
    """What a row is about, whatever the number of draft tokens: the drafter with its options, behind another engine's
    name.
    """
    name = (row.drafter or PLAIN) + (f"({row.options})" if row.options else "")
    name += "" if row.numerics == DEFAULT_NUMERICS else f" {row.numerics}"
    return name if row.engine == ENGINE else f"{row.engine} {name}"


def summary(rows: Sequence[SpeedRow], temperature: float) -> list[list[str]]:
    """Drafter by slice at one temperature: a line of headings, then a line per kind of drafting; [] for a single slice.

    A cell is speedup, tokens a step and the number of draft tokens of the fastest setting there; empty where it was not
    measured.
    """
    rows = [row for row in rows if row.temperature == temperature]
    slices = list(dict.fromkeys(row.slice for row in rows))
    if len(slices) < 2:
        return []
    compared = [row for row in rows if row.drafter is not None or row.engine != ENGINE]
    kinds = dict.fromkeys(kind_of(row) for row in sorted(compared, key=lambda row: row.engine != ENGINE))
    table = [["drafter", *slices]]
    for kind in kinds:
        own = [best(row for row in rows if row.slice == name and kind_of(row) == kind) for name in slices]
        table.append([kind, *("" if row is None else _cell(row) for row in own)])
    return table


def _cell(row: SpeedRow) -> str:
    steps = "" if row.emitted_per_step is None else f" {row.emitted_per_step:.2f}"
    speedup = f"{row.tokens_per_s:.1f} tok/s" if row.speedup is None else f"{row.speedup:.2f}x"
    return speedup + steps + ("" if row.num_draft is None else f" ({row.num_draft})")


def by_position(row: SpeedRow, most: int = 5) -> str:
    """Per cent accepted at the first places of a draft; an ellipsis says that there are more."""
    shares = row.acceptance_per_position
    return " ".join(f"{100 * share:.0f}" for share in shares[:most]) + (" ..." if len(shares) > most else "")
