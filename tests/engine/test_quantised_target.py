"""A quantised target answers by its own distribution, whoever drafts: greedy answers equal plain decoding's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import QUANTISED
from foretoken.measure.audit.options import AuditOptions
from foretoken.measure.audit.run import run_audit
from foretoken.model.matrices import grouped_kernel
from tests.helpers.checkpoints import token_ids

# Tiny models: the draft is no smaller than the target once that is quantised.
pytestmark = pytest.mark.filterwarnings("ignore:the draft has:UserWarning")
PROMPTS = [token_ids(5 + 3 * i, seed=i) * 2 for i in range(6)]
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("kind", QUANTISED)
def test_greedy_answers_are_plain_s_under_strict_numerics(
    pair: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where near ties would show a single wrong bit; and the twin without a compiler says the same."""
    with LLM(pair.target, SpecConfig(), dtype="bfloat16", numerics="strict", weights=kind) as llm:
        plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
        for spec in (
            SpecConfig("draft_model", str(pair.draft), num_draft=4),
            SpecConfig("ngram", num_draft=8),
            SpecConfig("early_exit", exit_layer=1, num_draft=3),
        ):
            assert [out.token_ids for out in llm.generate(PROMPTS, LONG, spec=spec)] == plain
        monkeypatch.setattr(grouped_kernel, "kernel", lambda: None)
        assert [out.token_ids for out in llm.generate(PROMPTS, LONG)] == plain
    with LLM(pair.target, SpecConfig(), dtype="bfloat16", numerics="strict") as llm:
        assert [out.token_ids for out in llm.generate(PROMPTS, LONG)] != plain  # another model


def test_the_audit_of_a_quantised_target_passes(pair: SimpleNamespace) -> None:
    options = AuditOptions(
        str(pair.target),
        SpecConfig("draft_model", str(pair.draft), num_draft=3),
        num_prompts=4,
        max_tokens=24,
        numerics="strict",
        weights="int4",
    )
    report = run_audit(options, PROMPTS[:4], "test")
    assert report.passed
    assert any(check.name == "logits do not depend on the batch" for check in report.results["checks"])
