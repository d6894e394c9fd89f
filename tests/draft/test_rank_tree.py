"""Trees of ranks."""

from __future__ import annotations

import itertools

import pytest

from foretoken.draft.medusa import RankChances, RankTree, best_ranks


def counted(rows: list[list[int]], num_ranks: int = 3) -> RankChances:
    """Chances after `rows` of right ranks by place, -1 for none."""
    chances = RankChances(len(rows), num_ranks)
    for place, ranks in enumerate(rows):
        for rank in ranks:
            chances.count(place, None if rank < 0 else rank)
    return chances


@pytest.mark.parametrize("budget", [1, 4, 9, 20])
def test_the_tree_holds_the_likeliest_tuples_of_all(budget: int) -> None:
    chances = counted([[0] * 30 + [1] * 9 + [-1] * 8, [1] * 20 + [2] * 5 + [-1] * 30, [0] * 5 + [-1] * 40])
    by_rank = [{rank: chance for chance, rank in chances.at(place)} for place in range(3)]
    every = []
    for depth in (1, 2, 3):
        for ranks in itertools.product(range(3), repeat=depth):
            product = 1.0
            for place, rank in enumerate(ranks):
                product *= by_rank[place][rank]
            every.append((product, ranks))
    expected = sorted((product for product, _ in every), reverse=True)[:budget]
    tree = best_ranks(chances, budget, 3)
    assert [node.estimate for node in tree] == pytest.approx(expected)
    assert all(-1 <= node.parent < number for number, node in enumerate(tree))


def test_counts_move_the_order_of_ranks() -> None:
    assert [rank for _, rank in counted([[]]).at(0)] == [0, 1, 2]
    chances = counted([[2] * 20])
    assert next(rank for _, rank in chances.at(0)) == 2
    assert sum(chance for chance, _ in chances.at(0)) <= 1


def test_ranks_are_counted_along_what_was_emitted() -> None:
    """At the place behind the last draft token that stood as well, if predictions were looked at there; no further."""
    chances = RankChances(3, 3)
    tree = RankTree(best_ranks(chances, 6, 3))
    frontier, tops = tree.inner([-1]), iter(([5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]))
    while frontier:
        frontier = [child for node in frontier for child in tree.inner(tree.fill(node, next(tops)))]
    assert len(set(zip(tree.tokens, (node.parent for node in tree.ranks), strict=True))) == 6
    tree.count((5, 9, 99), chances)
    assert [seen - 8 for seen in chances._seen[:2]] == [1, 1]
    right = [
        [chances._right[place][rank] - RankChances(3, 3)._right[place][rank] for rank in range(3)] for place in (0, 1)
    ]
    assert right[0] == pytest.approx([1, 0, 0])
    assert right[1] == pytest.approx([0, 1, 0])
    tree.count((77,), chances)
    assert chances._seen[0] - 8 == 2
