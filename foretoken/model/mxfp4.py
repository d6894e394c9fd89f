"""Weights in MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats, a power of two for 32 of them.

The sixteen floats are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: whole numbers from -12 to 12 times a half, so
that codes of 5 bits hold them exactly, and the kernel for codes multiplies by them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from foretoken.model.grouped import GroupedCodes

GROUP = 32  # weights that share a scale
ZERO, BITS = 12, 5
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.uint8)
_CODES = np.concatenate([ZERO + _HALVES, ZERO - _HALVES])  # by the bits of a float: the sign is the highest
_BIAS = 127 + 1  # of the exponent; one more for the halves


def codes_of(floats: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes of 4-bit floats, given by their bits, in the same shape."""
    found: npt.NDArray[np.uint8] = _CODES[floats]
    return found


def scales_of(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What a code, ZERO taken off, is multiplied by, for biased exponents of 8 bits."""
    return np.ldexp(np.float32(1.0), exponents.astype(np.int32) - _BIAS)


def mxfp4_codes(blocks: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> GroupedCodes:
    """A matrix as gpt-oss's safetensors hold it: `blocks` [N, K / 32, 16], the even one of two floats in the low half
    of a byte, and `exponents` [N, K / 32].
    """
    floats = np.stack((blocks & 15, blocks >> 4), axis=-1)  # [N, K / 32, 16, 2]
    return GroupedCodes(
        codes=torch.from_numpy(codes_of(floats).reshape(len(blocks), -1)),
        scales=torch.from_numpy(scales_of(exponents)),
        minimums=None,
        zero=ZERO,
        bits=BITS,
        group=GROUP,
    )
