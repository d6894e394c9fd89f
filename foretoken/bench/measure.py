"""How settings are compared: every setting answers every prompt in turn, and rows summarise the answers.

The speed of a machine drifts. Settings therefore take turns at each prompt, in an order that rotates, so that drift
affects all alike. Only ratios within one run are meaningful.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar

from foretoken.bench.workload import Prompt
from foretoken.config import SamplingParams
from foretoken.errors import ForetokenError, InputError, ModelError, StorageError

ENGINE = "foretoken"
PLAIN = "plain"
ALL_SLICES = "all"
_NGRAM = 4

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class SpeedSetting:
    """One way to decode: an engine, a drafter (None: plain decoding) and its number of draft tokens.

    `options` are those of the drafter as they were written. `counterpart` is the drafter of ours that another engine's
    way is like. `free` drafters need nothing but the target and the text: no draft model, no prediction. `slices`
    limits where the setting is measured (None: everywhere). An `optional` setting that cannot be used here is left out
    with a note.
    """

    name: str
    engine: str = ENGINE
    drafter: str | None = None
    num_draft: int | str | None = None
    lossy: bool = False
    options: str = ""
    counterpart: str | None = None
    free: bool = False
    slices: tuple[str, ...] | None = None
    optional: bool = False

    def runs_on(self, prompt: Prompt) -> bool:
        """Whether it is measured on this prompt."""
        return self.slices is None or prompt.slice in self.slices


@dataclass(frozen=True)
class Answer:
    """One setting's answer to one prompt; None for what an engine does not report.

    `decode_tokens` left the engine during the last `decode_s` seconds, in `decode_steps` target forwards: what was out
    after the prompt's own pass is not counted. `draft_s` and `verify_s` lie within `decode_s`, `rule_s` within
    `verify_s`, `wasted_s` (rejected draft tokens) within both together. `positions[i]` counts (drafted, accepted)
    at the i-th place of a draft. `token_ids` is empty when only the text is known.
    """

    token_ids: tuple[int, ...]
    text: str
    num_emitted: int
    decode_tokens: int
    decode_s: float
    ttft_s: float | None = None
    num_steps: int | None = None
    decode_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    rule_s: float | None = None
    wasted_s: float | None = None
    positions: tuple[tuple[int, int], ...] = ()


class Contender(Protocol):
    """Something that can answer a prompt under one setting."""

    @property
    def setting(self) -> SpeedSetting:
        """The setting of its answers."""
        ...

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer one prompt; times are wall-clock seconds.

        Raises:
            ForetokenError: no answer; a contender that is not foretoken is then left out of the run.
        """
        ...


@dataclass(frozen=True)
class SpeedSample:
    """One answer with the place it has in the run."""

    setting: SpeedSetting
    prompt_index: int
    slice: str
    temperature: float
    repeat: int
    answer: Answer


@dataclass(frozen=True)
class SpeedPlan:
    """What to run: every contender on every prompt at every temperature, `repeats` times after `warmup` untimed
    prompts.
    """

    prompts: tuple[Prompt, ...]
    max_tokens: int
    temperatures: tuple[float, ...]
    repeats: int
    warmup: int
    seed: int
    ignore_eos: bool = True

    def params(self, temperature: float, prompt_index: int, repeat: int) -> SamplingParams:
        """Sampling of one answer; the seed is the same for every setting."""
        seed = self.seed + repeat * len(self.prompts) + prompt_index
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=temperature, seed=seed, ignore_eos=self.ignore_eos
        )

    def temperatures_of(self, setting: SpeedSetting) -> tuple[float, ...]:
        """Other engines run greedily only: their sampling orders differ, and so would the texts that are timed."""
        return tuple(t for t in self.temperatures if setting.engine == ENGINE or t == 0.0)

    def places_of(self, setting: SpeedSetting) -> tuple[int, ...]:
        """Numbers of the prompts that it is measured on."""
        return tuple(index for index, prompt in enumerate(self.prompts) if setting.runs_on(prompt))

    def num_runs(self, settings: Iterable[SpeedSetting]) -> int:
        """Answers that a whole run takes, warm-up included."""
        return sum(
            len(self.temperatures_of(s)) * (self.repeats * len(self.places_of(s)) + self.warmup) for s in settings
        )


Progress = Callable[[str], None]


