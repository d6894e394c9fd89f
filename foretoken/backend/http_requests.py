"""Requests of an OpenAI-compatible server with any field, and the whole of what it answers, in chunks or at once."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from foretoken.backend.answering import SERVED, Drafting, as_messages
from foretoken.backend.http import HttpBackend
from foretoken.backend.http_errors import explained, retry_after_s, said_of
from foretoken.backend.http_stream import EventReader, Stream, beginning, lines_of, thinking_of
from foretoken.backend.requesting import ApiChoice, ApiRequest, Reply
from foretoken.errors import ForetokenError, InputError, UnavailableError

_NUM_TOGETHER = 8
_REFUSALS = range(400, 500)
_NO_ROOM = 429  # now, which says nothing about the request
_MAX_WAIT_S = 120.0  # for room, of one request


class _ChunkReader(EventReader):
    """Keeps the events of an answer as they are."""

    def __init__(self) -> None:
        super().__init__(Stream(), time.perf_counter)
        self.chunks: list[Mapping[str, Any]] = []

    def _take(self, chunk: Mapping[str, Any]) -> None:
        self.chunks.append(chunk)


class HttpRequester:
    """See `Requester`; what is sent is what the request says, and the fields of the server's kind."""

    num_together = _NUM_TOGETHER

    def __init__(self, backend: HttpBackend, drafting: Drafting) -> None:
        """Choose how it drafts.

        Raises:
            InputError: a way to draft, which a server has chosen itself.
        """
        if drafting.kind not in (None, SERVED):
            raise InputError("drafting", drafting.kind, f"{backend.name} drafts as it was started")
        self._backend, self._drafting = backend, drafting

    def ask(self, request: ApiRequest) -> Reply:
        """See `Requester`. A server without room is asked again when it says so, for two minutes at most."""
        left_s = _MAX_WAIT_S
        while True:
            found = self._asked(request)
            if isinstance(found, Reply):
                return found
            wait_s, refusal = found
            if wait_s > left_s:
                return refusal
            left_s -= wait_s
            time.sleep(wait_s)

    def _asked(self, request: ApiRequest) -> Reply | tuple[float, Reply]:
        """The answer; of a server without room the seconds to wait, and its refusal."""
        path, body = self._body(request)
        try:
            with self._backend.client.stream("POST", path, json=body) as answer:
                if answer.status_code in _REFUSALS:
                    said = said_of(answer, beginning(answer.iter_bytes()))
                    refusal = Reply(refused=f"status {answer.status_code}: {said}")
                    return (retry_after_s(answer), refusal) if answer.status_code == _NO_ROOM else refusal
                if answer.status_code != 200:
                    said = said_of(answer, beginning(answer.iter_bytes()))
                    raise ForetokenError(f"{self._backend.name} answered with status {answer.status_code}: {said}")
                return self._streamed(answer) if request.stream else self._whole(answer)
        except httpx2.HTTPError as error:
            raise UnavailableError(f"{self._backend.name} gave no answer: {explained(error) or repr(error)}") from error

    def _body(self, request: ApiRequest) -> tuple[str, dict[str, Any]]:
        server, kind = self._backend.server, self._backend.kind
        plain = (kind.plain or {}) if self._drafting.kind is None else {}
        body = {"model": self._backend.model, **kind.fields, **request.fields, "stream": request.stream, **plain}
        if request.stream:
            body["stream_options"] = {"include_usage": True}
        if not request.messages:
            if request.logprobs is not None:
                body["logprobs"] = request.logprobs
            return server.path("completions"), body | {"prompt": request.text}
        if request.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": request.logprobs}
        return server.path("chat/completions"), body | {"messages": as_messages(request.messages)}

    def _whole(self, answer: httpx2.Response) -> Reply:
        text = answer.read()
        try:
            found = json.loads(text)
            return _reply([found["choices"]], found.get("usage"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForetokenError(f"{self._backend.name} gave no answer that can be read: {error!r}") from error

    def _streamed(self, answer: httpx2.Response) -> Reply:
        reader = _ChunkReader()
        broken = reader.read(lines_of(answer.iter_bytes()))
        if broken:
            raise ForetokenError(f"{self._backend.name} gave no whole answer ({broken} {reader.stream.said})")
        usages = [chunk["usage"] for chunk in reader.chunks if chunk.get("usage")]
        try:
            return _reply([chunk.get("choices") or () for chunk in reader.chunks], usages[-1] if usages else None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForetokenError(f"{self._backend.name} gave a chunk that cannot be read: {error!r}") from error


def _reply(chunks: Sequence[Sequence[Mapping[str, Any]]], usage: Mapping[str, Any] | None) -> Reply:
    """The answer whose choices came in these chunks, of which a whole answer is one."""
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk:
            parts.setdefault(choice.get("index", 0), []).append(choice)
    usage = usage or {}
    choices = tuple(_choice(own) for _, own in sorted(parts.items()))
    return Reply(choices, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _choice(parts: Sequence[Mapping[str, Any]]) -> ApiChoice:
    thoughts, texts, reasons, ids = [], [], [], list[int]()
    pieces, logprobs, tops = list[str](), list[float](), list[Mapping[str, float]]()
    calls: dict[int, list[str]] = {}
    for part in parts:
        message = part.get("message") or part.get("delta") or {}
        thoughts.append(thinking_of(message))
        texts.append(str(part.get("text") or message.get("content") or ""))
        reasons.append(str(part.get("finish_reason") or ""))
        ids += part.get("token_ids") or ()
        for piece, logprob, top in _scored(part.get("logprobs") or {}):
            pieces.append(piece)
            logprobs.append(logprob)
            tops.append(top)
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            own = calls.setdefault(call.get("index", number), ["", ""])
            own[0] += function.get("name") or ""
            own[1] += function.get("arguments") or ""
    made = tuple((name, arguments) for _, (name, arguments) in sorted(calls.items()))
    reason = next((one for one in reversed(reasons) if one), "")
    thinking = "".join(thoughts)
    text = thinking + "".join(texts)
    return ApiChoice(text, reason, tuple(ids), tuple(pieces), tuple(logprobs), tuple(tops), made, thinking)


def _scored(found: Mapping[str, Any]) -> list[tuple[str, float, Mapping[str, float]]]:
    """(piece, log-probability, likeliest pieces) of every token, in the shape of chats or in that of completions."""
    if found.get("content"):
        return [
            (
                str(one["token"]),
                float(one["logprob"]),
                {str(top["token"]): float(top["logprob"]) for top in reversed(one.get("top_logprobs") or ())},
            )
            for one in found["content"]
        ]
    pieces = found.get("tokens") or ()
    tops = found.get("top_logprobs") or [{}] * len(pieces)
    rows = zip(pieces, found.get("token_logprobs") or (), tops, strict=True)
    return [(str(piece), float(logprob), dict(top or {})) for piece, logprob, top in rows]
