"""The report of the adviser: the verdict in a sentence, then loads, slices, memory, costs, checks, launch lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.measure.advise.cells import ALL_SLICES, CostRow, Machine, SpeedCell, best_cells, cells_of, cost_rows
from foretoken.measure.advise.costs import LoadCosts
from foretoken.measure.advise.launches import OTHERS, OURS, LaunchLine, as_toml, launch_lines, lost_rules, settings_of
from foretoken.measure.advise.memory import MemoryRow, memory_advice
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.advise.rounds import AnswerRounds
from foretoken.measure.advise.verdict import MARGIN, Finding, candidate_verdict, of_cells, of_question, verdict_of
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.price import NEVER
from foretoken.measure.report import Report, Table
from foretoken.measure.stats import MIN_GROUPS, ratio_text
from foretoken.plan.memory import Budget

EXPLAINED = (
    "speed-up: end to end, prompts included, as a multiple of plain decoding; in brackets a 95 % interval over "
    "prompts, at these costs of steps. decoding: the same without prompts. per step: tokens that a step emits for a "
    "request; step: what it takes, in plain steps. Arrows go from plain decoding to the drafter. A drafter pays "
    f"where the whole interval is above {1 + MARGIN:.2f}."
)
SOURCES = (
    ("seconds of steps, of drafting and of reading prompts", "measured here, at these numbers of requests"),
    ("accepted draft tokens", "measured here on these prompts, with the longest drafts"),
    ("what shorter drafts accept", "computed from those"),
    ("speed-ups, tokens/s, ms per token", "computed from both; not measured end to end"),
    ("bytes, requests that fit", "computed from the shapes in the files"),
    ("requests at once, answer length, temperature, ms per token allowed, prices, speeds of machines", "given by you"),
)
ELSEWHERE = (
    ("seconds of steps and of reading prompts", "measured through the server's address"),
    ("a step with draft tokens", "taken to cost what as many rows of plain requests do"),
    ("seconds of drafting", "measured here, with our own lookups"),
    ("accepted draft tokens", "computed from the server's answers to these prompts"),
    ("speed-ups, tokens/s, ms per token", "computed from both; not measured end to end"),
    SOURCES[-1],
)
_MEBI = 2**20
_LOAD: Mapping[str, Callable[[SpeedCell], str]] = {  # by heading; beside them stands whether it pays
    "drafter": lambda cell: cell.candidate,
    "requests": lambda cell: str(cell.concurrency),
    "draft tokens": lambda cell: str(cell.num_draft),
    "speed-up": lambda cell: ratio_text(cell.speedup),
    "decoding": lambda cell: f"{cell.decode_speedup:.2f}x",
    "per step": lambda cell: f"{cell.emitted_per_step:.2f}",
    "step": lambda cell: f"{cell.step_ratio:.2f}",
    "tok/s": lambda cell: f"{cell.plain_tokens_per_s:.4g} > {cell.tokens_per_s:.4g}",
    "ms/token": lambda cell: f"{cell.plain_ms_per_token:.3g} > {cell.ms_per_token:.3g}",
}
_MEMORY: Mapping[str, Callable[[MemoryRow], str]] = {  # by heading
    "drafter": lambda row: row.candidate,
    "weights MiB": lambda row: f"{row.draft_weight_bytes / _MEBI:,.0f}",
    "cache MiB": lambda row: f"{row.draft_kv_bytes / _MEBI:,.0f}",
    "in all MiB": lambda row: f"{row.displaced_bytes / _MEBI:,.0f}",
    "cache tokens displaced": lambda row: f"{row.displaced_tokens:,}",
    "requests that fit": lambda row: f"{row.room.plain:,} > {row.room.candidate:,}",
    "left free": lambda row: f"{max(0.0, row.left_free):.0%}",
}


@dataclass(frozen=True)
class Measured:
    """What the answer is made of: candidates that could be loaded, their answers by name, the costs of steps, memory,
    what the checks of files found, and why other candidates could not be loaded; memory and `budget` are not known of
    another engine. `sources` says where figures come from; `engines` are those that the answer may be carried out with.
    `interrupted`: the answers are those until then.
    """

    candidates: Sequence[AdviseCandidate]
    answers: Mapping[str, Sequence[AnswerRounds]]
    costs: LoadCosts
    memory: Sequence[MemoryRow]
    budget: Budget | None
    machines: Sequence[Machine]
    findings: Sequence[Finding]
    failed: Mapping[str, str]
    notes: Sequence[str]
    sources: Sequence[tuple[str, str]] = SOURCES
    engines: Sequence[str] = (OURS, *OTHERS)
    interrupted: bool = False


def advise_report(options: AdviseOptions, found: Measured, command: str, caveats: Sequence[str]) -> Report:
    """The report, with the answer that follows from what was measured."""
    rooms = {row.candidate: row.room for row in found.memory}
    sweep = cells_of(found.answers, found.costs, options.loads, options.lengths, rooms)
    best = best_cells(sweep)
    findings = _findings(options, found, best)
    verdicts = []
    for one in found.candidates:
        cells = [cell for cell in best if cell.candidate == one.name]
        verdicts.append(candidate_verdict(one.name, cells, [own for own in findings if own.candidate == one.name]))
    verdict = verdict_of(verdicts, best, found.costs, found.failed)
    chosen = next((one for one in found.candidates if one.name == verdict.candidate), None)
    own = [cell for cell in best if cell.candidate == (verdict.candidate or verdict.nearest)]
    costs = cost_rows(found.machines, own, options.slo_ms, MARGIN)
    lines = launch_lines(chosen, options.target, verdict.num_draft, verdict.routing, found.engines)
    settings = settings_of(chosen, options.target, verdict.routing)
    results = {
        "kind": "advise",
        "answer": verdict.answer,
        "verdict": verdict,
        "candidates": verdicts,
        "failed": found.failed,
        "rows": best,
        "sweep": sweep,
        "memory": found.memory,
        "costs_per_million": costs,
        "findings": findings,
        "routing": verdict.routing,
        "settings": settings,
        "launch": lines,
        "step_costs": found.costs,
        "sources": dict(found.sources),
        "interrupted": found.interrupted,
    }
    return Report(
        title="Advice",
        command=command,
        options=asdict(options),
        results=results,
        tables=(
            _load_table(best, options),
            *_slice_tables(best),
            _sweep_table(sweep, options),
            *_memory_tables(found),
            *_cost_tables(costs, options),
            *_finding_tables(findings, found.failed),
            _launch_table(
                lines,
                as_toml(settings) if OURS in found.engines else "",
                (*_sizing(own, verdict.num_draft), *lost_rules(lines, verdict.routing)),
            ),
            Table("Where the figures come from", ("figure", "source"), tuple(found.sources), justify="l"),
        ),
        explained=EXPLAINED,
        caveats=(*caveats, *_without_interval(best)),
        verdict=verdict.sentence,
        passed=verdict.answer != "no",
        plots=_plots(best, sweep),
    )


def _without_interval(best: Sequence[SpeedCell]) -> list[str]:
    """A note where too few prompts were asked to tell how far the speed-up of other texts may be off."""
    names = dict.fromkeys(cell.slice or "all texts" for cell in best if cell.speedup.low is None)
    if not names:
        return []
    return [
        f"Fewer than {MIN_GROUPS} prompts give no interval, and the figure alone says whether a drafter pays there "
        f"({', '.join(names)}): give more prompts before you rely on it."
    ]


def _findings(options: AdviseOptions, found: Measured, best: Sequence[SpeedCell]) -> list[Finding]:
    findings = [*of_question(options, found.costs), *found.findings]
    for row in found.memory:
        assert found.budget is not None
        advice = memory_advice(row, found.budget)
        if advice is not None:
            findings.append(Finding(advice.topic, row.candidate, advice.finding, advice.remedy))
    for one in found.candidates:
        findings += of_cells(one.name, [cell for cell in best if cell.candidate == one.name], found.costs)
    return findings


def _load_table(best: Sequence[SpeedCell], options: AdviseOptions) -> Table:
    lines, styles = [], []
    for cell in (cell for cell in best if cell.slice == ALL_SLICES):
        pays = "yes" if cell.pays(MARGIN) else "no"
        if options.slo_ms is not None and cell.ms_per_token > options.slo_ms:
            pays += f", over {options.slo_ms:g} ms"
        if cell.served < cell.concurrency:
            pays += f", {cell.served} fit"
        styles.append(None if pays == "yes" else "yellow")
        lines.append((*(text(cell) for text in _LOAD.values()), pays))
    return Table("By load", (*_LOAD, "pays"), tuple(lines), styles=tuple(styles))


def _slice_tables(best: Sequence[SpeedCell]) -> tuple[Table, ...]:
    own = [cell for cell in best if cell.slice != ALL_SLICES]
    if not own:
        return ()
    loads = sorted({cell.concurrency for cell in own})
    places = list(dict.fromkeys((cell.candidate, cell.slice) for cell in own))
    known = {(cell.candidate, cell.slice, cell.concurrency): cell for cell in own}
    lines = tuple((*place, *(ratio_text(known[(*place, load)].speedup) for load in loads)) for place in places)
    headings = ("drafter", "slice", *(f"{load} at once" for load in loads))
    return (Table("Speed-up by slice", headings, lines, justify="llr"),)


def _sweep_table(sweep: Sequence[SpeedCell], options: AdviseOptions) -> Table:
    own = [cell for cell in sweep if cell.slice == ALL_SLICES]
    known = {(cell.candidate, cell.concurrency, cell.num_draft): f"{cell.speedup.value:.2f}" for cell in own}
    places = dict.fromkeys((cell.candidate, cell.concurrency) for cell in own)
    lines = tuple(
        (name, str(load), *(known.get((name, load, n), "") for n in options.lengths)) for name, load in places
    )
    return Table("Speed-up by draft tokens", ("drafter", "requests", *map(str, options.lengths)), lines)


def _memory_tables(found: Measured) -> tuple[Table, ...]:
    if found.budget is None or not found.memory:
        return ()
    lines = tuple(tuple(text(row) for text in _MEMORY.values()) for row in found.memory)
    budget = f"of {found.budget.memory_bytes / 2**30:,.1f} GiB, {found.budget.reserve:.0%} kept free"
    return (Table(f"Memory at the highest load, {budget}", tuple(_MEMORY), lines),)


def _cost_tables(costs: Sequence[CostRow], options: AdviseOptions) -> tuple[Table, ...]:
    if not costs:
        return ()
    deadline = "" if options.slo_ms is None else f" with at most {options.slo_ms:g} ms between tokens"
    lines = tuple(
        (
            row.machine,
            row.slice or "all",
            *(_price(row.plain, row.plain_concurrency)),
            *(_price(row.after, row.after_concurrency)),
            "" if not row.plain or row.after is None else f"{row.after / row.plain - 1:+.0%}",
        )
        for row in costs
    )
    headings = ("machine", "slice", "before", "at once", "after", "at once", "change")
    return (Table(f"Price of 1M tokens{deadline}", headings, lines, justify="llr"),)


def _price(value: float | None, concurrency: int | None) -> tuple[str, str]:
    return (NEVER, "") if value is None else (f"{value:.3g}", str(concurrency))


def _finding_tables(findings: Sequence[Finding], failed: Mapping[str, str]) -> tuple[Table, ...]:
    lines = [(one.topic, one.candidate or "all", one.finding, one.remedy) for one in findings]
    lines += [("cannot draft", name, reason, "leave it out") for name, reason in failed.items()]
    return (Table("Checks", ("about", "drafter", "finding", "remedy"), tuple(lines), justify="l"),) if lines else ()


def _sizing(own: Sequence[SpeedCell], num_draft: int) -> tuple[str, ...]:
    """The measured acceptance as the arguments of aiconfigurator, which sizes deployments on GPUs and asks for it."""
    accepted = [one.emitted_per_step - 1 for one in own if (one.slice, one.num_draft) == (ALL_SLICES, num_draft)]
    return tuple(f"aiconfigurator: --nextn {num_draft} --nextn-accepted {one:.3g}" for one in accepted[:1])


def _launch_table(lines: Sequence[LaunchLine], toml: str, notes: Sequence[str]) -> Table:
    cells = []
    for one in lines:
        cells += [(f"{one.engine}, first", command) for command in one.prepare]
        cells += [(f"{one.engine}, {name}", text.rstrip()) for name, text in (one.files or {}).items()]
        cells.append((one.engine, one.command or f"no: {one.refusal}"))
    settings = ("foretoken.toml:", *toml.splitlines()) if toml else ()
    return Table("To start it", ("engine", "line"), tuple(cells), (*notes, *settings), justify="l")


def _plots(best: Sequence[SpeedCell], sweep: Sequence[SpeedCell]) -> tuple[Plot, ...]:
    overall = [cell for cell in best if cell.slice == ALL_SLICES]
    smallest = min((cell.concurrency for cell in overall), default=0)
    lengths = [cell for cell in sweep if cell.slice == ALL_SLICES and cell.concurrency == smallest]
    return (
        _plot("Speed-up by load", "requests at once", overall, lambda cell: cell.concurrency),
        _plot(f"Speed-up by draft tokens, {smallest} at once", "draft tokens", lengths, lambda cell: cell.num_draft),
    )


def _plot(title: str, axis: str, cells: Sequence[SpeedCell], place: Callable[[SpeedCell], int]) -> Plot:
    points: dict[str, list[Point]] = {}
    for cell in cells:
        point = Point(str(place(cell)), cell.speedup.value, cell.speedup.low, cell.speedup.high)
        points.setdefault(cell.candidate, []).append(point)
    series = tuple(Series(name, tuple(own)) for name, own in points.items())
    return Plot(title, "of plain decoding", series, "lines", axis, 1.0)
