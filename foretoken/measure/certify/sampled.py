"""Sampled answers: one distribution on both sides, and what a seed does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foretoken.backend.requesting import ApiChoice, ApiRequest
from foretoken.engine.shadow.tails import noncentrality
from foretoken.measure.certify.asking import (
    Asker,
    CertifySession,
    NotAskedError,
    SideFailedError,
    attempt,
    own_rules,
    unmade,
)
from foretoken.measure.certify.greedy import first
from foretoken.measure.checks import Check
from foretoken.measure.stats import Array
from foretoken.measure.workload import Prompt

POWER = 0.99
_EXCEEDED = 20  # exchanges that lie further apart, after which there is no danger
_RESOLUTION = 3  # exchanges for each one that the level allows to lie further apart
_DRAWN_AT_ONCE = 500
SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.6},
)
_TESTS = 2  # of each setting: how answers begin, and which token follows which
_NUM_PROMPTS, _NUM_BINS = 2, 8  # bins of each prompt
_SAMPLE_TOKENS = 8
_AT_ONCE, _FEWER_AT_ONCE = 16, 4  # answers of one request; llama.cpp gives as many as it has slots, 4 unless told
_APART = 1 << 30  # seeds of A and of B; engines keep the lowest 32 bits
_NUM_AGAIN, _NUM_SEEDS = 4, 8
_BEGIN, _FOLLOW = "distribution: how answers begin", "distribution: which token follows which"
_EQUAL, _OTHER = "equal seeds, equal answers", "other seeds, other answers"


@dataclass(frozen=True)
class TwoSampleTest:
    """The test fails where `p_value` is below `level`.

    `num_answers` are those of one side. `smallest` is the total variation between the two sides' bins that it misses
    with probability 0.01 at most; infinite where there is nothing to tell.
    """

    num_answers: int
    num_bins: int
    statistic: float
    p_value: float
    level: float
    smallest: float

    @property
    def passed(self) -> bool:
        """Whether the answers are consistent with one distribution."""
        return self.p_value >= self.level


def beginnings(texts: Sequence[str], num_bins: int) -> NDArray[np.int64]:
    """The bin of each text [n], by how it begins: ranges of about as many texts each in the order of the alphabet;
    equal texts are in one bin.
    """
    counts = Counter(texts)
    place: dict[str, int] = {}
    number, filled = 0, 0
    for text in sorted(counts):
        place[text] = number
        filled += counts[text]
        if filled * num_bins >= len(texts) * (number + 1):
            number += 1
    return np.array([place[text] for text in texts], dtype=np.int64)


def counted(answers: Sequence[Sequence[Hashable]], num_bins: int) -> Array:
    """How often each answer holds the commonest things [n, bins], all others in the last bin."""
    common = Counter(thing for answer in answers for thing in answer).most_common(num_bins - 1)
    place = {thing: number for number, (thing, _) in enumerate(common)}
    found = np.zeros((len(answers), len(place) + 1))
    for row, answer in zip(found, answers, strict=True):
        for thing in answer:
            row[place.get(thing, len(place))] += 1
    return found


def two_sample_test(strata: Sequence[tuple[Array, Array]], level: float) -> TwoSampleTest:
    """Test the counts of A's and B's answers, [n, bins] each, in each stratum; answers are exchanged within one only.

    The same counts give the same p-value: the exchanges are drawn from a fixed seed.

    If both sides have one distribution, an answer might as well have come from the other side, so the labels can be
    exchanged: the test compares how far the counts of the two sides lie apart with how far they do after random
    exchanges (a permutation test; Lehmann and Romano, Testing Statistical Hypotheses, 2005, section 15.2). Whole
    answers are exchanged, so tokens of one answer may depend on each other, and bins may be made from all answers
    together. Exchanges stop early where the hypothesis is plainly in no danger (Besag and Clifford, Sequential Monte
    Carlo p-values, 1991): the p-value is valid for any number of answers.
    """
    assert all(a.shape == b.shape for a, b in strata)
    pooled = [np.concatenate([a, b]) for a, b in strata]
    totals = np.concatenate([counts.sum(axis=0) for counts in pooled])
    weights = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    observed = float(np.concatenate([(a - b).sum(axis=0) for a, b in strata]) ** 2 @ weights)
    num_answers, num_counted = sum(len(a) for a, _ in strata), totals.sum() / 2
    num_bins = int((totals > 0).sum())
    if num_bins <= len(strata):
        return TwoSampleTest(num_answers, num_bins, observed, 1.0, level, math.inf)
    generator = np.random.default_rng(num_answers)
    most = math.ceil(_RESOLUTION / level)
    drawn: list[Array] = []
    num_drawn, num_above = 0, 0
    p_value = None
    while p_value is None:
        values = _exchanged(pooled, weights, generator, min(_DRAWN_AT_ONCE, most - num_drawn))
        drawn.append(values)
        above = np.cumsum(values >= observed * (1 - 1e-9)) + num_above
        if above[-1] >= _EXCEEDED:
            p_value = _EXCEEDED / (num_drawn + 1 + int(np.argmax(above >= _EXCEEDED)))
        num_drawn, num_above = num_drawn + len(values), int(above[-1])
        if p_value is None and num_drawn >= most:
            p_value = (1 + num_above) / (1 + num_drawn)
    smallest = _smallest(np.concatenate(drawn), float(num_counted), level)
    return TwoSampleTest(num_answers, num_bins, observed, p_value, level, smallest)


def _exchanged(pooled: Sequence[Array], weights: Array, generator: np.random.Generator, count: int) -> Array:
    """The statistic [count] after random exchanges within each stratum."""
    apart = []
    for counts in pooled:
        signs = np.tile(np.repeat([1.0, -1.0], len(counts) // 2), (count, 1))
        apart.append(generator.permuted(signs, axis=1) @ counts)
    found: Array = np.concatenate(apart, axis=1) ** 2 @ weights
    return found


def _smallest(drawn: Array, num_counted: float, level: float) -> float:
    """The total variation that the test finds with probability `POWER`, `num_counted` things counted on each side.

    The statistic is taken for a multiple of chi-square with the moments that it has under exchanges.
    """
    mean, variance = float(drawn.mean()), float(drawn.var())
    if mean <= 0 or variance <= 0:
        return math.inf
    scale, freedom = variance / (2 * mean), max(1, round(2 * mean**2 / variance))
    return math.sqrt(scale * noncentrality(freedom, level, POWER) / (2 * num_counted))


def level_of(alpha: float) -> float:
    """The level of each test, so that a correct B fails any of them with probability `alpha` at most."""
    return alpha / (_TESTS * len(SETTINGS))


def num_answers(effect: float, alpha: float) -> int:
    """Answers of each side at one setting, whole requests for each prompt, that find a total variation of `effect`."""
    # With n answers a side the statistic's noncentrality is at least 2 n effect^2 (by Cauchy-Schwarz).
    needed = noncentrality(_NUM_PROMPTS * _NUM_BINS - 1, level_of(alpha), POWER)
    wanted = math.ceil(needed / (2 * effect**2))
    each = -(-wanted // (_NUM_PROMPTS * _AT_ONCE))
    return each * _NUM_PROMPTS * _AT_ONCE


def check_distribution(session: CertifySession) -> Iterator[Check]:
    """Sampled answers of many seeds, other ones for A than for B, come from one distribution."""
    count, prompts, at_once = num_answers(session.options.effect, session.options.alpha), None, _AT_ONCE
    for setting in SETTINGS:
        where = ", ".join(f"{name} {value:g}" for name, value in setting.items())
        try:
            if prompts is None:
                at_once = _at_once(session)
                prompts = _telling(session, at_once)
            own = count // len(prompts)
            pairs = [_drawn(session, prompt, setting, place, own, at_once) for place, prompt in enumerate(prompts)]
        except (NotAskedError, SideFailedError) as error:
            yield from (unmade(name, where, error) for name in (_BEGIN, _FOLLOW))
            continue
        level = level_of(session.options.alpha)
        yield _judged(_BEGIN, where, two_sample_test([_beginnings(*pair) for pair in pairs], level))
        yield _judged(_FOLLOW, where, two_sample_test([_following(*pair) for pair in pairs], level))


def _judged(name: str, where: str, test: TwoSampleTest) -> Check:
    if test.smallest >= 1:
        return Check(name, where, "undecided", test.num_answers, "too few answers that differ", "", "nothing")
    found = f"p = {test.p_value:.2g} in {test.num_bins} bins"
    demanded, sees = f"p >= {test.level:.2g}", f"a total variation of {test.smallest:.2g}"
    return Check(name, where, "pass" if test.passed else "fail", test.num_answers, found, demanded, sees)


def _at_once(session: CertifySession) -> int:
    """How many answers one request brings: several where both sides take `n`."""
    for count in (_AT_ONCE, _FEWER_AT_ONCE):
        request = _requests(session, session.prompts[0], SETTINGS[0], session.options.seed, 1, count)
        replies = [side.ask(request)[0] for side in (session.a, session.b)]
        if all(not reply.refused and len(reply.choices) == count for reply in replies):
            return count
    return 1


def _requests(
    session: CertifySession, prompt: Prompt, setting: dict[str, float], seed: int, count: int, at_once: int
) -> list[ApiRequest]:
    """Requests for `at_once` answers each, which engines draw under the next seeds: those are left out."""
    more = {} if at_once == 1 else {"n": at_once}
    return [
        session.request(prompt, max_tokens=_SAMPLE_TOKENS, seed=seed + number * at_once, **setting, **more)
        for number in range(count)
    ]


def _answers(session: CertifySession, side: Asker, requests: Sequence[ApiRequest]) -> list[ApiChoice]:
    return [choice for reply in session.answers(side, requests) for choice in reply.choices]


def _telling(session: CertifySession, at_once: int) -> list[Prompt]:
    """The prompts whose answers tell most: A begins them in several ways, but not in too many to be counted."""
    found = []
    for place, prompt in enumerate(session.prompts):
        requests = _requests(session, prompt, SETTINGS[0], session.options.seed, _AT_ONCE // at_once, at_once)
        answers = _answers(session, session.a, requests)
        ways = len({(one.pieces or (one.text[:4],))[0] for one in answers})
        found.append((ways == 1, ways, place))
    return [session.prompts[place] for _, _, place in sorted(found)[:_NUM_PROMPTS]]


def _drawn(
    session: CertifySession, prompt: Prompt, setting: dict[str, float], place: int, count: int, at_once: int
) -> tuple[list[ApiChoice], list[ApiChoice]]:
    """As many answers of A as of B, under seeds of their own: engines draw the same numbers for a seed whatever the
    prompt, and the tests take the prompts' answers as independent.
    """
    num_requests = -(-count // at_once)
    begin = session.options.seed + 1000 + place * num_requests * at_once
    a = _answers(session, session.a, _requests(session, prompt, setting, begin, num_requests, at_once))
    b = _answers(session, session.b, _requests(session, prompt, setting, begin + _APART, num_requests, at_once))
    return a, b


def _beginnings(a: Sequence[ApiChoice], b: Sequence[ApiChoice]) -> tuple[Array, Array]:
    bins = beginnings([one.text for one in (*a, *b)], _NUM_BINS)
    rows: Array = np.eye(int(bins.max()) + 1)[bins]
    return rows[: len(a)], rows[len(a) :]


def _following(a: Sequence[ApiChoice], b: Sequence[ApiChoice]) -> tuple[Array, Array]:
    """Pairs of neighbouring tokens, or of characters where tokens are not told: a draft begins behind the first."""
    units = [one.pieces or tuple(one.text) for one in (*a, *b)]
    rows = counted([list(pairwise(unit)) for unit in units], 2 * _NUM_BINS)
    return rows[: len(a)], rows[len(a) :]


def check_seeds(session: CertifySession) -> Iterator[Check]:
    """A seed gives its answer again, where A's does, and other seeds other ones."""
    yield attempt(_EQUAL, "temperature 1", lambda: _equal(session))
    yield attempt(_OTHER, "temperature 1", lambda: _other(session))


