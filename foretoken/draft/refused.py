"""Draft tokens that a request's own parameters refuse (its grammar above all) never reach the target.

Lookups find tokens without asking the grammar, and the target gives a refused one the probability 0: its row would be
wasted, and so would those of all tokens behind it. Leaving out nodes of a lookup is exact whatever decides about them,
as long as that is the text and not a draw: a lookup's tokens are point masses, and a place without one is a place
where nothing was proposed. Sampled tokens are left alone: their drafters draw under the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from foretoken.core import BatchEntry, Draft, Processors
from foretoken.draft.lookup_tree import LookupTree
from foretoken.draft.merging import keep_nodes


def allowed_tree(tree: LookupTree, processors: Processors | None) -> LookupTree:
    """The part of a lookup's tree that a request's parameters allow."""
    if processors is None or not tree.tokens:
        return tree
    found = processors.allowed(tree.tokens, tree.parents)
    if all(found):
        return tree
    return tree.part([node for node, is_allowed in enumerate(found) if is_allowed])


def allowed_draft(draft: Draft, entries: Sequence[BatchEntry]) -> Draft:
    """The part of a lookup's draft that the parameters of each request allow; the probes stay."""
    if not draft.num_nodes or all(entry.processors is None for entry in entries):
        return draft
    assert draft.mass is None
    kept: list[list[int]] = []
    for (start, stop), entry in zip(pairwise(draft.offsets), entries, strict=True):
        found = [True] * (stop - start)
        if entry.processors is not None:
            found = entry.processors.allowed(draft.host_tokens[start:stop], draft.parents[start:stop])
        kept.append([node for node, is_allowed in enumerate(found) if is_allowed])
    if sum(map(len, kept)) == draft.num_nodes:
        return draft
    names = tuple(name if own else None for name, own in zip(draft.drafters, kept, strict=True))
    return replace(keep_nodes(draft, kept), drafters=names)
