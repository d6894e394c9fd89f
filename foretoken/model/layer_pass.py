"""All layers of a decoder, or of a trained head, over a few rows in one call: `foretoken_run_layers` of
`kernels/decoder.cpp`.

A step over one row runs some twenty small operations a layer. Each costs Python and torch microseconds of a cold cache,
because the weights that were read before it have pushed everything else out: a fifth of a step in 4 bits. The pass
computes what `decoder.DecoderLayer` computes with the same kernels, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.expert_launches import ExpertParts
from foretoken.model.experts import expert_table
from foretoken.model.layers import Linear, Norm
from foretoken.model.matrices.dense import Product, ProductFields, array_of, merged_product
from foretoken.model.row_kernels import ACTIVATIONS, NormFields, RowKernels, SegmentRows, kernels_for

if TYPE_CHECKING:
    from foretoken.model.decoder import Decoder

Rotations = Sequence[tuple[Tensor, Tensor]]  # by table: cos and sin, [*, K] or [*, 1, K]


@dataclass(frozen=True)
class LayerParts:
    """One layer: its matrices, those of one input together in the order of their outputs, and the norms that it has.

    `beside_norm` is that of rows which `qkv` reads in front of the stream's. `keeps_normed`: the stream goes on from
    what `attention_norm` makes of it. `rope`: number of the layer's table of cos and sin; None: it does not rotate.
    `experts` stand in place of `gate_up` and `down`.
    """

    qkv: Sequence[Linear]
    o: Sequence[Linear]
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    attention_norm: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    beside_norm: Norm | None = None
    keeps_normed: bool = False
    rope: int | None = 0
    experts: ExpertParts | None = None
    sinks: Tensor | None = None  # [H], see `decoder.Attention`

    @property
    def matrices(self) -> tuple[Sequence[Linear], ...]:
        """By input; those of the MLP are none where there are experts."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """In the order of `_LayerFields`."""
        return tuple(getattr(self, name) for name in _NORMS)


_NORMS = (
    *("beside_norm", "attention_norm", "q_norm", "k_norm"),
    *("attention_out_norm", "mlp_norm", "mlp_out_norm"),
)


class LayerStack(Protocol):
    """Layers that follow one another, as the pass takes them."""

    @property
    def layer_shape(self) -> ModelConfig:
        """Theirs, on this rank."""

    def layer_parts(self) -> Sequence[LayerParts]:
        """All of them."""

    def output_parts(self) -> tuple[Norm, Linear] | None:
        """What makes logits of the stream behind them: a norm of the layers' kind, then a matrix."""

    def weight_marks(self) -> tuple[object, ...]:
        """Others than before once weights were replaced."""


class _LayerFields(ctypes.Structure):
    """`foretoken_decoder_layer`."""

    _fields_ = (
        *((name, ProductFields) for name in ("qkv", "o", "gate_up", "down")),
        *((name, NormFields) for name in _NORMS),
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("keeps_normed", "rope")),
        *(("sinks", ctypes.c_void_p), ("scale", ctypes.c_float), ("softcap", ctypes.c_float)),
        ("window", ctypes.c_int64),
    )


class _KindFields(ctypes.Structure):
    """`foretoken_layer_kind`."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        ("is_layer", ctypes.c_int32),
        ("residual_multiplier", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("activation", "norms_projection", "is_parallel")),
    )

    @classmethod
    def of(cls, shape: ModelConfig) -> _KindFields:
        """What the layers of `shape` have in common."""
        return cls(
            *(shape.norm_eps, shape.norm.offset, shape.norm.kind == "layer", shape.residual_multiplier),
            *(ACTIVATIONS.index(shape.activation), shape.qk_norm_over == "projection", shape.is_parallel),
        )


class _HeadFields(ctypes.Structure):
    """`foretoken_head`."""

    _fields_ = (
        ("norm", NormFields),
        ("output", ProductFields),
        *((name, ctypes.c_void_p) for name in ("rows", "logits")),
        ("num_rows", ctypes.c_int64),
    )


class PassFields(ctypes.Structure):
    """`foretoken_pass`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "order", "keys", "values", "x", "beside", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("positions", "write_slots", "segments", "taps", "head")),
        *((name, ctypes.c_int64) for name in ("num_rows", "hidden_size", "num_heads", "num_groups", "head_dim")),
        ("num_slots", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_segments", "is_bf16", "is_half_cache", "threads")),
        ("kind", _KindFields),
    )

    @classmethod
    def without_rows(
        cls,
        shape: ModelConfig,
        table: LayerTable,
        pool: KVPool,
        order: ctypes.Array[ctypes.c_int32],
        dtype: torch.dtype,
    ) -> PassFields:
        """What passes over the layers `order` have in common; all that is given lives on."""
        keys, values = pool.addresses
        return cls(
            *map(ctypes.addressof, (table.layers, order, keys, values)),
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_groups=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_slots=pool.num_slots,
            num_layers=len(order),
            is_bf16=dtype == torch.bfloat16,
            is_half_cache=pool.dtype == torch.float16,
            threads=torch.get_num_threads(),
            kind=_KindFields.of(shape),
        )


