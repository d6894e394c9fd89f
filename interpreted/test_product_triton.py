"""Products for a GPU give what torch's operations give, and a row the same bits however many are beside it, through
Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.kernels import product_triton
from foretoken.kernels.product_triton import Operands, Tiling, tiled, tiling_of
from foretoken.model.layers import activated

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
# Every number of parts, and rows, outputs and channels that do not fill the last tile.
TILINGS = [
    Tiling(16, 16, 1, 32, 3, 4),
    Tiling(16, 32, 2, 16, 3, 4),
    Tiling(32, 16, 1, 64, 2, 4),
    Tiling(64, 32, 1, 128, 2, 8),
]


def close(got: Tensor, expected: Tensor) -> None:
    """`expected` was computed in float64."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def numbers(rows: int, size: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows [T, K] within wider ones, a matrix [N, K], bias [N] and residual [T, N]."""
    x = torch.randn(rows, size + 3)[:, :size]
    weight = torch.randn(outputs, size) / size**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs).to(dtype), torch.randn(rows, outputs).to(dtype)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_product(tiling: Tiling, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias, residual = numbers(21, 72, 83, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    for added in (None, residual):
        out = tiled(Operands(x, weight, bias if has_bias else None, added), tiling)
        close(out, expected if added is None else expected + added.double())


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_product(has_bias: bool, activation: str, dtype: torch.dtype) -> None:
    x, weight, bias, _ = numbers(5, 40, 2 * 27, dtype)
    given = bias if has_bias else None
    expected = activated(
        x.double() @ weight.double().T + (0 if given is None else given.double()),
        activation,
        is_gated=True,  # type: ignore[arg-type]
    )
    close(product_triton.gated_product(x, weight, given, activation), expected)


def test_a_row_has_its_bits_whoever_is_beside_it_and_however_it_is_cut() -> None:
    """The second half of a sum takes the first away: what comes out is what was rounded, which follows the order."""
    half_size, outputs = 48, 50
    order, half = torch.randperm(half_size), torch.randn(70, half_size) * 2.0 ** torch.randint(7, (70, half_size))
    x, side = torch.cat((half, half[:, order]), 1).bfloat16(), torch.randn(outputs, half_size)
    weight = torch.cat((side, -side[:, order]), 1).bfloat16()
    whole = product_triton.product(x, weight)
    for tiling in TILINGS:
        for rows in (1, 17, 70):
            assert torch.equal(tiled(Operands(x[-rows:], weight), tiling), whole[-rows:])
    assert not torch.equal(product_triton.product(x.flip(1), weight.flip(1).contiguous()), whole)


def test_a_tiling_serves_every_number_of_rows() -> None:
    for rows in (1, 2, 16, 17, 33, 64, 65, 128, 129, 512, 5000):
        for outputs in (1, 576, 4096, 28_672, 128_256):
            tiling = tiling_of(rows, outputs, 576, rows % 2 == 0)
            assert rows <= tiling.rows or tiling.rows == 128
            assert tiling.outputs in (16, 32)  # more: other matrix instructions
            assert tiling.parts == 2 or rows % 2


def test_no_rows() -> None:
    assert product_triton.product(torch.empty(0, 8).half(), torch.ones(4, 8).half()).shape == (0, 4)
