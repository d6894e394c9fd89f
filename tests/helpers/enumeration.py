"""Exact distributions of random programs and of verification rules: every branch with its weight, no sampling, no
tolerance to tune.

A drafter is ordinary code that asks a `Choice` for its random decisions. `branches` runs it once per possible sequence
of answers. The rule under test then gives the weight of everything that can happen to each draft.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from foretoken.core import Draft, Mass, Uniforms
from foretoken.verify import Rule

EXACT = 1e-12
Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]
Tables = dict[Tokens, np.ndarray]  # context -> distribution of the next token


class Choice:
    """Replays a script of decisions, then takes the first possible branch of every new one."""

    def __init__(self, script=()):
        self.script, self.taken, self.weight = list(script), [], 1.0

    def pick(self, distribution) -> int:
        options = [k for k, w in enumerate(distribution) if w > 0]
        at = len(self.taken)
        k = self.script[at] if at < len(self.script) else 0
        self.taken.append((k, len(options)))
        self.weight *= float(distribution[options[k]])
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
class DraftToken:
    """One position of a chain: the token (None = nothing proposed) and the mass it came from (None = deterministic)."""

    token: int | None
    mu: np.ndarray | None = None


Chain = tuple[DraftToken, ...]


@dataclass(frozen=True)
class Spot:
    """One row of a tree: the distribution of its draws (None = no draw was made) and its children, drawn or
    deterministic.
    """

    mu: np.ndarray | None = None
    children: "tuple[Child, ...]" = ()


@dataclass(frozen=True)
class Child:
    token: int
    sampled: bool = False
    below: Spot = Spot()


Drafter = Callable[[Choice, Tokens], Chain | Spot]


def spot_of(drafted: Chain | Spot) -> Spot:
    """A chain as the tree that it is; an entry without a token leaves its distribution at the row where it stood."""
    if isinstance(drafted, Spot):
        return drafted
    if not drafted:
        return Spot()
    first, rest = drafted[0], drafted[1:]
    assert first.token is not None or not rest, "nothing can follow a position without a token"
    return Spot(first.mu, () if first.token is None else (Child(first.token, first.mu is not None, spot_of(rest)),))


class Layout:
    """The nodes of one tree level by level; row 0 is the anchor, row i + 1 node i. `spots`, `texts` and `paths` are by
    row.
    """

    def __init__(self, root: Spot):
        self.parents, self.tokens, self.sampled = [], [], []
        self.spots, self.texts, self.paths = [root], [()], [()]
        for row, spot in enumerate(self.spots):  # grows while it is read
            for child in spot.children:
                self.paths.append((*self.paths[row], len(self.tokens)))
                self.texts.append((*self.texts[row], child.token))
                self.parents.append(row - 1)
                self.tokens.append(child.token)
                self.sampled.append(child.sampled)
                self.spots.append(child.below)
        self._join_equal_tokens()

    def _join_equal_tokens(self) -> None:
        """`home` is the row that stands for each row: that of the first of equal deterministic tokens after one text.

        `children` are the nodes after each home in the order of judgement, `drew` whether a distribution was used
        there.
        """
        self.home = list(range(len(self.spots)))
        drawn, fixed = [[] for _ in self.spots], [{} for _ in self.spots]
        for node, parent in enumerate(self.parents):
            at = self.home[parent + 1]
            if self.sampled[node]:
                drawn[at].append(node)
            else:
                self.home[node + 1] = self.home[fixed[at].setdefault(self.tokens[node], node) + 1]
        self.children = [[*drawn[row], *fixed[row].values()] for row in range(len(self.spots))]
        self.drew = [
            any(self.spots[k].mu is not None for k, at in enumerate(self.home) if at == row)
            for row in range(len(self.spots))
        ]

    def post_order(self, row: int = 0) -> list[int]:
        return [below for node in self.children[row] for below in self.post_order(node + 1)] + [row]


@dataclass(frozen=True)
class Case:
    """One request of the enumeration: the committed text, what was drafted after it, and how probable that was."""

    context: Tokens
    drafted: Chain | Spot
    weight: float

    @cached_property
    def layout(self) -> Layout:
        return Layout(spot_of(self.drafted))


def cases_of(drafter: Drafter, contexts: Distribution) -> list[Case]:
    """Every draft the drafter can produce after every context."""
    return [
        Case(s, drafted, w * v)
        for s, w in contexts.items()
        for drafted, v in branches(lambda choice, s=s: drafter(choice, s))
    ]


def draft_of(drafts: Sequence[Chain | Spot], layouts: Sequence[Layout] | None = None) -> Draft:
    """The ragged draft of several chains or trees, in float64."""
    tokens, parents, offsets, sampled, distributions, distribution_of_row = [], [], [0], [], [], []
    for layout in layouts or [Layout(spot_of(drafted)) for drafted in drafts]:
        for spot in layout.spots:
            distributions += [] if spot.mu is None else [spot.mu]
            distribution_of_row.append(-1 if spot.mu is None else len(distributions) - 1)
        tokens += layout.tokens
        parents += layout.parents
        sampled += layout.sampled
        offsets.append(len(tokens))
    mass = (
        Mass(torch.tensor(np.array(distributions), dtype=torch.float64), tuple(distribution_of_row))
        if distributions
        else None
    )
    names = ("toy",) * len(drafts)
    return Draft(
        torch.tensor(tokens, dtype=torch.int64),
        tuple(parents),
        tuple(offsets),
        names,
        tuple(sampled) if mass else (),
        mass,
    )


def target_rows(cases: Sequence[Case], target: Tables) -> torch.Tensor:
    """The target's distribution at every row of the batch of cases."""
    return torch.tensor(
        np.array([target[c.context + text] for c in cases for text in c.layout.texts]), dtype=torch.float64
    )


