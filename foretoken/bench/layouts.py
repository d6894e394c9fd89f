"""What the ragged layout is worth: the engine against padded batches (`padded`), over the same weights, prompts and
guesses.

Each padded way has a counterpart in the engine that takes the same prompts in the same batches:

    ragged          the engine, one batch of prompts after the other      padded counterpart: EQSPEC, well made and as
    published ragged-pool     the engine, a new request as soon as one finishes     padded counterpart: EXSPEC
    ragged-plain    as `ragged`, without guesses                          padded counterpart: padded plain

All of them draft chains of the same fixed length at temperature 0, in one process, in turns. Speed is told of whole
runs and of decoding alone: rounds in which no prompt was read.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch

from foretoken.bench.padded import PaddedDecoder, native
from foretoken.bench.padded_draft import Clock
from foretoken.bench.report import machine, source_caveats, versions
from foretoken.bench.workload import slices
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.core import StepOutput
from foretoken.draft.base import Drafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.errors import ConfigError, InputError
from foretoken.model.interface import LanguageModel
from foretoken.model.open import model_folder, open_model
from foretoken.model.tokenizer import load_tokenizer

RAGGED, EQSPEC, PUBLISHED, RAGGED_POOL, EXSPEC = "ragged", "eqspec", "eqspec-published", "ragged-pool", "exspec"
RAGGED_PLAIN, PADDED_PLAIN = "ragged-plain", "padded-plain"
MODES = (RAGGED, EQSPEC, PUBLISHED, RAGGED_POOL, EXSPEC, RAGGED_PLAIN, PADDED_PLAIN)
COUNTERPARTS = {EQSPEC: RAGGED, PUBLISHED: RAGGED, EXSPEC: RAGGED_POOL, PADDED_PLAIN: RAGGED_PLAIN}
DRAFTERS = ("ngram", "draft_model")
_SLICE = "code"
_LENGTH_STEPS = 7  # prompts are cut to these many different shares of their length, 1/4 to all
_SHORTEST = 0.25
_STRIDE = 3  # neighbours differ in length; without a divisor in common with the number of steps


@dataclass(frozen=True)
class LayoutOptions:
    """What to measure. `pool` is how many batches of prompts there are, and how many EXSPEC's window holds.

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
        """How the engine guesses: under the rejection rule, which at temperature 0 gives the greedy tokens and takes
        chains alone.
        """
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


@dataclass(frozen=True)
class LayoutReport:
    """Rows with everything needed to judge them. `ratios` by batch size: the engine's decoding speed over its padded
    counterpart's.
    """

    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    rows: tuple[LayoutRow, ...]
    ratios: Mapping[int, Mapping[str, float]]
    caveats: tuple[str, ...]
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


Tell = Callable[[str, float], None]  # what runs, and the share that is done


class Layouts:
    """Open models, and every way to run prompts through them."""

    def __init__(self, options: LayoutOptions, target: LanguageModel, drafter: Drafter) -> None:
        self.options, self.target, self.drafter = options, target, drafter
        self.params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
        self._tenants = itertools.count()

    def run(self, mode: str, prompts: Sequence[Sequence[int]], batch_size: int) -> LayoutSample:
        """Answer every prompt in one of `MODES`."""
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
        # What an earlier run has read must not help this one.
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
    """The engine's steps, told apart by whether a prompt was read in them: by the target, or by a draft model a round
    later.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.clock = engine, Clock(device)
        self.num_rounds = self.num_emitted = self.num_drafted = self.num_accepted = 0

    def step(self, states: Mapping[int, RequestState]) -> None:
        """One step, booked."""
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


def run_layouts(options: LayoutOptions, command: str, tell: Tell = lambda _words, _share: None) -> LayoutReport:
    """Open the models and measure every way at every batch size.

    Raises:
        ForetokenError: a model that cannot be used in this comparison, or a failing engine.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = model_folder(options.target)
    target, tokenizer = open_model(folder, options.dtype, options.device), load_tokenizer(folder)
    if tokenizer is None:
        raise ConfigError("target", options.target, "has no tokenizer to read the prompts with")
    model = native(target, "target")
    drafter = DrafterFactory(folder, target, tokenizer, ModelOptions(options.dtype, options.device)).make(options.spec)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    caveats = source_caveats(folder, None if options.draft is None else model_folder(options.draft), load)
    num_prompts = options.pool * max(options.batch_sizes)
    texts = [tokenizer.encode(prompt.text) for prompt in slices((_SLICE,), num_prompts)]
    if len(texts) < num_prompts:
        raise InputError(
            "batch_sizes", options.batch_sizes, f"{num_prompts} prompts are needed, the library here has {len(texts)}"
        )
    prompts = uneven(texts, target.max_context_tokens - options.max_tokens)
    rows = measure_layouts(Layouts(options, target, drafter), prompts, tell)
    about = asdict(options) | {
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "dtype": str(model.dtype),
    }
    about["prompt_tokens"] = {
        size: [len(prompt) for prompt in prompts[: size * options.pool]] for size in options.batch_sizes
    }
    return LayoutReport(command, machine(), versions(), about, rows, ratios(rows), tuple(caveats))


def measure_layouts(
    layouts: Layouts, prompts: Sequence[Sequence[int]], tell: Tell = lambda _words, _share: None
) -> tuple[LayoutRow, ...]:
    """Every way at every batch size, in turns that begin with another way each time, after one run of each that does
    not count.
    """
    options = layouts.options
    rows: list[LayoutRow] = []
    done, total = 0, len(options.batch_sizes) * len(MODES) * (1 + options.repeats)
    for size in options.batch_sizes:
        own = prompts[: size * options.pool]
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
    """A row of samples that did the same work."""
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
    """By batch size, the decoding speed of each of the engine's ways over its padded counterpart's."""
    speed = {(row.batch_size, row.mode): row.tokens_per_s for row in rows}
    sizes = dict.fromkeys(row.batch_size for row in rows)
    return {
        size: {
            f"{ragged} / {padded}": speed[size, ragged] / speed[size, padded] for padded, ragged in COUNTERPARTS.items()
        }
        for size in sizes
    }


def uneven(texts: Sequence[Sequence[int]], room: int) -> list[list[int]]:
    """The end of every text, from a quarter of it to all of it in turn, at most `room` tokens; neighbours differ.

    Raises:
        InputError: no room for a prompt.
    """
    if room < 1:
        raise InputError(
            "max_tokens", f"{room} tokens are left for a prompt", "ask for shorter answers than the target's context"
        )
    steps = [(place * _STRIDE) % _LENGTH_STEPS for place in range(len(texts))]
    shares = [_SHORTEST + (1 - _SHORTEST) * step / (_LENGTH_STEPS - 1) for step in steps]
    return [
        list(text[-min(room, max(1, round(share * len(text)))) :]) for text, share in zip(texts, shares, strict=True)
    ]


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    return tuple(one) == tuple(other)
