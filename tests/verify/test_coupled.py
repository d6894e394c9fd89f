"""The coupled rule: the text is a function of the target and of the noise, whoever drafted, and the noise has the
target's distribution.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from foretoken.core import Uniforms
from foretoken.verify import RULES, race_winner
from tests.helpers.enumeration import Case, Child, RandomTables, Spot, Tokens, batch_of

VOCAB, LENGTH, NUM_SEEDS = 5, 24, 40
TARGET = RandomTables(VOCAB, seed=1, concentration=0.5)
DRAFTERS = [RandomTables(VOCAB, seed=k, concentration=0.5) for k in (2, 3, 4)]
Noise = Callable[[int, int, int, int], np.ndarray]  # seed, round, absolute position, depth in the round (from 0)


def by_position(seed: int, turn: int, position: int, depth: int) -> np.ndarray:
    return np.random.default_rng([seed, position]).exponential(size=VOCAB)


def by_round(seed: int, turn: int, position: int, depth: int) -> np.ndarray:
    return np.random.default_rng([seed, turn, depth]).exponential(size=VOCAB)


def by_pair(seed: int, turn: int, position: int, depth: int) -> np.ndarray:
    return np.random.default_rng([seed, position // 2]).exponential(size=VOCAB)


def law_at(tables: RandomTables, text: Tokens) -> np.ndarray:
    return tables[text[-3:]]


def reference(seed: int, noise: Noise, length: int = LENGTH) -> Tokens:
    """The text without drafts, token by token."""
    text: Tokens = ()
    while len(text) < length:
        text += (int(np.argmin(noise(seed, len(text), len(text), 0) / law_at(TARGET, text))),)
    return text


def grow(seed: int, turn: int, text: Tokens, plan: str, noise: Noise, depth: int = 0, twin: int = 0) -> Spot:
    """One round's tree: children are the best of the drafter's own race, points, equal draft tokens or nothing, as the
    plan says.
    """
    rng = np.random.default_rng([seed, turn, depth, twin, *text[-3:]])
    if plan == "none" or depth > int(rng.integers(4)):
        return Spot()
    drafter = DRAFTERS[(turn + depth) % 3] if plan != "target" else TARGET
    q = 0.7 * law_at(TARGET, text) + 0.3 * law_at(drafter, text)
    best = np.argsort(noise(seed, turn, len(text), depth) / q)
    if plan == "own_noise":
        best = np.argsort(rng.exponential(size=VOCAB) / q)
    width = {"chain": 1, "target": 1, "own_noise": 1}.get(plan, int(rng.integers(1, 4)))
    tokens = [int(x) for x in best[:width]]
    if plan == "anticipating" and sum(tokens) % 2:
        tokens = tokens[:1]
    if plan == "twice":
        tokens += tokens
    sampled = plan == "sampled"
    children = tuple(
        Child(x, sampled and i == 0, grow(seed, turn, (*text, x), plan, noise, depth + 1, twin=i))
        for i, x in enumerate(tokens)
    )
    return Spot(q if sampled else None, children)


def generate(plan: str, noise: Noise, length: int = LENGTH) -> tuple[list[Tokens], int]:
    """The texts of NUM_SEEDS requests run side by side, and the number of rounds."""
    texts: list[Tokens] = [()] * NUM_SEEDS
    turn = 0
    while min(map(len, texts)) < length:
        cases = [
            Case(text, grow(1000 * seed, turn, text, plan, lambda s, *rest, own=seed: noise(own, *rest)), 1.0)
            for seed, text in enumerate(texts)
        ]
        draft, probs = batch_of(cases, _Contexts())
        race = tuple(
            torch.tensor(
                np.array([noise(seed, turn, len(case.context) + len(row), len(row)) for row in case.layout.texts])
            )
            for seed, case in enumerate(cases)
        )
        verdict = RULES["coupled"].verify(draft, probs, Uniforms(torch.empty(0), torch.empty(0), race))
        assert all(own == (None,) * n for own, n in zip(verdict.probabilities, draft.lengths, strict=True))
        texts = [text + verdict.emitted(b) for b, text in enumerate(texts)]
        turn += 1
    return [text[:length] for text in texts], turn


class _Contexts(dict):
    """The target's distribution by whole text, of which only the last three tokens count."""

    def __missing__(self, text: Tokens) -> np.ndarray:
        return law_at(TARGET, text)


PLANS = ["none", "chain", "target", "own_noise", "wide", "anticipating", "twice", "sampled"]


@pytest.mark.parametrize("plan", PLANS)
def test_the_text_does_not_depend_on_what_was_drafted(plan: str) -> None:
    texts, rounds = generate(plan, by_position)
    assert texts == [reference(seed, by_position) for seed in range(NUM_SEEDS)]
    assert rounds < LENGTH or plan == "none"


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    assert (
        generate("target", by_position)[1] < generate("wide", by_position)[1] <= generate("own_noise", by_position)[1]
    )


