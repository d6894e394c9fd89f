"""Row kernels for a GPU give what torch's operations give, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.kernels import row_triton
from foretoken.model.layers import RMSNorm, activated
from foretoken.model.rope import rotate

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def close(got: Tensor, expected: Tensor) -> None:
    """`expected` was computed in float64."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "channels"), [(1, 40), (3, 1500)])
def test_gate(rows: int, channels: int, activation: str, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(rows, 2 * channels)).to(dtype)
    close(row_triton.gate(x, activation), activated(x.double(), activation, is_gated=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_gate_of_large_numbers(activation: str) -> None:
    x = torch.tensor([[-3e4, -200.0, -90.0, 0.0, 90.0, 3e4, *[1.0] * 6]])
    close(row_triton.gate(x, activation), activated(x.double(), activation, is_gated=True))  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize(("size", "offset"), [(40, 0.0), (600, 1.0)])
def test_norms(size: int, offset: float, dtype: torch.dtype) -> None:
    x, change, weight = (torch.randn(*shape).to(dtype) for shape in ((3, size), (3, size), (size,)))
    norm = RMSNorm(size, 1e-3, offset).to(torch.float64)
    norm.weight.data = weight.double()
    close(row_triton.rms_norm(x, weight, 1e-3, offset), norm(x.double()).detach())
    total, normed = row_triton.add_rms_norm(x, change, weight, 1e-3, offset)
    close(total, x.double() + change.double())
    close(normed, norm(total.double()).detach())


@DTYPES
@pytest.mark.parametrize(("heads", "size"), [(5, 64), (2, 72), (1, 8)])
def test_rotate(heads: int, size: int, dtype: torch.dtype) -> None:
    """A part of the heads of a wider row, as the decoder gives it."""
    x = torch.randn(3, heads + 2, size).to(dtype)[:, :heads]
    cos, sin = (torch.rand(3, 1, size).to(dtype) for _ in range(2))
    got = row_triton.rotate(x, cos, sin)
    assert got.is_contiguous()
    close(got, rotate(x.double(), cos.double(), sin.double()))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("groups", "size"), [(3, 64), (1, 40)])
def test_write(groups: int, size: int, cache_dtype: torch.dtype) -> None:
    """Only the slots of the rows change, in the cache's own format."""
    qkv = torch.randn(4, 2 * groups + 5, size)
    key, value, slots = qkv[:, 5 : 5 + groups], qkv[:, 5 + groups :], torch.tensor([7, 0, 3, 9])
    cache = [torch.randn(groups, 11, size).to(cache_dtype) for _ in range(2)]
    expected = [
        one.clone().index_copy_(1, slots, new.transpose(0, 1).to(cache_dtype))
        for one, new in zip(cache, (key, value), strict=True)
    ]
    row_triton.write(key, value, (cache[0], cache[1]), slots)
    for got, wanted in zip(cache, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_value_that_is_not_finite_is_kept_as_0_behind_a_broken_key(dtype: torch.dtype) -> None:
    key, value = torch.randn(3, 2, 40).to(dtype), torch.randn(3, 2, 40).to(dtype)
    value[1, 0, 7], value[2, 1, 39] = float("nan"), float("-inf")
    cache = (torch.zeros(2, 3, 40, dtype=dtype), torch.zeros(2, 3, 40, dtype=dtype))
    row_triton.write(key, value, cache, torch.arange(3))
    keys, values = (one.transpose(0, 1) for one in cache)
    assert torch.equal(values, value.nan_to_num(0.0, 0.0, 0.0))
    is_broken = torch.zeros(3, 2, dtype=torch.bool)
    is_broken[1, 0] = is_broken[2, 1] = True
    assert bool(keys[is_broken].isnan().all())
    assert torch.equal(keys[~is_broken], key[~is_broken])


def test_a_row_has_its_bits_whoever_is_beside_it() -> None:
    x, cos, sin = torch.randn(5, 2, 24), torch.rand(5, 1, 24), torch.rand(5, 1, 24)
    assert torch.equal(row_triton.rotate(x, cos, sin)[2:3], row_triton.rotate(x[2:3], cos[2:3], sin[2:3]))
    wide = torch.randn(5, 60)
    assert torch.equal(row_triton.gate(wide, "silu")[2:3], row_triton.gate(wide[2:3], "silu"))
    together, alone = (row_triton.add_rms_norm(one, -one / 2, wide[0], 1e-5) for one in (wide, wide[2:3]))
    assert all(torch.equal(one[2:3], other) for one, other in zip(together, alone, strict=True))
