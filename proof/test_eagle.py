"""Drafts of every kind of EAGLE head in every shape are those of a fresh run over the text; the tests take some."""

from __future__ import annotations

import itertools

import pytest

from foretoken.model.decoder import Decoder
from tests.draft.test_eagle import FRESH_RUNS, TIGHT, WHOLE, check_fresh_run, decoder

__all__ = ["decoder"]  # a fixture
ALL = [
    (kind, tree, *room)
    for kind, tree, room in itertools.product(("1", "3"), ("chain", "static", "best_first"), (WHOLE, TIGHT))
]


@pytest.mark.parametrize(("kind", "tree", "num_slots", "chunk"), [one for one in ALL if one not in FRESH_RUNS])
def test_every_draft_is_that_of_a_fresh_run_over_the_text(
    decoder: Decoder, kind: str, tree: str, num_slots: int, chunk: int
) -> None:
    check_fresh_run(decoder, kind, tree, num_slots, chunk)
