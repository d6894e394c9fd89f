"""The compiled product of weights in groups: bit for bit its twin in torch, whatever rows, threads, instructions."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.kernels.build import FLAGS, built
from foretoken.model.layers import Linear
from foretoken.model.loader import load_decoder
from foretoken.model.matrices import grouped_kernel
from foretoken.model.matrices.codes import LARGE_PAGE_BYTES, SUPER, GroupedCodes, SharedPages, large_page_tensor
from foretoken.model.matrices.grouped_kernel import (
    INSTRUCTIONS,
    SOURCE,
    GroupedWeight,
    code_rows,
    instructions,
    kernel,
    load,
    merged,
    products,
)
from foretoken.model.names import model_folder
from foretoken.model.packed.weights import assembled
from tests.helpers.grouped import FORMATS, grouped
from tests.helpers.instruction_sets import INSTRUCTION_SETS

COUNTS = (1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 16, 20, 27, 33, 48)  # a tile has 8 or 12 rows in vectors, in AMX 16
_NAMES = {"haswell": "AVX2", "x86-64": "plain C++"}
SHAPES = [(97, 384), (16, 128), (1, 128), (33, 256), (20, 768)]


def weight_of(name: str, num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> GroupedWeight:
    return GroupedWeight.of(grouped(name, num_rows, width), dtype)


def width_of(name: str, least: int) -> int:
    """The first width from `least` on that the format has."""
    return -(-least // SUPER) * SUPER if FORMATS[name].whole else least


@pytest.fixture(params=[*INSTRUCTION_SETS, pytest.param("no tiles", marks=pytest.mark.repeated)])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel as other processors get it; older instructions run here too, as do vectors on one that has AMX."""
    if request.param != "native":
        is_vector = request.param == "no tiles"  # tiles are there on Linux alone
        flags = (*FLAGS, "-U__linux__") if is_vector else tuple(flag.replace("native", request.param) for flag in FLAGS)
        path = built(SOURCE, flags)
        assert instructions(path) in ({*INSTRUCTIONS} - {"AMX"} if is_vector else {_NAMES[request.param]})
        function = load(path)
        monkeypatch.setattr(grouped_kernel, "kernel", lambda: function)
    else:
        assert kernel() is not None
    return request.param


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_equals_its_twin_bit_for_bit(name: str, instruction_set: str) -> None:
    for num_rows, least in SHAPES:
        width = width_of(name, least)
        weight = weight_of(name, num_rows, width)
        for count in COUNTS if instruction_set in ("native", "no tiles") else (1, 11):
            x = torch.randn(count, width) * torch.logspace(-6, 6, count)[:, None]
            assert torch.equal(weight.multiply(x, None), products(weight, x)), (num_rows, width, count)


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_numbers_that_codes_stand_for(name: str) -> None:
    """Against float64 arithmetic on the dequantised weights and the activations as coded: what is left is rounding."""
    codes = grouped(name, 50, 256)
    weight, x = GroupedWeight.of(codes, torch.float32), torch.randn(5, 256)
    coded, scales = code_rows(x)
    seen = coded.double() * scales.double().repeat_interleave(32, 1)
    expected = seen @ codes.dequantised().double().T
    torch.testing.assert_close(weight.multiply(x, None).double(), expected, rtol=1e-6, atol=1e-5)
    assert (seen - x).abs().max() <= 0.5001 * scales.max()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_table_are_bit_for_bit_the_file_s(name: str, instruction_set: str) -> None:
    codes, index = grouped(name, 50, 512), torch.tensor([7, 0, 49, 7, 16, 31])
    weight = GroupedWeight.of(codes, torch.float32)
    assert torch.equal(weight.rows(index), codes.dequantised()[index])
    assert torch.equal(weight.rows(index[::2]), codes.dequantised()[index[::2]])
    assert weight.rows(index[:0]).shape == (0, 512)
    narrow = GroupedWeight.of(codes, torch.bfloat16)
    assert narrow.rows(index).dtype == torch.bfloat16
    assert torch.equal(narrow.rows(index), codes.dequantised()[index].bfloat16())
    cut = GroupedWeight.of(codes, torch.float32, width=500)
    assert torch.equal(cut.rows(index), codes.dequantised()[index, :500])
    for missing in (-1, 50):
        with pytest.raises(IndexError, match="outside the 50"):
            weight.rows(torch.tensor([0, missing]))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q8_0", 8.5),
        ("Q4_0", 4.5),
        ("Q4_1", 5),
        ("Q5_1", 6),
        ("Q4_K", 4.625),
        ("Q5_K", 5.625),
        ("Q6_K", 6.5625),
        ("GPTQ", 4.75),
    ],
)
def test_a_matrix_takes_about_the_memory_of_its_file(name: str, bits: float) -> None:
    """All of it in whole numbers, in float16 or in both; the file has 4.5, 5.5 and 6.5625 bits for the K formats."""
    assert weight_of(name, 32, 512).nbytes * 8 == 32 * 512 * bits


