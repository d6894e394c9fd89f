"""Token recycling: what the matrix holds, and that its trees are the likeliest there are.

That the matrix equals the target's top-8 after every verified row is checked after each round of every engine test by
`Watched`.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.core import Draft, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.recycling import NUM_RANKS, RecyclingDrafter, grow_ranks
from tests.helpers.checkpoints import token_ids
from tests.helpers.rounds import Alone
from tests.helpers.specs import key_of
from tests.helpers.watch import Watched

VOCAB = 20


def feedback_of(*favourites: int) -> Feedback:
    """Rows whose likeliest tokens are f, f + 1, ... f + 7."""
    logits = torch.zeros(len(favourites), VOCAB)
    for row, first in enumerate(favourites):
        logits[row, [(first + rank) % VOCAB for rank in range(NUM_RANKS)]] = torch.arange(NUM_RANKS, 0, -1).float()
    return Feedback(logits, tuple(range(len(favourites))))


def ranks_from(first: int) -> list[int]:
    return [(first + rank) % VOCAB for rank in range(NUM_RANKS)]


def test_every_row_teaches_rejected_ones_too() -> None:
    drafter = RecyclingDrafter(VOCAB)
    one = Alone(drafter, (3, 4))
    draft = Draft(torch.tensor([5, 6, 7]), (-1, -1, 0), (0, 3), ("recycling",))
    drafter.commit(one.batch(3), draft, Verdict(((0,),), ((5,),), (9,), ("residual",)), feedback_of(10, 11, 12, 13))
    assert [drafter.successors[token].tolist() for token in (4, 5, 6, 7)] == [
        ranks_from(first) for first in (10, 11, 12, 13)
    ]
    assert (drafter.successors[[3, 9]] == -1).all()  # the prompt's other tokens and the new anchor have no row yet


def test_of_a_token_in_several_rows_the_deepest_accepted_wins() -> None:
    drafter = RecyclingDrafter(VOCAB)
    one = Alone(drafter, (3, 4))
    draft = Draft(torch.tensor([4, 5, 4, 5, 4]), (-1, 0, 1, -1, 3), (0, 5), ("recycling",))
    verdict = Verdict(((0, 1),), ((4, 5),), (9,), ("residual",))  # accepted: node 0 (4) and node 1 (5)
    drafter.commit(one.batch(5), draft, verdict, feedback_of(1, 2, 3, 4, 5, 6))
    assert drafter.successors[4].tolist() == ranks_from(2)
    assert drafter.successors[5].tolist() == ranks_from(3)


def test_a_vocabulary_smaller_than_the_ranks() -> None:
    drafter = RecyclingDrafter(3)
    one = Alone(drafter, (1,))
    one.emit(2, feedback=Feedback(torch.tensor([[0.0, 1.0, 2.0]]), (0,)))
    assert drafter.successors[1].tolist() == [2, 1, 0, -1, -1, -1, -1, -1]


def test_ranks_that_were_right_are_learned() -> None:
    """The second rank is right every time: it comes to lead, and single-child drafts follow it."""
    drafter = RecyclingDrafter(VOCAB)
    one = Alone(drafter, (0,))
    for token in range(1, 300):
        one.emit(token % VOCAB, feedback=feedback_of(token - 1))  # the row says token - 1 first, token second
    assert int(np.argmax(drafter.chances)) == 1
    assert drafter.chances[1] > 0.5
    assert drafter.chances[0] < 0.2
    last = one.text[-1]
    one.takes_trees = False
    assert one.chain(3) == [(last + 1) % VOCAB, (last + 2) % VOCAB, (last + 3) % VOCAB]
    for token in range(5000):
        one.emit(0, feedback=feedback_of(token))
    assert drafter._tries <= 2001  # old texts fade


def test_nothing_is_drafted_from_unknown_tokens() -> None:
    assert Alone(RecyclingDrafter(VOCAB), (3, 4)).propose(7).num_nodes == 0


def paths_of(successors: np.ndarray, anchor: int, chances: list[float], depth: int) -> list[float]:
    """Estimates of all paths, likeliest first."""
    found = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(NUM_RANKS), repeat=length):
            token, estimate = anchor, 1.0
            for rank in ranks:
                token = int(successors[token, rank]) if token >= 0 else -1
                estimate *= chances[rank]
            if token >= 0:
                found.append(estimate)
    return sorted(found, reverse=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.integers(1, 12))
def test_the_tree_holds_the_likeliest_paths(seed: int, budget: int) -> None:
    """Against all paths; some successors are unknown, and ranks are not always in order."""
    rng = np.random.default_rng(seed)
    successors = np.stack([rng.permutation(VOCAB)[:NUM_RANKS] for _ in range(VOCAB)]).astype(np.int32)
    successors[rng.random(successors.shape) < 0.3] = -1
    chances = (rng.dirichlet(np.ones(NUM_RANKS)) * 0.9).tolist()
    if max(chances) > 0.6:
        chances = [0.5 * chance for chance in chances]
    tree = grow_ranks(successors, 3, chances, budget, NUM_RANKS)
    expected = paths_of(successors, 3, chances, 3)
    if len(tree.tokens) == budget and (
        not expected or max(chances) ** 4 < expected[min(budget, len(expected)) - 1]
    ):  # no deeper path could be in it
        assert tree.score == pytest.approx(sum(expected[:budget]))
    assert all(parent < node for node, parent in enumerate(tree.parents))
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert token in successors[3 if parent < 0 else tree.tokens[parent]]
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens)


def test_chains_take_the_best_rank_only() -> None:
    successors = np.tile(np.arange(NUM_RANKS, dtype=np.int32), (VOCAB, 1))
    tree = grow_ranks(successors, 0, [0.1, 0.5, *[0.05] * 6], 4, 1)
    assert (tree.tokens, tree.parents) == ((1, 1, 1, 1), (-1, 0, 1, 2))


def test_the_matrix_follows_the_target_through_the_engine(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of rejected and accepted rows, batches mixed with a draft model: checked after every round by `Watched`."""
    spec = SpecConfig("recycling", num_draft=7)
    llm.prepare(spec)
    watched = Watched(RecyclingDrafter(llm.target.vocab_size), llm.target.vocab_size)
    monkeypatch.setitem(llm._drafters.drafters, key_of("recycling"), watched)
    prompts = [token_ids(5 + i, seed=i) for i in range(8)]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=(0.0, 0.8)[i % 2], seed=i) for i in range(8)]
    specs = [spec if i % 4 else SpecConfig("draft_model", str(pair.draft), num_draft=3) for i in range(8)]
    outputs = llm.generate(prompts, params, specs)
    assert watched.num_trees > 10
    assert sum(out.stats.accepted_by.get("recycling", 0) for out in outputs) > 10
