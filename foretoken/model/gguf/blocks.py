"""The blocks of GGUF's quantised types as `GroupedCodes`, and its plain types as tensors.

Layouts are those of ggml's `ggml-quants.c`; `GroupedCodes.dequantised` of what comes out equals the `gguf` package's
`dequantize` bit for bit. In all comments n is the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.model.gguf.header import GgmlType
from foretoken.model.matrices.codes import BITS, ZERO, GroupedCodes, WholeScales, codes_of, scales_of

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Floats: TypeAlias = npt.NDArray[np.float32]
# Whole numbers [n, groups] int8 and what they are multiplied by, [n, 1] float32 numbers that float16 holds.
_Products: TypeAlias = tuple[npt.NDArray[np.int8], _Floats]
# Codes [n, block], scales [n, groups], minimums likewise or None, zero, bits.
_Parts: TypeAlias = tuple[_Bytes, _Floats | _Products, _Floats | _Products | None, int, int]

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NIBBLES = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
# What the 4-bit codes of a type stand for, times its scale: whole numbers, here as codes above a zero.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_CODES = (np.array(_IQ4_VALUES) + 128).astype(np.uint8)
_SINGLES = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)


def plain_dtype(kind: GgmlType) -> torch.dtype | None:
    """The dtype of an unquantised type; None for blocks."""
    return _PLAIN.get(kind.name)


def plain(raw: _Bytes, kind: GgmlType, shape: tuple[int, ...]) -> Tensor:
    """A tensor of an unquantised type from the bytes of its data, which it shares."""
    return torch.from_numpy(raw).view(_PLAIN[kind.name]).view(shape)


def is_grouped(kind: GgmlType) -> bool:
    """Whether `grouped` reads the type."""
    return kind.name in _READERS


def runnable_types() -> tuple[str, ...]:
    """Names of the types that are read, plain ones first."""
    return (*_PLAIN, *_READERS)


def grouped(raw: _Bytes, kind: GgmlType, shape: tuple[int, int]) -> GroupedCodes:
    """The matrix `shape` [N, K] whose blocks are `raw` (bytes, row after row)."""
    rows, columns = shape
    codes, scales, minimums, zero, bits = _READERS[kind.name](raw.reshape(-1, kind.num_bytes))
    whole = None
    if isinstance(scales, tuple):
        lower = _whole(minimums, rows) if isinstance(minimums, tuple) else (None, None)
        whole = WholeScales(*_whole(scales, rows), *lower)
    full = _numbers(scales, rows)
    return GroupedCodes(
        codes=torch.from_numpy(np.ascontiguousarray(codes)).view(rows, columns),
        scales=full,
        minimums=None if minimums is None else _numbers(minimums, rows),
        zero=zero,
        bits=bits,
        group=columns // full.shape[1],
        whole=whole,
    )


def _numbers(values: _Floats | _Products, rows: int) -> Tensor:
    """`[N, groups]` float32."""
    if isinstance(values, tuple):
        with np.errstate(invalid="ignore", over="ignore"):
            values = values[1] * values[0].astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values)).view(rows, -1)


def _whole(values: _Products, rows: int) -> tuple[Tensor, Tensor]:
    """`[N, groups]` int8 and `[N, K / 256]` float16."""
    own, shared = (torch.from_numpy(np.ascontiguousarray(part)).view(rows, -1) for part in values)
    return own, shared.half()


def _half(blocks: _Bytes, at: int) -> _Floats:
    """The float16 at byte `at` of each block, [n, 1] float32."""
    with np.errstate(invalid="ignore"):  # a signalling NaN in a broken file
        return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: _Bytes) -> _Bytes:
    """Low halves of 16 bytes, then the high ones: [n, 32]."""
    return ((blocks.reshape(len(blocks), 1, 1, 16) >> _NIBBLES) & np.uint8(15)).reshape(len(blocks), 32)


def _fifth_bits(blocks: _Bytes) -> _Bytes:
    """The bits of 4 bytes as 0 or 16: [n, 32]."""
    return np.unpackbits(np.ascontiguousarray(blocks), axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None, 8, 4


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2), 0, 4


def _q5_0(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None, 16, 5


def _q5_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2), 0, 5


def _q8_0(blocks: _Bytes) -> _Parts:
    return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None, 128, 8  # int8 plus 128


def _k_scales(blocks: _Bytes) -> tuple[_Products, _Products]:
    """Scales and minimums of the eight groups of a Q4_K or Q5_K block: 6 of 96 bits each, times two float16 numbers."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return (scales.astype(np.int8), _half(blocks, 0)), (minimums.astype(np.int8), -_half(blocks, 2))


