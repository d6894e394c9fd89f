"""The public front: load a target, generate, stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.core import StepOutput
from foretoken.draft.group import DrafterGroup, arm_keys, own_drafters
from foretoken.engine.admission import (
    Prompt,
    as_prompt,
    as_prompts,
    check_limits,
    check_model_options,
    check_routing,
    check_share,
    check_spec,
    check_types,
)
from foretoken.engine.drafters import DrafterFactory, ModelOptions, limit_of
from foretoken.engine.engine import Engine
from foretoken.engine.output import GenerateOutput, collect, each_answer
from foretoken.engine.request import RequestState
from foretoken.engine.shadow.shadow import Shadow
from foretoken.engine.startup.known_costs import KnownCosts, check_mode, know_costs
from foretoken.engine.stats import EngineStats
from foretoken.engine.trace import Trace
from foretoken.engine.turns import Turns
from foretoken.errors import InputError, MismatchError, StorageError
from foretoken.model.interface import LanguageModel, PrefixModel
from foretoken.model.open import model_folder, open_model
from foretoken.model.tokenizer import Tokenizer, load_tokenizer
from foretoken.params import check_text


class Owner(Protocol):
    """Who runs an `LLM`'s steps while it is open."""

    def close(self) -> None:
        """Give the `LLM` back."""


