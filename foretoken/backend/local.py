"""A backend whose engine runs in this process: what a worker builds and serves, and the simple twin of `remote`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.backend.call import (
    AnswerEnded,
    AnswerFailed,
    Begun,
    Call,
    Event,
    ModelInfo,
    Piece,
    State,
    TextToEncode,
    TokenEvent,
)
from foretoken.backend.rounds import RoundLog, TokenSpellings
from foretoken.core import StepOutput, TokenLogprobs
from foretoken.draft.base import ModelDrafter
from foretoken.draft.predicted import num_followed
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.llm import LLM
from foretoken.engine.request import GenerateOutput
from foretoken.engine.ticket import Ticket
from foretoken.engine_config import EngineConfig
from foretoken.errors import (
    CheckpointError,
    ContextLengthError,
    InputError,
    SpeculationWarning,
    StorageError,
    UnsupportedModelError,
    warn,
)
from foretoken.model.advised import advised_sampling
from foretoken.model.interface import LanguageModel
from foretoken.text.chat_template import takes_tools
from foretoken.text.tokenizer import Tokenizer

# ---- what a model's files say about tools and about filling in the middle

# A role compared with a text, or with a list of texts: message['role'] == 'user', message.role in ["tool", "ipython"].
_COMPARED_ROLE = re.compile(r"""\brole['"\])\s]*(?:==|!=|(?:not\s+)?in\b)\s*([\[(][^\])]*[\])]|'[^']*'|"[^"]*")""")
_QUOTED = re.compile(r"""['"]([\w-]{1,64})['"]""")
_FIM_TOKENS = (  # before the prefix, before the suffix, before the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def tool_style(chat_template: str | None) -> str | None:
    """How a chat template lets the model write calls, see `foretoken.server.api.tool_reader`; None without tools."""
    if chat_template is None or not takes_tools(chat_template):
        return None
    if "<tool_call>" in chat_template:
        return "tags"
    return "json_parameters" if '"parameters":' in chat_template.replace("\\", "") else "json_arguments"


def template_roles(chat_template: str | None) -> tuple[str, ...]:
    """The roles of messages that a chat template names, each once."""
    compared = _COMPARED_ROLE.findall(chat_template or "")
    return tuple(dict.fromkeys(role for texts in compared for role in _QUOTED.findall(texts)))


def fim_tokens(vocabulary: Mapping[str, int], opening_ids: Sequence[int]) -> tuple[tuple[int, ...], int, int] | None:
    """Tokens before the prefix (`opening_ids` with them, which begin every text), before the suffix and before the
    middle, for models trained to fill in the middle; None for others.
    """
    for marks in _FIM_TOKENS:
        if all(mark in vocabulary for mark in marks):
            before_prefix, before_suffix, before_middle = (vocabulary[mark] for mark in marks)
            return (*opening_ids, before_prefix), before_suffix, before_middle
    return None


def gauges(llm: LLM) -> dict[str, Any]:
    """`kv_cache_usage` and `draft_kv_cache_usage` (0 to 1, the fullest draft), `invariants`, and where drafters learn
    `adaptation`.

    `invariants` holds `num_running` and `num_waiting` requests and, for each of the `pools` (the target's and one for
    every draft model), its tokens: `free` (what the prefix cache keeps and gives away when needed included), `used`
    and `total`. Read between or during steps of the engine: numbers of one moment, whole only while it is idle.
    """
    engine = llm.engine
    target = pool_of(engine.target)
    drafts = {
        f"{drafter.name} {number}": pool_of(model)
        for drafter in llm.loaded_drafters()
        if isinstance(drafter, ModelDrafter)
        for number, model in enumerate(drafter.models())
        if model is not engine.target
    }
    return {
        "kv_cache_usage": _share(target),
        "draft_kv_cache_usage": max(map(_share, drafts.values()), default=0.0),
        "invariants": {
            "num_running": len(engine.scheduler.running),
            "num_waiting": len(engine.scheduler.waiting),
            "pools": {"target": target, **drafts},
        },
    } | _adaptation(llm)


def _adaptation(llm: LLM) -> dict[str, Any]:
    """What learning did so far, over all drafters and as counts, so that workers add up."""
    states = llm.adaptations
    if not states:
        return {}
    names = ("num_swaps", "num_returns", "num_judged", "num_learnt_tokens")
    counts = {name: sum(getattr(state, name) for state in states) for name in names}
    return {"adaptation": {"num_drafters": len(states), **counts, "spent_s": llm.adaptation_s}}


def pool_of(model: LanguageModel) -> dict[str, int]:
    """The tokens of a model's cache."""
    total, free = model.capacity_tokens, model.num_free_tokens()
    return {"free": free, "used": total - free, "total": total}


def _share(pool: dict[str, int]) -> float:
    return pool["used"] / pool["total"] if pool["total"] else 0.0


_log = logging.getLogger("foretoken.worker")

# Faults of a draft that is missing or broken. One that does not fit its target (MismatchError) always ends the start.
_BROKEN_DRAFT = (CheckpointError, StorageError, UnsupportedModelError)


class LocalBackend:
    """`Backend` over an `AsyncEngine`, which stays the caller's to close. `missing_draft`: see `ModelInfo`."""

    state: State = "ready"  # an engine that was built is

    def __init__(self, engine: AsyncEngine, name: str, missing_draft: str | None = None) -> None:
        self.engine = engine
        self._texts = TokenSpellings(engine.llm.tokenizer)
        self._rounds = RoundLog(engine.llm.engine.watchers, self._texts)
        self.info: ModelInfo = _info(engine, name, missing_draft)

    async def open(self, call: Call) -> LocalGeneration:
        """See `Backend.open`."""
        arrived_s = time.perf_counter()
        params = call.params
        prompt_ids, prediction = await self.engine.in_thread(
            lambda: (self._encode_all(call), self._predicted(call)), params.tenant
        )
        if params.prediction is not None and prediction:
            params = replace(params, prediction=prediction)
        with self._rounds.opening() if call.trace else contextlib.nullcontext() as opened:
            tickets = await self.engine.submit_all(prompt_ids, params, call.spec, arrived_s)
            if opened is not None:
                opened(tickets)
        followed = _Followed.of(call, prediction)
        return LocalGeneration(tickets, prompt_ids, self._texts, followed, self._rounds if call.trace else None)

    async def tokenize(self, text: TextToEncode) -> list[int]:
        """See `Backend.tokenize`."""
        llm = self.engine.llm

        def encode() -> list[int]:
            if text.messages is not None:
                return llm.encode_chat(text.messages, text.tools, text.template_options, must_fit=text.must_fit)
            if text.must_fit:
                return llm.encode_prompt(text.prompt or "", text.add_special_tokens)
            tokenizer = self._tokenizer("prompt", text.prompt)
            return tokenizer.encode(text.prompt or "", text.add_special_tokens)

        return await self.engine.in_thread(encode, text.tenant)

    async def spell(self, token_ids: Sequence[int]) -> list[str | None]:
        """See `Backend.spell`."""
        tokenizer = self._tokenizer("tokens", list(token_ids))
        return await self.engine.in_thread(lambda: [tokenizer.token(token_id) for token_id in token_ids])

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        """See `Backend.detokenize`."""
        tokenizer = self._tokenizer("tokens", list(token_ids))
        for token_id in token_ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise InputError("tokens", token_id, f"must lie in [0, {self.info.vocab_size})")
        return await self.engine.in_thread(lambda: tokenizer.decode(token_ids, has_specials))

    async def stats(self) -> dict[str, Any]:
        """See `Backend.stats`."""
        return self.engine.llm.stats.as_dict() | gauges(self.engine.llm)

    def _tokenizer(self, field: str, value: object) -> Tokenizer:
        tokenizer = self.engine.llm.tokenizer
        if tokenizer is None:
            raise InputError(field, value, "the model has no tokenizer; give token ids")
        return tokenizer

    def _encode_all(self, call: Call) -> list[list[int]]:
        llm = self.engine.llm
        if call.messages is not None:
            return [llm.encode_chat(call.messages, call.tools, call.template_options, must_fit=True)]
        return [llm.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt) for prompt in call.prompts]

    def _predicted(self, call: Call) -> tuple[int, ...]:
        if not call.prediction:
            return ()
        remedy = f"must have at most {self.info.max_model_len} tokens"
        try:
            ids = self.engine.llm.encode_plain("prediction", call.prediction)
        except ContextLengthError as error:
            raise InputError("prediction", error.value, remedy) from None
        if len(ids) > self.info.max_model_len:
            raise InputError("prediction", len(ids), remedy)
        return tuple(ids)


