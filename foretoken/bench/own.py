"""Settings of foretoken in a speed measurement: the public interface, one request at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from foretoken.backend.answering import Answer
from foretoken.backend.drafting import DrafterChoice
from foretoken.bench.measure import DEFAULT_NUMERICS, PLAIN, Contender, SpeedSetting
from foretoken.bench.speed_options import SpeedOptions
from foretoken.bench.workload import Prompt
from foretoken.config import LOSSY_RULES, SamplingParams, SpecConfig
from foretoken.control.chooser import Policy
from foretoken.core import StepOutput
from foretoken.draft.base import Drafter, DrafterKey
from foretoken.errors import ConfigError, ForetokenError
from foretoken.heads.kind import with_head_kind


class Stats(Protocol):
    """The counters of an answer that are read."""

    @property
    def num_steps(self) -> int: ...  # noqa: D102
    @property
    def num_drafted(self) -> int: ...  # noqa: D102
    @property
    def num_accepted(self) -> int: ...  # noqa: D102
    @property
    def wasted_s(self) -> float: ...  # noqa: D102
    @property
    def accepted_per_position(self) -> Sequence[tuple[int, int]]: ...  # noqa: D102


class Output(Protocol):
    """The fields of an answer that are read."""

    @property
    def text(self) -> str: ...  # noqa: D102
    @property
    def token_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def stats(self) -> Stats: ...  # noqa: D102
    @property
    def error(self) -> Exception | None: ...  # noqa: D102


class Totals(Protocol):
    """Seconds that the engine has spent since it started, by phase."""

    @property
    def draft_s(self) -> float: ...  # noqa: D102
    @property
    def target_s(self) -> float: ...  # noqa: D102
    @property
    def rule_s(self) -> float: ...  # noqa: D102


class MeasuredEngine(Protocol):
    """An engine with its totals."""

    @property
    def stats(self) -> Totals: ...  # noqa: D102


class HasContext(Protocol):
    """A target with a maximum context."""

    @property
    def max_context_tokens(self) -> int: ...  # noqa: D102


class Generator(Protocol):
    """The part of `foretoken.LLM` that is used."""

    @property
    def target(self) -> HasContext:
        """Prompts are cut to its context."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The text that the chat template makes of a conversation."""
        ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        ...

    @property
    def engine(self) -> MeasuredEngine:
        """Its totals are read between steps; a difference is the cost of the steps between."""
        ...

    def reset_drafters(self, spec: SpecConfig) -> None:
        """Let the drafters of `spec` forget earlier requests."""
        ...

    def take_drafters(self, spec: SpecConfig) -> Mapping[DrafterKey, Drafter]:
        """The drafters of `spec`, taken out with all they remember."""
        ...

    def put_drafters(self, drafters: Mapping[DrafterKey, Drafter]) -> None:
        """Use drafters that were taken out."""
        ...

    def reset_controller(self, policy: Policy | None = None) -> Policy:
        """Begin with a new policy, or go on with one that was in use."""
        ...

    def generate(
        self,
        prompts: list[str],
        params: SamplingParams,
        *,
        spec: SpecConfig,
        on_step: Callable[[list[StepOutput]], None],
    ) -> Sequence[Output]:
        """Answer every prompt under one `spec`; `on_step` gets what each step emitted."""
        ...


