"""What the controller knows of a mixture of experts before its first step: rows that wake more experts cost more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.cost import CostTable, priors_of
from foretoken.core import Batch, BatchEntry, Request
from foretoken.engine.startup import start_profile
from foretoken.engine.startup.profiling import StandInDrafter
from foretoken.engine.startup.start_profile import measure_roofline, measure_start
from foretoken.model.interface import MixtureModel
from foretoken.model.open import open_model
from foretoken.plan.profile import Curve, Profile, Roofline
from tests.helpers.checkpoints import variant


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_profile, "_COPY_BYTES", 1 << 20)


@pytest.mark.parametrize("name", ["qwen3-moe", "llama"])
def test_the_roofline_of_a_model_counts_its_experts(tmp_path: Path, name: str) -> None:
    model = open_model(variant(tmp_path, name), "float32", "cpu", 512)
    assert isinstance(model, MixtureModel)
    roofline = measure_roofline(model)
    assert (roofline.expert_bytes > 0) == (name == "qwen3-moe")
    assert roofline.read_bytes(1) == model.step_bytes
    most = model.step_bytes + model.expert_bytes * (1 - model.expert_share)
    assert roofline.read_bytes(10_000) == pytest.approx(most)
    profile = measure_start(model, {}, "m", budget_s=60.0)
    assert profile is not None
    assert profile.roofline is not None
    assert profile.roofline.expert_bytes == model.expert_bytes


def test_rows_that_were_not_measured_cost_more_where_they_wake_more_experts() -> None:
    """One measured step of 10 ms: 8 more rows hardly cost anything in a dense model, and most of a step each here."""
    dense = Roofline(step_bytes=2e8, row_flops=4e8, kv_bytes_per_token=0, bytes_per_s=2e10, flops_per_s=1e12)
    mixture = Roofline(2e8, 4e8, 0, 2e10, 1e12, expert_bytes=1.3e9, expert_share=1 / 8)
    seconds = []
    for roofline in (dense, mixture):
        profile = Profile({}, {}, {}, "", "", Curve(((1, 0.010),)), roofline=roofline)
        table = CostTable(priors_of(profile)[0])
        assert table.seconds(1) == pytest.approx(0.010)
        seconds.append(table.seconds(9))
    assert seconds[0] < 0.012
    assert seconds[1] > 0.040


def test_stand_ins_for_drafts_are_distinct_tokens() -> None:
    """Rows of one token would go to the same experts, and a profile would find them cheap."""
    request = Request(0, (1, 2, 3), SamplingParams(), SpecConfig(), seed=0)
    entry = BatchEntry(request, 2, (3,), decodes=True, num_draft=12)
    draft = StandInDrafter(50_000).propose(Batch((entry,)))
    assert len(set(draft.tokens.tolist())) > 10
    assert int(draft.tokens.max()) < 50_000
    assert torch.equal(draft.tokens, StandInDrafter(50_000).propose(Batch((entry,))).tokens)
