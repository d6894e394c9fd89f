"""Ways to draft less hand over the mass they really drew from; that the distribution survives is shown in tests/verify
and tests/engine/test_law.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from foretoken.engine.controller import best_draft_probability

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.model.randomness import RaceNoise
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


def test_the_best_draft_probability() -> None:
    """Free drafting: always draft. Dear and useless: draft as little as the candidates allow. Over-confident drafts: in
    between.
    """
    rising = {0.25: 0.2, 0.5: 0.4, 0.75: 0.6, 1.0: 0.8}
    assert best_draft_probability(rising, 4, 0.0, 1.0) == 1.0
    assert best_draft_probability(dict.fromkeys(rising, 0.01), 4, 0.5, 1.0) == 0.25
    assert best_draft_probability({0.25: 0.24, 0.5: 0.4, 0.75: 0.42, 1.0: 0.43}, 6, 0.3, 1.0) == 0.5


def test_auto_learns_from_finished_rounds(llm: LLM, pair: SimpleNamespace) -> None:
    """The estimates are those of the distributions: after some rounds the controller knows them, and forgets a request
    that ended.
    """
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=4, draft_probability="auto", rule="block")
    llm.generate([PROMPT], SamplingParams(max_tokens=1), spec)  # loads the draft
    state = llm.submit(PROMPT, SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, seed=1), spec)
    for _ in range(10):
        llm.engine.step()
    accepted = llm.engine.controller._estimates[state.request_id].accepted
    values = [accepted[a] for a in sorted(accepted)]
    assert values == sorted(values)
    assert all(0 < b <= a + 1e-6 for a, b in accepted.items())
    llm.engine.abort(state.request_id)
    assert state.request_id not in llm.engine.controller._estimates
