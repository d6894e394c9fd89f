"""Trees that a model drafts: the best ones, the distribution of the sampled ones, and what may decide their shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken import ConfigError, SamplingParams, SpecConfig
from foretoken.core import BatchEntry, Request
from foretoken.draft import branches
from foretoken.draft.branches import Growth, extend
from foretoken.draft.tree import sampled_chances, sampled_shape, share_level, static_shape
from foretoken.text.randomness import RaceNoise
from foretoken.verify import RULES
from foretoken.verify.base import race_winner
from tests.helpers.enumeration import (
    EXACT,
    Child,
    Choice,
    Drafter,
    RandomTables,
    Spot,
    Tables,
    Tokens,
    cases_of,
    chained,
    complete,
    emitted_law,
    joint,
    max_error,
)
from tests.helpers.usual import some_of

VOCAB, LENGTH = 3, 4
TARGET, LAWS = RandomTables(VOCAB, seed=81), RandomTables(VOCAB, seed=82)
# Few levels, so that small trees branch: a chain comes out otherwise.
SHAPES = [
    *(("static", budget, branching) for budget, branching in ((4, None), (6, (2, 2)), (4, (3, 1)))),
    *(("best_first", budget, branching) for budget, branching in ((4, None), (6, (2, 2)), (5, (2, 1, 1)))),
]


def growth_of(
    tree: str,
    budget: int,
    branching: object,
    temperature: float = 1.0,
    noise: RaceNoise | None = None,
    **options: object,
) -> Growth:
    spec = SpecConfig("draft_model", "d", num_draft=budget, tree=tree, branching=branching, **options)
    request = Request(0, (0,), SamplingParams(temperature=temperature), spec, 7)
    return Growth(BatchEntry(request, 0, (0,), True, budget, None, noise), budget, budget)


def grow(growth: Growth, distributions: Tables, context: Tokens = ()) -> Growth:
    while growth.frontier:
        rows = np.array([distributions[context + growth.path(node)] for node in growth.frontier])
        with np.errstate(divide="ignore"):
            extend([growth], torch.tensor(np.log(rows)))
    return growth


def spot_of(growth: Growth, node: int = -1) -> Spot:
    """The tree as the enumeration wants it."""
    kids = [n for n, parent in enumerate(growth.parents) if parent == node]
    distribution = growth.masses.get(node)
    children = [
        Child(growth.tokens[n], growth.sampled[n], spot_of(growth, n))
        for n in sorted(kids, key=lambda n: not growth.sampled[n])
    ]
    return Spot(None if distribution is None else distribution.numpy(), tuple(children))


@pytest.fixture
def drafter_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Drafter]:
    """The drafter itself, its draws answered by the enumeration."""

    def make(
        tree: str,
        budget: int,
        branching: object,
        distributions: Tables = LAWS,
        edit: Callable[[Growth], Growth] = lambda growth: growth,
        **options: object,
    ) -> Drafter:
        def propose(choice: Choice, context: Tokens) -> Spot:
            monkeypatch.setattr(
                branches, "draw", lambda rest, u: torch.tensor([choice.pick(row) for row in rest.tolist()])
            )
            return spot_of(edit(grow(growth_of(tree, budget, branching, **options), distributions, context)))

        return propose

    return make


def error(rule: str, drafter: Drafter) -> float:
    return max_error(
        complete(emitted_law(RULES[rule], cases_of(drafter, {(): 1.0}), TARGET), TARGET, LENGTH), joint(TARGET, LENGTH)
    )


@pytest.mark.parametrize("rule", ["tree", "traversal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_round_has_the_law_of_the_target(drafter_of: Callable[..., Drafter], rule: str, shape: tuple) -> None:
    for distributions in (LAWS, RandomTables(VOCAB, seed=83, holes=0.4)):
        assert error(rule, drafter_of(*shape, distributions)) < EXACT
    assert (len(drafter_of(*shape)(Choice(), ()).children) > 1) == (shape[2] is not None), "the test means something"
    for options in ({"min_confidence": 0.6}, {"draft_top_k": 2}):
        assert error(rule, drafter_of(*shape, **options)) < EXACT


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    some_of(
        [("tree", 2, 5), ("tree", 5, 2), ("traversal", 2, 5), ("traversal", 5, 2)],
        {("tree", 5, 2), ("traversal", 5, 2)},
    ),
)
def test_two_rounds_have_the_law_of_the_target(
    drafter_of: Callable[..., Drafter], rule: str, first: int, second: int
) -> None:
    """Another drafter and another kind of tree in the second round."""
    drafters = [drafter_of(*SHAPES[first]), drafter_of(*SHAPES[second], RandomTables(VOCAB, seed=84))]
    assert max_error(chained(RULES[rule], drafters, TARGET, LENGTH), joint(TARGET, LENGTH)) < EXACT


def ranked_by_value(growth: Growth) -> Growth:
    """The planted error: two nodes fewer, ranked by the chances of the tokens they turned out to be, as a greedy tree
    may be.
    """
    values: list[float] = []
    for parent, path in zip(growth.parents, map(growth.path, range(len(growth.tokens))), strict=True):
        values.append((1.0 if parent < 0 else values[parent]) * LAWS[path[:-1]][path[-1]])
    kept = branches.best_nodes(growth.parents, values, growth.budget - 2)
    place = {-1: -1} | {node: i for i, node in enumerate(kept)}
    fields = {name: [getattr(growth, name)[node] for node in kept] for name in ("tokens", "sampled", "estimates")}
    distributions = {place[row]: distribution for row, distribution in growth.masses.items() if row in place}
    return replace(growth, parents=[place[growth.parents[node]] for node in kept], masses=distributions, **fields)


@pytest.mark.parametrize("rule", ["tree", "traversal"])
@pytest.mark.parametrize("tree", ["static", "best_first"])
def test_a_sampled_child_ranked_by_its_own_value_shows(
    drafter_of: Callable[..., Drafter], rule: str, tree: str
) -> None:
    assert error(rule, drafter_of(tree, 6, (2, 2))) < EXACT
    assert error(rule, drafter_of(tree, 6, (2, 2), edit=ranked_by_value)) > 0.005


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_shape_of_a_level_does_not_depend_on_what_is_drawn_there(
    shape: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs with the same draws above a level and others from it on: the parents down to that level are the same."""

    def run(level: int, late: int) -> Growth:
        growth = growth_of(*shape)
        monkeypatch.setattr(branches, "draw", lambda rest, u: _pick(rest, 0 if growth.level <= level else late))
        return grow(growth, LAWS)

    for level in range(3):
        one, other = run(level, 0), run(level, 1)
        upper = [node for node in range(len(one.tokens)) if len(one.path(node)) <= level + 1]
        assert [one.parents[node] for node in upper] == [other.parents[node] for node in upper]
        assert len(upper) == sum(len(other.path(node)) <= level + 1 for node in range(len(other.tokens)))


