"""OpenAI's `/v1/chat/completions` and `/v1/completions`; with `suffix` a text is filled in (FIM), in the order
that models trained for it read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from foretoken.backend.call import AnswerEnded, ModelInfo, TokenEvent
from foretoken.server.api.body import JsonRoute
from foretoken.server.api.call import Terms, chat_call, check_num_prompts, completion_call, terms_of
from foretoken.server.api.errors import unsupported
from foretoken.server.api.exchange import Api, Exchange
from foretoken.server.api.messages import shaper_of
from foretoken.server.api.prompt_ids import TextReader
from foretoken.server.api.schemas import ChatRequest, CompletionRequest
from foretoken.server.api.streaming import PieceGroup
from foretoken.server.api.token_texts import TextDivision
from foretoken.server.api.tool_reader import side_by_side
from foretoken.server.api.writer import ChoiceWriter, chat_logprobs, completion_logprobs

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


def chat_router(api: Api) -> APIRouter:
    """The route of chats."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(CHAT_PATH, summary="The next message of a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        exchange = Exchange(api, request.scope, chat_call(body, terms), terms.info, bool(body.stream))
        return await ChatChoices(exchange, body).answer(request)

    return router


def completion_router(api: Api) -> APIRouter:
    """The route of texts."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(COMPLETION_PATH, summary="The continuation of a text")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        info = terms.info
        if body.stream and body.echo and body.logprobs is not None:
            raise unsupported("echo", "with logprobs is not streamed; leave stream out")
        body = await with_suffix(api, body, terms)
        call = completion_call(body, terms)
        exchange = Exchange(api, request.scope, call, info, bool(body.stream))
        echoed = [await _echoed(api, info, prompt) for prompt in (body.prompt if body.echo else ())]
        return await TextChoices(exchange, body, echoed).answer(request)

    return router


class ChatChoices(ChoiceWriter):
    """The choices of a chat."""

    def __init__(self, exchange: Exchange, body: ChatRequest) -> None:
        super().__init__(exchange, body, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._has_logprobs, self._num_listed = bool(body.logprobs), body.prompt_logprobs
        self._shapers = [shaper_of(body, exchange.info) for _ in range(exchange.num_answers)]

    def opening(self) -> Iterator[dict[str, Any]]:
        """See `ChoiceWriter`."""
        content = None if self.exchange.api.config.llama_cpp else ""
        for index in range(len(self._shapers)):
            yield _chunk(index, {"role": "assistant", "content": content})

    def choice(self, group: PieceGroup) -> dict[str, Any] | None:
        """See `ChoiceWriter`."""
        piece = group.piece
        delta = side_by_side(self._shapers[piece.index].push(piece.text))
        if not delta and not (piece.tokens and (self._has_logprobs or self.shows_tokens)):
            return None
        choice = _chunk(piece.index, delta)
        if self._has_logprobs:
            choice["logprobs"] = chat_logprobs(piece.tokens, self.names_ids)
        return choice | self.ids_of(piece.tokens)

    def last_choice(self, event: AnswerEnded) -> dict[str, Any]:
        """See `ChoiceWriter`."""
        deltas, reason = self._finished(event)
        return _chunk(event.index, side_by_side(deltas), reason)

    def choices(self) -> list[dict[str, Any]]:
        """See `ChoiceWriter`."""
        choices = []
        for index, progress in enumerate(self.exchange.book.answers):
            assert progress.ended is not None
            shaper = self._shapers[index]
            shaper.push(progress.text)
            _, reason = self._finished(progress.ended)
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **shaper.message()},
                "logprobs": chat_logprobs(progress.tokens, self.names_ids) if self._has_logprobs else None,
                "finish_reason": reason,
            }
            choices.append(choice | self.ids_of(progress.tokens) | self.of_choice(progress.ended))
        return choices

    def of_prompt(self) -> dict[str, Any]:
        """See `ChoiceWriter`: a chat has one prompt, whose ids stand beside the choices, as in vLLM."""
        ids = {"prompt_token_ids": self.exchange.prompt_ids[0]} if self.body.return_token_ids else {}
        return ids | self.scored_prompt(0, self._num_listed)

    def _finished(self, event: AnswerEnded) -> tuple[list[dict[str, Any]], str]:
        """What was held back of an answer, and why it ended: "stop" where a stop string cut a call off, which a client
        would run after "tool_calls".
        """
        shaper = self._shapers[event.index]
        deltas, reason = shaper.finish(event.finish_reason)
        is_cut = shaper.is_within_call and self.exchange.stop_string(event) is not None
        return deltas, event.finish_reason if is_cut else reason


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


async def _echoed(api: Api, info: ModelInfo, prompt: str | Sequence[int]) -> str:
    """The text of a prompt; none where the model has no tokenizer."""
    if isinstance(prompt, str):
        return prompt
    return await api.backend.detokenize(prompt, has_specials=True) if info.has_tokenizer else ""


class TextChoices(ChoiceWriter):
    """The choices of texts; `echoed` has the text of each prompt, or nothing where prompts are not repeated."""

    def __init__(self, exchange: Exchange, body: CompletionRequest, echoed: list[str]) -> None:
        super().__init__(exchange, body, "cmpl", "text_completion", "text_completion")
        self._num_logprobs, self._num_listed = body.logprobs, body.prompt_logprobs
        self._echoed, self._n = echoed, exchange.call.params.n
        self._texts = [TextDivision(len(self._prompt_of(index))) for index in range(exchange.num_answers)]

    def _prompt_of(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""

    def opening(self) -> Iterator[dict[str, Any]]:
        """See `ChoiceWriter`."""
        for index in range(len(self._texts)):
            if self._prompt_of(index) or self.body.return_token_ids:
                yield _choice(index, self._prompt_of(index)) | self._prompt_ids(index)

    def choice(self, group: PieceGroup) -> dict[str, Any] | None:
        """See `ChoiceWriter`."""
        piece = group.piece
        if not piece.text and not (piece.tokens and (self._num_logprobs is not None or self.shows_tokens)):
            return None
        choice = _choice(piece.index, piece.text)
        if self._num_logprobs is not None:
            starts = [one.start for one in self._texts[piece.index].divide(piece.text, piece.tokens)]
            choice["logprobs"] = completion_logprobs(piece.tokens, starts, self.names_ids)
        return choice | self.ids_of(piece.tokens)

    def last_choice(self, event: AnswerEnded) -> dict[str, Any]:
        """See `ChoiceWriter`."""
        return _choice(event.index, "", event.finish_reason)

    def choices(self) -> list[dict[str, Any]]:
        """See `ChoiceWriter`."""
        exchange, choices = self.exchange, list[dict[str, Any]]()
        for index, progress in enumerate(exchange.book.answers):
            assert progress.ended is not None
            before = self._prompt_of(index)
            choice = _choice(index, before + progress.text, progress.ended.finish_reason)
            if self._num_logprobs is not None:
                prompt = self._echoed_tokens(index)
                # Divided apart: a prompt may be spelt otherwise than its tokens, after a normalisation for one.
                starts = [one.start for one in TextDivision().divide(before, prompt)]
                starts += [one.start for one in TextDivision(len(before)).divide(progress.text, progress.tokens)]
                choice["logprobs"] = completion_logprobs([*prompt, *progress.tokens], starts, self.names_ids)
            choice |= self.ids_of(progress.tokens) | self._prompt_ids(index)
            choice |= self.scored_prompt(index - index % self._n, self._num_listed)
            choices.append(choice | self.of_choice(progress.ended))
        return choices

    def _echoed_tokens(self, index: int) -> list[TokenEvent]:
        """The tokens of a prompt that is repeated, each with as many alternatives as those of the answer have."""
        first = self.exchange.book.answers[index - index % self._n].ended
        if first is None or not self._echoed:
            return []
        return [msgspec.structs.replace(token, top=token.top[: self._num_logprobs]) for token in first.prompt]

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.exchange.prompt_ids[index // self._n]}


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


async def with_suffix(api: Api, body: CompletionRequest, terms: Terms) -> CompletionRequest:
    """The request with its suffix among the token ids of each prompt.

    Raises:
        ApiError: the model has no tokens for it, or the prompt is echoed, which has no meaning here.
    """
    if not body.suffix:
        return body
    if body.echo:
        raise unsupported("echo", "cannot stand beside suffix; leave one of them out")
    check_num_prompts(body.prompt, api.config)
    reader = TextReader.of_prompt(api, terms, body.max_tokens)
    filled = [await fill_ids(reader, terms.info, prompt, body.suffix) for prompt in body.prompt]
    return body.model_copy(update={"prompt": filled, "suffix": None})


async def fill_ids(reader: TextReader, info: ModelInfo, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """The prompt after which the model writes what stands between two texts.

    Raises:
        ApiError: the model has no tokens for it, or a text does not fit.
    """
    if info.fim_tokens is None:
        raise unsupported("suffix", "the model has no tokens for a text in the middle; leave it out")
    before_prefix, before_suffix, before_middle = info.fim_tokens
    behind = await reader.ids(suffix)
    if isinstance(prefix, str):
        prefix = await reader.ids(prefix)
    return [*before_prefix, *prefix, before_suffix, *behind, before_middle]
