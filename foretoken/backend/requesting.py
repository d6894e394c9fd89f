"""A request with any sampling field, and the whole of its answer: what a comparison of two engines looks at.

`answering` asks for texts and times alone. Here a request holds further fields under OpenAI's names, and an answer its
pieces, log-probabilities, usage and why it ended. A backend that cannot honour a field refuses it by name, which is
kept in the reply: a refusal is no wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from foretoken.backend.answering import AnsweringBackend, Drafting, Question, check_question
from foretoken.errors import InputError

_ASKED = ("max_tokens", "temperature", "seed", "ignore_eos")  # what a `Question` has


@dataclass(frozen=True)
class ApiRequest:
    """One request: a text or (role, content) pairs, and `fields` under OpenAI's names.

    `logprobs`: that many likeliest tokens at every place, with the token's own; None for none. `stream`: the answer is
    sent in chunks.
    """

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class ApiChoice:
    """One answer. `pieces` are the texts of its tokens and `logprobs` their log-probabilities, `tops` the likeliest
    pieces at each place with theirs; all empty where the backend does not report them, as are `token_ids`.

    `calls` are (name, arguments) of the functions that it calls. `text` begins with `thinking`, which is "" where the
    backend does not tell it from the answer.
    """

    text: str
    finish_reason: str = ""
    token_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    thinking: str = ""


@dataclass(frozen=True)
class Reply:
    """The choices of a request and the tokens that were counted for it, None where nobody said. `refused` says why it
    was not answered; "" where it was.
    """

    choices: tuple[ApiChoice, ...] = ()
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    refused: str = ""


class Requester(Protocol):
    """Answers requests with one way to draft."""

    num_together: int  # requests that it takes at the same time

    def ask(self, request: ApiRequest) -> Reply:
        """Answer one request.

        Raises:
            UnavailableError: the backend does not run, or stopped; ForetokenError: it gave no whole answer.
        """


class AnsweringRequester:
    """Any backend, by its `answer`: a length, a temperature and a seed, and nothing else."""

    num_together = 1

    def __init__(self, backend: AnsweringBackend, drafting: Drafting) -> None:
        self._backend, self._drafting = backend, drafting

    def ask(self, request: ApiRequest) -> Reply:
        """See `Requester`."""
        fields = dict(request.fields)
        if fields.get("n") == 1:
            del fields["n"]
        known = {name: fields.pop(name) for name in _ASKED if name in fields}
        unknown = [*fields, *(["logprobs"] if request.logprobs is not None else []), *(["stream"] * request.stream)]
        if unknown:
            return Reply(refused=f"{self._backend.name} is asked no {unknown[0]}")
        question = Question(request.text, request.messages, **known)
        try:
            check_question(self._backend.name, question, self._drafting, self._backend.capabilities)
        except InputError as error:
            return Reply(refused=str(error))
        answer = self._backend.answer(question, self._drafting)
        if answer.num_emitted > 1 and not answer.text and not answer.token_ids:
            return Reply(refused=f"{self._backend.name} shows no text of such an answer")
        return Reply((ApiChoice(answer.text, token_ids=answer.token_ids),), None, answer.num_emitted)


def requester_of(backend: AnsweringBackend, drafting: Drafting) -> Requester:
    """What asks a backend with the most fields that it takes."""
    from foretoken.backend.http import HttpBackend
    from foretoken.backend.http_requests import HttpRequester
    from foretoken.backend.local_answers import LocalAnswers, LocalRequester

    if isinstance(backend, HttpBackend):
        return HttpRequester(backend, drafting)
    if isinstance(backend, LocalAnswers):
        return LocalRequester(backend, drafting)
    return AnsweringRequester(backend, drafting)
