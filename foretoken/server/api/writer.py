"""How a request that generates is answered, whole or as a stream: frame, reports and log-probabilities."""

from __future__ import annotations

import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, ClassVar

from fastapi import Request, Response

from foretoken import __version__
from foretoken.backend.call import Alternative, AnswerEnded, RoundEvent, TokenEvent
from foretoken.server.api.call import metrics_level, tier_of, wants_trace
from foretoken.server.api.envelopes import status_of
from foretoken.server.api.errors import ApiError, final, json_response, name_as_sent
from foretoken.server.api.exchange import Exchange
from foretoken.server.api.schemas import SamplingFields, StreamOptions
from foretoken.server.api.streaming import DONE, SSE, Around, EventStream, PieceGroup, frame, grouped, padded_frame
from foretoken.server.api.usage import metrics, spec_report, timings, trace_record, usage

BUILD = f"b0-foretoken-{__version__}"  # as llama.cpp tells its builds
_LEAST = -9999.0  # OpenAI's number for a token that could not be drawn; JSON has no minus infinity
_log = logging.getLogger("foretoken.server")
_Json = dict[str, Any]


class AnswerWriter(ABC):
    """Writes the answers of one call in the shape of an interface, whole or as events, and what they cost."""

    around: ClassVar[Around] = SSE

    def __init__(self, exchange: Exchange, body: SamplingFields) -> None:
        config = exchange.api.config
        self.exchange, self.body = exchange, body
        self._level = metrics_level(body, config)
        self._has_trace = wants_trace(body)
        self._options = body.stream_options or StreamOptions()
        asked = self._options.include_obfuscation
        is_padded = config.force_obfuscation or (config.obfuscation if asked is None else asked)
        self._bucket_bytes = config.obfuscation_bucket_bytes if is_padded else 0

    @abstractmethod
    def whole(self) -> object:
        """The response that is not streamed, after the call's end."""

    def begun(self) -> Iterable[bytes]:
        """The events before the first one of an answer."""
        return ()

    @abstractmethod
    def piece(self, group: PieceGroup) -> Iterable[bytes]:
        """The events of an answer's next pieces."""

    @abstractmethod
    def ended(self, event: AnswerEnded) -> Iterable[bytes]:
        """The last events of an answer."""

    def failed(self, error: ApiError) -> Iterable[bytes]:  # noqa: ARG002 - for those that write more than the error
        """The events before the error of a call that failed."""
        return ()

    async def answer(self, request: Request) -> Response:
        """Run the call and respond.

        Raises:
            ApiError: it was refused, or failed before anything was sent.
        """
        exchange = self.exchange
        try:
            if exchange.is_stream:
                await exchange.unless_gone(request.receive, exchange.open())
                response = EventStream(exchange, self.stream())
                await response.start(request.receive)
                return response
            await exchange.unless_gone(request.receive, _run(exchange))
            made = json_response(self.whole())
        except ApiError as error:
            await exchange.closed()
            exchange.finish(status_of(error, exchange.path), exchange.left or error.code)
            raise
        except Exception as error:
            _log.exception("request %s broke down", exchange.request_id)
            await exchange.closed()
            exchange.finish(500, "internal_error")
            raise final(500, "internal_error", "the server failed to answer this request") from error
        except BaseException:  # the server itself stops
            exchange.finish(500, "internal_error")
            raise
        exchange.finish(200)
        return made

    async def stream(self) -> AsyncGenerator[bytes]:
        """The events of a stream, encoded. Every way out frees what the call holds.

        Raises:
            ApiError: see `Exchange.events`.
        """
        has_begun = False
        try:
            async with (
                contextlib.aclosing(self.exchange.events()) as events,
                contextlib.aclosing(grouped(events, self.exchange.api.config)) as groups,
            ):
                async for event in groups:
                    if not isinstance(event, PieceGroup | AnswerEnded):
                        continue
                    frames = [] if has_begun else [*self.begun()]
                    has_begun = True
                    frames += self.piece(event) if isinstance(event, PieceGroup) else self.ended(event)
                    if frames:  # one event fills the buffer at once, or not at all
                        yield b"".join(frames)
        except ApiError as error:
            name_as_sent(error, self.body)
            for data in self.failed(error):
                yield data
            raise

    def encoded(self, body: _Json) -> bytes:
        """An event, padded where that is asked for."""
        if self._bucket_bytes:
            return padded_frame(body, self._bucket_bytes, self.around)
        return frame(body, self.around)

    def reports(self, with_trace: bool = True) -> _Json:
        """What the request cost, beside `usage`."""
        exchange = self.exchange
        spec = exchange.call.spec
        drafter = None if spec is None else spec.drafter
        own: _Json = {"spec": spec_report(exchange.book, drafter, None if drafter else self._why_off())}
        if with_trace and self._has_trace:
            own["trace"] = [
                record
                for index, answer in enumerate(exchange.book.answers)
                for record in self._records(index, answer.tokens, answer.rounds)
            ]
        made: _Json = {"timings": timings(exchange), "foretoken": own}
        if exchange.num_answers == 1 and self._level != "none":
            made["metrics"] = metrics(exchange.book.answers[0], self._level)
        return made

    def _why_off(self) -> str:
        if self.body.prediction and not self.exchange.api.config.predictions:
            return "prediction_disabled"
        return "off_server" if self.body.spec is None else "off_request"

    def _records(self, index: int, tokens: Sequence[TokenEvent], rounds: Sequence[RoundEvent]) -> list[_Json]:
        emitted: dict[int, list[TokenEvent]] = {one.step: [] for one in rounds}
        for token in tokens:
            emitted.setdefault(token.step, []).append(token)
        by_step = {one.step: one for one in rounds}
        name, why_off = self.exchange.request_id, self._why_off()
        return [trace_record(name, index, step, emitted[step], by_step.get(step), why_off) for step in sorted(emitted)]


