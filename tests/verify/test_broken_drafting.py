"""What a drafter may do and what it may not: randomized drafting, thinning, look-ahead, choices of length, pruning.

Lawful ways are exact under every rule; every unlawful one is planted and must be off by at least the stated amount.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from foretoken.core import Draft, Mass
from foretoken.verify import RULES, Rule, rule_for
from tests.helpers.enumeration import (
    EXACT,
    Chain,
    Child,
    Choice,
    Distribution,
    Drafter,
    DraftToken,
    RandomTables,
    Spot,
    Tables,
    Tokens,
    cases_of,
    complete,
    draft_of,
    emitted_law,
    joint,
    max_error,
)
from tests.verify.drafters import row

RATIO = ("rejection", "block", "tree", "traversal")
VOCAB, LENGTH = 3, 3
TARGET, DRAFT = RandomTables(VOCAB, seed=61), RandomTables(VOCAB, seed=62)
COIN = 0.6


def error(distribution: Distribution, target: Tables = TARGET, length: int = LENGTH + 1) -> float:
    return max_error(complete(distribution, target, length), joint(target, length))


def outcome_of(rule: Rule | str, drafter: Drafter, target: Tables = TARGET) -> Distribution:
    return emitted_law(RULES[rule] if isinstance(rule, str) else rule, cases_of(drafter, {(): 1.0}), target)


def chain(position: Callable[[Choice, np.ndarray, Tokens], DraftToken | None], length: int = LENGTH) -> Drafter:
    """A chain that ends where `position` gives nothing."""

    def propose(choice: Choice, context: Tokens) -> Chain:
        found: Chain = ()
        text = context
        while len(found) < length:
            one = position(choice, DRAFT[text], text)
            found += () if one is None else (one,)
            if one is None or one.token is None:
                break
            text += (one.token,)
        return found

    return propose


# ---- randomized drafting: a draft token with probability a, of mass a q whether or not it was made


def _coin(choice: Choice, q: np.ndarray, text: Tokens) -> DraftToken:
    x = choice.pick(q)
    return DraftToken(x if choice.coin(COIN) else None, COIN * q)


def _tree_with_coins(choice: Choice, text: Tokens, depth: int = 2) -> Spot:
    if depth == 0:
        return Spot()
    return row(
        choice,
        DRAFT[text],
        lambda token: _tree_with_coins(choice, (*text, token), depth - 1),
        1,
        1,
        np.full(VOCAB, COIN),
    )


class Planted(Rule):
    """A rule that is shown an edited draft: in the tests, where the next token is drawn, or in both."""

    lossless = False

    def __init__(self, rule: str, tests: Callable[[Draft], Draft], residual: Callable[[Draft], Draft]) -> None:
        self.name, self.rule, self.tests, self.residual = rule, RULES[rule], tests, residual

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        return self.rule.accept_probabilities(self.tests(draft), target_probs)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        return self.rule.next_token_weights(self.residual(draft), target_probs, rows)

    verify = None  # type: ignore[assignment]


def _as_is(draft: Draft) -> Draft:
    return draft


def _plain_where_nothing_came(draft: Draft) -> Draft:
    """Forgets the distribution of every row where no draft token was sampled: the next token there comes from p."""
    assert draft.mass is not None
    with_sample = {r for r, sampled in zip(draft.parent_rows, draft.sampled, strict=True) if sampled}
    return replace(
        draft,
        mass=Mass(
            draft.mass.distributions,
            tuple(
                distribution if r in with_sample else -1
                for r, distribution in enumerate(draft.mass.distribution_of_row)
            ),
        ),
    )


def _not_scaled(draft: Draft) -> Draft:
    """q in place of a q."""
    assert draft.mass is not None
    return replace(draft, mass=Mass(draft.mass.distributions / COIN, draft.mass.distribution_of_row))


@pytest.mark.parametrize("rule", RATIO)
def test_randomized_drafting_is_exact(rule: str) -> None:
    assert error(outcome_of(rule, chain(_coin))) < EXACT
    if RULES[rule].takes_trees:
        assert error(outcome_of(rule, _tree_with_coins)) < EXACT


@pytest.mark.parametrize(
    ("rule", "on_tree", "plain", "unscaled"),
    [
        ("rejection", False, 0.025, 0.024),
        ("block", False, 0.027, 0.024),
        ("tree", False, 0.025, 0.024),
        ("traversal", False, 0.027, 0.024),
        ("tree", True, 0.044, 0.018),
        ("traversal", True, 0.067, 0.0023),
    ],
)
def test_randomized_drafting_done_wrong_shows(rule: str, on_tree: bool, plain: float, unscaled: float) -> None:
    """p where nothing was drafted; (p - q)_+ in place of (p - a q)_+; and the coin left out of the mass altogether."""
    drafter = _tree_with_coins if on_tree else chain(_coin)
    assert error(outcome_of(Planted(rule, _plain_where_nothing_came, _plain_where_nothing_came), drafter)) > plain
    assert error(outcome_of(Planted(rule, _as_is, _not_scaled), drafter)) > unscaled
    assert error(outcome_of(Planted(rule, _not_scaled, _not_scaled), drafter)) > plain


# ---- decisions that look at what was drawn


def _kept(q: np.ndarray) -> np.ndarray:
    """Which tokens stay: a threshold on the draft's own probability, never all of them."""
    return (q > 0.2) & (np.arange(VOCAB) != np.argmax(q))


