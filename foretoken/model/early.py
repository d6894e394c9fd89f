"""Rows that ran some layers ahead of the pass that verifies them, and how that pass reuses them.

A row's keys and values in layer l and its residual stream after it depend on the tokens up to it alone. So what the
leading layers computed for a chain of drafted tokens stays valid as long as the tokens are the same: the verifying pass
runs such rows only from the layer where they stopped (LayerSkip, Elhoushi et al. 2404.16710, section 4.3). Other rows
run all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.model.attention.paged import Reader
from foretoken.model.interface import Segment
from foretoken.transfer import to_host


@dataclass(frozen=True)
class EarlyRows:
    """What ran early behind the past of one sequence: `tokens` [n], and their stream `hidden` [n, D] after `depth`
    layers.
    """

    depth: int
    tokens: Tensor
    hidden: Tensor

    @staticmethod
    def following(before: EarlyRows | None, offset: int, depth: int, tokens: Tensor, hidden: Tensor) -> EarlyRows:
        """Rows behind the first `offset` rows of `before`; none of it is kept at offset 0."""
        if before is None or not offset:
            assert not offset, "the rows before these did not run early"
            return EarlyRows(depth, tokens, hidden)
        assert offset <= len(before.tokens)
        assert before.depth == depth, "one chain runs one set of layers"
        return EarlyRows(
            depth, torch.cat((before.tokens[:offset], tokens)), torch.cat((before.hidden[:offset], hidden))
        )


@dataclass(frozen=True)
class Join:
    """The first `count` rows of segment `index`, which wait until layer `depth`; `rows` are their places in the flat
    run.
    """

    index: int
    count: int
    rows: slice
    depth: int
    hidden: Tensor  # [count, D]


def first_missing(layers: Sequence[int]) -> int:
    """Number of leading layers in ascending `layers`: up to here a pass over them is a full pass."""
    return next((place for place, layer in enumerate(layers) if layer != place), len(layers))


def joins_of(
    tokens: Tensor, readers: Sequence[Reader], early: Sequence[EarlyRows | None], taps: Sequence[int]
) -> list[Join]:
    """For each segment the longest beginning of its chain whose tokens are those that ran early.

    None where a tap before that depth is wanted: the early layers do not keep them.
    """
    chains = [(i, rows) for i, rows in enumerate(early) if rows is not None and readers[i].segment.is_chain]
    held = [(i, rows) for i, rows in chains if all(tap >= rows.depth for tap in taps)]
    if not held:
        return []
    new, *ran = to_host(tokens, *(rows.tokens for _, rows in held))
    joins = []
    for (index, rows), known in zip(held, ran, strict=True):
        reader = readers[index]
        count = _common(new[reader.rows], known)
        if count:
            start = reader.rows.start
            joins.append(Join(index, count, slice(start, start + count), rows.depth, rows.hidden[:count]))
    return joins


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def waiting_rows(joins: Sequence[Join], layer: int) -> Mapping[int, int]:
    """By segment, how many of its first rows do not run layer `layer`."""
    return {join.index: join.count for join in joins if join.depth > layer}


def without(readers: Sequence[Reader], waiting: Mapping[int, int]) -> tuple[list[int], list[Reader]]:
    """The rows that do not wait, and readers for them alone: rows that wait are part of their past."""
    rows: list[int] = []
    active: list[Reader] = []
    for index, reader in enumerate(readers):
        count = waiting.get(index, 0)
        own = range(reader.rows.start + count, reader.rows.stop)
        if not own:
            continue
        place = slice(len(rows), len(rows) + len(own))
        rows += own
        if count:
            active.append(Reader(place, reader.slots, reader.past + count, Segment(reader.segment.sequence, len(own))))
        else:
            active.append(replace(reader, rows=place))
    return rows, active
