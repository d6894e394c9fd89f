"""All layers of a decoder over a few rows in one call: `foretoken_run_layers` of `kernels/decoder.cpp`.

A step over one row runs some twenty small operations a layer. Each costs Python and torch microseconds of a cold cache,
because the weights that were read before it have pushed everything else out: a fifth of a step in 4 bits. The pass
computes what `decoder.DecoderLayer` computes with the same kernels, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.model.attention.paged import PagedAttention
from foretoken.model.layers import Linear
from foretoken.model.product import ProductFields, array_of
from foretoken.model.row_kernels import HEAD_DIMS, RowKernels, SegmentRows, kernels_for
from foretoken.model.sharding import SingleRank

if TYPE_CHECKING:
    from foretoken.model.decoder import Decoder, DecoderLayer


class _LayerFields(ctypes.Structure):
    """`foretoken_decoder_layer`."""

    _fields_ = (
        *((name, ProductFields) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
    )


class _PassFields(ctypes.Structure):
    """`foretoken_pass`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "order", "keys", "values", "x", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("write_slots", "segments")),
        *((name, ctypes.c_int64) for name in ("num_rows", "hidden_size", "num_heads", "num_groups", "head_dim")),
        ("num_slots", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_segments", "is_bf16", "threads")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class LayerTable:
    """The layers of a decoder as the pass takes them: addresses in what is `held`."""

    layers: ctypes.Array[_LayerFields]
    held: tuple[object, ...]


@dataclass(frozen=True)
class LayerPass:
    """One forward through the compiled layers: what stays the same from one run of layers to the next."""

    decoder: Decoder
    table: LayerTable
    kernels: RowKernels
    attention: PagedAttention
    segments: ctypes.Array[SegmentRows]
    cos: Tensor  # [T, 1, K]
    sin: Tensor

    def run(self, x: Tensor, layers: Sequence[int]) -> Tensor:
        """The residual stream [T, D] behind `layers`, which follow one another in `x` [T, D].

        Raises:
            MemoryError: no memory for what lies between two operations.
        """
        local, pool = self.decoder.local, self.attention.pool
        x, cos, sin = x.clone(memory_format=torch.contiguous_format), self.cos.contiguous(), self.sin.contiguous()
        order, (keys, values) = (ctypes.c_int32 * len(layers))(*layers), pool.addresses
        fields = _PassFields(
            *map(ctypes.addressof, (self.table.layers, order, keys, values)),
            *(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), self.attention.write_slots.data_ptr()),
            ctypes.addressof(self.segments),
            *(len(x), local.hidden_size, local.num_heads, local.num_kv_heads, local.head_dim, pool.num_slots),
            *(len(layers), len(self.segments), x.dtype == torch.bfloat16, torch.get_num_threads(), local.norm_eps),
        )
        if not self.kernels.library.foretoken_run_layers(ctypes.byref(fields)):
            raise MemoryError(f"no memory for {len(x)} rows; run fewer rows at a time")
        return x


def layer_pass(decoder: Decoder, x: Tensor, attention: object, cos: Tensor, sin: Tensor) -> LayerPass | None:
    """The pass for this forward; None where a part of it has no kernel here, or a prompt's many rows want torch's."""
    kernels = kernels_for(x)
    if kernels is None or len(x) == 0 or not isinstance(attention, PagedAttention):
        return None
    table = _table(decoder)
    segments = None if table is None else attention.kernel_segments(x)
    if table is None or segments is None:
        return None
    return LayerPass(decoder, table, kernels, attention, array_of(SegmentRows, segments), cos, sin)


def has_exact_rows(decoder: Decoder) -> bool:
    """Whether the pass and the head's product, with attention that reads every segment by the kernel, compute each
    row's logits from its text alone, to the last bit.
    """
    with torch.inference_mode():
        kernels = kernels_for(decoder.norm.weight)
    windows = {decoder.config.window(layer) for layer in range(decoder.config.num_layers)}
    head = decoder.lm_head.packed
    return (
        kernels is not None
        and windows == {None}
        and head is not None
        and head.product is not None
        and _table(decoder) is not None
    )


_TABLES: WeakKeyDictionary[Decoder, tuple[tuple[object, ...], LayerTable | None]] = WeakKeyDictionary()


def _table(decoder: Decoder) -> LayerTable | None:
    """The table of `decoder`, made once for its weights."""
    of = _weights_of(decoder)
    kept = _TABLES.get(decoder)
    if kept is None or any(one is not other for one, other in zip(kept[0], of, strict=True)):
        _TABLES[decoder] = kept = (of, _made(decoder) if _has_kernels(decoder) else None)
    return kept[1]


def _weights_of(decoder: Decoder) -> tuple[object, ...]:
    """What tells that a decoder's weights were replaced: they are all at once."""
    layers = _layers(decoder)
    first, last = layers[0], layers[-1]
    return first.qkv_proj.packed, last.mlp.down_proj.packed, last.post_norm.weight


def _layers(decoder: Decoder) -> list[DecoderLayer]:
    return cast("list[DecoderLayer]", list(decoder.layers))


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    return layer.qkv_proj, layer.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj


def _norms(layer: DecoderLayer) -> tuple[Tensor | None, ...]:
    norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
    return tuple(None if norm is None else norm.weight for norm in norms)


def _has_kernels(decoder: Decoder) -> bool:
    if decoder.local.head_dim not in HEAD_DIMS or not isinstance(decoder.collective, SingleRank):
        return False
    dtype = decoder.norm.weight.dtype
    return all(
        all(linear.packed is not None and linear.packed.product is not None for linear in _linears(layer))
        and all(weight is None or weight.dtype == dtype for weight in _norms(layer))
        and all(linear.bias is None or linear.bias.dtype == dtype for linear in _linears(layer))
        for layer in _layers(decoder)
    )


def _made(decoder: Decoder) -> LayerTable:
    layers, held = [], list[object]()
    for layer in _layers(decoder):
        products = []
        for linear in _linears(layer):
            assert linear.packed is not None
            assert linear.packed.product is not None
            products.append(linear.packed.product.fields(linear.bias))
            held += (linear.packed, linear.packed.product, linear.bias)
        norms = _norms(layer)
        held += norms
        layers.append(_LayerFields(*products, *(None if norm is None else norm.data_ptr() for norm in norms)))
    return LayerTable(array_of(_LayerFields, layers), tuple(held))
