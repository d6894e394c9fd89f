"""Prompt lookup against a slow, obvious twin that scans the whole text each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request
from foretoken.draft.ngram import MIN_ESTIMATE, NgramDrafter
from tests.draft.test_matches import scan
from tests.helpers.rounds import Alone

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)  # fewer places than are kept


def twin(text: list[int], num_draft: int) -> list[int]:
    """The chain: of all places that agree longest, step by step what most of those that said the same so far say, the
    latest first, while it is likely enough."""
    places = scan(text, text, num_draft)
    longest = max((length for length, _ in places), default=0)
    following = [tokens for length, tokens in places if length == longest]
    chain: list[int] = []
    estimate = 1.0
    while following and len(chain) < num_draft:
        token, count = Counter(tokens[len(chain)] for tokens in following).most_common(1)[0]
        estimate *= count / (len(following) + 1 / longest)
        if estimate < MIN_ESTIMATE:
            break
        following = [tokens for tokens in following if tokens[len(chain)] == token]
        chain.append(token)
    return chain


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts, st.integers(0, 12))
def test_draft_token_equals_the_twin(text: list[int], num_draft: int) -> None:
    assert Alone(NgramDrafter(), text, takes_trees=False).chain(num_draft) == twin(text, num_draft)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(texts, texts, st.integers(1, 8))
def test_what_was_emitted_is_looked_up_like_the_prompt(prompt: list[int], answer: list[int], num_draft: int) -> None:
    alone = Alone(NgramDrafter(), prompt, takes_trees=False)
    alone.emit(*answer)
    assert alone.chain(num_draft) == twin([*prompt, *answer], num_draft)


@pytest.mark.parametrize(
    ("text", "num_draft", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 5, [3, 4, 1, 2, 3]),  # on through the text's own end
        ([1, 2, 3, 4, 5, 1, 2, 3], 1, [4]),  # never more than asked
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 1, [4]),  # said once each: the most recent place
        ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 4, 9, 1, 2], 1, [3]),  # said more often
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 3, [3, 8, 1]),  # a longer match beats a more recent one
        ([5, 1, 2, 3, 4], 4, []),  # no match
        ([1, 2, 3, 1], 4, []),  # one token in common is noise
        ([1, 2], 4, []),  # the end of the text is no match for itself
        ([1], 4, []),
        ([1, 1, 1], 4, [1, 1, 1, 1]),  # a run overlaps itself and goes on
    ],
)
def test_by_hand(text: list[int], num_draft: int, expected: list[int]) -> None:
    assert Alone(NgramDrafter(), text, takes_trees=False).chain(num_draft) == expected


def test_the_draft_grows_with_the_match() -> None:
    unit = list(range(100))
    lengths = [
        len(Alone(NgramDrafter(), [*unit, *unit[:seen]]).chain(1000)) for seen in (0, 1, 2, 3, 6, 12, 20, 32, 60)
    ]
    assert lengths[:2] == [0, 0]
    assert lengths == sorted(lengths)
    assert 3 < lengths[2] < 8 < 20 < lengths[-1] < 100


def test_a_tree_where_places_disagree_and_a_chain_for_rules_that_take_chains() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2]
    draft = Alone(NgramDrafter(), text).propose(4)
    assert draft.paths(0) == [(), (5,), (3,), (5, 6), (3, 4)]
    assert Alone(NgramDrafter(), text, takes_trees=False).chain(4) == [5, 6, 8]


def test_no_match_is_an_empty_draft() -> None:
    draft = Alone(NgramDrafter(), range(5)).propose(4)
    assert (draft.num_nodes, draft.lengths, draft.drafters, draft.mass) == (0, (0,), (None,), None)


def test_requests_do_not_see_each_others_text() -> None:
    drafter = NgramDrafter()
    first, second = Alone(drafter, (1, 2, 3, 4), 0), Alone(drafter, (9, 1, 2), 1)
    assert second.chain(4) == []
    first.finish()
    again = Alone(drafter, (3, 1, 2), 0)  # the number is used again: nothing is left of the first
    assert again.chain(4) == []


def test_several_requests_are_laid_out_in_order() -> None:
    drafter = NgramDrafter()
    requests = [
        Request(i, text, SamplingParams(), SpecConfig(), 0)
        for i, text in enumerate([(1, 2, 3, 1, 2), (4, 5), (6, 7, 6, 7, 6, 7)])
    ]
    for request in requests:
        drafter.start(request)
    draft = drafter.propose(
        Batch(tuple(BatchEntry(r, len(r.prompt_ids) - 1, r.prompt_ids[-1:], True, 3) for r in requests))
    )
    assert draft.offsets == (0, 3, 3, 6)
    assert draft.tokens.tolist() == [3, 1, 2, 6, 7, 6]
    assert draft.parents == (-1, 0, 1, -1, 0, 1)
    assert draft.drafters == ("ngram", None, "ngram")
