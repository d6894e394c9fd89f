"""The enumeration sees bugs: every formula of the rejection rule is broken once, and the distribution error must be
large.

Each variant states the least error it must show on fixed distributions (about two thirds of what it is), far above
EXACT.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core import Draft, Mass, Uniforms, Verdict
from foretoken.verify import Rule, draw
from foretoken.verify.base import residual_weights
from foretoken.verify.rejection import RejectionRule
from tests.helpers.enumeration import (
    EXACT,
    Choice,
    Drafter,
    DraftToken,
    RandomTables,
    Tables,
    cases_of,
    check_decisions,
    complete,
    draft_of,
    emitted_law,
    joint,
    max_error,
)

VOCAB, LENGTH, COIN = 3, 2, 0.6
TARGET, DRAFT = RandomTables(VOCAB, seed=21), RandomTables(VOCAB, seed=22)
HOLED = RandomTables(VOCAB, seed=23, holes=0.3)


def _chain(position: Callable[[Choice, np.ndarray], DraftToken]) -> Drafter:
    def propose(choice: Choice, context: tuple[int, ...]) -> tuple[DraftToken, ...]:
        chain: tuple[DraftToken, ...] = ()
        while len(chain) < LENGTH and (not chain or chain[-1].token is not None):
            text = context + tuple(draft_token.token for draft_token in chain if draft_token.token is not None)
            chain += (position(choice, DRAFT[text]),)
        return chain

    return propose


def _drop(
    choice: Choice, q: np.ndarray, declared: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.multiply
) -> DraftToken:
    keep = (q > 0.2) * 0.9
    x = choice.pick(q)
    return DraftToken(x if choice.coin(float(keep[x])) else None, declared(q, keep))


def _coin(choice: Choice, q: np.ndarray, declared: float = COIN) -> DraftToken:
    x = choice.pick(q)
    return DraftToken(x if choice.coin(COIN) else None, declared * q)


def _sharpened(choice: Choice, q: np.ndarray) -> DraftToken:
    return DraftToken(choice.pick(q), q**2 / (q**2).sum())


MODEL = _chain(lambda choice, q: DraftToken(choice.pick(q), q))
DROPPED = _chain(_drop)
RANDOMIZED = _chain(_coin)
POINT = _chain(lambda choice, q: DraftToken(int(np.argmax(q))))


def _error(rule: Rule, drafter: Drafter, target: Tables = TARGET) -> float:
    distribution = emitted_law(rule, cases_of(drafter, {(): 1.0}), target)
    return max_error(complete(distribution, target, LENGTH + 1), joint(target, LENGTH + 1))


class ResidualIsTarget(RejectionRule):
    """No subtraction."""

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        return target_probs[list(rows)]


class ResidualIsDraft(RejectionRule):
    """The draft's distribution in place of the residual."""

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        distribution = [draft.mass.distribution_of_row[row] for row in rows]
        return torch.stack(
            [
                target_probs[row] if k < 0 else draft.mass.distributions[k]
                for row, k in zip(rows, distribution, strict=True)
            ]
        )


class ResidualAbsolute(RejectionRule):
    """|p - mu| in place of (p - mu)_+."""

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        distribution = [draft.mass.distribution_of_row[row] for row in rows]
        return torch.stack(
            [
                target_probs[row] - (0 if k < 0 else draft.mass.distributions[k])
                for row, k in zip(rows, distribution, strict=True)
            ]
        ).abs()


class ResidualUnclamped(RejectionRule):
    """p - mu without the clamp: not a distribution at all."""

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        distribution = [draft.mass.distribution_of_row[row] for row in rows]
        return torch.stack(
            [
                target_probs[row] - (0 if k < 0 else draft.mass.distributions[k])
                for row, k in zip(rows, distribution, strict=True)
            ]
        )


class ResidualScaled(RejectionRule):
    """The mass scaled by .98 in the residual only."""

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        return residual_weights(
            replace(draft, mass=Mass(draft.mass.distributions * 0.98, draft.mass.distribution_of_row)),
            target_probs,
            rows,
        )


class NothingIsBonus(RejectionRule):
    """A row where a token could have been proposed, but was not, treated as the end of the draft."""

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        with_child = set(draft.parent_rows)
        distributions = tuple(
            distribution if row in with_child else -1 for row, distribution in enumerate(draft.mass.distribution_of_row)
        )
        return residual_weights(replace(draft, mass=Mass(draft.mass.distributions, distributions)), target_probs, rows)


