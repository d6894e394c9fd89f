"""Every drafter along held-out text (forced), and along the target's own greedy and sampled answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from foretoken.config import SamplingParams
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError, InputError
from foretoken.measure.load.settings import NO_POLICIES, BatchSetting, Stage, parse_batch_settings
from foretoken.measure.options import ALL
from foretoken.measure.prompts import choose, fit, read_prompts, with_template
from foretoken.measure.report import Report, Table
from foretoken.measure.speed.plan import ALL_SLICES
from foretoken.measure.speed.rows import repeated_ngrams
from foretoken.measure.stats import paired_ratio
from foretoken.measure.workload import SLICES, Prompt, slices
from studies.held_out.forced import ForcedText, forcing
from studies.held_out.options import FORCED, SAMPLED, HeldOutOptions

EXPLAINED = (
    "`forced` goes along the text that really follows the prompt: a draft token is accepted where it equals the text. "
    "`greedy` and `sampled` are the target's own answers of the same length. Tokens a step with a bootstrap interval "
    "over prompts (95 %). `at place 1` is the share of first draft tokens that were accepted, `chance` what the target "
    "itself gives to them at temperature 1. `repeats` is the share of 4-grams that a text had used before: where "
    "greedy answers repeat themselves and the held-out text does not, greedy acceptance flatters the drafter."
)
_COLUMNS = ("setting", "text", "prompts", "tokens", "tok/step", "95 %", "accepted", "at place 1", "chance", "repeats")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Walk:
    """One setting along one text; `positions` counts (drafted, accepted) by place in the draft."""

    setting: str
    way: str
    prompt: int
    slice: str
    token_ids: tuple[int, ...]
    num_steps: int
    num_drafted: int
    num_accepted: int
    positions: tuple[tuple[int, int], ...]
    chances: tuple[float, ...]  # of draft tokens at the first place, where the text was forced


@dataclass(frozen=True)
class WalkRow:
    """One setting along one kind of text on a slice: sums over prompts, with the interval of `emitted_per_step`."""

    setting: str
    text: str
    slice: str
    num_prompts: int
    num_emitted: int
    num_steps: int
    emitted_per_step: float
    emitted_per_step_low: float | None
    emitted_per_step_high: float | None
    acceptance_rate: float | None
    acceptance_per_position: tuple[float, ...]
    first_chance: float | None
    repeated_4grams: float | None


def prompts_of(options: HeldOutOptions) -> tuple[tuple[Prompt, ...], list[str]]:
    """Prompts whose continuation is known, `prompts_per_slice` of each slice; a note on those without.

    Raises:
        InputError: none has a continuation.
    """
    if options.prompts is None:
        return slices(SLICES if ALL in options.slices else options.slices, options.prompts_per_slice), []
    found = read_prompts(options.prompts)
    usable = [prompt for prompt in found if prompt.continuation]
    if not usable:
        raise InputError("prompts", str(options.prompts), "no prompt has a known continuation; leave it out")
    chosen, notes = choose(usable, options.slices, options.prompts_per_slice)
    left_out = len(found) - len(usable)
    return chosen, [*notes, *([f"{left_out} prompts have no known continuation."] if left_out else [])]


def run_held_out(options: HeldOutOptions, command: str, llm: LLM, tell: Tell = lambda _: None) -> Report:
    """Measure every setting along every text. After Ctrl-C the report holds what was measured until then.

    Raises:
        ForetokenError: a setting that cannot be used, or a failing engine.
    """
    settings, notes = parse_batch_settings(options.settings, options.draft, NO_POLICIES)
    adaptive = [setting.name for setting in settings if setting.adapts]
    if adaptive:
        raise ConfigError("settings", adaptive[0], "chooses by time, and this study counts tokens; give a number")
    prompts, more = prompts_of(options)
    prompts = with_template(prompts, llm)
    room = llm.target.max_context_tokens - options.max_tokens
    prompts, cut = fit(prompts, lambda text: len(llm.encode(text)), room)
    walks: list[Walk] = []
    interrupted = False
    try:
        walk_all(options, Stage(llm, options.draft, NO_POLICIES, options.seed), settings[1:], prompts, walks, tell)
    except KeyboardInterrupt:
        interrupted = True
    rows = summarise_walks(walks)
    return Report(
        title="Held-out text",
        command=command,
        options=asdict(options),
        results={"rows": rows, "interrupted": interrupted},
        tables=walk_tables(rows),
        explained=EXPLAINED,
        caveats=(*notes, *more, *cut, *(["The run was interrupted."] if interrupted else [])),
    )


def walk_all(
    options: HeldOutOptions,
    stage: Stage,
    settings: Sequence[BatchSetting],
    prompts: Sequence[Prompt],
    walks: list[Walk],
    tell: Tell = lambda _: None,
) -> None:
    """Append a walk for every prompt, way and setting; one whose first token joins its prompt is left out."""
    for (index, prompt), way, setting in itertools.product(enumerate(prompts), options.ways, settings):
        tell(f"{prompt.name}, {way}: {setting.name}")
        ids = stage.llm.encode(prompt.text)
        text = continuation_ids(stage.llm, prompt, ids)[: options.max_tokens]
        if len(text) > 1:
            walks.append(walk(options, stage, setting, index, prompt, way, ids, text))


def continuation_ids(llm: LLM, prompt: Prompt, ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that follow the prompt's in the whole text; none where they would be other ones."""
    whole = llm.encode(prompt.text + (prompt.continuation or ""))
    return tuple(whole[len(ids) :]) if whole[: len(ids)] == list(ids) else ()


