"""Suffix lookup against a twin that enumerates all places and counts; what is kept, for whom, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import LLM, ConfigError, InputError, SamplingParams, SpecConfig, StorageError
from foretoken.draft.base import Factory
from foretoken.draft.group import drafter_key
from foretoken.draft.lookup_tree import MATCH_LIMIT, NO_TOKEN
from foretoken.draft.ngram import MIN_ESTIMATE
from foretoken.draft.suffix import SharedStore, SuffixDrafter
from tests.draft.test_matches import brute_force, scan
from tests.helpers.checkpoints import token_ids
from tests.helpers.rounds import Alone

ACME, OTHER = "acme", "other"
texts = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # two tokens: two branches are all there are


def tell(drafter: SuffixDrafter, prompt: Sequence[int], answer: Sequence[int], tenant: str = ACME) -> None:
    """A whole request: its answer enters the store."""
    one = Alone(drafter, prompt, 1000, tenant=tenant)
    one.emit(*answer)
    one.finish()


def twin_score(text: list[int], stored: list[list[int]], num_draft: int) -> float:
    """The most expected accepted tokens over the text itself or all stored ones, and over the three longest
    agreements.
    """
    joined = [token for one in stored for token in (*one, NO_TOKEN)]
    best = 0.0
    for places in (scan(text, text, num_draft), scan(joined, text, num_draft)):
        for length in sorted({length for length, _ in places}, reverse=True)[:3]:
            following = [tokens for agreed, tokens in places if agreed >= length]
            following = [cut(tokens) for tokens in following]
            best = max(best, brute_force(following, num_draft, 2, 1 / length, MIN_ESTIMATE))
    return best


def cut(tokens: list[int]) -> list[int]:
    """Up to the end of the stored text; what is behind it counts as nothing."""
    end = tokens.index(NO_TOKEN) if NO_TOKEN in tokens else len(tokens)
    return [*tokens[:end], *[NO_TOKEN] * (len(tokens) - end)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(texts, st.lists(texts, max_size=2), st.integers(1, 6))
def test_the_tree_has_the_best_score_of_all(text: list[int], answers: list[list[int]], num_draft: int) -> None:
    drafter = SuffixDrafter()
    for answer in answers:
        tell(drafter, (9,), answer)
    one = Alone(drafter, text, 0, tenant=ACME)
    tree = drafter.look_up(one.batch(num_draft).entries[0])
    assert tree.score == pytest.approx(twin_score(text, [[9, *answer] for answer in answers], num_draft))


def test_a_longer_agreement_beats_a_shorter_one_and_many_places_beat_few() -> None:
    drafter = SuffixDrafter()
    for answer in ([1, 2, 3, 4, 5, 6, 7, 50, 51, 52], *[[60 + i, 6, 7, 40 + i, 41] for i in range(4)]):
        tell(drafter, (9,), answer)
    assert Alone(drafter, (1, 2, 3, 4, 5, 6, 7), 0, tenant=ACME, takes_trees=False).chain(3) == [
        50,
        51,
        52,
    ]  # the short one says four things
    for i in range(20):
        tell(drafter, (9,), [70 + i, 6, 7, 30, 31, 32])
    assert Alone(drafter, (8, 5, 6, 7), 1, tenant=ACME, takes_trees=False).chain(3) == [
        30,
        31,
        32,
    ]  # three agree once, two agree twenty times


def test_tenants_never_see_each_others_text() -> None:
    drafter = SuffixDrafter()
    tell(drafter, (9,), [1, 2, 3, 4, 5])
    for number, (tenant, draft_token) in enumerate(((ACME, [3, 4, 5]), (OTHER, []), ("", []))):
        assert Alone(drafter, (8, 1, 2), number, tenant=tenant).chain(3) == draft_token
    tell(drafter, (9,), [1, 2, 7, 7, 7], "")  # the nameless one is a tenant too
    assert Alone(drafter, (8, 1, 2), 7, tenant=OTHER).chain(3) == []
    assert Alone(drafter, (8, 1, 2), 8, tenant=ACME).chain(3) == [3, 4, 5]


def test_a_running_request_is_seen_by_nobody() -> None:
    drafter = SuffixDrafter()
    running = Alone(drafter, (9, 1, 2), 0, tenant=ACME)
    running.emit(3, 4, 5)
    other = Alone(drafter, (8, 1, 2), 1, tenant=ACME)
    assert other.chain(2) == []
    running.finish()
    assert other.chain(2) == [3, 4]


def test_answers_are_kept_and_prompts_are_not() -> None:
    """But for the words before the answer, which lead to its first tokens."""
    drafter = SuffixDrafter()
    tell(drafter, range(100), [500, 501])
    assert drafter.num_stored_tokens == MATCH_LIMIT + 2 + 1  # and what ends a text
    assert Alone(drafter, (98, 99), 0, tenant=ACME).chain(3) == [500, 501]
    assert Alone(drafter, (5, 6), 1, tenant=ACME).chain(3) == []
    Alone(drafter, (1, 2, 3), 2, tenant=ACME).finish()  # aborted before it said anything
    assert drafter.num_stored_tokens == MATCH_LIMIT + 3


def test_a_store_forgets_the_oldest_and_stays_small() -> None:
    store, held = SharedStore(400), []
    for i in range(100):
        store.add([1000 + 30 * i + place for place in range(30)])
        held.append(store.num_tokens)
    assert max(held) <= 400
    assert held[-1] > 200
    assert store.matches([1000, 1001], 1) == []
    (last,) = store.matches([1000 + 30 * 99, 1001 + 30 * 99], 3)
    assert last.following == [[1002 + 30 * 99, 1003 + 30 * 99, 1004 + 30 * 99]]
    store.add(range(5000))  # longer than all of it
    assert store.num_tokens <= 400


def test_all_stores_together_stay_small_and_the_tenant_unused_longest_goes() -> None:
    drafter = SuffixDrafter(store_tokens=100, max_tokens=250)
    for i in range(20):
        tell(drafter, (9,), range(1, 90), f"t{i}")
        assert drafter.num_stored_tokens <= 250
        keep = Alone(drafter, (1, 2), 0, tenant="t0")  # asks again and again
        assert keep.chain(1) == [3]
        keep.finish()
    assert list(drafter._stores) == ["t19", "t0"]


def test_the_size_of_the_stores_is_an_option() -> None:
    factory = cast(Factory, SimpleNamespace(ngram_table=lambda _: None))
    drafter = SuffixDrafter.make(factory, SpecConfig("suffix", options={"store_tokens": 300}))
    for i in range(20):
        tell(drafter, (9,), range(1, 200), f"t{i % 6}")
    assert 600 < drafter.num_stored_tokens <= 1200  # at most four stores' worth
    assert all(store.num_tokens <= 300 for store in drafter._stores.values())
    with pytest.raises(InputError, match="store_tokens=10: must be at least 256"):
        SpecConfig("suffix", options={"store_tokens": 10})


@pytest.mark.parametrize("is_kept", [False, True], ids=["before", "after"])
def test_an_interrupted_finish_can_be_repeated(monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    """Ctrl-C before or after the answer is kept: nothing is left of the request, and the store knows its size."""
    drafter, add = SuffixDrafter(store_tokens=1000), SharedStore.add
    tell(drafter, (9,), range(300, 700))
    one = Alone(drafter, (1, 2, 3), 7, tenant=ACME)
    one.emit(4, 5, 6)

    def interrupted(store: SharedStore, tokens: Sequence[int]) -> None:
        if is_kept:
            add(store, tokens)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SharedStore, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.finish()
    one.finish()
    assert not drafter._indexes
    assert not drafter._requests
    assert drafter._num_counted == drafter.num_stored_tokens > 256


def test_a_corpus_is_everybodys() -> None:
    drafter = SuffixDrafter(corpus=[1, 2, 3, 4, 5])
    assert Alone(drafter, (9, 1, 2), 0, tenant=ACME).chain(8) == [3, 4, 5]  # and ends where it ends
    assert Alone(drafter, (9, 3, 4), 1, tenant=OTHER).chain(8) == [5]
    assert Alone(drafter, (9, 4, 5), 2, tenant=OTHER).chain(8) == []


def test_corpus_and_tenants_through_the_engine(text_pair: SimpleNamespace, tmp_path: Path) -> None:
    """A tenant's second request finds the first one's answer, another's does not; the file is read as the tokenizer
    sees it.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(text_pair.target, dtype="float32", cache_tokens=512) as llm:
        plain = llm.generate(["ab cd"], params)[0]
        steps = {}
        for turn, tenant in enumerate(("a", "a", "b", "b")):
            out = llm.generate(["ab cd"], replace(params, tenant=tenant), SpecConfig("suffix", num_draft=8))[0]
            assert out.token_ids == plain.token_ids
            steps[turn] = out.stats.num_steps
        assert steps[1] < steps[0] == steps[2] > steps[3] == steps[1]
        file = tmp_path / "corpus.txt"
        file.write_text("ab cd ab ce ab cd")
        out = llm.generate(["ab cd"], replace(params, tenant="c"), SpecConfig("suffix", corpus=str(file)))[0]
        assert out.token_ids == plain.token_ids
        index = llm._drafters.drafters[drafter_key(SpecConfig("suffix", corpus=str(file)))]._corpus
        assert index.end(index.num_tokens) == [*llm.encode("ab cd ab ce ab cd"), NO_TOKEN]
        for bad in (tmp_path / "none.txt", tmp_path):
            with pytest.raises(StorageError, match="corpus"):
                llm.generate(["ab"], params, SpecConfig("suffix", corpus=str(bad)))