class _Watch:
    """The time and the engine's totals at the first tokens, which end the prefill."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.start = time.perf_counter()
        self.first_at: float | None = None
        self.num_first = 0
        self.first_totals = (0.0, 0.0, 0.0)

    def on_step(self, outputs: list[StepOutput]) -> None:
        if self.first_at is None and any(output.token_ids for output in outputs):
            self.first_at = time.perf_counter()
            self.num_first = sum(len(output.token_ids) for output in outputs)
            self.first_totals = self.totals()

    def totals(self) -> tuple[float, float, float]:
        """(draft, target and rule, rule alone) seconds so far."""
        stats = self.generator.engine.stats
        return stats.draft_s, stats.target_s + stats.rule_s, stats.rule_s


class Own:
    """A setting of foretoken. `takes_prediction`: its requests get their prompt's prediction.

    Each setting has a policy of its own, which keeps what it measured (step times, acceptance) from answer to answer,
    as in a server. Drafters are reset before every answer. With `warm` they keep what they remember from prompt to
    prompt, and are reset before a prompt that they have answered since.
    """

    def __init__(
        self,
        setting: SpeedSetting,
        generator: Generator,
        spec: SpecConfig,
        takes_prediction: bool = False,
        warm: bool = False,
    ) -> None:
        self.setting = setting
        self.generator = generator
        self.spec, self.takes_prediction, self.warm = with_head_kind(spec), takes_prediction, warm
        self._policy: Policy | None = None
        self._num_tenants = 0
        self._answered: set[Prompt] = set()  # since the drafters were reset
        self._drafters: Mapping[DrafterKey, Drafter] = {}  # of a warm setting, between its answers

    def params_for(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """The request's own tenant: its prefix is computed anew. Warm requests share one until a prompt comes again."""
        if not self.warm or prompt in self._answered:
            self._answered.clear()
        if not self._answered:
            self._num_tenants += 1
        self._answered.add(prompt)
        prediction = prompt.prediction if self.takes_prediction else None
        return replace(params, tenant=f"{self.setting.name} {self._num_tenants}", prediction=prediction)

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer one prompt alone, timed outside the engine.

        Raises:
            ForetokenError: the engine failed, or gave no token.
        """
        own = self.params_for(prompt, params)
        spec = self.spec.for_request(own.prediction)
        llm = self.generator
        self._policy = llm.reset_controller(self._policy)
        if len(self._answered) > 1:
            llm.put_drafters(self._drafters)
        else:
            llm.reset_drafters(spec)
        found = self._timed(prompt, own)
        if self.warm:
            self._drafters = llm.take_drafters(spec)
        return found

    def _timed(self, prompt: Prompt, own: SamplingParams) -> Answer:
        watch = _Watch(self.generator)
        output = self.generator.generate([prompt.text], own, spec=self.spec, on_step=watch.on_step)[0]
        stop = time.perf_counter()
        if isinstance(output.error, ForetokenError):
            raise output.error
        if watch.first_at is None:
            raise ForetokenError(f"{self.setting.name} gave no token for {prompt.name}")
        draft_s, verify_s, rule_s = watch.totals()
        return Answer(
            token_ids=tuple(output.token_ids),
            text=output.text,
            num_emitted=len(output.token_ids),
            decode_tokens=len(output.token_ids) - watch.num_first,
            decode_s=stop - watch.first_at,
            ttft_s=watch.first_at - watch.start,
            num_steps=output.stats.num_steps,
            decode_steps=output.stats.num_steps - 1,
            num_drafted=output.stats.num_drafted,
            num_accepted=output.stats.num_accepted,
            draft_s=draft_s - watch.first_totals[0],
            verify_s=verify_s - watch.first_totals[1],
            rule_s=rule_s - watch.first_totals[2],
            wasted_s=output.stats.wasted_s,
            positions=tuple(output.stats.accepted_per_position),
        )


def own_contenders(
    options: SpeedOptions, generator: Generator, prompts: Sequence[Prompt], numerics: str = DEFAULT_NUMERICS
) -> tuple[list[Contender], list[str]]:
    """Plain decoding, then every drafter at every number of draft tokens under every rule; notes on what is left out.

    `numerics` is that of `generator`.

    Raises:
        ConfigError: a drafter that was asked for by name can run on no prompt, or its options contradict each other.
    """
    plain = SpeedSetting(_named(PLAIN, numerics), numerics=numerics)
    found: dict[SpeedSetting, Contender] = {plain: Own(plain, generator, SpecConfig())}
    notes: list[str] = []
    for choice in options.choices:
        if "draft" in choice.needs and options.draft is None:
            notes.append(f"{choice.name} was not measured: it needs a draft, and none was given.")
            continue
        where = _slices_of(choice, prompts)
        if where == ():
            remedy = "measure it on the slice edit, or on your own prompts with a `prediction` each"
            if choice.required:
                raise ConfigError("drafters", choice.label, f"the prompts carry no prediction; {remedy}")
            notes.append(f"{choice.name} was not measured: no prompt carries a prediction.")
            continue
        if where is not None:
            left_out = dict.fromkeys(prompt.slice for prompt in prompts if prompt.slice not in where)
            notes.append(
                f"{choice.label} was not measured on {', '.join(left_out)}: these prompts carry no prediction."
            )
        try:
            found |= {contender.setting: contender for contender in _sweep(choice, options, generator, where, numerics)}
        except ConfigError as error:
            if choice.required:
                raise
            notes.append(f"{choice.name} was not measured: {error}")
    return list(found.values()), list(dict.fromkeys(notes))


def _slices_of(choice: DrafterChoice, prompts: Sequence[Prompt]) -> tuple[str, ...] | None:
    """The slices that the drafter can run on (None: all); one that needs a prediction needs it in every prompt."""
    names = dict.fromkeys(prompt.slice for prompt in prompts)
    able = tuple(
        name for name in names if all(prompt.prediction is not None for prompt in prompts if prompt.slice == name)
    )
    return able if "prediction" in choice.needs and len(able) < len(names) else None


def _sweep(
    choice: DrafterChoice, options: SpeedOptions, generator: Generator, where: tuple[str, ...] | None, numerics: str
) -> list[Own]:
    """One contender per number of draft tokens and rule, or only those that the choice itself names."""
    num_drafts = options.num_drafts if choice.own("num_draft") is None else (choice.own("num_draft"),)
    rules = options.rules if choice.own("rule") is None else (choice.own("rule"),)
    found = []
    for num_draft, rule in itertools.product(num_drafts, rules):
        given = {"draft": options.draft} if "draft" in choice.takes else {}
        spec = choice.spec(num_draft=num_draft, rule=rule, allow_lossy=options.allow_lossy, **given)
        name = f"{choice.label}-{num_draft}" + ("" if rules == options.rules and len(rules) == 1 else f" {rule}")
        setting = SpeedSetting(
            name=_named(name + (" warm" if options.warm else ""), numerics),
            drafter=choice.name,
            num_draft=num_draft,
            lossy=rule in LOSSY_RULES,
            options=choice.options,
            free=choice.own("draft") is None
            and (options.draft is None or "draft" not in choice.takes)
            and "prediction" not in choice.takes,
            slices=where,
            optional=not choice.required,
            numerics=numerics,
        )
        found.append(Own(setting, generator, spec, "prediction" in choice.takes, options.warm))
    return found


def _named(name: str, numerics: str) -> str:
    return name if numerics == DEFAULT_NUMERICS else f"{name} {numerics}"