def _pick(rest: Tensor, which: int) -> Tensor:
    """The likeliest or the least likely token with weight."""
    return rest.argmax(-1) if which == 0 else torch.where(rest > 0, rest, torch.inf).argmin(-1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("branching", [3, 2, (3, 2, 1)])
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_a_greedy_tree_holds_the_likeliest_paths(seed: int, branching: object, budget: int) -> None:
    """Against all paths of the draft's distribution that the branching allows."""
    distributions = RandomTables(VOCAB, seed=seed)
    growth = grow(growth_of("best_first", budget, branching, temperature=0.0), distributions)
    depth = len(branching) if isinstance(branching, tuple) else budget
    every = []
    for path in itertools.chain.from_iterable(itertools.product(range(VOCAB), repeat=d) for d in range(1, depth + 1)):
        steps = [distributions[path[:i]] for i in range(len(path))]
        allowed = [branching[i] if isinstance(branching, tuple) else branching for i in range(len(path))]
        if all(
            np.argsort(-distribution).tolist().index(token) < most
            for distribution, token, most in zip(steps, path, allowed, strict=True)
        ):
            every.append(float(np.prod([distribution[token] for distribution, token in zip(steps, path, strict=True)])))
    chosen = growth.chosen()
    assert sorted((growth.estimates[node] for node in chosen), reverse=True) == pytest.approx(
        sorted(every, reverse=True)[:budget]
    )
    assert all(growth.parents[node] in {-1, *chosen} for node in chosen)
    assert not growth.masses


@pytest.mark.parametrize(("tree", "temperature"), [("static", 0.0), ("best_first", 0.0), ("best_first", 1.0)])
def test_draft_tokens_come_likeliest_first(tree: str, temperature: float) -> None:
    """So that what is learnt about the k-th place holds for every budget; a smaller greedy tree is the beginning of a
    larger one.
    """
    distributions = RandomTables(VOCAB, seed=9)
    drafts = []
    for budget in (3, 6):
        growth = grow(growth_of(tree, budget, 3, temperature), distributions)
        chosen = growth.chosen()
        assert [growth.estimates[node] for node in chosen] == sorted(
            (growth.estimates[node] for node in chosen), reverse=True
        )
        draft = branches.assemble("draft_model", torch.device("cpu"), [growth])
        assert all(parent < node for node, parent in enumerate(draft.parents))
        drafts.append(list(zip(draft.parents, draft.tokens.tolist(), strict=True)))
    if (tree, temperature) == ("best_first", 0.0):
        assert drafts[1][:3] == drafts[0]


@pytest.mark.parametrize("tree", ["static", "best_first"])
def test_a_coupled_tree_holds_the_leaders_of_the_race(tree: str) -> None:
    """The children of a node are those that arrive first of the draft's distribution with the noise of their
    position, the winner among them.
    """
    distributions = RandomTables(6, seed=5)
    for seed in range(10):
        noise = RaceNoise(seed, 6)
        growth = grow(growth_of(tree, 8, 3, noise=noise), distributions)
        chosen = growth.chosen()
        assert not growth.masses
        for node in (-1, *chosen):
            children = [growth.tokens[n] for n in chosen if growth.parents[n] == node]
            path = growth.path(node)
            arrival = noise.at([1 + len(path)])[0].numpy() / distributions[path]
            assert set(children) == set(np.argsort(arrival)[: len(children)].tolist())
            if children:
                assert int(race_winner(torch.tensor(distributions[path])[None], noise.at([1 + len(path)]))) in children


def test_a_static_tree_has_its_shape_whatever_the_laws() -> None:
    for temperature, seed in itertools.product((0.0, 1.0), range(5)):
        shape = (sampled_shape if temperature else static_shape)(7, 3, 7)
        growth = grow(growth_of("static", 7, 3, temperature), RandomTables(5, seed=seed))
        depths = sorted(len(growth.path(node)) for node in range(7))
        assert depths == sorted(d + 1 for d, width in enumerate(shape.widths) for _ in range(width))
        assert [growth._places[node] for node in range(7)] == list(range(7))
        assert tuple(growth.parents) == shape.parents
        assert sum(growth.sampled) == (0 if temperature == 0 else len(set(growth.parents)))


def brute_shape(budget: int, chances: Sequence[float], max_depth: int) -> float:
    """The most that a tree of `budget` nodes can be worth, by trying all of them."""
    best = {frozenset[tuple[int, ...]]()}
    for _ in range(budget):
        best = {
            tree | {(*path, k)}
            for tree in best
            for path in [(), *tree]
            if len(path) < max_depth
            and (k := sum(len(p) == len(path) + 1 and p[:-1] == path for p in tree)) < len(chances)
        }
    return max(sum(float(np.prod([chances[r] for r in path])) for path in tree) for tree in best)


@pytest.mark.parametrize(("budget", "branching", "max_depth"), [(1, 3, 9), (4, 3, 9), (6, 3, 9), (6, 2, 2), (6, 3, 1)])
def test_static_shapes_are_the_best(budget: int, branching: int, max_depth: int) -> None:
    shape = static_shape(budget, branching, max_depth)
    chances = [0.6 / (1 + rank) ** 2 for rank in range(branching)]
    worth: list[float] = []
    for node, parent in enumerate(shape.parents):
        assert parent < node
        worth.append(chances[shape.children[1 + parent].index(node)] * (1.0 if parent < 0 else worth[parent]))
    if len(worth) == budget:
        assert sum(worth) == pytest.approx(brute_shape(budget, chances, max_depth))
    else:
        assert (len(worth), max_depth) == (branching, 1)
    assert sum(shape.widths) == len(worth)


@pytest.mark.parametrize(("budget", "branching", "max_depth"), [(1, 3, 9), (5, 3, 9), (6, 2, 9), (6, 3, 2), (3, 4, 1)])
def test_shapes_of_sampled_trees_are_the_best(budget: int, branching: int, max_depth: int) -> None:
    """Against all trees of that size, where what a child is worth depends on how many siblings it has."""

    def worth(parents: Sequence[int], node: int = -1) -> float:
        below = [1 + worth(parents, child) for child, parent in enumerate(parents) if parent == node]
        return (
            sum(
                chance * value
                for chance, value in zip(sampled_chances(len(below)), sorted(below, reverse=True), strict=True)
            )
            if below
            else 0.0
        )

    def allowed(parents: Sequence[int]) -> bool:
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths) <= max_depth and max(map(parents.count, parents)) <= branching

    shape = sampled_shape(budget, branching, max_depth)
    every = [parents for parents in itertools.product(*(range(-1, node) for node in range(budget))) if allowed(parents)]
    assert len(shape.parents) == budget
    assert allowed(shape.parents)
    assert worth(shape.parents) == pytest.approx(max(map(worth, every)))


