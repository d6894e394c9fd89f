"""Rows of a text that a drafter keeps while it grows."""

from __future__ import annotations

from torch import Tensor


class StoredRows:
    """A growing `[n, D]`; room grows by doubling, so that appending costs no copy of the whole each time."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # [room, D]
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def append(self, rows: Tensor) -> None:
        """Add `rows` [m, D] at the end."""
        num = self._num + len(rows)
        if self._rows is None or len(self._rows) < num:
            room = rows.new_empty(max(num, 2 * self._num), rows.shape[1])
            if self._rows is not None:
                room[: self._num] = self._rows[: self._num]
            self._rows = room
        self._rows[self._num : num] = rows
        self._num = num

    def between(self, start: int, stop: int) -> Tensor:
        """The rows `start` .. `stop`, a view [stop - start, D]."""
        assert self._rows is not None
        assert start <= stop <= self._num
        return self._rows[start:stop]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows, self._num = None, 0
