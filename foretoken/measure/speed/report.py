"""The report of a speed measurement: its tables, and plots of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from foretoken.measure.options import DEFAULT_NUMERICS, PLAIN, STRICT
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.price import PriceRow, price_rows, price_tables
from foretoken.measure.report import Report, Table
from foretoken.measure.speed.plan import ENGINE
from foretoken.measure.speed.rows import SpeedRow, strict_differing
from foretoken.measure.stats import FEW_PROMPTS, MIN_GROUPS, best_fixed

_LLAMA_CPP = "llama.cpp"
_NGRAM = "ngram"  # the counterpart of every lookup of another engine
SUMMARY_NOTE = (
    "Speedup over plain and tokens a step, each at its best number of draft tokens (in brackets) on the slice."
)
EXPLAINED = (
    "tok/s is the median over repeats of the tokens after the prompt's forward pass; speedup is against `plain` on "
    "the same slice in the same run, of each prompt its medians over repeats, `95 %` its bootstrap interval over "
    "prompts, each drawn with its plain answer. "
    "`end to end` is the same ratio for whole answers, their prompts included; tokens/s for `plain`. "
    "`repeats` is the share of 4-grams that an output had used before: repetition raises the acceptance of every "
    "drafter. `differ` counts greedy outputs that differ from plain decoding's: in 16 bits near ties can resolve "
    "otherwise; with strict numerics none may. `contended` counts answers during which other processes took a tenth "
    "of the cores or more. `by position` is the acceptance in per cent at the 1st, 2nd, ... draft token; `vs peer` "
    "compares with the fastest other engine that drafts in the same way."
)
_PRICED = "Whole answers, their prompts included, one request at a time."


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
    others = [other for other in rows if (other.slice, other.temperature) == (row.slice, row.temperature)]
    fastest = best(
        other
        for other in others
        if other.engine != ENGINE
        and (other.drafter is None if row.drafter is None else other.counterpart == row.drafter)
    )
    if fastest is None or not fastest.tokens_per_s:
        return None
    return row.tokens_per_s / fastest.tokens_per_s, fastest.setting


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
    """What a row is about, whatever the number of draft tokens: another engine's name, the drafter with its options."""
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


_CELLS: Mapping[str, Callable[[SpeedRow], str]] = {  # by heading; beside them stands what a peer does
    "setting": lambda row: row.setting + (" (lossy)" if row.lossy else ""),
    "tok/s": lambda row: _number(row.tokens_per_s),
    "min-max": lambda row: f"{_number(row.tokens_per_s_min)}-{_number(row.tokens_per_s_max)}",
    "speedup": lambda row: "" if row.speedup is None else f"{row.speedup:.2f}x",
    "95 %": lambda row: "" if _is_baseline(row) else interval(row.speedup_low, row.speedup_high),
    "end to end": lambda row: _end_to_end(row),
    "accepted": lambda row: _percent(row.acceptance_rate),
    "by position": lambda row: by_position(row),
    "tok/step": lambda row: "" if row.emitted_per_step is None else f"{row.emitted_per_step:.2f}",
    "ms/step": lambda row: _number(row.step_ms),
    "draft+target+rest": lambda row: _parts(row),
    "first token": lambda row: "" if row.ttft_s is None else f"{1e3 * row.ttft_s:.0f} ms",
    "repeats": lambda row: _percent(row.repeated_4grams),
    "differ": lambda row: _share_of(row.num_differing, row.num_compared, shows_zero=not _is_baseline(row)),
    "contended": lambda row: _share_of(row.num_contended, row.num_answers, shows_zero=False),
}


def speed_report(
    rows: Sequence[SpeedRow],
    options: Mapping[str, Any],
    command: str,
    caveats: Sequence[str],
    results: Mapping[str, Any] | None = None,
    price_per_hour: float | None = None,
    **about: Any,  # noqa: ANN401 - versions, machine and date, where they are known
) -> Report:
    """The report of `rows`: tables by slice and temperature, a summary, and `results`, further fields of its JSON."""
    slo_ms = options.get("slo_ms")
    found, prices = ratios(rows), speed_prices(rows, price_per_hour, slo_ms)
    return Report(
        title="Speed",
        command=command,
        options=options,
        results={"rows": tuple(rows), "ratios": found, "prices": prices, "strict_differing": strict_differing(rows)}
        | dict(results or {}),
        tables=(*speed_tables(rows, found), *price_tables(prices, "slice, temperature", _PRICED, slo_ms)),
        conclusions=_strict_notes(rows),
        plots=speed_plots(rows),
        explained=EXPLAINED,
        caveats=tuple(caveats),
        **about,
    )


def speed_prices(
    rows: Sequence[SpeedRow], price_per_hour: float | None, slo_ms: float | None = None
) -> tuple[PriceRow, ...]:
    """The price of tokens by slice and temperature, where engines tell the time of whole answers."""
    name = "e2e_tokens_per_s" if slo_ms is None else "timely_tokens_per_s"
    speeds = [(f"{row.slice}, {row.temperature:g}", row.setting, getattr(row, name)) for row in rows]
    return price_rows(price_per_hour, speeds, PLAIN)


