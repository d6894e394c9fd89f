"""Lookahead: what the pool keeps, how the window moves, with the window and without it. The target's part is in
tests/engine/test_probes.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foretoken import ConfigError, InputError, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request, Verdict
from foretoken.draft.base import variants_of
from foretoken.draft.group import DrafterGroup
from foretoken.draft.lookahead import (
    MAX_CONTINUATIONS,
    ContinuationChances,
    JacobiWindow,
    LookaheadDrafter,
    NgramPool,
    prefix_tree,
)
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from tests.helpers.rounds import NO_FEEDBACK, Alone
from tests.helpers.scripted import Script, ScriptedModel, recite
from tests.helpers.specs import key_of
from tests.helpers.watch import Watched


def lookahead_engine(target: ScriptedModel) -> tuple[Engine, Watched]:
    drafters = DrafterGroup(target)
    watched = Watched(LookaheadDrafter(), target.vocab_size)
    drafters.drafters[key_of("lookahead")] = watched
    return Engine(target, drafters), watched


@pytest.mark.parametrize("seed", range(5))
def test_the_pool_keeps_the_latest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against lists: the tokens used last, and for each what was added last since it came."""
    monkeypatch.setattr("foretoken.draft.lookahead.MAX_TOKENS", 12)
    dice, pool = random.Random(seed), NgramPool()
    kept: list[tuple[int, list[tuple[int, int]]]] = []  # used last at the end
    forgotten = 0
    for _ in range(1000):
        token, rest = int(dice.expovariate(1 / 5)), (dice.randrange(3), dice.randrange(3))
        pool.add(token, rest)
        own = next((rests for one, rests in kept if one == token), [])
        kept = [(one, rests) for one, rests in kept if one != token]
        kept.append((token, [*(other for other in own if other != rest), rest][-MAX_CONTINUATIONS:]))
        forgotten += len(kept) > 12
        kept = kept[-12:]
        assert len(pool._found) == len(kept)
        assert all(pool.after(one) == rests[::-1] for one, rests in kept)
    assert forgotten > 20  # the test means something


def test_common_beginnings_stand_once() -> None:
    """Likeliest first: by how late a continuation came, and how far it goes."""
    tree = prefix_tree([(1, 2, 3), (1, 2, 4), (5, 6, 7)], ContinuationChances(), 6)
    assert (tree.tokens, tree.parents) == ((1, 2, 3, 5, 6, 4), (-1, 0, 1, -1, 3, 1))
    assert list(tree.chances) == sorted(tree.chances, reverse=True)
    assert (
        prefix_tree([], ContinuationChances(), 5).tokens == prefix_tree([(1,)], ContinuationChances(), 0).tokens == ()
    )


def test_chances_are_how_often_continuations_came_true() -> None:
    chances = ContinuationChances()
    before = chances.chance(0, 0), chances.chance(0, 1)
    for turn in range(2000):
        chances.count([(1, 2, 3), (4, 5, 6)], [1, 2, 9] if turn % 2 else [4, 9, 9])
    assert before != (chances.chance(0, 0), chances.chance(0, 1))
    assert [chances.chance(rank, 0) for rank in (0, 1)] == pytest.approx([0.5, 0.5], abs=0.01)
    assert chances.chance(0, 1) == pytest.approx(0.5 / 3, abs=0.01)  # 1 of 3 later tokens


def test_the_window_is_a_tree() -> None:
    """Row 0 is a chain behind the anchor, the rest of a column hangs below it: token r of column j stands at depth j +
    r + 1.
    """
    window = JacobiWindow([10, 11, 12, 13, 14], 3, 3)
    assert window.columns == [(10, 11, 12), (11, 12, 13), (12, 13, 14)]
    tokens, parents = window.nodes(3)
    assert tokens == [10, 11, 12, 11, 12, 13, 12, 13, 14]
    assert parents == [-1, 0, 1, 0, 3, 4, 3, 6, 7]
    assert window.nodes(1) == ([10, 11, 12], [-1, 0, 1])
    assert window.nodes(0) == ([], [])


def test_only_whole_columns_are_run() -> None:
    window = JacobiWindow([1], 4, 3)
    assert [window.num_columns(most, 99) for most in (0, 2, 3, 5, 6, 11, 12, 50)] == [0, 0, 1, 1, 2, 3, 4, 4]
    assert [window.num_columns(99, depth) for depth in (0, 1, 2, 3, 4, 5, 6, 7)] == [
        0,
        0,
        0,
        1,
        2,
        3,
        4,
        4,
    ]  # the last column ends at depth 6


