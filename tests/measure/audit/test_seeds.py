"""The check of equal seeds: never a failure by chance, whatever the clock says; what does not repeat is still found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import InputError, SamplingParams, SpecConfig
from foretoken.core import Draft, Uniforms
from foretoken.engine import runner as runner_module
from foretoken.measure.audit.checks import _untimed, check_seeds
from foretoken.measure.audit.options import AuditOptions
from foretoken.measure.audit.session import Run, Session
from foretoken.measure.checks import Check
from foretoken.model.interface import ForwardOutput
from foretoken.model.paged import PagedModel
from foretoken.text.randomness import RaceNoise
from tests.helpers.checkpoints import token_ids
from tests.helpers.clock import jitter

PROMPTS = [token_ids(4 + i, seed=i) for i in range(4)]
DRAWN = "in 16-bit precision rounding changes the probabilities of this rule"


def checks_of(pair: SimpleNamespace, spec: SpecConfig, turns: int = 1, **options: object) -> list[Check]:
    """The check of equal seeds, `turns` times in one session."""
    settings = {
        "num_prompts": 4,
        "max_tokens": 32,
        "temperatures": (0.8,),
        "dtype": "bfloat16",
        "cache_tokens": 4096,
    } | options
    found: list[Check] = []
    session = Session(AuditOptions(str(pair.target), spec, **settings), PROMPTS)  # type: ignore[arg-type]
    with session.llm:
        for _ in range(turns):
            found += check_seeds(session)
    return found


def draft_of(pair: SimpleNamespace, **options: object) -> SpecConfig:
    return SpecConfig("draft_model", str(pair.draft), **options)  # type: ignore[arg-type]


def rounds_by_rows(patch: pytest.MonkeyPatch) -> None:
    """Logits move by up to half a unit of bfloat16 with the number of tokens in the step, as those of larger models
    do.
    """
    forward = PagedModel.forward

    def uneven(
        self: PagedModel, tokens: torch.Tensor, segments: Sequence[object], taps: Sequence[int] = ()
    ) -> ForwardOutput:
        output = forward(self, tokens, segments, taps)  # type: ignore[arg-type]
        noise = torch.rand(output.logits.shape[-1], generator=torch.Generator().manual_seed(len(tokens))) - 0.5
        unit = torch.finfo(torch.bfloat16).eps * output.logits.abs().amax(-1, keepdim=True)
        return replace(output, logits=(output.logits + noise * unit).to(output.logits.dtype))

    patch.setattr(PagedModel, "forward", uneven)


@pytest.mark.parametrize("temperature", [pytest.param(0.8, marks=pytest.mark.repeated), 0.01])
def test_w3_the_number_of_draft_tokens_follows_the_clock_and_no_audit_fails(
    pair: SimpleNamespace, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers turn off at near ties, and only there. Which clock makes one turn off depends on the processor's bits."""
    rounds_by_rows(monkeypatch)
    for seed in range(1, 13):
        jitter(monkeypatch, seed=seed)
        checks = checks_of(pair, draft_of(pair), turns=3, temperatures=(temperature,))
        assert len(checks) == 12
        assert [check for check in checks if check.result != "pass"] == []
        assert {check.demanded for check in checks} == {"all equal except at near ties"}
        if any("differ at near ties" in check.found for check in checks):
            return
    raise AssertionError("no answer turned off")


@pytest.mark.parametrize(
    "spec",
    [SpecConfig("suffix"), SpecConfig("lookahead"), SpecConfig("ngram"), SpecConfig("mix")],
    ids=lambda s: s.drafter,
)
def test_w3_drawn_rules_repeat_themselves_in_wide_numbers(
    pair: SimpleNamespace, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says, and whatever earlier answers of the same seeds have taught; a drafter that goes by times
    is not asked.
    """
    jitter(monkeypatch, seed=2)
    spec = SpecConfig(spec.drafter, rule="tree")
    checks = checks_of(pair, spec, turns=2, dtype="float32")
    assert [(check.result, check.demanded) for check in checks] == [("pass", "all equal")] * (
        0 if spec.drafter == "mix" else 2
    )


def test_w3_drawn_rules_claim_no_equality_in_16_bit_numbers(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference is told, not judged."""
    shared = np.random.default_rng(0)

    def numbers(draft: Draft, seeds: object, starts: object, device: object) -> Uniforms:
        return Uniforms(
            torch.from_numpy(shared.random(draft.num_nodes)), torch.from_numpy(shared.random(draft.num_requests))
        )

    monkeypatch.setattr(runner_module, "round_uniforms", numbers)
    (told,) = checks_of(pair, draft_of(pair, rule="block"))
    assert (told.result, told.demanded) == ("info", "")
    assert told.detail.startswith(DRAWN)
    (judged,) = checks_of(pair, draft_of(pair, rule="block"), dtype="float32")
    assert judged.result == "fail"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_w3_seeds_that_do_not_repeat_are_found(
    pair: SimpleNamespace, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise from a generator that everybody shares."""
    at, shared = RaceNoise.at, torch.Generator().manual_seed(0)

    def of_the_run(self: RaceNoise, positions: list[int]) -> torch.Tensor:
        rows = at(self, positions)
        return torch.empty_like(rows).exponential_(generator=shared)

    monkeypatch.setattr(RaceNoise, "rows", of_the_run)
    assert {check.result for check in checks_of(pair, draft_of(pair), dtype=dtype)} == {"fail"}


def test_what_is_chosen_by_times_is_set_or_left_out(pair: SimpleNamespace) -> None:
    assert _untimed(draft_of(pair, draft_probability="auto")) == draft_of(pair, num_draft=1)
    assert _untimed(draft_of(pair, num_draft=4)) == draft_of(pair, num_draft=4)
    assert _untimed(SpecConfig()) == SpecConfig()
    assert _untimed(SpecConfig("early_exit", exit_layer=1)) == SpecConfig("early_exit", exit_layer=1, num_draft=1)
    for spec in (SpecConfig("mix"), SpecConfig("auto"), SpecConfig("early_exit")):
        assert _untimed(spec) is None


def test_drafters_that_remember_answers_are_reset_between_two_runs_of_a_seed(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first run taught would change what the second one drafts."""
    known: list[int] = []
    answers = Session.answers

    def note(session: Session, *args: Any) -> Run:
        known.append(sum(int((drafter.successors >= 0).sum()) for drafter in session.llm.loaded_drafters()))
        return answers(session, *args)

    monkeypatch.setattr(Session, "answers", note)
    (check,) = checks_of(pair, SpecConfig("recycling", rule="rejection", num_draft=4), dtype="float32")
    assert check.result == "pass"
    assert known == [0, 0]


def test_one_prompt_and_several_temperatures(pair: SimpleNamespace) -> None:
    """The warmest of the temperatures is checked, with as many answers as there are."""
    checks = checks_of(pair, draft_of(pair), num_prompts=1, temperatures=(0.0, 0.5, 1.2))
    assert [check.result for check in checks] == ["pass"] * 4
    assert all(check.where.startswith("temperature 1.2, ") for check in checks)
    assert all(check.num_tokens == 32 for check in checks)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0, 101.0, True, "warm"])
def test_temperatures_that_are_none(temperature: object) -> None:
    with pytest.raises(InputError, match="temperatures="):
        AuditOptions("t", SpecConfig(), temperatures=(0.0, temperature))  # type: ignore[arg-type]
    assert SamplingParams(temperature=100).temperature == 100
