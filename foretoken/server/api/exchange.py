"""One HTTP request that generates: from opening its call to its record, and what came of each of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from foretoken.backend.call import (
    AnswerEnded,
    AnswerFailed,
    Backend,
    Begun,
    Call,
    Event,
    Generation,
    ModelInfo,
    Piece,
    RoundEvent,
    TokenEvent,
)
from foretoken.errors import ContextLengthError, ForetokenError, UnavailableError
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import (
    CLIENT_GONE,
    ApiError,
    ErrorCode,
    final,
    later,
    of_exception,
    of_failure,
    of_length,
    unavailable,
)
from foretoken.server.record import RECORDED_KEY, RequestObserver, RequestRecord, caller_of, request_id_of

_log = logging.getLogger("foretoken.server")
_Result = TypeVar("_Result")

# HTTP code, reason in the record and metrics, text; for requests that were left before their end.
_LEFT: dict[str, tuple[int, ErrorCode, str]] = {
    "client": (CLIENT_GONE, "client_gone", "the client closed the connection"),
    "slow_consumer": (CLIENT_GONE, "slow_consumer", "the client read more slowly than its answer was written"),
    "queue_deadline": (504, "queue_deadline", "no token came within the server's limit for queue and prompt"),
    "generation_deadline": (504, "generation_deadline", "the answer took longer than the server's limit"),
}


class TokenBudget:
    """Counts the tokens that open requests may still write."""

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self, num_tokens: int, config: ApiConfig) -> None:
        """Reserve for a whole request.

        Raises:
            ApiError: 429, not enough is free now.
        """
        max_tokens = config.max_pending_tokens
        if max_tokens is not None and self.num_taken + num_tokens > max_tokens:
            message = f"open requests may write {max_tokens} tokens together, and {self.num_taken} are taken"
            raise later(429, "token_budget_full", message, config.retry_after_s)
        self.num_taken += num_tokens

    def give_back(self, num_tokens: int) -> None:
        """Free what a request had reserved."""
        self.num_taken -= num_tokens
        assert self.num_taken >= 0


@dataclass(frozen=True)
class Api:
    """What all routes share."""

    backend: Backend
    config: ApiConfig
    observers: Sequence[RequestObserver]
    budget: TokenBudget = field(default_factory=TokenBudget)

    def ready_info(self) -> ModelInfo:
        """The served model.

        Raises:
            ApiError: 503 while no requests are taken.
        """
        state, info = self.backend.state, self.backend.info
        if state != "ready" or info is None:
            raise unavailable(state, self.config.retry_after_s)
        return info

    def tell(self, record: RequestRecord) -> None:
        """Give a record to all observers; what one raises is logged."""
        for observer in self.observers:
            try:
                observer.finished(record)
            except Exception:  # noqa: BLE001 - an observer must not cost a client its answer
                _log.exception("an observer of requests failed")


class Exchange:
    """Runs one call, notes what came, leaves it when nobody wants it any more, and writes its record once."""

    def __init__(self, api: Api, scope: MutableMapping[str, Any], call: Call, info: ModelInfo, is_stream: bool) -> None:
        self.api, self.call, self.info, self.is_stream = api, call, info, is_stream
        self.request_id, self.path = request_id_of(scope), str(scope["path"])
        self.prompt_ids: tuple[tuple[int, ...], ...] = ()
        self.began_unix_s = time.time()
        self._began_s = time.perf_counter()
        self.num_answers = max(1, len(call.prompts)) * call.params.n
        self.book = AnswerBook(self.num_answers, self._began_s)
        self.left = ""  # why the call was left before its end
        self._scope = scope
        self._generation: Generation | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_reserved = 0
        self._is_finished = False

    async def open(self) -> None:
        """Have the backend queue the call.

        Raises:
            ApiError: it is refused, or was not queued in time.
        """
        config, loop = self.api.config, asyncio.get_running_loop()
        num_tokens = self.num_answers * self.call.params.max_tokens
        self.api.budget.take(num_tokens, config)
        self._num_reserved = num_tokens
        deadline = loop.time() + config.first_token_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                self._generation = await self.api.backend.open(self.call)
        except TimeoutError:
            raise self._leave_error("queue_deadline") from None
        except ForetokenError as error:
            raise self._refusal(error) from error
        self._timers = [
            loop.call_at(deadline, self._expire, "queue_deadline"),
            loop.call_later(config.request_timeout_s, self._expire, "generation_deadline"),
        ]

    async def events(self) -> AsyncGenerator[Event]:
        """The events of the call; every way out of the iteration frees what the call holds.

        Raises:
            ApiError: an answer failed, a deadline passed, or the engine died.
        """
        assert self._generation is not None
        num_open, iterator = self.num_answers, aiter(self._generation)
        try:
            async for event in iterator:
                self.book.note(event)
                if isinstance(event, Begun):
                    self._begin(event)
                elif isinstance(event, AnswerFailed):
                    _log.warning("request %s failed: %s: %s", self.request_id, event.error, event.message)
                    raise of_failure(event)
                elif isinstance(event, AnswerEnded):
                    if event.finish_reason == "abort":
                        raise self._leave_error(self.left)
                    num_open -= 1
                elif len(self._timers) == 2 and self.book.ttft_s is not None:
                    self._timers.pop(0).cancel()
                yield event
        except ForetokenError as error:
            raise self._refusal(error) from error
        finally:
            if num_open:
                await self._cancel()
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; 0 before the call was begun."""
        return sum(map(len, self.prompt_ids))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the cache, of the first answer to each prompt."""
        n = self.call.params.n
        found = {end.index // n: int(end.stats["num_cached_tokens"]) for end in self.book.ended if end.index % n == 0}
        return sum(min(found.get(place, 0), len(ids)) for place, ids in enumerate(self.prompt_ids))

    def stop_string(self, event: AnswerEnded) -> str | None:
        """The stop string that ended an answer: its last token completed it. None where something else ended it."""
        reason = self.stop_reason(event)
        return reason if isinstance(reason, str) else None

    def stop_reason(self, event: AnswerEnded) -> str | int | None:
        """What the request named and the answer ended with: a stop string or a token. None where something else ended
        it.
        """
        params, tokens = self.call.params, self.book.answers[event.index].tokens
        ends = self.info.eos_token_ids
        if event.finish_reason != "stop" or not tokens:
            return None
        last = tokens[-1].token_id
        if last in ends and not params.ignore_eos:
            return None
        if last in params.stop_token_ids:
            return last
        written = [token for token in tokens if not params.skip_special_tokens or token.token_id not in ends]
        return completed_stop(written, params.stop_strings) if written else None

    def leave(self, reason: str) -> None:
        """Let the call go, for the first reason given: its events end with an error."""
        if not self.left and not self._is_finished:
            self.left = reason
            task = asyncio.create_task(self._cancel())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def unless_gone(self, receive: Any, work: Coroutine[Any, Any, _Result]) -> _Result:  # noqa: ANN401 - ASGI's
        """The result of `work`, which is cancelled when the client hangs up first: an `ApiError`."""
        task, gone = asyncio.create_task(work), asyncio.create_task(hung_up(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.left = self.left or "client"
                raise self._leave_error("client")
            return task.result()
        finally:
            await stop(task, gone)

    def finish(self, status: int, reason: str = "") -> None:
        """The request has ended: give back its share of the budget and report it. Only the first call counts."""
        if self._is_finished:
            return
        self._is_finished = True
        for timer in self._timers:
            timer.cancel()
        self.api.budget.give_back(self._num_reserved)
        self._scope[RECORDED_KEY] = True
        self.api.tell(self._record(status, reason))

    async def closed(self) -> None:
        """Wait until everything that was left is free."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cancel(self) -> None:
        if self._generation is not None:
            await asyncio.shield(self._generation.cancel())

    def _expire(self, reason: str) -> None:
        if reason != "queue_deadline" or self.book.ttft_s is None:
            self.leave(reason)

    def _begin(self, event: Begun) -> None:
        """The prompts are known: whether the list of their log-probabilities would be too long."""
        self.prompt_ids = event.prompt_ids
        count = self.call.params.prompt_logprobs
        if count is not None and self.num_prompt_tokens * (count + 1) > self.api.config.max_prompt_logprobs:
            param = "logprobs" if count == self.call.params.logprobs else "prompt_logprobs"
            message = f"{param}: prompt tokens times alternatives must be at most {self.api.config.max_prompt_logprobs}"
            raise ApiError(400, "too_many_tokens", message, param)

    def _refusal(self, error: ForetokenError) -> ApiError:
        if isinstance(error, UnavailableError) and self.api.backend.state != "ready":
            return unavailable(self.api.backend.state, self.api.config.retry_after_s)
        if isinstance(error, ContextLengthError):
            param = "prompt" if self.call.messages is None else "messages"
            return of_length(error, self.info.max_model_len, self.call.params.max_tokens, param)
        return of_exception(error, self.api.config.retry_after_s)

    def _leave_error(self, reason: str) -> ApiError:
        if reason not in _LEFT:
            return later(503, "draining", "the engine was stopped", self.api.config.retry_after_s)
        self.left = self.left or reason
        return final(*_LEFT[reason])

    def _record(self, status: int, reason: str) -> RequestRecord:
        book, params = self.book, self.call.params
        ends, caller = book.ended, caller_of(self._scope)
        used = [end.prediction for end in ends if end.prediction is not None]
        spec = self.call.spec
        return RequestRecord(
            request_id=self.request_id,
            route=self.path,
            model=self.info.name,
            began_unix_s=self.began_unix_s,
            duration_s=time.perf_counter() - self._began_s,
            status=status,
            reason=reason,
            is_stream=self.is_stream,
            finish_reasons=tuple(end.finish_reason for end in ends),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_completion_tokens=book.num_tokens,
            ttft_s=book.ttft_s,
            inter_token_s=tuple(book.inter_token_s),
            key=caller.key,
            tenant=caller.tenant,
            slice=params.slice,
            drafter="" if spec is None else spec.drafter or "",
            stats=tuple(end.stats for end in ends),
            accepted_prediction_tokens=sum(pair[0] for pair in used) if used else None,
            rejected_prediction_tokens=sum(pair[1] for pair in used) if used else None,
            attributes=_attributes(self.call),
        )


