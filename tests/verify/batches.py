"""Random batches for the property tests: chains and trees of every kind, with the numbers a rule may need."""

import numpy as np
import torch
from hypothesis import settings

from foretoken.core import Draft, Mass, Uniforms, Verdict
from foretoken.verify import RULES
from tests.helpers.enumeration import RandomTables, point

ANY = [(name, tree) for name, rule in RULES.items() for tree in (False, True) if rule.takes_trees or not tree]
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def random_distribution(rng: np.random.Generator, vocab: int, mass: float = 1.0) -> np.ndarray:
    """A distribution with holes, sometimes a point, sometimes flat, sometimes with weights that only just exist."""
    shape = rng.integers(5)
    distribution = np.full(vocab, 1.0) if shape == 0 else rng.dirichlet(np.full(vocab, 0.3)) * (rng.random(vocab) > 0.4)
    if shape == 1 or distribution.sum() == 0:
        distribution = point(vocab, int(rng.integers(vocab)))
    if shape == 2:
        distribution = distribution + 10.0 ** -rng.uniform(5, 44, vocab)
    return mass * distribution / distribution.sum()


def random_parents(rng: np.random.Generator, tree: bool) -> list[int]:
    """The parents of up to seven nodes, in any order that puts parents first."""
    return [int(rng.integers(-1, node)) if tree else node - 1 for node in range(rng.integers(0, 8 if tree else 5))]


def random_batch(seed: int, tree: bool = False) -> tuple[Draft, torch.Tensor, Uniforms]:
    """Chains or trees of different sizes, kinds and masses, some with a distribution where nothing was proposed; and
    all the numbers a rule may need.
    """
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(1, 7))
    tokens, parents, offsets, sampled, distributions, distribution_of_row = [], [], [0], [], [], []
    for _ in range(rng.integers(1, 6)):
        own = random_parents(rng, tree)
        rows: list[int] = []
        for row in range(len(own) + 1):
            has_mass = rng.random() < (0.7 if row - 1 in own else 0.2)
            distributions += [random_distribution(rng, vocab, float(rng.choice([1.0, 0.6])))] if has_mass else []
            rows.append(len(distributions) - 1 if has_mass else -1)
        drawn: dict[int, set[int]] = {}
        for parent in own:
            distribution = distributions[rows[parent + 1]].copy() if rows[parent + 1] >= 0 else np.zeros(vocab)
            distribution[list(drawn.get(parent, ()))] = 0
            is_drawn = distribution.sum() > 0 and (not tree or rng.random() < 0.6)
            sampled.append(bool(is_drawn))
            tokens.append(
                int(rng.choice(vocab, p=distribution / distribution.sum())) if is_drawn else int(rng.integers(vocab))
            )
            if is_drawn:
                drawn.setdefault(parent, set()).add(tokens[-1])
        parents += own
        distribution_of_row += rows
        offsets.append(len(tokens))
    num_rows = len(distribution_of_row)
    target = np.array([random_distribution(rng, vocab) for _ in range(num_rows)])
    if rng.random() < 0.4:
        off = float(rng.choice([0.0, 1e-7, 1e-12]))
        for row, distribution in enumerate(distribution_of_row):
            if (
                distribution >= 0
            ):  # the drafter is the target, or nearly: nothing is left after a rejection but rounding
                near = distributions[distribution] * (1 + off * rng.standard_normal(vocab))
                target[row] = near / near.sum()
    edge = rng.choice([0.0, 1 - 2.0**-53, 0.5], size=len(tokens))
    accept = np.where(rng.random(len(tokens)) < 0.3, edge, rng.random(len(tokens)))
    following = np.where(rng.random(len(offsets) - 1) < 0.3, 1 - 2.0**-53, rng.random(len(offsets) - 1))
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    mass = (
        Mass(torch.tensor(np.array(distributions), dtype=dtype), tuple(distribution_of_row)) if distributions else None
    )
    marks = tuple(sampled) if any(sampled) or (distributions and rng.random() < 0.5) else ()
    names = ("toy",) * (len(offsets) - 1)
    draft = Draft(torch.tensor(tokens, dtype=torch.int64), tuple(parents), tuple(offsets), names, marks, mass)
    for b in range(draft.num_requests):  # what follows one text has one distribution
        first: dict[tuple[int, ...], int] = {}
        for row, text in enumerate(draft.paths(b), start=draft.anchor_row(b)):
            target[row] = target[first.setdefault(text, row)]
    race = tuple(torch.tensor(rng.exponential(size=(1 + length, vocab))) for length in draft.lengths)
    return draft, torch.tensor(target, dtype=dtype), Uniforms(torch.tensor(accept), torch.tensor(following), race)


