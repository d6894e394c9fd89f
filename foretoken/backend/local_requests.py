"""Requests of the engine of this process with the fields that `SamplingParams` has, and the whole of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from foretoken.backend.answering import Drafting, as_messages
from foretoken.backend.local_answers import LocalAnswers
from foretoken.backend.requesting import ApiChoice, ApiRequest, Reply
from foretoken.backend.rounds import TokenSpellings
from foretoken.config import SamplingParams
from foretoken.core import TokenLogprobs
from foretoken.errors import ForetokenError, InputError

_NAMES = frozenset(field.name for field in fields(SamplingParams))


class LocalRequester:
    """See `Requester`; forms of answers are asked as `response_format`, and tools belong to a server."""

    num_together = 1

    def __init__(self, backend: LocalAnswers, drafting: Drafting) -> None:
        """Load what drafts.

        Raises:
            ConfigError, ModelError: see `LocalAnswers.way`.
        """
        self._llm, self._spec = backend.llm, backend.way(drafting).spec
        self._llm.prepare(self._spec)
        self._spellings = TokenSpellings(backend.llm.tokenizer)

    def ask(self, request: ApiRequest) -> Reply:
        """See `Requester`."""
        try:
            params = _params(request)
            prompt: str | list[int] = request.text
            if request.messages:
                prompt = self._llm.encode_chat(as_messages(request.messages))
            if request.stream:
                return self._streamed(prompt, params)
            output = self._llm.generate([prompt], params, spec=self._spec)[0]
        except InputError as error:
            return Reply(refused=str(error))
        for one in output.choices:
            if isinstance(one.error, InputError):
                return Reply(refused=str(one.error))
            if one.error is not None:
                raise ForetokenError(str(one.error)) from one.error
        choices = tuple(
            self._made(one.text, one.finish_reason, one.token_ids, one.logprobs or ()) for one in output.choices
        )
        return Reply(choices, len(output.prompt_ids), sum(len(one.token_ids) for one in output.choices))

    def _streamed(self, prompt: str | list[int], params: SamplingParams) -> Reply:
        text, ids, scored, reason = "", list[int](), list[TokenLogprobs](), ""
        for piece in self._llm.stream(prompt, params, self._spec):
            text += piece.text
            ids += piece.token_ids
            scored += piece.logprobs
            reason = piece.finish_reason or reason
        return Reply((self._made(text, reason, ids, scored),), None, len(ids))

    def _made(self, text: str, reason: str, ids: Any, scored: Any) -> ApiChoice:  # noqa: ANN401
        events = [self._spellings.event(one.token_id, one, "") for one in scored]
        return ApiChoice(
            text,
            reason,
            tuple(ids),
            tuple(event.text for event in events),
            tuple(one.logprob for one in scored),
            tuple({top.text: top.logprob for top in reversed(event.top)} for event in events),
        )


def _params(request: ApiRequest) -> SamplingParams:
    """The parameters that a request asks for.

    Raises:
        InputError: a field that the engine does not have.
    """
    given: dict[str, Any] = dict(request.fields)
    form: Mapping[str, Any] | None = given.pop("response_format", None)
    if form is not None:
        given["json_schema"] = form["json_schema"]["schema"]
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    for name in given:
        if name not in _NAMES:
            raise InputError(name, given[name], "is a field of a server; ask one by its address")
    return SamplingParams(**given, logprobs=request.logprobs)