@pytest.mark.parametrize("num_emitted", [1, 2, 3, 5])
def test_columns_keep_their_places(num_emitted: int) -> None:
    """A column that was run moves on by one place, the anchor by `num_emitted`; what falls behind the anchor is
    dropped.
    """
    window = JacobiWindow([0], 3, 2)
    window.columns = [(1, 2), (3, 4), (5, 6)]
    found = window.advance([7, 8, 9], num_emitted)
    assert found == [(1, (2, 7)), (3, (4, 8)), (5, (6, 9))]
    moved = [(2, 7), (4, 8), (6, 9)][num_emitted - 1 :]
    assert window.columns == moved + [(0, 0)] * (3 - len(moved))
    window.columns = [(1, 2), (3, 4), (5, 6)]
    assert window.advance([], num_emitted) == []  # nothing was run: the columns stay where they are
    left = [(1, 2), (3, 4), (5, 6)][num_emitted:]
    assert window.columns == left + [(0, 0)] * (3 - len(left))
    window.columns = [(1, 2), (3, 4), (5, 6)]
    assert window.advance([7], 1) == [(1, (2, 7))]  # the others were cut off
    assert window.columns == [(2, 7), (0, 0), (0, 0)]


def test_the_prompt_fills_the_pool() -> None:
    one = Alone(LookaheadDrafter(), [1, 2, 3, 9, 2, 4, 5, 1, 2])
    draft = one.propose(4)
    assert (draft.tokens.tolist(), draft.parents) == ([4, 5, 3, 9], (-1, 0, -1, 2))  # the latest first
    assert draft.probes is None  # nobody allowed any
    one.takes_trees = False
    assert one.chain(8) == [4, 5]
    one.emit(3, 8, 2)
    assert one.chain(8) == [3, 8]
    one.finish()


def run_of(script: Script, prompt: list[int], vocab_size: int, num_tokens: int, spec: SpecConfig) -> RequestState:
    """A request that was answered; the answer is the script's own."""
    engine, watched = lookahead_engine(ScriptedModel(script, vocab_size))
    state = engine.submit(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), spec)
    while engine.has_work:
        engine.step()
    text = list(prompt)
    for token in state.output_ids:
        assert token == script(tuple(text))
        text.append(token)
    assert watched.num_probed == state.stats.num_probed == engine.stats.num_probed
    return state


def test_a_window_that_foresees_the_text() -> None:
    """Every token follows from its place alone, so parallel draft tokens come true; the text itself never repeats."""
    answer = [3 + i for i in range(400)]
    state = run_of(recite(answer), [1], 500, 400, SpecConfig("lookahead", num_draft=4))
    assert state.stats.emitted_per_step > 1.5
    without = run_of(recite(answer), [1], 500, 400, SpecConfig("lookahead", num_draft=4, lookahead_window=0))
    assert (without.stats.emitted_per_step, without.stats.num_probed) == (1.0, 0)


def test_without_a_window_the_text_is_still_searched() -> None:
    spec = SpecConfig("lookahead", num_draft=4, lookahead_window=0)
    state = run_of(lambda context: (context[-1] + 1) % 7, [0, 1, 2, 3, 4, 5, 6, 0], 7, 200, spec)
    assert state.stats.emitted_per_step > 2.5
    assert state.stats.num_probed == 0


def test_rounds_with_and_without_the_window() -> None:
    """What the engine may choose from: the window is kept while it is not run."""
    spec = SpecConfig("lookahead", num_draft=4)
    drafter = LookaheadDrafter()
    variants = variants_of(drafter, spec)
    assert [variant.lookahead_window for variant in variants] == [0, 4]
    assert variants_of(drafter, variants[1]) == (variants[1],)
    request = Request(0, (1, 2, 3), SamplingParams(), spec, 0)
    drafter.start(request)
    for turn in range(6):
        own = replace(request, spec=variants[turn % 2])
        batch = Batch((BatchEntry(own, 2 + turn, (3,), True, 4, num_probe=8, probe_depth=99),))
        draft = drafter.propose(batch)
        assert draft.probe_lengths == (8 * (turn % 2),)
        assert draft.tokens.tolist() == list(drafter.look_up(batch.entries[0]).tokens)
        drafter.commit(batch, draft, Verdict(((),), ((),), (3,), ("residual",)), NO_FEEDBACK)
        assert len(drafter._requests[0].window.columns) == 4
    drafter.finish(0)


def test_configuration() -> None:
    assert SpecConfig("lookahead").num_probe == 8
    assert SpecConfig("lookahead", lookahead_window=5, lookahead_ngram=4).num_probe == 15
    assert SpecConfig("ngram").num_probe == 0
    with pytest.raises(ConfigError, match="lookahead_window=5: only drafter='lookahead' takes it, not drafter='ngram'"):
        SpecConfig("ngram", lookahead_window=5)
    for field, value in (
        ("lookahead_window", -1),
        ("lookahead_window", 65),
        ("lookahead_ngram", 1),
        ("lookahead_ngram", 17),
        ("lookahead_ngram", 2.0),
    ):
        with pytest.raises(InputError, match=f"{field}={value}: must be"):
            SpecConfig("lookahead", **{field: value})
