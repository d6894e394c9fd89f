"""Draft trees: best-first growth and merging against brute force, ties, ancestors, drafters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.draft.tree import TreeNode, best_nodes, grow_best_first, merge_trees

SEEDS = st.integers(0, 10_000)
Path = tuple[int, ...]


def paths_of(nodes: Sequence[TreeNode]) -> list[Path]:
    paths: list[Path] = []
    for place, node in enumerate(nodes):
        assert -1 <= node.parent < place, "a parent comes before its child"
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.token))
    assert len(set(paths)) == len(paths), "one node stands twice"
    return paths


def tree_of(estimates: dict[Path, float], drafter: str | None = None) -> list[TreeNode]:
    """Paths (each after its beginning) with their estimates as a tree."""
    places = {path: place for place, path in enumerate(estimates)}
    return [
        TreeNode(path[-1], places[path[:-1]] if len(path) > 1 else -1, chance, drafter)
        for path, chance in estimates.items()
    ]


def chance_tables(seed: int, width: int = 3, depth: int = 3) -> dict[Path, list[float]]:
    """A distribution of the next token after every path; some tokens are impossible, some distributions are a point."""
    rng = np.random.default_rng(seed)
    tables = {}
    for length in range(depth):
        for path in itertools.product(range(width), repeat=length):
            distribution = rng.dirichlet(np.full(width, 0.7)) * (rng.random(width) > 0.2)
            tables[path] = [1.0, 0.0, 0.0] if rng.random() < 0.15 else distribution.tolist()
    return tables


def grown(tables: dict[Path, list[float]], budget: int) -> list[TreeNode]:
    paths: dict[int, Path] = {-1: ()}

    def ranked(path: Path) -> list[tuple[float, int]]:
        return sorted(
            ((chance, token) for token, chance in enumerate(tables.get(path, [])) if chance > 0),
            key=lambda pair: -pair[0],
        )

    def children(node: TreeNode) -> list[tuple[float, int]]:
        path = (*paths[node.parent], node.token)
        paths[len(paths) - 1] = path
        return ranked(path)

    return grow_best_first(ranked(()), children, budget)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.integers(0, 9))
def test_best_first_finds_the_likeliest_paths(seed: int, budget: int) -> None:
    """Against every path of the distribution, whose best `budget` are the best tree of that size."""
    tables = chance_tables(seed)
    every = []
    for length in range(1, 4):
        for path in itertools.product(range(3), repeat=length):
            chance = float(np.prod([tables[path[:i]][token] for i, token in enumerate(path)]))
            every += [chance] if chance > 0 else []
    nodes = grown(tables, budget)
    assert sum(node.estimate for node in nodes) == pytest.approx(sum(sorted(every, reverse=True)[:budget]))
    assert [node.estimate for node in nodes] == sorted((node.estimate for node in nodes), reverse=True)
    for node, path in zip(nodes, paths_of(nodes), strict=True):
        assert node.estimate == pytest.approx(float(np.prod([tables[path[:i]][token] for i, token in enumerate(path)])))


def test_a_sure_child_comes_after_its_parent() -> None:
    nodes = grow_best_first([(0.5, 7), (0.5, 8)], lambda node: [(1.0, node.token + 10)], 4)
    assert [(node.token, node.parent) for node in nodes] == [(7, -1), (8, -1), (17, 0), (18, 1)]


def closed_sets(parents: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    return [
        one
        for one in itertools.combinations(range(len(parents)), budget)
        if all(parents[n] < 0 or parents[n] in one for n in one)
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.integers(0, 5))
def test_the_best_nodes_are_the_best_closed_set(seed: int, budget: int) -> None:
    """Estimates on a coarse grid, so that many are equal."""
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(-1, node)) for node in range(8)]
    estimates: list[float] = []
    for node in range(8):
        estimates.append(float(rng.choice([0.25, 0.5, 1.0])) * (1.0 if parents[node] < 0 else estimates[parents[node]]))
    chosen = best_nodes(parents, estimates, budget)
    assert tuple(sorted(chosen)) in closed_sets(parents, budget)
    assert [estimates[n] for n in chosen] == sorted((estimates[n] for n in chosen), reverse=True)
    assert sum(estimates[n] for n in chosen) == max(
        sum(estimates[n] for n in one) for one in closed_sets(parents, budget)
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.integers(0, 7))
def test_merged_trees(seed: int, budget: int) -> None:
    """Closed under ancestors, the highest estimates of all, each by who gave it, in every order of growth."""
    rng = np.random.default_rng(seed)
    trees, best = [], dict[Path, tuple[float, str]]()
    for drafter in "abc"[: rng.integers(1, 4)]:
        estimates: dict[Path, float] = {}
        for _ in range(int(rng.integers(0, 6))):
            parent = [(), *estimates][rng.integers(0, len(estimates) + 1)]
            path = (*parent, int(rng.integers(0, 3)))
            estimates.setdefault(path, float(rng.choice([0.5, 0.8, 1.0])) * estimates.get(parent, 1.0))
        trees.append(tree_of(estimates, drafter))
        for path, chance in estimates.items():
            best[path] = max(best.get(path, (0.0, "")), (chance, drafter), key=lambda pair: pair[0])
    merged = merge_trees(trees, budget)
    assert len(merged) == min(budget, len(best))
    found = dict(zip(paths_of(merged), merged, strict=True))
    assert {path: (node.estimate, node.drafter) for path, node in found.items()}.items() <= best.items()
    assert sorted(node.estimate for node in merged) == sorted(
        sorted((chance for chance, _ in best.values()), reverse=True)[:budget]
    )


def test_the_earlier_tree_is_the_drafter_on_a_tie_and_no_child_is_likelier_than_its_parent() -> None:
    one, two = tree_of({(1,): 0.5, (1, 2): 0.9}, "one"), tree_of({(1,): 0.5, (3,): 0.4}, "two")
    assert merge_trees([one, two], 3) == [
        TreeNode(1, -1, 0.5, "one"),
        TreeNode(2, 0, 0.5, "one"),
        TreeNode(3, -1, 0.4, "two"),
    ]
    assert merge_trees([two, one], 2) == [TreeNode(1, -1, 0.5, "two"), TreeNode(2, 0, 0.5, "one")]
    assert merge_trees([], 4) == merge_trees([one], 0) == []