@dataclass(frozen=True)
class LayerTable:
    """The layers of a stack as the kernel takes them: addresses in what is `held`. `head`: norm and matrix behind them,
    None where the kernel has none.
    """

    layers: ctypes.Array[_LayerFields]
    head: tuple[NormFields, ProductFields] | None
    held: tuple[object, ...]


class PassOutput(NamedTuple):
    """The residual stream `last` [T, D], what tapped layers get, each [T, D], and logits [R, N] if asked for."""

    last: Tensor
    taps: dict[int, Tensor]
    logits: Tensor | None


@dataclass(frozen=True)
class LayerPass:
    """One forward through the compiled layers: what stays the same from one run of layers to the next."""

    shape: ModelConfig
    table: LayerTable
    kernels: RowKernels
    attention: PagedAttention
    segments: ctypes.Array[SegmentRows]
    rotations: Rotations
    positions: Tensor | None  # [T]
    beside: Tensor | None  # [T, D]

    @property
    def has_head(self) -> bool:
        """Whether logits can be asked for."""
        return self.table.head is not None

    def run(
        self, x: Tensor, layers: Sequence[int], taps: Sequence[int] = (), wanted: Tensor | slice | None = None
    ) -> PassOutput:
        """Run `layers`, which follow one another, over the stream `x` [T, D]; keep what those in `taps` get.

        `wanted`: the rows whose logits are wanted, `[R]` int64 or all of them, see `has_head`.

        Raises:
            MemoryError: no memory for what lies between two operations.
        """
        kept = {layer: torch.empty_like(x, memory_format=torch.contiguous_format) for layer in layers if layer in taps}
        x = x.clone(memory_format=torch.contiguous_format)
        tables = [(cos.contiguous(), sin.contiguous()) for cos, sin in self.rotations]
        positions = None if self.positions is None else self.positions.contiguous()
        cos, sin = ((ctypes.c_void_p * len(tables))(*(pair[i].data_ptr() for pair in tables)) for i in range(2))
        beside = None if self.beside is None else self.beside.contiguous()
        order = (ctypes.c_int32 * len(layers))(*layers)
        fields = PassFields.without_rows(self.shape, self.table, self.attention.pool, order, x.dtype)
        fields.x, fields.beside = x.data_ptr(), None if beside is None else beside.data_ptr()
        fields.cos, fields.sin = ctypes.addressof(cos), ctypes.addressof(sin)
        fields.positions = None if positions is None else positions.data_ptr()
        fields.write_slots, fields.segments = self.attention.write_slots.data_ptr(), ctypes.addressof(self.segments)
        fields.num_rows, fields.num_segments = len(x), len(self.segments)
        if kept:
            places = (ctypes.c_void_p * len(layers))(*(kept[i].data_ptr() if i in kept else None for i in layers))
            fields.taps = ctypes.addressof(places)
        logits = None
        if wanted is not None:
            assert self.table.head is not None
            rows = None if isinstance(wanted, slice) else wanted.contiguous()
            logits = torch.empty(len(x) if rows is None else len(rows), self.table.head[1].num_outputs, dtype=x.dtype)
            head = _HeadFields(
                *self.table.head, None if rows is None else rows.data_ptr(), logits.data_ptr(), len(logits)
            )
            fields.head = ctypes.addressof(head)
        if not self.kernels.library.foretoken_run_layers(ctypes.byref(fields)):
            raise MemoryError(f"no memory for {len(x)} rows; run fewer rows at a time")
        return PassOutput(x, kept, logits)


