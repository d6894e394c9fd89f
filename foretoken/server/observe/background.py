"""A thread that does what may block, with a bounded queue: what does not fit is dropped and counted; and observers that
write figures of requests from one.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from foretoken.server.observe.figures import RequestFigures, figures_of
from foretoken.server.record import RequestRecord

_Item = TypeVar("_Item")

_log = logging.getLogger("foretoken.server")
_MAX_AT_ONCE = 256
_CLOSING_S = 5.0  # a disk that hangs does not hold up the end of the server for longer


class Background(Generic[_Item]):
    """Gives batches of items to `handle` in a thread of its own; items are put from any thread without waiting.

    `handle` returns how many items of a batch it could not handle; if it raises, all of them, and the error is logged.
    `num_dropped` counts those and the items that did not fit into the queue of `max_queued`. `handle` gets an empty
    batch every `idle_s` seconds without items, for work of its own.
    """

    def __init__(
        self, name: str, handle: Callable[[Sequence[_Item]], int], max_queued: int = 4096, idle_s: float = 60.0
    ) -> None:
        self._handle, self._idle_s = handle, idle_s
        self._queue: queue.Queue[_Item | None] = queue.Queue(max_queued)
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Items that were not handled."""
        return self._num_dropped

    def put(self, item: _Item) -> None:
        """Queue an item, or drop it."""
        try:
            if self._is_closed:
                raise queue.Full
            self._queue.put_nowait(item)
        except queue.Full:
            self._count_dropped(1)

    def drain(self) -> None:
        """Wait until all that was put before is handled."""
        self._queue.join()

    def close(self) -> None:
        """Handle what is queued and end the thread; after a few seconds it is left to itself."""
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
                num_lost = self._handle(batch)
            except Exception:  # noqa: BLE001 - what a writer does must not end its thread
                _log.exception("%s lost %d items", self._thread.name, len(batch))
                num_lost = len(batch)
            self._count_dropped(num_lost)
            for _ in range(len(batch) + is_last):
                self._queue.task_done()
            if is_last:
                return

    def _take(self) -> tuple[list[_Item], bool]:
        """What is queued, at most `_MAX_AT_ONCE`, and whether it is the end."""
        batch: list[_Item] = []
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
            self._num_dropped += count


class FiguresWriter(ABC):
    """A `record.RequestObserver` that writes the figures of finished requests, in batches from a thread of its own.

    What cannot be written costs figures, which are counted, and nothing else.
    """

    def __init__(self, name: str, idle_s: float = 60.0) -> None:
        self._background: Background[RequestFigures] = Background(name, self._write, idle_s=idle_s)

    @property
    def num_dropped(self) -> int:
        """Requests whose figures were not written."""
        return self._background.num_dropped

    def finished(self, record: RequestRecord) -> None:
        """See `RequestObserver.finished`."""
        self._background.put(figures_of(record))

    def drain(self) -> None:
        """Wait until every request that has finished is written, or counted as dropped."""
        self._background.drain()

    def close(self) -> None:
        """Write what is queued."""
        self._background.close()

    @abstractmethod
    def _write(self, batch: Sequence[RequestFigures]) -> int:
        """Write a batch, in the thread; how many of it are lost."""
