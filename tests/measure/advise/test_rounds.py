"""What shorter drafts would have made of an answer, against the same drafter run with shorter drafts."""

from __future__ import annotations

import random

import pytest

from foretoken.measure.advise.rounds import AnswerRounds, DraftRound, shortened


def chain_rounds(agrees: list[bool], num_draft: int) -> list[DraftRound]:
    """The rounds of a drafter that would guess a token of the answer or not, whatever came before."""
    found, place = [], 0
    while place < len(agrees):
        accepted = 0
        while accepted < num_draft and place + accepted < len(agrees) - 1 and agrees[place + accepted]:
            accepted += 1
        found.append(DraftRound(num_draft, tuple(range(accepted))))
        place += accepted + 1
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_draft", [1, 2, 3, 5, 8])
def test_a_chain_of_any_length_follows_from_the_longest(seed: int, num_draft: int) -> None:
    """The longest draft covers the answer, so that nothing has to be supposed of a bonus token."""
    rng = random.Random(seed)
    agrees = [rng.random() < 0.7 for _ in range(60)]
    longest = chain_rounds(agrees, len(agrees))
    expected = [len(one.path) for one in chain_rounds(agrees, num_draft)]
    assert [len(one.path) for one in shortened(longest, num_draft)] == expected


@pytest.mark.parametrize("num_draft", [1, 2, 4, 9, 10])
def test_every_token_is_emitted_once_whatever_the_length(num_draft: int) -> None:
    rng = random.Random(num_draft)
    rounds = []
    for _ in range(50):
        drafted = rng.choice([0, 3, 10])
        rounds.append(DraftRound(drafted, tuple(sorted(rng.sample(range(drafted), rng.randint(0, drafted))))))
    found = shortened(rounds, num_draft)
    assert sum(one.num_emitted for one in found) == AnswerRounds("", "", 1, tuple(rounds)).num_tokens
    assert max(one.num_drafted for one in found) <= num_draft
    assert shortened(rounds, 10) == rounds


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    """Places 0, 3 and 4 of six were accepted: of four draft tokens the first two of them are."""
    whole = DraftRound(6, (0, 3, 4))
    assert whole.first(4) == DraftRound(4, (0, 3))
    assert whole.behind(1) == DraftRound(5, (2, 3))
    assert [len(one.path) for one in shortened([whole], 4)] == [2, 0]


@pytest.mark.parametrize("num_draft", range(1, 9))
def test_a_draft_that_began_inside_goes_on_behind_the_longest(num_draft: int) -> None:
    """Whatever the length, all draft tokens are accepted: none ends where the longest draft happened to end."""
    whole = [DraftRound(8, tuple(range(8)))] * 30
    found = [len(one.path) for one in shortened(whole, num_draft)]
    assert set(found[:-1]) == {num_draft}
    ended = [DraftRound(8), DraftRound(4, (0, 1, 2, 3)), DraftRound(8, (0,))]  # the second had no more to draft
    assert [one.num_drafted for one in shortened(ended, 2)][1:3] == [2, 1]


def test_what_is_drafted_behind_a_token_of_a_tree_is_below_it() -> None:
    """Of a tree with two branches one is accepted whole: the other takes no room in the drafts behind it."""
    tree = DraftRound(6, (0, 2, 4), (-1, -1, 0, 1, 2, 3))
    assert tree.behind(1) == DraftRound(2, (0, 1), (-1, 0))
    assert tree.behind(2) == DraftRound(1, (0,), (-1,))
    assert tree.first(3) == DraftRound(3, (0, 2), (-1, -1, 0))
    assert [one.path for one in shortened([tree], 1)] == [(0,), (0,)]
    joined = DraftRound(1, (0,)).followed_by(DraftRound(3, (1,), (-1, -1, 1)))
    assert joined == DraftRound(5, (0, 1, 3), (-1, 0, 1, 1, 3))


def test_a_bonus_token_counts_as_drafted_where_the_next_round_drafts() -> None:
    """Two rounds accepted whole; with two draft tokens the third token of the first is the bonus of a round that began
    inside.
    """
    rounds = [DraftRound(2, (0, 1)), DraftRound(2, (0, 1)), DraftRound(0)]
    assert [len(one.path) for one in shortened(rounds, 1)] == [1, 1, 1, 0]
    assert [one.num_drafted for one in shortened([DraftRound(1, (0,)), DraftRound(0)], 1)] == [1, 0]