def layer_pass(
    stack: LayerStack,
    x: Tensor,
    attention: object,
    rotations: Rotations,
    beside: Tensor | None = None,
    positions: Tensor | None = None,
) -> LayerPass | None:
    """The pass for this forward; None where a part of it has no kernel here, or a prompt's many rows want torch's.

    `rotations` are the tables that layers turn queries and keys by, of which row t of the stream `x` [T, D] takes row
    `positions[t]`, by default row t. `beside` [T, D] is what layers with a `beside_norm` read in front of the stream.
    """
    kernels = kernels_for(x)
    if kernels is None or len(x) == 0 or not isinstance(attention, PagedAttention):
        return None
    table = layer_table(stack)
    segments = None if table is None else attention.kernel_segments(x)
    if table is None or segments is None:
        return None
    rows = (rotations, positions, beside)
    return LayerPass(stack.layer_shape, table, kernels, attention, array_of(SegmentRows, segments), *rows)


def has_exact_rows(decoder: Decoder) -> bool:
    """Whether pass and head, with `KernelAttention`, compute each row's logits from its text alone, to the last bit."""
    with torch.inference_mode():
        kernels = kernels_for(decoder.norm.weight)
    head = decoder.lm_head.packed
    return kernels is not None and head is not None and head.product is not None and layer_table(decoder) is not None


_TABLES: WeakKeyDictionary[LayerStack, tuple[tuple[object, ...], LayerTable | None]] = WeakKeyDictionary()


def layer_table(stack: LayerStack) -> LayerTable | None:
    """The table of `stack`, made once for its weights; None where a layer has a part without a kernel."""
    marks = stack.weight_marks()
    kept = _TABLES.get(stack)
    if kept is None or any(one is not other for one, other in zip(kept[0], marks, strict=True)):
        _TABLES[stack] = kept = (marks, _made(stack.layer_parts(), stack.layer_shape, stack.output_parts()))
    return kept[1]


def _made(layers: Sequence[LayerParts], shape: ModelConfig, behind: tuple[Norm, Linear] | None) -> LayerTable | None:
    if not layers:
        return None
    dtype = next(norm.weight.dtype for norm in layers[0].norms if norm is not None)
    rows, held = [], list[object]()
    for index, layer in enumerate(layers):
        matrices = [linears for linears in layer.matrices if linears]
        products = [_product(linears, dtype) for linears in matrices]
        experts = None if layer.experts is None else expert_table(layer.experts, dtype)
        numbers = [tensor for norm in layer.norms if norm is not None for tensor in (norm.weight, norm.bias)]
        if None in products or any(tensor is not None and tensor.dtype != dtype for tensor in numbers):
            return None
        if layer.experts is not None and experts is None:
            return None
        biases = [linears[0].bias for linears in matrices]
        fields = [one.fields(bias) for one, bias in zip(products, biases, strict=True) if one is not None]
        fields += [ProductFields()] * (len(layer.matrices) - len(fields))
        norms = [NormFields() if norm is None else NormFields.of(norm.weight, norm.bias) for norm in layer.norms]
        mixture = None if experts is None else ctypes.addressof(experts.fields)
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        at = None if sinks is None else sinks.data_ptr()
        scoring = (at, shape.score_scale, shape.attention_softcap, shape.window(index) or 0)
        rope = -1 if layer.rope is None else layer.rope
        rows.append(_LayerFields(*fields, *norms, mixture, layer.keeps_normed, rope, *scoring))
        held += [*products, *numbers, *biases, sinks, experts]
        held += [linear.packed for linears in matrices for linear in linears]
    held += [] if behind is None else [*behind, behind[1].packed]
    return LayerTable(array_of(_LayerFields, rows), _head(behind, dtype), tuple(held))


def _head(behind: tuple[Norm, Linear] | None, dtype: torch.dtype) -> tuple[NormFields, ProductFields] | None:
    """Norm and matrix behind the layers; None where one has no kernel for rows of `dtype`."""
    if behind is None:
        return None
    norm, matrix = behind
    product = _product([matrix], dtype)
    if product is None or any(tensor is not None and tensor.dtype != dtype for tensor in (norm.weight, norm.bias)):
        return None
    return NormFields.of(norm.weight, norm.bias), product.fields(matrix.bias)


def _product(linears: Sequence[Linear], dtype: torch.dtype) -> Product | None:
    """Of matrices of one input; several of them must have no biases, which would have to be one."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if (len(linears) > 1 and biases) or any(bias.dtype != dtype for bias in biases):
        return None
    return merged_product([None if linear.packed is None else linear.packed.product for linear in linears])
