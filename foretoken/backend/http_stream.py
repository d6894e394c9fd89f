"""The events of a streamed answer, and what servers report of drafting in them or on their metrics page.

server        in an answer                                        on /metrics
foretoken     foretoken.spec: num_drafted, num_accepted           foretoken_spec_decode_num_*_tokens_total
vLLM          metrics.speculative_decoding                        vllm:spec_decode_num_*_tokens_total
llama.cpp     timings: draft_n, draft_n_accepted                  llamacpp:spec_decode_num_*_tokens_total
SGLang        sglext.spec_tokens_details, where asked for         only gauges over a window
OpenVINO      nothing                                             nothing
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_ERROR_BYTES = 1 << 16  # of an error's body that are read
_MAX_SAID_CHARS = 200
_OTHER_LINES = (":", "event:", "id:", "retry:")  # of a stream of events
# Where a part of an event counts: its place, then its names of drafted and accepted tokens and of target forwards.
_REPORTS = (
    (("foretoken", "spec"), "num_drafted", "num_accepted", "num_steps"),
    (("metrics", "speculative_decoding"), "num_draft_tokens", "num_accepted_draft_tokens", ""),
    (("timings",), "draft_n", "draft_n_accepted", ""),
    # SGLang's names by its released wheels: the newer ones in 0.5.21 to 0.5.23, the older in 0.5.10. Streams have them
    # in `sglext`, in a chunk without choices; its whole answers and its own API have them in `meta_info`.
    (("sglext", "spec_tokens_details"), "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct"),
    (("meta_info",), "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct"),
    (("meta_info",), "spec_draft_token_num", "spec_accept_token_num", "spec_verify_ct"),
)


@dataclass
class Stream:
    """One streamed answer as the client saw it; times in seconds by the client's clock.

    `pieces` are (time, tokens) of every event with text, of thinking or of the answer. `error` is "" for a complete
    answer; otherwise the HTTP status, "connect", "timeout", "stream" (an error event, or an answer that was given up),
    "cut" (an end without [DONE]) or "interrupted"; `said` is what the server said of it. `num_drafted`, `num_accepted`
    and `num_steps` are None where the server does not report them. `is_counted`: it said how many tokens the answer
    has; else a piece counts as one.
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_drafted: int | None = None
    num_accepted: int | None = None
    num_steps: int | None = None
    error: str = "interrupted"
    said: str = ""
    is_counted: bool = False

    def counted_pieces(self) -> list[tuple[float, float]]:
        """The pieces with tokens that add up to those that were counted: where only the end of an answer says how many
        there were, a piece counted as one, though it may hold several.
        """
        total = sum(count for _, count in self.pieces)
        if not total or not self.num_tokens:
            return [(at, float(count)) for at, count in self.pieces]
        return [(at, count * self.num_tokens / total) for at, count in self.pieces]


class EventReader:
    """Reads the events of one answer into a `Stream`; `texts` and `token_ids` are what they hold, thinking included.

    `has_choices`: an event was in OpenAI's form. `is_foreign`: the event that ended the reading was in no form of
    theirs, and said no error.
    """

    def __init__(self, stream: Stream, clock: Callable[[], float]) -> None:
        self.stream, self.clock = stream, clock
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.has_choices = self.is_foreign = False
        self._num_counted = 0
        self._has_events = False

    def read(self, lines: Iterable[str]) -> str:
        """Read an answer; the error, or ""."""
        return next((error for line in lines if (error := self._take_line(line)) is not None), "cut")

    async def read_async(self, lines: AsyncIterator[str]) -> str:
        """The same as lines come."""
        async for line in lines:
            error = self._take_line(line)
            if error is not None:
                return error
        return "cut"

    def _take_line(self, line: str) -> str | None:
        """Take in one line; the error or "" where the answer ends with it."""
        if line.startswith("error:"):  # of older servers of llama.cpp
            self.stream.said = said_in(line[6:].strip())
            return "stream"
        if not line.startswith("data:"):
            if not self._has_events and not self.stream.said and not line.startswith(_OTHER_LINES):
                self.stream.said = said_in(line)  # of a page, or an answer that is no stream
            return None
        if not self._has_events:
            self._has_events, self.stream.said = True, ""
        data = line[5:].strip()
        if data == "[DONE]":
            return ""
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        try:
            is_event = isinstance(chunk, Mapping) and not chunk.get("error")
            if is_event:
                self._take(chunk)
                reasons = [choice.get("finish_reason") for choice in chunk.get("choices") or ()]
                if "abort" in reasons:  # of SGLang and vLLM: the answer was given up
                    self.stream.said = "the answer ended with finish_reason 'abort'"
                    return "stream"
        except (AttributeError, KeyError, TypeError, ValueError):  # not in the form of OpenAI's events
            is_event = False
        if not is_event:
            self.is_foreign = not (isinstance(chunk, Mapping) and chunk.get("error"))
            self.stream.said = said_in(data)
            return "stream"
        return None

    def _take(self, chunk: Mapping[str, Any]) -> None:
        """Take in one event. The number of its tokens is what the running usage says, else one."""
        now, stream = self.clock(), self.stream
        usage = chunk.get("usage") or {}
        total = usage.get("completion_tokens")
        choices = chunk.get("choices") or ()
        texts = [text for choice in choices if (text := text_of(choice, "delta"))]
        if texts:
            count = total - self._num_counted if isinstance(total, int) else 1
            self._num_counted += count
            stream.pieces.append((now, max(0, count)))
        self.texts += texts
        for choice in choices:
            self.token_ids += choice.get("token_ids") or ()
        if isinstance(total, int):
            stream.num_tokens, stream.num_prompt_tokens = total, usage.get("prompt_tokens") or 0
            stream.is_counted = True
        for part in (chunk, *choices):
            _take_report(part, stream)
        self.has_choices |= "choices" in chunk


