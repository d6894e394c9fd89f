"""The figures of a finished request that history, log and traces share: sums over its answers, never texts; and the
thread from which history and log write them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import queue
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.server.record import RequestRecord

_log = logging.getLogger("foretoken.server")
_MAX_AT_ONCE = 256
_CLOSING_S = 5.0  # a disk that hangs does not hold up the end of the server for longer
_MAX_NAME_CHARS = 64
MAX_PLACES = 16
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9._:/-]{{1,{_MAX_NAME_CHARS}}}")


@dataclass(frozen=True)
class RequestFigures:
    """One request; counts and seconds are sums over its answers. None: not known or not defined.

    `request_id` and `slice` are names that clients choose: anything but a short plain name is replaced by its hash.
    """

    request_id: str
    route: str
    model: str
    began_unix_s: float
    duration_s: float
    status: int
    reason: str
    is_stream: bool
    finish_reason: str
    key: str
    slice: str
    drafter: str
    rule: str
    why_plain: str
    num_answers: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_steps: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    num_rejected: int
    ttft_s: float | None
    inter_token_s: float | None
    inter_token_p99_s: float | None
    tokens_per_s: float | None
    queued_s: float | None
    draft_s: float
    verify_s: float
    prompt_s: float
    wasted_s: float
    estimated_speedup: float | None
    places: tuple[tuple[int, int], ...] = ()  # (drafted, accepted) by place in the draft

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


# Fields that are those of the record, and fields that are sums of its answers' statistics.
_COPIED = (
    *("route", "model", "began_unix_s", "duration_s", "status", "reason", "is_stream", "key", "drafter"),
    *("num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "ttft_s"),
)
_SUMMED = (
    *("num_steps", "num_drafts", "num_drafted", "num_accepted", "num_rejected"),
    *("draft_s", "verify_s", "prompt_s", "wasted_s"),
)


def figures_of(record: RequestRecord) -> RequestFigures:
    """The figures of a record."""
    gaps = sorted(record.inter_token_s)
    speedups = [one for stats in record.stats if (one := stats["estimated_speedup"]) is not None]
    decoding_s = sum(gaps)
    same: dict[str, Any] = {name: getattr(record, name) for name in _COPIED}
    return RequestFigures(
        **same,
        **{name: sum(stats[name] for stats in record.stats) for name in _SUMMED},
        request_id=plain_name(record.request_id),
        finish_reason=",".join(sorted(set(record.finish_reasons))),
        slice=plain_name(record.slice),
        rule=str(record.stats[0]["rule"]) if record.stats else "",
        why_plain=why_plain(record),
        num_answers=len(record.stats),
        inter_token_s=decoding_s / len(gaps) if gaps else None,
        inter_token_p99_s=quantile(gaps, 0.99),
        tokens_per_s=len(gaps) / decoding_s if decoding_s > 0 else None,
        queued_s=max((stats["queued_s"] for stats in record.stats), default=None),
        estimated_speedup=sum(speedups) / len(speedups) if speedups else None,
        places=added_places(*(stats["accepted_per_position"] for stats in record.stats)),
    )


def added_places(*every: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """(drafted, accepted) by place in the draft, summed; beyond `MAX_PLACES` nothing is kept."""
    length = min(MAX_PLACES, max(map(len, every), default=0))
    own = [[one[place] for one in every if place < len(one)] for place in range(length)]
    return tuple((sum(drafted for drafted, _ in pairs), sum(accepted for _, accepted in pairs)) for pairs in own)


def why_plain(record: RequestRecord) -> str:
    """Why nothing was drafted for an answered request, from a closed set; "" where something was drafted, or nothing
    answered.

    "off": no drafter was asked for. "drafter_disabled", "drafter_failed": it failed. "too_short": no step decoded
    beyond the first token. "nothing_proposed": the controller found that drafting does not pay, or lookups found
    nothing.
    """
    if not record.stats or any(stats["num_drafted"] for stats in record.stats):
        return ""
    if not record.drafter:
        return "off"
    if any(stats["disabled_drafters"] for stats in record.stats):
        return "drafter_disabled"
    if any(stats["draft_failures"] for stats in record.stats):
        return "drafter_failed"
    if record.num_completion_tokens <= len(record.stats):
        return "too_short"
    return "nothing_proposed"


def plain_name(text: str) -> str:
    """A short plain name as it is; anything else as the beginning of its SHA-256, so that no text gets into files."""
    if not text or _PLAIN_NAME.fullmatch(text):
        return text
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest of the `ordered` values that at least `share` of them do not exceed; None without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


class FiguresWriter(ABC):
    """A `record.RequestObserver` that writes the figures of finished requests, in batches from a thread of its own.

    What cannot be written, and what does not fit into the queue of `max_queued`, costs figures, which `num_dropped`
    counts, and nothing else.
    """

    def __init__(self, name: str, max_queued: int = 4096, idle_s: float = 60.0) -> None:
        self._idle_s = idle_s
        self._queue: queue.Queue[RequestFigures | None] = queue.Queue(max_queued)
        self._lock = threading.Lock()
        self.num_dropped = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _write(self, batch: Sequence[RequestFigures]) -> int:
        """Write a batch, in the thread; how many of it are lost: all of them if it raises, and the error is logged. It
        gets an empty batch every `idle_s` seconds without requests, for work of its own.
        """

    def finished(self, record: RequestRecord) -> None:
        """See `RequestObserver.finished`; from any thread, without waiting."""
        try:
            if self._is_closed:
                raise queue.Full
            self._queue.put_nowait(figures_of(record))
        except queue.Full:
            self._count_dropped(1)

    def drain(self) -> None:
        """Wait until every request that has finished is written, or counted as dropped."""
        self._queue.join()

    def close(self) -> None:
        """Write what is queued and end the thread; after a few seconds it is left to itself."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._queue.put(None, timeout=_CLOSING_S)
        except queue.Full:
            return
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while True:
            batch, is_last = self._take()
            try:
                num_lost = self._write(batch)
            except Exception:  # noqa: BLE001 - what a writer does must not end its thread
                _log.exception("%s lost %d items", self._thread.name, len(batch))
                num_lost = len(batch)
            self._count_dropped(num_lost)
            for _ in range(len(batch) + is_last):
                self._queue.task_done()
            if is_last:
                return

    def _take(self) -> tuple[list[RequestFigures], bool]:
        """What is queued, at most `_MAX_AT_ONCE`, and whether it is the end."""
        batch: list[RequestFigures] = []
        try:
            item = self._queue.get(timeout=self._idle_s)
            while item is not None:
                batch.append(item)
                if len(batch) == _MAX_AT_ONCE:
                    return batch, False
                item = self._queue.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _count_dropped(self, count: int) -> None:
        with self._lock:
            self.num_dropped += count