class RatioInverted(RejectionRule):
    """mu / p in place of p / mu."""

    def accept_terms(self, draft: Draft, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        p, mu = super().accept_terms(draft, target_probs)
        return mu, p


class MassScaled(RejectionRule):
    """The mass scaled by 1.1 in the test only."""

    def accept_terms(self, draft: Draft, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        p, mu = super().accept_terms(draft, target_probs)
        return p, mu * 1.1


class DraftProbabilitiesLost(ResidualIsTarget):
    """Accept with p(x) as if the draft token were deterministic, but draw the rest from p."""

    def accept_terms(self, draft: Draft, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        p, mu = super().accept_terms(draft, target_probs)
        return p, torch.ones_like(mu)


class RowShifted(RejectionRule):
    """The target's distribution taken one row too late."""

    def accept_terms(self, draft: Draft, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        return super().accept_terms(draft, torch.cat((target_probs[1:], target_probs[:1])))


@pytest.mark.parametrize(
    ("broken", "drafter", "least"),
    [
        (ResidualIsTarget(), MODEL, 0.045),
        (ResidualIsDraft(), MODEL, 0.07),
        (ResidualAbsolute(), MODEL, 0.05),
        (ResidualScaled(), MODEL, 0.002),
        (ResidualIsTarget(), POINT, 0.04),
        (NothingIsBonus(), DROPPED, 0.018),
        (NothingIsBonus(), RANDOMIZED, 0.03),
        (RatioInverted(), MODEL, 0.1),
        (MassScaled(), MODEL, 0.005),
        (DraftProbabilitiesLost(), MODEL, 0.022),
        (RowShifted(), MODEL, 0.09),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_a_broken_formula_shows(broken: Rule, drafter: Drafter, least: float) -> None:
    assert _error(RejectionRule(), drafter) < EXACT
    assert _error(broken, drafter) > least


def test_a_residual_without_the_clamp_is_refused() -> None:
    with pytest.raises(AssertionError, match="negative weights"):
        _error(ResidualUnclamped(), RANDOMIZED)


@pytest.mark.parametrize(
    ("position", "least"),
    [
        (_sharpened, 0.014),
        (lambda choice, q: _coin(choice, q, declared=1.0), 0.055),
        (lambda choice, q: _drop(choice, q, declared=lambda distribution, keep: distribution), 0.012),
        (
            lambda choice, q: _drop(
                choice, q, declared=lambda distribution, keep: distribution * keep / (distribution * keep).sum()
            ),
            0.023,
        ),
    ],
    ids=[
        "another distribution than the one drawn from",
        "coin left out of the mass",
        "dropping left out of the mass",
        "dropping declared as renormalised",
    ],
)
def test_a_drafter_that_declares_another_mass_shows(
    position: Callable[[Choice, np.ndarray], DraftToken], least: float
) -> None:
    assert _error(RejectionRule(), _chain(position)) > least


def _law_over_one_uniform(rule: RejectionRule, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Exact distribution of one position when the uniform that drew x also tests it: constant between its
    breakpoints.
    """
    edges = np.unique(np.clip(np.concatenate([[0.0, 1.0], np.cumsum(q), p / q]), 0.0, 1.0))
    middle = torch.tensor((edges[1:] + edges[:-1]) / 2)
    xs = draw(torch.tensor(q).expand(len(middle), -1), middle)
    draft = draft_of([(DraftToken(int(x), q),) for x in xs])
    probs = torch.tensor(p).expand(draft.num_rows, -1)
    verdict = rule.verify(draft, probs, Uniforms(middle, torch.full((len(middle),), 0.5, dtype=torch.float64)))
    distribution = np.zeros(len(p))
    for b, width in enumerate(np.diff(edges)):
        if verdict.paths[b]:
            distribution[int(xs[b])] += width
        else:
            rest = rule.next_token_weights(draft, probs, [draft.anchor_row(b)])[0].numpy()
            distribution += width * rest / rest.sum()
    return distribution


def test_the_uniform_that_drew_the_token_must_not_test_it() -> None:
    p, q = TARGET[()], DRAFT[()]
    assert np.abs(_law_over_one_uniform(RejectionRule(), p, q) - p).max() > 0.16


class KindFlipped(RejectionRule):
    """Calls a residual a bonus and the other way round."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        verdict = super().verify(draft, target_probs, uniforms)
        return replace(
            verdict, next_kinds=tuple("bonus" if kind == "residual" else "residual" for kind in verdict.next_kinds)
        )


class KindOfAcceptedPath(RejectionRule):
    """Calls every fully accepted draft a bonus, also where a token could have been proposed."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        verdict = super().verify(draft, target_probs, uniforms)
        kinds = zip(verdict.next_kinds, verdict.paths, draft.lengths, strict=True)
        return replace(
            verdict, next_kinds=tuple("bonus" if len(path) == length else kind for kind, path, length in kinds)
        )


class ShuffledTests(RejectionRule):
    """Tests node i with the number of another node."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return super().verify(draft, target_probs, Uniforms(uniforms.accept.roll(1), uniforms.next))


class ReusedTestNumbers(RejectionRule):
    """Draws the next token with the number of the last test."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        reused = [uniforms.accept[stop - 1] if stop else uniforms.next[b] for b, stop in enumerate(draft.offsets[1:])]
        return super().verify(draft, target_probs, Uniforms(uniforms.accept, torch.stack(reused)))


class ThresholdShifted(RejectionRule):
    """Compares with a bound that the probabilities do not have."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return super().verify(draft, target_probs, Uniforms(uniforms.accept + 1e-9, uniforms.next))


class ZeroAccepted(RejectionRule):
    """u * mu <= p in place of <: u = 0 accepts a token that the target never says."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return super().verify(draft, target_probs, Uniforms(uniforms.accept - 1e-300, uniforms.next))


@pytest.mark.parametrize(
    ("broken", "drafter", "message"),
    [
        (KindFlipped(), MODEL, "next kind"),
        (KindOfAcceptedPath(), RANDOMIZED, "next kind"),
        (ShuffledTests(), MODEL, "another path"),
        (ReusedTestNumbers(), MODEL, "another next token"),
        (ThresholdShifted(), MODEL, "another path"),
        (ZeroAccepted(), MODEL, "another path"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_a_broken_decision_shows(broken: Rule, drafter: Drafter, message: str) -> None:
    cases = cases_of(drafter, {(): 1.0})
    assert check_decisions(RejectionRule(), cases, HOLED) > 0
    with pytest.raises(AssertionError, match=message):
        check_decisions(broken, cases, HOLED)
