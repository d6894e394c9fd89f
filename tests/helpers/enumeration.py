"""Exact laws of random programs and of verification rules: every branch with its weight, no sampling, no tolerance to tune.

A drafter is ordinary code that asks a `Choice` for its random decisions. `branches` runs it once per possible sequence of
answers. The rule under test then gives the weight of everything that can happen to each draft.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foretoken.core import Draft, Mass, Uniforms
from foretoken.verify import Rule

EXACT = 1e-12
Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Tables = dict[Tokens, np.ndarray]  # context -> law of the next token


class Choice:
    """Replays a script of decisions, then takes the first possible branch of every new one."""

    def __init__(self, script=()):
        self.script, self.taken, self.weight = list(script), [], 1.0

    def pick(self, law) -> int:
        options = [k for k, w in enumerate(law) if w > 0]
        at = len(self.taken)
        k = self.script[at] if at < len(self.script) else 0
        self.taken.append((k, len(options)))
        self.weight *= float(law[options[k]])
        return options[k]

    def coin(self, probability: float) -> bool:
        return self.pick((1.0 - probability, probability)) == 1


def branches(program: Callable[[Choice], object]) -> Iterator[tuple[object, float]]:
    """Every result of the program with its exact probability."""
    script: list[int] = []
    while True:
        choice = Choice(script)
        yield program(choice), choice.weight
        taken = choice.taken
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return
        script = [k for k, _ in taken[:-1]] + [taken[-1][0] + 1]


@dataclass(frozen=True)
class Guess:
    """One position of a draft: the token (None = nothing proposed) and the mass it came from (None = deterministic)."""

    token: int | None
    mu: np.ndarray | None = None


Chain = tuple[Guess, ...]
Drafter = Callable[[Choice, Tokens], Chain]


@dataclass(frozen=True)
class Case:
    """One request of the enumeration: the committed text, what was drafted after it, and how probable that was."""

    context: Tokens
    chain: Chain
    weight: float

    @property
    def tokens(self) -> Tokens:
        return tuple(guess.token for guess in self.chain if guess.token is not None)


def cases_of(drafter: Drafter, contexts: Law) -> list[Case]:
    """Every draft the drafter can produce after every context."""
    return [Case(s, chain, w * v) for s, w in contexts.items() for chain, v in branches(lambda choice, s=s: drafter(choice, s))]


def draft_of(chains: Sequence[Chain], vocab: int) -> Draft:
    """The ragged draft of several chains, in float64; a guess without a token leaves its law at the row where it stood."""
    tokens, parents, offsets, sampled, laws, law_of_row = [], [], [0], [], [], []
    for chain in chains:
        assert all(guess.token is not None for guess in chain[:-1]), "nothing can follow a position without a token"
        for i, guess in enumerate(chain):
            laws += [] if guess.mu is None else [guess.mu]
            law_of_row.append(-1 if guess.mu is None else len(laws) - 1)
            if guess.token is not None:
                tokens.append(guess.token)
                parents.append(i - 1)
                sampled.append(guess.mu is not None)
        if not chain or chain[-1].token is not None:
            law_of_row.append(-1)
        offsets.append(len(tokens))
    mass = Mass(torch.tensor(np.array(laws), dtype=torch.float64), tuple(law_of_row)) if laws else None
    names = ("toy",) * len(chains)
    return Draft(torch.tensor(tokens, dtype=torch.int64), tuple(parents), tuple(offsets), names, tuple(sampled) if mass else (), mass)


def target_rows(cases: Sequence[Case], target: Tables) -> torch.Tensor:
    """The target's law at every row of the batch of cases."""
    return torch.tensor(np.array([target[c.context + c.tokens[:i]] for c in cases for i in range(len(c.tokens) + 1)]), dtype=torch.float64)


@dataclass(frozen=True)
class Branch:
    """One thing that can happen to a case: `kept` tokens stand, then `next_token`, with the uniforms that lead there."""

    case: int
    kept: int
    next_token: int
    weight: float
    low: float  # the next draw's uniform lies in [low, high)
    high: float


def rule_branches(rule: Rule, cases: Sequence[Case], target: Tables) -> tuple[list[Branch], np.ndarray]:
    """Every branch of the rule on every case, from `accept_probabilities` and `next_law` only; and the former."""
    vocab = len(target[()])
    draft, probs = draft_of([c.chain for c in cases], vocab), target_rows(cases, target)
    accept = rule.accept_probabilities(draft, probs).numpy()
    assert not np.isnan(accept).any()
    assert ((accept >= 0) & (accept <= 1)).all(), "an accept probability outside [0, 1]"
    laws = rule.next_law(draft, probs, range(draft.num_rows)).numpy()
    assert (laws >= 0).all(), "negative weights are not a law"
    found = []
    for c, case in enumerate(cases):
        own = accept[draft.offsets[c] : draft.offsets[c + 1]]
        for kept in range(len(own) + 1):
            weight = case.weight * float(np.prod(own[:kept])) * (1.0 - own[kept] if kept < len(own) else 1.0)
            if weight <= 0:
                continue
            law = laws[draft.anchor_row(c) + kept]
            edges = np.concatenate([[0.0], np.cumsum(law)]) / law.sum()
            found += [Branch(c, kept, y, weight * law[y] / law.sum(), edges[y], edges[y + 1]) for y in np.flatnonzero(law)]
    return found, accept