def test_scales_that_float16_does_not_hold_stay_in_float32() -> None:
    assert weight_of("4 bits of 16", 32, 64).scales.dtype == torch.float32
    assert weight_of("Q4_0", 32, 64).scales.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """1 to 33 rows, each at every place; activations of any kind of number."""
    weight, x = weight_of("Q4_K", 97, 256), torch.randn(33, 256).to(dtype)
    single = torch.cat([weight.multiply(row[None], None) for row in x])
    assert single.dtype == dtype
    for count in range(1, 34):
        assert torch.equal(weight.multiply(x[:count], None), single[:count])
        assert torch.equal(weight.multiply(x[33 - count :], None), single[33 - count :])


def test_the_number_of_threads_changes_no_bit() -> None:
    weight, x = weight_of("Q6_K", 97, 256), torch.randn(40, 256)
    assert torch.get_num_threads() == 1
    one = weight.multiply(x, None)
    try:
        torch.set_num_threads(2)
        assert torch.equal(weight.multiply(x, None), one)
    finally:
        torch.set_num_threads(1)


def test_tile_registers_are_left_as_other_libraries_have_set_them() -> None:
    """oneDNN, which multiplies matrices of bfloat16 in tiles too, gives the same before, between and after."""
    weight, x = weight_of("Q4_0", 97, 256), torch.randn(40, 256)
    one, other = torch.randn(64, 256).bfloat16(), torch.randn(256, 80).bfloat16()
    product, expected = one @ other, products(weight, x)
    for _ in range(3):
        assert torch.equal(weight.multiply(x, None), expected)
        assert torch.equal(one @ other, product)


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="reads x86-64 code")
def test_codes_and_scales_are_fetched_ahead() -> None:
    """GCC 12 removes calls of functions that only fetch, which no result shows."""
    code = subprocess.run(["objdump", "-d", str(built(SOURCE))], capture_output=True, text=True, check=True).stdout
    lines = (8 + 4) + 3 + 5 + (4 + 2)  # of codes in a group of each format, see `block_of`
    assert code.count("prefetch") >= 8 * (lines + 6)  # for 1 to 8 rows, and the scales of six formats


def test_no_rows_and_a_bias() -> None:
    weight, bias = weight_of("Q8_0", 20, 64), torch.randn(20)
    assert weight.multiply(torch.randn(0, 64), bias).shape == (0, 20)
    x = torch.randn(3, 64)
    assert torch.equal(weight.multiply(x, bias), weight.multiply(x, None) + bias)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_rows", [5, 60])  # one thread multiplies the few rows, two the others
def test_merged_matrices_of_several_formats(num_rows: int) -> None:
    formats = (("Q4_K", 33), ("Q4_K", 50), ("Q6_K", 7), ("Q8_0", 16), ("Q8_0", 40))
    parts = [weight_of(name, count, 256) for name, count in formats]
    x, bias = torch.randn(num_rows, 256), torch.randn(146)
    whole = merged(parts)
    assert torch.equal(whole.multiply(x, None), torch.cat([products(part, x) for part in parts], dim=1))
    assert torch.equal(whole.multiply(x, bias), whole.multiply(x, None) + bias)
    assert whole.nbytes == sum(part.nbytes for part in parts)
    assert merged(parts[:1]) is parts[0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_nan_or_infinity_gives_nan_and_leaves_the_others_alone(bad: float, instruction_set: str) -> None:
    weight, x = weight_of("Q4_1", 40, 128), torch.randn(9, 128)
    clean = weight.multiply(x, None)
    x[4, 77] = bad
    found = weight.multiply(x, None)
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])
    assert products(weight, x)[4].isnan().all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-43, 1e-40, 1e-38, 3e38])
def test_very_small_and_very_large_activations(size: float, instruction_set: str) -> None:
    """Down to numbers whose scale has no bits left, up to the largest, whose sums overflow: the same as the twin, and
    finite codes.
    """
    weight, x = weight_of("Q8_0", 20, 64), torch.rand(3, 64) * size
    codes, _ = code_rows(x)
    assert torch.isfinite(codes).all()
    torch.testing.assert_close(weight.multiply(x, None), products(weight, x), rtol=0, atol=0, equal_nan=True)


