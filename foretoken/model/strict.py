"""Strict numerics: the logits of a position are the same to the last bit, however its rows are batched.

Matrix kernels choose their order of summation by the number of rows, and some by the index of a row. So rows run
through the decoder in tiles of row counts that were measured to give equal bits on this machine, with this checkpoint
and number of threads: `prove` compares them once, and uses only those that agree. If none does, rows run one at a
time. Attention sums over a number of keys that follows from the position alone (`attention/strict.py`).

Where the compiled kernels run all of a model on a CPU, none of this is needed: `PagedModel` is strict
(`has_exact_rows`), and so is `ExactDeviceModel` on a GPU where Triton kernels run all of it. Elsewhere libraries
multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.kernels.launches import PRODUCT_DTYPES, has_triton
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.choice import chosen
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.strict import (
    KEY_BLOCK,
    PathAttention,
    StrictAttention,
    additive_mask,
    attend_together,
    max_positions,
    padded_rows,
    texts_of,
)
from foretoken.model.decoder import Decoder
from foretoken.model.graphs.cache import TREES
from foretoken.model.interface import ForwardOutput, Segment
from foretoken.model.layer_pass import has_exact_rows
from foretoken.model.layers import LayerNorm, Linear, RMSNorm
from foretoken.model.matrices.grouped_kernel import GroupedWeight, MergedWeight
from foretoken.model.paged import PagedModel, Pass
from foretoken.model.paged_cache import DEFAULT_BLOCK_SIZE

# Row counts to try, smallest first; the smallest is what a single row pays for. A CPU reads the weights once for up to
# about 8 rows at no extra cost, a GPU for far more. All are multiples of the smallest: CPU kernels treat odd remainders
# apart.
_SIZES = {"cpu": (8, 16, 24, 32, 48, 64, 96, 128, 192, 256), "cuda": (64, 128, 256)}

# Attention is tried with key counts up to one that torch's CPU kernel, which takes 512 at a time, has to take in two
# parts.
_MAX_KEYS = 512 + KEY_BLOCK


@dataclass(frozen=True)
class Proven:
    """Row counts of a tile that give each row the same bits, ascending; positions that may share an attention call."""

    sizes: tuple[int, ...]
    positions_per_call: int


def strict_kind(decoder: Decoder) -> type[PagedModel]:
    """What runs `decoder` with strict numerics here."""
    if has_exact_rows(decoder):
        return PagedModel
    return ExactDeviceModel if has_exact_launches(decoder) else StrictModel


class StrictModel(PagedModel):
    """`PagedModel` with strict numerics; holds as long as torch's number of threads stays the same."""

    is_strict: ClassVar[bool] = True
    cuts_rows: ClassVar[bool] = True
    needs_equal_threads = True

    def __init__(
        self, decoder: Decoder, num_slots: int, block_size: int = DEFAULT_BLOCK_SIZE, kept: torch.dtype | None = None
    ) -> None:
        super().__init__(decoder, num_slots, block_size, kept)
        self._proven: dict[int, Proven] = {}  # by number of threads: kernels share out their work by it
        _ = self.proven  # at load rather than in the first request's way

    @property
    def proven(self) -> Proven:
        """What holds with the present number of threads."""
        num_threads = torch.get_num_threads()
        if num_threads not in self._proven:
            self._proven[num_threads] = prove(self.decoder)
        return self._proven[num_threads]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """See `interface.LanguageModel`."""
        inputs = self.admit(segments)
        taps = taps if inputs.tapped else ()
        one = Pass(tokens, inputs, taps=taps)
        out = self.run_pass(one)
        if not bool(torch.isfinite(out.logits).all()):
            # A masked key still counts 0 * NaN: a draft token that overflows must not reach the rows before it,
            # which share its call.
            out = self.run_pass(replace(one, alone=True))
        return out

    def run_pass(self, one: Pass) -> ForwardOutput:
        """See `PagedModel.run_pass`."""
        tokens, inputs, taps, proven, device = one.tokens, one.inputs, one.taps, self.proven, self.device
        positions, slots = (
            torch.tensor(inputs.positions, device=device),
            torch.tensor(inputs.slots, device=device),
        )
        texts = [text for reader in inputs.readers for text in texts_of(reader, device, one.alone)]
        last: list[Tensor] = []
        tapped: dict[int, list[Tensor]] = {layer: [] for layer in taps}
        for start, stop, size in cut(len(tokens), proven.sizes):  # a row's past is in its own tile or an earlier one
            attention = StrictAttention(
                self.local, self.pool, start, slots[start:stop], texts, proven.positions_per_call
            )
            hidden = self.decoder(
                _padded(tokens[start:stop], size), _padded(positions[start:stop], size), attention, taps=taps
            )
            last.append(hidden.last)  # padding and all: it stands behind the last row
            for layer, parts in tapped.items():
                parts.append(hidden.taps[layer])
        rows = torch.tensor(inputs.wanted, dtype=torch.int64, device=device)
        logits = by_tiles(self.decoder.logits, torch.cat(last)[rows], proven.sizes)
        if not taps:
            return ForwardOutput(logits, {})
        # Every tile but the last is full, so the padding of the parts stands behind the last row.
        kept = torch.tensor(inputs.tapped, dtype=torch.int64, device=device)
        return ForwardOutput(logits, {layer: torch.cat(parts)[kept] for layer, parts in tapped.items()})