def _equal(session: CertifySession) -> Check:
    prompts = session.prompts[:_NUM_AGAIN]
    requests = [session.request(one, temperature=1.0, seed=session.options.seed + i) for i, one in enumerate(prompts)]
    problems = []
    for side in (session.a, session.b):
        runs = [first(session.answers(side, requests, turn)) for turn in range(2)]
        pairs = zip(*runs, strict=True)
        problems.append(["" if one.text == two.text else "another answer to the same seed" for one, two in pairs])
    return own_rules(_EQUAL, "temperature 1", (problems[0], problems[1]), 0, "all equal")


def _other(session: CertifySession) -> Check:
    """A correct B fails where eight answers that A gives in four ways or more come out one and the same."""
    seeds = range(session.options.seed, session.options.seed + _NUM_SEEDS)
    asked = [[session.request(one, temperature=1.0, seed=n) for n in seeds] for one in session.prompts[:_NUM_AGAIN]]
    ways = []
    for side in (session.a, session.b):
        replies = [first(session.answers(side, own)) for own in asked]
        ways.append([len({answer.text for answer in own}) for own in replies])
    told = [(a, b) for a, b in zip(*ways, strict=True) if a > _NUM_SEEDS // 2]
    if not told:
        return Check(_OTHER, "temperature 1", "undecided", found="A gives too few different answers itself")
    problems = ["" if b > 1 else f"{_NUM_SEEDS} seeds give one answer" for _, b in told]
    return own_rules(_OTHER, "temperature 1", ([""] * len(told), problems), 0, f"not all {_NUM_SEEDS} equal")
