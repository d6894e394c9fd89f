"""Blocks of GGUF's quantised types: what their codes stand for is bit for bit what the `gguf` package says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from foretoken.model.gguf.blocks import grouped, is_grouped, plain, plain_dtype, runnable_types
from foretoken.model.gguf.header import GGML_TYPES

GROUPED = {number: kind for number, kind in GGML_TYPES.items() if is_grouped(kind)}
# Where a block has its float16 numbers.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
EXTREME = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0)


def assert_same(raw: np.ndarray, number: int) -> None:
    kind = GGML_TYPES[number]
    rows, columns = raw.shape[0], raw.shape[1] // kind.num_bytes * kind.block
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, GGMLQuantizationType(number))
    found = grouped(raw, kind, (rows, columns))
    numbers = found.dequantised().numpy()
    assert int(found.codes.max()) < 2**found.bits
    assert found.scales.shape == (rows, columns // found.group)
    same = (numbers.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(numbers) & np.isnan(expected))
    assert same.all()


def test_sizes_are_those_of_the_package() -> None:
    assert {number: (kind.name, kind.block, kind.num_bytes) for number, kind in GGML_TYPES.items()} == {
        int(number): (number.name, *sizes) for number, sizes in gguf.GGML_QUANT_SIZES.items()
    }


def test_which_types_are_read() -> None:
    assert set(runnable_types()) == {
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
        *("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    }


@pytest.mark.parametrize("number", GROUPED, ids=lambda number: GGML_TYPES[number].name)
def test_random_blocks(number: int) -> None:
    """Random bytes: every code, and scales of every kind, NaN and infinity among them."""
    kind = GROUPED[number]
    assert_same(np.random.default_rng(number).integers(0, 256, (40, 5 * kind.num_bytes), dtype=np.uint8), number)


@pytest.mark.parametrize("number", GROUPED, ids=lambda number: GGML_TYPES[number].name)
def test_extreme_scales(number: int) -> None:
    kind = GROUPED[number]
    for first in EXTREME:
        for second in EXTREME:
            raw = np.random.default_rng(3).integers(0, 256, (2, kind.num_bytes), dtype=np.uint8)
            for place, value in zip(HALVES.get(kind.name, (0,)), (first, second), strict=False):
                raw[:, place : place + 2] = np.array([value], np.float16).view(np.uint8)
            assert_same(raw, number)


def test_every_exponent() -> None:
    """MXFP4's scales are powers of two, from the smallest to the one whose products are infinite."""
    number, kind = next((number, kind) for number, kind in GGML_TYPES.items() if kind.name == "MXFP4")
    raw = np.random.default_rng(1).integers(0, 256, (256, kind.num_bytes), dtype=np.uint8)
    raw[:, 0] = np.arange(256)
    assert_same(raw, number)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types(name: str) -> None:
    number, kind = next((number, kind) for number, kind in GGML_TYPES.items() if kind.name == name)
    raw = np.random.default_rng(0).integers(0, 256, (4, 6 * kind.num_bytes), dtype=np.uint8)
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType(number)).astype(np.float32))
    tensor = plain(raw.reshape(-1), kind, (4, 6))
    assert tensor.dtype == plain_dtype(kind)
    assert torch.equal(tensor.float().nan_to_num(7.0), expected.nan_to_num(7.0))
