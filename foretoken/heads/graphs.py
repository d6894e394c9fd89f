"""Captured steps of trained heads: EAGLE, Medusa and block; the matrices that they read, and why some have none."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from foretoken.heads.base import DraftVocabulary
from foretoken.heads.block import BlockHead, BlockRows
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_chain import embedding_of, output_of
from foretoken.heads.layers import LayeredHead
from foretoken.heads.medusa import MedusaHead
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.graphs import cache
from foretoken.model.graphs.cache import MANY_ROWS, ROW_BUCKETS, StepGraphs, StepShape
from foretoken.model.graphs.choice import OTHER_ATTENTION, PACKED, are_wanted
from foretoken.model.interface import SharesModules, SharesWeights
from foretoken.model.layers import Embedding, Linear
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import ForwardInputs, PagedCache
from foretoken.text.sampling import check_finite

Matrices = tuple[Embedding | Linear, ...]

_Head = TypeVar("_Head", bound=LayeredHead)


class HeadGraphs(StepGraphs, Generic[_Head]):
    """Graphs of steps of `head` over the drafter's own `cache`; `matrices` are all that a step reads."""

    def __init__(self, head: _Head, cache: PagedCache, matrices: Matrices) -> None:
        super().__init__(head.layer_shape, cache.pool, cache.block_size, cache.capacity_tokens)
        self.head, self._matrices = head, matrices

    def read_beside(self) -> tuple[object, ...]:
        """See `StepGraphs`; norms and biases keep their place."""
        self.head.rotary.cover(self.layers.max_context_tokens)
        return (*(matrix.weight for matrix in self._matrices), self.head.rotary.cos)


def captured_matrices(
    head: LayeredHead, cache: PagedCache, dtype: torch.dtype, beside: tuple[Embedding | Linear | None, ...]
) -> Matrices | None:
    """All matrices that a step of `head` reads, with those `beside` its layers; None where its steps are not captured.

    `dtype` is that of its rows; a matrix beside is None where the target does more with its own than reading rows or
    multiplying.
    """
    layers = [linear for layer in head.layer_parts() for linears in layer.matrices for linear in linears]
    matrices = (*(one for one in beside if one is not None), *layers)
    if not issubclass(cache.attention, FusedAttention):
        reason: str | None = OTHER_ATTENTION
    elif None in beside:
        reason = "its target does more than look up embeddings and multiply by its output matrix"
    elif any(matrix.packed is not None for matrix in matrices):
        reason = PACKED
    elif any(matrix.weight is not None and matrix.weight.dtype != dtype for matrix in matrices):
        reason = "its target's matrices are of another format"
    else:
        reason = None
    return matrices if are_wanted("head", reason) else None


class EagleGraphs(HeadGraphs[EagleHead]):
    """Runs rows of `head` for `target` over the head's own `cache`; `matrices` are all that a step reads.

    `vocabulary` is the head's, on the device.
    """

    def __init__(
        self, head: EagleHead, target: SharesWeights, vocabulary: DraftVocabulary, cache: PagedCache, matrices: Matrices
    ) -> None:
        super().__init__(head, cache, matrices)
        self.target, self.vocabulary = target, vocabulary
        width, dtype = head.config.layer.hidden_size, head.norm_dtype
        self.features = self.buffer(width, dtype=dtype)
        # What a step computes for all rows of its bucket, until the next one.
        self.logits = self.buffer(head.config.draft_vocab_size, dtype=dtype)
        self.feedback = self.buffer(width, dtype=dtype)
        self.likeliest = self.buffer(dtype=torch.int64)

    def run(self, tokens: Tensor, features: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor] | None:
        """Own logits [R, V_d] and feedback [R, D] of the rows wanted of `tokens` [T] with their `features` [T, D].

        None, and nothing done, where they are to be run as usual.
        """
        return self._replayed_rows(self.logits, tokens, features, inputs)

    def next_tokens(self, tokens: Tensor, features: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor] | None:
        """The likeliest token [R] of the target's vocabulary in place of `run`'s logits."""
        return self._replayed_rows(self.likeliest, tokens, features, inputs)

    def step(self, shape: StepShape) -> None:
        """See `StepGraphs`."""
        num_rows = shape.rows
        positions, attention = self.attended(shape)
        rows = self.head.run(self.tokens[:num_rows], self.features[:num_rows], positions, attention, self.target)
        logits = self.head.logits(rows.output, self.target)
        assert logits.dtype == self.logits.dtype
        assert rows.feedback.dtype == self.feedback.dtype
        self.logits[:num_rows].copy_(logits)
        self.feedback[:num_rows].copy_(rows.feedback)
        self.likeliest[:num_rows].copy_(self.vocabulary.to_target(likeliest(logits)))

    def _replayed_rows(
        self, output: Tensor, tokens: Tensor, features: Tensor, inputs: ForwardInputs
    ) -> tuple[Tensor, Tensor] | None:
        shape = self.replay(inputs, [(self.tokens, tokens), (self.features, features)])
        if shape is None:
            return None
        wanted = self.wanted(shape, inputs)
        return output.index_select(0, wanted), self.feedback.index_select(0, wanted)