def walk(
    options: HeldOutOptions,
    stage: Stage,
    setting: BatchSetting,
    index: int,
    prompt: Prompt,
    way: str,
    ids: list[int],
    text: Sequence[int],
) -> Walk:
    """One setting along one text: `text` itself where `way` is `forced`, otherwise an answer of its length.

    Raises:
        ForetokenError: the engine failed.
    """
    stage.enter(setting)  # new drafters: nothing is known of other texts
    llm, spec = stage.llm, stage.spec(setting)
    params = SamplingParams(
        max_tokens=len(text),
        temperature=options.temperature if way == SAMPLED else 0.0,
        seed=options.seed + index,
        ignore_eos=True,
        tenant=f"{setting.name} {way} {prompt.name}",
    )
    forced = ForcedText(tuple(text))
    with forcing(llm) as texts:
        state = llm.submit(ids, params, spec)
        if way == FORCED:
            texts[state.request_id] = forced
        while state.finish_reason is None:
            llm.step()
    if state.error is not None:
        raise state.error
    stats = state.stats
    return Walk(
        setting.name,
        way,
        index,
        prompt.slice,
        tuple(state.output_ids),
        stats.num_steps,
        stats.num_drafted,
        stats.num_accepted,
        tuple((int(drafted), int(accepted)) for drafted, accepted in stats.accepted_per_position),
        tuple(forced.chances[0]) if forced.chances else (),
    )


def summarise_walks(walks: Sequence[Walk]) -> tuple[WalkRow, ...]:
    """A row for every setting, way and slice, and over all slices where there are several."""
    names = list(dict.fromkeys(walk.slice for walk in walks))
    groups: dict[tuple[str, str, str], list[Walk]] = {}
    for name in [*names, ALL_SLICES] if len(names) > 1 else names:
        for walk in walks:
            if name in (walk.slice, ALL_SLICES):
                groups.setdefault((name, walk.setting, walk.way), []).append(walk)
    return tuple(_row(own, name, setting, way) for (name, setting, way), own in groups.items())


def _row(own: Sequence[Walk], name: str, setting: str, way: str) -> WalkRow:
    steps = {(walk.prompt, 0): (float(len(walk.token_ids)), float(walk.num_steps)) for walk in own}
    rate = paired_ratio(steps, dict.fromkeys(steps, (1.0, 1.0)))
    assert rate is not None
    drafted, accepted = sum(walk.num_drafted for walk in own), sum(walk.num_accepted for walk in own)
    chances = [chance for walk in own for chance in walk.chances]
    return WalkRow(
        setting,
        way,
        name,
        num_prompts=len(own),
        num_emitted=sum(len(walk.token_ids) for walk in own),
        num_steps=sum(walk.num_steps for walk in own),
        emitted_per_step=rate.ratio,
        emitted_per_step_low=rate.low,
        emitted_per_step_high=rate.high,
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_per_position=_by_position([walk.positions for walk in own]),
        first_chance=sum(chances) / len(chances) if chances else None,
        repeated_4grams=repeated_ngrams([walk.token_ids for walk in own]),
    )


def _by_position(counts: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, ...]:
    places = [list(pairs) for pairs in itertools.zip_longest(*counts, fillvalue=(0, 0))]
    return tuple(sum(kept for _, kept in pairs) / max(1, sum(drafted for drafted, _ in pairs)) for pairs in places)


def walk_tables(rows: Sequence[WalkRow]) -> tuple[Table, ...]:
    """A table for each slice."""
    by_slice: Mapping[str, list[WalkRow]] = {name: [] for name in dict.fromkeys(row.slice for row in rows)}
    for row in rows:
        by_slice[row.slice].append(row)
    return tuple(Table(name, _COLUMNS, tuple(map(_cells, own)), justify="llr") for name, own in by_slice.items())


def _cells(row: WalkRow) -> tuple[str, ...]:
    low, high = row.emitted_per_step_low, row.emitted_per_step_high
    return (
        row.setting,
        row.text,
        str(row.num_prompts),
        str(row.num_emitted),
        f"{row.emitted_per_step:.2f}",
        "" if low is None or high is None else f"{low:.2f}-{high:.2f}",
        _percent(row.acceptance_rate),
        _percent(row.acceptance_per_position[0] if row.acceptance_per_position else None),
        _percent(row.first_chance),
        _percent(row.repeated_4grams),
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
