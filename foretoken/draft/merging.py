"""One draft for a batch from drafts of several drafters, each for some of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from foretoken.core import Draft, Mass, Probes
from foretoken.transfer import to_device


def merge_drafts(
    num_requests: int, parts: Sequence[tuple[Sequence[int], Draft]], device: torch.device | str = "cpu"
) -> Draft:
    """One draft for the whole batch from drafts of disjoint sets of requests; `parts` hold (request indices, draft).

    A drafter may work on another device than the target (a lookup has no reason to leave the CPU).
    """
    parts = [(requests, draft.on(device)) for requests, draft in parts]
    if len(parts) == 1 and tuple(parts[0][0]) == tuple(range(num_requests)):
        return parts[0][1]
    owner = {b: (part, local) for part, (requests, _) in enumerate(parts) for local, b in enumerate(requests)}
    is_known, known = all(draft.has_host_tokens for _, draft in parts), list[int]()
    tokens: list[Tensor] = []
    parents: list[int] = []
    offsets: list[int] = [0]
    drafters: list[str | None] = []
    sampled: list[bool] = []
    provenance: list[str | None] = []
    inner: list[tuple[int, int]] = []
    distributions = [draft.mass.distributions for _, draft in parts if draft.mass is not None]
    counts = [0 if draft.mass is None else draft.mass.distributions.shape[0] for _, draft in parts]
    distribution_base = [0, *accumulate(counts)]
    distribution_of_row: list[int] = []
    for b in range(num_requests):
        if b not in owner:
            offsets.append(offsets[-1])
            drafters.append(None)
            inner.append((0, 0))
            distribution_of_row.append(-1)
            continue
        part, local = owner[b]
        draft = parts[part][1]
        nodes = slice(draft.offsets[local], draft.offsets[local + 1])
        tokens.append(draft.tokens[nodes])
        known += draft.host_tokens[nodes] if is_known else ()
        parents.extend(draft.parents[nodes])
        sampled.extend(draft.sampled[nodes] if draft.sampled else [False] * draft.lengths[local])
        provenance.extend(draft.provenance[nodes] if draft.provenance else [None] * draft.lengths[local])
        offsets.append(offsets[-1] + draft.lengths[local])
        drafters.append(draft.drafters[local])
        inner.append(draft.inner[local] if draft.inner else (0, 0))
        rows = draft.rows_of([local])
        distribution_of_row.extend(
            -1
            if draft.mass is None or draft.mass.distribution_of_row[r] < 0
            else distribution_base[part] + draft.mass.distribution_of_row[r]
            for r in rows
        )
    flat = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=device)
    mass = Mass(torch.cat(distributions), tuple(distribution_of_row)) if distributions else None
    mixed = tuple(provenance) if any(source is not None for source in provenance) else ()
    judged = tuple(inner) if any(pair != (0, 0) for pair in inner) else ()
    probes = _merge_probes(num_requests, parts)
    merged = Draft(
        flat,
        tuple(parents),
        tuple(offsets),
        tuple(drafters),
        tuple(sampled) if mass else (),
        mass,
        mixed,
        probes,
        judged,
    )
    return merged.with_host_tokens(known) if is_known else merged


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


def _merge_probes(num_requests: int, parts: Sequence[tuple[Sequence[int], Draft]]) -> Probes | None:
    """The probes of all parts, in the order of the requests; None if there are none."""
    own = {
        b: draft.probes.select([local])
        for requests, draft in parts
        if draft.probes is not None
        for local, b in enumerate(requests)
    }
    if not own:
        return None
    each = [own[b] for b in sorted(own)]
    offsets = (0, *accumulate(len(own[b].parents) if b in own else 0 for b in range(num_requests)))
    return Probes(
        torch.cat([one.tokens for one in each]), tuple(parent for one in each for parent in one.parents), offsets
    )
