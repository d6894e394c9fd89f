"""Draft tokens that a request refuses are left out: the law of every round in float64, and what stays of a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.core import Draft, Probes
from foretoken.draft.lookup_tree import LookupTree
from foretoken.draft.merging import allowed_draft, allowed_tree
from foretoken.verify import RULES
from tests.draft.test_merge import VOCAB, lookups, spot_of
from tests.helpers.enumeration import (
    EXACT,
    Case,
    Choice,
    DraftToken,
    RandomTables,
    Spot,
    Tables,
    Tokens,
    cases_of,
    complete,
    draft_of,
    emitted_law,
    joint,
    max_error,
)

CHAINS, TREES = ("rejection", "block"), ("tree", "traversal", "coupled")


class Masked:
    """Processors of a request that refuses what its target's law gives no probability."""

    def __init__(self, target: Tables, context: Tokens = ()) -> None:
        self.target, self.context = target, context

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        paths: list[Tokens] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else self.context), token))
        return [all(self.target[path[:i]][path[i]] > 0 for i in range(len(self.context), len(path))) for path in paths]


def entry(processors: object) -> Any:
    return SimpleNamespace(processors=processors)


def drafted(rule: str, seed: int, processors: Callable[[Tokens], object]) -> Callable[[Choice, Tokens], Spot]:
    """A lookup's draft, as much of it as the processors allow."""

    def propose(choice: Choice, context: Tokens) -> Spot:
        nodes = lookups(context, seed)
        if rule in CHAINS:
            nodes = [node._replace(parent=i - 1) for i, node in enumerate(nodes[:3])]
        tokens, parents = [node.token for node in nodes], tuple(node.parent for node in nodes)
        draft = Draft(torch.tensor(tokens), parents, (0, len(tokens)), ("ngram",))
        return spot_of(allowed_draft(draft, [entry(processors(context))]))

    return propose


@pytest.mark.parametrize("rule", [*CHAINS, *TREES])
def test_a_round_has_the_same_law_without_refused_tokens(rule: str) -> None:
    num_cut = 0
    for seed in range(12):
        target = RandomTables(VOCAB, seed, holes=0.4)
        whole = cases_of(drafted(rule, seed, lambda context: None), {(): 1.0})
        cut = cases_of(drafted(rule, seed, lambda context, target=target: Masked(target, context)), {(): 1.0})
        num_cut += sum(len(case.layout.tokens) for case in whole) - sum(len(case.layout.tokens) for case in cut)
        found = emitted_law(RULES[rule], cut, target)
        assert max_error(found, emitted_law(RULES[rule], whole, target)) < EXACT
        assert max_error(complete(found, target, 4), joint(target, 4)) < EXACT
    assert num_cut > 5


def test_a_sampled_token_is_not_left_out_with_its_mass() -> None:
    """That is why only lookups' drafts are cut: the place would look as if nothing had been drawn there."""
    target, drawn_from = RandomTables(VOCAB, 3, holes=0.4), RandomTables(VOCAB, 4)
    assert min(target[()]) == 0

    def law(keeps: bool) -> float:
        def propose(choice: Choice, context: Tokens) -> tuple[DraftToken, ...]:
            token = choice.pick(drawn_from[context])
            return (DraftToken(token, drawn_from[context]),) if keeps or target[context][token] > 0 else ()

        cases: list[Case] = cases_of(propose, {(): 1.0})
        return max_error(complete(emitted_law(RULES["rejection"], cases, target), target, 2), joint(target, 2))

    assert law(keeps=True) < EXACT
    assert law(keeps=False) > 0.01


def test_descendants_go_and_the_others_keep_their_parents() -> None:
    refused = {5: 1, 7: 1}

    class Refusing:
        def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
            found: list[bool] = []
            for token, parent in zip(tokens, parents, strict=True):
                found.append(token not in refused and (parent < 0 or found[parent]))
            return found

    tokens, parents = (1, 5, 2, 3, 4, 7), (-1, -1, 0, 1, 2, 4)
    tree = allowed_tree(LookupTree(tokens, parents, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)), Refusing())
    assert tree == LookupTree((1, 2, 4), (-1, 0, 1), (0.9, 0.7, 0.5))
    probes = Probes(torch.tensor([1, 1]), (-1, 0), (0, 1, 1, 2))
    draft = Draft(torch.tensor([*tokens, 5, 5, 6]), (*parents, -1, -1, 0), (0, 6, 7, 9), ("x", "y", "z"), probes=probes)
    found = allowed_draft(draft, [entry(Refusing()), entry(Refusing()), entry(None)])
    assert found.tokens.tolist() == [1, 2, 4, 5, 6]
    assert found.parents == (-1, 0, 1, -1, 0)
    assert found.offsets == (0, 3, 3, 5)
    assert found.drafters == ("x", None, "z")
    assert found.probes is probes
    assert allowed_draft(draft_of([()]), [entry(Refusing())]).num_nodes == 0
