"""Rows of a speed measurement: what the answers of a setting come to on a slice, against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from foretoken.backend.answering import Answer
from foretoken.kv.prefix import shared_length
from foretoken.machine.neighbours import is_contended
from foretoken.measure.options import DEFAULT_NUMERICS, STRICT
from foretoken.measure.price import counted_tokens
from foretoken.measure.speed.plan import ALL_SLICES, ENGINE, SpeedSample
from foretoken.measure.stats import paired_ratio
from foretoken.measure.workload import Prompt

_NGRAM = 4

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class SpeedRow:
    """One setting on one slice at one temperature.

    Counters and `draft_s`, `verify_s`, `wasted_s` are sums over prompts and repeats; `lossy`: the rule changes the
    target's distribution. `tokens_per_s` counts the tokens after the prefill; it is the median over repeats, with its
    range. `speedup` is the ratio to plain decoding's on the same slice, of each prompt its medians over repeats
    (`paired_ratio`); its range is over the repeats, each with its own plain. `*_ms_per_step` are medians over repeats;
    the rule's is part of the verification's.
    `repeated_4grams` is the share of 4-grams that an output had already used. `identical` says whether every greedy
    output equals plain decoding's; `differences` lists where each one that does not leaves it first.

    Plain is that of the same `numerics`, on the prompts and repeats that the setting has answered. `speedup_low` and
    `speedup_high` are the bootstrap interval of `speedup` over prompts (`paired`), `prompt_speedups` each prompt's own.
    Of `num_compared` greedy outputs `num_differing` differ from plain's. Of `num_answers` answers `num_contended` were
    measured while other processes took the cores. `over_rival` and its interval compare a drafter of ours with `rival`,
    the fastest setting of other engines that drafts, in whatever way.

    `e2e_tokens_per_s` counts all tokens from the question to the last one, its prompt included, and `e2e_speedup` is
    its ratio to plain decoding's; None where the engine does not tell the time. `timely_tokens_per_s` counts only those
    of answers with at most so much time between two tokens as was asked for.
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
    numerics: str
    speedup_low: float | None
    speedup_high: float | None
    prompt_speedups: tuple[dict[str, str | float], ...]
    num_compared: int | None
    num_differing: int | None
    num_answers: int
    num_contended: int | None
    rival: str | None = None
    over_rival: float | None = None
    over_rival_low: float | None = None
    over_rival_high: float | None = None
    e2e_tokens_per_s: float | None = None
    e2e_speedup: float | None = None
    e2e_speedup_low: float | None = None
    e2e_speedup_high: float | None = None
    timely_tokens_per_s: float | None = None


def summarise(
    samples: Sequence[SpeedSample], prompts: Sequence[Prompt], slo_ms: float | None = None
) -> tuple[SpeedRow, ...]:
    """One row per temperature, slice and setting; over several slices another, where a setting ran on all."""
    rows: list[SpeedRow] = []
    names = list(dict.fromkeys(prompt.slice for prompt in prompts))
    for temperature in dict.fromkeys(sample.temperature for sample in samples):
        for name in [*names, ALL_SLICES] if len(names) > 1 else names:
            chosen = [s for s in samples if s.temperature == temperature and name in (s.slice, ALL_SLICES)]
            for setting in sorted({s.setting for s in chosen}, key=[s.setting for s in samples].index):
                if name != ALL_SLICES or all(setting.runs_on(prompt) for prompt in prompts):
                    own = [s for s in chosen if s.setting == setting]
                    row = _row(own, _plain_of(own, chosen), name, prompts)
                    row = row if slo_ms is None else replace(row, timely_tokens_per_s=_e2e_tokens_per_s(own, slo_ms))
                    rows.append(_beside_rival(row, own, _fastest_rival(chosen)))
    return tuple(rows)


def _fastest_rival(chosen: Sequence[SpeedSample]) -> list[SpeedSample]:
    """The answers of the fastest setting of other engines that drafts."""
    by_setting: dict[str, list[SpeedSample]] = {}
    for sample in chosen:
        if sample.setting.engine != ENGINE and sample.setting.drafter is not None:
            by_setting.setdefault(sample.setting.name, []).append(sample)
    return max(by_setting.values(), key=lambda own: median(_per_repeat(own, _tokens_per_s).values()), default=[])


def _beside_rival(row: SpeedRow, own: Sequence[SpeedSample], rival: Sequence[SpeedSample]) -> SpeedRow:
    if row.engine != ENGINE or row.drafter is None or not rival:
        return row
    paired = paired_ratio(_tokens_and_seconds(own), _tokens_and_seconds(rival))
    if paired is None:
        return row
    name = rival[0].setting.name
    return replace(row, rival=name, over_rival=paired.ratio, over_rival_low=paired.low, over_rival_high=paired.high)


def _plain_of(own: Sequence[SpeedSample], chosen: Sequence[SpeedSample]) -> list[SpeedSample]:
    """Plain decoding of the same numerics on the same prompts and repeats; other engines are compared with the default,
    or with the only one.
    """
    plain = [s for s in chosen if s.setting.is_plain]
    known = list(dict.fromkeys(s.setting.numerics for s in plain))
    wanted = own[0].setting.numerics
    if own[0].setting.engine != ENGINE:
        wanted = DEFAULT_NUMERICS if DEFAULT_NUMERICS in known else (known or [wanted])[0]
    places = {(s.prompt_index, s.repeat) for s in own}
    return [s for s in plain if s.setting.numerics == wanted and (s.prompt_index, s.repeat) in places]


