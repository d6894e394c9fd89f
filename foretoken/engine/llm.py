"""The public entry point: load a target, generate, stream, chat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from foretoken.adapt.adaptation import AdaptationState
from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.draft.group import DrafterGroup
from foretoken.engine.admission import check_types
from foretoken.engine.adviser import Adviser
from foretoken.engine.between_requests import BetweenRequests
from foretoken.engine.drafters import DrafterFactory, DrafterLoader, ModelOptions
from foretoken.engine.driver import Driver, OnStep, Owner, Turns
from foretoken.engine.engine import Engine
from foretoken.engine.observers import Trace, adapt
from foretoken.engine.prompt_encoder import PromptEncoder
from foretoken.engine.prompts import Conversation, Message, Prompt, as_conversations, as_prompt, as_prompts, per_prompt
from foretoken.engine.request import GenerateOutput, PreparedRequest, RequestState, collect, each_answer
from foretoken.engine.shadow.shadow import Shadow
from foretoken.engine.startup.known_costs import check_mode, seed_costs
from foretoken.engine.stats import EngineStats
from foretoken.engine_config import EngineConfig, EngineOptions, config_of
from foretoken.errors import ForetokenError, InputError, SpeculationWarning, StorageError, warn
from foretoken.heads.kind import with_head_kind
from foretoken.machine.modes import own_modes
from foretoken.machine.process import Uncopied
from foretoken.model.interface import CapturesSteps, LanguageModel, PrefixModel, RankedModel
from foretoken.model.names import model_folder
from foretoken.model.open import open_device
from foretoken.parallel.open import open_target
from foretoken.text.tokenizer import load_tokenizer


class LLM(BetweenRequests, Uncopied):
    """A target with its drafters, built from an `EngineConfig`, or from the same values as arguments.

    `spec` of the configuration is the default for every request. Without one, the engine uses drafters that need no
    model (`drafter="auto"`), and `self.spec` is what it chose. `on_profile` is called with a text when measuring the
    cost of steps takes longer than a second; `costs` are the costs that the controller began with.

    Several threads may use one `LLM`: they take turns, a step at a time, and their requests run together. Requests are
    prepared (tokenised, checked, grammars compiled) in the calling thread. For many callers at once, and for
    coroutines, use `AsyncEngine`; while one is open, nothing else may run requests here. A forked process cannot use
    an `LLM`.

    Raises:
        InputError: an option that cannot be honoured, or a forked process (`machine.process`); nothing was loaded.
        StorageError: the trace cannot be written.
        ModelError: the checkpoint cannot be used.
    """

    copy_remedy = "give the other process the EngineConfig, LLM.config, and open an LLM from it there"

    def __init__(
        self,
        model: EngineConfig | str | Path,
        spec: SpecConfig | None = None,
        *,
        on_profile: Callable[[str], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = self.config = config_of(model, spec, options)
        if on_profile is not None and not callable(on_profile):
            raise InputError("on_profile", on_profile, "give a function that takes a text, or leave it out")
        open_device(config.device)
        mode = check_mode(config.profile)
        self.spec = SpecConfig("auto") if config.spec is None else config.spec
        self.folder = model_folder(config.model)
        self.spec = with_head_kind(self.spec)  # a head that is not there is found before the target is loaded
        self._turns = Turns()
        self._trace = None if config.trace is None else Trace(Path(config.trace))
        self._target: LanguageModel | None = None
        try:
            with own_modes():
                self.tokenizer = load_tokenizer(self.folder, config.chat_template)
                target = self._target = open_target(self.folder, config)
                self._drafters = DrafterGroup(target)
                self._adviser = Adviser(target, self.tokenizer)
                self._encoder = PromptEncoder(self.tokenizer, self.folder, target.vocab_size)
                loaded_with = ModelOptions(config.dtype, config.device, config.cache_tokens, config.cache_dtype)
                self._loader = DrafterLoader(
                    DrafterFactory(self.folder, target, self.tokenizer, loaded_with),
                    self._drafters,
                    lambda: self._turns.lock,
                    check_open=self._check_open,
                    on_load=self._adviser.loaded,
                )
                engine = Engine(target, self._drafters, self.tokenizer, config.scheduler, routing=config.routing)
                self._driver: Driver | None = Driver(
                    engine, self._turns, str(self.folder), self._check_open, self._adviser.conclude
                )
                fresh = engine.admission.fresh_processors
                self._shadow = Shadow(target, config.shadow_rate, engine.scheduler, fresh)
                engine.watchers += [] if self._trace is None else [self._trace]
                engine.watchers += [self._shadow] if config.shadow_rate else []
                engine.watchers.append(self._adviser)
                self._adapter = adapt(engine, config)
                self._prepare_default()
                if isinstance(target, CapturesSteps):
                    # Any drafter may make trees: lookups branch, and requests choose the shape of a model's drafts.
                    target.capture_ahead(self._drafters.hidden_layers, has_trees=bool(self._drafters.drafters))
                self._adviser.look_at_memory()
                self.costs = seed_costs(engine, self.spec, mode, str(self.folder), on_profile)
                if self._adapter is not None:
                    self._adapter.take_on()
        except BaseException:
            if self._trace is not None:
                self._trace.close()
            self._drop_target()
            raise

    @property
    def engine(self) -> Engine:
        """The engine that runs the steps; an `InputError` once this was closed."""
        return self._check_open().engine

    @property
    def target(self) -> LanguageModel:
        """The target model; an `InputError` once this was closed."""
        return self.engine.target

    @property
    def has_failed(self) -> bool:
        """Whether processes that hold parts of the target are gone: no request can be answered any more."""
        return isinstance(self._target, RankedModel) and self._target.failure is not None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecConfig | Sequence[SpecConfig] | None = None,
        on_step: OnStep | None = None,
    ) -> list[GenerateOutput]:
        """Answer every prompt; prompts are texts or lists of token ids, `params` and `spec` one for all or one each.

        `on_step` is called with what each engine step emitted. An answer that failed alone carries its `error`.

        Raises:
            InputError: a prompt or parameter that cannot be honoured; nothing was run.
        """
        arrived_s = time.perf_counter()
        self._check_free()
        batch = as_prompts(prompts)
        each_params = per_prompt("params", SamplingParams() if params is None else params, len(batch))
        each_spec = per_prompt("spec", self.spec if spec is None else spec, len(batch))
        if on_step is not None and not callable(on_step):
            raise InputError("on_step", on_step, "give a function that takes a list of StepOutput, or leave it out")
        prepared: list[PreparedRequest] = []
        for prompt, one_params, one_spec in zip(batch, each_params, each_spec, strict=True):
            prepared += self.prepare_requests(prompt, one_params, one_spec, arrived_s)
        states = self._check_open().answer(prepared, on_step)
        return collect(states, [one.n for one in each_params])

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecConfig | Sequence[SpecConfig] | None = None,
        on_step: OnStep | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[GenerateOutput]:
        """The next message of a conversation, or of each of several; otherwise as `generate`.

        A message is a mapping with a `role` and, as a rule, a `content`: a text, or parts of type text.

        Raises:
            InputError: the model folder has no chat template, the template refuses the messages or takes no tools, or
                a part is no text; see `generate`.
            CheckpointError: the template is broken.
        """
        self._check_free()
        prompts = [self.encode_chat(conversation, tools, must_fit=True) for conversation in as_conversations(messages)]
        return self.generate(prompts, params, spec, on_step)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the checkpoint's chat template makes of a conversation, up to where the answer begins;
        `options` are variables of the template, such as `enable_thinking`.

        Raises:
            InputError, CheckpointError: see `chat`.
        """
        self._check_open()
        return self._encoder.render_chat(messages, tools, options)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        must_fit: bool = False,
    ) -> list[int]:
        """Token ids of `render_chat`, a prompt for `generate`; special tokens that a message spells are text.
        `must_fit`: see `encode_prompt`.

        Raises:
            InputError, CheckpointError, ContextLengthError: see `chat`.
        """
        context = self.target.max_context_tokens
        return self._encoder.encode_chat(messages, tools, options, context if must_fit else None)

    def encode_plain(self, field: str, text: str) -> list[int]:
        """Token ids of a text without special tokens, to which none is added; `field` names it in errors.

        Raises:
            InputError: not a text, or the folder has no tokenizer.
            ContextLengthError: it is many times longer than the context.
        """
        return self._encoder.encode_plain(field, text, self.target.max_context_tokens)

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode` for a text that is to be answered: one that is many times longer than the context is refused before
        all of it is encoded, with a number of tokens that it has at least.

        Raises:
            InputError, MismatchError: see `encode`.
            ContextLengthError: it leaves no room for a token of the answer.
        """
        return self._encoder.encode(text, self.target.max_context_tokens, add_special_tokens)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None
    ) -> Iterator[StepOutput]:
        """Yield what each step adds to one answer; `str(piece)` is its text. Closing the iterator frees the request.

        The request is prepared now, and queued when the first piece is asked for; then an answer that failed raises its
        error.

        Raises:
            InputError: a prompt or parameter that cannot be honoured; nothing was queued.
        """
        self._check_free()
        one = as_prompt(prompt)
        params, spec = SamplingParams() if params is None else params, self.spec if spec is None else spec
        check_types(params, spec)
        if params.n > 1:
            raise InputError("n", params.n, "a stream is one answer; open one stream per answer, or use generate")
        return self._stream(self.prepare_request(one, params, spec))

    def step(self) -> list[StepOutput]:
        """One step of the engine; what it emitted for open streams waits for their readers."""
        return self._check_open().step()

    @property
    def stats(self) -> EngineStats:
        """Totals over all requests so far."""
        engine, target = self.engine, self.target
        prefix = replace(target.prefix_stats) if isinstance(target, PrefixModel) else None
        return engine.stats.snapshot(self._shadow.stats if self._shadow.rate else None, prefix)

    @property
    def adaptations(self) -> tuple[AdaptationState, ...]:
        """The result of each drafter's learning so far; () where none learns (`EngineConfig.adapt`)."""
        return () if self._adapter is None else self._adapter.states

    @property
    def adaptation_s(self) -> float:
        """Processor time that learning has taken, in seconds."""
        return 0.0 if self._adapter is None else self._adapter.spent_s

    def end_adaptation(self) -> None:
        """Stop the learning of drafters and discard the text they learnt from; what they have learnt stays in use."""
        if self._adapter is not None:
            self._adapter.close()

    @property
    def trace_error(self) -> StorageError | None:
        """Why the trace is incomplete; None while it is complete."""
        return None if self._trace is None else self._trace.error

    def drain_shadow(self) -> None:
        """Run the outstanding shadow checks now; otherwise they run between later steps."""
        self._check_free()
        with self._turns.lock, own_modes():
            self._shadow.drain()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` under the target's tokenizer.

        Raises:
            InputError: not a text, the folder has no tokenizer, or this was closed.
            MismatchError: the tokenizer writes a token that the model does not have.
        """
        self._check_open()
        return self._encoder.encode(text)

    def close(self) -> None:
        """Drop every request and the models, for good; closing again, or in a forked process, does nothing."""
        if self._turns.is_forked:
            return
        if self._driver is not None and self._driver.owner is not None:
            self._driver.owner.close()
        with self._turns.lock:
            if self._driver is None:
                return
            self._driver.engine.close()
            self._drafters.drafters.clear()
            self._driver = self._adapter = None
            del self._shadow, self._drafters, self._loader  # all that holds weights
            self._drop_target()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> RequestState:
        """Queue one answer, for callers that run the steps themselves; see `prepare_request`."""
        driver = self._check_free()
        return driver.enqueue(self.prepare_request(as_prompt(prompt), params, spec))

    def prepare_request(
        self, prompt: Prompt, params: SamplingParams, spec: SpecConfig, arrived_s: float | None = None
    ) -> PreparedRequest:
        """Prepare one answer for the queue: load its drafters, tokenise, check, compile its grammar.

        It was asked for at `arrived_s`, on the clock of `time.perf_counter`, or else now. Runs in the thread of the
        caller and holds no lock of the engine, so running requests go on meanwhile.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run.
            ModelError, StorageError: its drafter cannot be loaded.
        """
        arrived_s = time.perf_counter() if arrived_s is None else arrived_s
        check_types(params, spec)
        spec = self._open_loader().with_head_kind(spec)
        self.prepare(spec.for_request(params.prediction))
        ids = self.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        with own_modes():
            return self.engine.admission.prepare(ids, params, spec, arrived_s)

    def prepare_requests(
        self, prompt: Prompt, params: SamplingParams, spec: SpecConfig, arrived_s: float
    ) -> list[PreparedRequest]:
        """`prepare_request` for each of the `n` answers to a prompt, which is tokenised once."""
        check_types(params, spec)
        ids = self.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return [self.prepare_request(ids, one, spec, arrived_s) for one in each_answer(params)]

    def has_drafters(self, spec: SpecConfig) -> bool:
        """Whether `prepare` has nothing to load for `spec`."""
        return self._driver is not None and self._loader.has_all(spec)

    def claim(self, owner: Owner) -> Driver:
        """Let `owner`, an `AsyncEngine`, alone run requests, as `Driver.claim` does; returns what runs them."""
        driver = self._check_open()
        driver.claim(owner)
        return driver

    # ---- how it is done

    def _stream(self, prepared: PreparedRequest) -> Iterator[StepOutput]:
        yield from self._check_open().stream(prepared)  # found when it is begun: a stream that is not holds no engine

    def _check_open(self) -> Driver:
        """What runs the engine; refuses when this was closed, and in a forked process."""
        self._turns.check_process()
        if self._driver is None:
            raise InputError("llm", str(self.folder), "was closed; open it again")
        return self._driver

    def _check_free(self) -> Driver:
        """The same for a caller who wants to run requests; refuses beside an owner."""
        driver = self._check_open()
        driver.check_user()
        return driver

    def _open_loader(self) -> DrafterLoader:
        self._check_open()
        return self._loader

    def _drop_target(self) -> None:
        """Free the target, and end the processes that hold parts of it."""
        if isinstance(self._target, RankedModel):
            self._target.end()
        self._target = None

    def _prepare_default(self) -> None:
        """Load the drafters of requests that name none; where nobody asked for them, plain decoding will do instead."""
        try:
            self.prepare(self.spec)
        except ForetokenError as error:
            if self.config.spec is not None:
                raise
            self.spec = SpecConfig()
            warn(SpeculationWarning(f"decoding plainly, since no drafter can be used: {error}"), stacklevel=3)
