"""The library that drafts chains, with products that give chosen logits: which token of a row it takes, and what it
does where a function that it calls has no memory. That it drafts as a head does: `tests/draft/test_eagle_chain.py`.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from foretoken.kernels.build import built
from foretoken.model import chain_kernel
from foretoken.model.chain_kernel import SOURCE, ChainFields, Reach, address_of, draft_chain, load
from foretoken.model.matrices.dense import ARGUMENTS
from foretoken.model.row_kernels import FLAGS
from foretoken.text.sampling import without_broken
from foretoken.verify.base import first_max
from tests.helpers.instruction_sets import INSTRUCTION_SETS

RunLayers = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
Multiply = ctypes.CFUNCTYPE(ctypes.c_bool, *ARGUMENTS)
SIZES = (1, 2, 15, 16, 17, 97, 511, 512, 513, 1024, 3001)
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The library as other processors get it; older instructions run here too."""
    return load(built(SOURCE, tuple(flag.replace("native", request.param) for flag in FLAGS)))


def chosen(library: ctypes.CDLL, logits: Tensor, vocabulary: Tensor | None = None, fails: str = "") -> Tensor:
    """The first draft token of a request for each row of `logits` [R, V]."""
    num_rows, size = logits.shape

    def multiply(*given: int) -> bool:
        assert given[1] == num_rows
        ctypes.memmove(given[5], logits.data_ptr(), logits.nbytes)
        return fails != "output"

    calls = RunLayers(lambda _: fails != "layers"), Multiply(multiply)
    rows = torch.zeros(8, 1, dtype=logits.dtype)  # the table, cos and sin, features: of one number each
    fields = ChainFields(address_of(calls[0]))
    fields.layers.hidden_size = fields.layers.head_dim = 1
    fields.layers.is_bf16 = logits.dtype == torch.bfloat16
    fields.output.multiply, fields.output.num_outputs = address_of(calls[1]), size
    fields.embedding.table = fields.cos = fields.sin = rows.data_ptr()
    fields.vocabulary = None if vocabulary is None else vocabulary.data_ptr()
    text, features = torch.zeros(num_rows, dtype=torch.int64), rows[:1].expand(num_rows, 1)
    requests = [Reach(range(8), 0, 1, 1)] * num_rows
    return draft_chain(library, fields, text, features, requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_of_the_largest_logits(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    for size in SIZES:
        logits = torch.randn(9, size)
        logits[1] = logits[1].round()  # equal ones
        logits[2] = -0.0
        logits[2, size // 2] = 0.0
        logits[3] = -logits[3].abs() - 1
        logits[4, torch.rand(size) < 0.5] = -INFINITY
        logits[4, size - 1] = 1.0
        logits[5, size // 3] = 100.0
        logits[6, size - 1] = 100.0
        logits = logits.to(dtype)
        assert torch.equal(chosen(library, logits), first_max(logits)), size
        ids = torch.arange(size) * 3 + 1
        assert torch.equal(chosen(library, logits, ids), ids[first_max(logits)]), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_token_of_a_row_that_cannot_be_drafted_from(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """NaN anywhere, infinity, nothing but masked tokens; the rows beside it are not touched."""
    for size in SIZES:
        for place in sorted({0, size // 2, size - 1}):
            logits = torch.randn(6, size)
            logits[1, place] = NAN
            logits[2, place] = -NAN
            logits[3, place] = INFINITY
            logits[4] = -INFINITY
            logits = logits.to(dtype)
            found = chosen(library, logits)
            assert found[1:5].tolist() == [0] * 4, (size, place)
            assert torch.equal(found, first_max(without_broken(logits))), (size, place)


def test_many_rows_on_several_threads(library: ctypes.CDLL) -> None:
    logits, before = torch.randn(32, 4099), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(chosen(library, logits), first_max(logits))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fails", ["layers", "output"])
def test_no_memory(fails: str) -> None:
    library = chain_kernel.chain_library()
    assert library is not None
    with pytest.raises(MemoryError, match="no memory to draft for 2 requests; run fewer at a time"):
        chosen(library, torch.randn(2, 5), fails=fails)
