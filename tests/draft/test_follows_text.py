"""A drafter that needs only the text of rounds in which it did not draft is not called in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.control.candidates import DraftBudget
from foretoken.draft.group import drafter_key
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.request import RequestState
from tests.helpers.checkpoints import token_ids
from tests.helpers.faults import Injected

MAX_TOKENS, EVERY = 12, 4  # a round in `EVERY` drafts


class CountingDrafter(NgramDrafter):
    """Keeps what it was told, and by which call."""

    keeps_answers = True

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}
        self.num_commits, self.pieces = 0, list[int]()
        self.finished: dict[int, list[int]] = {}

    def start(self, request):
        super().start(request)
        self.texts[request.request_id] = list(request.prompt_ids)

    def propose(self, batch):
        assert all(entry.round_start == len(self.texts[entry.request.request_id]) for entry in batch.decoding)
        return super().propose(batch)

    def commit(self, batch, draft, verdict, feedback):
        self.num_commits += 1
        for b, entry in enumerate(batch.decoding):
            self.texts[entry.request.request_id] += verdict.emitted(b)
        super().commit(batch, draft, verdict, feedback)

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        self.pieces.append(len(tokens))
        self.texts[request_id] += tokens
        super().follow(request_id, tokens)

    def finish(self, request_id: int) -> None:
        self.finished[request_id] = self.texts.pop(request_id)
        super().finish(request_id)


class OnlyFollowingDrafter(CountingDrafter):
    """Would miss what its own rounds emitted if that came with `commit`."""

    commit = NgramDrafter.commit


@pytest.fixture(params=[CountingDrafter])
def rare(request: pytest.FixtureRequest, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> CountingDrafter:
    """A lookup that the engine asks in one round of `EVERY`."""
    spec = SpecConfig("ngram", num_draft=3)
    llm.prepare(spec)
    drafter: CountingDrafter = request.param()
    monkeypatch.setitem(llm._drafters.drafters, drafter_key(spec), drafter)
    plans, rounds = llm.engine._budgets, iter(range(1 << 20))

    def rarely(decoding: Sequence[RequestState], previews) -> dict[int, DraftBudget]:
        wanted = plans(decoding, previews)
        return (
            wanted if next(rounds) % EVERY == EVERY - 1 else {key: p._replace(num_draft=0) for key, p in wanted.items()}
        )

    monkeypatch.setattr(llm.engine, "_budgets", rarely)
    return drafter


def test_tokens_come_in_one_piece_before_the_next_draft(llm: LLM, rare: CountingDrafter) -> None:
    prompt, params = token_ids(6, seed=1) * 3, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    plain = llm.generate([prompt], params, SpecConfig(drafter=None))[0].token_ids
    found = llm.generate([prompt], params, SpecConfig("ngram", num_draft=3))[0].token_ids
    assert found == plain
    assert rare.num_commits <= MAX_TOKENS // EVERY
    assert max(rare.pieces) >= EVERY - 1, "what several rounds emitted came at once"
    (text,) = rare.finished.values()
    assert text == [*prompt, *plain], "the end of the answer is told before the request ends"


@pytest.mark.parametrize("rare", [OnlyFollowingDrafter], indirect=True)
def test_a_drafter_that_only_follows_is_told_of_its_own_rounds_too(llm: LLM, rare: CountingDrafter) -> None:
    """Two requests at once, of which each drafts: no token is missed."""
    prompts, params = [token_ids(6, seed=seed) * 3 for seed in (1, 2)], SamplingParams(MAX_TOKENS, ignore_eos=True)
    plain = [one.token_ids for one in llm.generate(prompts, params, SpecConfig(drafter=None))]
    found = llm.generate(prompts, params, SpecConfig("ngram", num_draft=3))
    assert [one.token_ids for one in found] == plain
    assert any(one.stats.num_drafted for one in found)
    assert list(rare.finished.values()) == [[*prompt, *ids] for prompt, ids in zip(prompts, plain, strict=True)]


def test_only_a_drafter_that_keeps_answers_is_told_their_end(llm: LLM, rare: CountingDrafter) -> None:
    rare.keeps_answers = False
    prompt, params = token_ids(6, seed=1) * 3, SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate([prompt], params, SpecConfig("ngram", num_draft=3))
    (text,) = rare.finished.values()
    assert text == prompt


def test_a_drafter_that_cannot_follow_is_off_and_the_answer_stands(
    llm: LLM, rare: CountingDrafter, monkeypatch
) -> None:
    def broken(request_id: int, tokens: Sequence[int]) -> None:
        raise Injected("no")

    monkeypatch.setattr(rare, "follow", broken)
    prompt, params = token_ids(6, seed=1) * 3, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    plain = llm.generate([prompt], params, SpecConfig(drafter=None))[0].token_ids
    with pytest.warns(UserWarning, match="no"):
        output = llm.generate([prompt], params, SpecConfig("ngram", num_draft=3))[0]
    assert output.token_ids == plain
    assert "ngram" in output.stats.disabled_drafters