def batch_of(cases: Sequence[Case], target: Tables) -> tuple[Draft, torch.Tensor]:
    return draft_of([c.drafted for c in cases], [c.layout for c in cases]), target_rows(cases, target)


@dataclass(frozen=True)
class Branch:
    """One thing that can happen to a case: the walk ends at `row`, then `next_token`, whose uniform lies in [low,
    high).
    """

    case: int
    row: int
    next_token: int
    weight: float
    low: float
    high: float


def rule_branches(rule: Rule, cases: Sequence[Case], target: Tables) -> tuple[list[Branch], np.ndarray]:
    """Every branch of the rule on every case, from `accept_probabilities` and `next_token_weights` only; and the
    former.
    """
    draft, probs = batch_of(cases, target)
    accept = rule.accept_probabilities(draft, probs).numpy()
    assert not np.isnan(accept).any()
    assert ((accept >= 0) & (accept <= 1)).all(), "an accept probability outside [0, 1]"
    distributions = rule.next_token_weights(draft, probs, range(draft.num_rows)).numpy()
    assert (distributions >= 0).all(), "negative weights are not a distribution"
    found = []
    for c, case in enumerate(cases):
        stops = stop_law(case.layout, accept[draft.offsets[c] : draft.offsets[c + 1]])
        for row in np.flatnonzero(stops > 1e-14):
            distribution = distributions[draft.anchor_row(c) + row]
            edges = np.concatenate([[0.0], np.cumsum(distribution)]) / distribution.sum()
            weight = case.weight * stops[row] / distribution.sum()
            found += [
                Branch(c, int(row), int(y), weight * distribution[y], edges[y], edges[y + 1])
                for y in np.flatnonzero(distribution)
            ]
    return found, accept


def stop_law(layout: Layout, accept: np.ndarray) -> np.ndarray:
    """Where the walk ends: the probability of every row, from the probability of every step."""
    reach = np.zeros(len(layout.spots))
    reach[0] = 1.0
    stops = np.zeros(len(layout.spots))
    for row, children in enumerate(layout.children):
        for node in children:
            reach[node + 1] = reach[row] * accept[node]
        stops[row] = reach[row] - sum(reach[node + 1] for node in children)
        assert stops[row] > -1e-13, "the children of a row are accepted more than always"
    assert all(accept[node] == 0 for node in range(len(accept)) if layout.home[node + 1] != node + 1), (
        "a draft token that was there already"
    )
    return stops


def emitted_law(rule: Rule, cases: Sequence[Case], target: Tables) -> Distribution:
    """Exact distribution of the text after one round: context, accepted tokens, next token."""
    distribution: Distribution = {}
    for branch in rule_branches(rule, cases, target)[0]:
        case = cases[branch.case]
        text = (*case.context, *case.layout.texts[branch.row], branch.next_token)
        distribution[text] = distribution.get(text, 0.0) + branch.weight
    return distribution


def check_decisions(rule: Rule, cases: Sequence[Case], target: Tables) -> int:
    """`verify` takes exactly the enumerated branch for uniforms just inside every threshold; returns how many were
    tried.
    """
    found, accept = rule_branches(rule, cases, target)
    starts = np.cumsum([0, *(len(case.layout.tokens) for case in cases)])
    trials, tests, draws = [], [], []
    for branch in found:
        width = branch.high - branch.low
        if width < 1e-8:  # narrower than the rounding of its edges
            continue
        own = accept[starts[branch.case] : starts[branch.case + 1]]
        layout = cases[branch.case].layout
        judge = judge_upwards if rule.name in ("block", "traversal") else judge_downwards
        inside = (branch.low + 1e-6 * width, branch.high - 1e-6 * width, *([0.0] if branch.low == 0 else []))
        for edge, unjudged in zip(inside, (0.0, LAST, 0.5), strict=False):
            numbers = judge(layout, own, branch.row, unjudged)
            if numbers is not None:
                trials.append(branch)
                draws.append(edge)
                tests += numbers
    repeated = [cases[branch.case] for branch in trials]
    uniforms = Uniforms(torch.tensor(tests, dtype=torch.float64), torch.tensor(draws, dtype=torch.float64))
    verdict = rule.verify(*batch_of(repeated, target), uniforms)
    for b, (branch, case) in enumerate(zip(trials, repeated, strict=True)):
        layout = case.layout
        assert verdict.paths[b] == layout.paths[branch.row], "another path"
        assert verdict.accepted[b] == layout.texts[branch.row], "other tokens"
        assert verdict.next_tokens[b] == branch.next_token, "another next token"
        expected = "residual" if layout.drew[branch.row] or layout.children[branch.row] else "bonus"
        assert verdict.next_kinds[b] == expected, f"next kind is {verdict.next_kinds[b]}, not {expected}"
        for known, value in zip(
            verdict.probabilities[b], accept[starts[branch.case] : starts[branch.case + 1]], strict=True
        ):
            assert known is None or abs(known - value) < EXACT, "the verdict reports another probability"
    return len(trials)


