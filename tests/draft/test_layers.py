"""Which layers draft and how far: against brute force, by hand, and at the ends."""

from __future__ import annotations

import itertools
import random

import pytest

from foretoken.draft.layers import (
    best_exit,
    best_num_draft,
    changed_skips,
    exit_candidates,
    first_skips,
    relative_speed,
)


def test_speed_by_hand() -> None:
    """24 layers and a head worth 2; exit 6, three guesses that stand with 0.5: 1.875 tokens for 3 * 8 + 26 instead of
    26.
    """
    assert relative_speed(0.5, 3, 8, 26) == pytest.approx(1.875 * 26 / 50)
    assert relative_speed(0.9, 0, 8, 26) == 1.0  # plain decoding
    assert relative_speed(1.0, 4, 0, 26) == 5.0  # free and always right


@pytest.mark.parametrize("seed", range(20))
def test_the_best_plan_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    num_layers, head, most = rng.randint(2, 48), rng.uniform(0, 8), rng.randint(0, 12)
    rates = {layer: rng.random() for layer in exit_candidates(num_layers)}
    layer, num_draft = best_exit(rates, most, num_layers, head)
    whole = num_layers + head
    speeds = [relative_speed(rates[e], n, e + head, whole) for e, n in itertools.product(rates, range(most + 1))]
    assert relative_speed(rates[layer], num_draft, layer + head, whole) == max(speeds)
    assert num_draft <= most


def test_what_pays_and_what_does_not() -> None:
    assert best_exit({2: 1.0, 6: 1.0}, 8, 12, 1) == (2, 8)  # always right: the shallowest, as far as allowed
    assert best_exit({2: 0.1, 9: 0.7}, 8, 12, 1)[1] == 0  # a guess costs more than it brings
    assert best_exit({1: 0.2, 6: 0.95}, 8, 24, 1)[0] == 6  # deeper where the shallow one is wrong
    assert best_num_draft(0.8, 1, 20, 16) == 8  # METHODS of a draft at 5 % of a step
    assert best_num_draft(0.0, 0, 20, 16) == 0  # nothing gained by a free guess that never stands
    assert best_num_draft(1.0, 1, 20, 0) == 0


def test_candidates_lie_inside() -> None:
    assert exit_candidates(2) == (1,)
    assert exit_candidates(24) == (1, 3, 6, 12, 18)
    for num_layers in range(2, 100):
        assert all(1 <= layer < num_layers for layer in exit_candidates(num_layers))


@pytest.mark.parametrize("num_layers", [3, 4, 12])
def test_neighbours_of_a_set_of_skipped_layers(num_layers: int) -> None:
    """They differ by one layer more, less, or another; the first and last layer always run, and every set can be
    reached.
    """
    rng, skipped, seen = random.Random(0), first_skips(num_layers), set()
    for _ in range(20_000 if num_layers == 12 else 200):
        other = changed_skips(skipped, num_layers, [rng.random() for _ in range(3)])
        assert other
        assert not other & {0, num_layers - 1}
        assert len(other ^ skipped) in (0, 1, 2)
        assert abs(len(other) - len(skipped)) <= 1
        skipped = other
        seen.add(skipped)
    assert len(seen) == 2 ** (num_layers - 2) - 1
