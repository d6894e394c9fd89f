"""The compiled product of bf16 matrices: float32 sums of exact products, the same bits whatever is beside a row."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator

import pytest
import torch

from foretoken.kernels.build import built
from foretoken.model.layers import Linear, MkldnnWeight
from foretoken.model.matrices import dense as dense_kernel
from foretoken.model.matrices.dense import SOURCE, DenseWeight, kernel, load, merged_product
from foretoken.model.row_kernels import FLAGS
from tests.helpers.instruction_sets import INSTRUCTION_SETS

SHAPES = [(97, 384), (16, 128), (1, 2), (33, 255), (50, 1), (130, 64)]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel as other processors get it; older instructions run here too."""
    if request.param != "native":
        flags = tuple(flag.replace("native", request.param) for flag in FLAGS)
        function = load(built(SOURCE, flags))
        monkeypatch.setattr(dense_kernel, "kernel", lambda: function)
    found: str = request.param
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_those_of_the_numbers(instruction_set: str, dtype: torch.dtype) -> None:
    for num_rows, width in SHAPES:
        matrix = torch.randn(num_rows, width).bfloat16()
        weight, bias = DenseWeight.of(matrix), torch.randn(num_rows).to(dtype)
        assert torch.equal(weight.multiply(torch.eye(width, dtype=dtype), None), matrix.t().to(dtype)), "no bit is lost"
        for count in (0, 1, 2, 3, 7, 8, 9, 17, 40):
            x = torch.randn(count, width).to(dtype)
            full = x.bfloat16().double()
            expected = full @ matrix.double().T
            scale = full.abs() @ matrix.double().abs().T  # of which rounding is a share
            rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
            found = weight.multiply(x, None)
            assert found.dtype == dtype
            assert bool(((found.double() - expected).abs() <= 1e-6 * scale + rounding).all()), (instruction_set, count)
            with_bias = weight.multiply(x, bias).double() - bias.double()
            assert bool(((with_bias - expected).abs() <= 1e-6 * scale + 2**-7 * (expected.abs() + 4)).all())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads", "instruction_set")
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    """Numbers of very different magnitude, so that any change of order shows."""
    for num_rows, width in ((97, 384), (33, 255), (4100, 300)):
        steep = torch.randn(num_rows, width) * 2.0 ** torch.randint(-8, 8, (num_rows, width))
        weight = DenseWeight.of(steep.bfloat16())
        x = torch.randn(37, width).bfloat16()
        torch.set_num_threads(1)
        single = torch.cat([weight.multiply(row[None], None) for row in x])
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for count in (2, 3, 5, 8, 9, 11, 16, 37):
                assert torch.equal(weight.multiply(x[-count:], None), single[-count:]), (num_threads, count)


@pytest.mark.usefixtures("threads")
def test_several_matrices_in_one_call() -> None:
    parts = [DenseWeight.of(torch.randn(count, 300).bfloat16()) for count in (33, 7, 300)]
    whole = merged_product([part.product for part in parts])
    assert whole is not None
    x = torch.randn(9, 300).bfloat16()
    expected = torch.cat([part.multiply(x, None) for part in parts], dim=1)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for count in (1, 9):  # one row is left to one thread
            assert torch.equal(whole(x[:count], None), expected[:count]), (num_threads, count)


def test_numbers_that_are_none_stay_in_their_row() -> None:
    weight, x = DenseWeight.of(torch.randn(40, 64).bfloat16()), torch.randn(3, 64).bfloat16()
    clean = weight.multiply(x, None)
    x[1, 5] = math.nan
    found = weight.multiply(x, None)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_a_copy_has_addresses_of_its_own() -> None:
    weight, x = DenseWeight.of(torch.randn(20, 32).bfloat16()), torch.randn(2, 32).bfloat16()
    expected = weight.multiply(x, None)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), copy.copy(weight)):
        assert other.product is not weight.product
        assert torch.equal(other.multiply(x, None), expected)


def test_who_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN where the processor multiplies tiles or nothing can be compiled, else this kernel."""
    assert kernel() is not None

    def packed() -> object:
        linear = Linear(64, 32)
        linear.weight = torch.nn.Parameter(torch.randn(32, 64).bfloat16(), requires_grad=False)
        linear.pack()
        return linear.packed

    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: False)
    assert isinstance(packed(), DenseWeight)
    has_onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with monkeypatch.context() as patch:
        patch.setattr("foretoken.model.layers.has_amx", lambda: True)
        assert isinstance(packed(), MkldnnWeight) == has_onednn
    monkeypatch.setattr("foretoken.model.layers.dense_kernel", lambda: None)
    assert isinstance(packed(), MkldnnWeight) == has_onednn