class ExactDeviceModel(PagedModel):
    """`PagedModel` whose products are the kernels' for any number of rows, also those of prompts, and whose rows of a
    tree read their paths alone; steps without trees are captured as usual.
    """

    is_strict: ClassVar[bool] = True

    def __init__(
        self, decoder: Decoder, num_slots: int, block_size: int = DEFAULT_BLOCK_SIZE, kept: torch.dtype | None = None
    ) -> None:
        for module in decoder.modules():
            if isinstance(module, Linear):
                module.keeps_rows_exact = True
        super().__init__(decoder, num_slots, block_size, kept)
        self.attention = PathAttention

    def why_not_replayed(self, one: Pass) -> str | None:
        """See `PagedModel`: paths of trees are as long as the text, each."""
        has_trees = any(not reader.segment.is_chain for reader in one.inputs.readers)
        return TREES if has_trees else super().why_not_replayed(one)


def has_exact_launches(decoder: Decoder) -> bool:
    """Whether kernels of `product_triton`, `row_triton` and `paged_triton` run all of `decoder` where it is."""
    weight = decoder.norm.weight
    if weight.device.type != "cuda" or weight.dtype not in PRODUCT_DTYPES or not has_triton():
        return False
    if decoder.shard.world > 1 or decoder.config.experts is not None:
        return False
    return chosen(weight.device, weight.dtype) is FusedAttention and all(map(_is_exact, decoder.modules()))


def _is_exact(module: nn.Module) -> bool:
    if isinstance(module, Linear):
        return module.weight is not None
    return module.weight.dim() == 1 if isinstance(module, RMSNorm) else not isinstance(module, LayerNorm)