def _q4_k(blocks: _Bytes) -> _Parts:
    codes = (blocks[:, 16:].reshape(len(blocks), 4, 1, 32) >> _NIBBLES) & np.uint8(15)
    return codes.reshape(len(blocks), 256), *_k_scales(blocks), 0, 4


def _q5_k(blocks: _Bytes) -> _Parts:
    low = (blocks[:, 48:].reshape(len(blocks), 4, 1, 32) >> _NIBBLES) & np.uint8(15)
    high = ((blocks[:, 16:48].reshape(len(blocks), 1, 1, 32) >> _SINGLES) & np.uint8(1)) << np.uint8(4)
    return low.reshape(len(blocks), 256) | high.reshape(len(blocks), 256), *_k_scales(blocks), 0, 5


def _q6_k(blocks: _Bytes) -> _Parts:
    low = (blocks[:, :128].reshape(len(blocks), 2, 1, 64) >> _NIBBLES) & np.uint8(15)
    high = ((blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> _PAIRS) & np.uint8(3)) << np.uint8(4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8), _half(blocks, 208)
    return low.reshape(len(blocks), 256) | high.reshape(len(blocks), 256), scales, None, 32, 6


def _q2_k(blocks: _Bytes) -> _Parts:
    codes = (blocks[:, 16:80].reshape(len(blocks), 2, 1, 32) >> _PAIRS) & np.uint8(3)
    scales = (blocks[:, :16] & 15).astype(np.int8), _half(blocks, 80)
    minimums = (blocks[:, :16] >> 4).astype(np.int8), -_half(blocks, 82)
    return codes.reshape(len(blocks), 256), scales, minimums, 0, 2


def _q3_k(blocks: _Bytes) -> _Parts:
    low = (blocks[:, 32:96].reshape(len(blocks), 2, 1, 32) >> _PAIRS) & np.uint8(3)
    high = ((blocks[:, :32].reshape(len(blocks), 1, 1, 32) >> _SINGLES) & np.uint8(1)) << np.uint8(2)
    first, second = blocks[:, 96:104], blocks[:, 104:108]  # four bits and two of 16 scales
    scales = np.concatenate([first & 15, first >> 4], axis=1)
    scales |= np.concatenate([(second >> shift & 3) << 4 for shift in (0, 2, 4, 6)], axis=1)
    signed = scales.astype(np.int8) - np.int8(32)
    return low.reshape(len(blocks), 256) | high.reshape(len(blocks), 256), (signed, _half(blocks, 108)), None, 4, 3


def _iq4_nl(blocks: _Bytes) -> _Parts:
    return _IQ4_CODES[_nibbles(blocks[:, 2:])], _half(blocks, 0), None, 128, 8


def _iq4_xs(blocks: _Bytes) -> _Parts:
    nibbles = (blocks[:, 8:].reshape(len(blocks), 8, 1, 16) >> _NIBBLES) & np.uint8(15)
    low = (blocks[:, 4:8].reshape(len(blocks), 4, 1) >> _NIBBLES.reshape(1, 1, 2)) & np.uint8(15)
    high = (blocks[:, 2:4].reshape(len(blocks), 2, 1) >> _PAIRS.reshape(1, 1, 4)) & np.uint8(3)
    signed = (low.reshape(-1, 8) | high.reshape(-1, 8) << 4).astype(np.int8) - np.int8(32)
    return _IQ4_CODES[nibbles].reshape(len(blocks), 256), (signed, _half(blocks, 0)), None, 128, 8


def _mxfp4(blocks: _Bytes) -> _Parts:
    return codes_of(_nibbles(blocks[:, 1:])), scales_of(blocks[:, :1]), None, ZERO, BITS


_READERS: dict[str, Callable[[_Bytes], _Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
