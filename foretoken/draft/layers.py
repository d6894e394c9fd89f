"""Which layers a draft of the target's own may run; costs are counted in layers.

A pass over a few rows costs what its weights weigh, whatever the rows: a draft step the layers it runs and the head, a
step of the target all layers and the head. Every draft token is taken to be accepted with the same chance once
those before it are.
"""

from __future__ import annotations

from collections.abc import Sequence


def relative_speed(rate: float, num_draft: int, draft_cost: float, target_cost: float) -> float:
    """Expected tokens per cost of rounds of `num_draft` tokens, each accepted with chance `rate`; plain decoding is 1.

    1 + a + ... + a^n tokens for n draft steps and one of the target (tokens per layer of DEL, Entezari Zarch et al.
    2504.05598).
    """
    tokens = sum(rate**place for place in range(num_draft + 1))
    return tokens * target_cost / (num_draft * draft_cost + target_cost)


def exit_candidates(num_layers: int) -> tuple[int, ...]:
    """Exit layers to choose from: the first, an eighth, a quarter, a half and three quarters of the way."""
    return tuple(sorted({max(1, num_layers * eighths // 8) for eighths in (0, 1, 2, 4, 6)} - {num_layers}))


def first_skips(num_layers: int) -> frozenset[int]:
    """Every other layer, the first and the last excepted: where the search for a set begins (SWIFT, 2410.06916, starts
    with as many).
    """
    return frozenset(range(1, num_layers - 1, 2))


def changed_skips(skipped: frozenset[int], num_layers: int, numbers: Sequence[float]) -> frozenset[int]:
    """A neighbour of a set: one layer more, one less, or one for another, as three `numbers` in [0, 1) have it.

    First and last layer are never skipped, and something always is.
    """
    inner = range(1, num_layers - 1)
    spare, used = sorted(set(inner) - skipped), sorted(skipped)
    added = frozenset(spare[int(numbers[1] * len(spare)) :][:1])
    dropped = frozenset(used[int(numbers[2] * len(used)) :][:1])
    if numbers[0] < 1 / 3 or len(used) == 1:
        return skipped | added
    if numbers[0] < 2 / 3 or not spare:
        return skipped - dropped
    return (skipped - dropped) | added
