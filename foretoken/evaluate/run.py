"""One evaluation from options to result, and what is left of it when it is interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.errors import InputError
from foretoken.evaluate.counts import AcceptanceCounter
from foretoken.evaluate.identity import identity_of
from foretoken.evaluate.options import EvalDrafter, EvalOptions
from foretoken.evaluate.prompts import EvalPrompt, encoded, in_turns
from foretoken.evaluate.result import EvalResult, EvalSample
from foretoken.heads.kind import with_head_kind
from foretoken.machine.identity import machine, versions
from foretoken.measure.report import now
from foretoken.model.names import model_folder


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
                seed=answer_seed(options.seed, prompt) if temperature > 0 else None,
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


FEW_PROMPTS = 10


@dataclass
class EvalRun:
    """A running evaluation: `samples` are the answers so far, so that `result` can be taken at any time."""

    options: EvalOptions
    prompts: Sequence[EvalPrompt]
    command: str
    samples: list[EvalSample] = field(default_factory=list)
    identity: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = plan(self.options, self.prompts)

    def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Open the target, read the identities, measure; `tell` receives a drafter's name before each answer.

        Raises:
            ForetokenError: a model that cannot be used, a prompt that cannot be run, or an answer that failed.
        """
        with open_llm(self.options) as llm:
            self.identity = identities(self.options)
            for sample in measure(llm, self.options, self.jobs, tell):
                self.samples.append(sample)

    def result(self) -> EvalResult:
        """What was measured so far."""
        return EvalResult(
            samples=tuple(self.samples),
            identity=self.identity,
            settings=settings_of(self.options),
            options=asdict(self.options),
            command=self.command,
            machine=machine(),
            versions=versions(),
            date=now(),
            complete=len(self.samples) == len(self.jobs),
            notes=few_prompts(self.prompts),
        )


def few_prompts(prompts: Sequence[EvalPrompt]) -> list[str]:
    """A note on slices with too few prompts for a narrow interval, if there are such."""
    per_slice = Counter(prompt.slice for prompt in prompts)
    few = [f"{name} ({count})" for name, count in per_slice.items() if count < FEW_PROMPTS]
    return [f"fewer than {FEW_PROMPTS} prompts, so the intervals are rough: {', '.join(few)}"] if few else []


def answer_seed(seed: int, prompt: EvalPrompt) -> int:
    """The seed of a prompt's sampled answers: the same whatever else is run."""
    return seed + int(prompt.key[:8], 16)


def settings_of(options: EvalOptions) -> dict[str, object]:
    """The settings that two results must share to be comparable."""
    return {name: getattr(options, name) for name in ("rule", "max_tokens", "stop_at_eos", "chat", "allow_lossy")}


def identities(options: EvalOptions) -> dict[str, object]:
    """The hashes of the target and of each drafter's draft models.

    Raises:
        ModelError, StorageError: a checkpoint that cannot be read.
    """
    known: dict[str, dict[str, str | None]] = {}

    def of(name: str) -> dict[str, str | None]:
        if name not in known:
            known[name] = identity_of(name, model_folder(name))
        return known[name]

    target = of(options.target)
    drafts = {one.name: [of(name) for name in dict.fromkeys(_drafts(one.spec))] for one in options.settings}
    return {"target": target, "drafts": {name: found for name, found in drafts.items() if found}}


def _drafts(spec: SpecConfig) -> Iterator[str]:
    """The draft models of a configuration and its parts."""
    if spec.draft is not None:
        yield spec.draft
    for part in spec.declared:
        yield from _drafts(part)