class LLM:
    """A target with its drafters.

    `model` is a folder, a hub id, or `reference:target`. `spec` is the default for every request; `generate` and
    `stream` take another one per call or per prompt. A draft model is loaded when it is first named.

    `max_batch_size`, `max_prompt_tokens`, `max_step_tokens` and `cache_reserve` are the scheduler's, see
    `control.queue.SchedulerConfig`.

    `numerics="strict"` makes the target's logits bitwise the same however rows are batched, at a price. `trace` names a
    file that gets one line per event (docs/trace.md); when it cannot be written any more, `trace_error` says so and
    answers go on. `shadow_rate` is the share of requests whose answers the target alone scores again in the background;
    `stats.shadow` tells what it found, and a warning is raised when answers do not follow the target's law. `routing`
    says for which requests not to speculate at all (docs/controller.md).

    `profile` says where it is known from what steps cost, which decides how much is guessed where that is left open:
    "auto" (kept from an earlier start, or measured now, see docs/controller.md), "off" (learnt from the first steps),
    "measure" (now, again), or a file of `foretoken bench --profile`. `on_profile` hears about measuring that takes
    longer than a second; `costs` tells what came of it.

    Several threads may use one `LLM`: they take turns, a step at a time, and their requests run together. Many callers
    at once, and coroutines, are what `AsyncEngine` is for; while one is open, nothing else may run requests here.

    Raises:
        InputError: an option that cannot be honoured; nothing was loaded.
        StorageError: the trace cannot be written.
        ModelError: the checkpoint cannot be used.
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
        check_model_options(model, dtype, device, numerics, trace, on_profile)
        check_routing(routing, spec)
        check_share("shadow_rate", shadow_rate)
        check_share("cache_reserve", cache_reserve)
        check_limits(
            max_batch_size=max_batch_size,
            max_prompt_tokens=max_prompt_tokens,
            cache_tokens=cache_tokens,
            max_step_tokens=max_step_tokens,
        )
        mode = check_mode(profile)
        limits = SchedulerConfig(
            max_batch_size, max_prompt_tokens, max_step_tokens=max_step_tokens, cache_reserve=cache_reserve
        )
        self.spec = SpecConfig() if spec is None else spec
        self.folder = model_folder(str(model))
        self._turns, self._loading = Turns(), threading.Lock()
        self._owner: Owner | None = None
        self._inboxes: dict[int, deque[StepOutput]] = {}  # of streams and of `generate` with `on_step`
        self._trace = None if trace is None else Trace(Path(trace))
        try:
            self.tokenizer = load_tokenizer(self.folder)
            target: LanguageModel = open_model(self.folder, dtype, device, cache_tokens, numerics)
            self._target: LanguageModel | None = target
            self._drafters = DrafterGroup(target)
            self._factory = DrafterFactory(
                self.folder, target, self.tokenizer, ModelOptions(dtype, device, cache_tokens)
            )
            engine = Engine(target, self._drafters, self.tokenizer, limits, self._eos_token_ids(), routing)
            self._engine: Engine | None = engine
            self._shadow = Shadow(target, shadow_rate, room=engine.scheduler, fresh_processors=engine.intake.processors)
            engine.watchers += ([] if self._trace is None else [self._trace]) + ([self._shadow] if shadow_rate else [])
            self.prepare(self.spec)
            self.costs = self._know_costs(mode, on_profile)
        except BaseException:
            if self._trace is not None:
                self._trace.close()
            raise

    @property
    def engine(self) -> Engine:
        """What runs the steps.

        Raises:
            InputError: this was closed.
        """
        if self._engine is None:
            raise self._was_closed()
        return self._engine

    @property
    def target(self) -> LanguageModel:
        """The model whose answers these are.

        Raises:
            InputError: this was closed.
        """
        if self._target is None:
            raise self._was_closed()
        return self._target

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
        self._check_free()
        batch = as_prompts(prompts)
        each_params = _per_prompt("params", SamplingParams() if params is None else params, len(batch))
        each_spec = _per_prompt("spec", self.spec if spec is None else spec, len(batch))
        if on_step is not None and not callable(on_step):
            raise InputError("on_step", on_step, "give a function that takes a list of StepOutput, or leave it out")
        engine, states, inbox = self.engine, list[RequestState](), deque[StepOutput]()
        with self._turns:
            try:
                self._submit_all(batch, each_params, each_spec, states, inbox if on_step is not None else None)
                while not self._advance(states):
                    if on_step is not None:
                        on_step(_taken(inbox))
                    self._turns.pause()
                if on_step is not None and inbox:
                    on_step(_taken(inbox))
            finally:
                with self._turns.lock:
                    for state in states:
                        self._inboxes.pop(state.request_id, None)
                        engine.abort(state.request_id)
        return collect(states, [one.n for one in each_params])

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None
    ) -> Iterator[StepOutput]:
        """Yield what each step adds to one answer; `str(piece)` is its text. Closing the iterator frees the request.

        The request is queued when the first piece is asked for; then an answer that failed raises its error.

        Raises:
            InputError: a prompt or parameter that cannot be honoured.
        """
        self._check_free()
        one = as_prompt(prompt)
        params, spec = SamplingParams() if params is None else params, self.spec if spec is None else spec
        check_types(params, spec)
        if params.n > 1:
            raise InputError("n", params.n, "a stream is one answer; open one stream per answer, or use generate")
        return self._stream(one, params, spec)

    def step(self) -> list[StepOutput]:
        """One step of the engine; what it gave to open streams waits in their inboxes, whoever asked for the step."""
        self._check_free()
        with self._turns:
            with self._turns.lock:
                outputs = self._step()
            self._turns.pause()
        return outputs

    @property
    def stats(self) -> EngineStats:
        """Totals over all requests so far."""
        engine, target = self.engine, self.target
        prefix = replace(target.prefix_stats) if isinstance(target, PrefixModel) else None
        return engine.stats.snapshot(self._shadow.stats if self._shadow.rate else None, prefix)

    @property
    def trace_error(self) -> StorageError | None:
        """Why the trace ends before the answers do; None while it is whole."""
        return None if self._trace is None else self._trace.error

    def drain_shadow(self) -> None:
        """Score again what the shadow follows and has not scored yet; without it that happens between later steps."""
        self._check_free()
        with self._turns.lock:
            self._shadow.drain()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` under the target's tokenizer.

        Raises:
            InputError: not a text, the folder has no tokenizer, or this was closed.
            MismatchError: the tokenizer writes a token that the model does not have.
        """
        self._check_open()
        if not isinstance(text, str):
            raise InputError("text", text, "must be a text")
        check_text("prompt", text)
        tokenizer = self._text_tokenizer("prompt", text)
        ids = tokenizer.encode(text)
        beyond = next((token for token in ids if token >= self.target.vocab_size), None)
        if beyond is not None:
            token, size = tokenizer.token(beyond), self.target.vocab_size
            raise MismatchError(
                f"the tokenizer in {self.folder} writes token {beyond} ({token!r}), and the model's "
                f"vocabulary ends at {size - 1}"
            )
        return ids

    def close(self) -> None:
        """Drop every request and the models. The object cannot be used afterwards; closing again does nothing."""
        if self._owner is not None:
            self._owner.close()
        with self._turns.lock:
            if self._engine is None:
                return
            self._engine.close()
            self._drafters.drafters.clear()
            self._engine = self._target = None
            del self._factory, self._shadow  # all that holds weights

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> RequestState:
        """Queue one answer, for callers that run the steps themselves.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run; nothing was queued.
        """
        self._check_free()
        one = as_prompt(prompt)
        check_types(params, spec)
        with self._turns:
            return self._submit(one, params, spec)

    def prepare(self, spec: SpecConfig) -> None:
        """Load the drafters that `spec` names, each once; requests go on meanwhile.

        Raises:
            InputError, ModelError, StorageError: see `DrafterFactory.make`.
        """
        self._check_open()
        check_spec(spec)
        wanted = own_drafters(spec)
        if all(key in self._drafters.drafters for key in wanted):
            return
        with self._turns.lock:
            self._check_open()
            factory = self._factory  # gone when this is closed
        with self._loading:
            for key, own in wanted.items():
                if key not in self._drafters.drafters:
                    made = factory.make(own)
                    with self._turns.lock:  # between two steps, which go through all drafters
                        self._check_open()
                        self._drafters.add(key, made, limit_of(own))

    # ---- what `AsyncEngine` uses

    def claim(self, owner: Owner) -> Engine:
        """Let `owner` alone run requests, until `disclaim`.

        Raises:
            InputError: this was closed, has an owner, or still answers requests.
        """
        with self._turns.lock:
            engine = self.engine
            if self._owner is not None:
                raise InputError(
                    "llm", str(self.folder), "is served by another AsyncEngine: submit to that one, or close it first"
                )
            if engine.has_work:
                raise InputError(
                    "llm",
                    str(self.folder),
                    "still answers requests: let them end, or close their streams, then open an AsyncEngine",
                )
            self._owner = owner
            return engine

    def disclaim(self) -> None:
        """The owner is done."""
        self._owner = None

    def submit_for(self, owner: Owner, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> RequestState:
        """`submit`, for the owner."""
        assert owner is self._owner
        return self._submit(prompt, params, spec)

    def step_for(self, owner: Owner) -> list[StepOutput]:
        """`step`, for the owner."""
        assert owner is self._owner
        with self._turns.lock:
            return self._step()

    # ---- how it is done

    def _submit(self, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> RequestState:
        self.prepare(spec)
        return self._queue(prompt, params, spec)

    def _queue(self, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> RequestState:
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        with self._turns.lock:
            return self.engine.submit(ids, params, spec)

    def _submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        specs: Sequence[SpecConfig],
        states: list[RequestState],
        inbox: deque[StepOutput] | None,
    ) -> None:
        """Queue every answer to every prompt, appending to `states`; all of them, or none."""
        for one_params, one_spec in zip(params, specs, strict=True):
            check_types(one_params, one_spec)
            self.prepare(one_spec)
        with self._turns.lock:
            known = set(self.engine.states)
            try:
                for prompt, one_params, one_spec in zip(prompts, params, specs, strict=True):
                    for one in each_answer(one_params):
                        states.append(self._queue(prompt, one, one_spec))
                        if inbox is not None:
                            self._inboxes[states[-1].request_id] = inbox
            except BaseException:
                for request_id in set(self.engine.states) - known:
                    self.engine.abort(request_id)
                raise

    def _stream(self, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> Iterator[StepOutput]:
        inbox, states = deque[StepOutput](), list[RequestState]()
        engine = self.engine
        try:
            self._submit_all([prompt], [params], [spec], states, inbox)
            while True:
                with self._turns:
                    is_over = not inbox and self._advance(states)
                    self._turns.pause()
                for output in _taken(inbox):
                    is_over = False
                    if output.error is not None:
                        raise output.error
                    yield output
                if is_over:
                    break
            if states[0].finish_reason == "abort":
                self._check_open()  # closed half-way: what came is not the whole answer
        finally:
            with self._turns.lock:
                for state in states:
                    self._inboxes.pop(state.request_id, None)
                    engine.abort(state.request_id)

    def _advance(self, states: Sequence[RequestState]) -> bool:
        """Run a step, if one of `states` still needs it; whether none did."""
        with self._turns.lock:
            if all(state.finish_reason is not None for state in states):
                return True
            self._step()
            return False

    def _step(self) -> list[StepOutput]:
        engine = self.engine
        try:
            outputs = engine.step()
        except BaseException:
            self._deliver(engine.take_outputs())
            raise
        self._deliver(outputs)
        return outputs

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    def _check_open(self) -> None:
        if self._engine is None:
            raise self._was_closed()

    def _check_free(self) -> None:
        """Refuse to run requests beside an owner's."""
        self._check_open()
        if self._owner is not None:
            raise InputError("llm", str(self.folder), "is served by an AsyncEngine: submit to that, or close it first")

    def _was_closed(self) -> InputError:
        return InputError("llm", str(self.folder), "was closed; open it again")

    def _know_costs(self, mode: str, on_profile: Callable[[str], None] | None) -> KnownCosts:
        """Let the controller begin with what steps cost, as far as that is known."""
        made = [
            (spec, self._drafters.drafters[key]) for key, spec in zip(arm_keys(self.spec), self.spec.arms, strict=True)
        ]
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


def _taken(inbox: deque[StepOutput]) -> list[StepOutput]:
    """What waits in an inbox, which is empty then."""
    return [inbox.popleft() for _ in range(len(inbox))]


def _per_prompt(name: str, value: object, count: int) -> list:  # type: ignore[type-arg]
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InputError(name, f"{len(value)} values", f"give one value, or one for each of the {count} prompts")
    return list(value)