LAST = 1 - 2.0**-53  # the largest uniform


def _beside(accepted: float, left: float, above: bool) -> float | None:
    """A uniform just above or just below the threshold of a test that passes with `accepted` of what was `left` before
    it.

    None where rounding blurs the threshold: both numbers are known to about 1e-16.
    """
    if left < 1e-6 or 0 < accepted < 1e-9:
        return None
    threshold = min(max(accepted, 0.0) / left, 1.0)
    gap = 1e-15 / left + 1e-12 * threshold if threshold > 0 else 0.0
    return min(threshold + gap, LAST) if above else threshold - gap


def judge_downwards(layout: Layout, accept: np.ndarray, stop: int, unjudged: float) -> list[float] | None:
    """Uniforms of a top-down walk that ends at `stop`: every node in turn is tested against what its elder siblings
    left.
    """
    numbers: list[float | None] = [unjudged] * len(accept)
    on_path = {layout.home[row] for row in (0, *(node + 1 for node in layout.paths[stop]))}
    for row in on_path:
        left = 1.0
        for node in layout.children[row]:
            chosen = node + 1 in on_path
            numbers[node] = _beside(accept[node], left, above=not chosen)
            if chosen:
                break
            left -= accept[node]
    return None if None in numbers else numbers


def judge_upwards(layout: Layout, accept: np.ndarray, stop: int, unjudged: float) -> list[float] | None:
    """Uniforms of a bottom-up walk that ends at `stop`: every row before it in post-order is refused, it is not."""
    numbers: list[float | None] = [unjudged] * len(accept)
    stops, left = stop_law(layout, accept), 1.0
    for row in layout.post_order():
        if row == 0:
            break
        numbers[row - 1] = _beside(stops[row], left, above=row != stop)
        if row == stop:
            break
        left -= stops[row]
    return None if None in numbers else numbers


def complete(distribution: Distribution, target: Tables, length: int) -> Distribution:
    """Continue every text with the target itself up to `length` tokens (rounds are independent given the text)."""
    out: Distribution = {}
    todo = list(distribution.items())
    while todo:
        text, w = todo.pop()
        if len(text) >= length:
            out[text[:length]] = out.get(text[:length], 0.0) + w
        else:
            todo += [((*text, x), w * target[text][x]) for x in range(len(target[()])) if target[text][x] > 0]
    return out


def chained(rule: Rule, drafters: Sequence[Drafter], target: Tables, length: int) -> Distribution:
    """Distribution of the first `length` tokens when round r is drafted by `drafters[r]` and the target finishes
    alone.
    """
    distribution: Distribution = {(): 1.0}
    for drafter in drafters:
        done = {s: w for s, w in distribution.items() if len(s) >= length}
        distribution = emitted_law(
            rule, cases_of(drafter, {s: w for s, w in distribution.items() if len(s) < length}), target
        )
        for s, w in done.items():
            distribution[s] = distribution.get(s, 0.0) + w
    return complete(distribution, target, length)


class RandomTables(dict):
    """A random distribution for every context, made when it is asked for; `holes` is the chance that a token has
    probability 0.
    """

    def __init__(self, vocab: int, seed: int, concentration: float = 0.7, holes: float = 0.0):
        super().__init__()
        self.vocab, self.seed, self.concentration, self.holes = vocab, seed, concentration, holes

    def __missing__(self, context: Tokens) -> np.ndarray:
        rng = np.random.default_rng([self.seed, len(context), *context])
        distribution = rng.dirichlet(np.full(self.vocab, self.concentration))
        distribution *= rng.random(self.vocab) >= self.holes
        self[context] = (
            distribution / distribution.sum()
            if distribution.sum() > 0
            else point(self.vocab, int(rng.integers(self.vocab)))
        )
        return self[context]


def joint(target: Tables, length: int) -> Distribution:
    """Exact distribution of the first `length` tokens of the target."""
    texts = itertools.product(range(len(target[()])), repeat=length)
    return {s: float(np.prod([target[s[:i]][s[i]] for i in range(length)])) for s in texts}


def max_error(distribution: Distribution, other: Distribution) -> float:
    """Largest difference of two distributions; not blind to NaN."""
    return float(np.max([abs(distribution.get(s, 0.0) - other.get(s, 0.0)) for s in set(distribution) | set(other)]))


def point(vocab: int, token: int) -> np.ndarray:
    distribution = np.zeros(vocab)
    distribution[token] = 1.0
    return distribution
