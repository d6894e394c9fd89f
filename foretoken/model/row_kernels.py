"""What a decoder does with each row on its own, and attention, compiled for the CPU: `kernels/decoder.cpp`.

A decode step on a CPU runs hundreds of operations over a row of a few thousand numbers, and torch takes microseconds to
begin each. These take one call each. A row's result depends neither on the rows beside it nor on the threads: sums run
in an order of their own, see the source. Where they cannot run (`kernels_for`), torch's operations stand in, equal up
to rounding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretoken.kernels.build import loaded, opened
from foretoken.kernels.prebuilt import NATIVE
from foretoken.model.architecture import Activation

SOURCE = Path(__file__).resolve().parent.parent / "kernels" / "decoder.cpp"
# Sums have an order of their own here, so a product may be added without being rounded first.
FLAGS = (
    *("-std=c++17", "-O3", NATIVE, "-fno-math-errno", "-fno-trapping-math", "-fopenmp"),
    *("-shared", "-fPIC"),
)
_INTERFACE = 11  # of the compiled library: what its functions take
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")  # in the order of `foretoken_activation`
_DTYPES = (torch.bfloat16, torch.float32)


class SegmentRows(ctypes.Structure):
    """`foretoken_segment`: columns and rows of a sequence whose attention is read."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("visible", ctypes.c_void_p),
        ("first_slot", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    )


