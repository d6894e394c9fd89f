"""What is kept of live requests: sums by block and by side, so that memory grows with neither requests nor answers.

A block keeps the mean of (log of seconds per token, logs of the lengths) and their products about it, updated one
request at a time (Welford, 1962); quantiles of times are read from histograms whose bins are 1 % wide.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from foretoken.measure.stats import Array

BIN_WIDTH = 0.01  # relative, of a histogram of times
_SHORTEST_S, _LONGEST_S = 1e-6, 1e6


@dataclass(frozen=True)
class LiveTurn:
    """The block of a moment: which server has it, and whether requests that arrive now are counted."""

    block: int
    side: str
    is_counted: bool


@dataclass(frozen=True)
class LiveRequest:
    """A request that has ended: its turn, seconds until its last byte and its first, bytes of its body, and the tokens
    of its answer (0: not known). `error` is "" or why it failed.
    """

    turn: LiveTurn
    e2e_s: float
    ttft_s: float
    num_prompt_bytes: int
    num_tokens: int
    error: str = ""

    @property
    def is_compared(self) -> bool:
        """Whether its time per token is compared."""
        return self.turn.is_counted and not self.error and self.num_tokens > 0 and self.e2e_s > 0


@dataclass
class LiveBlock:
    """The compared requests of one block: mean [3] of log(seconds per token), log(1 + bytes of the prompt) and
    log(tokens), and the sums [3, 3] of the products of their differences from it.
    """

    block: int
    side: str
    num_compared: int = 0
    mean: Array = field(default_factory=lambda: np.zeros(3))
    products: Array = field(default_factory=lambda: np.zeros((3, 3)))

    def add(self, request: LiveRequest) -> None:
        """Take in a request that is compared."""
        value = np.log([request.e2e_s / request.num_tokens, 1 + request.num_prompt_bytes, request.num_tokens])
        off = value - self.mean
        self.num_compared += 1
        self.mean = self.mean + off / self.num_compared
        self.products = self.products + np.outer(off, value - self.mean)


@dataclass
class TimeHistogram:
    """Counts of times in bins that are `BIN_WIDTH` wide; those beyond a microsecond and eleven days are in the last."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        """Count a time."""
        bounded = min(max(seconds, _SHORTEST_S), _LONGEST_S)
        self.counts[math.floor(math.log(bounded) / math.log1p(BIN_WIDTH))] += 1

    def quantile(self, share: float) -> float | None:
        """The middle of the bin that holds the smallest time which `share` of them do not exceed; None without any."""
        rest = max(1, math.ceil(share * self.counts.total()))
        for place, count in sorted(self.counts.items()):
            rest -= count
            if rest <= 0:
                return math.exp((place + 0.5) * math.log1p(BIN_WIDTH))
        return None


@dataclass
class LiveSide:
    """The requests of one server: how many there were, failed, were compared, came in the wash-out, or did not say how
    many tokens they have; and the times of those that were compared.
    """

    num_requests: int = 0
    num_errors: int = 0
    num_compared: int = 0
    num_early: int = 0
    num_unknown: int = 0
    times: dict[str, TimeHistogram] = field(
        default_factory=lambda: {name: TimeHistogram() for name in ("ttft", "e2e", "itl")}
    )

    def add(self, request: LiveRequest) -> None:
        """Take in any request."""
        self.num_requests += 1
        self.num_errors += bool(request.error)
        self.num_early += not request.turn.is_counted
        self.num_unknown += not request.error and not request.num_tokens
        if request.is_compared:
            self.num_compared += 1
            self.times["ttft"].add(request.ttft_s)
            self.times["e2e"].add(request.e2e_s)
            self.times["itl"].add(request.e2e_s / request.num_tokens)


class LiveSums:
    """What is kept of all requests of a comparison."""

    def __init__(self) -> None:
        self.sides = {"a": LiveSide(), "b": LiveSide()}
        self._blocks: dict[tuple[int, str], LiveBlock] = {}

    def add(self, request: LiveRequest) -> None:
        """Take in a request that has ended."""
        turn = request.turn
        self.sides[turn.side].add(request)
        if request.is_compared:
            self._blocks.setdefault((turn.block, turn.side), LiveBlock(turn.block, turn.side)).add(request)

    def blocks(self, before: int | None = None) -> list[LiveBlock]:
        """The blocks with compared requests, in their order; those before the block `before` where that is given."""
        return [one for (block, _), one in sorted(self._blocks.items()) if before is None or block < before]
