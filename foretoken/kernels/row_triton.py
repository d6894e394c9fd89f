"""What a decoder layer does with each row on its own, as Triton kernels: one launch each where torch takes two to five.

A step of one row on a GPU is hundreds of launches of a few microseconds, of which these are the smallest. Numbers are
float32 inside and rounded once; a row's result does not depend on the rows beside it.

`TRITON_INTERPRET=1`, set before this module is imported, runs the kernels on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.kernels.paged_work import padded

_GATE_CHANNELS = 1024  # of a program
_ERF_SCALE = tl.constexpr(0.7071067811865476)
_TANH_SCALE = tl.constexpr(0.7978845608028654)
_TANH_CUBE = tl.constexpr(0.044715)
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def logistic(x) -> tl.tensor:
    """1 / (1 + exp(-x)); nothing overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def activated(x, KIND: tl.constexpr) -> tl.tensor:
    """The activation of float32 numbers, by its place in `KINDS`."""
    if KIND == 0:
        return x * logistic(x)
    elif KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * _ERF_SCALE))
    else:
        inner = _TANH_SCALE * (x + _TANH_CUBE * x * x * x)
        return x * logistic(2.0 * inner)  # 0.5 * (1 + tanh(z)) is the logistic function of 2 z


@triton.jit
def _gate(x, out, row_stride, size, KIND: tl.constexpr, CHANNELS: tl.constexpr):
    """One program per row and part of its channels."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < size
    at = x + row * row_stride + channel
    gate = tl.load(at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * size + channel, (activated(gate, KIND) * up).to(out.dtype.element_ty), mask=real)


@triton.jit
def _norm(x, change, weight, total, out, row_stride, size, eps, offset, HAS_CHANGE: tl.constexpr, DIMS: tl.constexpr):
    """One program per row."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, DIMS)
    real = dim < size
    own = tl.load(x + row * row_stride + dim, mask=real, other=0.0)
    if HAS_CHANGE:
        own = (own.to(tl.float32) + tl.load(change + row * size + dim, mask=real, other=0.0)).to(own.dtype)
        tl.store(total + row * size + dim, own, mask=real)
    own = own.to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, 0) / size + eps)
    factor = tl.load(weight + dim, mask=real, other=0.0).to(tl.float32) + offset
    tl.store(out + row * size + dim, (own * scale * factor).to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotate(x, cos, sin, out, row_stride, head_stride, num_heads, HALF: tl.constexpr, DIMS: tl.constexpr):
    """One program per row and head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIMS)
    real = dim < HALF
    at = x + row * row_stride + head * head_stride + dim
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    table = row * 2 * HALF + dim
    to = out + (row * num_heads + head) * 2 * HALF + dim
    for part in tl.static_range(2):
        turned = -second if part == 0 else first
        own = first if part == 0 else second
        cosine = tl.load(cos + table + part * HALF, mask=real, other=0.0).to(tl.float32)
        sine = tl.load(sin + table + part * HALF, mask=real, other=0.0).to(tl.float32)
        tl.store(to + part * HALF, (own * cosine + turned * sine).to(out.dtype.element_ty), mask=real)


@triton.jit
def _write(
    key,
    value,
    keys,
    values,
    slots,
    key_row,
    key_head,
    value_row,
    value_head,
    cache_head,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program per row and key head.

    A row that does not see a key multiplies its value by 0, which makes no number of an infinite one. So numbers of a
    value that are not finite are stored as 0, behind a key of which nothing is a number: only rows that see it suffer.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIMS)
    real = dim < HEAD_DIM
    to = head.to(tl.int64) * cache_head + tl.load(slots + row) * HEAD_DIM + dim
    new_key = tl.load(key + row * key_row + head * key_head + dim, mask=real, other=0.0).to(tl.float32)
    new_value = tl.load(value + row * value_row + head * value_head + dim, mask=real, other=0.0)
    new_value = new_value.to(values.dtype.element_ty).to(tl.float32)  # as it is kept
    is_finite = tl.abs(new_value) < float("inf")
    is_broken = tl.max(tl.where(is_finite, 0, 1), 0) > 0
    new_key = tl.where(is_broken, float("nan"), new_key)
    tl.store(keys + to, new_key.to(keys.dtype.element_ty), mask=real)
    tl.store(values + to, tl.where(is_finite, new_value, 0.0).to(values.dtype.element_ty), mask=real)


def operand(x: Tensor) -> tl.dtype:
    """What matrices are multiplied in; Triton's interpreter multiplies the bits of bfloat16 as integers."""
    kinds = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return tl.float32 if x.device.type == "cpu" else kinds[x.dtype]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`x` [..., D] over its last dimension, times `offset + weight` [D]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _normed(rows, None, weight, rows, out, eps, offset)
    return out


def add_rms_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """`x + change`, each [T, D], and the norm of that."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _normed(x, change.contiguous(), weight, total, out, eps, offset)
    return total, out


def _normed(
    x: Tensor, change: Tensor | None, weight: Tensor, total: Tensor, out: Tensor, eps: float, offset: float
) -> None:
    num_rows, size = x.shape
    assert x.stride(1) == 1
    if not num_rows:
        return
    with torch.cuda.device_of(x):
        _norm[(num_rows,)](
            *(x, x if change is None else change, weight, total, out, x.stride(0), size, eps, offset),
            HAS_CHANGE=change is not None,
            DIMS=padded(size),
            num_warps=_norm_warps(size),
            enable_fp_fusion=False,
        )


def _norm_warps(size: int) -> int:
    """Warps of a program over `size` numbers: about eight numbers of each of their threads."""
    return max(1, min(16, padded(size) // 256))


def gate(x: Tensor, activation: str) -> Tensor:
    """The activation of `x[:, :I]` times `x[:, I:]`, of `x` [T, 2 I]: [T, I]."""
    size = x.shape[1] // 2
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    if not len(x):
        return out
    with torch.cuda.device_of(x):
        _gate[len(x), triton.cdiv(size, _GATE_CHANNELS)](
            *(x, out, x.stride(0), size), KIND=KINDS[activation], CHANNELS=_GATE_CHANNELS, enable_fp_fusion=False
        )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `rope.rotate`: `x` [T, H, K] by `cos` and `sin` [T, 1, K]."""
    num_rows, num_heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    assert x.stride(2) == 1
    if not num_rows:
        return out
    with torch.cuda.device_of(x):
        _rotate[num_rows, num_heads](
            *(x, cos, sin, out, x.stride(0), x.stride(1), num_heads),
            HALF=size // 2,
            DIMS=padded(size // 2),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


def write(key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor) -> None:
    """Store `key` and `value` [T, G, K] in `slots` [T] of keys and values [G, S, K], in the format of these."""
    keys, values = cache
    num_rows, num_groups, head_dim = key.shape
    assert key.stride(2) == value.stride(2) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    if not num_rows:
        return
    with torch.cuda.device_of(key):
        _write[num_rows, num_groups](
            *(key, value, keys, values, slots),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1), keys.stride(0)),
            HEAD_DIM=head_dim,
            DIMS=padded(head_dim),
            num_warps=1,
        )
