"""The cache of a padded batch: one contiguous tensor per layer, a row per sequence, all rows ending at a common right
edge.

A row of l tokens in a batch whose longest has L begins with L - l pads. When rows grow by different numbers of tokens
they no longer end together, and keys and values have to be moved in every layer: that is the realignment whose cost the
ragged layout does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.model.architecture import ModelConfig

_KEYS, _VALUES = 0, 1
_FIRST_COLUMNS = 64


def in_place(before: Sequence[int], sequences: Sequence[int]) -> list[int]:
    """`sequences` in the order that moves least: who has a row in `before` that still exists keeps it, the others fill
    the gaps.
    """
    wanted = set(sequences)
    stay = {b: sequence for b, sequence in enumerate(before[: len(sequences)]) if sequence in wanted}
    others = iter([sequence for sequence in sequences if sequence not in stay.values()])
    return [stay[b] if b in stay else next(others) for b in range(len(sequences))]


class PaddedCache:
    """Keys and values of the batch, one `[2, B, G, C, K]` tensor per layer (G key/value heads, C columns, K head_dim).

    Row b holds `sequences[b]`, whose first token stands in column `pads[b]`; `width` columns are filled. What lies
    beyond belongs to a forward whose tokens are not kept yet, or to nobody.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.layers: list[Tensor] = []  # each [2, B, G, C, K]
        self.sequences: list[int] = []
        self.pads: list[int] = []
        self.width = 0

    @property
    def num_columns(self) -> int:
        """C."""
        return self.layers[0].shape[3] if self.layers else 0

    def begin(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """Replace the batch by empty rows, padded for texts of `lengths` tokens that will end together."""
        self.sequences, self.width = list(sequences), 0
        self.pads = [max(lengths) - length for length in lengths]
        if self.layers and self.layers[0].shape[1] < len(sequences):
            self.layers = []
        self.reserve(max(lengths))

    def end(self, sequence: int) -> None:
        """Forget a sequence; its row goes with the next `align`."""

    def reserve(self, num_columns: int) -> None:
        """Room for `num_columns` columns; the tensors at least double when they grow. New memory is zero: a masked NaN
        would still count.
        """
        if self.layers and num_columns <= self.num_columns:
            return
        rows = self.layers[0].shape[1] if self.layers else len(self.sequences)
        self.layers = self._grown(self.layers, rows, max(num_columns, 2 * self.num_columns, _FIRST_COLUMNS))

    def before_forward(self, num_new: int) -> None:
        """Make ready to write `num_new` columns behind `width`."""
        self.reserve(self.width + num_new)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [B, n, G, K] in the columns behind `width`."""
        rows, columns = slice(0, len(self.sequences)), slice(self.width, self.width + key.shape[1])
        self.layers[layer][_KEYS, rows, :, columns].copy_(key.transpose(1, 2))
        self.layers[layer][_VALUES, rows, :, columns].copy_(value.transpose(1, 2))

    def read(self, layer: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, G, C, K]` of the first `num_columns` columns, as views."""
        both = self.layers[layer][:, : len(self.sequences), :, :num_columns]
        return both[_KEYS], both[_VALUES]

    def align(self, sequences: Sequence[int], lengths: Sequence[int]) -> int:
        """Keep the first `lengths[b]` tokens of every sequence and let the rows end together again; how many rows had
        to move.

        `sequences` are some of the present ones, in the order of `in_place`: rows that left are closed up with rows
        from the end. After EQSPEC's unpad-append-repad (`eBay/spec_dec`): [old_pad, old_pad + l) goes to [new_pad,
        new_pad + l) in every layer.
        """
        width = max(lengths)
        pads = [width - length for length in lengths]
        self.reserve(width)
        moves = [move for move in self._moves(sequences, lengths, pads) if move[:2] != move[2:4]]
        for layer in self.layers:
            for source, start, row, pad, length in moves:
                piece = layer[:, source, :, start : start + length]  # [2, G, l, K]
                overlaps = source == row and abs(start - pad) < length
                layer[:, row, :, pad : pad + length].copy_(piece.clone() if overlaps else piece)
        self.sequences, self.pads, self.width = list(sequences), pads, width
        return len(moves)

    def _moves(
        self, sequences: Sequence[int], lengths: Sequence[int], pads: Sequence[int]
    ) -> list[tuple[int, int, int, int, int]]:
        """(old row, old pad, new row, new pad, tokens) of every row."""
        row_of = {sequence: row for row, sequence in enumerate(self.sequences)}
        moves = []
        for row, (sequence, length, pad) in enumerate(zip(sequences, lengths, pads, strict=True)):
            source = row_of[sequence]
            assert source == row or source >= len(sequences), "a row would be written over before it is read"
            moves.append((source, self.pads[source], row, pad, length))
        return moves

    def _grown(self, layers: Sequence[Tensor], num_rows: int, num_columns: int) -> list[Tensor]:
        """Larger tensors with the same contents."""
        shape = (2, num_rows, self.config.num_kv_heads, num_columns, self.config.head_dim)
        grown = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.config.num_layers)]
        for old, new in zip(layers, grown, strict=False):
            new[:, : old.shape[1], :, : old.shape[3]].copy_(old)
        return grown