def emitted_law(rule: Rule, cases: Sequence[Case], target: Tables) -> Law:
    """Exact law of the text after one round: context, accepted tokens, next token."""
    law: Law = {}
    for branch in rule_branches(rule, cases, target)[0]:
        case = cases[branch.case]
        text = (*case.context, *case.tokens[: branch.kept], int(branch.next_token))
        law[text] = law.get(text, 0.0) + branch.weight
    return law


def check_decisions(rule: Rule, cases: Sequence[Case], target: Tables) -> int:
    """`verify` takes exactly the enumerated branch for uniforms just inside every threshold; returns how many were tried."""
    found, accept = rule_branches(rule, cases, target)
    whole = draft_of([c.chain for c in cases], len(target[()]))
    trials, tests, draws = [], [], []
    for branch in found:
        width = branch.high - branch.low
        if width < 1e-8:  # narrower than the rounding of its edges
            continue
        own = accept[whole.offsets[branch.case] : whole.offsets[branch.case + 1]]
        for edge in (branch.low + 1e-6 * width, branch.high - 1e-6 * width, *([0.0] if branch.low == 0 else [])):
            trials.append(branch)
            draws.append(edge)
            tests += [a * (1 - 1e-12) if i < branch.kept else min(a * (1 + 1e-12), 1 - 2.0**-53) for i, a in enumerate(own)]
    repeated = [cases[branch.case] for branch in trials]
    uniforms = Uniforms(torch.tensor(tests, dtype=torch.float64), torch.tensor(draws, dtype=torch.float64))
    verdict = rule.verify(draft_of([c.chain for c in repeated], len(target[()])), target_rows(repeated, target), uniforms)
    for b, (branch, case) in enumerate(zip(trials, repeated, strict=True)):
        assert verdict.paths[b] == tuple(range(branch.kept)), "another path"
        assert verdict.accepted[b] == case.tokens[: branch.kept], "other tokens"
        assert verdict.next_tokens[b] == branch.next_token, "another next token"
        expected = "bonus" if branch.kept == len(case.chain) else "residual"
        assert verdict.next_kinds[b] == expected, f"next kind is {verdict.next_kinds[b]}, not {expected}"
    return len(trials)


def complete(law: Law, target: Tables, length: int) -> Law:
    """Continue every text with the target itself up to `length` tokens (rounds are independent given the text)."""
    out: Law = {}
    todo = list(law.items())
    while todo:
        text, w = todo.pop()
        if len(text) >= length:
            out[text[:length]] = out.get(text[:length], 0.0) + w
        else:
            todo += [((*text, x), w * target[text][x]) for x in range(len(target[()])) if target[text][x] > 0]
    return out


def chained(rule: Rule, drafters: Sequence[Drafter], target: Tables, length: int) -> Law:
    """Law of the first `length` tokens when round r is drafted by `drafters[r]` and the target finishes alone."""
    law: Law = {(): 1.0}
    for drafter in drafters:
        done = {s: w for s, w in law.items() if len(s) >= length}
        law = emitted_law(rule, cases_of(drafter, {s: w for s, w in law.items() if len(s) < length}), target)
        for s, w in done.items():
            law[s] = law.get(s, 0.0) + w
    return complete(law, target, length)


class RandomTables(dict):
    """A random law for every context, made when it is asked for; `holes` is the chance that a token has probability 0."""

    def __init__(self, vocab: int, seed: int, concentration: float = 0.7, holes: float = 0.0):
        super().__init__()
        self.vocab, self.seed, self.concentration, self.holes = vocab, seed, concentration, holes

    def __missing__(self, context: Tokens) -> np.ndarray:
        rng = np.random.default_rng([self.seed, len(context), *context])
        law = rng.dirichlet(np.full(self.vocab, self.concentration))
        law *= rng.random(self.vocab) >= self.holes
        self[context] = law / law.sum() if law.sum() > 0 else point(self.vocab, int(rng.integers(self.vocab)))
        return self[context]


def joint(target: Tables, length: int) -> Law:
    """Exact law of the first `length` tokens of the target."""
    texts = itertools.product(range(len(target[()])), repeat=length)
    return {s: float(np.prod([target[s[:i]][s[i]] for i in range(length)])) for s in texts}


def max_error(law: Law, other: Law) -> float:
    """Largest difference of two laws; not blind to NaN."""
    return float(np.max([abs(law.get(s, 0.0) - other.get(s, 0.0)) for s in set(law) | set(other)]))


def point(vocab: int, token: int) -> np.ndarray:
    law = np.zeros(vocab)
    law[token] = 1.0
    return law
