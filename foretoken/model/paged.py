"""Our decoder with a block-table cache: the `LanguageModel` of the engine and of draft models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor

from foretoken.kv.prefix import shared_length
from foretoken.model.attention.paged import Reader
from foretoken.model.decoder import Decoder, Hidden
from foretoken.model.graphs.cache import JOINED, GraphCache
from foretoken.model.graphs.choice import takes_graphs
from foretoken.model.interface import EarlySegment, ForwardOutput, Segment
from foretoken.model.layer_pass import has_exact_rows
from foretoken.model.layers import Embedding, Linear
from foretoken.model.paged_cache import DEFAULT_BLOCK_SIZE, ForwardInputs, PagedCache
from foretoken.transfer import to_device, to_host


@dataclass(frozen=True)
class EarlyRows:
    """What ran early behind one sequence's past: `tokens` [n], their stream `hidden` [n, D] after `depth` layers."""

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
    """The first `count` rows of segment `index`, which wait until layer `depth`; `rows`: their places in the run."""

    index: int
    count: int
    rows: slice
    depth: int
    hidden: Tensor  # [count, D]


@dataclass(frozen=True)
class Pass:
    """One pass over `tokens` [T] with all that is decided about it: what every rank of a model computes.

    An early pass runs `layers` only. `alone`: with strict numerics, no row shares an attention call with another text.
    """

    tokens: Tensor
    inputs: ForwardInputs
    joins: Sequence[Join] = ()
    taps: Sequence[int] = ()
    layers: Sequence[int] = ()
    alone: bool = False


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
        count = shared_length(new[reader.rows], known)
        if count:
            start = reader.rows.start
            joins.append(Join(index, count, slice(start, start + count), rows.depth, rows.hidden[:count]))
    return joins


def without(readers: Sequence[Reader], waiting: Mapping[int, int]) -> tuple[list[int], list[Reader]]:
    """The rows that do not wait, and readers for them alone: the first rows of a segment, as many as `waiting` says by
    its index, are part of their past.
    """
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


