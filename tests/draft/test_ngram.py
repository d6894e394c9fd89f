"""Prompt lookup against a slow, obvious twin that scans the whole text each time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request, Verdict, empty_draft
from foretoken.draft.ngram import NgramDrafter, NgramIndex

LONGEST, SHORTEST, LIMIT = 6, 2, 32
texts = st.lists(st.integers(0, 2), max_size=60)  # three tokens: matches of every length


def scan(text: list[int]) -> tuple[int, int]:
    """Longest suffix of at most six tokens that stood before, most recent place first; then how far back the match goes."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):  # the text's own end (place = len) is no match
            if len(text) >= size and text[place - size : place] == text[-size:]:
                length = size
                while length < LIMIT and length < place and text[place - 1 - length] == text[-1 - length]:
                    length += 1
                return place, length
    return -1, 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts)
def test_index_equals_scan(text: list[int]) -> None:
    assert NgramIndex(text).match() == scan(text)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(texts, st.data())
def test_growing_in_pieces_equals_indexing_at_once(text: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    index = NgramIndex(text[:cut])
    index.match()  # looking does not change anything
    index.extend(text[cut:])
    assert index.tokens == text
    assert index.match() == scan(text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts, st.integers(0, 12))
def test_guess_equals_the_twin(text: list[int], num_draft: int) -> None:
    place, length = scan(text)
    written, guess = list(text), []
    while length and len(guess) < min(num_draft, length):  # copy token by token, reading what was copied before
        guess.append(written[place + len(guess)])
        written.append(guess[-1])
    assert guess_of(text, num_draft) == guess


def guess_of(text: list[int], num_draft: int) -> list[int]:
    drafter = NgramDrafter()
    if not text:
        return []
    request = Request(0, tuple(text), SamplingParams(), SpecConfig(), 0)
    drafter.start(request)
    return drafter.propose(Batch((BatchEntry(request, len(text) - 1, (text[-1],), True, num_draft),))).tokens.tolist()


@pytest.mark.parametrize(
    ("text", "num_draft", "guess"),
    [
        ([1, 2, 3, 4, 1, 2], 5, [3, 4]),  # a match of two earns two guesses
        ([1, 2, 3, 4, 5, 1, 2, 3], 5, [4, 5, 1]),  # of three, three
        ([1, 2, 3, 4, 5, 1, 2, 3], 1, [4]),  # never more than asked
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 1, [4]),  # the most recent place
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 3, [3, 8, 1]),  # a longer match beats a more recent one
        ([5, 1, 2, 3, 4], 4, []),  # no match
        ([1, 2, 3, 1], 4, []),  # one token in common is noise
        ([1, 2], 4, []),  # the end of the text is no match for itself
        ([1], 4, []),
        ([1, 1, 1], 4, [1, 1]),  # a run overlaps itself and goes on
        ([1, 2, 1, 2, 1, 2], 8, [1, 2, 1, 2]),  # a loop continues past the end of the text
    ],
)
def test_by_hand(text: list[int], num_draft: int, guess: list[int]) -> None:
    assert guess_of(text, num_draft) == guess


def test_the_draft_grows_with_the_match_up_to_the_limit() -> None:
    unit = list(range(100))
    lengths = [len(guess_of([*unit, *unit[:seen]], 1000)) for seen in (0, 1, 2, 3, 6, 7, 20, 32, 33, 60)]
    assert lengths == [0, 0, 2, 3, 6, 7, 20, 32, 32, 32]


def test_no_match_is_an_empty_draft_and_touches_nothing() -> None:
    drafter = NgramDrafter()
    requests = [Request(i, tuple(range(10 * i, 10 * i + 5)), SamplingParams(), SpecConfig(), 0) for i in range(3)]
    for request in requests:
        drafter.start(request)
    batch = Batch(tuple(BatchEntry(r, 4, (r.prompt_ids[-1],), True, 4) for r in requests))
    draft = drafter.propose(batch)
    assert (draft.num_nodes, draft.lengths, draft.drafters, draft.mass) == (0, (0, 0, 0), (None, None, None), None)


def test_requests_do_not_see_each_others_text() -> None:
    drafter = NgramDrafter()
    requests = [Request(0, (1, 2, 3, 4), SamplingParams(), SpecConfig(), 0), Request(1, (9, 1, 2), SamplingParams(), SpecConfig(), 0)]
    for request in requests:
        drafter.start(request)
    batch = Batch(tuple(BatchEntry(r, len(r.prompt_ids) - 1, r.prompt_ids[-1:], True, 4) for r in requests))
    assert drafter.propose(batch).num_nodes == 0
    drafter.commit(batch, empty_draft(2), Verdict(((), ()), ((), ()), (1, 3), ("bonus", "bonus")), {})
    drafter.finish(0)
    drafter.start(Request(0, (5, 6), SamplingParams(), SpecConfig(), 0))  # the number is used again: nothing is left of the first
    assert drafter._indexes[0].tokens == [5, 6]
    assert drafter._indexes[1].tokens == [9, 1, 2, 3]


def test_several_requests_are_laid_out_in_order() -> None:
    drafter = NgramDrafter()
    texts = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 6, 7, 6, 7]]
    requests = [Request(i, tuple(text), SamplingParams(), SpecConfig(), 0) for i, text in enumerate(texts)]
    for request in requests:
        drafter.start(request)
    draft = drafter.propose(Batch(tuple(BatchEntry(r, len(r.prompt_ids) - 1, r.prompt_ids[-1:], True, 3) for r in requests)))
    assert draft.offsets == (0, 2, 2, 5)
    assert torch.equal(draft.tokens, torch.tensor([3, 1, 6, 7, 6]))
    assert draft.parents == tuple(itertools.chain(range(-1, 1), range(-1, 2)))
    assert draft.drafters == ("ngram", None, "ngram")
