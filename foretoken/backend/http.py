"""An OpenAI-compatible server that runs already: asked one question at a time (`HttpBackend`), or many at once
(`Endpoint`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from foretoken.backend.answering import SERVED, Answer, Capabilities, Drafting, Question, as_messages, check_question
from foretoken.backend.http_errors import NO_MODEL, authorities, explained, failure, said_of, why_no_model
from foretoken.backend.http_stream import (
    EventReader,
    PositionCounters,
    Stream,
    beginning,
    beginning_async,
    lines_of,
    lines_of_async,
    read_position_counters,
    read_spec_counters,
)
from foretoken.backend.registry import DEFAULT_KEY_VARIABLE, BackendOptions, base_of, prefix_of
from foretoken.errors import ForetokenError, InputError, UnavailableError

DEFAULT_TIMEOUT_S = 600.0
_CONNECT_S = 10.0
_PAGE_S = 60.0  # of silence, after which a page that takes no computing (models, version, metrics) will not come


@dataclass(frozen=True)
class ServerKind:
    """What is known of a kind of server, by the `owned_by` of its models.

    `version` is the path and the key at which it says its version. `fields` are sent with every request. `plain` is
    sent to answer without drafting, None where that cannot be asked. `repeats`: the same answer again for the same
    seed. `reports`: an answer says what was drafted for it, from version `reports_since` on where that is set.
    """

    version: tuple[str, str] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] | None = None
    repeats: bool = False
    reports: bool = False
    predictions: bool = False
    reports_since: tuple[int, ...] = ()


# A server may filter and penalise by its own or its model's defaults: asked above temperature 0, it shall draw from all
# tokens, and at any temperature by the model's probabilities alone.
_UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_NO_PENALTY = {"repetition_penalty": 1.0}
KINDS: Mapping[str, ServerKind] = {
    "foretoken": ServerKind(
        ("/version", "version"), {"return_token_ids": True}, {"spec": {"drafter": None}}, True, True, True
    ),
    "vllm": ServerKind(("/version", "version"), {"return_token_ids": True, **_UNFILTERED, **_NO_PENALTY}, repeats=True),
    # By its released wheels: 0.5.21 to 0.5.23 answer this field in streams of chats and of completions, and refuse
    # `return_meta_info` in streamed chats; 0.5.3 and 0.5.10 have neither, and leave out what they do not know.
    "sglang": ServerKind(
        ("/server_info", "version"),
        {"return_spec_tokens_details": True, **_NO_PENALTY},
        reports=True,
        reports_since=(0, 5, 21),
    ),
    # It has no way to leave out drafting for one request.
    "llamacpp": ServerKind(
        ("/props", "build_info"), {**_UNFILTERED, "repeat_penalty": 1.0}, repeats=True, reports=True
    ),
    "OVMS": ServerKind(("/v2", "version"), repeats=True),
}


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is and how it is asked; `model` "": the first that it names, `model_option` names it to users."""

    url: str
    model: str = ""
    key_variable: str = DEFAULT_KEY_VARIABLE
    timeout_s: float = DEFAULT_TIMEOUT_S
    model_option: str = "--model"

    @property
    def base(self) -> str:
        """The address without the version of the API."""
        return base_of(self.url)

    @property
    def page_timeout(self) -> httpx2.Timeout:
        """How long pages that take no computing are waited for."""
        return httpx2.Timeout(min(self.timeout_s, _PAGE_S), connect=_CONNECT_S)

    def path(self, name: str) -> str:
        """The path of `name` in its API."""
        return f"{prefix_of(self.url)}/{name}"

    def body(self, model: str, question: Question) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request for a streamed answer of its model called `model`."""
        usage: dict[str, bool] = {"include_usage": True}
        if prefix_of(self.url) == "/v1":  # OpenVINO Model Server refuses further keys
            usage["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "stream": True,
            "stream_options": usage,
        }
        if question.seed is not None:
            body["seed"] = question.seed
        if question.ignore_eos:
            body["ignore_eos"] = True
        if not question.messages:
            return self.path("completions"), body | {"prompt": question.text}
        return self.path("chat/completions"), body | {"messages": as_messages(question.messages)}

    def client_options(self) -> dict[str, Any]:
        """What both of httpx's clients are made with; no proxy of the environment stands before what is measured."""
        key = os.environ.get(self.key_variable)
        return {
            "base_url": self.base,
            "headers": {"authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx2.Timeout(self.timeout_s, connect=_CONNECT_S),
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            "trust_env": False,
            "verify": authorities() if self.url.startswith("https:") else True,
        }

    def no_model(self, error: Exception) -> UnavailableError:
        """What is raised where it names no model."""
        return UnavailableError(
            f"{self.base}{self.path('models')} gave no model ({why_no_model(error)}): is the server running? "
            f"A key belongs into ${self.key_variable}, a model's name into {self.model_option}"
        )


def _model_of(answer: httpx2.Response, wanted: str) -> Mapping[str, Any]:
    """The entry of the model called `wanted`, or of the first, in a list of models."""
    answer.raise_for_status()
    models: Sequence[Mapping[str, Any]] = answer.json()["data"]
    found = next((one for one in models if one["id"] == wanted), models[0])
    return {**found, "id": wanted or str(found["id"])}


class Endpoint:
    """A client that sends requests without waiting for earlier ones; `async with` opens and closes it.

    There is no limit of connections: an open loop never waits for one.
    """

    def __init__(self, server: ServerAddress) -> None:
        self.server, self.model = server, server.model
        self.client = httpx2.AsyncClient(**server.client_options())

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def open(self) -> None:
        """Find the model's name, where none was given.

        Raises:
            UnavailableError: no answer, or no model.
        """
        if self.model:
            return
        try:
            answer = await self.client.get(self.server.path("models"), timeout=self.server.page_timeout)
            self.model = str(_model_of(answer, "")["id"])
        except NO_MODEL as error:
            raise self.server.no_model(error) from error

    async def spec_counters(self) -> dict[str, float] | None:
        """Drafted and accepted tokens so far by the endpoint's `/metrics`; None where it has none."""
        try:
            answer = await self.client.get("/metrics", timeout=self.server.page_timeout)
        except httpx2.HTTPError:
            return None
        return read_spec_counters(answer.text) if answer.status_code == 200 else None

    async def send(
        self, question: Question, stream: Stream, clock: Callable[[], float], more: Mapping[str, Any] | None = None
    ) -> None:
        """Ask, with the fields `more`, and fill `stream` while the answer comes; failures are kept in it."""
        path, body = self.server.body(self.model, question)
        body |= more or {}
        stream.sent_s = clock()
        try:
            async with self.client.stream("POST", path, json=body) as answer:
                if answer.status_code == 200:
                    stream.error = await EventReader(stream, clock).read_async(lines_of_async(answer.aiter_bytes()))
                else:
                    stream.error = str(answer.status_code)
                    stream.said = said_of(answer, await beginning_async(answer.aiter_bytes()))
        except httpx2.HTTPError as error:
            stream.error, stream.said = failure(error), explained(error)
        stream.ended_s = clock()
        stream.num_tokens = stream.num_tokens or sum(count for _, count in stream.pieces)


class HttpBackend:
    """A server that runs already, asked one question at a time; it answers with the model and the drafting it serves.

    Where its answers do not say what was drafted, its counters before and after do: nobody else may use it meanwhile.
    """

    def __init__(self, server: ServerAddress) -> None:
        """Ask for its model.

        Raises:
            UnavailableError: it does not answer, or names no model.
        """
        self.server, self.name = server, server.url
        self.client = httpx2.Client(**server.client_options())
        try:
            about = _model_of(self._page(server.path("models")), server.model)
        except NO_MODEL as error:
            self.client.close()
            raise server.no_model(error) from error
        self.model, self.owner = str(about["id"]), str(about.get("owned_by"))
        self.kind = KINDS.get(self.owner, ServerKind())
        self._counts, self._reports = self.counters() is not None, self._is_reporting()
        self.capabilities = Capabilities(
            plain=self.kind.plain is not None,
            drafting=False,
            sampling=self.kind.repeats,
            token_ids="return_token_ids" in self.kind.fields,
            draft_counts="total" if self._reports or self._counts else "none",
            conversations=bool(about.get("has_chat_template", True)),
        )

    def _is_reporting(self) -> bool:
        """Whether its answers say what was drafted for them."""
        since = self.kind.reports_since
        if not self.kind.reports or not since:
            return self.kind.reports
        return tuple(map(int, re.findall(r"\d+", self.version())[: len(since)])) >= since

    def version(self) -> str:
        """Its kind and, where it says it, its version."""
        if self.kind.version is None:
            return self.owner
        path, key = self.kind.version
        try:
            answer = self._page(path)
            answer.raise_for_status()
            return f"{self.owner} {answer.json()[key]}"
        except NO_MODEL:
            return f"{self.owner}, version unknown"

    def draftings(
        self,
        num_drafts: Sequence[int],  # noqa: ARG002 - the server has chosen
        lookup_num_drafts: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Sequence[Drafting]:
        """Its own, whatever that is."""
        return (Drafting(SERVED),)

    def notes(self) -> Sequence[str]:
        """How it is timed."""
        return (
            f"{self.name} serves {self.model} with the drafting that it was started with; times are those of the "
            "pieces that its client received, and what it caches or drafts from stays from answer to answer.",
        )

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer one question; times are those at which pieces came.

        Raises:
            InputError, UnavailableError, ForetokenError: see `AnsweringBackend.answer`.
        """
        check_question(self.name, question, drafting, self.capabilities)
        if drafting.kind not in (None, SERVED):
            raise InputError("drafting", drafting.kind, f"{self.name} drafts as it was started; ask for {SERVED!r}")
        path, body = self.server.body(self.model, question)
        body |= self.fields(drafting)
        if self.kind.predictions and question.prediction is not None:
            body["prediction"] = {"type": "content", "content": question.prediction}
        before = None if self._reports else self.counters()
        stream = Stream()
        reader = EventReader(stream, time.perf_counter)
        self._send(path, body, reader)
        if stream.num_drafted is None and before is not None:
            after = self.counters() or before
            stream.num_drafted = round(after["drafted"] - before["drafted"])
            stream.num_accepted = round(after["accepted"] - before["accepted"])
        elif stream.num_drafted is None and self._counts:  # llama.cpp leaves out of an answer what is 0
            stream.num_drafted = stream.num_accepted = 0
        return _answer(reader)

    def room(self, _question: Question) -> None:
        """A server knows its own tokens."""

    def fields(self, drafting: Drafting) -> dict[str, Any]:
        """What a request to this kind of server says beside the question, drafting or asked to answer plainly."""
        return {**self.kind.fields, **((self.kind.plain or {}) if drafting.kind is None else {})}

    def _send(self, path: str, body: Mapping[str, Any], reader: EventReader) -> None:
        stream = reader.stream
        stream.sent_s = reader.clock()
        try:
            with self.client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    said = said_of(answer, beginning(answer.iter_bytes()))
                    raise ForetokenError(f"{self.name} refused with status {answer.status_code}: {said}")
                stream.error = reader.read(lines_of(answer.iter_bytes()))
        except httpx2.HTTPError as error:
            raise UnavailableError(f"{self.name} gave no answer ({failure(error)}: {explained(error)})") from error
        stream.ended_s = reader.clock()
        if stream.error or not (stream.pieces or stream.num_prompt_tokens):  # neither text nor an account of it
            why = f"{stream.error or 'no text'}{f': {stream.said}' if stream.said else ''}"
            raise ForetokenError(f"{self.name} gave no whole answer ({why})")

    def counters(self) -> Mapping[str, float] | None:
        """By its `/metrics`; None where it has none."""
        page = self._metrics()
        return None if page is None else read_spec_counters(page)

    def position_counters(self) -> PositionCounters | None:
        """Drafts, and accepted tokens by position, by its `/metrics`; None where it has no such series.

        Raises:
            UnavailableError: it does not answer.
        """
        page = self._metrics()
        return None if page is None else read_position_counters(page)

    def _page(self, path: str) -> httpx2.Response:
        return self.client.get(path, timeout=self.server.page_timeout)

    def _metrics(self) -> str | None:
        try:
            answer = self._page("/metrics")
        except httpx2.HTTPError as error:
            raise UnavailableError(f"{self.name}/metrics: {error}") from error
        return answer.text if answer.status_code == 200 else None

    def reset(self) -> None:
        """Nothing: servers have no common way to forget."""

    def close(self) -> None:
        """Close its connections."""
        self.client.close()


def _answer(reader: EventReader) -> Answer:
    """An answer may have no text: its first token ended it."""
    stream = reader.stream
    num_tokens = stream.num_tokens or sum(count for _, count in stream.pieces)
    first_s, num_first = stream.counted_pieces()[0] if stream.pieces else (stream.ended_s, num_tokens)
    last_s = stream.pieces[-1][0] if len(stream.pieces) > 1 else stream.ended_s
    return Answer(
        token_ids=tuple(reader.token_ids),
        text="".join(reader.texts),
        num_emitted=num_tokens,
        decode_tokens=max(0, round(num_tokens - num_first)),
        decode_s=last_s - first_s,
        ttft_s=first_s - stream.sent_s,
        e2e_s=last_s - stream.sent_s,
        num_steps=stream.num_steps,
        num_drafted=stream.num_drafted,
        num_accepted=stream.num_accepted,
        num_prompt_tokens=stream.num_prompt_tokens or None,
        is_counted=stream.is_counted or not stream.pieces,
    )


def open_http(options: BackendOptions) -> HttpBackend:
    """The server at the address `options.name`.

    Raises:
        UnavailableError: it does not answer.
    """
    return HttpBackend(ServerAddress(options.name, options.served_model, model_option=options.model_option))
