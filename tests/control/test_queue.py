"""Admission, order of service and the rows of a step, on plain numbers: by hand, and on thousands of random steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from foretoken.control.queue import (
    Rows,
    SchedulerConfig,
    chunks,
    fixed_rows,
    growth_tokens,
    may_join,
    reserve_tokens,
    urgency,
    within_budget,
    within_cache,
)
from foretoken.errors import ConfigError


def blocks_of(size: int) -> Callable[[int], int]:
    """Footprints of a cache in blocks."""
    return lambda tokens: -(-tokens // size) * size


def granted(rows: list[Rows]) -> list[tuple[int, int, int]]:
    """Committed tokens, draft tokens and probes of each."""
    return [(own.num_pending, own.num_draft, own.num_probe) for own in rows]


def test_order_of_service() -> None:
    """Priority, then deadline, then arrival; waiting for `aging_s` counts as much as a priority."""

    def key(
        number: int, arrived_s: float = 0.0, priority: int = 0, deadline_s: float | None = None
    ) -> tuple[int, float, int]:
        return urgency(number, arrived_s, priority, deadline_s, aging_s=10.0)

    assert key(5, priority=-1) < key(0, priority=0) < key(1, priority=0) < key(0, priority=1)
    assert key(9, 1.0, deadline_s=3.0) < key(8, 0.0, deadline_s=9.0) < key(0)  # the earlier deadline, then none
    assert key(9, 2.0, deadline_s=5.0) < key(8, 0.0, deadline_s=8.0)  # counted from the arrival
    old = key(0, 0.0, priority=3)
    assert key(1, 29.9) < old  # came within the three periods that its priority is worth
    assert old < key(2, 30.0)  # nobody who comes later passes it
    assert old < key(3, 45.0, deadline_s=0.1)


def test_who_may_join() -> None:
    config = SchedulerConfig(cache_reserve=0.25)
    assert reserve_tokens(config, 100) == 25
    assert reserve_tokens(config, math.inf) == 0
    assert may_join(40, 10, 25, 75)
    assert not may_join(40, 10, 25, 74)
    assert may_join(10**9, 0, 0, math.inf)


@pytest.mark.parametrize(
    ("missing", "budget", "expected"),
    [
        ([], 10, []),
        ([3], 10, [3]),
        ([100], 10, [10]),
        ([4, 4], 10, [4, 4]),
        ([100, 2], 10, [8, 2]),  # a short one goes along
        ([100, 3], 10, [10, 0]),  # it would not end within a quarter
        ([100, 2, 2, 2], 16, [12, 2, 2, 0]),  # many short ones take a quarter
        ([5, 100, 1], 16, [5, 10, 1]),  # what the first leaves goes on in order
        ([100, 100], 3, [3, 0]),
    ],
)
def test_chunks(missing: list[int], budget: int, expected: list[int]) -> None:
    assert chunks(missing, budget) == expected


def test_the_budget_of_a_step() -> None:
    """Those who decode first, then draft tokens, then prompts with the rest, which is a quarter at least."""
    decode, prompt = Rows(50, 1, True, num_draft=6), Rows(0, 100, False)
    config = SchedulerConfig(4, 64, max_step_tokens=22)
    assert granted(within_budget([decode, decode, prompt], config)) == [(1, 6, 0), (1, 6, 0), (8, 0, 0)]
    assert granted(within_budget([decode, decode, decode, prompt], config)) == [
        (1, 6, 0),
        (1, 6, 0),
        (1, 3, 0),
        (4, 0, 0),
    ]
    assert granted(within_budget([decode, decode, decode], config)) == [(1, 6, 0), (1, 6, 0), (1, 6, 0)]
    assert granted(within_budget([decode, Rows(0, 2, False)], config)) == [(1, 6, 0), (2, 0, 0)]
    assert granted(within_budget([prompt], config)) == [(22, 0, 0)]
    assert granted(within_budget([decode, decode, prompt], SchedulerConfig(4, 64))) == [
        (1, 6, 0),
        (1, 6, 0),
        (64, 0, 0),
    ]
    probing = Rows(50, 1, True, num_draft=3, num_probe=9)
    assert granted(within_budget([probing, probing], SchedulerConfig(2, 64, max_step_tokens=14))) == [
        (1, 3, 9),
        (1, 0, 0),
    ]


def test_what_a_seed_draws_with_is_no_neighbours_business() -> None:
    """`fixed` draft tokens: the same number alone and in any company, never so many that the step grows too large."""
    config = SchedulerConfig(4, 64, max_step_tokens=36)
    own, other, prompt = (
        Rows(9, 1, True, num_draft=20, is_fixed=True),
        Rows(9, 1, True, num_draft=20),
        Rows(0, 500, False),
    )
    assert fixed_rows(config) == 6
    for company in ([], [other] * 3, [own] * 3, [prompt] * 3, [own, other, prompt]):
        for place in range(len(company) + 1):
            grants = within_budget([*company[:place], own, *company[place:]], config)
            assert granted(grants[place : place + 1]) == [(1, 6, 0)]
            assert sum(grant.num_rows for grant in grants) <= 36


def test_a_full_cache() -> None:
    """Draft tokens go first, the latest ones; then what is read, latest first; then somebody has to give way."""
    size = blocks_of(4)

    def fitting(rows: list[Rows], free_tokens: int) -> list[tuple[int, int, int]] | None:
        found = within_cache(rows, free_tokens, size)
        return None if found is None else granted(found)

    first, second, reader = Rows(7, 1, True, 4), Rows(10, 1, True, 4), Rows(4, 12, False)
    rows = [first, second, reader]
    assert growth_tokens(rows, size) == 4 + 4 + 12
    assert within_cache(rows, 20, size) == rows
    assert fitting(rows, 16) == [(1, 4, 0), (1, 1, 0), (12, 0, 0)]  # one draft token costs no block
    assert fitting(rows, 12) == [(1, 0, 0), (1, 1, 0), (12, 0, 0)]
    assert fitting(rows, 8) == [(1, 0, 0), (1, 1, 0), (8, 0, 0)]
    assert fitting(rows, 0) == [(1, 0, 0), (1, 1, 0), (0, 0, 0)]
    assert fitting([Rows(8, 1, True), second._replace(num_draft=0), reader], 0) is None
    alone = first._replace(num_draft=0)
    assert fitting([reader, alone], 4) == [(4, 0, 0), (1, 0, 0)]
    assert fitting([reader, alone], 0) is None  # the most urgent reads on; the other gives way
    fixed = Rows(7, 1, True, 4, is_fixed=True)
    assert fitting([first, fixed], 4) == [(1, 0, 0), (1, 4, 0)]
    assert fitting([fixed, fixed], 4) is None


@pytest.mark.parametrize("size", [1, 4, 32])
def test_any_step_keeps_its_limits(size: int) -> None:
    """Random requests: rows within the budget, growth within the cache, nobody gets more than asked, the most urgent
    always gets on.
    """
    rng, footprint = random.Random(size), blocks_of(size)
    for _ in range(4000):
        most = rng.randint(1, 8)
        config = SchedulerConfig(
            most, rng.randint(1, 60), max_step_tokens=rng.choice((None, rng.randint(most + 1, 90)))
        )
        asks = []
        for _ in range(rng.randint(1, most)):
            held, fixed = rng.randint(0, 70), rng.random() < 0.3
            decode = Rows(held, 1, True, rng.choice((0, 1, 5, 30)), rng.choice((0, 0, 7)), fixed)
            asks.append(decode if rng.random() < 0.6 else Rows(held, rng.randint(1, 99), False))
        wanted = within_budget(asks, config)
        rows, prompts = (
            sum(g.num_rows for g in wanted),
            sum(g.num_pending for g, a in zip(wanted, asks, strict=True) if not a.decodes),
        )
        assert config.max_step_tokens is None or rows <= config.max_step_tokens
        assert prompts <= config.max_prompt_tokens
        assert not any(not a.decodes for a in asks) or prompts > 0
        free = rng.randint(0, 20) * size
        while (grants := within_cache(wanted, free, footprint)) is None:
            asks, wanted = asks[:-1], within_budget(asks[:-1], config)
            free += size
        for ask, grant, had in zip(asks, grants, wanted, strict=True):
            assert grant.num_pending <= had.num_pending <= ask.num_pending
            assert grant.num_draft <= had.num_draft <= ask.num_draft
            assert grant.num_probe <= had.num_probe <= ask.num_probe
            assert grant.num_pending == 1 or not ask.decodes
            assert not ask.is_fixed or grant == had
        assert grants[0].num_pending > 0
        assert growth_tokens(grants, footprint) <= free or len(asks) == 1


def test_more_room_never_means_fewer_rows() -> None:
    rng, footprint = random.Random(1), blocks_of(8)
    for _ in range(300):
        asks = [Rows(rng.randint(0, 40), 1, True, rng.randint(0, 9)) for _ in range(4)]
        wanted = within_budget(asks, SchedulerConfig(4))
        found = [within_cache(wanted, 8 * room, footprint) for room in range(12)]
        rows = [-1 if grants is None else sum(grant.num_rows for grant in grants) for grants in found]
        assert all(less <= more for less, more in pairwise(rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"max_batch_size": 8, "max_step_tokens": 8}, "max_step_tokens=8: must be more than max_batch_size, 8"),
        ({"cache_reserve": 1.5}, "cache_reserve=1.5"),
        ({"aging_s": 0.0}, "aging_s=0.0"),
        ({"aging_s": math.nan}, "aging_s=nan"),
    ],
)
def test_limits_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)
