"""Speculative decoding in one file: greedy and sampled, exact for any drafter. Needs numpy only.

A model is a function from a list of tokens to the distribution of the next token, a vector of probabilities. The vector
of a draft model may sum to less than 1: the rest is the probability that it proposes nothing and the draft ends.

The rule, for a drafted token x sampled from the mass mu where the target's distribution is p (Leviathan et al. 2023,
arXiv 2211.17192, and Chen et al. 2023, arXiv 2302.01318, with mu = q; here for any mu with sum(mu) <= 1):

    accept x  iff  u * mu(x) < p(x),  u uniform in [0, 1)
    otherwise, or if nothing was proposed, emit y sampled from (p - mu)_+, normalised

Why it is exact: x is accepted with probability min(mu, p)(x). The rest, (p - mu)_+(x) = p(x) - min(mu, p)(x), is
emitted by the second line, whose total mass is the probability that nothing was accepted. The sum is p(x).

    python examples/minimal_spec.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.float64]
Tokens = list[int]
Model = Callable[[Tokens], Probs]


class Dice:
    """All randomness goes through two calls, so that a test can enumerate every branch."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, probs: Probs) -> int:
        """Return an index, with probability probs[index]."""
        return int(self.rng.choice(len(probs), p=probs / probs.sum()))

    def accept(self, p: float, mu: float) -> bool:
        """Return True with probability min(1, p / mu); without a division, because mu may be tiny."""
        return bool(self.rng.random() * mu < p)


def one_round(target: Model, draft: Model, text: Tokens, num_draft: int, dice: Dice) -> Tokens:
    """Draft, verify, emit: between one and num_draft + 1 new tokens for a single pass of the target."""
    # 1 Draft. Keep the mass that each token was sampled from, also where nothing was proposed.
    drafted: Tokens = []
    masses: list[Probs] = []
    while len(drafted) < num_draft:
        mu = draft(text + drafted)
        masses.append(mu)
        x = dice.pick(np.append(mu, max(0.0, 1.0 - mu.sum())))  # the last index: nothing
        if x == len(mu):
            break
        drafted.append(x)
    # 2 Verify. The target's distribution after every prefix of the draft: an engine computes them in ONE pass.
    p = [target(text + drafted[:i]) for i in range(len(drafted) + 1)]
    if len(masses) == len(drafted):  # the draft was full: nothing could have been proposed after it, so mu = 0 there
        masses.append(np.zeros_like(p[-1]))
    n = 0
    while n < len(drafted) and dice.accept(p[n][x := drafted[n]], masses[n][x]):
        n += 1
    # 3 Emit the accepted tokens and one of the target's own; after a fully accepted draft it is sampled from p (bonus).
    residual = np.maximum(p[n] - masses[n], 0.0)
    if residual.sum() == 0.0:  # p = mu up to rounding
        residual = p[n]
    return [*drafted[:n], dice.pick(residual / residual.sum())]


def generate(target: Model, draft: Model, prompt: Tokens, length: int, num_draft: int, dice: Dice) -> list[Tokens]:
    """The answer of `length` tokens, round by round. The last round drafts no more than can still be used."""
    rounds: list[Tokens] = []
    text = list(prompt)
    while (room := length - (len(text) - len(prompt))) > 0:
        rounds.append(one_round(target, draft, text, min(num_draft, room - 1), dice))
        text += rounds[-1]
    return rounds


def greedy(model: Model) -> Model:
    """Temperature 0 is no special case: the distribution is a point mass at the argmax, as is the mass."""
    return lambda text: np.eye(len(model(text)))[model(text).argmax()]


class EveryBranch(Dice):
    """Take the branches of a script, then the first possible one; `weight` is the probability of that path."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.weight = script, list[tuple[int, int]](), 1.0

    def pick(self, probs: Probs) -> int:
        """Return the index given by the script."""
        options = np.flatnonzero(probs > 0)
        choice = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append((choice, len(options)))
        self.weight *= probs[options[choice]] / probs.sum()
        return int(options[choice])

    def accept(self, p: float, mu: float) -> bool:
        """Both answers are branches, as long as they are possible."""
        return self.pick(np.array([1.0 - min(1.0, p / mu), min(1.0, p / mu)])) == 1


def branches(program: Callable[[Dice], list[Tokens]]) -> Iterator[tuple[list[Tokens], float]]:
    """Everything a program can do, each with its exact probability."""
    script: list[int] | None = []
    while script is not None:
        dice = EveryBranch(script)
        yield program(dice), dice.weight
        taken = dice.taken
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        script = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None


def max_error(target: Model, draft: Model, vocab: int, length: int, num_draft: int) -> float:
    """Largest difference between the distribution of the first `length` tokens and the target's own."""
    emitted = np.zeros((vocab,) * length)
    for rounds, weight in branches(lambda dice: generate(target, draft, [], length, num_draft, dice)):
        emitted[tuple(itertools.chain(*rounds))] += weight
    wanted = np.zeros_like(emitted)
    for text in itertools.product(range(vocab), repeat=length):
        wanted[text] = np.prod([target(list(text[:i]))[text[i]] for i in range(length)])
    return float(np.abs(emitted - wanted).max())


def toy(seed: int, share: float = 1.0, vocab: int = 3) -> Model:
    """A random distribution for every context; with `share` < 1 it proposes nothing in the rest of the cases."""
    return lambda text: share * np.random.default_rng([seed, len(text), *text]).dirichlet(np.ones(vocab))


def main() -> None:
    """Show both modes on a toy pair, and prove exactness for three kinds of drafters."""
    target, draft = toy(1), toy(2)
    print("greedy, round by round:  ", generate(greedy(target), greedy(draft), [0], 12, 3, Dice()))
    print("sampled, round by round: ", generate(target, draft, [0], 12, 3, Dice(7)))
    for name, drafter in (
        ("a draft model", draft),
        ("one that often says nothing", toy(2, 0.6)),
        ("a deterministic one", greedy(draft)),
    ):
        error = max_error(target, drafter, vocab=3, length=3, num_draft=2)
        print(f"{name}: the distribution of three tokens is off by {error:.0e}")
        assert error < 1e-12


if __name__ == "__main__":
    main()
