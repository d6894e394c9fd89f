"""Lookahead: what the pool keeps, how the window moves, when it rests. The target's part is in
tests/engine/test_probes.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from foretoken import ConfigError, InputError, SamplingParams, SpecConfig
from foretoken.core import Draft, Verdict
from foretoken.draft.group import DrafterGroup
from foretoken.draft.lookahead import (
    LEAST_GAIN,
    MOST_CONTINUATIONS,
    REST_ROUNDS,
    TRIAL_ROUNDS,
    JacobiWindow,
    LookaheadDrafter,
    NgramPool,
    Trial,
    prefix_tree,
)
from foretoken.engine.engine import Engine
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
    monkeypatch.setattr("foretoken.draft.lookahead.MOST_TOKENS", 12)
    dice, pool = random.Random(seed), NgramPool()
    kept: list[tuple[int, list[tuple[int, int]]]] = []  # used last at the end
    forgotten = 0
    for _ in range(1000):
        token, rest = int(dice.expovariate(1 / 5)), (dice.randrange(3), dice.randrange(3))
        pool.add(token, rest, in_text=dice.random() < 0.5)
        own = next((rests for one, rests in kept if one == token), [])
        kept = [(one, rests) for one, rests in kept if one != token]
        kept.append((token, [*(other for other in own if other != rest), rest][-MOST_CONTINUATIONS:]))
        forgotten += len(kept) > 12
        kept = kept[-12:]
        assert pool.num_tokens == len(kept)
        assert all([found for found, _ in pool.after(one)] == rests[::-1] for one, rests in kept)
    assert forgotten > 20  # the test means something


def test_what_the_text_held_is_marked_for_good() -> None:
    pool = NgramPool()
    pool.add(1, (2, 3), in_text=True)
    pool.add(1, (4, 5), in_text=False)
    pool.add(1, (2, 3), in_text=False)
    assert pool.after(1) == [((2, 3), True), ((4, 5), False)]
    pool.add(1, (4, 5), in_text=True)
    assert pool.after(1) == [((4, 5), True), ((2, 3), True)]
    assert pool.after(2) == []


def test_common_beginnings_stand_once() -> None:
    tree, children = prefix_tree([((1, 2, 3), False), ((1, 2, 4), True), ((5, 6, 7), False)], 6)
    assert (tree.tokens, tree.parents) == ((1, 2, 3, 4, 5, 6), (-1, 0, 1, 1, -1, 4))
    assert children[0, 1] == (1, True)  # the text told it, too
    assert children[2, 3] == (3, False)
    assert children[2, 4] == (4, True)
    assert prefix_tree([], 5)[0].tokens == prefix_tree([((1,), True)], 0)[0].tokens == ()


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
    draft = one.guess(4)
    assert (draft.tokens.tolist(), draft.parents) == ([4, 5, 3, 9], (-1, 0, -1, 2))  # the latest first
    assert draft.probes is None  # nobody allowed any
    one.takes_trees = False
    assert one.chain(8) == [4, 5]
    one.emit(3, 8, 2)
    assert one.chain(8) == [3, 8]
    one.finish()


def test_a_trial() -> None:
    """A window that brings nothing rests, and is tried again; one that brings enough goes on."""
    trial, most = Trial(), int(LEAST_GAIN * 8 * TRIAL_ROUNDS)
    for turn in range(3):
        for gained in [1] * (most - 1) + [0] * (TRIAL_ROUNDS - most + 1):
            assert not trial.resting, turn
            trial.count(8, gained)
        for _ in range(REST_ROUNDS):
            assert trial.resting
            trial.count(0, 5)
    for _ in range(5):
        for gained in [1] * most + [0] * (TRIAL_ROUNDS - most):
            trial.count(8, gained)
            trial.count(0, 0)  # a round without probes is no trial
            assert not trial.resting


def probes_of(
    script: Script, prompt: list[int], vocab_size: int, num_tokens: int
) -> tuple[list[int], list[bool], float]:
    """Probes of each round, whether the window rested after it, and tokens per round; the answer is the script's
    own.
    """
    engine, watched = lookahead_engine(ScriptedModel(script, vocab_size))
    state = engine.submit(
        prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), SpecConfig("lookahead", num_draft=4)
    )
    probed, rested = [], []
    while engine.has_work:
        before = watched.num_probed
        engine.step()
        probed.append(watched.num_probed - before)
        rested.append(watched.inner.resting(state.request_id) if engine.has_work else False)
    text = list(prompt)
    for token in state.output_ids:
        answer = script(tuple(text))
        assert token == answer
        text.append(token)
    assert sum(probed) == state.stats.num_probed == state.stats.as_dict()["num_probed"] == engine.stats.num_probed
    return probed, rested, state.stats.emitted_per_step


def test_a_window_that_gains_nothing_rests() -> None:
    """Every token is a wild function of the whole text: nothing can be foreseen."""
    probed, rested, _ = probes_of(
        lambda context: hash(context) % 5000, [1, 2, 3], 5000, 1 + 2 * (TRIAL_ROUNDS + REST_ROUNDS) + 9
    )
    trial = [8] * TRIAL_ROUNDS + [0] * REST_ROUNDS
    assert probed == [0, *trial, *trial, *[8] * 8, 0]  # neither the first token nor the last is drafted
    assert sum(rested) == 2 * REST_ROUNDS
    assert rested[TRIAL_ROUNDS]


def test_a_window_that_foresees_the_text_goes_on() -> None:
    """Every token follows from its place alone, so parallel guesses come true; the text itself never repeats."""
    answer = [3 + i for i in range(400)]
    probed, rested, rate = probes_of(recite(answer), [1], 500, 400)
    assert not any(rested)
    assert set(probed[1:-3]) == {8}
    assert rate > 1.5
    assert len(probed) > TRIAL_ROUNDS  # the window was judged


def test_what_the_text_would_have_told_is_not_the_windows_gain() -> None:
    """A text that repeats itself is guessed from the text; the window rests although nearly every guess is right."""
    _, rested, rate = probes_of(lambda context: (context[-1] + 1) % 7, [0, 1, 2, 3, 4, 5, 6, 0], 7, 200)
    assert rate > 2.5
    assert any(rested)


def test_somebody_elses_guesses_are_not_the_windows_gain() -> None:
    """A grammar may force a round for which nothing was asked of the drafter: its earlier guesses do not count
    there.
    """
    drafter = LookaheadDrafter()
    one = Alone(drafter, [1, 2, 3])
    state = drafter._requests[0]
    gained: list[int] = []
    state.trial.count = lambda _, num_gained: gained.append(num_gained)  # type: ignore[method-assign]
    state.pool.add(3, (7, 8), in_text=False)
    for asked in (True, False):
        draft = one.guess(2) if asked else Draft(torch.tensor([7, 8]), (-1, 0), (0, 2), ("grammar",))
        assert draft.tokens.tolist() == [7, 8]
        drafter.commit(one.batch(2), draft, Verdict(((0, 1),), ((7, 8),), (3,), ("bonus",)), NO_FEEDBACK)
        one.text += [7, 8, 3]
    assert gained == [2, 0]
    one.finish()


def test_configuration() -> None:
    assert SpecConfig("lookahead").num_probe == 8
    assert SpecConfig("lookahead", lookahead_window=5, lookahead_ngram=4).num_probe == 15
    assert SpecConfig("ngram").num_probe == 0
    with pytest.raises(ConfigError, match="lookahead_window=5: only drafter='lookahead' takes it, not drafter='ngram'"):
        SpecConfig("ngram", lookahead_window=5)
    for field, value in (
        ("lookahead_window", 0),
        ("lookahead_window", 65),
        ("lookahead_ngram", 1),
        ("lookahead_ngram", 17),
        ("lookahead_ngram", 2.0),
    ):
        with pytest.raises(InputError, match=f"{field}={value}: must be"):
            SpecConfig("lookahead", **{field: value})
