"""Audits of tiny models: a sound engine passes, and every planted error is found by the check that is there for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken import InputError, SamplingParams, SpecConfig
from foretoken.core import Draft, Mass, Uniforms, Verdict
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.engine import runner as runner_module
from foretoken.measure.audit.options import AuditOptions
from foretoken.measure.audit.run import run_audit
from foretoken.measure.checks import Check, equality, failed
from foretoken.measure.report import Report
from foretoken.model.interface import ForwardOutput
from foretoken.model.paged import PagedModel
from foretoken.model.strict import StrictModel
from foretoken.text.randomness import RaceNoise
from foretoken.text.sampling import target_probs
from foretoken.verify.greedy import GreedyRule
from foretoken.verify.rejection import RejectionRule
from tests.helpers.checkpoints import token_ids
from tests.helpers.usual import some_of

PROMPTS = [token_ids(4 + i, seed=i) for i in range(6)]
EXACT = {
    "the same answers as plain decoding",
    "every token is the target's choice",
    "equal seeds, equal answers",
    "all cache is released",
}
LAW = {
    "distribution: only possible tokens",
    "distribution: sharpness",
    "distribution: ranks",
    "distribution: no bias by the draft",
}


def audit(
    pair: SimpleNamespace, rule: str = "rejection", drafter: str | None = "draft_model", **options: object
) -> Report:
    """A short audit in float32, where every difference counts."""
    spec = SpecConfig(
        drafter,
        str(pair.draft) if drafter == "draft_model" else None,
        3 if drafter else "auto",
        rule,
        allow_lossy=rule == "typical",
    )
    settings = {"num_prompts": 24, "max_tokens": 32, "dtype": "float32", "cache_tokens": 4096} | options
    return run_audit(AuditOptions(str(pair.target), spec, **settings), PROMPTS, "foretoken audit")  # type: ignore[arg-type]


def checks_of(report: Report) -> tuple[Check, ...]:
    found: tuple[Check, ...] = report.results["checks"]
    return found


def failures(report: Report) -> set[str]:
    return {check.name for check in failed(checks_of(report))}


# ---- sound engines


@pytest.mark.parametrize(
    ("rule", "drafter"),
    some_of(
        [("auto", "draft_model"), ("rejection", "ngram"), ("auto", None)], {("auto", "draft_model"), ("auto", None)}
    ),
)
def test_a_sound_engine_passes(pair: SimpleNamespace, rule: str, drafter: str | None) -> None:
    report = audit(pair, rule, drafter)
    assert failed(checks_of(report)) == (), report.verdict
    speculative = {"distribution: no bias by the draft", "the same answers as plain decoding"}
    assert {check.name for check in checks_of(report)} == (EXACT | LAW | {"logits do not depend on the batch"}) - (
        set() if drafter else speculative
    )
    undecided = {check.name for check in checks_of(report) if check.result == "undecided"}
    assert undecided <= (
        {"distribution: no bias by the draft"} if drafter == "ngram" else set()
    )  # random text has few repeats to draft from
    assert all(
        check.num_tokens == 24 * 32 for check in checks_of(report) if check.name == "distribution: only possible tokens"
    )
    pulls = [check.num_tokens for check in checks_of(report) if check.name == "distribution: no bias by the draft"]
    assert all(0 < count < 24 * 32 for count in pulls)  # places without a draft say nothing about it
    promised = [
        check.sees for check in checks_of(report) if check.name in ("distribution: sharpness", "distribution: ranks")
    ]
    assert promised
    assert all("total variation" in sees for sees in promised)


def test_auto_is_audited_with_and_without_a_seed(pair: SimpleNamespace) -> None:
    """A request with a seed is coupled, one without takes the block rule for sampled chains: both distributions are
    looked at.
    """
    checks = [check for check in checks_of(audit(pair, "auto", num_prompts=2)) if check.name in LAW]
    assert {check.where for check in checks} == {
        "temperature 0.8, draft_model, rule coupled",
        "temperature 0.8, draft_model, rule block",
    }
    levels = [float(check.demanded.removeprefix("p >= ")) for check in checks if check.demanded.startswith("p >= ")]
    assert len(levels) == 6
    assert sum(levels) == pytest.approx(1e-4, rel=0.05)  # what the report states


def test_few_tokens_decide_nothing_and_the_report_says_so(pair: SimpleNamespace) -> None:
    report = audit(pair, num_prompts=1, max_tokens=8)
    assert failed(checks_of(report)) == ()
    assert "undecided" in report.verdict


def test_temperatures_choose_the_checks(pair: SimpleNamespace) -> None:
    greedy = {check.name for check in checks_of(audit(pair, temperatures=(0.0,), num_prompts=2))}
    sampled = {check.name for check in checks_of(audit(pair, temperatures=(0.7, 1.0), num_prompts=2))}
    both = {"logits do not depend on the batch", "all cache is released"}
    assert greedy == both | {"the same answers as plain decoding", "every token is the target's choice"}
    assert sampled == both | LAW | {"equal seeds, equal answers"}


def test_near_ties_of_16_bit_numbers_are_told_apart_from_errors(pair: SimpleNamespace) -> None:
    """Rounded to bfloat16 the tiny model has many ties: differences are allowed there, and there only."""
    report = audit(pair, "auto", dtype="bfloat16", num_prompts=6)
    assert failed(checks_of(report)) == ()
    demanded = {check.demanded for check in checks_of(report) if check.name in EXACT}
    assert "all equal except at near ties" in demanded


def test_a_lossy_rule_is_not_judged_by_the_law(pair: SimpleNamespace) -> None:
    report = audit(pair, "typical")
    assert failed(checks_of(report)) == ()
    assert {check.result for check in checks_of(report) if check.name in LAW} == {"not claimed"}
    assert "lossy rule: distribution not claimed" in report.verdict
    pull = next(check for check in checks_of(report) if check.name == "distribution: no bias by the draft")
    assert "p < 1e-15" in pull.found or float(pull.found.split("p = ")[1]) < 1e-4  # it is measured all the same


def test_what_cannot_be_audited(pair: SimpleNamespace) -> None:
    spec = SpecConfig()
    with pytest.raises(InputError, match="no tokenizer; give a file of JSON lines"):
        run_audit(AuditOptions(str(pair.target), spec), ["a text"], "")
    with pytest.raises(InputError, match=r"max_tokens=256: must be smaller than the context of 256 tokens"):
        run_audit(AuditOptions(str(pair.target), spec, max_tokens=256), PROMPTS, "")


def test_long_prompts_are_cut_to_their_end(pair: SimpleNamespace) -> None:
    prompts = [token_ids(4), token_ids(500), token_ids(500)]
    report = run_audit(AuditOptions(str(pair.target), SpecConfig(), 2, 60, (0.0,)), prompts, "")
    assert failed(checks_of(report)) == ()
    assert [note for note in report.caveats if "tokens" in note] == [
        "prompt 2 has 500 tokens, and its last 196 were asked: the context of 256 holds no more beside 60 of an "
        "answer. Give shorter prompts, or a smaller --max-tokens."
    ]


# ---- planted errors


def residual_is_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RejectionRule, "next_token_weights", lambda self, draft, probs, rows: probs[list(rows)])


def accepts_by_q(patch: pytest.MonkeyPatch) -> None:
    terms = RejectionRule.accept_terms
    patch.setattr(RejectionRule, "accept_terms", lambda self, draft, probs: (terms(self, draft, probs)[1],) * 2)


def declares(laws_of: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """A drafter whose mass is not the distribution that it drew from."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        propose = DraftModelDrafter.propose

        def lying(self: DraftModelDrafter, batch: object) -> Draft:
            draft = propose(self, batch)  # type: ignore[arg-type]
            return (
                draft
                if draft.mass is None
                else replace(draft, mass=Mass(laws_of(draft.mass.distributions), draft.mass.distribution_of_row))
            )

        patch.setattr(DraftModelDrafter, "propose", lying)

    return plant