def test_chances_of_sampled_children_are_a_law() -> None:
    for count in range(1, 5):
        assert list(sampled_chances(count)) == sorted(sampled_chances(count), reverse=True)
        assert len(sampled_chances(count)) == count
    assert sum(sampled_chances(4)) < 1


def test_levels_are_shared_by_value() -> None:
    assert share_level([[0.5, 0.2], [0.3, 0.25, 0.1]], 3) == [1, 2]
    assert share_level([[0.5, 0.5], [0.5]], 2) == [2, 0]
    assert share_level([[], [0.1]], 5) == [0, 1]
    assert share_level([], 2) == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"drafter": "ngram", "tree": "static"}, "tree"),
        ({"tree": "bush"}, "tree"),
        ({"tree": "static", "draft_probability": 0.5}, "draft_probability"),
        ({"tree": "best_first", "draft_probability": "auto"}, "draft_probability"),
        ({"branching": 3}, "branching"),
        ({"tree": "static", "branching": 0}, "branching"),
        ({"tree": "static", "branching": ()}, "branching"),
        ({"tree": "static", "branching": (2, 0)}, "branching"),
        ({"tree": "static", "branching": True}, "branching"),
    ],
)
def test_what_trees_refuse(options: dict, field: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=field):
        SpecConfig(**{"drafter": "draft_model", **options})
