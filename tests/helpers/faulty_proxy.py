"""A server in front of a real one, which plants one fault of speculation: what `certify` must find.

The real server is asked without streaming, each request once for all proxies over one `Upstream`; chunks of a streamed
answer are made here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

Body = dict[str, Any]


def same(body: Body) -> Body:
    return body


def honest(_body: Body, _choice: Body, _reply: Body) -> None:
    """Alters nothing."""


@dataclass(frozen=True)
class Fault:
    """What a faulty engine does: `asks` changes the request that it obeys, `answers` a choice or the reply around it
    in place, `streams` the text of a stream alone.
    """

    name: str
    asks: Callable[[Body], Body] = same
    answers: Callable[[Body, Body, Body], None] = honest
    streams: Callable[[Body, str], str] = lambda _body, text: text


class Upstream:
    """A real server, each request to which is asked once."""

    def __init__(self, url: str) -> None:
        # A connection that was idle for long may be closed while the next request is on its way.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(base_url=url, timeout=120, trust_env=False, limits=limits)
        self._known: dict[str, tuple[int, bytes]] = {}

    def get(self, path: str) -> tuple[int, bytes]:
        found = self._client.get(path)
        return found.status_code, found.content

    def post(self, path: str, body: Body) -> tuple[int, bytes]:
        key = path + json.dumps(body, sort_keys=True)
        if key not in self._known:
            found = self._client.post(path, json=body)
            self._known[key] = found.status_code, found.content
        return self._known[key]

    def close(self) -> None:
        self._client.close()


@dataclass
class _Proxy:
    upstream: Upstream
    fault: Fault
    spec: Mapping[str, Any] = field(default_factory=dict)

    def get(self, path: str) -> tuple[int, str, bytes]:
        status, data = self.upstream.get(path)
        return status, "application/json" if data.startswith(b"{") else "text/plain", data

    def post(self, path: str, body: Body) -> tuple[int, str, bytes]:
        is_stream = bool(body.pop("stream", False))
        body.pop("stream_options", None)
        status, data = self.upstream.post(path, self.fault.asks(dict(body)))
        if status != 200:
            return status, "application/json", data
        reply = json.loads(data)
        for choice in reply["choices"]:
            self.fault.answers(body, choice, reply)
        if not is_stream:
            return 200, "application/json", json.dumps(reply).encode()
        events = [*self._chunks(body, reply), {"choices": [], "usage": reply["usage"]}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return 200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode()

    def _chunks(self, body: Body, reply: Body) -> Iterator[Body]:
        """Three characters each, the log-probabilities with the first; calls in two parts."""
        for choice in reply["choices"]:
            is_chat = "message" in choice
            about = {"index": choice["index"], "finish_reason": None}
            text = self.fault.streams(body, text_of(choice))
            first = {"logprobs": choice.get("logprobs"), "token_ids": choice.get("token_ids")}
            for place in range(0, max(1, len(text)), 3):
                part = text[place : place + 3]
                said = {"delta": {"content": part}} if is_chat else {"text": part}
                yield {"choices": [about | said | first]}
                first = {}
            for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                for function in ({"name": name, "arguments": arguments[:5]}, {"arguments": arguments[5:]}):
                    yield {"choices": [about | {"delta": {"tool_calls": [{"index": number, "function": function}]}}]}
            yield {"choices": [about | {"text": "", "delta": {}, "finish_reason": choice["finish_reason"]}]}


def text_of(choice: Body) -> str:
    return choice["text"] if "text" in choice else choice["message"].get("content") or ""


def set_text(choice: Body, text: str) -> None:
    if "text" in choice:
        choice["text"] = text
    else:
        choice["message"]["content"] = text


@contextmanager
def faulty(upstream: Upstream, fault: Fault) -> Iterator[str]:
    """The address of a server with a fault, while the block runs."""
    proxy = _Proxy(upstream, fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*proxy.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*proxy.post(self.path, body))

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---- faults

_DRAFT = 4  # tokens of a draft


def without(name: str) -> Callable[[Body], Body]:
    return lambda body: {key: value for key, value in body.items() if key != name}


def other_temperature(change: Callable[[float], float], seed: int | None = None) -> Callable[[Body], Body]:
    def asks(body: Body) -> Body:
        found = change(body["temperature"])
        return body | {"temperature": found} | ({} if found == body["temperature"] or seed is None else {"seed": seed})

    return asks


class _Seeds:
    """A fresh seed for every request."""

    def __init__(self) -> None:
        self._next = 10**6

    def __call__(self, body: Body) -> Body:
        if not body["temperature"]:
            return body
        self._next += 1
        return body | {"seed": self._next}


def longer(body: Body) -> Body:
    return body | {"max_tokens": body["max_tokens"] + _DRAFT - 1}


def at_stop(change: Callable[[str, str], str]) -> Callable[[Body, Body, Body], None]:
    """Changes (text, stop string) of an answer that its stop string ended."""

    def answers(body: Body, choice: Body, _reply: Body) -> None:
        if body.get("stop") and choice["finish_reason"] == "stop":
            set_text(choice, change(text_of(choice), body["stop"][0]))

    return answers


def broken_json(body: Body, choice: Body, _reply: Body) -> None:
    if "response_format" in body:
        set_text(choice, text_of(choice).replace(":", "", 1))


def broken_call(_body: Body, choice: Body, _reply: Body) -> None:
    for call in choice.get("message", {}).get("tool_calls") or ():
        call["function"]["arguments"] = call["function"]["arguments"].replace(":", "", 1)


def lost_token(_body: Body, choice: Body, _reply: Body) -> None:
    """The token at the end of the second draft is in no list and no text."""
    scored = choice.get("logprobs") or {}
    if "tokens" not in scored or len(scored["tokens"]) <= 2 * _DRAFT:
        return
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        scored[name].pop(2 * _DRAFT - 1)
    choice["token_ids"].pop(2 * _DRAFT - 1)
    set_text(choice, "".join(scored["tokens"]))


def draft_logprobs(_body: Body, choice: Body, _reply: Body) -> None:
    """Accepted tokens come with what a draft model thinks of them."""
    scored = choice.get("logprobs") or {}
    own = scored.get("token_logprobs") or []
    own[:] = [value if place % _DRAFT == 0 else 0.6 * value - 0.5 for place, value in enumerate(own)]


def miscounted(_body: Body, _choice: Body, reply: Body) -> None:
    """Every step counts as one token."""
    reply["usage"]["completion_tokens"] = -(-reply["usage"]["completion_tokens"] // _DRAFT)


def wrong_reason(_body: Body, choice: Body, _reply: Body) -> None:
    if choice["finish_reason"] == "length":
        choice["finish_reason"] = "stop"


def broken_character(_body: Body, text: str) -> str:
    """The first character of several bytes is divided between two chunks."""
    place = next((i for i, letter in enumerate(text) if ord(letter) > 127 and letter != "\ufffd"), None)
    return text if place is None else text[:place] + "\ufffd\ufffd" + text[place + 1 :]


def cut_stream(_body: Body, text: str) -> str:
    return text[:-1]


FAULTS: tuple[Fault, ...] = (
    Fault("presence_penalty ignored", without("presence_penalty")),
    Fault("frequency_penalty ignored", without("frequency_penalty")),
    Fault("repetition_penalty ignored", without("repetition_penalty")),
    Fault("logit_bias ignored", without("logit_bias")),
    Fault("top_k ignored", without("top_k")),
    Fault("top_p ignored", without("top_p")),
    Fault("stop strings ignored", without("stop")),
    Fault("temperature ignored", other_temperature(lambda one: 1.0 if one else 0.0)),
    Fault("greedy where sampling was asked", other_temperature(lambda _: 0.0)),
    Fault("sampling where greedy was asked", other_temperature(lambda one: one or 0.7, seed=5)),
    Fault("seed ignored", _Seeds()),
    Fault("seed constant", lambda body: body | {"seed": 5}),
    Fault("max_tokens exceeded by a draft", longer),
    Fault("token lost at a stop string", answers=at_stop(lambda text, _: text[:-2])),
    Fault("token repeated at a stop string", answers=at_stop(lambda text, _: text + text[-2:])),
    Fault("stop string in the text", answers=at_stop(lambda text, stop: text + stop)),
    Fault("token lost at a draft's end", answers=lost_token),
    Fault("JSON broken at a draft's end", answers=broken_json),
    Fault("arguments of a call broken", answers=broken_call),
    Fault("log-probabilities of the draft", answers=draft_logprobs),
    Fault("usage counts steps", answers=miscounted),
    Fault("finish_reason wrong", answers=wrong_reason),
    Fault("stream ends early", streams=cut_stream),
    Fault("character broken between chunks", streams=broken_character),
)