@dataclass(frozen=True)
class _Followed:
    """How far answers followed the tokens of a prediction; `is_drafted`: whether they were drafted at all."""

    tokens: tuple[int, ...]
    is_drafted: bool

    @classmethod
    def of(cls, call: Call, tokens: tuple[int, ...]) -> _Followed | None:
        return None if call.prediction is None else cls(tokens, call.params.prediction is not None)

    def count(self, answer: Sequence[int]) -> tuple[int, int]:
        num_kept = num_followed(self.tokens, answer) if self.is_drafted else 0
        return num_kept, len(self.tokens) - num_kept


class LocalGeneration:
    """A call whose answers run in this process, one ticket each, prompt by prompt."""

    def __init__(
        self,
        tickets: Sequence[Ticket],
        prompt_ids: Sequence[Sequence[int]],
        texts: TokenSpellings,
        followed: _Followed | None = None,
        rounds: RoundLog | None = None,
    ) -> None:
        self._tickets, self._prompt_ids, self._texts = tickets, prompt_ids, texts
        self._followed, self._rounds = followed, rounds

    async def __aiter__(self) -> AsyncGenerator[Event]:
        try:
            yield Begun(tuple(tuple(ids) for ids in self._prompt_ids))
            alone = len(self._tickets) == 1
            async with contextlib.aclosing(self._events(0) if alone else self._merged()) as events:
                async for event in events:
                    yield event
        finally:
            if self._rounds is not None:
                self._rounds.closed(self._tickets)

    async def cancel(self) -> None:
        """See `Generation.cancel`."""
        for ticket in self._tickets:
            ticket.cancel()

    async def _merged(self) -> AsyncGenerator[Event]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for event in self._events(index):
                    queue.put_nowait(event)
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._tickets))]
        try:
            num_open = len(tasks)
            while num_open:
                event = await queue.get()
                if event is None:
                    num_open -= 1
                else:
                    yield event
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(self, index: int) -> AsyncGenerator[Event]:
        ticket = self._tickets[index]
        try:
            async for output in ticket:
                if output.token_ids or output.text:
                    round_ = None if self._rounds is None else self._rounds.take(output)
                    yield Piece(index, output.text, self._tokens(output), round_)
            answer = await ticket.wait()
        except Exception as error:  # noqa: BLE001 - the error of this answer; the others go on
            yield _failure(index, error)
            return
        if answer.error is not None:
            yield _failure(index, answer.error)
        else:
            yield AnswerEnded(
                index,
                answer.finish_reason,
                answer.text,
                len(answer.token_ids),
                answer.stats.as_dict(),
                self._prompt_tokens(answer),
                None if self._followed is None else self._followed.count(answer.token_ids),
            )

    def _tokens(self, output: StepOutput) -> tuple[TokenEvent, ...]:
        logprobs: Sequence[TokenLogprobs | None] = output.logprobs or (None,) * len(output.token_ids)
        return tuple(
            self._texts.event(token_id, scored, origin.kind, origin.drafter, origin.step, origin.probability)
            for token_id, origin, scored in zip(output.token_ids, output.provenance, logprobs, strict=True)
        )

    def _prompt_tokens(self, answer: GenerateOutput) -> tuple[TokenEvent, ...]:
        if answer.prompt_logprobs is None:
            return ()
        scored = zip(answer.prompt_ids, answer.prompt_logprobs, strict=True)
        return tuple(self._texts.event(token_id, one, "prompt") for token_id, one in scored)