def _row(own: list[SpeedSample], plain: list[SpeedSample], name: str, prompts: Sequence[Prompt]) -> SpeedRow:
    setting, answers = own[0].setting, [s.answer for s in own]
    rates, plain_rates = _per_repeat(own, _tokens_per_s), _per_repeat(plain, _tokens_per_s)
    ratios = [rate / plain_rates[repeat] for repeat, rate in rates.items() if plain_rates.get(repeat)]
    drafted, accepted = _total(a.num_drafted for a in answers), _total(a.num_accepted for a in answers)
    steps, emitted = _total(a.num_steps for a in answers), sum(a.num_emitted for a in answers)
    comparable = own[0].temperature == 0.0 and bool(plain) and all(a.token_ids or a.text for a in answers)
    differences, num_differing, num_compared = _differences(own, plain, prompts) if comparable else (None, None, None)
    paired = paired_ratio(_tokens_and_seconds(own), _tokens_and_seconds(plain)) if plain else None
    whole = paired_ratio(_whole_answers(own), _whole_answers(plain))
    by_prompt = {} if paired is None else paired.by_prompt
    watched = [s.others for s in own if s.others is not None]
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
        speedup=None if paired is None else paired.ratio,
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
        numerics=setting.numerics,
        speedup_low=None if paired is None else paired.low,
        speedup_high=None if paired is None else paired.high,
        prompt_speedups=tuple({"prompt": prompts[i].name, "speedup": ratio} for i, ratio in by_prompt.items()),
        num_compared=num_compared,
        num_differing=num_differing,
        num_answers=len(own),
        num_contended=sum(map(is_contended, watched)) if watched else None,
        e2e_tokens_per_s=_e2e_tokens_per_s(own),
        e2e_speedup=None if whole is None else whole.ratio,
        e2e_speedup_low=None if whole is None else whole.low,
        e2e_speedup_high=None if whole is None else whole.high,
    )


def strict_differing(rows: Sequence[SpeedRow]) -> int:
    """Outputs that differ from plain decoding's under strict numerics and a lossless rule: an error if not 0."""
    strict = [row for row in rows if row.engine == ENGINE and row.numerics == STRICT and not row.lossy]
    return sum(row.num_differing or 0 for row in strict if row.slice != ALL_SLICES)


def _tokens_and_seconds(samples: Sequence[SpeedSample]) -> dict[tuple[int, int], tuple[float, float]]:
    return {(s.prompt_index, s.repeat): (float(s.answer.decode_tokens), s.answer.decode_s) for s in samples}


def _whole_answers(samples: Sequence[SpeedSample]) -> dict[tuple[int, int], tuple[float, float]]:
    """Tokens and seconds of whole answers, prompts included, where the engine tells the time."""
    return {
        (s.prompt_index, s.repeat): (float(s.answer.num_emitted), s.answer.e2e_s)
        for s in samples
        if s.answer.e2e_s is not None
    }


def _e2e_tokens_per_s(samples: Sequence[SpeedSample], slo_ms: float | None = None) -> float | None:
    def rate(answers: Sequence[Answer]) -> float:
        counted = (counted_tokens(a.num_emitted, a.decode_s / max(1, a.decode_tokens), slo_ms) for a in answers)
        return sum(counted) / sum(a.e2e_s or 0.0 for a in answers)

    known = [s for s in samples if s.answer.e2e_s]
    return median(_per_repeat(known, rate).values()) if known else None


def repeated_ngrams(outputs: Iterable[Sequence[int]]) -> float | None:
    """Share of runs of `_NGRAM` tokens that occurred earlier in the same output, over all outputs; None without one."""
    total, distinct = 0, 0
    for ids in outputs:
        grams = [tuple(ids[i : i + _NGRAM]) for i in range(len(ids) - _NGRAM + 1)]
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
    totals = [tuple(map(sum, zip(*place, strict=True))) for place in counts]  # (drafted, accepted) of each
    return tuple(accepted / max(1, drafted) for drafted, accepted in totals)


def _differences(
    own: list[SpeedSample], plain: list[SpeedSample], prompts: Sequence[Prompt]
) -> tuple[list[dict[str, str | int]], int, int]:
    """Per prompt where an output first leaves plain decoding's first one; how many outputs do, of how many."""
    expected = {s.prompt_index: s.answer for s in reversed(plain)}
    found: dict[int, dict[str, str | int]] = {}
    num_differing = num_compared = 0
    for sample in own:
        other = expected.get(sample.prompt_index)
        num_compared += other is not None
        where = None if other is None else _first_difference(sample.answer, other)
        if where is not None:
            unit, place = where
            num_differing += 1
            found.setdefault(sample.prompt_index, {"prompt": prompts[sample.prompt_index].name, unit: place})
    return list(found.values()), num_differing, num_compared


def _first_difference(one: Answer, other: Answer) -> tuple[str, int] | None:
    if one.token_ids and other.token_ids:
        place = shared_length(one.token_ids, other.token_ids)
        return None if one.token_ids == other.token_ids else ("token", place)
    # Engines that give text only may run past the limit by the end of their last draft.
    place = shared_length(one.text, other.text)
    return None if place == min(len(one.text), len(other.text)) else ("character", place)