def flattened(distributions: Tensor) -> Tensor:
    return distributions.sqrt() / distributions.sqrt().sum(-1, keepdim=True)


class Stale:
    """The distributions of the round before, where it had as many."""

    def __init__(self) -> None:
        self.before: Tensor | None = None

    def __call__(self, distributions: Tensor) -> Tensor:
        before, self.before = self.before, distributions
        return before if before is not None and before.shape == distributions.shape else distributions


def another_temperature(patch: pytest.MonkeyPatch) -> None:
    def warmer(logits: Tensor, params: Sequence[SamplingParams], best: Tensor | None = None) -> Tensor:
        return target_probs(
            logits, [p if p.greedy else replace(p, temperature=1.15 * p.temperature) for p in params], best
        )

    patch.setattr(runner_module, "target_probs", warmer)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (residual_is_target, "distribution: no bias by the draft"),
        pytest.param(accepts_by_q, "distribution: no bias by the draft", marks=pytest.mark.repeated),
        (declares(flattened), "distribution: no bias by the draft"),
        pytest.param(declares(Stale()), "distribution: no bias by the draft", marks=pytest.mark.repeated),
        (another_temperature, "distribution: sharpness"),
    ],
    ids=[
        "residual is the target",
        "tested with q",
        "declares another distribution",
        "stale distributions",
        "temperature",
    ],
)
def test_a_wrong_law_is_found(
    pair: SimpleNamespace, plant: Callable[[pytest.MonkeyPatch], None], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = audit(pair, temperatures=(0.5,), num_prompts=48, max_tokens=48)
    assert check in failures(report)
    assert failures(report) <= LAW  # the engine is otherwise sound
    assert report.verdict.startswith("FAIL")


def test_a_filter_that_is_not_applied_is_found(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A banned token that comes out has probability 0: no statistics needed. The last tokens of the vocabulary are
    banned in the audit's view.
    """
    from foretoken.engine.shadow import rescoring

    def cut(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        return target_probs(logits.masked_fill(torch.arange(97) > 90, -torch.inf), params)

    monkeypatch.setattr(rescoring, "target_probs", cut)
    found = {check.name: check for check in failed(checks_of(audit(pair, temperatures=(0.8,))))}
    assert not found["distribution: only possible tokens"].found.startswith("0 ")


@pytest.mark.parametrize("dtype", some_of(["float32", "bfloat16"], {"bfloat16"}))
def test_wrong_greedy_answers_are_found(pair: SimpleNamespace, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft token accepted: in 16-bit numbers too that is more than rounding explains."""
    verify = GreedyRule.verify_best

    def trusting(self: GreedyRule, draft: Draft, best: Tensor) -> Verdict:
        verdict = verify(self, draft, best)
        paths = tuple(tuple(range(length)) for length in draft.lengths)
        tokens = tuple(
            tuple(draft.tokens[draft.offsets[b] : draft.offsets[b + 1]].tolist()) for b in range(draft.num_requests)
        )
        return replace(verdict, paths=paths, accepted=tokens)

    monkeypatch.setattr(GreedyRule, "verify_best", trusting)
    report = audit(pair, "auto", temperatures=(0.0,), dtype=dtype)
    assert failures(report) == {"the same answers as plain decoding", "every token is the target's choice"}
    assert "apart, rounding explains" in next(check.detail for check in failed(checks_of(report)) if check.detail)


def answer(*tokens: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=tokens)


@pytest.mark.parametrize(
    ("other", "apart", "exact", "result", "found"),
    [
        (answer(1, 2, 3), 9.0, True, "pass", "2 of 2 equal"),
        (answer(1, 2, 4), 0.1, False, "pass", "1 of 2 equal, 1 differ at near ties"),
        (answer(1, 2, 4), 0.1, True, "fail", "1 of 2 equal"),
        (answer(1, 2, 4), 0.3, False, "fail", "1 of 2 equal"),
        (answer(1, 2, 4), float("nan"), False, "fail", "1 of 2 equal"),
        (answer(1, 2), 0.0, False, "fail", "1 of 2 equal"),
    ],
)
def test_which_differences_count(other: SimpleNamespace, apart: float, exact: bool, result: str, found: str) -> None:
    """Rounding may explain up to 0.2, in 16-bit numbers only, and never that an answer is shorter."""
    check = equality("x", "y", [(5,), (1, 2, 3)], [(5,), other.token_ids], exact, lambda i, place: (apart, 0.2))
    assert (check.result, check.found) == (result, found)


def test_an_answer_that_ends_early_is_found(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.engine.request import RequestState

    append = RequestState.append

    def hasty(self: RequestState, token: int, origin: object) -> object:
        reason = append(self, token, origin)  # type: ignore[arg-type]
        if self.request.spec.drafter is not None and len(self.output_ids) == 5:
            self.finish_reason = reason = "length"
        return reason

    monkeypatch.setattr(RequestState, "append", hasty)
    report = audit(pair, temperatures=(0.0,), num_prompts=3)
    assert "one ends at token 5" in next(check.detail for check in failed(checks_of(report)))


def test_seeds_that_do_not_repeat_are_found(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance from a generator that everybody shares."""
    shared = np.random.default_rng(0)

    def numbers(draft: Draft, seeds: object, starts: object, device: object) -> Uniforms:
        return Uniforms(
            torch.from_numpy(shared.random(draft.num_nodes)), torch.from_numpy(shared.random(draft.num_requests))
        )

    monkeypatch.setattr(runner_module, "round_uniforms", numbers)
    report = audit(pair, temperatures=(0.8,))
    assert failures(report) == {"equal seeds, equal answers"}
    assert [check.where for check in failed(checks_of(report))] == ["temperature 0.8, the same again"]


def test_coupled_noise_that_belongs_to_the_round_is_found(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distribution stays right and a run repeats itself, but another draft length gives another answer."""
    at = RaceNoise.at

    def of_the_round(self: RaceNoise, positions: Sequence[int]) -> Tensor:
        rows = at(self, positions)
        return rows if positions[0] < 12 else rows.roll(len(positions), -1)

    monkeypatch.setattr(RaceNoise, "rows", of_the_round)
    report = audit(pair, "coupled", temperatures=(0.8,))
    assert {
        check.where.split(", ")[1] for check in failed(checks_of(report)) if check.name == "equal seeds, equal answers"
    } >= {
        "num_draft 1",
        "plain decoding",
    }


def test_a_lost_block_is_found(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    close = PagedModel.close
    lost: list[tuple[PagedModel, object]] = []

    def forgetful(self: PagedModel, sequence: int) -> None:
        if sequence == 3:
            lost.append((self, self.tables.pop(sequence)))
        else:
            close(self, sequence)

    monkeypatch.setattr(PagedModel, "close", forgetful)
    report = audit(pair, temperatures=(0.0,), num_prompts=4)
    for model, table in lost:  # or the audit after every test would find it too
        model.allocator.free(table)  # type: ignore[arg-type]
    assert failures(report) == {"all cache is released"}
    assert {check.where for check in failed(checks_of(report))} == {"target", "draft"}


def test_an_engine_that_fails_under_a_check_fails_it(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PagedModel.forward

    def broken(self: PagedModel, tokens: Tensor, segments: Sequence[object], taps: Sequence[int] = ()) -> ForwardOutput:
        output = forward(self, tokens, segments, taps)  # type: ignore[arg-type]
        return replace(output, logits=output.logits * float("nan")) if len(segments) > 2 else output

    monkeypatch.setattr(PagedModel, "forward", broken)
    report = audit(pair, temperatures=(0.0,), num_prompts=4)
    assert failures(report) == {"greedy answers", "logits"}
    assert all("the engine failed: request" in check.found for check in failed(checks_of(report)))


@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_logits_that_depend_on_the_batch(pair: SimpleNamespace, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Demanded equal when strict, told otherwise."""
    kind = StrictModel if numerics == "strict" else PagedModel
    forward = kind.forward

    def uneven(self: PagedModel, tokens: Tensor, segments: Sequence[object], taps: Sequence[int] = ()) -> ForwardOutput:
        output = forward(self, tokens, segments, taps)  # type: ignore[arg-type]
        return replace(output, logits=output.logits + 1e-6 * output.logits * (len(tokens) > 1))

    monkeypatch.setattr(kind, "forward", uneven)
    report = audit(pair, temperatures=(0.0,), num_prompts=4, numerics=numerics, max_tokens=12)
    logits = [check for check in checks_of(report) if check.name == "logits do not depend on the batch"]
    assert {check.where for check in logits} == {"4 rows against 1", "4 requests against 1"}
    assert {check.result for check in logits} == {"fail" if numerics == "strict" else "info"}
    assert all("apart" in check.found for check in logits)


def test_strict_numbers_are_bitwise_equal(pair: SimpleNamespace) -> None:
    report = audit(pair, "auto", temperatures=(0.0,), num_prompts=4, numerics="strict", dtype="bfloat16", max_tokens=12)
    assert [check.result for check in checks_of(report) if check.name == "logits do not depend on the batch"] == [
        "pass",
        "pass",
    ]
    assert failed(checks_of(report)) == ()