def part(verdict: Verdict, b: int) -> tuple[object, ...]:
    return (
        verdict.paths[b],
        verdict.accepted[b],
        verdict.next_tokens[b],
        verdict.next_kinds[b],
        verdict.probabilities[b],
    )


def alone(draft: Draft, probs: torch.Tensor, uniforms: Uniforms, b: int) -> tuple[Draft, torch.Tensor, Uniforms]:
    nodes = slice(draft.offsets[b], draft.offsets[b + 1])
    return (
        draft.select([b]),
        probs[draft.rows_of([b])],
        Uniforms(uniforms.accept[nodes], uniforms.next[b : b + 1], uniforms.race[b : b + 1]),
    )


def renumbered(
    draft: Draft, probs: torch.Tensor, uniforms: Uniforms, seed: int
) -> tuple[Draft, torch.Tensor, Uniforms, list[list[int]]]:
    """The same trees with their nodes in another order, and the old node of each new one: parents come first, what
    follows one text in turn.
    """
    rng, orders = np.random.default_rng(seed), []
    for b, length in enumerate(draft.lengths):
        parents, texts, order = draft.parents[draft.offsets[b] : draft.offsets[b + 1]], draft.paths(b), []
        while len(order) < length:
            ready = [
                node for node in range(length) if node not in order and (parents[node] < 0 or parents[node] in order)
            ]
            ready = [
                node
                for node in ready
                if all(twin in order for twin in range(node) if texts[parents[twin] + 1] == texts[parents[node] + 1])
            ]
            order.append(int(rng.choice(ready)))
        orders.append(order)
    nodes = [draft.offsets[b] + node for b, order in enumerate(orders) for node in order]
    rows = [draft.anchor_row(b) + 1 + node for b, order in enumerate(orders) for node in (-1, *order)]
    parents = tuple(
        -1 if draft.parents[draft.offsets[b] + n] < 0 else o.index(draft.parents[draft.offsets[b] + n])
        for b, o in enumerate(orders)
        for n in o
    )
    mass = (
        None
        if draft.mass is None
        else Mass(draft.mass.distributions, tuple(draft.mass.distribution_of_row[row] for row in rows))
    )
    sampled = tuple(draft.sampled[node] for node in nodes) if draft.sampled else ()
    twin = Draft(draft.tokens[nodes], parents, draft.offsets, draft.drafters, sampled, mass)
    race = tuple(noise[[0, *(1 + node for node in order)]] for noise, order in zip(uniforms.race, orders, strict=True))
    return twin, probs[rows], Uniforms(uniforms.accept[nodes], uniforms.next, race), orders


class Extreme(RandomTables):
    """Distributions with holes, points, weights down to 1e-40, and some that nearly equal those of `near`."""

    def __init__(self, vocab: int, seed: int, near: RandomTables | None = None):
        super().__init__(vocab, seed)
        self.near = near

    def __missing__(self, text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 1, *text])
        distribution = random_distribution(rng, self.vocab)
        if self.near is not None and rng.random() < 0.5:
            distribution = self.near[text] * (
                1 + float(rng.choice([0.0, 1e-6, 1e-13])) * rng.standard_normal(self.vocab)
            )
        self[text] = distribution / distribution.sum()
        return self[text]
