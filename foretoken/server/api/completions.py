"""`/v1/completions`; with `suffix` a text is filled in (FIM), in the order that models trained for it read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.backend.call import AnswerEnded, ModelInfo
from foretoken.errors import ForetokenError
from foretoken.server.api.body import JsonRoute
from foretoken.server.api.call import check_num_prompts, completion_call, terms_of
from foretoken.server.api.errors import of_exception, unsupported
from foretoken.server.api.exchange import Api, Exchange
from foretoken.server.api.schemas import CompletionRequest
from foretoken.server.api.streaming import PieceGroup
from foretoken.server.api.writer import ResponseWriter, completion_logprobs

PATH = "/v1/completions"


def completion_router(api: Api) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(PATH, summary="The continuation of a text")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        info = terms.info
        if body.stream and body.echo and body.logprobs is not None:
            raise unsupported("echo", "with logprobs is not streamed; leave stream out")
        body = await with_suffix(api, body, info)
        call = completion_call(body, terms)
        exchange = Exchange(api, request.scope, call, info, bool(body.stream))
        echoed = [await _echoed(api, info, prompt) for prompt in (body.prompt if body.echo else ())]
        frame = ResponseWriter(exchange, body, "cmpl", "text_completion", "text_completion")
        return await frame.answer(TextChoices(frame, body, echoed), request)

    return router


async def _echoed(api: Api, info: ModelInfo, prompt: str | Sequence[int]) -> str:
    """The text of a prompt; none where the model has no tokenizer.

    Raises:
        ApiError: the backend does not answer.
    """
    if isinstance(prompt, str):
        return prompt
    if not info.has_tokenizer:
        return ""
    try:
        return await api.backend.detokenize(prompt)
    except ForetokenError as error:
        raise of_exception(error, api.config.retry_after_s) from error


class TextChoices:
    """See `ChoiceWriter`; `echoed` has the text of each prompt, or nothing where prompts are not repeated."""

    def __init__(self, frame: ResponseWriter, body: CompletionRequest, echoed: list[str]) -> None:
        self._frame, self._has_logprobs = frame, body.logprobs is not None
        self._echoed, self._n = echoed, frame.exchange.call.params.n
        self._offsets = [len(self._prompt_of(index)) for index in range(frame.exchange.num_answers)]

    def _prompt_of(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""

    def opening(self) -> Iterator[dict[str, Any]]:
        """See `ChoiceWriter`."""
        for index in range(len(self._offsets)):
            if self._prompt_of(index):
                yield _choice(index, self._prompt_of(index))

    def piece(self, group: PieceGroup) -> dict[str, Any] | None:
        """See `ChoiceWriter`."""
        piece = group.piece
        if not piece.text and not (piece.tokens and (self._has_logprobs or self._frame.shows_tokens)):
            return None
        choice = _choice(piece.index, piece.text)
        if self._has_logprobs:
            choice["logprobs"] = completion_logprobs(piece.tokens, self._offsets[piece.index])
        self._offsets[piece.index] += sum(len(token.text) for token in piece.tokens)
        if self._frame.shows_ids:
            choice["token_ids"] = [token.token_id for token in piece.tokens]
        return choice

    def ended(self, event: AnswerEnded) -> dict[str, Any]:
        """See `ChoiceWriter`."""
        return _choice(event.index, "", event.finish_reason)

    def whole(self) -> list[dict[str, Any]]:
        """See `ChoiceWriter`."""
        exchange, choices = self._frame.exchange, []
        for index, progress in enumerate(exchange.book.answers):
            assert progress.ended is not None
            choice = _choice(index, self._prompt_of(index) + progress.text, progress.ended.finish_reason)
            if self._has_logprobs:
                first = exchange.book.answers[index - index % self._n].ended
                prompt = () if first is None else first.prompt
                choice["logprobs"] = completion_logprobs([*prompt, *progress.tokens], 0)
            if self._frame.shows_ids:
                choice["token_ids"] = [token.token_id for token in progress.tokens]
                choice["prompt_token_ids"] = exchange.prompt_ids[index // self._n]
            choices.append(choice | self._frame.of_choice(progress.ended))
        return choices


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


async def with_suffix(api: Api, body: CompletionRequest, info: ModelInfo) -> CompletionRequest:
    """The request with its suffix among the token ids of each prompt.

    Raises:
        ApiError: the model has no tokens for it, or the prompt is echoed, which has no meaning here.
    """
    if not body.suffix:
        return body
    if body.echo:
        raise unsupported("echo", "cannot stand beside suffix; leave one of them out")
    check_num_prompts(body.prompt, api.config)
    filled = [await fill_ids(api, info, prompt, body.suffix) for prompt in body.prompt]
    return body.model_copy(update={"prompt": filled, "suffix": None})


async def fill_ids(api: Api, info: ModelInfo, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """The prompt after which the model writes what stands between two texts.

    Raises:
        ApiError: the model has no tokens for it.
    """
    if info.fim_tokens is None:
        raise unsupported("suffix", "the model has no tokens for a text in the middle; leave it out")
    before_prefix, before_suffix, before_middle = info.fim_tokens
    try:
        behind = await api.backend.tokenize(suffix, add_special_tokens=False)
        if isinstance(prefix, str):
            prefix = await api.backend.tokenize(prefix, add_special_tokens=False)
    except ForetokenError as error:
        raise of_exception(error, api.config.retry_after_s) from error
    return [*before_prefix, *prefix, before_suffix, *behind, before_middle]