def _look_ahead(first: Callable[[np.ndarray], np.ndarray], second: Callable[[np.ndarray], np.ndarray]) -> Drafter:
    """The first draft token is dropped when the second one came out as 0; `first` and `second` make the declared
    masses.
    """

    def propose(choice: Choice, context: Tokens) -> Chain:
        q = DRAFT[()]
        x = choice.pick(q)
        y = choice.pick(DRAFT[(x,)])
        if y == 0:
            return (DraftToken(None, first(q)),)
        return (DraftToken(x, first(q)), DraftToken(y, second(DRAFT[(x,)])))

    return propose


@pytest.mark.parametrize("rule", RATIO)
def test_a_choice_by_the_next_draft_token_must_be_in_both_masses(rule: str) -> None:
    kept = np.array([1 - DRAFT[(x,)][0] for x in range(VOCAB)])

    def others(q: np.ndarray) -> np.ndarray:
        rest = np.where(np.arange(VOCAB) == 0, 0, q)
        return rest / rest.sum()

    assert error(outcome_of(rule, _look_ahead(lambda q: q * kept, others))) < EXACT
    assert error(outcome_of(rule, _look_ahead(lambda q: q, lambda q: q))) > 0.01
    assert error(outcome_of(rule, _look_ahead(lambda q: q * kept, lambda q: q))) > 0.009


def _dropped(choice: Choice, q: np.ndarray, text: Tokens) -> DraftToken:
    x = choice.pick(q)
    return DraftToken(x if _kept(q)[x] else None, q)


@pytest.mark.parametrize("rule", RATIO)
def test_a_draft_token_dropped_by_its_own_value_must_be_in_the_mass(rule: str) -> None:
    def right(choice: Choice, q: np.ndarray, text: Tokens) -> DraftToken:
        return replace(_dropped(choice, q, text), mu=q * _kept(q))

    assert error(outcome_of(rule, chain(right))) < EXACT
    assert error(outcome_of(rule, chain(_dropped))) > 0.007
    bonus = Planted(rule, _plain_where_nothing_came, _plain_where_nothing_came)
    assert error(outcome_of(bonus, chain(right))) > 0.049


def test_the_example_of_a_dropped_draft_token() -> None:
    """p = (.7, .3), q = (.5, .5), token 1 always dropped and the bonus drawn from p: token 0 comes out with .85."""
    target = RandomTables(2, 0)
    target[()], q, keep = np.array([0.7, 0.3]), np.array([0.5, 0.5]), np.array([1.0, 0.0])

    def propose(choice: Choice, text: Tokens, declared: np.ndarray | None = None) -> Chain:
        x = choice.pick(q)
        return (DraftToken(x, q),) if keep[x] else ()

    distribution = complete(outcome_of("rejection", propose, target), target, 1)
    assert abs(distribution[(0,)] - 0.85) < EXACT


# ---- how many draft tokens are handed over


SPEED = (1.0, 0.7, 0.62, 0.6)
CONFIDENCE = (lambda text: 0.5, lambda text: (0.9, 0.1, 0.35)[text[0]], lambda text: (0.95, 0.1, 0.2)[text[1]])


def _live(stop_at_first_drop: bool, as_points: bool = False) -> Drafter:
    """Draws LENGTH tokens, then keeps as many as promise most tokens per second by the confidences of the tokens
    drawn.
    """

    def propose(choice: Choice, context: Tokens) -> Chain:
        text: Tokens = ()
        for _ in range(LENGTH):
            text += (choice.pick(DRAFT[text]),)
        alive = np.cumprod([1.0, *(confidence(text) for confidence in CONFIDENCE)])
        worth = [SPEED[n] * alive[: n + 1].sum() for n in range(LENGTH + 1)]
        n = int(np.argmax(worth))
        if stop_at_first_drop:
            n = next((k for k in range(LENGTH) if worth[k + 1] <= worth[k]), LENGTH)
        return tuple(DraftToken(text[i], None if as_points else DRAFT[text[:i]]) for i in range(n))

    return propose


@pytest.mark.parametrize("rule", RATIO)
def test_the_best_length_over_drawn_tokens_is_biased(rule: str) -> None:
    """Lawful: stop where it first gets worse, for then a position is judged before it is drawn; or hand tokens over as
    points.
    """
    assert error(outcome_of(rule, _live(stop_at_first_drop=True))) < EXACT
    assert error(outcome_of(rule, _live(stop_at_first_drop=False))) > 0.003
    assert error(outcome_of(rule, _live(stop_at_first_drop=False, as_points=True))) < EXACT