class NormFields(ctypes.Structure):
    """`foretoken_norm_weights`: null pointers where there is no norm, or no bias."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("num_heads", ctypes.c_int64),
    )

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> NormFields:
        """Of weights [D], or [H, D]; both live on."""
        heads = len(weight) if weight.dim() == 2 else 1
        return cls(weight.data_ptr(), None if bias is None else bias.data_ptr(), heads)


class _Attention(ctypes.Structure):
    """`foretoken_attention`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "query", "key", "value", "out", "write_slots")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_heads", "num_groups", "num_slots")),
        *(("sinks", ctypes.c_void_p), ("scale", ctypes.c_float), ("softcap", ctypes.c_float)),
        ("window", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Scoring:
    """How attention makes weights of scores, see `ModelConfig`; `window` None: all positions up to a row's own."""

    scale: float
    softcap: float = 0.0
    window: int | None = None
    sinks: Tensor | None = None  # [H], see `decoder.Attention`


@dataclass(frozen=True)
class RowKernels:
    """The functions of a compiled library; tensors are on the CPU, all of them bfloat16 or all float32."""

    library: ctypes.CDLL

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """`x` [..., D] over its last dimension, times `offset + weight`: [D], or [H, D] of its last two dimensions."""
        return self._norm(x, weight, None, (eps, offset, False))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """The same with the mean taken off, times `weight`, plus `bias` of its shape."""
        return self._norm(x, weight, bias, (eps, 0.0, True))

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[float, float, bool]) -> Tensor:
        size = x.shape[-1]
        rows, stride = _rows_of(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        norm = NormFields.of(weight, bias)
        self.library.foretoken_norm(
            *(rows.data_ptr(), norm, out.data_ptr(), x.numel() // size, size, stride), *options, *_about(x)
        )
        return out

    def gate(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        """The activation of `x[:, :I]` times `x[:, I:]`, of `x` [T, 2 I]: [T, I]."""
        return self._activated(x, x.shape[1] // 2, activation)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """The activation of `x` [T, I], same shape back."""
        return self._activated(x, x.shape[1], activation)

    def _activated(self, x: Tensor, size: int, activation: Activation) -> Tensor:
        num_rows = len(x)
        x, out = x.contiguous(), torch.empty(num_rows, size, dtype=x.dtype)
        self.library.foretoken_activate(
            *(x.data_ptr(), out.data_ptr(), num_rows, size, x.shape[1]), ACTIVATIONS.index(activation), *_about(x)
        )
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)` of `x` [R, V]."""
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        self.library.foretoken_softcap(x.data_ptr(), out.data_ptr(), len(x), x.shape[1], cap, *_about(x))
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `rope.rotate`: `x` [T, H, K] by `cos` and `sin` [T, 1, K]."""
        num_rows, heads, size = x.shape
        rows, stride = _blocks_of(x)
        cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        self.library.foretoken_rotate(
            *(rows.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
            *(num_rows, heads, size, stride),
            *_about(x),
        )
        return out

    def attend(
        self,
        cache: tuple[Tensor, Tensor],
        write_slots: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        segments: Sequence[SegmentRows],
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        """Store key and value of all `rows` (query [T, H, K], key and value [T, G, K]) in `write_slots` [T] of the
        `cache` (keys and values [G, S, K], in the rows' format, or in float16 beside float32), then write what the rows
        of `segments` read into `out` [T, H, K].

        Raises:
            MemoryError: no memory for the weights of the softmax.
        """
        keys, values = cache
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        (query, query_stride), (key, key_stride), (value, value_stride) = map(_blocks_of, rows)
        call = _Attention(
            *(tensor.data_ptr() for tensor in (keys, values, query, key, value, out, write_slots)),
            *(query_stride, key_stride, value_stride, len(query), query.shape[1], keys.shape[0], keys.shape[1]),
            *(None if sinks is None else sinks.data_ptr(), scoring.scale, scoring.softcap, scoring.window or 0),
        )
        if len(query) and not self.library.foretoken_attend(
            *(ctypes.byref(call), (SegmentRows * len(segments))(*segments), len(segments), keys.shape[2]),
            *(keys.dtype == torch.float16, *_about(query)),
        ):
            raise MemoryError(f"no memory for the attention of {len(query)} rows; run fewer rows at a time")


def kernels_for(x: Tensor) -> RowKernels | None:
    """The kernels, if they can take `x` here: while answering, not while training, on a CPU, in two formats."""
    if x.dtype not in _DTYPES or x.device.type != "cpu" or not torch.is_inference_mode_enabled():
        return None
    return row_kernels()


@functools.cache
def row_kernels() -> RowKernels | None:
    """The compiled kernels, None where there are none (the first time with a warning)."""
    return loaded(SOURCE, load, "attention, norms and gates run in torch's own operations, slower", FLAGS)


def load(path: Path) -> RowKernels:
    """The kernels of the compiled library `path`."""
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    about = (small, small)
    library = opened(path, "foretoken_decoder_interface", _INTERFACE)
    norm = (*(ctypes.c_float,) * 2, small)
    library.foretoken_norm.argtypes = (pointer, NormFields, pointer, *(number,) * 3, *norm, *about)
    library.foretoken_activate.argtypes = (*(pointer,) * 2, *(number,) * 3, small, *about)
    library.foretoken_softcap.argtypes = (*(pointer,) * 2, *(number,) * 2, ctypes.c_float, *about)
    library.foretoken_rotate.argtypes = (*(pointer,) * 4, *(number,) * 4, *about)
    library.foretoken_attend.argtypes = (*(pointer,) * 2, small, number, small, *about)
    library.foretoken_run_layers.argtypes = (pointer,)
    library.foretoken_run_experts.argtypes = (*(pointer,) * 3, number, *about)
    library.foretoken_expert_channels.argtypes = (*(pointer,) * 5, number, *about)
    library.foretoken_expert_outputs.argtypes = (*(pointer,) * 5, number, *about)
    for name in ("norm", "activate", "softcap", "rotate"):
        getattr(library, f"foretoken_{name}").restype = None
    for name in ("attend", "run_layers", "run_experts", "expert_channels", "expert_outputs"):
        getattr(library, f"foretoken_{name}").restype = ctypes.c_bool
    return RowKernels(library)


def _about(x: Tensor) -> tuple[bool, int]:
    """The last arguments of every function: whether the numbers are bfloat16, and the number of threads."""
    return x.dtype == torch.bfloat16, torch.get_num_threads()


def _blocks_of(x: Tensor) -> tuple[Tensor, int]:
    """`x` [T, H, K] with each row's numbers together, and the distance of two rows."""
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return x, x.stride(0)


def _rows_of(x: Tensor) -> tuple[Tensor, int]:
    """`x` [..., D] as rows at one distance, and that distance."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    x = x.contiguous()
    return x, x.shape[-1]
