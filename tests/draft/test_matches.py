"""The index behind the lookups, and the trees grown from it, against slow and obvious twins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.draft.lookup_tree import MATCH_LIMIT, NO_TOKEN, LookupTree, MatchIndex, assemble, grow_tree

texts = st.lists(st.integers(0, 2), max_size=60)  # three tokens: matches of every length
broken_texts = st.lists(st.integers(-1, 2), max_size=60)  # with separators


def scan(text: Sequence[int], end: Sequence[int], depth: int) -> list[tuple[int, list[int]]]:
    """Every place with a token at it that agrees with the last two of `end`, latest first: how far, and what
    follows.
    """
    found = []
    for place in range(len(text) - 1, 1, -1):
        length = 0
        while length < min(len(end), MATCH_LIMIT, place) and text[place - 1 - length] == end[-1 - length] != NO_TOKEN:
            length += 1
        if length >= 2 and text[place] != NO_TOKEN:
            written = list(text)
            for i in range(depth):  # copy token by token, reading what was copied before
                written.append(written[place + i])
            found.append((length, written[place : place + depth]))
    return found


def looked_up(index: MatchIndex, end: Sequence[int], depth: int, most: int = 1000) -> list[tuple[int, list[int]]]:
    matches = index.matches(end, depth, most)
    return [] if matches is None else list(zip(matches.lengths, matches.following, strict=True))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts, st.integers(1, 12))
def test_index_equals_scan(text: list[int], depth: int) -> None:
    index = MatchIndex(text)
    assert looked_up(index, index.end(), depth) == scan(text, text, depth)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(broken_texts, texts, st.integers(1, 6))
def test_another_texts_end_and_separators(text: list[int], end: list[int], depth: int) -> None:
    """No match reaches over a separator; what follows may."""
    assert looked_up(MatchIndex(text), end[-MATCH_LIMIT:], depth) == scan(text, end, depth)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(broken_texts, st.data())
def test_growing_in_pieces_equals_indexing_at_once(text: list[int], data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    index = MatchIndex(text[:first])
    index.matches(index.end(), 3)  # looking does not change anything
    index.extend(text[first:second])
    index.extend(text[second:])
    assert index.end(len(text)) == text
    assert looked_up(index, [0, 1], 4) == looked_up(MatchIndex(text), [0, 1], 4) == scan(text, [0, 1], 4)


def test_the_latest_places_and_those_that_agree_further() -> None:
    """Tokens that stood a hundred times do not bury the one place that agrees with six."""
    text = [9, 8, 7, 6, 1, 2, 5, *([6, 1, 2, 3] * 100), 9, 8, 7, 6, 1, 2]
    found = looked_up(MatchIndex(text), text, 1, most=48)
    assert len(found) == 48
    assert found[0] == (3, [3])  # latest first
    assert found[-1] == (6, [5])
    assert looked_up(MatchIndex(text), text, 1, most=1) == [(6, [5])]


def test_hash_collisions_are_no_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.draft.lookup_tree.hash", lambda _: 0, raising=False)
    text = [5, 6, 7, 8, 9, 5, 6, 1, 2, 3, 5, 6]
    assert looked_up(MatchIndex(text), text, 1) == scan(text, text, 1) != []
    assert MatchIndex(text).matches([4, 4], 1) is None


def brute_force(following: list[list[int]], budget: int, branching: int, doubt: float, least: float) -> float:
    """The most expected tokens of any tree: the `budget` largest estimates of all prefixes."""
    estimates: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(len(following[0])):
        for prefix in [prefix for prefix in estimates if len(prefix) == depth]:
            rows = [row for row in following if tuple(row[:depth]) == prefix]
            counts = {
                token: sum(row[depth] == token for row in rows) for token in {row[depth] for row in rows} - {NO_TOKEN}
            }
            for token in sorted(counts, key=counts.__getitem__, reverse=True)[:branching]:
                estimates[*prefix, token] = estimates[prefix] * counts[token] / (len(rows) + doubt)
    return sum(
        sorted((value for prefix, value in estimates.items() if prefix and value >= least), reverse=True)[:budget]
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(-1, 1), min_size=4, max_size=4), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([1, 2]),  # two is all there are
    st.sampled_from([0.0, 0.25, 0.5]),
)
def test_grown_trees_are_the_best_ones(following: list[list[int]], budget: int, branching: int, doubt: float) -> None:
    if branching == 1:  # which of two equals is the only child would matter to the twin
        following = following[:1]
    tree = grow_tree(following, budget, branching, doubt, 0.1)
    assert tree.score == pytest.approx(brute_force(following, budget, branching, doubt, 0.1))
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens) <= budget
    assert NO_TOKEN not in tree.tokens


@pytest.mark.parametrize(
    ("following", "branching", "tokens", "parents"),
    [
        ([[1, 2, 3]], 1, (1, 2, 3), (-1, 0, 1)),
        ([[1, 2], [3, 4]], 1, (1, 2), (-1, 0)),  # of two said equally often the latest
        ([[3, 4], [1, 2], [1, 5]], 1, (1, 2), (-1, 0)),  # the more frequent before the latest
        ([[3, 4], [1, 2], [1, 2]], 2, (1, 2, 3, 4), (-1, 0, -1, 2)),  # where places disagree, both
        ([[NO_TOKEN, 4], [1, NO_TOKEN]], 2, (1,), (-1,)),  # a text ends here
    ],
)
def test_trees_by_hand(
    following: list[list[int]], branching: int, tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    tree = grow_tree(following, 9, branching, 0.1, 0.1)
    assert (tree.tokens, tree.parents) == (tokens, parents)


def test_short_agreement_earns_few_draft_tokens() -> None:
    """One place that agrees with n tokens: the chain grows with n."""
    lengths = [len(grow_tree([list(range(100))], 100, 2, 1 / agreed, 0.12).tokens) for agreed in (2, 3, 6, 12, 32)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 8 < 50 < lengths[-1]


def test_nothing_is_grown_without_budget() -> None:
    assert grow_tree([[1, 2]], 0, 2, 0.1, 0.1) == grow_tree([], 4, 2, 0.1, 0.1) == LookupTree()


def test_assembled_in_order() -> None:
    draft = assemble("x", [LookupTree((1, 2), (-1, -1)), LookupTree(), LookupTree((3,), (-1,))])
    assert (draft.tokens.tolist(), draft.parents, draft.offsets, draft.drafters) == (
        [1, 2, 3],
        (-1, -1, -1),
        (0, 2, 2, 3),
        ("x", None, "x"),
    )
    assert list(itertools.pairwise(draft.offsets)) == [(0, 2), (2, 2), (2, 3)]