def measure(
    contenders: Sequence[Contender], plan: SpeedPlan, progress: Progress = lambda _: None
) -> tuple[list[SpeedSample], list[str]]:
    """Run the plan; return the samples, and a note for every other engine that failed and was left out.

    A setting of our own is left out only if it is optional and what it needs is missing or does not fit.
    `progress` is called with a setting's name before each answer.

    Raises:
        ForetokenError: foretoken itself failed.
    """
    notes: list[str] = []
    active = list(contenders)
    samples: list[SpeedSample] = []

    def run(contender: Contender, index: int, temperature: float, repeat: int) -> Answer | None:
        progress(contender.setting.name)
        try:
            return contender.answer(plan.prompts[index], plan.params(temperature, index, repeat))
        except ForetokenError as error:
            unusable = contender.setting.optional and isinstance(error, InputError | ModelError | StorageError)
            if contender.setting.engine == ENGINE and not unusable:
                raise
            notes.append(f"{contender.setting.name} was left out: {error}")
            active.remove(contender)
            return None

    for contender in list(active):
        own = plan.places_of(contender.setting)
        for temperature, turn in itertools.product(plan.temperatures_of(contender.setting), range(plan.warmup)):
            if contender in active:
                run(contender, own[turn % len(own)], temperature, 0)
    places = itertools.product(range(plan.repeats), plan.temperatures, range(len(plan.prompts)))
    for turn, (repeat, temperature, index) in enumerate(places):
        here = [
            c
            for c in active
            if temperature in plan.temperatures_of(c.setting) and c.setting.runs_on(plan.prompts[index])
        ]
        for contender in _rotated(here, turn):
            answer = run(contender, index, temperature, repeat)
            if answer is not None:
                samples.append(
                    SpeedSample(contender.setting, index, plan.prompts[index].slice, temperature, repeat, answer)
                )
    left_out = {c.setting for c in contenders} - {c.setting for c in active}
    return [sample for sample in samples if sample.setting not in left_out], notes


def _rotated(contenders: list[Contender], turn: int) -> list[Contender]:
    first = turn % len(contenders) if contenders else 0
    return contenders[first:] + contenders[:first]


@dataclass(frozen=True)
class SpeedRow:
    """One setting on one slice at one temperature.

    Counters and `draft_s`, `verify_s`, `wasted_s` are sums over prompts and repeats; `lossy`: the rule changes the
    target's distribution. `tokens_per_s` counts the tokens after the prefill; it is the median over repeats, with its
    range. `speedup` is the ratio of that median to plain decoding's on the same slice; its range is over the repeats,
    each with its own plain. `*_ms_per_step` are medians over repeats; the rule's is part of the verification's.
    `repeated_4grams` is the share of 4-grams that an output had already used. `identical` says whether every greedy
    output equals plain decoding's; `differences` lists where each one that does not leaves it first.
    """

    setting: str
    engine: str
    drafter: str | None
    num_draft: int | str | None
    lossy: bool
    options: str
    counterpart: str | None
    free: bool
    slice: str
    temperature: float
    num_prompts: int
    repeats: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    speedup: float | None
    speedup_min: float | None
    speedup_max: float | None
    ttft_s: float | None
    num_steps: int | None
    num_drafted: int | None
    num_accepted: int | None
    num_emitted: int
    acceptance_rate: float | None
    acceptance_per_position: tuple[float, ...]
    emitted_per_step: float | None
    draft_s: float | None
    verify_s: float | None
    wasted_s: float | None
    step_ms: float | None
    draft_ms_per_step: float | None
    verify_ms_per_step: float | None
    rule_ms_per_step: float | None
    rest_ms_per_step: float | None
    repeated_4grams: float | None
    identical: bool | None
    differences: tuple[dict[str, str | int], ...]


def summarise(samples: Sequence[SpeedSample], prompts: Sequence[Prompt]) -> tuple[SpeedRow, ...]:
    """One row per temperature, slice and setting; with several slices, one over all of them as well, where a setting
    ran on all.
    """
    rows: list[SpeedRow] = []
    names = list(dict.fromkeys(prompt.slice for prompt in prompts))
    for temperature in dict.fromkeys(sample.temperature for sample in samples):
        for name in [*names, ALL_SLICES] if len(names) > 1 else names:
            chosen = [s for s in samples if s.temperature == temperature and name in (s.slice, ALL_SLICES)]
            plain = [s for s in chosen if s.setting.name == PLAIN]
            for setting in sorted({s.setting for s in chosen}, key=[s.setting for s in samples].index):
                if name != ALL_SLICES or all(setting.runs_on(prompt) for prompt in prompts):
                    rows.append(_row([s for s in chosen if s.setting == setting], plain, name, prompts))
    return tuple(rows)