def test_two_answers_of_one_prompt_through_the_shared_engine(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3, tenant="twice")
    first, second = (
        llm.generate([token_ids(8, seed=5)], params, SpecConfig("suffix", num_draft=4))[0] for _ in range(2)
    )
    assert first.token_ids == second.token_ids
    assert second.stats.num_steps < first.stats.num_steps


@pytest.mark.parametrize(
    "values",
    [{"drafter": "ngram", "corpus": "x"}, {"corpus": ""}, {"corpus": 5}],
    ids=str,
)
def test_wrong_options_are_refused_by_name(values: dict) -> None:
    with pytest.raises(ConfigError, match="corpus"):
        SpecConfig(**({"drafter": "suffix"} | values))


def test_l6_the_number_of_tenants_is_bounded() -> None:
    """However little each of them said: an index takes some KB, and the tenant unused longest goes first."""
    drafter = SuffixDrafter(max_tokens=2048)
    for number in range(50):
        tell(drafter, (9,), [1, 2, 3, 4, 5], f"tenant {number}")
    assert len(drafter._stores) == 8
    assert list(drafter._stores) == [f"tenant {number}" for number in range(42, 50)]
    tell(drafter, (9,), list(range(3000)), "big")
    assert drafter.num_stored_tokens <= 2048
    assert drafter._num_counted == sum(drafter._counted(store) for store in drafter._stores.values())
