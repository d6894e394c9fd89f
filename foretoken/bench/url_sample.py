"""One request of a load and what it took."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from foretoken.backend.http_stream import Stream


@dataclass
class UrlSample(Stream):
    """One request as the client saw it; times in seconds since the start of the run, `arrival_s` when it was due."""

    index: int = 0
    slice: str = ""
    arrival_s: float = 0.0

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