def text_of(choice: Mapping[str, Any], name: str) -> str:
    """The text of a choice, thinking included; `name` is that of a chat's message: `delta` in a stream."""
    message = choice.get(name) or {}
    return str(choice.get("text") or "") or thinking_of(message) + str(message.get("content") or "")


def thinking_of(message: Mapping[str, Any]) -> str:
    """What a message, or a part of one, holds of the model's thinking; some servers say it under both names."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


class _LineCutter:
    """Cuts a body at line feeds alone: JSON's texts may hold what else `str.splitlines` cuts at, such as U+2028."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, part: bytes) -> list[str]:
        """The lines that end in this part."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [line.decode(errors="replace").removesuffix("\r") for line in lines]


def lines_of(parts: Iterable[bytes]) -> Iterator[str]:
    """The lines of a body, the last also without an end."""
    cutter = _LineCutter()
    for part in parts:
        yield from cutter.take(part)
    yield from cutter.take(b"\n")


async def lines_of_async(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The same as parts come."""
    cutter = _LineCutter()
    async for part in parts:
        for line in cutter.take(part):
            yield line
    for line in cutter.take(b"\n"):
        yield line


def _take_report(part: Mapping[str, Any], stream: Stream) -> None:
    """Take in what an event or a choice reports of drafting, in the first of the shapes that it has."""
    for place, drafted, accepted, steps in _REPORTS:
        found: Any = part
        for key in place:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping) and isinstance(found.get(drafted), int) and isinstance(found.get(accepted), int):
            stream.num_drafted, stream.num_accepted = found[drafted], found[accepted]
            stream.num_steps = found.get(steps)
            return


# Name, labels and value of a sample; behind them a timestamp may stand, and in OpenMetrics an exemplar.
_SERIES = re.compile(r'\s*([^\s#{]*?)spec_decode_num_([^\s{]+)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s*([^\s{]+)')


def _spec_series(text: str) -> Iterator[tuple[str, str, str, float]]:
    """The series of a metrics page on speculation: prefix, name behind `spec_decode_num_`, labels, and value."""
    for line in text.splitlines():
        found = _SERIES.match(line)
        if found is None:
            continue
        try:
            value = float(found[4])
        except ValueError:  # a line that only looks like a series
            continue
        yield found[1], found[2], found[3] or "", value


def read_spec_counters(text: str) -> dict[str, float] | None:
    """Sums of the series `...spec_decode_num_draft_tokens_total` and `..._accepted_tokens_total` of a metrics page.

    A server that exposes them under two prefixes is counted once: by the larger sum.
    """
    sums: dict[str, dict[str, float]] = {"draft_tokens_total": {}, "accepted_tokens_total": {}}
    for prefix, ending, _, value in _spec_series(text):
        if ending in sums:
            sums[ending][prefix] = sums[ending].get(prefix, 0.0) + value
    drafted, accepted = (max(series.values(), default=None) for series in sums.values())
    return None if drafted is None or accepted is None else {"drafted": drafted, "accepted": accepted}


@dataclass(frozen=True)
class PositionCounters:
    """Drafts so far, and accepted tokens by position of the draft."""

    num_drafts: float
    accepted: tuple[float, ...]

    def since(self, before: PositionCounters) -> PositionCounters:
        """What was counted after `before`."""
        earlier = (*before.accepted, *[0.0] * len(self.accepted))
        accepted = tuple(now - then for now, then in zip(self.accepted, earlier, strict=False))
        return PositionCounters(self.num_drafts - before.num_drafts, accepted)


def read_position_counters(text: str) -> PositionCounters | None:
    """The series `...spec_decode_num_drafts_total` and `..._accepted_tokens_per_pos_total` (label `position`) of a
    metrics page; None where one is missing. Of two prefixes the one with more drafts is read.
    """
    drafts: dict[str, float] = {}
    accepted: dict[str, dict[int, float]] = {}
    for prefix, ending, labels, value in _spec_series(text):
        if ending == "drafts_total":
            drafts[prefix] = drafts.get(prefix, 0.0) + value
        place = re.search(r'\bposition="(\d+)"', labels)
        if ending == "accepted_tokens_per_pos_total" and place is not None:
            own = accepted.setdefault(prefix, {})
            own[int(place[1])] = own.get(int(place[1]), 0.0) + value
    known = [prefix for prefix in drafts if prefix in accepted]
    if not known:
        return None
    chosen = max(known, key=lambda prefix: drafts[prefix])
    return PositionCounters(drafts[chosen], tuple(value for _, value in sorted(accepted[chosen].items())))


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


def beginning(parts: Iterable[bytes]) -> str:
    """The first bytes of a body as text."""
    data = b""
    for part in parts:
        data += part
        if len(data) >= _MAX_ERROR_BYTES:
            break
    return data[:_MAX_ERROR_BYTES].decode(errors="replace")


async def beginning_async(parts: AsyncIterator[bytes]) -> str:
    """The same as parts come."""
    data = b""
    async for part in parts:
        data += part
        if len(data) >= _MAX_ERROR_BYTES:
            break
    return beginning((data,))
