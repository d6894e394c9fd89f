"""The study of drafters with trained heads: both tables come out, and both kinds of trees are what they are called."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.measure.load.settings import NO_POLICIES
from studies import heads
from tests.helpers.checkpoints import token_ids
from tests.helpers.tiny_heads import tiny_head


@pytest.fixture(scope="module")
def folders(text_pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("heads")
    return {kind: str(tiny_head(root / kind, Path(text_pair.target), kind)) for kind in ("eagle", "medusa")}


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "medusa"])
def test_trees_have_a_sampled_child_or_none(text_pair: SimpleNamespace, folders: dict[str, str], kind: str) -> None:
    settings = {one.choice.name: one for one in heads.tree_settings(folders, str(text_pair.draft), 6)}
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=1)
    with LLM(text_pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
        for stage_kind, has_drawn in ((heads.Stage, True), (heads.DeterministicStage, False)):
            stage = stage_kind(llm, str(text_pair.draft), NO_POLICIES, 0)
            stage.enter(settings[kind])
            drawn: list[bool] = []
            (drafter,) = llm.loaded_drafters()
            propose = drafter.propose

            def note(batch, propose=propose, drawn=drawn):
                draft = propose(batch)
                drawn += [any(draft.sampled)] if draft.num_nodes else []
                return draft

            drafter.propose = note
            llm.generate([token_ids(12)], params, stage.spec(settings[kind]))
            assert drawn
            assert all(one == has_drawn for one in drawn)


def test_the_study_runs(text_pair: SimpleNamespace, folders: dict[str, str]) -> None:
    given = argparse.Namespace(
        target=str(text_pair.target), draft=None, dtype="float32", device="cpu", threads=None, **folders, num_draft=2,
        num_nodes=3, slices=("code",), prompts_per_slice=2, max_tokens=6, temperatures=("1.0",), tree_temperature=1.0,
        without_chains=False, without_trees=False, seed=0,
    )  # fmt: skip
    given.block = None
    report = heads.study(given)
    assert {row.setting for row in report.rows} == {"ngram-2", "suffix-2", "recycling-2", "eagle-2", "medusa-2"}
    assert {row.text for row in report.rows} == {"forced", "greedy", "sampled 1"}
    assert [one.drafter for one in report.results["trees"]] == ["eagle", "medusa"]
    assert any("block was not measured" in caveat for caveat in report.caveats)
    assert len(report.tables) == 2
    given.without_chains = True
    report = heads.study(given)
    assert not report.rows
    assert [one.drafter for one in report.results["trees"]] == ["eagle", "medusa"]