class PagedModel(PagedCache):
    """See `interface.EarlyExitModel`; `num_slots` tokens of cache are shared by all sequences.

    `kept` is the format of keys and values, None that of the rows; float16 beside float32 needs the compiled kernels.
    `graphs` replays steps of few rows, where steps are captured.
    """

    is_strict: ClassVar[bool] = False  # whether numerics are strict even where the compiled kernels do not run all
    cuts_rows: ClassVar[bool] = False  # whether `run_pass` runs rows in tiles of its own

    def __init__(
        self, decoder: Decoder, num_slots: int, block_size: int = DEFAULT_BLOCK_SIZE, kept: torch.dtype | None = None
    ) -> None:
        weight = decoder.norm.weight
        self._is_exact = has_exact_rows(decoder)
        super().__init__(decoder.local, kept or weight.dtype, weight.device, num_slots, block_size, self._is_exact)
        self.decoder, self.config = decoder, decoder.config
        self.vocab_size, self.num_layers = self.config.vocab_size, self.config.num_layers
        self.max_context_tokens, self.eos_token_ids = self.config.max_context_tokens, self.config.eos_token_ids
        self.num_parameters, self.logit_softcap = self.config.num_parameters, self.config.logit_softcap
        self.weight_bytes, self.step_bytes = decoder.weight_bytes, decoder.step_bytes
        self.expert_bytes, self.expert_share = decoder.expert_bytes, decoder.expert_share
        self.weight_format = decoder.weight_format
        self.numerics = "strict" if self._is_exact or self.is_strict else "default"
        captures = takes_graphs(decoder, self.attention, self.cuts_rows)
        self.graphs = GraphCache(decoder, self.pool, block_size, self.capacity_tokens) if captures else None
        self._early: dict[int, EarlyRows] = {}
        assert self.dtype == weight.dtype or self._is_exact, "rows and cache of two formats"

    def twin(self) -> Self:
        """See `interface.TwinModel`."""
        twin = self.twin_cache()
        twin._early = {}
        return twin

    def fresh(self) -> PagedModel:
        """See `interface.OpenModel`."""
        if self.dtype == self.decoder.norm.weight.dtype:
            return type(self)(self.decoder, self.capacity_tokens, self.block_size)
        return PagedModel(self.decoder, self.capacity_tokens, self.block_size, self.dtype)

    def capture_ahead(self, taps: Sequence[int], has_trees: bool) -> None:
        """See `interface.CapturesSteps`."""
        if self.graphs is None:
            return
        for wanted in {(), tuple(sorted(taps))}:
            self.graphs.capture_ahead(wanted)
        if has_trees:
            self._run_tree()

    def _run_tree(self) -> None:
        """Run a small tree as any step with one runs, captured or not, for which kernels are compiled."""
        sequence = -1  # requests count from 0
        self.open(sequence)
        try:
            self.forward(to_device((0, 0, 0), self.device), [Segment(sequence, 1, (-1, -1))])
        finally:
            self.close(sequence)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Run the flat `tokens` [T]; logits and taps of the rows each segment asks for."""
        inputs = self.admit(segments)
        assert len(tokens) == len(inputs.positions), "a token for every row: kernels read as many as there are rows"
        taps = taps if inputs.tapped else ()
        early = [self._early.pop(segment.sequence, None) for segment in segments]
        return self.run_pass(Pass(tokens, inputs, joins_of(tokens, inputs.readers, early, taps), taps))

    def run_pass(self, one: Pass) -> ForwardOutput:
        """All layers and the head over the rows of `one`, which were admitted."""
        inputs = one.inputs
        if self.graphs is not None:
            replayed = self.graphs.run(one.tokens, inputs, one.taps, self.why_not_replayed(one))
            if replayed is not None:
                return replayed
        hidden = self._through(one)
        assert hidden.logits is not None
        if not one.taps:
            return ForwardOutput(hidden.logits, {})
        tapped = self._rows(inputs, inputs.tapped)
        return ForwardOutput(hidden.logits, {layer: tap[tapped] for layer, tap in hidden.taps.items()})

    def why_not_replayed(self, one: Pass) -> str | None:
        """What a captured step has no place for in `one`; None: nothing."""
        return JOINED if one.joins else None

    @torch.inference_mode()
    def forward_early(
        self,
        tokens: Tensor,
        segments: Sequence[EarlySegment],
        layers: Sequence[int],
        adapter: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See `interface.EarlyExitModel`."""
        depth = first_missing(layers)
        assert depth < self.num_layers
        inputs = self.admit(
            [Segment(early.sequence, early.num_rows, (), early.num_logits) for early in segments],
            [e.offset for e in segments],
        )
        shared, last = self.run_early(Pass(tokens, inputs, layers=layers))
        for early, reader in zip(segments, inputs.readers, strict=True):
            before = self._early.get(early.sequence) if early.offset else None
            self._early[early.sequence] = EarlyRows.following(
                before, early.offset, depth, tokens[reader.rows], shared[reader.rows]
            )
        rows = last[self._rows(inputs, inputs.wanted)]
        return self.output_logits(self.final_norm(rows if adapter is None else adapter(rows)))

    def run_early(self, one: Pass) -> tuple[Tensor, Tensor]:
        """The residual stream [T, D] behind those of `one.layers` that a full pass begins with, and behind all."""
        positions, slots = to_device([one.inputs.positions, one.inputs.slots], self.device)
        attention = self.attention(self.local, self.pool, slots, one.inputs.readers)
        depth = first_missing(one.layers)
        shared = self.decoder(one.tokens, positions, attention, num_layers=depth).last
        return shared, self.decoder.run(shared, positions, attention, one.layers[depth:]).last

    def head_cost(self) -> float:
        """See `interface.EarlyExitModel`."""
        return self.config.vocab_size * self.config.hidden_size / self.config.step_layer_parameters

    def _through(self, one: Pass) -> Hidden:
        """All layers over all rows, and the logits that are wanted; rows that ran early begin where they stopped."""
        inputs, joins = one.inputs, one.joins
        positions, slots = to_device([inputs.positions, inputs.slots], self.device)
        x = self.decoder.embed(one.tokens)  # [T, D]
        for join in joins:
            x[join.rows] = join.hidden
        depths = sorted({0, *(join.depth for join in joins)})
        for first, last in pairwise(depths):
            waiting = {join.index: join.count for join in joins if join.depth > first}
            rows, readers = without(inputs.readers, waiting)
            if rows:
                active = to_device(rows, self.device)
                attention = self.attention(self.local, self.pool, slots[active], readers)
                x = x.index_copy(
                    0, active, self.decoder.run(x[active], positions[active], attention, range(first, last)).last
                )
        attention = self.attention(self.local, self.pool, slots, inputs.readers)
        wanted = self._rows(inputs, inputs.wanted)
        return self.decoder.run(x, positions, attention, range(depths[-1], self.num_layers), one.taps, wanted)

    def _rows(self, inputs: ForwardInputs, rows: Sequence[int]) -> slice | Tensor:
        """An index of `rows`, which are some rows of the forward, in order."""
        if len(rows) == len(inputs.positions):
            return slice(None)
        return to_device(rows, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `interface.SharesWeights`."""
        return self.decoder.embed(tokens)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See `interface.SharesWeights`."""
        return self.decoder.final_norm(hidden)

    def output_logits(self, normed: Tensor) -> Tensor:
        """See `interface.SharesWeights`."""
        return self.decoder.output_logits(normed)

    def embedding_module(self) -> Embedding | None:
        """See `interface.SharesModules`."""
        return self.decoder.embedding if self.decoder.embeds_rows else None

    def output_module(self) -> Linear | None:
        """See `interface.SharesModules`."""
        return self.decoder.lm_head if self.decoder.logits_are_products else None

    def admit(self, segments: Sequence[Segment], offsets: Sequence[int] | None = None) -> ForwardInputs:
        """See `PagedCache.admit`; the rotary table grows with the positions."""
        inputs = super().admit(segments, offsets)
        for table in self.decoder.rotaries:
            table.cover(max(inputs.positions, default=-1) + 1)
        return inputs

    def close(self, sequence: int) -> None:
        """Forget a sequence and give back its blocks."""
        self._early.pop(sequence, None)
        super().close(sequence)

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        """Keep the pending rows and the nodes of `path`."""
        self._early.pop(sequence, None)
        super().commit(sequence, num_pending, path)

    def rollback(self, sequence: int, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        self._early.pop(sequence, None)
        super().rollback(sequence, length)

    def check(self) -> None:
        """Assert that every block is free or held by an open sequence, and nothing is kept of others."""
        assert self._early.keys() <= self.tables.keys()
        super().check()
