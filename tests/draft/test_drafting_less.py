"""Ways to draft less return the mass they really drew from; that the distribution survives is shown in tests/verify
and tests/engine/test_law.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.control.candidates import DraftBudget, Previews, RequestView
from foretoken.core import Batch, BatchEntry, Draft, Request
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.text.randomness import RaceNoise
from tests.helpers.checkpoints import token_ids

NUM_DRAFT = 5
PROMPT = token_ids(8, seed=1)


@pytest.fixture
def drafter(pair: SimpleNamespace) -> DraftModelDrafter:
    return DraftModelDrafter(PagedModel(load_decoder(pair.draft, dtype="float32"), 4096, 16))


def propose(
    drafter: DraftModelDrafter,
    count: int,
    temperature: float = 1.0,
    noise: bool = False,
    probability: float = 1.0,
    **spec: object,
) -> Draft:
    """One round of `count` fresh requests on the same prompt, each with its own seed."""
    entries = []
    for i in range(count):
        params = SamplingParams(temperature=temperature, seed=i)
        request = Request(i, tuple(PROMPT), params, SpecConfig("draft_model", "d", num_draft=NUM_DRAFT, **spec), i)
        race = RaceNoise(i, drafter.model.vocab_size) if noise else None
        entries.append(BatchEntry(request, len(PROMPT) - 1, (PROMPT[-1],), True, NUM_DRAFT, None, race, probability))
        drafter.start(request)
    draft = drafter.propose(Batch(tuple(entries)))
    for i in range(count):
        drafter.finish(i)
    return draft


@pytest.mark.parametrize("probability", [0.3, 0.7])
def test_a_coin_scales_the_mass_also_where_it_said_no(drafter: DraftModelDrafter, probability: float) -> None:
    whole, scaled = propose(drafter, 60), propose(drafter, 60, probability=probability)
    stopped = 0
    for b, length in enumerate(scaled.lengths):
        rows = scaled.rows_of([b])
        distributions = [scaled.mass.distribution_of_row[row] for row in rows]
        full = whole.mass.distributions[[whole.mass.distribution_of_row[row] for row in whole.rows_of([b])[:NUM_DRAFT]]]
        assert (
            scaled.tokens[scaled.offsets[b] : scaled.offsets[b + 1]].tolist()
            == whole.tokens[whole.offsets[b] :][:length].tolist()
        )
        for place in range(length):
            torch.testing.assert_close(scaled.mass.distributions[distributions[place]], probability * full[place])
        if length < NUM_DRAFT:
            torch.testing.assert_close(scaled.mass.distributions[distributions[length]], probability * full[length])
            stopped += 1
        else:
            assert distributions[length] == -1
    drafted = sum(scaled.lengths)
    assert (
        abs(drafted / (drafted + stopped) - probability)
        < 4 * (probability * (1 - probability) / (drafted + stopped)) ** 0.5
    )
    assert all(name == "draft_model" for name in scaled.drafters)


def test_confidence_stops_before_the_draw_and_leaves_no_mass(drafter: DraftModelDrafter) -> None:
    whole = propose(drafter, 30)
    sure = propose(drafter, 30, min_confidence=0.08)
    assert 0 < sum(sure.lengths) < sum(whole.lengths)
    for b, length in enumerate(sure.lengths):
        confidence = whole.mass.distributions[
            [whole.mass.distribution_of_row[row] for row in whole.rows_of([b])[:NUM_DRAFT]]
        ].amax(-1)
        assert (confidence[:length] >= 0.08).all()
        assert length == NUM_DRAFT or confidence[length] < 0.08
        assert sure.mass is None or sure.mass.distribution_of_row[sure.rows_of([b])[-1]] == -1


def test_confidence_of_a_greedy_request_is_that_of_its_law_at_temperature_1(drafter: DraftModelDrafter) -> None:
    whole, sure = propose(drafter, 1, temperature=0.0), propose(drafter, 1, temperature=0.0, min_confidence=0.12)
    assert whole.lengths == (NUM_DRAFT,)
    assert sure.lengths[0] < NUM_DRAFT
    assert sure.mass is None
    assert sure.tokens.tolist() == whole.tokens.tolist()[: sure.lengths[0]]


def test_a_cut_vocabulary_is_drawn_from_and_declared(drafter: DraftModelDrafter) -> None:
    cut = propose(drafter, 30, draft_top_k=3)
    assert ((cut.mass.distributions > 0).sum(-1) == 3).all()
    torch.testing.assert_close(cut.mass.distributions.sum(-1), torch.ones(len(cut.mass.distributions)))
    distributions = cut.mass.distributions[[cut.mass.distribution_of_row[row] for row in cut.parent_rows]]
    assert (distributions.gather(1, cut.tokens[:, None]) > 0).all()


def test_a_coupled_draft_ships_no_laws(drafter: DraftModelDrafter) -> None:
    draft = propose(drafter, 5, noise=True, probability=0.8)
    assert draft.mass is None
    assert draft.num_nodes > 5


@pytest.mark.parametrize(
    "value", [{"draft_probability": 0.5}, {"min_confidence": 0.3}, {"draft_top_k": 4}, {"draft_probability": "auto"}]
)
def test_a_drafter_without_a_law_refuses_them(value: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(value))):
        SpecConfig("ngram", **value)


@pytest.mark.parametrize("value", [0.0, 1.5, "some", True])
def test_bad_draft_probabilities(value: object) -> None:
    with pytest.raises(ValueError, match="draft_probability"):
        SpecConfig("draft_model", "d", draft_probability=value)


def test_auto_offers_four_options_that_are_weighed_apart(llm: LLM, pair: SimpleNamespace) -> None:
    """One option for each probability: one drafter runs them all, each has an acceptance of its own."""
    llm.prepare(spec := SpecConfig("draft_model", str(pair.draft), num_draft=4, draft_probability="auto"))
    state = llm.submit(PROMPT, SamplingParams(max_tokens=1), spec)
    drafters = llm.engine.drafters
    assert [one.draft_probability for one in drafters.specs(state.request_id)] == [0.25, 0.5, 0.75, 1.0]
    assert len(set(drafters.keys(state.request_id))) == 1
    assert len({one.drafter for one in drafters.options(state.request_id)}) == 4
    llm.engine.abort(state.request_id)


@pytest.mark.parametrize("option", range(4))
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_every_option_of_auto_is_exact(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, option: int, params: dict
) -> None:
    """The answer is plain decoding's under each of the four, and the round drafts with the option's probability."""
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=4, draft_probability="auto")
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, **{"temperature": 0.0, **params})
    (plain,) = llm.generate([PROMPT], sampling, SpecConfig())
    seen: list[float] = []

    def choose(requests: Sequence[RequestView], previews: Previews) -> list[DraftBudget]:
        return [DraftBudget(option, 4) if request.options else DraftBudget(None, 0) for request in requests]

    propose = DraftModelDrafter.propose

    def watched(self: DraftModelDrafter, batch: Batch) -> Draft:
        seen.extend(entry.draft_probability for entry in batch.decoding)
        return propose(self, batch)

    monkeypatch.setattr(llm.engine.chooser, "plan", choose)
    monkeypatch.setattr(llm.engine.chooser, "observe", lambda step: None)
    monkeypatch.setattr(DraftModelDrafter, "propose", watched)
    (drafted,) = llm.generate([PROMPT], sampling, spec)
    assert drafted.token_ids == plain.token_ids
    assert set(seen) == {(0.25, 0.5, 0.75, 1.0)[option]}


def test_auto_learns_from_finished_rounds(llm: LLM, pair: SimpleNamespace) -> None:
    """After some rounds the policy has an estimate of the request, and forgets it when the request ends."""
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=4, draft_probability="auto", rule="block")
    llm.prepare(spec)
    sampling = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, seed=1)
    state = llm.submit(PROMPT, sampling, spec)
    policy = llm.engine.chooser.policy
    names = [one.drafter for one in llm.engine.drafters.options(state.request_id)]
    for _ in range(8):
        llm.engine.step()
    assert not all(policy.acceptance.is_new(state.request_id, name) for name in names)
    llm.engine.abort(state.request_id)
    assert all(policy.acceptance.is_new(state.request_id, name) for name in names)