def speed_tables(rows: Sequence[SpeedRow], found: Mapping[str, Mapping[str, float]]) -> tuple[Table, ...]:
    """A table per slice and temperature with its ratios (`found`, by slice, greedy), and a summary per temperature."""
    tables = []
    for (name, temperature), own in _groups(rows).items():
        lines = tuple((*(cell(row) for cell in _CELLS.values()), _beside_peer(row, own)) for row in own)
        notes = (*_few_notes(own), *_position_notes(own), *_difference_notes(own), *_rival_notes(own))
        if temperature == 0.0 and found.get(name):
            notes += ("Ratios: " + ", ".join(f"{key} {value:.2f}x" for key, value in found[name].items()) + ".",)
        tables.append(Table(f"{name}, temperature {temperature:g}", (*_CELLS, "vs peer"), lines, notes))
    for temperature in dict.fromkeys(row.temperature for row in rows):
        short = summary(rows, temperature)
        if short:
            lines = tuple(map(tuple, short[1:]))
            tables.append(Table(f"Summary, temperature {temperature:g}", tuple(short[0]), lines, (SUMMARY_NOTE,)))
    return tuple(tables)


def speed_plots(rows: Sequence[SpeedRow]) -> tuple[Plot, ...]:
    """For each temperature the speedups of all settings by slice; speeds where plain decoding was not measured."""
    plots = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        points: dict[str, list[Point]] = {}
        speeds: dict[str, list[Point]] = {}
        for row in (row for row in rows if row.temperature == temperature):
            if row.speedup is not None and not _is_baseline(row):
                ends = (row.speedup_low, row.speedup_high)
                points.setdefault(row.setting, []).append(Point(row.slice, row.speedup, *ends))
            speeds.setdefault(row.setting, []).append(Point(row.slice, row.tokens_per_s))
        if points:
            title, unit, reference = "Speedup over plain decoding", "times plain decoding", 1.0
        else:
            points, title, unit, reference = speeds, "Speed", "tokens per second", None
        series = tuple(Series(name, tuple(own)) for name, own in points.items())
        plots.append(Plot(f"{title}, temperature {temperature:g}", unit, series, baseline=reference))
    return tuple(plots)


def _groups(rows: Sequence[SpeedRow]) -> dict[tuple[str, float], list[SpeedRow]]:
    groups: dict[tuple[str, float], list[SpeedRow]] = {}
    for row in rows:
        groups.setdefault((row.slice, row.temperature), []).append(row)
    return groups


def _parts(row: SpeedRow) -> str:
    """The milliseconds of a step by what they went into."""
    parts = (row.draft_ms_per_step, row.verify_ms_per_step, row.rest_ms_per_step)
    return "" if None in parts else "+".join(map(_number, parts))


def _beside_peer(row: SpeedRow, rows: Sequence[SpeedRow]) -> str:
    peer = against_peer(row, rows)
    return "" if peer is None else f"{peer[0]:.2f}x {peer[1]}"


def _number(value: float | None) -> str:
    """Three digits or so: what a measurement is worth."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def interval(low: float | None, high: float | None) -> str:
    """The ends of a bootstrap interval; empty where there is none, as with few prompts."""
    return "" if low is None or high is None else f"{low:.2f}-{high:.2f}"


def _end_to_end(row: SpeedRow) -> str:
    """The ratio of whole answers to plain decoding's, with its interval; plain decoding's own speed."""
    if row.e2e_speedup is None or _is_baseline(row):
        return _number(row.e2e_tokens_per_s)
    ends = interval(row.e2e_speedup_low, row.e2e_speedup_high)
    return f"{row.e2e_speedup:.2f}x" + (f" ({ends})" if ends else "")


def _is_baseline(row: SpeedRow) -> bool:
    return row.engine == ENGINE and row.drafter is None


def _share_of(count: int | None, total: int | None, shows_zero: bool) -> str:
    return "" if count is None or not (count or shows_zero) else f"{count} of {total}"


def _strict_notes(rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    """Whether strict numerics held, where they were measured."""
    if not any(row.numerics == STRICT and row.num_compared is not None for row in rows):
        return ()
    count = strict_differing(rows)
    if not count:
        return ("Strict numerics: no greedy output differs from plain decoding.",)
    return (f"STRICT NUMERICS FAILED: {count} greedy outputs differ from plain decoding, and none may.",)


def _few_notes(rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    """That ratios stand without an interval, where a row was measured on too few prompts."""
    has_few = any(row.speedup is not None and row.num_prompts < MIN_GROUPS for row in rows if not _is_baseline(row))
    return (FEW_PROMPTS,) if has_few else ()


def _position_notes(rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    """Acceptance at every position, where a row has any."""
    known = ((row.setting, row.acceptance_per_position) for row in rows if row.acceptance_per_position)
    found = [f"{setting} {' '.join(f'{share:.2f}' for share in shares)}" for setting, shares in known]
    return (f"Accepted by position: {'; '.join(found)}.",) if found else ()


def _rival_notes(rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    """Each drafter against the fastest drafting setting of other engines."""
    told = []
    for row in (row for row in rows if row.over_rival is not None):
        low, high = row.over_rival_low, row.over_rival_high
        told.append(f"{row.setting} {row.over_rival:.2f}x" + (f" ({low:.2f}-{high:.2f})" if low and high else ""))
    name = next((row.rival for row in rows if row.rival is not None), None)
    return (f"Against {name}, the fastest drafting setting of other engines: {', '.join(told)}.",) if told else ()


def _difference_notes(rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    told = []
    for row in (row for row in rows if row.differences):
        places = [" ".join(f"{key} {value}" for key, value in place.items()) for place in row.differences]
        told.append(f"{row.setting} at {', '.join(places)}")
    return (f"Greedy outputs that differ from plain decoding: {'; '.join(told)}.",) if told else ()
