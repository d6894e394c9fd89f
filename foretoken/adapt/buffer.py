"""What was served lately, cut into windows to learn from and to judge by; in memory only.

Hidden states come along accepted text (`draft.hidden_states`). What the target wrote is learnt, prompts are context.
Every fourth request is held out as a whole, so that no text is judged by its own other half.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.draft.base import HiddenRows

WINDOW_ROWS = 128  # a unit of learning: tens of milliseconds for a small head, and enough context for most predictions
_FEWEST_ROWS = 16  # shorter answers are mostly too short for several places of a draft
_HELD_OUT = 4  # one request of so many, and that part of the memory


@dataclass(frozen=True)
class Window:
    """Consecutive committed positions of one request: S rows, and the token behind the last.

    `wanted` says which tokens the target wrote. `num_rejected` counts the tokens at which a draft token was rejected.
    """

    tokens: Tensor  # [S + 1] int64
    wanted: Tensor  # [S + 1] bool
    states: Mapping[int, Tensor]  # by layer, each [S, D]
    is_greedy: bool
    num_rejected: int
    number: int  # in order of arrival

    @property
    def num_rows(self) -> int:
        """S."""
        return len(self.tokens) - 1


@dataclass
class _OpenText:
    """The rows of one request that are not in a window yet."""

    num_prompt: int
    is_greedy: bool
    is_held_out: bool | None = None  # not known before its first row
    start: int = 0  # position of the first row kept
    tokens: list[int] = field(default_factory=list)
    pieces: list[Mapping[int, Tensor]] = field(default_factory=list)
    rejected: set[int] = field(default_factory=set)  # positions
    next_token: int = 0  # behind the last row

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class ExampleBuffer:
    """Keeps the newest `num_tokens` rows of `layers`, a quarter of them held out.

    The engine's thread adds, the learner's thread reads; windows never change.
    """

    def __init__(self, layers: Collection[int], num_tokens: int) -> None:
        self.layers = tuple(sorted(layers))
        self._limits = {True: num_tokens // _HELD_OUT, False: num_tokens - num_tokens // _HELD_OUT}
        self._windows: dict[bool, deque[Window]] = {True: deque(), False: deque()}  # by whether they are held out
        self._streams: dict[int, _OpenText] = {}
        self._lock = threading.Lock()
        self._rng = random.Random(0)
        self._num_requests = 0
        self.num_windows = 0  # ever made
        self.num_added = 0  # rows ever added to learn from

    def begin(self, request_id: int, num_prompt: int, is_greedy: bool) -> None:
        """A request begins whose first `num_prompt` tokens the target does not write."""
        self._streams[request_id] = _OpenText(num_prompt, is_greedy)

    def add(self, rows: HiddenRows) -> None:
        """Copy a request's next rows. Positions that come again after a preemption are left out, a gap (a prefix that
        was adopted) begins a new window.
        """
        stream = self._streams.get(rows.request_id)
        if stream is None or rows.stop <= stream.stop:
            return
        if stream.is_held_out is None:
            self._num_requests += 1
            stream.is_held_out = self._num_requests % _HELD_OUT == 0
        if rows.start > stream.stop:
            stream.tokens, stream.pieces, stream.start = [], [], rows.start  # the token behind them is not known
        rows = rows.after(stream.stop)
        stream.next_token = rows.next_token
        stream.tokens += rows.tokens
        stream.pieces.append({layer: rows.states[layer] for layer in self.layers})
        while len(stream.tokens) >= WINDOW_ROWS:
            self._take(stream, WINDOW_ROWS)

    def reject(self, request_id: int, position: int) -> None:
        """The draft token for `position` was rejected."""
        if request_id in self._streams:
            self._streams[request_id].rejected.add(position)

    def end(self, request_id: int) -> None:
        """A request is over."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and len(stream.tokens) >= _FEWEST_ROWS:
            self._take(stream, len(stream.tokens))

    def sample(self) -> Window | None:
        """A window to learn from, the likelier the more draft tokens were rejected in it; None when there is none."""
        with self._lock:
            known = list(self._windows[False])
        if not known:
            return None
        return self._rng.choices(known, [1 + window.num_rejected for window in known])[0]

    def held_out(self, since: int = 0) -> list[Window]:
        """The held-out windows, oldest first; those from number `since` on."""
        with self._lock:
            return [window for window in self._windows[True] if window.number >= since]

    def clear(self) -> None:
        """Forget every text."""
        with self._lock:
            for windows in self._windows.values():
                windows.clear()
        self._streams.clear()

    @property
    def num_tokens(self) -> int:
        """Rows in memory that are in a window."""
        with self._lock:
            return sum(window.num_rows for windows in self._windows.values() for window in windows)

    @torch.inference_mode(False)  # what is learnt from must be fit for gradients, wherever it was computed
    def _take(self, stream: _OpenText, num_rows: int) -> None:
        """Make a window of the first `num_rows` rows of a stream, unless the target wrote nothing of it."""
        tokens = [*stream.tokens, stream.next_token][: num_rows + 1]
        stop = stream.start + num_rows
        wanted = [position >= stream.num_prompt for position in range(stream.start, stop + 1)]
        joined = {layer: torch.cat([piece[layer] for piece in stream.pieces]) for layer in self.layers}
        if sum(wanted) > 1:
            self._keep(stream, tokens, wanted, {layer: rows[:num_rows].clone() for layer, rows in joined.items()})
        stream.rejected = {position for position in stream.rejected if position > stop}
        stream.tokens = stream.tokens[num_rows:]
        stream.pieces = [{layer: rows[num_rows:] for layer, rows in joined.items()}]
        stream.start = stop

    def _keep(
        self, stream: _OpenText, tokens: Sequence[int], wanted: Sequence[bool], states: Mapping[int, Tensor]
    ) -> None:
        assert stream.is_held_out is not None
        places = range(stream.start + 1, stream.start + len(tokens))
        window = Window(
            tokens=torch.tensor(tokens),
            wanted=torch.tensor(wanted),
            states=states,
            is_greedy=stream.is_greedy,
            num_rejected=sum(position in places for position in stream.rejected),
            number=self.num_windows,
        )
        self.num_windows += 1
        if not stream.is_held_out:
            self.num_added += window.num_rows
        with self._lock:
            kept = self._windows[stream.is_held_out]
            kept.append(window)
            excess = sum(one.num_rows for one in kept) - self._limits[stream.is_held_out]
            while excess > 0 and len(kept) > 1:
                excess -= kept.popleft().num_rows