def _row(own: list[SpeedSample], plain: list[SpeedSample], name: str, prompts: Sequence[Prompt]) -> SpeedRow:
    setting, answers = own[0].setting, [s.answer for s in own]
    rates, plain_rates = _per_repeat(own, _tokens_per_s), _per_repeat(plain, _tokens_per_s)
    ratios = [rate / plain_rates[repeat] for repeat, rate in rates.items() if plain_rates.get(repeat)]
    drafted, accepted, steps = (
        _total(a.num_drafted for a in answers),
        _total(a.num_accepted for a in answers),
        _total(a.num_steps for a in answers),
    )
    emitted = sum(a.num_emitted for a in answers)
    comparable = own[0].temperature == 0.0 and bool(plain) and all(a.token_ids or a.text for a in answers)
    differences = _differences(own, plain, prompts) if comparable else None
    ttfts = [a.ttft_s for a in answers if a.ttft_s is not None]
    return SpeedRow(
        setting=setting.name,
        engine=setting.engine,
        drafter=setting.drafter,
        num_draft=setting.num_draft,
        lossy=setting.lossy,
        options=setting.options,
        counterpart=setting.counterpart,
        free=setting.free,
        slice=name,
        temperature=own[0].temperature,
        num_prompts=len({s.prompt_index for s in own}),
        repeats=len(rates),
        tokens_per_s=median(rates.values()),
        tokens_per_s_min=min(rates.values()),
        tokens_per_s_max=max(rates.values()),
        speedup=median(rates.values()) / median(plain_rates.values()) if ratios else None,
        speedup_min=min(ratios, default=None),
        speedup_max=max(ratios, default=None),
        ttft_s=median(ttfts) if ttfts else None,
        num_steps=steps,
        num_drafted=drafted,
        num_accepted=accepted,
        num_emitted=emitted,
        acceptance_rate=accepted / drafted if accepted is not None and drafted else None,
        acceptance_per_position=_acceptance_per_position(answers),
        emitted_per_step=emitted / steps if steps else None,
        draft_s=_total(a.draft_s for a in answers),
        verify_s=_total(a.verify_s for a in answers),
        wasted_s=_total(a.wasted_s for a in answers),
        step_ms=_ms_per_step(own, lambda a: a.decode_s),
        draft_ms_per_step=_ms_per_step(own, lambda a: a.draft_s),
        verify_ms_per_step=_ms_per_step(own, lambda a: a.verify_s),
        rule_ms_per_step=_ms_per_step(own, lambda a: a.rule_s),
        rest_ms_per_step=_ms_per_step(own, _rest_s),
        repeated_4grams=repeated_ngrams([a.token_ids for a in answers]),
        identical=None if differences is None else not differences,
        differences=tuple(differences or ()),
    )


def repeated_ngrams(outputs: Iterable[Sequence[int]], n: int = _NGRAM) -> float | None:
    """Share of n-grams that occurred earlier in the same output, over all outputs; None when there is no n-gram."""
    total, distinct = 0, 0
    for ids in outputs:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return 1.0 - distinct / total if total else None


def _tokens_per_s(answers: Sequence[Answer]) -> float:
    seconds = sum(a.decode_s for a in answers)
    return sum(a.decode_tokens for a in answers) / seconds if seconds > 0 else 0.0


def _rest_s(answer: Answer) -> float | None:
    if answer.draft_s is None or answer.verify_s is None:
        return None
    return answer.decode_s - answer.draft_s - answer.verify_s


def _ms_per_step(own: list[SpeedSample], seconds: Callable[[Answer], float | None]) -> float | None:
    """Median over repeats of milliseconds per target forward; None when an answer does not tell."""
    told = [(seconds(s.answer), s.answer.decode_steps) for s in own]
    if any(value is None or steps is None for value, steps in told) or not sum(steps or 0 for _, steps in told):
        return None

    def per_step(answers: Sequence[Answer]) -> float:
        steps = sum(a.decode_steps or 0 for a in answers)
        return 1e3 * sum(seconds(a) or 0.0 for a in answers) / steps if steps else 0.0

    return median(_per_repeat(own, per_step).values())


def _per_repeat(samples: Sequence[SpeedSample], value: Callable[[Sequence[Answer]], float]) -> dict[int, float]:
    repeats = dict.fromkeys(s.repeat for s in samples)
    return {repeat: value([s.answer for s in samples if s.repeat == repeat]) for repeat in repeats}


def _total(values: Iterable[_Number | None]) -> _Number | None:
    """The sum, or None as soon as one value is not known."""
    known = list(values)
    told = [value for value in known if value is not None]
    return sum(told[1:], start=told[0]) if told and len(told) == len(known) else None


def _acceptance_per_position(answers: Sequence[Answer]) -> tuple[float, ...]:
    places = max((len(a.positions) for a in answers), default=0)
    counts = [[a.positions[place] for a in answers if place < len(a.positions)] for place in range(places)]
    return tuple(
        sum(accepted for _, accepted in place) / max(1, sum(drafted for drafted, _ in place)) for place in counts
    )


def _differences(
    own: list[SpeedSample], plain: list[SpeedSample], prompts: Sequence[Prompt]
) -> list[dict[str, str | int]]:
    """Per prompt the first place where an output leaves plain decoding's first one."""
    expected = {s.prompt_index: s.answer for s in reversed(plain)}
    found: dict[int, dict[str, str | int]] = {}
    for sample in own:
        other = expected.get(sample.prompt_index)
        if other is None or sample.prompt_index in found:
            continue
        where = _first_difference(sample.answer, other)
        if where is not None:
            unit, place = where
            found[sample.prompt_index] = {"prompt": prompts[sample.prompt_index].name, unit: place}
    return list(found.values())


def _first_difference(one: Answer, other: Answer) -> tuple[str, int] | None:
    if one.token_ids and other.token_ids:
        place = _mismatch(one.token_ids, other.token_ids)
        return None if place is None else ("token", place)
    if not one.text or not other.text:
        return None
    # Engines that give text only may run past the limit by the end of their last draft.
    place = _mismatch(one.text, other.text)
    return None if place is None or place == min(len(one.text), len(other.text)) else ("character", place)


def _mismatch(one: Sequence[object], other: Sequence[object]) -> int | None:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))
