"""How many guesses are worth their rows: expected tokens against measured seconds.

One rule decides everywhere: the next guess is worth its cost iff survival / marginal cost > expected tokens / cost so far, where its
survival is the chance that it will be accepted, all guesses before it on its path included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise


def free_rows(flops: float, bandwidth: float, bytes_per_weight: float) -> float:
    """Rows of one forward that cost about as much as a single one, because the weights are read once for all of them.

    `flops` per second and `bandwidth` in bytes per second are the machine's; a weight costs two operations a row. Real kernels reach
    about 60 % of it. All requests of a step share these rows.
    """
    return flops * bytes_per_weight / (2 * bandwidth)


class StepTable:
    """Seconds of a forward by its number of rows, from measurements: straight lines between them, never falling.

    Fewer rows than any measured cost what the fewest did; beyond the most, the last slope goes on.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert seconds
        assert all(rows > 0 and cost > 0 for rows, cost in seconds.items())
        self._points: list[tuple[int, float]] = []
        for rows in sorted(seconds):  # noise must not make more rows look cheaper
            self._points.append((rows, max(seconds[rows], self._points[-1][1] if self._points else 0.0)))

    def __call__(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows."""
        points = self._points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        (low, before), (high, after) = next((pair for pair in pairwise(points) if rows <= pair[1][0]), (points[-2], points[-1]))
        return before + (after - before) * (rows - low) / (high - low)

    def free_rows(self, share: float = 0.25) -> int:
        """The most rows measured that cost at most 1 + `share` times what the fewest did."""
        return max(rows for rows, cost in self._points if cost <= (1 + share) * self._points[0][1])


def admits(survival: float, marginal_s: float, tokens: float, cost_s: float) -> bool:
    """The ratio rule: whether a guess of chance `survival` for `marginal_s` more raises tokens per second above `tokens` / `cost_s`."""
    return survival * cost_s > tokens * marginal_s


def best_budget(survivals: Sequence[float], step_s: Callable[[int], float], draft_s_per_node: float = 0.0, other_rows: int = 0) -> int:
    """How many of the guesses `survivals`, likeliest first, give the most expected tokens per second; the fewest on a tie.

    `step_s(rows)` are the seconds of the target's forward; one row is the request's own, `other_rows` are there anyway. Every count is
    tried, because real costs rise in steps: a guess that does not pay alone may pay together with those that share its step.
    The chances must be known before anything of the round is drawn.
    """
    assert all(likelier >= other for likelier, other in pairwise(survivals)), "likeliest first"
    best, tokens = 0, 1.0
    best_tokens, best_s = tokens, step_s(1 + other_rows)
    for count, survival in enumerate(survivals, start=1):
        tokens += survival
        cost_s = step_s(1 + other_rows + count) + count * draft_s_per_node
        if admits(tokens - best_tokens, cost_s - best_s, best_tokens, best_s):
            best, best_tokens, best_s = count, tokens, cost_s
    return best
