"""The engine's ragged batches against padded batches (`padded`), with the same weights, prompts and draft tokens.

Each way to pad has a counterpart in the engine, which takes the same prompts in the same batches:

    padded                                  engine
    eqspec           EQSPEC, optimised      ragged         one batch of prompts after the other
    eqspec-published EQSPEC, as published   ragged
    exspec           EXSPEC                 ragged-pool    a new request as soon as one finishes
    padded-plain     no drafting            ragged-plain   as `ragged`, no drafting

All draft chains of the same fixed length at temperature 0, in one process, in turns. Speed is measured over whole runs
and over decoding alone: rounds without prefill.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.core import StepOutput
from foretoken.draft.base import Drafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.errors import ConfigError, InputError
from foretoken.model.interface import LanguageModel
from studies.layouts.padded import PaddedDecoder
from studies.layouts.padded_draft import Clock
from studies.layouts.replay import ReplayedDrafter, record_drafts

RAGGED, EQSPEC, PUBLISHED, RAGGED_POOL, EXSPEC = "ragged", "eqspec", "eqspec-published", "ragged-pool", "exspec"
RAGGED_PLAIN, PADDED_PLAIN = "ragged-plain", "padded-plain"
MODES = (RAGGED, EQSPEC, PUBLISHED, RAGGED_POOL, EXSPEC, RAGGED_PLAIN, PADDED_PLAIN)
COUNTERPARTS = {EQSPEC: RAGGED, PUBLISHED: RAGGED, EXSPEC: RAGGED_POOL, PADDED_PLAIN: RAGGED_PLAIN}
DRAFTERS = ("ngram", "draft_model")


@dataclass(frozen=True)
class LayoutOptions:
    """What to measure. `pool` is the number of batches of prompts, and of those in EXSPEC's window. With `replay` every
    layout gets the drafts that `ngram` makes along plain decoding's answers (`replay`).

    Prompts are the library's code, cut from the left to different lengths. `threads=None` leaves torch's own number.
    """

    target: str
    draft: str | None = None
    drafter: str = "ngram"
    num_draft: int = 4
    batch_sizes: tuple[int, ...] = (8, 16)
    pool: int = 3
    max_tokens: int = 64
    repeats: int = 3
    replay: bool = False
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ConfigError("drafter", self.drafter, f"choose from {', '.join(DRAFTERS)}")
        if self.drafter == "draft_model" and self.draft is None:
            raise ConfigError("draft", None, "drafter draft_model needs a draft; give its folder")
        if self.drafter != "draft_model" and self.draft is not None:
            raise ConfigError(
                "draft", self.draft, f"drafter {self.drafter} takes none; leave it out, or choose draft_model"
            )
        if self.replay and self.drafter != "ngram":
            raise ConfigError("replay", self.replay, "replays the drafts of ngram; leave it out, or choose ngram")
        if not self.batch_sizes:
            raise InputError("batch_sizes", self.batch_sizes, "give at least one")
        counts = {
            "num_draft": self.num_draft,
            "pool": self.pool,
            "max_tokens": self.max_tokens - 1,
            "repeats": self.repeats,
        }
        for name, value in (*counts.items(), *(("batch_sizes", size) for size in self.batch_sizes)):
            if value < 1:
                raise InputError(name, getattr(self, name), f"must be at least {2 if name == 'max_tokens' else 1}")

    @property
    def spec(self) -> SpecConfig:
        """How the engine drafts: chains, under the rejection rule, which emits the greedy tokens at temperature 0."""
        return SpecConfig(drafter=self.drafter, draft=self.draft, num_draft=self.num_draft, rule="rejection")


@dataclass(frozen=True)
class LayoutSample:
    """One run of one way. `clock` and the counts are of the rounds that read no prompt, but for `clock.prompt_s`."""

    answers: tuple[tuple[int, ...], ...]
    clock: Clock
    num_rounds: int
    num_emitted: int
    num_drafted: int
    num_accepted: int
    num_grouped: int | None = None
    num_moved: int | None = None

    @property
    def decode_s(self) -> float:
        """Seconds of the rounds that read no prompt."""
        return self.clock.forward_s + self.clock.realign_s + self.clock.draft_s + self.clock.rest_s

    @property
    def tokens_per_s(self) -> float:
        """Of decoding alone."""
        return self.num_emitted / self.decode_s

    @property
    def whole_tokens_per_s(self) -> float:
        """Of the whole run, prompts included."""
        return sum(map(len, self.answers)) / (self.decode_s + self.clock.prompt_s)


@dataclass(frozen=True)
class LayoutRow:
    """One way at one batch size: medians over repeats, times per round; `num_identical` of `num_answers` equal plain
    decoding by the engine.

    `realign_share` is the part of the decoding time that goes to moving keys and values. `grouped_share` is the part of
    EXSPEC's rounds that found a group of equal lengths, `moved_per_round` the rows that were copied.
    """

    mode: str
    batch_size: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    whole_tokens_per_s: float
    num_rounds: int
    emitted_per_round: float
    acceptance_rate: float | None
    round_ms: float
    forward_ms: float
    realign_ms: float
    draft_ms: float
    rest_ms: float
    realign_share: float
    prompt_s: float
    num_identical: int
    num_answers: int
    grouped_share: float | None = None
    moved_per_round: float | None = None


Tell = Callable[[str, float], None]  # called with what runs next, and the share that is done


class Layouts:
    """Open models, and all ways to run prompts through them; `make_drafter` gives a drafter without state."""

    def __init__(self, options: LayoutOptions, target: LanguageModel, make_drafter: Callable[[], Drafter]) -> None:
        self.options, self.target, self.make_drafter = options, target, make_drafter
        self.drafter = make_drafter()
        self.params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
        self._tenants = itertools.count()

    def run(self, mode: str, prompts: Sequence[Sequence[int]], batch_size: int) -> LayoutSample:
        """Answer every prompt in one of `MODES`, with a new drafter: it keeps nothing of earlier runs."""
        self.drafter = self.make_drafter()
        if mode.startswith(RAGGED):
            spec = SpecConfig() if mode == RAGGED_PLAIN else self.options.spec
            return self._ragged(prompts, batch_size, spec, len(prompts) if mode == RAGGED_POOL else batch_size)
        plain = mode == PADDED_PLAIN
        window = batch_size * self.options.pool if mode == EXSPEC else None
        drafter, num_draft = (None, 0) if plain else (self.drafter, self.options.num_draft)
        decoder = PaddedDecoder(self.target, drafter, num_draft, batch_size, window, published=mode == PUBLISHED)
        found = decoder.generate(prompts, self.params)
        counts = (found.num_rounds, found.num_emitted, found.num_drafted, found.num_accepted)
        return LayoutSample(
            found.answers, found.clock, *counts, found.num_grouped if mode == EXSPEC else None, found.num_moved
        )

    def _ragged(
        self, prompts: Sequence[Sequence[int]], batch_size: int, spec: SpecConfig, num_at_once: int
    ) -> LayoutSample:
        """The engine, given `num_at_once` prompts at a time; a batch of prompts is read in one step, so that its
        requests start together.
        """
        group = DrafterGroup(self.target)
        key = drafter_key(spec)
        if key is not None:
            group.drafters[key] = self.drafter
        limits = SchedulerConfig(max_batch_size=batch_size, max_prompt_tokens=sum(map(len, prompts)))
        engine = Engine(self.target, group, limits=limits)
        steps = _Steps(engine, self.target.device)
        states: list[RequestState] = []
        # No reuse of prefixes from earlier runs.
        params = replace(self.params, tenant=f"layouts {next(self._tenants)}")
        for first in range(0, len(prompts), num_at_once):
            states += [engine.submit(prompt, params, spec) for prompt in prompts[first : first + num_at_once]]
            while engine.has_work:
                steps.step({state.request_id: state for state in states})
        for state in states:
            if state.error is not None:
                raise state.error
        answers = tuple(tuple(state.output_ids) for state in states)
        return LayoutSample(
            answers, steps.clock, steps.num_rounds, steps.num_emitted, steps.num_drafted, steps.num_accepted
        )


class _Steps:
    """The engine's steps; those with prefill (of the target, or of a draft model a round later) are timed apart."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.clock = engine, Clock(device)
        self.num_rounds = self.num_emitted = self.num_drafted = self.num_accepted = 0

    def step(self, states: Mapping[int, RequestState]) -> None:
        """Run and time one step."""
        stats, clock = self.engine.stats, self.clock
        before = (stats.draft_s, stats.target_s, stats.num_drafted, stats.num_accepted)
        spent = Clock(clock.device)
        outputs = self.engine.step()
        spent.lap("rest_s")
        if self._read_prompts(outputs, states):
            clock.prompt_s += spent.rest_s
            return
        draft_s, target_s = stats.draft_s - before[0], stats.target_s - before[1]
        clock.draft_s += draft_s
        clock.forward_s += target_s
        clock.rest_s += spent.rest_s - draft_s - target_s
        self.num_rounds += 1
        self.num_emitted += sum(len(output.token_ids) for output in outputs)
        self.num_drafted += stats.num_drafted - before[2]
        self.num_accepted += stats.num_accepted - before[3]

    def _read_prompts(self, outputs: Sequence[StepOutput], states: Mapping[int, RequestState]) -> bool:
        first_rounds = (
            2
            if any(isinstance(drafter, DraftModelDrafter) for drafter in self.engine.drafters.drafters.values())
            else 1
        )
        young = any(states[output.request_id].num_rounds <= first_rounds for output in outputs)
        return young or any(not state.num_rounds for state in self.engine.scheduler.running.values())