def likeliest(logits: Tensor) -> Tensor:
    """The first maximum [R] of each row of `logits` [R, V_d], 0 where it cannot be sampled from; no host reads it."""
    return logits.argmax(-1).masked_fill(~check_finite(logits), 0)


def eagle_graphs(
    head: EagleHead, target: SharesWeights, vocabulary: DraftVocabulary, cache: PagedCache
) -> EagleGraphs | None:
    """Graphs of `head`, whose keys and values are in `cache`; None where its steps are not captured."""
    beside = (embedding_of(head, target), output_of(head, target), head.fc)
    matrices = captured_matrices(head, cache, head.norm_dtype, beside)
    return None if matrices is None else EagleGraphs(head, target, vocabulary, cache, matrices)


MAX_STATES = 64  # requests of a step that draft; logits of all heads are kept for so many


class MedusaGraphs(cache.CapturedSteps[tuple[int, int]]):
    """Runs `head`, whose heads do not see one another's tokens, for `target`; `matrices` are all that a step reads.

    Raises:
        CapacityError: no memory for states and logits.
    """

    max_graphs = sys.maxsize

    def __init__(self, head: MedusaHead, target: PagedModel, matrices: Sequence[Linear]) -> None:
        super().__init__(target.device)
        self.head, self.target, self._matrices = head, target, matrices
        config, weight = head.config, matrices[0].weight
        assert weight is not None
        dtype, device = weight.dtype, weight.device
        self.states = cache.buffer_of((MAX_STATES, config.hidden_size), dtype, device)
        # What a step computes for all rows of its bucket, until the next one.
        self.logits = cache.buffer_of((config.num_heads, MAX_STATES, len(head.vocabulary.ids)), dtype, device)

    def run(self, states: Tensor, num_places: int) -> Tensor | None:
        """Logits [num_places, A, V_d] of the first heads, until the next call; `states` [A, D] are in front of the
        target's final norm. None, and nothing done, where they are to be run as usual.
        """
        if len(states) > MAX_STATES:
            self.steps[MANY_ROWS] += 1
            return None
        self.states[: len(states)].copy_(states)
        graph, reason = self.graph_of((ROW_BUCKETS[bisect_left(ROW_BUCKETS, len(states))], num_places))
        self.steps[reason] += 1
        if graph is None:
            return None
        graph()
        return self.logits[:num_places, : len(states)]

    def read_beside(self) -> tuple[object, ...]:
        """See `CapturedSteps`."""
        return tuple(matrix.weight for matrix in self._matrices)

    def step(self, shape: tuple[int, int]) -> None:
        """See `CapturedSteps`: so many rows and places."""
        num_rows, num_places = shape
        normed = self.target.final_norm(self.states[:num_rows])
        for number in range(num_places):
            self.logits[number, :num_rows].copy_(self.head.predict(number, normed, None, self.target))


