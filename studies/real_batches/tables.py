"""Ratios to plain decoding of the same turns, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.machine.neighbours import CONTENDED
from foretoken.measure.report import Table
from foretoken.measure.stats import paired_ratio
from studies.real_batches.plan import MIXED, Cell
from studies.real_batches.stage import PLAIN

ALL = "all"
ADAPTIVE = "auto"
EXPLAINED = (
    "Tokens per second from before tokenising to the last token, prompts included; each ratio is that of total tokens "
    "over total seconds, of each prompt its medians over repeats, with a 95 % interval over prompts (bootstrap-t). "
    "With several requests at once the seconds of a turn are divided among its prompts by the time that the engine "
    "attributes to each of them. `all`: the prompts of all kinds together, without `mixed`, whose prompts are answered "
    "together. `differ`: answers that differ from plain decoding's of the same repeat."
)

Line = Mapping[str, Any]
Pairs = dict[tuple[int, int], tuple[float, float]]  # (tokens, seconds) by (prompt, repeat)


@dataclass(frozen=True)
class Row:
    """A setting in a cell; ratios to plain decoding and to the fastest setting with one lookup, None where unknown."""

    kind: str
    num_requests: int
    temperature: float
    neighbour: bool
    setting: str
    num_prompts: int
    num_repeats: int
    tokens_per_s: float
    over_plain: float | None
    over_plain_low: float | None
    over_plain_high: float | None
    over_best_lookup: float | None
    over_best_lookup_low: float | None
    over_best_lookup_high: float | None
    best_lookup: str | None
    acceptance_rate: float
    emitted_per_step: float
    drafted_per_step: float
    num_differing: int
    num_turns: int
    num_contended: int | None


def rows(lines: Sequence[Line], kinds: Sequence[str]) -> list[Row]:
    """A row for each setting of each cell, and of all kinds together."""
    cells: dict[tuple[int, float, bool], None] = {}
    for line in lines:
        cells[line["num_requests"], line["temperature"], line["neighbour"]] = None
    found: list[Row] = []
    apart = [kind for kind in kinds if kind != MIXED]
    for n, temperature, neighbour in sorted(cells):
        own = [
            line
            for line in lines
            if (line["num_requests"], line["temperature"], line["neighbour"]) == (n, temperature, neighbour)
        ]
        for kind in (*kinds, *((ALL,) if len(apart) > 1 else ())):
            within = apart if kind == ALL else [kind]
            chosen = [line for line in own if line["kind"] in within]
            found += _cell(chosen, Cell(kind, n, temperature, neighbour), list(kinds))
    return found


def _cell(lines: Sequence[Line], cell: Cell, kinds: Sequence[str]) -> list[Row]:
    settings = list(dict.fromkeys(line["setting"] for line in lines))
    by_setting = {name: [line for line in lines if line["setting"] == name] for name in settings}
    pairs = {name: _pairs(own, kinds) for name, own in by_setting.items()}
    plain = pairs.get(PLAIN, {})
    lookups = [name for name in settings if name not in (PLAIN, ADAPTIVE)]
    best = max(lookups, key=lambda name: _speed(pairs[name]), default=None)
    answers = {key: prompt["answer"] for key, prompt in _prompts(by_setting.get(PLAIN, ()), kinds)}
    found: list[Row] = []
    for name in settings:
        own = by_setting[name]
        over_plain = None if name == PLAIN else paired_ratio(pairs[name], plain)
        over_best = None if best is None or name == best else paired_ratio(pairs[name], pairs[best])
        total = _totals(own)
        found.append(
            Row(
                **vars(cell),
                setting=name,
                num_prompts=len({prompt for prompt, _ in pairs[name]}),
                num_repeats=len({repeat for _, repeat in pairs[name]}),
                tokens_per_s=_speed(pairs[name]),
                over_plain=None if over_plain is None else over_plain.ratio,
                over_plain_low=None if over_plain is None else over_plain.low,
                over_plain_high=None if over_plain is None else over_plain.high,
                over_best_lookup=None if over_best is None else over_best.ratio,
                over_best_lookup_low=None if over_best is None else over_best.low,
                over_best_lookup_high=None if over_best is None else over_best.high,
                best_lookup=best,
                acceptance_rate=total("num_accepted") / max(1, total("num_drafted")),
                emitted_per_step=total("num_tokens") / max(1, total("num_steps")),
                drafted_per_step=total("num_drafted") / max(1, total("num_steps")),
                num_differing=sum(
                    key in answers and prompt["answer"] != answers[key] for key, prompt in _prompts(own, kinds)
                ),
                num_turns=len(own),
                num_contended=_contended(own, int(cell.neighbour)),
            )
        )
    return found


def _prompts(lines: Iterable[Line], kinds: Sequence[str]) -> list[tuple[tuple[int, int], Line]]:
    """Each prompt's values by (prompt, repeat); a prompt's number is its place among those of all kinds."""
    return [
        ((kinds.index(line["kind"]) * 1_000_000 + prompt["place"], line["repeat"]), prompt)
        for line in lines
        for prompt in line["prompts"]
    ]


def _pairs(lines: Iterable[Line], kinds: Sequence[str]) -> Pairs:
    return {key: (float(prompt["num_tokens"]), prompt["seconds"]) for key, prompt in _prompts(lines, kinds)}


def _speed(pairs: Pairs) -> float:
    seconds = sum(cost for _, cost in pairs.values())
    return sum(amount for amount, _ in pairs.values()) / seconds if seconds > 0 else 0.0


def _totals(lines: Sequence[Line]) -> Callable[[str], int]:
    prompts = [prompt for line in lines for prompt in line["prompts"]]
    return lambda name: sum(prompt[name] for prompt in prompts)


def _contended(lines: Sequence[Line], own_neighbours: int) -> int | None:
    """Turns beside which others took a tenth of a core or more, beyond the looping process of the study."""
    known = [line["others_cores"] for line in lines if line["others_cores"] is not None]
    return sum(cores - own_neighbours >= CONTENDED for cores in known) if known else None


def tables(found: Sequence[Row]) -> tuple[Table, ...]:
    """One table for each number of requests, temperature and neighbour."""
    cells = dict.fromkeys((row.num_requests, row.temperature, row.neighbour) for row in found)
    return tuple(
        _table(cell, [row for row in found if (row.num_requests, row.temperature, row.neighbour) == cell])
        for cell in cells
    )


def _table(cell: tuple[int, float, bool], own: Sequence[Row]) -> Table:
    num_requests, temperature, neighbour = cell
    settings = list(dict.fromkeys(row.setting for row in own))
    by_place = {(row.kind, row.setting): row for row in own}
    headings = ["kind", "prompts", "plain tokens/s", *(f"{name} / plain" for name in settings if name != PLAIN)]
    has_lookup = ADAPTIVE in settings and any(row.best_lookup for row in own)
    lines: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(row.kind for row in own):
        plain, auto = by_place.get((kind, PLAIN)), by_place.get((kind, ADAPTIVE))
        line = [kind, str(plain.num_prompts if plain else 0), f"{plain.tokens_per_s:.1f}" if plain else "-"]
        for name in settings:
            row = by_place.get((kind, name))
            if name != PLAIN:
                line.append("-" if row is None else _ratio(row.over_plain, row.over_plain_low, row.over_plain_high))
        if has_lookup:
            shown = (
                "-"
                if auto is None
                else _ratio(auto.over_best_lookup, auto.over_best_lookup_low, auto.over_best_lookup_high)
            )
            line.append("-" if auto is None else f"{shown} {auto.best_lookup}")
        line.append(str(sum(by_place[kind, name].num_differing for name in settings if (kind, name) in by_place)))
        line.append("-" if auto is None else f"{auto.emitted_per_step:.2f} / {auto.drafted_per_step:.2f}")
        lines.append(tuple(line))
    headings += ["auto / best lookup"] if has_lookup else []
    headings += ["differ", "auto: emitted / drafted per step"]
    beside = ", beside a process that loops" if neighbour else ""
    title = f"{num_requests} at once, temperature {temperature:g}{beside}"
    contended = [row.num_contended for row in own if row.kind != ALL and row.num_contended is not None]
    num_turns = sum(row.num_turns for row in own if row.kind != ALL)
    notes = (f"Other processes took a tenth of a core or more in {sum(contended)} of {num_turns} turns.",)
    return Table(title, tuple(headings), tuple(lines), notes if sum(contended) else ())


def _ratio(ratio: float | None, low: float | None, high: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if low is None or high is None else f"{ratio:.2f} [{low:.2f}, {high:.2f}]"