# ---- trees


def _pruned(drops: Callable[[np.ndarray, int, Spot], bool]) -> Drafter:
    """Greedy+1 at every row; a sampled child is dropped afterwards where `drops` says so, and its mass left as it
    was.
    """

    def grow(choice: Choice, text: Tokens, depth: int = 2) -> Spot:
        if depth == 0:
            return Spot()
        found = row(choice, DRAFT[text], lambda token: grow(choice, (*text, token), depth - 1), 1, 1)
        return replace(
            found,
            children=tuple(
                one for one in found.children if not (one.sampled and drops(DRAFT[text], one.token, one.below))
            ),
        )

    return grow


@pytest.mark.parametrize(("rule", "by_itself", "by_its_child"), [("tree", 0.11, 0.09), ("traversal", 0.11, 0.11)])
def test_a_sampled_child_ranked_away_shows(rule: str, by_itself: float, by_its_child: float) -> None:
    assert error(outcome_of(rule, _pruned(lambda q, token, below: False)), length=3) < EXACT
    assert error(outcome_of(rule, _pruned(lambda q, token, below: q[token] < 0.25)), length=3) > by_itself
    assert (
        error(
            outcome_of(
                rule,
                _pruned(lambda q, token, below: any(one.token == 0 for one in below.children)),
            ),
            length=3,
        )
        > by_its_child
    )


@pytest.mark.parametrize(("rule", "least"), [("tree", 0.19), ("traversal", 0.19)])
def test_a_child_of_the_rest_tested_with_the_whole_law_shows(rule: str, least: float) -> None:
    """x was drawn from q without the deterministic children, renormalised; q itself is declared."""

    def propose(choice: Choice, text: Tokens) -> Spot:
        return row(choice, DRAFT[text], lambda token: Spot(), 1, 1, declared=DRAFT[text])

    assert error(outcome_of(rule, propose), length=2) > least


def _branching_on_a_draw(choice: Choice, text: Tokens) -> Spot:
    """Three levels of one draw each; what was drawn on the second decides whether its level has a deterministic child
    too.
    """

    def third(text: Tokens) -> Spot:
        return row(choice, DRAFT[text], lambda token: Spot(), 1 if text[1] == 0 else 0, 1)

    second = lambda text: row(choice, DRAFT[text], lambda token: third((*text, token)), 0, 1)  # noqa: E731
    return row(choice, DRAFT[text], lambda token: second((token,)), 0, 1)


def test_a_rule_chosen_by_a_shape_that_depends_on_draws_is_biased() -> None:
    """Lawful under one rule, and a reason to name the rule of a drafter that branches: `auto` would look at what was
    drawn.
    """
    cases = cases_of(_branching_on_a_draw, {(): 1.0})
    names = {rule_for(draft_of([case.drafted]), 0) for case in cases}
    assert names == {"block", "tree"}
    for rule in ("tree", "traversal"):
        assert error(emitted_law(RULES[rule], cases, TARGET)) < EXACT
    distribution: Distribution = {}
    for name in names:
        own = [case for case in cases if rule_for(draft_of([case.drafted]), 0) == name]
        for text, weight in emitted_law(RULES[name], own, TARGET).items():
            distribution[text] = distribution.get(text, 0.0) + weight
    assert error(distribution) > 0.001


# ---- drafts of drafts


def test_a_cascade_is_tested_with_the_law_of_its_last_model() -> None:
    """A middle model verifies an inner one; what comes out has the middle model's distribution, not the inner one's."""
    middle, inner = RandomTables(VOCAB, 71), RandomTables(VOCAB, 72)
    p, q = middle[()], inner[()]

    def propose(declared: np.ndarray) -> Drafter:
        def draft(choice: Choice, text: Tokens) -> Chain:
            x = choice.pick(q)
            if not choice.coin(min(1.0, p[x] / q[x])):
                rest = np.maximum(p - q, 0)
                x = choice.pick(rest / rest.sum())
            return (DraftToken(x, declared),)

        return draft

    for rule in RATIO:
        assert error(outcome_of(rule, propose(p)), length=2) < EXACT
        assert error(outcome_of(rule, propose(q)), length=2) > 0.01


def test_a_sampled_draft_token_handed_over_as_a_point_is_exact_and_slower() -> None:
    """Sample-and-compare: accepts sum p q in place of sum min(p, q)."""

    def sampled(as_point: bool) -> Drafter:
        return lambda choice, text: Spot(
            None if as_point else DRAFT[()], (Child(choice.pick(DRAFT[()]), not as_point),)
        )

    for rule in RATIO:
        distribution = outcome_of(rule, sampled(True))
        assert error(distribution, length=2) < EXACT
        assert (
            abs(sum(w for text, w in distribution.items() if len(text) == 2) - (TARGET[()] * DRAFT[()]).sum()) < EXACT
        )
        assert (
            sum(len(text) * w for text, w in outcome_of(rule, sampled(False)).items())
            > 1 + (TARGET[()] * DRAFT[()]).sum()
        )
