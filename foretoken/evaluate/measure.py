"""Runs an evaluation: every drafter at every temperature answers every prompt, one request at a time.

One at a time, so that a result depends on the models and the prompts and not on which requests shared a batch. A
drafter is reset before each, so that answers are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.errors import InputError
from foretoken.evaluate.counts import AcceptanceCounter
from foretoken.evaluate.options import EvalDrafter, EvalOptions
from foretoken.evaluate.prompts import EvalPrompt, encoded, in_turns
from foretoken.evaluate.result import EvalSample
from foretoken.heads.kind import with_head_kind


def open_llm(options: EvalOptions) -> LLM:
    """The engine with the target; costs of steps are not measured, because drafts have a fixed length.

    Raises:
        ForetokenError: a model that cannot be used.
    """
    return LLM(
        options.target,
        SpecConfig(drafter=None),
        dtype=options.dtype,
        device=options.device,
        numerics=options.numerics,
        weights=options.weights,
        profile="off",
    )


def plan(options: EvalOptions, prompts: Sequence[EvalPrompt]) -> list[tuple[EvalPrompt, EvalDrafter, float]]:
    """What to run, prompt by prompt. A drafter that needs a prediction runs on the prompts that have one.

    Raises:
        InputError: a drafter for which there is no prompt.
    """
    for drafter in options.settings:
        if drafter.needs_prediction and all(prompt.prediction is None for prompt in prompts):
            raise InputError("drafters", drafter.name, "no prompt has a prediction; evaluate it on the slice edit")
    return [
        (prompt, drafter, float(temperature))
        for prompt in in_turns(prompts)
        for drafter in options.settings
        if prompt.prediction is not None or not drafter.needs_prediction
        for temperature in dict.fromkeys(options.temperatures)
    ]


def measure(
    llm: LLM,
    options: EvalOptions,
    jobs: Sequence[tuple[EvalPrompt, EvalDrafter, float]],
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[EvalSample]:
    """Yield the counts of each answer; `tell` receives its drafter's name before it.

    Raises:
        InputError: a prompt that does not fit the target's context, or needs a tokenizer or chat template it lacks.
        ForetokenError: a draft that cannot be used, or an answer that failed.
    """
    counter = AcceptanceCounter()
    llm.engine.watchers.append(counter)
    try:
        for prompt, drafter, temperature in jobs:
            key = prompt.key
            tell(drafter.name)
            params = SamplingParams(
                max_tokens=options.max_tokens,
                temperature=temperature,
                seed=options.seed + int(key[:8], 16) if temperature > 0 else None,  # whatever else is run
                ignore_eos=not options.stop_at_eos,
                tenant=f"{drafter.name} {temperature:g} {key}",
                slice=prompt.slice,
                prediction=prompt.prediction if drafter.takes_prediction else None,
            )
            spec = with_head_kind(drafter.spec)
            llm.reset_drafters(spec.for_request(params.prediction))
            output = llm.generate([encoded(llm, prompt, options.chat)], params, spec)[0]
            if output.error is not None:
                raise output.error
            rule = "+".join(sorted(counter.rules)) or output.stats.rule
            yield EvalSample(drafter.name, prompt.slice, temperature, key, rule, counter.counts)
    finally:
        llm.engine.watchers.remove(counter)