def test_noise_keyed_by_the_round_makes_the_text_depend_on_the_drafter() -> None:
    assert generate("chain", by_round, 8)[0] != generate("none", by_round, 8)[0]


def test_noise_shared_by_two_positions_correlates_them() -> None:
    """P(Y1 = Y2) for two distributions of one noise vector is far from the sum p q of independent draws."""
    p, q = law_at(TARGET, ()), law_at(DRAFTERS[0], ())
    noise = [by_pair(seed, 0, 0, 0) for seed in range(2000)], [by_pair(seed, 0, 1, 0) for seed in range(2000)]
    winners = [
        race_winner(torch.tensor(distribution).expand(2000, -1), torch.tensor(np.array(own)))
        for distribution, own in zip((p, q), noise, strict=True)
    ]
    assert float((winners[0] == winners[1]).double().mean()) > (p * q).sum() + 0.2
    independent = [
        race_winner(
            torch.tensor(distribution).expand(2000, -1),
            torch.tensor(np.array([by_position(seed, 0, place, 0) for seed in range(2000)])),
        )
        for place, distribution in enumerate((p, q))
    ]
    assert abs(float((independent[0] == independent[1]).double().mean()) - (p * q).sum()) < 0.06


def grid(vocab: int, cells: int) -> torch.Tensor:
    """Exp(1) noise of `vocab` tokens at the midpoints of a grid of equally likely cells: a distribution without
    sampling.
    """
    noise = -torch.log1p(-(torch.arange(cells, dtype=torch.float64) + 0.5) / cells)
    return torch.cartesian_prod(*[noise] * vocab)


@pytest.mark.parametrize(("vocab", "cells"), [(2, 1000), (3, 120)])
def test_the_winner_of_a_race_has_the_law(vocab: int, cells: int) -> None:
    """P(argmin E / p = x) = int p_x exp(-t sum p) dt = p_x / sum p; here by quadrature over the noise."""
    noise = grid(vocab, cells)
    for seed in range(3):
        p = RandomTables(vocab, seed, concentration=1.0)[()]
        won = torch.bincount(race_winner(torch.tensor(3 * p).expand(len(noise), -1), noise), minlength=vocab) / len(
            noise
        )
        assert np.abs(won.numpy() - p).max() < 1 / cells


def match_probability(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))


@pytest.mark.parametrize(("vocab", "cells"), [(2, 1000), (3, 120)])
def test_how_often_two_races_of_one_noise_agree(vocab: int, cells: int) -> None:
    """sum_x 1 / sum_y max(p_y / p_x, q_y / q_x), between (1 - TV) / (1 + TV) and 1 - TV."""
    noise = grid(vocab, cells)
    for seed in range(3):
        p, q = (RandomTables(vocab, seed + k, concentration=1.0)[()] for k in (10, 20))
        won = [race_winner(torch.tensor(distribution).expand(len(noise), -1), noise) for distribution in (p, q)]
        expected, distance = match_probability(p, q), 0.5 * np.abs(p - q).sum()
        assert abs(float((won[0] == won[1]).double().mean()) - expected) < 2 / cells
        assert (1 - distance) / (1 + distance) - 1e-12 <= expected <= 1 - distance + 1e-12


def test_a_race_over_a_wide_law() -> None:
    """Forty tokens, 200 000 races with a fixed seed: every frequency within 5 standard errors."""
    p = np.random.default_rng(3).dirichlet(np.full(40, 0.3))
    noise = torch.tensor(np.random.default_rng(4).exponential(size=(200_000, 40)))
    won = torch.bincount(race_winner(torch.tensor(p).expand(len(noise), -1), noise), minlength=40).numpy() / len(noise)
    assert (np.abs(won - p) <= 5 * np.sqrt(p / len(noise)) + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_edges_of_a_race(dtype: torch.dtype) -> None:
    distribution = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 1e-30, 0.0, 0.0], [0.3, 0.3, 0.4, 0.0]], dtype=dtype)
    noise = torch.tensor([[0.0, 2.0, 2.0, 1e-30], [1e-9, 50.0, 1e-9, 1e-9], [0.1, 0.1, 5.0, 0.0]], dtype=dtype)
    assert race_winner(distribution, noise).tolist() == [1, 1, 0]  # weight zero never, ties the lowest id
    assert race_winner(distribution[:1], torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=dtype)).tolist() == [
        2
    ]  # noise zero is the earliest


def test_noise_is_asked_for() -> None:
    draft, probs = batch_of([Case((), Spot(), 1.0)], TARGET)
    with pytest.raises(AssertionError, match="noise"):
        RULES["coupled"].verify(draft, probs, Uniforms(torch.empty(0), torch.empty(0), (None,)))
