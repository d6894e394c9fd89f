"""Which layers may draft: by hand, and at the ends."""

from __future__ import annotations

import random

import pytest

from foretoken.draft.early_exit import changed_skips, exit_candidates, first_skips, relative_speed


def test_speed_by_hand() -> None:
    """24 layers and a head worth 2; exit 6, three draft tokens that stand with 0.5: 1.875 tokens for 3 * 8 + 26 instead
    of 26.
    """
    assert relative_speed(0.5, 3, 8, 26) == pytest.approx(1.875 * 26 / 50)
    assert relative_speed(0.9, 0, 8, 26) == 1.0  # plain decoding
    assert relative_speed(1.0, 4, 0, 26) == 5.0  # free and always right


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