class PublishedCache(PaddedCache):
    """A padded batch kept as the published code keeps it: every forward makes longer tensors, every realignment fills
    new ones, row by row.
    """

    def begin(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """See `PaddedCache`."""
        super().begin(sequences, lengths)
        self.layers = self._grown((), len(sequences), 0)

    def reserve(self, num_columns: int) -> None:
        """Nothing is kept free."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `PaddedCache`."""
        new = torch.stack((key.transpose(1, 2), value.transpose(1, 2)))  # [2, B, G, n, K]
        self.layers[layer] = torch.cat((self.layers[layer], new), dim=3)

    def align(self, sequences: Sequence[int], lengths: Sequence[int]) -> int:
        """See `PaddedCache`; every row is copied."""
        width = max(lengths)
        pads = [width - length for length in lengths]
        row_of = {sequence: row for row, sequence in enumerate(self.sequences)}
        aligned = self._grown((), len(sequences), width)
        for layer, new in zip(self.layers, aligned, strict=True):
            for row, (sequence, length, pad) in enumerate(zip(sequences, lengths, pads, strict=True)):
                source = row_of[sequence]
                start = self.pads[source]
                new[:, row, :, pad:].copy_(layer[:, source, :, start : start + length])
        self.layers, self.sequences, self.pads, self.width = aligned, list(sequences), pads, width
        return len(sequences)


class PooledCache(PaddedCache):
    """A padded batch drawn from a pool of sequences, each of which also has its keys and values in `store`, without
    pads.

    A row that is in the batch already, at the same place and behind the same pads, needs no copy; any other row is
    copied in from the store. What a forward writes goes to both, so nothing is copied out.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, num_slots: int) -> None:
        super().__init__(config, dtype, device)
        self.num_slots = num_slots
        self.store: list[Tensor] = []  # each [2, S, G, C + 1, K]; the last column takes the pads of a prompt
        self.slots: dict[int, int] = {}
        self._places: tuple[Tensor, Tensor] | None = (
            None  # slot [B, 1] and column [B, n] of what the running forward writes
        )

    def begin(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """See `PaddedCache`; the sequences are new to the pool."""
        free = iter(sorted(set(range(self.num_slots)) - set(self.slots.values())))
        self.slots |= {sequence: next(free) for sequence in sequences}
        super().begin(sequences, lengths)

    def end(self, sequence: int) -> None:
        """Forget a sequence."""
        del self.slots[sequence]

    def reserve(self, num_columns: int) -> None:
        """See `PaddedCache`; the store grows too."""
        super().reserve(num_columns)
        if not self.store or self.store[0].shape[3] <= self.num_columns:
            self.store = self._grown(self.store, self.num_slots, self.num_columns + 1)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `PaddedCache`."""
        super().write(layer, key, value)
        assert self._places is not None
        by_token = self.store[layer].permute(1, 3, 0, 2, 4)  # [S, C + 1, 2, G, K]
        by_token.index_put_(self._places, torch.stack((key, value), dim=2))  # [B, n, 2, G, K]

    def before_forward(self, num_new: int) -> None:
        """See `PaddedCache`; where the new columns belong in the store is the same for all layers."""
        super().before_forward(num_new)
        slots = torch.tensor([self.slots[sequence] for sequence in self.sequences], device=self.device)[
            :, None
        ]  # [B, 1]
        at = (
            self.width
            + torch.arange(num_new, device=self.device)
            - torch.tensor(self.pads, device=self.device)[:, None]
        )  # [B, n]
        self._places = slots, torch.where(at < 0, self.store[0].shape[3] - 1, at)

    def align(self, sequences: Sequence[int], lengths: Sequence[int]) -> int:
        """See `PaddedCache`; `sequences` are any of the pool."""
        width = max(lengths)
        pads = [width - length for length in lengths]
        stays = list(zip(self.sequences, self.pads, strict=True))
        rows = [
            row for row, at in enumerate(zip(sequences, pads, strict=True)) if row >= len(stays) or at != stays[row]
        ]
        self.reserve(width)
        for layer, store in zip(self.layers, self.store, strict=True):
            for row in rows:
                layer[:, row, :, pads[row] : width].copy_(store[:, self.slots[sequences[row]], :, : lengths[row]])
        self.sequences, self.pads, self.width = list(sequences), pads, width
        return len(rows)
