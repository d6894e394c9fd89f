"""Drafts of several drafters as one tree per request.

A draft whose tokens were drawn keeps all its nodes. Deterministic tokens join it, the likeliest first: one of the
same token after the same row is the node that is there already, whichever drafter drafted it; the others become
further children. Which of them there are may depend on what was drawn, because a deterministic child only decides
whether a token that its row emits anyway is followed further; it may not depend on anything that is drawn below them,
where nothing is. A drawn token is never dropped.

The choice of the rule must not depend on the draws. A merged draft is a chain or a tree depending on what was drawn, so
`auto` stands for `tree` where drafts are merged (`verify.resolve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from foretoken.core import Draft, Mass
from foretoken.draft.tree import TreeNode


def share_of(drawn: Sequence[float], found: Sequence[TreeNode], budget: int) -> int:
    """How many of the places with chances `drawn`, which fall from one to the next, are among the `budget` likeliest of
    these places and the nodes `found`.
    """
    ranked = sorted([(-chance, 0) for chance in drawn] + [(-node.estimate, 1) for node in found])
    return sum(not other for _, other in ranked[:budget])


def graft(name: str, base: Draft, found: Sequence[Sequence[TreeNode]], budgets: Sequence[int]) -> Draft:
    """`base` with the nodes of the trees `found` [B] added up to `budgets` [B] nodes per request, under the name
    `name`.

    The nodes of `base` keep their numbers; every node has the drafter that drafted it as its provenance.
    """
    if not any(found):
        return _with_provenance(name, base)
    device = base.tokens.device
    host = base.tokens.tolist()
    tokens: list[int] = []
    parents: list[int] = []
    offsets = [0]
    sampled: list[bool] = []
    distribution_of_row: list[int] = []
    provenance: list[str | None] = []
    for b, (tree, budget) in enumerate(zip(found, budgets, strict=True)):
        own = slice(base.offsets[b], base.offsets[b + 1])
        chosen, above = _additions(host[own], base.parents[own], tree, budget)
        tokens += [*host[own], *(tree[node].token for node in chosen)]
        parents += [*base.parents[own], *above]
        sampled += [*(base.sampled[own] if base.sampled else (False,) * base.lengths[b]), *(False for _ in chosen)]
        provenance += [*base.provenance_of(b), *(tree[node].drafter for node in chosen)]
        distribution_of_row += [
            base.mass.distribution_of_row[row] if base.mass is not None else -1 for row in base.rows_of([b])
        ]
        distribution_of_row += [-1] * len(chosen)
        offsets.append(len(tokens))
    return Draft(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        parents=tuple(parents),
        offsets=tuple(offsets),
        drafters=tuple(
            name if base.drafters[b] is not None or offsets[b + 1] > offsets[b] else None
            for b in range(base.num_requests)
        ),
        sampled=tuple(sampled) if base.mass is not None else (),
        mass=None if base.mass is None else Mass(base.mass.distributions, tuple(distribution_of_row)),
        provenance=tuple(provenance),
        inner=base.inner,
    )


def first_nodes(draft: Draft, counts: Sequence[int]) -> Draft:
    """Of every request the first `counts[b]` nodes, closed under parents."""
    nodes = [draft.offsets[b] + node for b, count in enumerate(counts) for node in range(count)]
    rows = [draft.anchor_row(b) + row for b, count in enumerate(counts) for row in range(1 + count)]
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return replace(
        draft,
        tokens=draft.tokens[torch.tensor(nodes, dtype=torch.int64, device=draft.tokens.device)],
        parents=tuple(draft.parents[node] for node in nodes),
        offsets=tuple(offsets),
        sampled=tuple(draft.sampled[node] for node in nodes) if draft.sampled else (),
        mass=None
        if draft.mass is None
        else Mass(draft.mass.distributions, tuple(draft.mass.distribution_of_row[row] for row in rows)),
        provenance=tuple(draft.provenance[node] for node in nodes) if draft.provenance else (),
    )


def _additions(
    own: Sequence[int], own_parents: Sequence[int], tree: Sequence[TreeNode], budget: int
) -> tuple[list[int], list[int]]:
    """The nodes of `tree` that join one request's nodes `own`, the likeliest first, and the parent of each there."""
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(own_parents, own, strict=True))}
    place: dict[int, int] = {-1: -1}  # node of the tree found -> node of the merged one
    chosen: list[int] = []
    above: list[int] = []
    for node in sorted(
        range(len(tree)), key=lambda node: (-tree[node].estimate, node)
    ):  # no node is likelier than its parent
        if tree[node].parent not in place:
            continue
        parent = place[tree[node].parent]
        if (parent, tree[node].token) in child:
            place[node] = child[parent, tree[node].token]
        elif len(own) + len(chosen) < budget:
            place[node] = len(own) + len(chosen)
            above.append(parent)
            chosen.append(node)
    return chosen, above


def _with_provenance(name: str, base: Draft) -> Draft:
    """`base` under another drafter's name, its nodes under their own."""
    own = [drafter for b in range(base.num_requests) for drafter in base.provenance_of(b)]
    return replace(
        base, drafters=tuple(None if drafter is None else name for drafter in base.drafters), provenance=tuple(own)
    )
