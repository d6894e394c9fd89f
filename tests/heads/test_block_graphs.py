"""Graphs of a block drafter's pass; see `helpers.emulated_graphs`. Whole runs of the engine are in
`tests/engine/test_graphs.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.block import BlockHead, CachedAttention, admit_blocks
from foretoken.heads.graphs import BlockGraphs, block_graphs
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.graphs.cache import MANY_ROWS, REPLAYED
from foretoken.model.graphs.choice import GRAPHS_VARIABLE
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import PagedCache, cache_beside
from tests.helpers.checkpoints import token_ids
from tests.helpers.emulated_graphs import EmulatedCapture, emulated_graphs, memory_of
from tests.helpers.random_heads import random_head
from tests.model.test_graphs import BLOCK, TOLERANCE, decoder_of

# New rows of context and slots of each sequence, pass by pass; the fourth has too much context for a graph.
PASSES = (((9, 6), (31, 6)), ((1, 3), (2, 6)), ((0, 6), (0, 4)), ((140, 6), (1, 6)), ((2, 6), (0, 6)))


def parts(name: str) -> tuple[BlockHead, PagedModel, PagedCache]:
    target = PagedModel(decoder_of("llama"), 600, BLOCK)
    head = random_head(name, target.config).double()
    assert isinstance(head, BlockHead)
    return head, target, cache_beside(target, head.config.layer, torch.float64)


def passes(head: BlockHead, target: PagedModel, cache: PagedCache, graphs: BlockGraphs | None) -> list[Tensor]:
    """States and logits of every slot, pass by pass."""
    found: list[Tensor] = []
    for sequence in range(2):
        cache.open(sequence)
    for turn, rows in enumerate(PASSES):
        new, slots = ([one[i] for one in rows] for i in range(2))
        tokens = torch.tensor(token_ids(sum(slots), seed=turn))
        generator = torch.Generator().manual_seed(turn)
        context = torch.randn(sum(new), head.config.layer.hidden_size, generator=generator, dtype=torch.float64)
        admitted = admit_blocks(cache, (0, 1), new, slots, head.config.is_causal)
        out = None if graphs is None else graphs.run(tokens, context, admitted, range(len(tokens)))
        if out is None:
            attention = CachedAttention(cache, admitted)
            hidden = head.run(tokens, context, attention.positions, attention, target)
            out = hidden, head.logits(hidden, target)
        admitted.commit(cache)
        found.extend(out)
    return found


@pytest.mark.parametrize("name", ["block:cut", "block:open"])
def test_a_replayed_pass_is_that_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it reads nothing but weights, tables, cache and inputs."""
    monkeypatch.setattr("foretoken.model.graphs.cache.MAX_ROWS", 128)
    with emulated_graphs(), torch.inference_mode():
        head, target, cache = parts(name)
        other = cache_beside(target, head.config.layer, torch.float64)
        other.attention = PagedAttention
        graphs = block_graphs(head, target, cache)
        assert graphs is not None
        got, expected = passes(head, target, cache, graphs), passes(head, target, other, None)
    for one, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(one, wanted, **TOLERANCE)
    assert graphs.context.steps == {REPLAYED: 3, MANY_ROWS: 1}
    assert graphs.slots.steps == {REPLAYED: 4}
    known = [*head.parameters(), *target.decoder.parameters(), head.rotary.cos, head.rotary.sin]
    known += [*cache.pool.keys, *cache.pool.values]
    for own, buffers in ((graphs.context, ["features"]), (graphs.slots, ["tokens", "hidden", "logits"])):
        kept = {memory_of(tensor) for tensor in (own.block, *(getattr(own, name) for name in buffers))}
        memory = kept | {memory_of(tensor) for tensor in known}
        assert isinstance(own.capture, EmulatedCapture)
        for graph in own.capture.graphs:
            assert kept <= graph.inputs.keys() <= memory


def test_block_drafters_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told to, they run as ever."""
    head, target, cache = parts("block:cut")
    assert block_graphs(head, target, cache) is None
    monkeypatch.setenv(GRAPHS_VARIABLE, "on")
    with pytest.raises(ConfigError, match="Triton"):
        block_graphs(head, target, cache)
