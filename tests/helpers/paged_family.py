"""A checkpoint that our decoder runs over a block-table cache, beside transformers; and what tests do with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.kv.blocks import slots_of
from foretoken.model.decoder import Decoder
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import transformers_logits
from tests.model.test_families import NARROW, wide_oracle

BLOCK = 4
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
#            0
#        1      2        a tree whose nodes are not in depth-first order
#      3   5    4
#      6
TREE = (-1, 0, 0, 1, 2, 1, 3)
LEAF_PATHS = ((0, 1, 3, 6), (0, 1, 5), (0, 2, 4))


class Family:
    """One checkpoint in one dtype: our decoder, and the oracle's logits for any text."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.decoder: Decoder = load_decoder(folder, dtype=dtype)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def model(self, num_slots: int = 400, block_size: int = BLOCK) -> PagedModel:
        return PagedModel(self.decoder, num_slots, block_size)

    def oracle(self, ids: Sequence[int]) -> Tensor:
        """Logits `[T, V]` by transformers."""
        key = tuple(ids)
        if key not in self._known:
            ask = wide_oracle if self.dtype == torch.float64 else transformers_logits
            self._known[key] = ask(self.folder, list(ids))  # type: ignore[operator]
        return self._known[key]

    def check(self, got: Tensor, expected: Tensor) -> None:
        assert got.dtype == self.dtype
        atol = 1e-5 if self.decoder.config.model_type in NARROW else TOLERANCE[self.dtype]
        torch.testing.assert_close(got, expected, atol=max(atol, TOLERANCE[self.dtype]), rtol=0)


def run(model: PagedModel, *parts: tuple[int, Sequence[int], Sequence[int]], logits: int | None = None) -> Tensor:
    """One forward of (sequence, pending tokens, node tokens with parents below): all logits, or the last `logits` of
    each.
    """
    flat: list[int] = []
    segments = []
    for sequence, pending, nodes in parts:
        flat += [*pending, *nodes]
        parents = TREE[: len(nodes)]
        segments.append(
            Segment(sequence, len(pending), parents, len(pending) + len(nodes) if logits is None else logits)
        )
    return model.forward(torch.tensor(flat), segments).logits


def extend(model: PagedModel, sequence: int, tokens: Sequence[int]) -> Tensor:
    """Run committed tokens."""
    out = run(model, (sequence, tokens, ()))
    model.commit(sequence, len(tokens))
    return out


def path_of(node: int) -> list[int]:
    path = [node]
    while TREE[path[0]] >= 0:
        path.insert(0, TREE[path[0]])
    return path


def scatter(model: PagedModel, num_blocks: int = 12) -> None:
    """Leave only every second block of the first `2 * num_blocks` free, so that no sequence can stay in one piece."""
    free = model.allocator.num_blocks
    model.open(-1)
    model.reserve(-1, free * BLOCK)
    held = model.tables[-1].blocks
    give = held[1 : 2 * num_blocks : 2]
    for block in give:
        held.remove(block)
        model.allocator._drop(block)


def is_scattered(model: PagedModel, sequence: int) -> bool:
    table = model.tables[sequence]
    return isinstance(slots_of(table, 0, table.length, BLOCK), list)
