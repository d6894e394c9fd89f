"""One ragged draft for a batch: from the nodes of its requests, or from drafts of several drafters for some of them;
without what a request's own parameters refuse (its grammar above all), which never reaches the target.

Lookups find tokens without asking the grammar, and the target gives a refused one the probability 0: its row would be
wasted, and so would those of all tokens behind it. Leaving out nodes of a lookup is exact whatever decides about them,
as long as that is the text and not a draw: a lookup's tokens are point masses, and a place without one is a place
where nothing was proposed. Sampled tokens are left alone: their drafters draw under the grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from foretoken.core import BatchEntry, Draft, Mass, Probes, Processors, empty_draft
from foretoken.transfer import to_device

if TYPE_CHECKING:
    from foretoken.draft.lookup_tree import LookupTree


_Value = TypeVar("_Value")


class RequestNodes(NamedTuple):
    """One request's part of a draft: the `parents` [n] of its nodes, the mass of its anchor's row and of each node's
    (`masses` [n + 1]; None: none), and which nodes were `sampled` [n] from that of their parent.

    Both are () for every request of a draft in which nothing is sampled. `has_run`: the drafter ran for the request,
    if only to find that nothing is to be drafted.
    """

    parents: Sequence[int]
    masses: Sequence[Tensor | None] = ()
    sampled: Sequence[bool] = ()
    has_run: bool = False


def ragged_draft(name: str, tokens: Tensor, requests: Sequence[RequestNodes]) -> Draft:
    """The draft of drafter `name` whose `tokens` [N] are the nodes of all `requests`, one behind the other."""
    rows = [mass for one in requests for mass in one.masses]
    known = [mass for mass in rows if mass is not None]
    number = count()
    return Draft(
        tokens=tokens,
        parents=tuple(parent for one in requests for parent in one.parents),
        offsets=(0, *accumulate(len(one.parents) for one in requests)),
        drafters=tuple(name if one.parents or one.has_run else None for one in requests),
        sampled=tuple(is_sampled for one in requests for is_sampled in one.sampled) if known else (),
        mass=Mass(torch.stack(known), tuple(-1 if mass is None else next(number) for mass in rows)) if known else None,
    )


def merge_drafts(
    num_requests: int, parts: Sequence[tuple[Sequence[int], Draft]], device: torch.device | str = "cpu"
) -> Draft:
    """One draft for the whole batch from drafts of disjoint sets of requests; `parts` hold (request indices, draft).

    A drafter may work on another device than the target (a lookup has no reason to leave the CPU).
    """
    place = {b: number for number, b in enumerate(b for requests, _ in parts for b in requests)}
    missing = [b for b in range(num_requests) if b not in place]
    place |= {b: number for number, b in enumerate(missing, len(place))}
    drafts = [draft.on(device) for _, draft in parts]
    if missing or not drafts:
        drafts.append(empty_draft(len(missing), device))
    return _joined(drafts).select([place[b] for b in range(num_requests)])


def _joined(drafts: Sequence[Draft]) -> Draft:
    if len(drafts) == 1:
        return drafts[0]
    host: list[int] | None = None  # of which a tensor is made faster than of many
    if all(draft.has_host_tokens for draft in drafts):
        host = [token for draft in drafts for token in draft.host_tokens]
    joined = Draft(
        tokens=torch.cat([draft.tokens for draft in drafts])
        if host is None
        else to_device(host, drafts[0].tokens.device),
        parents=tuple(parent for draft in drafts for parent in draft.parents),
        offsets=(0, *accumulate(length for draft in drafts for length in draft.lengths)),
        drafters=tuple(drafter for draft in drafts for drafter in draft.drafters),
        sampled=_filled(((draft.sampled, draft.num_nodes) for draft in drafts), False),
        mass=_joined_mass(drafts),
        provenance=_filled(((draft.provenance, draft.num_nodes) for draft in drafts), None),
        probes=_joined_probes(drafts),
        inner=_filled(((draft.inner, draft.num_requests) for draft in drafts), (0, 0)),
    )
    return joined if host is None else joined.with_host_tokens(host)


def _filled(parts: Iterable[tuple[tuple[_Value, ...], int]], blank: _Value) -> tuple[_Value, ...]:
    """The values of all parts, `blank` as often as its number says for a part without any; () where none has any."""
    known = list(parts)
    if not any(values for values, _ in known):
        return ()
    return tuple(value for values, count in known for value in values or (blank,) * count)


def _joined_mass(drafts: Sequence[Draft]) -> Mass | None:
    distributions = [draft.mass.distributions for draft in drafts if draft.mass is not None]
    if not distributions:
        return None
    of_row: list[int] = []
    num_before = 0
    for draft in drafts:
        if draft.mass is None:
            of_row += [-1] * draft.num_rows
            continue
        of_row += [-1 if one < 0 else num_before + one for one in draft.mass.distribution_of_row]
        num_before += len(draft.mass.distributions)
    return Mass(torch.cat(distributions), tuple(of_row))


def _joined_probes(drafts: Sequence[Draft]) -> Probes | None:
    probes = [draft.probes for draft in drafts if draft.probes is not None]
    if not probes:
        return None
    return Probes(
        tokens=torch.cat([one.tokens for one in probes]),
        parents=tuple(parent for one in probes for parent in one.parents),
        offsets=(0, *accumulate(length for draft in drafts for length in draft.probe_lengths)),
    )


def keep_nodes(draft: Draft, kept: Sequence[Sequence[int]]) -> Draft:
    """Of every request only the nodes `kept[b]`, in order: with a node its parent is kept."""
    nodes = [draft.offsets[b] + node for b, own in enumerate(kept) for node in own]
    rows = [draft.anchor_row(b) + row for b, own in enumerate(kept) for row in (0, *(1 + node for node in own))]
    parents: list[int] = []
    for b, own in enumerate(kept):
        place = {-1: -1, **{node: number for number, node in enumerate(own)}}
        parents += [place[draft.parents[draft.offsets[b] + node]] for node in own]
    return replace(
        draft,
        tokens=draft.tokens[to_device(nodes, draft.tokens.device)],
        parents=tuple(parents),
        offsets=(0, *accumulate(map(len, kept))),
        sampled=tuple(draft.sampled[node] for node in nodes) if draft.sampled else (),
        mass=None
        if draft.mass is None
        else Mass(draft.mass.distributions, tuple(draft.mass.distribution_of_row[row] for row in rows)),
        provenance=tuple(draft.provenance[node] for node in nodes) if draft.provenance else (),
    )


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
