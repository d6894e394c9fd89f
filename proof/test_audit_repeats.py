"""Audits of the shipped pair in bfloat16 never fail by chance, however the engine's clock jumps."""

from __future__ import annotations

import pytest

from foretoken import SpecConfig
from foretoken.control.config import PolicyConfig
from foretoken.control.policy import BudgetPolicy
from foretoken.measure.audit.checks import check_greedy, check_seeds
from foretoken.measure.audit.options import AuditOptions
from foretoken.measure.audit.session import Session
from foretoken.measure.checks import Check
from tests.helpers.clock import jitter

PROMPTS = ["def main():\n", "class Parser:\n    ", "import os\n", "x = [1,"]


# Of the compiled kernels, which claim equal bits, a check that fails by chance once in 9 is seen with probability 0.99;
# of torch's products one that fails once in 5, before a release once in 44.
@pytest.mark.parametrize(
    ("kernels", "num_turns"),
    [("torch", 5), ("compiled", 10), pytest.param("torch", 50, marks=pytest.mark.release)],
)
def test_w3_checks_of_equal_seeds_and_greedy_answers(
    monkeypatch: pytest.MonkeyPatch, kernels: str, num_turns: int
) -> None:
    """The number of draft tokens is chosen by times that mean nothing, anew in every turn; answers turn off at near
    ties only, and not at all where a row's bits do not depend on the rows beside it.
    """
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: kernels == "torch")  # oneDNN's products for it
    if kernels == "torch":
        monkeypatch.setattr("foretoken.model.row_kernels.row_kernels", lambda: None)
    options = AuditOptions(
        "reference:target",
        SpecConfig("draft_model", "reference:draft"),
        num_prompts=4,
        max_tokens=16,
        dtype="bfloat16",
        cache_tokens=4096,
    )
    checks: list[Check] = []
    session = Session(options, PROMPTS)
    with session.llm:
        # By such a clock decoding would soon seem to fall behind plain decoding, and nothing would be drafted.
        session.llm.reset_controller(BudgetPolicy(PolicyConfig(slack_share=1000.0, decision_share=1000.0)))
        for turn in range(num_turns):
            jitter(monkeypatch, seed=turn)
            checks += check_seeds(session) + (check_greedy(session) if turn % 5 == 0 else [])
    assert len(checks) >= 4 * num_turns
    assert [check for check in checks if check.result != "pass"] == []
    if kernels == "compiled":
        assert not any("differ at near ties" in check.found for check in checks)
