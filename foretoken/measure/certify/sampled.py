"""Sampled answers: one distribution on both sides, and what a seed does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from foretoken.backend.requesting import ApiChoice, ApiRequest
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
from foretoken.measure.two_sample import TwoSampleTest, answers_for, beginnings, counted, two_sample_test
from foretoken.measure.workload import Prompt

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


def level_of(alpha: float) -> float:
    """The level of each test, so that a correct B fails any of them with probability `alpha` at most."""
    return alpha / (_TESTS * len(SETTINGS))


def num_answers(effect: float, alpha: float) -> int:
    """Answers of each side at one setting, whole requests for each prompt."""
    wanted = answers_for(effect, _NUM_PROMPTS * _NUM_BINS, level_of(alpha))
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


# ---- seeds


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
    ways = []
    for side in (session.a, session.b):
        replies = [
            first(session.answers(side, [session.request(one, temperature=1.0, seed=seed) for seed in seeds]))
            for one in session.prompts[:_NUM_AGAIN]
        ]
        ways.append([len({answer.text for answer in own}) for own in replies])
    told = [(a, b) for a, b in zip(*ways, strict=True) if a > _NUM_SEEDS // 2]
    if not told:
        return Check(_OTHER, "temperature 1", "undecided", found="A gives too few different answers itself")
    problems = ["" if b > 1 else f"{_NUM_SEEDS} seeds give one answer" for _, b in told]
    return own_rules(_OTHER, "temperature 1", ([""] * len(told), problems), 0, f"not all {_NUM_SEEDS} equal")
