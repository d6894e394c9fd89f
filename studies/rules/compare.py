"""Rules by pairs: the same drafter, prompts and seeds under two rules, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from foretoken.backend.answering import Answer
from foretoken.engine.llm import LLM
from foretoken.errors import InputError
from foretoken.measure.report import Report, Table
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.plan import ALL_SLICES, SpeedSample
from foretoken.measure.speed.report import speed_tables
from foretoken.measure.speed.rows import summarise
from foretoken.measure.speed.run import measure_speed
from foretoken.measure.stats import Measured, PairedRatio, paired_ratio
from foretoken.measure.workload import Prompt

EXPLAINED = (
    "Ratios of the second rule to the first, on the same prompts with the same seeds; the interval is a bootstrap over "
    "prompts (95 %), each drawn with its answers under both rules. A ratio whose interval holds 1 shows nothing. "
    "Both rules leave the distribution unchanged, and draw different texts from it. `answers` counts those of a rule."
)
_COLUMNS = ("setting", "answers", "tokens a step", "ratio", "95 %", "tok/s", "ratio", "95 %")


@dataclass(frozen=True)
class RulePair:
    """One drafter with one number of draft tokens under two rules, on a slice at a temperature.

    Pairs of values are (first rule, second rule); `steps_ratio` and `speed_ratio` are the second's over the first's.
    """

    setting: str
    slice: str
    temperature: float
    rules: tuple[str, str]
    num_prompts: int
    num_answers: int
    emitted_per_step: tuple[float, float]
    tokens_per_s: tuple[float, float]
    steps_ratio: PairedRatio | None
    speed_ratio: PairedRatio | None


def compare_rules(options: SpeedOptions, command: str, llm: LLM | None = None) -> Report:
    """Measure `options.rules`, two of them, and compare the second with the first; `llm` replaces the engine.

    Raises:
        InputError: not two rules.
        ForetokenError: see `run_speed`.
    """
    if len(options.rules) != 2:
        raise InputError("rules", ",".join(options.rules), "give two, separated by a comma, such as rejection,block")
    run = measure_speed(options, llm)
    rows = summarise(run.samples, run.prompts)
    pairs = rule_pairs(run.samples, run.prompts, (options.rules[0], options.rules[1]))
    return Report(
        title="Rules compared",
        command=command,
        options=asdict(options),
        results={"rows": pairs, "settings": rows, "interrupted": run.interrupted},
        tables=(*pair_tables(pairs), *speed_tables(rows, {})),
        explained=EXPLAINED,
        caveats=run.caveats,
        versions=run.versions,
        files=() if run.samples_file is None else (str(run.samples_file),),
    )


def rule_pairs(
    samples: Sequence[SpeedSample], prompts: Sequence[Prompt], rules: tuple[str, str]
) -> tuple[RulePair, ...]:
    """Every setting that ran under both rules, by temperature and slice, with one over all slices."""
    names = list(dict.fromkeys(prompt.slice for prompt in prompts))
    pairs = []
    for temperature in dict.fromkeys(sample.temperature for sample in samples):
        for name in [*names, ALL_SLICES] if len(names) > 1 else names:
            here = [s for s in samples if s.temperature == temperature and name in (s.slice, ALL_SLICES)]
            for setting in dict.fromkeys(s.setting.name for s in here):
                base = setting.removesuffix(f" {rules[0]}")
                both = [[s for s in here if s.setting.name == f"{base} {rule}"] for rule in rules]
                if base != setting and all(both):
                    pairs.append(_pair(base, name, temperature, rules, both[0], both[1]))
    return tuple(pairs)


def _pair(
    setting: str,
    name: str,
    temperature: float,
    rules: tuple[str, str],
    first: Sequence[SpeedSample],
    second: Sequence[SpeedSample],
) -> RulePair:
    steps, speed = (
        (_measured(first, amount), _measured(second, amount))
        for amount in (
            lambda answer: (float(answer.num_emitted), float(answer.num_steps or 0)),
            lambda answer: (float(answer.decode_tokens), answer.decode_s),
        )
    )
    return RulePair(
        setting,
        name,
        temperature,
        rules,
        num_prompts=len({s.prompt_index for s in first}),
        num_answers=min(len(first), len(second)),
        emitted_per_step=(_rate(steps[0]), _rate(steps[1])),
        tokens_per_s=(_rate(speed[0]), _rate(speed[1])),
        steps_ratio=paired_ratio(steps[1], steps[0]),
        speed_ratio=paired_ratio(speed[1], speed[0]),
    )


def _measured(samples: Sequence[SpeedSample], amount: Callable[[Answer], tuple[float, float]]) -> Measured:
    return {(s.prompt_index, s.repeat): amount(s.answer) for s in samples}


def _rate(measured: Measured) -> float:
    cost = sum(cost for _, cost in measured.values())
    return sum(amount for amount, _ in measured.values()) / cost if cost else 0.0


def pair_tables(pairs: Sequence[RulePair]) -> tuple[Table, ...]:
    """A table for each temperature and slice."""
    groups: dict[tuple[float, str], list[RulePair]] = {}
    for pair in pairs:
        groups.setdefault((pair.temperature, pair.slice), []).append(pair)
    return tuple(
        Table(
            f"{own[0].rules[1]} against {own[0].rules[0]}: {name}, temperature {temperature:g}",
            _COLUMNS,
            tuple(_cells(pair) for pair in own),
        )
        for (temperature, name), own in groups.items()
    )


def _cells(pair: RulePair) -> tuple[str, ...]:
    first, second = pair.emitted_per_step
    slow, fast = pair.tokens_per_s
    return (
        pair.setting,
        str(pair.num_answers),
        f"{first:.2f} to {second:.2f}",
        *_ratio(pair.steps_ratio),
        f"{slow:.1f} to {fast:.1f}",
        *_ratio(pair.speed_ratio),
    )


def _ratio(found: PairedRatio | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    interval = "" if found.low is None or found.high is None else f"{found.low:.3f}-{found.high:.3f}"
    return f"{found.ratio:.3f}", interval