def _failure(index: int, error: Exception) -> AnswerFailed:
    if isinstance(error, InputError):
        return AnswerFailed(index, type(error).__name__, error.remedy, error.field)
    return AnswerFailed(index, type(error).__name__, str(error))


def _info(engine: AsyncEngine, name: str, missing_draft: str | None) -> ModelInfo:
    llm, target = engine.llm, engine.llm.target
    tokenizer = llm.tokenizer

    def spelt(token_id: int | None) -> str | None:
        return None if tokenizer is None or token_id is None else tokenizer.token(token_id)

    return ModelInfo(
        name=name,
        max_model_len=target.max_context_tokens,
        vocab_size=target.vocab_size,
        eos_token_ids=tuple(target.eos_token_ids),
        eos_token=None if tokenizer is None else spelt(tokenizer.eos_token_id),
        bos_token=None if tokenizer is None else spelt(tokenizer.bos_token_id),
        pad_token=None,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        default_spec=llm.spec,
        max_waiting=engine.max_waiting,
        max_batch_size=llm.engine.scheduler.config.max_batch_size,
        tool_style=None if tokenizer is None else tool_style(tokenizer.tool_template),
        template_roles=() if tokenizer is None else template_roles(tokenizer.chat_template),
        fim_tokens=None if tokenizer is None else fim_tokens(tokenizer.vocabulary, tokenizer.opening_ids),
        missing_draft=missing_draft,
        advised_sampling=advised_sampling(llm.config.model),
    )


def build_engine(config: EngineConfig, max_waiting: int, draft_required: bool) -> tuple[AsyncEngine, str | None]:
    """An engine that is ready for requests, and the draft that it runs without: one that cannot be loaded is done
    without, with a warning, unless it is required.

    Raises:
        ForetokenError: the engine cannot be built.
    """
    missing = None
    try:
        llm = LLM(config, on_profile=_say)
    except _BROKEN_DRAFT as error:
        if draft_required or config.spec is None or config.spec.draft is None:
            raise
        llm = LLM(replace(config, spec=None), on_profile=_say)  # raises the same where the target is at fault
        missing = str(config.spec.draft)
        words = f"serving without the draft {missing}: {error}; --draft-required makes an error of this"
        warn(SpeculationWarning(words), stacklevel=1)
    llm.engine.admission.warm()
    return AsyncEngine(llm, max_waiting), missing


def _say(text: str) -> None:
    _log.info("%s", text)
