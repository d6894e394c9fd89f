"""The caches of drafters with models: read once, lent to whoever drafts, given back and read again; draft tokens stay
what they were.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foretoken import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Reads, Releases
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.own_cache import OwnCache
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.audit import kept_by
from tests.helpers.checkpoints import token_ids
from tests.helpers.rounds import NO_FEEDBACK, Alone
from tests.helpers.specs import spec_of

PROMPT = token_ids(60, seed=4)
WITH_CACHE = ("draft_model", "draft_model/static", "draft_model/best_first", "cascade", "mix")


class Counting(PagedModel):
    """A paged model that writes down the rows of its forwards."""

    def __init__(self, pair: SimpleNamespace, num_slots: int = 4096) -> None:
        super().__init__(load_decoder(pair.draft), num_slots, 4)
        self.rows: list[int] = []

    def forward(self, tokens: torch.Tensor, segments: list[Segment], taps: tuple[int, ...] = ()) -> object:
        self.rows.append(len(tokens))
        return super().forward(tokens, segments, taps)


def drafter_of(name: str, model: PagedModel) -> DraftModelDrafter | CascadeDrafter | MixDrafter:
    if name.startswith("draft_model"):
        return DraftModelDrafter(model)
    return CascadeDrafter([model], NgramDrafter()) if name == "cascade" else MixDrafter([DraftModelDrafter(model)])


def spec(name: str, num_draft: int = 3) -> SpecConfig:
    return spec_of(name, "d", num_draft=num_draft, **({"parts": ("draft_model",)} if name == "mix" else {}))


def alone(
    name: str, model: PagedModel, prompt: list[int], request_id: int = 0, tenant: str = "", drafter: object = None
) -> Alone:
    return Alone(drafter or drafter_of(name, model), prompt, request_id, spec(name), tenant=tenant)


def draft_tokens(one: Alone, num_draft: int = 3) -> list[int]:
    """What it drafts now; a round in which all of it is refused follows."""
    draft = one.propose(num_draft)
    verdict = Verdict(((),), ((),), (96,), ("residual",))
    one.drafter.commit(one.batch(num_draft), draft, verdict, NO_FEEDBACK)
    one.text.append(96)
    return draft.tokens.tolist()


def together(drafter: object, ones: list[Alone], num_draft: int = 3) -> Draft:
    """One round of several requests, all of whose draft tokens are refused."""
    batch = Batch(tuple(one.batch(num_draft).entries[0] for one in ones))
    draft = drafter.propose(batch)
    drafter.commit(
        batch,
        draft,
        Verdict(((),) * len(ones), ((),) * len(ones), (96,) * len(ones), ("residual",) * len(ones)),
        NO_FEEDBACK,
    )
    for one in ones:
        one.text.append(96)
    return draft


@pytest.mark.parametrize("name", WITH_CACHE)
def test_who_lagged_behind_catches_up_in_one_forward(pair: SimpleNamespace, name: str) -> None:
    """After 100 rounds without a draft token: no forward more than a round has anyway, and told as reading."""
    model = Counting(pair)
    one = alone(name, model, PROMPT)
    assert isinstance(one.drafter, Reads)
    one.emit(*token_ids(100, seed=8))
    assert not model.rows
    fresh = alone(name, Counting(pair), one.text)
    first = draft_tokens(one)
    assert first == draft_tokens(fresh) != []
    assert model.rows[0] >= 160
    assert len(model.rows) <= 3
    assert one.drafter.num_read_tokens == 160
    draft_tokens(one)
    assert one.drafter.num_read_tokens == 0
    one.emit(*token_ids(9, seed=3))
    draft_tokens(one)
    assert one.drafter.num_read_tokens >= 9
    one.finish()
    fresh.finish()
    assert not kept_by(one.drafter)


@pytest.mark.parametrize("name", WITH_CACHE)
def test_what_was_given_back_is_read_again(pair: SimpleNamespace, name: str) -> None:
    """From blocks that are still there, or anew when another request has written over them; the draft tokens are the
    same.
    """
    model = Counting(pair, 128)
    drafters = DrafterGroup(model)
    drafter = drafters.drafters[drafter_key(spec(name))] = drafter_of(name, model)
    assert isinstance(drafter, Releases)
    one, fresh = alone(name, model, PROMPT, drafter=drafters), alone(name, Counting(pair), PROMPT)
    expected = [draft_tokens(fresh) for _ in range(4)]
    got = [draft_tokens(one)]
    drafters.release(one.request)
    assert model.num_free_tokens() == model.capacity_tokens
    model.rows.clear()
    got.append(draft_tokens(one))
    assert sum(model.rows) < 20  # all but the end was there
    drafters.release(one.request)
    drafters.release(one.request)  # nothing left to give
    other = alone(name, model, token_ids(110, seed=5), 1, drafter=drafter)
    draft_tokens(other)  # writes over it
    other.finish()
    model.rows.clear()
    got.append(draft_tokens(one))
    assert sum(model.rows) > 50
    got.append(draft_tokens(one))
    assert got == expected
    drafters.finish(one.request)
    fresh.finish()
    assert not kept_by(drafter)


@pytest.mark.parametrize("name", WITH_CACHE)
def test_room_goes_to_who_drafts(pair: SimpleNamespace, name: str) -> None:
    """Nobody who drafts loses its cache; who wants to and finds no room drafts nothing and holds nothing; who rested
    gives way.
    """
    model = Counting(pair, 128)
    drafter = drafter_of(name, model)
    old, new = (alone(name, model, token_ids(80, seed=i), i, drafter=drafter) for i in range(2))
    fresh = alone(name, Counting(pair), token_ids(80, seed=1))
    assert together(drafter, [old, new]).lengths[1] == 0
    assert model.length(0)
    assert not model.tables[1].blocks
    model.rows.clear()
    rounds = [draft_tokens(new) for _ in range(8)]
    assert rounds[:-1] == [[]] * 7  # asked in vain, at no cost
    assert rounds[-1]
    assert len(model.rows) <= 3
    assert not model.length(0)
    fresh.emit(*[96] * 8)
    assert draft_tokens(fresh) == rounds[-1]
    assert together(drafter, [old, new]).lengths[0] == 0  # now the other way round
    old.finish()
    new.finish()
    fresh.finish()
    assert not kept_by(drafter)


def test_a_level_without_room_costs_the_others_nothing(pair: SimpleNamespace) -> None:
    small, large = Counting(pair, 64), Counting(pair)
    for models in ([large, small], [small, large]):
        drafter = CascadeDrafter(models)
        one = Alone(
            drafter, token_ids(80, seed=1), spec=SpecConfig("cascade", parts=[SpecConfig("draft_model", draft="d")] * 2)
        )
        assert draft_tokens(one) == []
        assert all(not model.tables[0].blocks for model in models)
        one.finish()
        assert not kept_by(drafter)


@pytest.mark.parametrize("name", WITH_CACHE)
def test_texts_that_begin_alike_are_read_once_even_in_one_round(pair: SimpleNamespace, name: str) -> None:
    model = Counting(pair)
    drafter = drafter_of(name, model)
    tenants = ("b", "a", "a", "a")
    ends = [token_ids(5, seed=10 + i) for i in range(4)]
    ones = [
        alone(name, model, [*PROMPT, *end], i, tenant, drafter)
        for i, (end, tenant) in enumerate(zip(ends, tenants, strict=True))
    ]
    draft = together(drafter, ones)
    assert draft.num_nodes >= 9
    assert model.prefix_stats.num_found_tokens == 2 * 60
    assert model.rows.count(60) == 1, "nobody reads ahead for another tenant"
    assert sum(model.rows) <= 2 * 65 + 2 * 5 + 4 * 3 * 4
    for i, one in enumerate(ones):
        fresh = alone(name, Counting(pair), [*PROMPT, *ends[i]])
        assert draft_tokens(fresh) == draft.select([i]).tokens.tolist()
        fresh.finish()
        one.finish()
    assert not kept_by(drafter)


@pytest.mark.parametrize("name", WITH_CACHE)
def test_a_text_that_outgrew_the_draft_holds_nothing(pair: SimpleNamespace, name: str) -> None:
    model = Counting(pair)
    one = alone(name, model, token_ids(250, seed=2))
    assert draft_tokens(one)
    one.emit(*token_ids(10, seed=1))
    assert draft_tokens(one) == []
    assert model.num_free_tokens() == model.capacity_tokens
    one.finish()


@pytest.mark.parametrize("shape", ["chain", "static", "best_first"])
def test_a_draft_names_the_drafter_that_had_room_if_only_to_draft_nothing(pair: SimpleNamespace, shape: str) -> None:
    """The control learns what a drafter takes from rounds in which it ran, unsure ones included."""
    small, large = Counting(pair, 32), Counting(pair)
    drafters = [DraftModelDrafter(model) for model in (small, large)]
    unsure = SpecConfig("draft_model", draft="d", min_confidence=1.0, tree=shape)
    ones = [Alone(drafter, PROMPT, spec=unsure) for drafter in drafters]
    drafts = [one.propose(3) for one in ones]
    assert [(draft.drafters, draft.num_nodes) for draft in drafts] == [((None,), 0), (("draft_model",), 0)]
    assert (small.rows, large.rows) == ([], [60])
    for one in ones:
        one.finish()


def test_a_round_that_broke_down_leaves_nothing(pair: SimpleNamespace) -> None:
    """Draft tokens were made and never judged: the request is over, and what is published is its text alone."""
    model = Counting(pair)
    drafter = DraftModelDrafter(model)
    one = alone("draft_model", model, PROMPT, drafter=drafter)
    one.propose(3)
    one.finish()
    assert not kept_by(drafter)
    text = [*PROMPT, *token_ids(8, seed=6)]
    again, fresh = alone("draft_model", model, text, 1, drafter=drafter), alone("draft_model", Counting(pair), text)
    assert draft_tokens(again) == draft_tokens(fresh)
    assert model.prefix_stats.num_found_tokens == 60
    rested = Request(9, (1, 2), SamplingParams(), SpecConfig("draft_model", "d"), 0)
    drafter.start(rested)
    drafter.propose(Batch((BatchEntry(rested, 1, (2,), True, 0),)))
    drafter.finish(9)
    again.finish()
    assert not kept_by(drafter)


@pytest.mark.parametrize("name", [*WITH_CACHE, "ngram"])
def test_the_group_tells_what_each_drafter_read(pair: SimpleNamespace, name: str) -> None:
    drafters, key = DrafterGroup(Counting(pair)), drafter_key(spec(name))
    assert key is not None
    drafters.drafters[key] = NgramDrafter() if name == "ngram" else drafter_of(name, Counting(pair))
    one = Alone(drafters, PROMPT, spec=spec(name))
    drafters.propose(one.batch(3))
    assert drafters.num_read_tokens == {key: 0 if name == "ngram" else 60}
    drafters.release(one.request)  # a lookup has nothing to give back
    drafters.propose(one.batch(0))
    assert drafters.num_read_tokens == {}
    drafters.finish(one.request)


class Rounds:
    """A cache of three sequences of 40 tokens in 128 places: 0 drafted last, 1 before it, 2 wants to; all of them
    rested since.
    """

    def __init__(self, pair: SimpleNamespace) -> None:
        self.model, self.texts = Counting(pair, 128), {number: token_ids(40, seed=number) for number in range(3)}
        self.cache = OwnCache(self.model, self.texts.__getitem__)
        for number in range(3):
            self.cache.start(number, "")
        for number in (1, 0):
            assert self.draft(number, 8)
        self.rest(9)

    def draft(self, number: int, num_rows: int) -> bool:
        self.cache.begin_round([number])
        has_room = self.cache.make_room(number, num_rows)
        if has_room:
            self.cache.catch_up(number)
            missing = self.texts[number][self.model.length(number) :]
            self.model.forward(torch.tensor(missing), [Segment(number, len(missing), (), 0)])
            self.model.commit(number, len(missing))
            self.cache.publish_read()
        return has_room

    def rest(self, rounds: int) -> None:
        for _ in range(rounds):
            self.cache.begin_round([])

    def close(self) -> None:
        for number in self.texts:
            self.cache.finish(number)
        assert self.model.num_free_tokens() == 128


def test_who_rested_longest_gives_way_first(pair: SimpleNamespace) -> None:
    """And nobody else as long as that is enough."""
    rounds = Rounds(pair)
    assert rounds.draft(2, 20)
    assert [rounds.model.length(number) for number in range(3)] == [40, 0, 40]
    rounds.close()


def test_nobody_gives_way_in_vain(pair: SimpleNamespace) -> None:
    """Who would not fit even then takes nothing from anybody, and loses nothing that it has."""
    rounds = Rounds(pair)
    rounds.texts[2] = [*rounds.texts[0][:36], 1, 2, 3, 4]  # what it could begin with is not kept either
    assert not rounds.draft(2, 130)
    assert [rounds.model.length(number) for number in range(3)] == [40, 40, 0]
    assert not rounds.draft(0, 130)
    assert [rounds.model.length(number) for number in range(3)] == [40, 40, 0]
    rounds.close()
