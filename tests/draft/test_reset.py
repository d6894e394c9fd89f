"""`LLM.reset_drafters`, `reset_controller`: after them a request is answered as if it were the first one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from foretoken import LLM, InputError, SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.draft.base import Resets
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.plan.profile import Curve
from foretoken.registry import DRAFTERS, load_source
from tests.helpers.checkpoints import token_ids

PROMPT = token_ids(12, seed=3)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, tenant="one")
REMEMBER = {"suffix": {}, "recycling": {}, "mix": {}, "cascade": {"parts": ("suffix", "draft_model"), "draft": True}}


@pytest.fixture(scope="module")
def llm(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048, profile="off") as opened:
        yield opened


def counts(llm: LLM, spec: SpecConfig) -> tuple[object, ...]:
    """What an answer took."""
    stats = llm.generate([PROMPT], PARAMS, spec)[0].stats
    return stats.num_steps, stats.num_drafted, stats.num_inner_drafted, tuple(stats.accepted_per_position)


def test_every_drafter_of_the_package_can_be_reset() -> None:
    """Or measurements would load its weights anew before each answer."""
    assert [name for name in DRAFTERS if name != "auto" and not issubclass(load_source(name), Resets)] == []


@pytest.mark.parametrize("name", REMEMBER)
def test_a_drafter_that_was_reset_knows_no_earlier_answer(llm: LLM, pair: SimpleNamespace, name: str) -> None:
    given = {key: str(pair.draft) if value is True else value for key, value in REMEMBER[name].items()}
    spec = SpecConfig(name, num_draft=4, **given)
    llm.reset_drafters(spec)
    loaded = llm.loaded_drafters(spec)
    first = counts(llm, spec)
    assert counts(llm, spec) != first, "the prompt does not tell apart what is remembered"
    llm.reset_drafters(spec)
    assert llm.loaded_drafters(spec) == loaded
    assert counts(llm, spec) == first


def test_a_draft_model_that_was_reset_reads_the_prompt_again(llm: LLM, pair: SimpleNamespace) -> None:
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=2)
    llm.reset_drafters(spec)
    (drafter,) = llm.loaded_drafters(spec)
    found = []
    for resets in (False, False, True):
        if resets:
            llm.reset_drafters(spec)
        before = drafter.model.prefix_stats.num_found_tokens
        llm.generate([PROMPT * 3], PARAMS, spec)
        found.append(drafter.model.prefix_stats.num_found_tokens - before)
    assert found[0] == found[2] == 0 < found[1]


def test_a_searched_set_of_layers_is_searched_for_again(llm: LLM) -> None:
    spec = SpecConfig("early_exit")
    llm.reset_drafters(spec)
    (drafter,) = llm.loaded_drafters(spec)
    assert isinstance(drafter, EarlyExitDrafter)
    drafter.skips.num_trials = 1
    llm.reset_drafters()
    assert llm.loaded_drafters(spec) == (drafter,)
    assert not drafter.skips.num_trials


def test_drafters_that_were_taken_out_come_back_with_what_they_know(llm: LLM) -> None:
    spec = SpecConfig("suffix", num_draft=4)
    llm.generate([PROMPT], PARAMS, spec)
    (suffix,) = llm.loaded_drafters(spec)
    assert isinstance(suffix, SuffixDrafter)
    taken = llm.take_drafters(spec)
    assert not llm.loaded_drafters(spec)
    llm.generate([PROMPT], PARAMS, spec)
    assert llm.loaded_drafters(spec) != (suffix,)
    llm.put_drafters(taken)
    assert llm.loaded_drafters(spec) == (suffix,)
    assert suffix.num_stored_tokens


def test_auto_resets_each_of_its_parts(llm: LLM) -> None:
    spec = SpecConfig("auto", parts=("suffix", "recycling"))
    llm.generate([PROMPT], PARAMS, spec)
    suffix, recycling = llm.loaded_drafters(spec)
    assert isinstance(suffix, SuffixDrafter)
    assert isinstance(recycling, RecyclingDrafter)
    llm.reset_drafters(spec)
    assert (recycling.successors < 0).all()
    assert suffix.num_stored_tokens == 0


def test_a_policy_that_was_reset_knows_what_was_measured_at_the_start_and_no_more(pair: SimpleNamespace) -> None:
    with LLM(pair.target, SpecConfig("ngram"), dtype="float32", cache_tokens=512, profile="off") as llm:
        llm.engine.chooser.seed(Curve(((1, 0.5), (8, 1.0))), {})
        first = llm.reset_controller()
        assert first.target_cost.seconds(1) == 0.5
        llm.generate([PROMPT], PARAMS)
        assert first.target_cost.seconds(1) != 0.5
        second = llm.reset_controller()
        assert second is not first
        assert second.target_cost.seconds(1) == 0.5
        assert llm.reset_controller(first) is first is llm.engine.chooser.policy


def test_nothing_is_reset_while_requests_run(llm: LLM) -> None:
    spec = SpecConfig("ngram")
    stream = llm.stream(PROMPT, PARAMS, spec)
    assert isinstance(next(stream), StepOutput)
    taken = {}
    for call in (
        llm.reset_drafters,
        lambda: llm.take_drafters(spec),
        lambda: llm.put_drafters(taken),
        llm.reset_controller,
    ):
        with pytest.raises(InputError, match=r"still answers requests.*let them end, or close their streams"):
            call()
    stream.close()
    llm.reset_drafters(spec)