class ChoiceWriter(AnswerWriter):
    """Writes OpenAI's choices, and the fields around them: names, times, and the reports of what it cost."""

    def __init__(self, exchange: Exchange, body: SamplingFields, prefix: str, whole: str, chunk: str) -> None:
        super().__init__(exchange, body)
        self._num_ended = 0  # of the answers whose end was written: the exchange may be ahead of its stream
        self._whole, self._chunk = whole, chunk
        self._head = {
            "id": f"{prefix}-{exchange.request_id}",
            "created": int(exchange.began_unix_s),
            "model": exchange.info.name,
            "system_fingerprint": BUILD if exchange.api.config.llama_cpp else None,
        }
        if tier_of(body) is not None:
            self._head["service_tier"] = tier_of(body)

    @abstractmethod
    def opening(self) -> Iterable[_Json]:
        """Choices of the first chunk of each answer; may be none."""

    @abstractmethod
    def choice(self, group: PieceGroup) -> _Json | None:
        """The choice of a chunk; None while nothing can be sent."""

    @abstractmethod
    def last_choice(self, event: AnswerEnded) -> _Json:
        """The choice of the last chunk of an answer."""

    @abstractmethod
    def choices(self) -> list[_Json]:
        """The choices of a response that is not streamed."""

    def of_prompt(self) -> _Json:
        """What a response, or the first event of a stream, tells of the prompt beside its choices."""
        return {}

    @property
    def shows_tokens(self) -> bool:
        """Whether a chunk without text tells something."""
        return bool(self.body.return_token_ids) or self._has_trace or self._has_running_usage

    @property
    def names_ids(self) -> bool:
        """Whether log-probabilities name tokens by their ids."""
        return bool(self.body.return_tokens_as_token_ids)

    @property
    def _has_running_usage(self) -> bool:
        """Whether every chunk has the usage so far: part of `include_usage`, as in vLLM."""
        return self._options.include_usage and self._options.continuous_usage_stats

    def ids_of(self, tokens: Sequence[TokenEvent]) -> _Json:
        """What a choice has of its tokens' ids, where they were asked for."""
        return {"token_ids": [token.token_id for token in tokens]} if self.body.return_token_ids else {}

    def scored_prompt(self, index: int, count: int | None) -> _Json:
        """The log-probabilities of the prompt of `index`, its first answer, if they were asked for."""
        ended = self.exchange.book.answers[index].ended
        if count is None or ended is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(ended.prompt, count)}

    def of_choice(self, event: AnswerEnded) -> _Json:
        """What a choice reports of itself: what ended it, where the request names something, and metrics, where there
        are several answers.
        """
        params, shown = self.exchange.call.params, dict[str, Any]()
        if params.stop_strings or params.stop_token_ids:
            shown["stop_reason"] = self.exchange.stop_reason(event)  # vLLM's
        if self.exchange.num_answers > 1 and self._level != "none":
            shown["metrics"] = metrics(self.exchange.book.answers[event.index], self._level)
        return shown

    def whole(self) -> _Json:
        """See `AnswerWriter.whole`."""
        head = {**self._head, "object": self._whole, "choices": self.choices(), **self.of_prompt()}
        return {**head, "usage": self._usage(), **self.reports()}

    async def stream(self) -> AsyncGenerator[bytes]:
        """See `AnswerWriter.stream`."""
        async with contextlib.aclosing(super().stream()) as frames:
            async for data in frames:
                yield data
        if self._options.include_usage:
            yield self._encoded([], self.reports(with_trace=False), has_ended=True)
        yield DONE

    def begun(self) -> Iterable[bytes]:
        """See `AnswerWriter.begun`."""
        more = itertools.chain([self.of_prompt()], itertools.repeat(None))
        return [self._encoded([one | self.ids_of(())], about) for one, about in zip(self.opening(), more, strict=False)]

    def piece(self, group: PieceGroup) -> Iterable[bytes]:
        """See `AnswerWriter.piece`."""
        written = self.choice(group)
        if written is None:
            return ()
        trace = self._records(group.piece.index, group.piece.tokens, group.rounds) if self._has_trace else None
        return [self._encoded([written], {} if trace is None else {"foretoken": {"trace": trace}})]

    def ended(self, event: AnswerEnded) -> Iterable[bytes]:
        """See `AnswerWriter.ended`."""
        last = self.last_choice(event) | self.ids_of(()) | self.of_choice(event)
        self._num_ended += 1
        is_last = self._num_ended == self.exchange.num_answers
        reports = self.reports(with_trace=False) if is_last and not self._options.include_usage else {}
        return [self._encoded([last], reports)]

    def _encoded(self, choices: list[_Json], more: _Json | None = None, has_ended: bool = False) -> bytes:
        chunk = {**self._head, "object": self._chunk, "choices": choices, **(more or {})}
        if has_ended or self._has_running_usage:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return self.encoded(chunk)

    def _usage(self) -> _Json:
        return usage(self.exchange, self.body.prediction is not None)