def _attributes(call: Call) -> dict[str, Any]:
    """The request's parameters under OpenTelemetry's names; never a text."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
    return {
        "gen_ai.operation.name": "text_completion" if call.messages is None else "chat",
        **{f"gen_ai.request.{name}": getattr(call.params, name) for name in names},
        "gen_ai.request.choice.count": call.params.n,
    }


@dataclass
class AnswerProgress:
    """One answer: its tokens and rounds as they came, and its end."""

    tokens: list[TokenEvent] = field(default_factory=list)
    rounds: list[RoundEvent] = field(default_factory=list)
    ended: AnswerEnded | None = None
    last_s: float = 0.0

    @property
    def text(self) -> str:
        """The whole text, once it has ended."""
        return "" if self.ended is None else self.ended.text


class AnswerBook:
    """All answers of a call, by index, and when their tokens came (seconds since `began_s`)."""

    def __init__(self, num_answers: int, began_s: float) -> None:
        self.answers = [AnswerProgress() for _ in range(num_answers)]
        self.began_s = began_s
        self.ttft_s: float | None = None
        self.inter_token_s: list[float] = []

    def note(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Piece):
            self._note_piece(self.answers[event.index], event)
        elif isinstance(event, AnswerEnded):
            self.answers[event.index].ended = event

    @property
    def ended(self) -> list[AnswerEnded]:
        """The ends of all answers that have one."""
        return [answer.ended for answer in self.answers if answer.ended is not None]

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    def _note_piece(self, answer: AnswerProgress, piece: Piece) -> None:
        now = time.perf_counter()
        if piece.tokens:
            if self.ttft_s is None:
                self.ttft_s = now - self.began_s
            if answer.tokens:
                gap_s = (now - answer.last_s) / len(piece.tokens)
                self.inter_token_s += [gap_s] * len(piece.tokens)
            answer.last_s = now
        answer.tokens += piece.tokens
        if piece.round is not None:
            answer.rounds.append(piece.round)


async def hung_up(receive: Any) -> None:  # noqa: ANN401 - ASGI's
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


def completed_stop(tokens: Sequence[TokenEvent], stops: Sequence[str]) -> str | None:
    """The stop string that ends in the last of an answer's tokens and begins first; None without such."""
    longest = max((len(stop.encode()) for stop in stops), default=0)
    tail, last = b"", _written(tokens[-1])
    for token in reversed(tokens):
        tail = _written(token) + tail
        if len(tail) >= longest + len(last):
            break
    found = []
    for stop in stops:
        data = stop.encode()
        # the first place from which it ends inside the last token
        place = tail.find(data, max(0, len(tail) - len(last) - len(data) + 1))
        if place >= 0:
            found.append((place, stop))
    return min(found, key=lambda pair: (pair[0], len(pair[1])))[1] if found else None


def _written(token: TokenEvent) -> bytes:
    return token.text.encode() if token.data is None else token.data
