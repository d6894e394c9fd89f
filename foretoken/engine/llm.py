"""The public front: load a target, generate, stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.draft.group import DrafterGroup, arm_keys, own_drafters
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.engine import Engine
from foretoken.engine.intake import Prompt, as_prompts, check_limits, check_share, check_types
from foretoken.engine.known_costs import KnownCosts, check_mode, know_costs
from foretoken.engine.output import GenerateOutput, collect, each_answer
from foretoken.engine.request import RequestState
from foretoken.engine.shadow import Shadow
from foretoken.engine.stats import EngineStats
from foretoken.engine.trace import Trace
from foretoken.errors import InputError, MismatchError
from foretoken.model.interface import LanguageModel, PrefixModel
from foretoken.model.open import model_folder, open_model
from foretoken.model.tokenizer import Tokenizer, load_tokenizer
from foretoken.plan.admission import SchedulerConfig
from foretoken.plan.routing import RoutingRules


class LLM:
    """A target with its drafters.

    `model` is a folder, a hub id, or `reference:target`. `spec` is the default for every request; `generate` and
    `stream` take another one per call or per prompt. A draft model is loaded when it is first named.

    `max_batch_size`, `max_prompt_tokens`, `max_step_tokens` and `cache_reserve` are the scheduler's, see `plan.admission.SchedulerConfig`.

    `numerics="strict"` makes the target's logits bitwise the same however rows are batched, at a price. `trace` names a file
    that gets one line per event (docs/trace.md). `shadow_rate` is the share of requests whose answers the target alone scores again
    in the background; `stats.shadow` tells what it found, and a warning is raised when answers do not follow the target's law.
    `routing` says for which requests not to speculate at all (docs/batching.md).

    `profile` says where it is known from what steps cost, which decides how much is guessed where that is left open: "auto" (kept from an
    earlier start, or measured now, see docs/batching.md), "off" (learnt from the first steps), "measure" (now, again), or a file of
    `foretoken bench --profile`. `on_profile` hears about measuring that takes longer than a second; `costs` tells what came of it.
    """

    def __init__(
        self,
        model: str | Path,
        spec: SpecConfig | None = None,
        dtype: str = "auto",
        device: str = "auto",
        cache_tokens: int | None = None,
        max_batch_size: int = 16,
        max_prompt_tokens: int = 512,
        numerics: str = "default",
        trace: str | Path | None = None,
        shadow_rate: float = 0.0,
        routing: RoutingRules | None = None,
        profile: str | Path = "auto",
        on_profile: Callable[[str], None] | None = None,
        max_step_tokens: int | None = None,
        cache_reserve: float = SchedulerConfig.cache_reserve,
    ) -> None:
        check_share("shadow_rate", shadow_rate)
        check_share("cache_reserve", cache_reserve)
        check_limits(max_batch_size=max_batch_size, max_prompt_tokens=max_prompt_tokens, cache_tokens=cache_tokens, max_step_tokens=max_step_tokens)
        mode = check_mode(profile)
        limits = SchedulerConfig(max_batch_size, max_prompt_tokens, max_step_tokens=max_step_tokens, cache_reserve=cache_reserve)
        self.spec = spec or SpecConfig()
        options = ModelOptions(dtype, device, cache_tokens)
        self._closed = False
        self.folder = model_folder(str(model))
        self.tokenizer = load_tokenizer(self.folder)
        self.target: LanguageModel = open_model(self.folder, dtype, device, cache_tokens, numerics)
        self._drafters = DrafterGroup(self.target.device)
        self._factory = DrafterFactory(self.folder, self.target, self.tokenizer, options)
        self._inboxes: dict[int, deque[StepOutput]] = {}  # of open streams
        self.engine = Engine(self.target, self._drafters, self.tokenizer, limits, self._eos_token_ids(), routing)
        if trace is not None:
            self.engine.watchers.append(Trace(Path(trace)))
        self._shadow = Shadow(self.target, shadow_rate, room=self.engine.scheduler, fresh_processors=self.engine.intake.processors)
        if shadow_rate:
            self.engine.watchers.append(self._shadow)
        self.prepare(self.spec)
        self.costs = self._know_costs(mode, on_profile)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecConfig | Sequence[SpecConfig] | None = None,
        on_step: Callable[[list[StepOutput]], None] | None = None,
    ) -> list[GenerateOutput]:
        """Answer every prompt; prompts are texts or lists of token ids, `params` and `spec` one for all or one each.

        `on_step` is called with what each engine step emitted. An answer that failed alone carries its `error`.

        Raises:
            InputError: a prompt or parameter that cannot be honoured; nothing was run.
        """
        batch = as_prompts(prompts)
        each_params = _per_prompt("params", SamplingParams() if params is None else params, len(batch))
        each_spec = _per_prompt("spec", self.spec if spec is None else spec, len(batch))
        states: list[RequestState] = []
        try:
            for prompt, one_params, one_spec in zip(batch, each_params, each_spec, strict=True):
                check_types(one_params, one_spec)
                states += [self.submit(prompt, one, one_spec) for one in each_answer(one_params)]
            own = {state.request_id for state in states}
            while any(state.finish_reason is None for state in states):
                outputs = [output for output in self.step() if output.request_id in own]
                if on_step is not None:
                    on_step(outputs)
        finally:
            for state in states:
                self.engine.abort(state.request_id)
        return collect(states, [one.n for one in each_params])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None) -> Iterator[StepOutput]:
        """Yield what each step adds to one answer; `str(piece)` is its text. Closing the iterator frees the request."""
        (one,) = as_prompts([prompt])
        if params is not None and params.n > 1:
            raise InputError("n", params.n, "a stream is one answer; open one stream per answer, or use generate")
        engine, state = self.engine, self.submit(one, params or SamplingParams(), spec or self.spec)
        inbox = self._inboxes[state.request_id] = deque()
        try:
            while inbox or state.finish_reason is None:
                if not inbox:
                    self.step()
                    continue
                output = inbox.popleft()
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            del self._inboxes[state.request_id]
            engine.abort(state.request_id)

    def step(self) -> list[StepOutput]:
        """One step of the engine; what it gave to open streams waits in their inboxes, whoever asked for the step."""
        outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)
        return outputs

    @property
    def stats(self) -> EngineStats:
        """Totals over all requests so far."""
        prefix = replace(self.target.prefix_stats) if isinstance(self.target, PrefixModel) else None
        return self.engine.stats.snapshot(self._shadow.stats if self._shadow.rate else None, prefix)

    def drain_shadow(self) -> None:
        """Score again what the shadow follows and has not scored yet; without it that happens between later steps."""
        self._shadow.drain()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` under the target's tokenizer.

        Raises:
            InputError: the folder has no tokenizer.
            MismatchError: the tokenizer writes a token that the model does not have.
        """
        tokenizer = self._text_tokenizer("prompt", text)
        ids = tokenizer.encode(text)
        beyond = next((token for token in ids if token >= self.target.vocab_size), None)
        if beyond is not None:
            token, size = tokenizer.token(beyond), self.target.vocab_size
            raise MismatchError(f"the tokenizer in {self.folder} writes token {beyond} ({token!r}), and the model's vocabulary ends at {size - 1}")
        return ids

    def close(self) -> None:
        """Drop every request and the models. The object cannot be used afterwards; closing again does nothing."""
        if not hasattr(self, "engine"):
            return
        self.engine.close()
        self._drafters.drafters.clear()
        self._closed = True
        del self.engine, self.target, self._factory, self._shadow  # all that holds weights

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> RequestState:
        """Queue one answer, for callers that run the steps themselves.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run; nothing was queued.
        """
        if self._closed:
            raise InputError("llm", str(self.folder), "was closed; open it again")
        check_types(params, spec)
        self.prepare(spec)
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return self.engine.submit(ids, params, spec)

    def prepare(self, spec: SpecConfig) -> None:
        """Load the drafters that `spec` names, each once."""
        for key, own in own_drafters(spec).items():
            if key not in self._drafters.drafters:
                self._drafters.drafters[key] = self._factory.make(own)

    def _know_costs(self, mode: str, on_profile: Callable[[str], None] | None) -> KnownCosts:
        """Let the controller begin with what steps cost, as far as that is known."""
        made = [(spec, self._drafters.drafters[key]) for key, spec in zip(arm_keys(self.spec), self.spec.arms, strict=True)]
        is_open = bool(made) and self.spec.num_draft == "auto"
        costs = know_costs(mode, self.target, str(self.folder), made, is_open, on_profile or _no_one)
        if costs.profile is not None:
            self.engine.controller.seed(costs.profile, costs.specs)
        self.engine.stats.profile_s = costs.measured_s
        return costs

    def _eos_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens, or the tokenizer's when the model's own files name none."""
        ids = self.target.eos_token_ids
        if not ids and self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            return (self.tokenizer.eos_token_id,)
        return ids

    def _text_tokenizer(self, field: str, value: object) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(field, value, f"{self.folder} has no tokenizer; give token ids instead of text")
        return self.tokenizer


def _no_one(_words: str) -> None:
    """Nobody wants to hear."""


def _per_prompt(name: str, value: object, count: int) -> list:  # type: ignore[type-arg]
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InputError(name, f"{len(value)} values", f"give one value, or one for each of the {count} prompts")
    return list(value)