async def _run(exchange: Exchange) -> None:
    await exchange.open()
    async for _ in exchange.events():
        pass


def chat_logprobs(tokens: Sequence[TokenEvent], as_ids: bool = False) -> dict[str, Any]:
    """The object of a chat's choice; `as_ids` names tokens by their ids."""
    return {"content": [_chat_entry(token, as_ids) for token in tokens], "refusal": None}


def _chat_entry(token: TokenEvent, as_ids: bool) -> dict[str, Any]:
    tops = [_named_entry(one, as_ids) for one in token.top]
    return {**_named_entry(token, as_ids), "top_logprobs": tops}


def _named_entry(one: TokenEvent | Alternative, as_ids: bool) -> dict[str, Any]:
    data = None if one.data is None else list(one.data)
    return {"token": _name(one, as_ids), "logprob": _bounded(one.logprob), "bytes": data}


def _name(one: TokenEvent | Alternative, as_ids: bool) -> str:
    """A token by its text, or in vLLM's form by its id: several tokens may have one text."""
    return f"token_id:{one.token_id}" if as_ids else one.text


def completion_logprobs(tokens: Sequence[TokenEvent], offsets: Sequence[int], as_ids: bool = False) -> dict[str, Any]:
    """The object of a completion's choice; `offsets` are the places where the texts of the tokens begin, `as_ids` names
    tokens by their ids.
    """
    return {
        "text_offset": offsets,
        "token_logprobs": [None if token.logprob is None else _bounded(token.logprob) for token in tokens],
        "tokens": [_name(token, as_ids) for token in tokens],
        "top_logprobs": [_tops(token, as_ids) for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[TokenEvent], count: int) -> list[dict[str, Any] | None]:
    """vLLM's list: each token of a prompt and its `count` likeliest alternatives by id; None for the first."""
    return [None if token.logprob is None else _ranked(token, count) for token in tokens]


def _ranked(token: TokenEvent, count: int) -> dict[str, Any]:
    own = (token.token_id, token.logprob, token.rank, token.text)
    others = [(one.token_id, one.logprob, rank, one.text) for rank, one in enumerate(token.top[:count], 1)]
    return {
        str(token_id): {"logprob": _bounded(logprob), "rank": rank, "decoded_token": text}
        for token_id, logprob, rank, text in (own, *others)
    }


def _tops(token: TokenEvent, as_ids: bool) -> dict[str, float] | None:
    """The likeliest texts, and the token's own; of two tokens with one text the likelier counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    listed: list[Alternative | TokenEvent] = [*token.top, token]
    for one in listed:
        found.setdefault(_name(one, as_ids), _bounded(one.logprob))
    return found


def _bounded(logprob: float | None) -> float:
    return _LEAST if logprob is None else max(logprob, _LEAST)
