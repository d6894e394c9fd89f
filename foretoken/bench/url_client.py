"""One streamed request to an OpenAI-compatible endpoint, and what it took."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2

from foretoken.bench.url_options import UrlOptions
from foretoken.bench.url_plan import UrlRequest
from foretoken.errors import UnavailableError

_CONNECT_S = 10.0
_MAX_ERROR_BYTES = 1 << 16  # of an error's body that are read
_MAX_SAID_CHARS = 200


@dataclass
class UrlSample:
    """One request as the client saw it; times in seconds since the start of the run.

    `arrival_s` is when it was due, `sent_s` when it was sent. `pieces` are (time, tokens) of every event with text.
    `error` is "" for a complete answer; otherwise the HTTP status, "connect", "timeout", "stream" (an error event),
    "cut" (an end without [DONE]) or "interrupted"; `said` is what the endpoint said of it. `num_drafted` and
    `num_accepted` are None where the endpoint reports neither.
    """

    index: int
    slice: str
    arrival_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_drafted: int | None = None
    num_accepted: int | None = None
    error: str = "interrupted"
    said: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the answer is complete."""
        return not self.error

    @property
    def ttft_s(self) -> float | None:
        """Time from when the request was due to the first text."""
        return self.pieces[0][0] - self.arrival_s if self.pieces else None

    @property
    def e2e_s(self) -> float:
        """Time from when the request was due to its end."""
        return self.ended_s - self.arrival_s

    @property
    def itl_s(self) -> list[float]:
        """Times between two pieces of text."""
        times = [at for at, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first piece; None without one."""
        if len(self.pieces) < 2:
            return None
        later = self.num_tokens - self.pieces[0][1]
        return (self.pieces[-1][0] - self.pieces[0][0]) / later if later > 0 else None


class Endpoint:
    """A client of one endpoint; `clock` gives seconds since the start of the run."""

    def __init__(self, options: UrlOptions, client: httpx2.AsyncClient) -> None:
        self.options, self.client = options, client
        self.model = options.model or ""

    async def open(self) -> None:
        """Find the model's name, where none was given.

        Raises:
            UnavailableError: the endpoint does not answer, or names no model.
        """
        if self.model:
            return
        try:
            answer = await self.client.get("/v1/models")
            answer.raise_for_status()
            self.model = str(answer.json()["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            said = type(error).__name__
            if isinstance(error, httpx2.HTTPStatusError):
                said = f"status {error.response.status_code}: {said_in(error.response.text)}".removesuffix(": ")
            raise UnavailableError(
                f"{self.options.base}/v1/models gave no model ({said}): is the server running? A key belongs into "
                f"${self.options.key_variable}, a model's name into --model"
            ) from error

    async def spec_counters(self) -> dict[str, float] | None:
        """Drafted and accepted tokens so far by the endpoint's `/metrics`; None where it has none."""
        try:
            answer = await self.client.get("/metrics")
        except httpx2.HTTPError:
            return None
        return read_spec_counters(answer.text) if answer.status_code == 200 else None

    async def send(self, request: UrlRequest, sample: UrlSample, clock: Callable[[], float]) -> None:
        """Send one request and fill `sample` while its answer streams; failures are kept in it, never raised."""
        sample.sent_s = clock()
        path = "/v1/chat/completions" if request.messages else "/v1/completions"
        try:
            async with self.client.stream("POST", path, json=self._body(request)) as answer:
                if answer.status_code == 200:
                    sample.error = await _read(answer.aiter_lines(), sample, clock)
                else:
                    sample.error = str(answer.status_code)
                    sample.said = said_in(await _beginning(answer.aiter_bytes()))
        except httpx2.TimeoutException:
            sample.error = "timeout"
        except httpx2.ConnectError:
            sample.error = "connect"
        except httpx2.HTTPError:
            sample.error = "cut"
        sample.ended_s = clock()
        sample.num_tokens = sample.num_tokens or sum(count for _, count in sample.pieces)

    def _body(self, request: UrlRequest) -> dict[str, Any]:
        options = self.options
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed + request.index,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if not options.stop_at_eos:
            body["ignore_eos"] = True
        if request.messages:
            return body | {"messages": [{"role": role, "content": content} for role, content in request.messages]}
        return body | {"prompt": request.text}


def open_client(options: UrlOptions) -> httpx2.AsyncClient:
    """An HTTP client without a limit of connections: an open loop never waits for one."""
    key = os.environ.get(options.key_variable)
    return httpx2.AsyncClient(
        base_url=options.base,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(options.timeout_s, connect=_CONNECT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # no proxy of the environment between the client and what it measures
    )


def read_spec_counters(text: str) -> dict[str, float] | None:
    """Sums of the series `...spec_decode_num_draft_tokens_total` and `..._accepted_tokens_total` of a metrics page.

    A server that exposes them under two prefixes is counted once: by the larger sum.
    """
    found: dict[str, dict[str, float]] = {"drafted": {}, "accepted": {}}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        for key, ending in (("drafted", "num_draft_tokens_total"), ("accepted", "num_accepted_tokens_total")):
            if name.endswith(f"spec_decode_{ending}") and not line.startswith("#"):
                found[key][name] = found[key].get(name, 0.0) + float(rest.rpartition(" ")[2])
    if not found["drafted"] or not found["accepted"]:
        return None
    return {key: max(series.values()) for key, series in found.items()}


def said_in(body: str) -> str:
    """What an error's body says, in one short line: the message in the shapes that servers have, else the body."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body
    for key in ("error", "detail", "message"):
        if isinstance(found, Mapping) and found.get(key):
            found = found[key]
    text = found if isinstance(found, str) else json.dumps(found)
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    words = " ".join(printable.split())
    return words if len(words) <= _MAX_SAID_CHARS else words[: _MAX_SAID_CHARS - 3] + "..."


async def _beginning(parts: AsyncIterator[bytes]) -> str:
    """The first bytes of a body as text."""
    data = b""
    async for part in parts:
        data += part
        if len(data) >= _MAX_ERROR_BYTES:
            break
    return data[:_MAX_ERROR_BYTES].decode(errors="replace")


async def _read(lines: AsyncIterator[str], sample: UrlSample, clock: Callable[[], float]) -> str:
    """Read the events of an answer into `sample`; the error, or ""."""
    counted = 0
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return ""
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, Mapping) or chunk.get("error"):
            sample.said = said_in(data)
            return "stream"
        counted = _take(chunk, sample, clock(), counted)
    return "cut"


def _take(chunk: Mapping[str, Any], sample: UrlSample, now: float, counted: int) -> int:
    """Take in one event; how many tokens were counted by then.

    The number of tokens of an event is what the running usage says, else those in its log-probabilities, else one.
    """
    usage = chunk.get("usage") or {}
    total = usage.get("completion_tokens")
    if any(_text(choice) for choice in chunk.get("choices") or ()):
        count = total - counted if isinstance(total, int) else 1
        counted += count
        sample.pieces.append((now, max(0, count)))
    if isinstance(total, int):
        sample.num_tokens, sample.num_prompt_tokens = total, usage.get("prompt_tokens") or 0
    drafted = _drafted(chunk)
    if drafted is not None:
        sample.num_drafted, sample.num_accepted = drafted
    return counted


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


def _drafted(chunk: Mapping[str, Any]) -> tuple[int, int] | None:
    """Drafted and accepted tokens, in the first of the shapes that a chunk has: ours, vLLM's, llama.cpp's."""
    for place, drafted, accepted in (
        (("foretoken", "spec"), "num_drafted", "num_accepted"),
        (("metrics", "speculative_decoding"), "num_draft_tokens", "num_accepted_draft_tokens"),
        (("timings",), "draft_n", "draft_n_accepted"),
    ):
        found: Any = chunk
        for key in place:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping) and isinstance(found.get(drafted), int) and isinstance(found.get(accepted), int):
            return found[drafted], found[accepted]
    return None
