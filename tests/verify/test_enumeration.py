"""The law of what a round emits equals the target's law, to rounding, for every way of producing a draft."""

import itertools

import numpy as np
import pytest

from foretoken.verify import RULES
from tests.helpers.enumeration import (
    EXACT,
    Choice,
    Drafter,
    Guess,
    RandomTables,
    Tables,
    cases_of,
    chained,
    check_decisions,
    complete,
    emitted_law,
    joint,
    max_error,
    point,
)

REJECTION = RULES["rejection"]
GREEDY = RULES["greedy"]
KINDS = ("model", "point", "coin", "dropped", "stopped", "point_coin", "cut", "mixed")


def _sampled(choice: Choice, q: np.ndarray, keep: np.ndarray) -> Guess:
    """A token from q that stays with probability keep(x); keep = a for all x is a coin tossed before the draw."""
    x = choice.pick(q)
    return Guess(x if choice.coin(float(keep[x])) else None, q * keep)


def guess(choice: Choice, kind: str, q: np.ndarray, rng: np.random.Generator, depth: int) -> Guess | None:
    """One position drafted in the named way; None = stopped before anything could be drawn."""
    vocab = len(q)
    if kind == "mixed":
        kind = KINDS[(depth + int(rng.integers(len(KINDS)))) % (len(KINDS) - 1)]
    best = int(np.argmax(q))
    if kind == "point":
        return Guess(best)
    if kind == "coin":
        return _sampled(choice, q, np.full(vocab, rng.uniform(0.2, 0.95)))
    if kind == "dropped":
        return _sampled(choice, q, np.where(rng.random(vocab) < 0.3, 0.0, rng.random(vocab)))
    if kind == "stopped":
        return Guess(choice.pick(q), q) if q.max() > 0.6 else None
    if kind == "point_coin":
        return _sampled(choice, point(vocab, best), np.full(vocab, 0.6))
    if kind == "cut":
        kept = np.where(np.arange(vocab) % 2 == 0, q, 0.0)
        law = kept / kept.sum() if kept.sum() > 0 else point(vocab, 0)
        return Guess(choice.pick(law), law)
    return Guess(choice.pick(q), q)


def drafter(kind: str, length: int, draft_laws: Tables, seed: int) -> Drafter:
    """Drafts up to `length` tokens; what it does at a position is a function of the text before it."""

    def propose(choice: Choice, context: tuple[int, ...]) -> tuple[Guess, ...]:
        chain: tuple[Guess, ...] = ()
        text = context
        while len(chain) < length:
            one = guess(choice, kind, draft_laws[text], np.random.default_rng([seed, *text]), len(chain))
            if one is None:
                break
            chain += (one,)
            if one.token is None:
                break
            text += (one.token,)
        return chain

    return propose


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_one_round_has_the_targets_law(kind: str, vocab: int) -> None:
    for length, holes in itertools.product(range(4), (0.0, 0.3)):
        target, laws = RandomTables(vocab, seed=1, holes=holes), RandomTables(vocab, seed=2, holes=holes)
        law = emitted_law(REJECTION, cases_of(drafter(kind, length, laws, 3), {(): 1.0}), target)
        assert abs(sum(law.values()) - 1) < EXACT
        assert max_error(complete(law, target, length + 1), joint(target, length + 1)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_decisions_agree_with_the_probabilities(kind: str, vocab: int) -> None:
    for length, holes in itertools.product((0, 1, 2), (0.0, 0.3)):
        target, laws = RandomTables(vocab, seed=4, holes=holes), RandomTables(vocab, seed=5, holes=holes)
        assert check_decisions(REJECTION, cases_of(drafter(kind, length, laws, 6), {(): 1.0}), target) > 0


@pytest.mark.parametrize(("vocab", "length"), [(2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("first", KINDS)
def test_two_rounds_with_another_drafter_in_the_second(first: str, vocab: int, length: int) -> None:
    second = KINDS[(KINDS.index(first) + 3) % len(KINDS)]
    target = RandomTables(vocab, seed=7)
    drafters = [drafter(first, length, RandomTables(vocab, seed=8), 9), drafter(second, length, RandomTables(vocab, seed=10), 11)]
    horizon = length + 2
    assert max_error(chained(REJECTION, drafters, target, horizon), joint(target, horizon)) < EXACT


@pytest.mark.parametrize("rule", [GREEDY, REJECTION], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_point_target_is_followed_to_the_letter(rule, kind: str) -> None:
    vocab, length = 3, 3
    soft = RandomTables(vocab, seed=12)
    target = _Points(soft)
    cases = cases_of(drafter(kind, length, RandomTables(vocab, seed=13), 14), {(): 1.0})
    law = emitted_law(rule, cases, target)
    assert max_error(complete(law, target, length + 1), joint(target, length + 1)) < EXACT
    assert check_decisions(rule, cases, target) > 0


class _Points(dict):
    """The law at temperature 0 of another family of laws."""

    def __init__(self, soft: Tables):
        super().__init__()
        self.soft = soft

    def __missing__(self, context: tuple[int, ...]) -> np.ndarray:
        self[context] = point(len(self.soft[context]), int(np.argmax(self.soft[context])))
        return self[context]


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    target, laws = RandomTables(4, seed=15), RandomTables(4, seed=16)
    law = emitted_law(REJECTION, cases_of(drafter("model", 1, laws, 0), {(): 1.0}), target)
    accepted = sum(w for text, w in law.items() if len(text) == 2)
    assert abs(accepted - np.minimum(target[()], laws[()]).sum()) < EXACT
