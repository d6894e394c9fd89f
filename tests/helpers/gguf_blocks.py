"""Blocks of GGUF types that the `gguf` package reads and does not write, rounded in the plainest way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import quants

_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
_IQ4 = np.array(quants.IQ4_NL.kvalues, np.float32)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Two bits of each of 256 codes, [n, 64]."""
    return ((codes & 3).reshape(-1, 2, 4, 32) << _PAIRS).sum(2, dtype=np.uint8).reshape(-1, 64)


def _halves(numbers: np.ndarray) -> np.ndarray:
    return np.maximum(numbers, 1e-7).astype(np.float16)


def _steps(wide: np.ndarray, half: np.ndarray, most: int) -> np.ndarray:
    return np.clip(np.round(wide / half.astype(np.float32)), 1, most)


def q2_k(values: np.ndarray) -> np.ndarray:
    """256 numbers a row as blocks of Q2_K."""
    groups = values.reshape(-1, 16, 16)
    least = np.minimum(groups.min(-1), 0)
    wide = (groups.max(-1) - least) / 3
    d, dmin = _halves(wide.max(-1, keepdims=True) / 15), _halves(-least.min(-1, keepdims=True) / 15)
    steps, below = _steps(wide, d, 15), np.clip(np.round(-least / dmin.astype(np.float32)), 0, 15)
    scale, floor = (d.astype(np.float32) * steps)[..., None], (dmin.astype(np.float32) * below)[..., None]
    codes = np.clip(np.round((groups + floor) / scale), 0, 3).astype(np.uint8)
    scales = (steps.astype(np.uint8)) | below.astype(np.uint8) << 4
    return np.concatenate([scales, _pairs(codes), d.view(np.uint8), dmin.view(np.uint8)], axis=1)


def q3_k(values: np.ndarray) -> np.ndarray:
    """256 numbers a row as blocks of Q3_K."""
    groups = values.reshape(-1, 16, 16)
    wide = np.abs(groups).max(-1) / 4
    d = _halves(wide.max(-1, keepdims=True) / 31)
    steps = _steps(wide, d, 31)
    codes = np.clip(np.round(groups / (d.astype(np.float32) * steps)[..., None]), -4, 3).astype(np.int8) + 4
    codes = codes.astype(np.uint8).reshape(-1, 256)
    high = ((codes >> 2).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8).reshape(1, 8, 1)).sum(1, dtype=np.uint8)
    stored = (steps + 32).astype(np.uint8)  # 6 bits
    low, above = (stored[:, :8] & 15) | (stored[:, 8:] & 15) << 4, stored >> 4
    upper = above[:, :4] | above[:, 4:8] << 2 | above[:, 8:12] << 4 | above[:, 12:] << 6
    return np.concatenate([high, _pairs(codes), low, upper, d.view(np.uint8)], axis=1)


def _iq4_codes(numbers: np.ndarray) -> np.ndarray:
    """The nearest value of each number, two of 32 in a byte: [n, 16]."""
    codes = np.abs(numbers[..., None] - _IQ4).argmin(-1).astype(np.uint8)
    return codes[..., :16] | codes[..., 16:] << 4


def iq4_nl(values: np.ndarray) -> np.ndarray:
    """32 numbers a row as blocks of IQ4_NL."""
    d = _halves(np.abs(values).max(-1, keepdims=True) / 113)
    return np.concatenate([d.view(np.uint8), _iq4_codes(values / d.astype(np.float32))], axis=1)


def iq4_xs(values: np.ndarray) -> np.ndarray:
    """256 numbers a row as blocks of IQ4_XS."""
    groups = values.reshape(-1, 8, 32)
    wide = np.abs(groups).max(-1) / 113
    d = _halves(wide.max(-1, keepdims=True) / 31)
    steps = _steps(wide, d, 31)
    codes = _iq4_codes(groups / (d.astype(np.float32) * steps)[..., None])
    stored = (steps + 32).astype(np.uint16)  # 6 bits
    high = ((stored >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(1, dtype=np.uint16)
    low = ((stored & 15)[:, ::2] | (stored & 15)[:, 1::2] << 4).astype(np.uint8)
    parts = [d.view(np.uint8), high.reshape(-1, 1).view(np.uint8), low, codes.reshape(-1, 128)]
    return np.concatenate(parts, axis=1)


WRITERS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "Q2_K": (256, q2_k),
    "Q3_K": (256, q3_k),
    "IQ4_NL": (32, iq4_nl),
    "IQ4_XS": (256, iq4_xs),
}