def medusa_graphs(head: MedusaHead, target: SharesWeights) -> MedusaGraphs | None:
    """Graphs of `head`; None where its heads are not captured, which are where the steps of its target are."""
    linears = [module for module in head.modules() if isinstance(module, Linear)]
    output = target.output_module() if isinstance(target, SharesModules) else None
    matrices = [*linears, *([] if head.config.has_own_output or output is None else [output])]
    if not isinstance(target, PagedModel) or target.graphs is None:
        reason: str | None = "the steps of its target are not"
    elif head.config.is_sequential:
        reason = "each of its heads sees the tokens before it"
    elif output is None and not head.config.has_own_output:
        reason = "its target does more than multiply by its output matrix"
    elif any(matrix.packed is not None for matrix in matrices):
        reason = PACKED
    elif any(matrix.weight is not None and matrix.weight.dtype != target.dtype for matrix in matrices):
        reason = "its matrices and its target's are of two formats"
    else:
        reason = None
    if not are_wanted("head", reason):
        return None
    assert isinstance(target, PagedModel)
    return MedusaGraphs(head, target, matrices)


class ContextGraphs(HeadGraphs[BlockHead]):
    """Keeps keys and values that every layer of `head` makes of features; `matrices`: see `SlotGraphs`."""

    def __init__(self, head: BlockHead, cache: PagedCache, matrices: Matrices) -> None:
        super().__init__(head, cache, matrices)
        self.features = self.buffer(head.config.layer.hidden_size, dtype=head.norm_dtype)

    def step(self, shape: StepShape) -> None:
        """See `StepGraphs`."""
        positions, attention = self.attended(shape)
        rotary, context = self.head.rotary.at(positions), self.features[: shape.rows]
        for number, layer in enumerate(self.head.decoder_layers):
            self.pool.write(number, attention.write_slots, *layer.self_attn.keys_and_values(context, rotary))


class SlotGraphs(HeadGraphs[BlockHead]):
    """Runs slots of `head` for `target` behind the context that is kept; `matrices` are all that a step reads."""

    def __init__(self, head: BlockHead, target: SharesWeights, cache: PagedCache, matrices: Matrices) -> None:
        super().__init__(head, cache, matrices)
        self.target = target
        width, dtype = head.config.layer.hidden_size, head.norm_dtype
        # What a step computes for all rows of its bucket, until the next one.
        self.hidden = self.buffer(width, dtype=dtype)
        self.logits = self.buffer(head.config.draft_vocab_size, dtype=dtype)

    def step(self, shape: StepShape) -> None:
        """See `StepGraphs`."""
        num_rows = shape.rows
        positions, attention = self.attended(shape)
        no_context = self.hidden[:0]
        hidden = self.head.run(self.tokens[:num_rows], no_context, positions, attention, self.target)
        logits = self.head.logits(hidden, self.target)
        assert logits.dtype == self.logits.dtype
        self.hidden[:num_rows].copy_(hidden)
        self.logits[:num_rows].copy_(logits)


class BlockGraphs:
    """Both graphs of `head` for `target` over the drafter's own `cache`."""

    def __init__(self, head: BlockHead, target: SharesWeights, cache: PagedCache, matrices: Matrices) -> None:
        self.context, self.slots = ContextGraphs(head, cache, matrices), SlotGraphs(head, target, cache, matrices)

    def run(
        self, tokens: Tensor, context: Tensor, rows: BlockRows, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """States [R, D] behind the last norm, and logits [R, V_d] without the correction, of the slots `wanted` of
        `tokens` [T]; `context` [C, D] are features of new context rows. None where the pass is to be run as usual.
        """
        if len(context) and self.context.replay(rows.context, [(self.context.features, context)]) is None:
            return None
        inputs = replace(rows.slots, wanted=[*wanted])
        shape = self.slots.replay(inputs, [(self.slots.tokens, tokens)])
        if shape is None:
            return None
        places = self.slots.wanted(shape, inputs)
        return self.slots.hidden.index_select(0, places), self.slots.logits.index_select(0, places)


def block_graphs(head: BlockHead, target: SharesWeights, cache: PagedCache) -> BlockGraphs | None:
    """Graphs of `head`, whose keys and values are in `cache`; None where its steps are not captured."""
    embedding, output = None, head.lm_head
    if isinstance(target, SharesModules):
        embedding, output = target.embedding_module(), output or target.output_module()
    matrices = captured_matrices(head, cache, head.norm_dtype, (embedding, output))
    return None if matrices is None else BlockGraphs(head, target, cache, matrices)