def measure_layouts(
    layouts: Layouts, prompts: Sequence[Sequence[int]], tell: Tell = lambda _words, _share: None
) -> tuple[LayoutRow, ...]:
    """Every way at every batch size, in turns that rotate, after a warm-up run of each."""
    options = layouts.options
    rows: list[LayoutRow] = []
    done, total = 0, len(options.batch_sizes) * len(MODES) * (1 + options.repeats)
    for size in options.batch_sizes:
        own = prompts[: size * options.pool]
        if options.replay:
            answers = layouts.run(RAGGED_PLAIN, own, size).answers
            layouts.make_drafter = partial(ReplayedDrafter, record_drafts(own, answers, options.num_draft))
        samples: dict[str, list[LayoutSample]] = {mode: [] for mode in MODES}
        for turn in range(1 + options.repeats):
            for mode in (*MODES[turn % len(MODES) :], *MODES[: turn % len(MODES)]):
                tell(f"{mode}, batch {size}", done / total)
                sample = layouts.run(mode, own, size)
                done += 1
                if turn:
                    samples[mode].append(sample)
        plain = samples[RAGGED_PLAIN][0].answers
        rows += [summarise(mode, size, samples[mode], plain) for mode in MODES]
    return tuple(rows)


def summarise(mode: str, batch_size: int, samples: Sequence[LayoutSample], plain: Sequence[Sequence[int]]) -> LayoutRow:
    """The row of samples of the same work."""
    first, speeds = samples[0], [sample.tokens_per_s for sample in samples]
    rounds = first.num_rounds

    def per_round_ms(name: str) -> float:
        return 1e3 * median(float(getattr(sample.clock, name)) for sample in samples) / rounds

    return LayoutRow(
        mode=mode,
        batch_size=batch_size,
        tokens_per_s=median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        whole_tokens_per_s=median(sample.whole_tokens_per_s for sample in samples),
        num_rounds=rounds,
        emitted_per_round=first.num_emitted / rounds,
        acceptance_rate=first.num_accepted / first.num_drafted if first.num_drafted else None,
        round_ms=1e3 * median(sample.decode_s for sample in samples) / rounds,
        forward_ms=per_round_ms("forward_s"),
        realign_ms=per_round_ms("realign_s"),
        draft_ms=per_round_ms("draft_s"),
        rest_ms=per_round_ms("rest_s"),
        realign_share=median(sample.clock.realign_s / sample.decode_s for sample in samples),
        prompt_s=median(sample.clock.prompt_s for sample in samples),
        num_identical=min(sum(map(_same, sample.answers, plain)) for sample in samples),
        num_answers=len(plain),
        grouped_share=None if first.num_grouped is None else first.num_grouped / rounds,
        moved_per_round=None if first.num_moved is None else first.num_moved / rounds,
    )


def ratios(rows: Sequence[LayoutRow]) -> dict[int, dict[str, float]]:
    """By batch size, the decoding speed of each of the engine's ways over its padded counterpart's; `per round` the
    counterpart's time of a round over ours, whatever the rounds accepted.
    """
    by_way = {(row.batch_size, row.mode): row for row in rows}
    found: dict[int, dict[str, float]] = {}
    for size in dict.fromkeys(row.batch_size for row in rows):
        pairs = [(by_way[size, ragged], by_way[size, padded]) for padded, ragged in COUNTERPARTS.items()]
        found[size] = {
            f"{ours.mode} / {theirs.mode}": ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs
        }
        found[size] |= {
            f"{ours.mode} / {theirs.mode} per round": theirs.round_ms / ours.round_ms for ours, theirs in pairs
        }
    return found


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    return tuple(one) == tuple(other)