def cut(num_rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, tile size) over `num_rows` rows: the largest while it fills, then the smallest for the rest."""
    start = 0
    while start < num_rows:
        size = next((size for size in sizes if size >= num_rows - start), sizes[-1])
        stop = min(num_rows, start + size)
        yield start, stop, size
        start = stop


def by_tiles(function: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int]) -> Tensor:
    """`function` [n, ...] -> [n, ...] applied to `x` in tiles."""
    if len(x) == 0:
        return function(x)
    return torch.cat(
        [function(_padded(x[start:stop], size))[: stop - start] for start, stop, size in cut(len(x), sizes)]
    )


def _padded(x: Tensor, size: int) -> Tensor:
    """`x` with zero rows up to `size`, in memory of its own: kernels may look at the alignment of their input."""
    padded = x.new_zeros(size, *x.shape[1:])
    padded[: len(x)] = x
    return padded


@torch.inference_mode()
def prove(decoder: Decoder) -> Proven:
    """Find out which row counts, and how many positions to an attention call, give the same bits here.

    Takes seconds for a model of a billion weights, and the memory of its largest matrix twice over while it lasts.
    """
    config, weight = decoder.local, decoder.norm.weight
    sizes = _agreeing(decoder, _SIZES[weight.device.type][0]) or _agreeing(decoder, 1)
    assert sizes is not None
    agree = _everywhere(decoder, _positions_agree(config, weight.dtype, weight.device))
    return Proven(sizes, max_positions(config) if agree else 1)


def _agreeing(decoder: Decoder, smallest: int) -> tuple[int, ...] | None:
    """Row counts that agree with `smallest`, itself first; None if with `smallest` rows the place of a row matters."""
    larger = [size for size in _SIZES[decoder.norm.weight.device.type] if size > smallest]
    for function, rows in _probes(decoder):
        expected, few = by_tiles(function, rows, (smallest,)), rows[: 4 * smallest]
        for shift in range(1, smallest):
            moved = by_tiles(function, few.roll(shift, 0), (smallest,)).roll(-shift, 0)
            if not _everywhere(decoder, torch.equal(moved, expected[: len(few)])):
                return None
        larger = [
            size for size in larger if _everywhere(decoder, torch.equal(by_tiles(function, rows, (size,)), expected))
        ]
    return smallest, *larger


def _everywhere(decoder: Decoder, holds: bool) -> bool:
    """Whether it holds on every rank: all of them must go on alike."""
    failed = decoder.norm.weight.new_full((1,), 0.0 if holds else 1.0)
    return not decoder.collective.all_gather(failed).any().item()


def _probes(decoder: Decoder) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Functions of rows, with rows to try them on: first layer and head as they are, then each shape of matrix on its
    own.

    A sum of ordinary numbers hides most changes of order when it is rounded to 16 bits. So the matrices are tried with
    numbers whose products cancel: all that comes out is what was rounded on the way.
    """
    config, weight = decoder.config, decoder.norm.weight
    count = _SIZES[weight.device.type][-1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (count,), generator=generator)
    rows = torch.stack((tokens, torch.arange(count) % config.max_context_tokens), dim=1).to(weight.device)
    yield lambda tile: _alone_in_its_text(decoder, *tile.unbind(1)), rows
    linears = {
        (module.in_features, module.out_features, module.bias is None, module.weight is None): module
        for module in (*decoder.layers[0].modules(), decoder.lm_head)
        if isinstance(module, Linear)
    }
    for linear in linears.values():
        if isinstance(linear.packed, GroupedWeight | MergedWeight):
            numbers = torch.randn(count, linear.in_features, generator=generator, dtype=torch.float32)
            yield linear, numbers.to(weight)  # sums of integers have no order to hide: its own rows will do
            continue
        order = torch.randperm(linear.in_features // 2, generator=generator)
        with torch.device("meta"):
            twin = Linear(linear.in_features, linear.out_features, linear.bias is not None)
        few = _cancelling(61, order, linear.in_features, 1, generator).to(weight)
        twin.weight = nn.Parameter(
            few.repeat(-(-linear.out_features // len(few)), 1)[: linear.out_features], requires_grad=False
        )
        if twin.bias is not None:
            twin.bias = nn.Parameter(weight.new_zeros(linear.out_features), requires_grad=False)
        if linear.weight is None:
            twin.pack()
        yield twin, _cancelling(count, order, linear.in_features, -1, generator).to(weight)


def _cancelling(count: int, order: Tensor, size: int, sign: int, generator: torch.Generator) -> Tensor:
    """`[count, size]`: numbers of very different magnitude and `sign` times the same numbers in another order."""
    half = torch.randn(count, size // 2, generator=generator, dtype=torch.float32) * 2.0 ** torch.randint(
        7, (count, size // 2), generator=generator
    )
    return F.pad(torch.cat((half, sign * half[:, order]), dim=1), (0, size % 2))


class _OwnValue:
    """Attention of texts of one token each: the answer is the row's own value. Remembers what it was given."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:  # noqa: ARG002 - any layer
        self.given = torch.cat((query, key, value), dim=1).flatten(1)  # [n, (H + 2G) K]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _alone_in_its_text(decoder: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
    """What the first layer and the head compute for rows that see only themselves: [n] -> [n, (H + 2G) K + D + V]."""
    attention = _OwnValue()
    last = decoder(tokens, positions, attention, num_layers=1).last
    return torch.cat((attention.given, last, decoder.logits(last)), dim=1)


def _positions_agree(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention over several positions in one call gives the bits of one call for each.

    Products and sums cancel here too, so that what is left is rounding. Not only the rows of a product matter: torch's
    CPU kernel sums in scratch memory whose alignment follows from the thread and the number of rows, and MKL goes by
    alignment.
    """
    generator = torch.Generator().manual_seed(0)
    heads, groups, head_dim, most = config.num_heads, config.num_kv_heads, config.head_dim, max_positions(config)
    order = torch.randperm(head_dim // 2, generator=generator)
    sinks = torch.zeros(heads, device=device, dtype=torch.float32) if config.has_sinks else None
    counts = {
        padded_rows(count, config): count for count in range(1, most + 1)
    }.values()  # the largest for each number of rows

    def steep(*shape: int) -> Tensor:
        """Magnitudes from 2^4 to 2^12: what is rounded off a score, though it is 0, then moves the softmax."""
        return torch.randn(shape, generator=generator, dtype=torch.float32) * 2.0 ** torch.randint(
            4, 13, shape, generator=generator
        )

    def agree(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> bool:
        query, keys, values = (x.to(device, dtype) for x in (query, keys, values))

        def read(first: int, last: int) -> Tensor:
            mask = additive_mask(seen[first:last], config).to(query)
            return attend_together(query[first:last].clone(), keys, values, mask, config, sinks)

        single = torch.cat([read(i, i + 1) for i in range(most)])
        return all(torch.equal(read(0, count), single[:count]) for count in counts)

    for num_keys in range(KEY_BLOCK, _MAX_KEYS + 1, KEY_BLOCK):
        a, b, v = (
            steep(most, heads, head_dim // 2),
            steep(groups, num_keys, head_dim // 2),
            steep(groups, num_keys // 2, head_dim),
        )
        query, keys = torch.cat((a, a[..., order]), dim=-1), torch.cat((b, -b[..., order]), dim=-1)
        seen = torch.ones(most, num_keys, dtype=torch.bool).tril(num_keys - most)
        if not agree(
            query, keys, torch.randn(groups, num_keys, head_dim, generator=generator, dtype=torch.float32), seen
        ):
            return False
        values = torch.cat((v, -v.flip(1)), dim=1)  # value j cancels value -1 - j
        if not agree(torch.zeros_like(query), keys, values, seen & seen.flip(1)):
            return False
    return True
