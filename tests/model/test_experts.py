"""Experts: equal to a loop in float64, the compiled call bit for bit its twin, a row's bits its own in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.build import built
from foretoken.model.expert_config import ExpertsConfig
from foretoken.model.experts import Expert, Experts, ExpertTable, expert_channels, expert_table, run_experts
from foretoken.model.layers import Linear, MkldnnWeight
from foretoken.model.row_kernels import FLAGS, SOURCE, RowKernels, load, row_kernels
from tests.helpers.experts import HIDDEN, MIXTURES, mixture
from tests.helpers.instruction_sets import INSTRUCTION_SETS

HOLDS = ("packed", "int8", "int4")


@pytest.fixture(autouse=True)
def answering() -> Iterator[None]:
    """Kernels run while answering only; as many threads as before afterwards."""
    before = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=MIXTURES, ids=str)
def config(request: pytest.FixtureRequest) -> ExpertsConfig:
    return MIXTURES[request.param]


def compiled() -> RowKernels:
    kernels = row_kernels()
    assert kernels is not None
    return kernels


def table_of(experts: Experts, dtype: torch.dtype) -> ExpertTable:
    table = expert_table(experts.parts(), dtype)
    assert table is not None
    return table


def rows_of(count: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(experts: Experts, x: Tensor) -> Tensor:
    """One row and one expert after the other, in float64."""
    config, out = experts.config, torch.zeros(x.shape, dtype=torch.float64)
    for row, own in enumerate(x.double()):
        scores = experts.router.weight.double() @ own
        if experts.router.bias is not None:
            scores = scores + experts.router.bias.double()
        best = sorted(range(config.num_experts), key=lambda e: (-float(scores[e]), e))[: config.num_active]
        shares = scores.exp() / (scores[best] if config.normalises else scores).exp().sum()
        for number in best:
            expert = experts.experts[number]
            assert isinstance(expert, Expert)
            out[row] += shares[number] * through(expert, own)
        if experts.shared is not None and experts.shared_gate is not None:
            out[row] += (experts.shared_gate.weight.double() @ own).sigmoid() * through(experts.shared, own)
    return out


def through(expert: Expert, x: Tensor) -> Tensor:
    def times(linear: torch.nn.Module, own: Tensor) -> Tensor:
        full = linear.weight.double() @ own
        return full if linear.bias is None else full + linear.bias.double()

    gate, up = times(expert.gate_up_proj, x).chunk(2)
    if expert.clamped is None:
        return times(expert.down_proj, F.silu(gate) * up)
    limit = expert.clamped.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return times(expert.down_proj, gate * torch.sigmoid(expert.clamped.alpha * gate) * (up + 1))


def test_numbers_equal_a_loop_over_rows_and_experts(config: ExpertsConfig) -> None:
    experts, x = mixture(config), rows_of(9)
    assert torch.allclose(experts(x).double(), by_hand(experts, x), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bf16 here")
def test_matrices_that_onednn_packed(config: ExpertsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors with AMX: it takes rows of bfloat16 alone, and experts have wider ones."""
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: True)
    plain, packed, x = (*(mixture(config, dtype=torch.bfloat16) for _ in range(2)), rows_of(9, torch.bfloat16))
    for linear in packed.modules():
        if isinstance(linear, Linear):
            linear.pack()
            assert isinstance(linear.packed, MkldnnWeight)
    assert torch.allclose(packed(x).float(), plain(x).float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hold", HOLDS)
def test_the_call_equals_its_twin(config: ExpertsConfig, hold: str, dtype: torch.dtype) -> None:
    """Bit for bit, given the same routing."""
    experts, x = mixture(config, hold, dtype), rows_of(11, dtype)
    chosen, weights, _ = expert_channels(compiled(), table_of(experts, dtype), x)
    own, own_weights = experts.route(x)
    assert torch.equal(chosen.long(), own)
    assert torch.allclose(weights, own_weights, rtol=1e-5)
    found, twin = experts(x), experts.mixed(x, chosen, weights)
    if config.clamped is None:
        assert torch.equal(found, twin)
    else:  # torch's sigmoid is another polynomial, and a code of the row behind it may be the next one
        assert torch.allclose(found.float(), twin.float(), rtol=2e-2, atol=2e-2)
    assert torch.allclose(found.float(), experts.mixed(x, own, own_weights).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hold", HOLDS)
def test_a_row_has_the_same_bits_in_any_batch(config: ExpertsConfig, hold: str, dtype: torch.dtype) -> None:
    experts, x = mixture(config, hold, dtype), rows_of(33, dtype)
    alone = torch.cat([experts(row[None]) for row in x])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for count in (2, 8, 33):
            order = torch.randperm(33, generator=torch.Generator().manual_seed(count))[:count]
            assert torch.equal(experts(x[order]), alone[order])


def test_more_rows_than_are_grouped_at_a_time() -> None:
    """Tasks are cut at 64 rows of an expert, and calls at 512 rows."""
    experts, x = mixture(MIXTURES["qwen2"], "int8"), rows_of(700)
    found = experts(x)
    for row in (0, 64, 511, 512, 699):
        assert torch.equal(found[row], experts(x[row : row + 1])[0])


def test_all_rows_to_one_expert_and_none_to_the_others() -> None:
    config = replace(MIXTURES["one"], num_experts=6)
    experts, x = mixture(config, "int4"), rows_of(8).abs()
    experts.router.weight.zero_()
    experts.router.weight[4] = 1.0
    chosen, _, _ = expert_channels(compiled(), table_of(experts, x.dtype), x)
    assert chosen.tolist() == [[4]] * 8
    assert torch.equal(experts(x), torch.cat([experts(row[None]) for row in x]))


@pytest.mark.parametrize("normalises", [True, False])
def test_ties_go_to_the_first_expert(normalises: bool) -> None:
    config = ExpertsConfig(40, 3, 32, (0,), normalises=normalises)
    experts, x = mixture(config, "int8"), rows_of(4)
    experts.router.weight[:] = experts.router.weight[0]
    chosen, weights, _ = expert_channels(compiled(), table_of(experts, x.dtype), x)
    own, own_weights = experts.route(x)
    assert chosen.tolist() == own.tolist() == [[0, 1, 2]] * 4
    share = torch.full_like(weights, 1 / 3 if normalises else 1 / 40)
    assert torch.allclose(weights, share)
    assert torch.allclose(own_weights, share)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("hold", HOLDS)
def test_a_row_that_is_no_number_leaves_the_others_alone(config: ExpertsConfig, hold: str, wrong: float) -> None:
    experts, x = mixture(config, hold), rows_of(6)
    expected = experts(x)
    x[2, 5] = wrong
    found = experts(x)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], expected[others])
    assert not torch.isfinite(found[2]).all()


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_the_call_on_other_processors(config: ExpertsConfig, instructions: str) -> None:
    """Routing, gates and sums as older processors run them; the products are those of this one."""
    kernels = load(built(SOURCE, tuple(flag.replace("native", instructions) for flag in FLAGS)))
    experts, x = mixture(config, "packed"), rows_of(9)
    table = table_of(experts, x.dtype)
    found = run_experts(kernels, table, x)
    assert torch.allclose(found, experts(x), rtol=1e-3, atol=1e-4)
    assert torch.equal(found[3], run_experts(kernels, table, x[3:4])[0])


def test_numbers_have_no_table() -> None:
    assert expert_table(mixture(MIXTURES["mixtral"]).parts(), torch.float32) is None


def test_a_table_follows_its_weights() -> None:
    """Replaced weights are seen, and rows of another dtype have a table of their own."""
    experts, other, x = mixture(MIXTURES["mixtral"], "int8"), mixture(MIXTURES["mixtral"], "int8", seed=5), rows_of(3)
    first = experts(x)
    experts.load_state_dict(other.state_dict())
    for module, replacement in zip(experts.modules(), other.modules(), strict=True):
        if hasattr(module, "packed"):
            module.hold(replacement.packed)
    assert not torch.equal(first, experts(x))
    assert torch.equal(experts(x), other(x))
    assert experts(x.bfloat16()).dtype == torch.bfloat16


def test_no_rows() -> None:
    experts = mixture(MIXTURES["qwen2"], "int8")
    assert experts(rows_of(0)).shape == (0, HIDDEN)
    assert mixture(MIXTURES["qwen2"])(rows_of(0)).shape == (0, HIDDEN)
