"""The pass of a block drafter as CUDA graphs: one keeps what its layers make of new context rows, one runs the slots.

What is drawn from the slots' logits, and corrected by the token before, runs behind them as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foretoken.heads.block import BlockHead
from foretoken.heads.block_attention import BlockRows
from foretoken.heads.graphs import HeadGraphs, Matrices, captured_matrices
from foretoken.model.graphs.shape import StepShape
from foretoken.model.interface import SharesModules, SharesWeights
from foretoken.model.paged_cache import PagedCache


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