def test_ties_round_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, *[0.0] * 25])[None]
    codes, scales = code_rows(x)
    assert scales.item() == 1
    assert codes[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -127]
    identity = GroupedWeight.of(_identity(), torch.float32)
    assert identity.multiply(x, None)[0].tolist() == codes[0].tolist()


def test_numbers_at_and_beside_a_tie_get_the_code_of_their_quotient(instruction_set: str) -> None:
    """A product with the inverse of the scale rounds to another code than the quotient for some of these."""
    generator = torch.Generator().manual_seed(5)
    largest = torch.rand(1000, 1, generator=generator) + torch.logspace(-20, 20, 1000)[:, None]
    x = largest / 127 * (torch.randint(-126, 126, (1000, 32), generator=generator) + 0.5)
    ulps = torch.randint(-2, 3, x.shape, generator=generator, dtype=torch.int32)
    x = (x.view(torch.int32) + ulps).view(torch.float32)
    x[:, :1] = largest
    weight = GroupedWeight.of(_identity(), torch.float32)
    assert torch.equal(weight.multiply(x, None), products(weight, x))
    codes, scales = code_rows(x)
    by_inverse = (x * (1 / scales)).round()
    assert (by_inverse != codes).sum() > 100


def _identity() -> GroupedCodes:
    eye: Tensor = torch.eye(32, dtype=torch.uint8)
    return GroupedCodes(eye + 8, torch.ones(32, 1), None, 8, 4, 32)


def test_the_twin_stands_in_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of("Q5_K", 1100, 256), torch.randn(4, 256)
    expected = weight.multiply(x, None)
    monkeypatch.setattr(grouped_kernel, "kernel", lambda: None)
    assert torch.equal(weight.multiply(x, None), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K"])
def test_bfloat16_is_read_and_written_as_torch_converts_it(name: str, instruction_set: str) -> None:
    weight, x = weight_of(name, 40, 256), (torch.randn(9, 256) * torch.logspace(-30, 30, 9)[:, None]).bfloat16()
    found = weight.multiply(x, None)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, products(weight, x.float()).bfloat16())


def test_large_matrices_lie_in_large_pages() -> None:
    tensor = large_page_tensor((3, 2**20), torch.float16)
    assert tensor.shape == (3, 2**20)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % LARGE_PAGE_BYTES == 0
    tensor.fill_(1)
    assert tensor.sum(dtype=torch.float32) == 3 * 2**20
    assert large_page_tensor((2, 0), torch.uint8).shape == (2, 0)


def test_tensors_that_stay_together_share_large_pages() -> None:
    pages = SharedPages()
    halves, numbers = pages.tensor((3, 5), torch.float16), pages.tensor((2, 16), torch.float32)
    assert halves.data_ptr() % LARGE_PAGE_BYTES == 0
    assert numbers.data_ptr() == halves.data_ptr() + 64, "the next line of the cache"
    halves.fill_(1)
    numbers.fill_(2)
    assert halves.sum() == 15
    assert numbers.sum() == 64
    assert pages.tensor((2, 0), torch.uint8).shape == (2, 0)
    large = pages.tensor((2**28 + 1,), torch.uint8)  # more than a chunk, and not written to
    assert large.data_ptr() % LARGE_PAGE_BYTES == 0
    assert numbers.sum() == 64


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_the_matrices_of_a_model_share_large_pages(quant: str) -> None:
    decoder = load_decoder(model_folder("reference:target"), "float32", quant=quant)
    weights = [module.packed for module in decoder.modules() if isinstance(module, Linear)]
    grouped_weights = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    assert len(grouped_weights) == len(weights) > 1
    tensors = [tensor for weight in grouped_weights for tensor in (weight.codes, weight.scales)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


@pytest.mark.parametrize("odd", [0, 1])
def test_parts_whose_scales_take_other_formats_make_one_matrix(odd: int) -> None:
    """Scales of one part do not fit float16, beside zero points of another that count in scales."""
    whole, x = grouped("GPTQ", 48, 256), torch.randn(3, 256)
    scales = whole.scales.clone()
    scales[32 * odd : 32 * odd + 16] *= 1 + 2**-15
    whole = replace(whole, scales=scales, minimums=scales * whole.multiples)
    parts = [whole.reordered(lambda own, rows=rows: own[rows]) for rows in (slice(0, 32), slice(32, 48))]
    weight = assembled(parts, 48, torch.float32)
    assert weight.minimums is not None
    assert weight.scales.dtype == weight.minimums.dtype == torch.float32
    assert torch.equal(weight.rows(torch.arange(48)), whole.dequantised())
    assert torch.equal(weight.multiply(x, None), products(weight, x))
    assert torch.equal(weight.multiply(x, None), GroupedWeight.of(whole, torch.float32).multiply(x, None))
