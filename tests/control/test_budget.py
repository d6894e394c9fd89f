"""Budgets against brute force over every combination, and rules that must hold for any costs."""

from __future__ import annotations

import itertools
import random

import pytest

from foretoken.control.budget import Allocation, DraftSeconds, StepSeconds, allocate
from foretoken.control.candidates import Candidate


def choose(
    candidates: list[list[Candidate]], step_s: StepSeconds, draft_s: DraftSeconds, extra_s: float = 0.0
) -> Allocation:
    """The allocation for requests with these candidates, a long-run rate not known."""
    return allocate(candidates, [1.0] * len(candidates), step_s, draft_s, extra_s=extra_s)


def tokens_per_s(found: Allocation) -> float:
    return found.tokens / found.seconds


def goodput(options: list[Candidate], budgets: tuple[int, ...], step_s, draft_s) -> float:
    """Expected tokens per second of given budgets, term by term."""
    rows = len(options) + sum(sum(o.drafted[:n]) for o, n in zip(options, budgets, strict=True))
    tokens = len(options) + sum(sum(o.emitted[:n]) for o, n in zip(options, budgets, strict=True))
    longest: dict[object, int] = {}
    for option, n in zip(options, budgets, strict=True):
        if n:
            longest[option.drafter] = max(longest.get(option.drafter, 0), n)
    return tokens / (step_s(rows) + sum(draft_s(drafter, n) for drafter, n in longest.items()))


def chain(drafter: str, chance: float, places: int, **more: float) -> Candidate:
    """A chain whose every draft token stands with `chance` once the one before it stood."""
    return Candidate(drafter, (1.0,) * places, tuple(chance ** (i + 1) for i in range(places)), **more)


def best_by_brute_force(options: list[Candidate], step_s, draft_s) -> float:
    spaces = [range(o.at_least, len(o.emitted) + 1) for o in options]
    return max(goodput(options, budgets, step_s, draft_s) for budgets in itertools.product(*spaces))


def test_the_known_optimum_of_one_chain() -> None:
    """METHODS: acceptance 0.8, a draft step of 5 % of a target step, rows free: 8 draft tokens, 3.09 times plain."""
    choice = choose([[chain("d", 0.8, 16)]], lambda _: 1.0, lambda _, n: 0.05 * n)
    assert choice.budgets == (8,)
    assert tokens_per_s(choice) == pytest.approx(3.09, abs=0.005)


def test_what_the_host_takes_for_draft_tokens_is_paid_by_all_of_them() -> None:
    """Each of four gains 0.04 of a step beyond its row; together they pay 0.1 of one, and not 0.2; alone none does."""
    requests = [[chain("d", 0.9, 1)] for _ in range(4)]

    def made(extra_s: float, candidates: list[list[Candidate]]) -> tuple[int, ...]:
        return choose(candidates, lambda rows: 1.0 + 0.17 * (rows - 4), lambda _, n: 0.0, extra_s).budgets

    assert made(0.0, requests) == (1, 1, 1, 1)
    assert made(0.1, requests) == (1, 1, 1, 1)
    assert made(0.25, requests) == (0, 0, 0, 0)
    assert made(0.1, [requests[0], [], [], []]) == (0, 0, 0, 0)
    assert made(0.0, [requests[0], [], [], []]) == (1, 0, 0, 0)
    several = [[chain("d", 0.9, 1), chain("e", 0.89, 1)] for _ in range(4)]  # a choice that none would make alone
    assert made(0.1, several) == (1, 1, 1, 1)


@pytest.mark.parametrize("seed", range(30))
def test_as_good_as_brute_force(seed: int) -> None:
    """With rows that cost a line, budgets are the best there are; drafters with a price of their own included."""
    rng = random.Random(seed)
    options = [chain(rng.choice("ab"), rng.uniform(0.1, 0.95), rng.randint(0, 4)) for _ in range(rng.randint(1, 4))]
    slope, price = rng.uniform(0.0, 0.3), {d: rng.uniform(0.0, 0.2) for d in "ab"}
    step_s, draft_s = (lambda rows: 1.0 + slope * rows), (lambda drafter, n: price[drafter] * n)
    choice = choose([[option] for option in options], step_s, draft_s)
    assert tokens_per_s(choice) == pytest.approx(goodput(options, choice.budgets, step_s, draft_s))
    best = best_by_brute_force(options, step_s, draft_s)
    # A sequential drafter's price hangs on its longest draft, which the order of admission does not see: a few percent
    # at most.
    assert tokens_per_s(choice) >= (1 if all(p < 1e-9 for p in price.values()) else 0.96) * best - 1e-12
    assert tokens_per_s(choice) >= goodput(options, (0,) * len(options), step_s, draft_s) - 1e-12  # zero is a candidate


@pytest.mark.parametrize("seed", range(30))
def test_exact_where_drafting_is_free(seed: int) -> None:
    """Lookups: the admission in order of worth is optimal for any straight cost of rows."""
    rng = random.Random(seed)
    options = [chain("a", rng.uniform(0.05, 0.95), rng.randint(0, 4)) for _ in range(4)]
    slope = rng.uniform(0.0, 0.5)
    choice = choose([[option] for option in options], lambda rows: 1.0 + slope * rows, lambda *_: 0.0)
    assert tokens_per_s(choice) == pytest.approx(
        best_by_brute_force(options, lambda rows: 1.0 + slope * rows, lambda *_: 0.0)
    )


def test_a_drafter_that_gains_less_than_it_takes_is_left_out() -> None:
    """Each draft token alone would gain; all together do not gain what the drafter takes to start."""
    expensive = choose([[chain("d", 0.5, 4)]], lambda _: 1.0, lambda *_: 2.0)
    assert expensive == Allocation((None,), (0,), 1.0, 1.0)
    both = choose(
        [[chain("expensive", 0.5, 4)], [chain("free", 0.5, 4)]],
        lambda _: 1.0,
        lambda d, _: 2.0 if d == "expensive" else 0.0,
    )
    assert both.budgets == (0, 4)


def test_what_the_caller_set_stands() -> None:
    choice = choose([[chain("d", 0.01, 5, at_least=5)], [chain("d", 0.9, 5)]], lambda rows: rows, lambda *_: 1.0)
    assert choice.budgets[0] == 5
    assert choice.seconds == pytest.approx(2 + 5 + choice.budgets[1] + 1.0)


def test_load_takes_draft_tokens_away() -> None:
    """When each row costs its full price nothing is drafted; in a small batch much is."""

    def step_s(rows: float) -> float:
        return max(1.0, rows / 12)

    alone = choose([[chain("d", 0.7, 16)]], step_s, lambda *_: 0.0)
    together = choose([[chain("d", 0.7, 16)]] * 16, step_s, lambda *_: 0.0)
    assert alone.budgets[0] >= 8
    assert max(together.budgets) == 0
    assert choose([], step_s, lambda *_: 0.0).budgets == ()


def test_equal_drafters_are_told_apart_by_their_order() -> None:
    """A drafter's name hashes to another number in every process; who drafts must not hang on it."""

    class Named(str):
        """Equal as its text, with a hash that the test sets."""

        number = 0

        def __hash__(self) -> int:
            return self.number

    found = []
    for numbers in ((1, 2), (2, 1)):
        names = [Named("a"), Named("b")]
        for name, number in zip(names, numbers, strict=True):
            name.number = number
        one, other = (
            chain(name, 0.6, 3) for name in names
        )  # each request begins with another one; to pay for one of them is best
        found.append(choose([[one, other], [other, one]], lambda _: 1.0, lambda *_: 0.3))
    assert found[0] == found[1]
    assert found[0].picks in ((0, 1), (1, 0))


def test_draft_tokens_are_valued_at_the_long_run_rate() -> None:
    """A step that is better than the others takes fewer draft tokens than by its own ratio of tokens and seconds."""
    own = [[chain("d", 0.8, 16)]]
    alone, late = (allocate(own, [1.0], lambda _: 1.0, lambda _, n: 0.05 * n, rate) for rate in (0.0, 6.0))
    # The k-th draft token adds 0.8^k tokens and 0.05 s: worth 0.3 tokens at 6 tokens a second.
    assert alone.budgets == (8,)
    assert late.budgets == (5,)


def test_a_request_that_counts_more_is_given_more() -> None:
    def step_s(rows: float) -> float:
        return max(1.0, rows / 8)

    found = allocate([[chain("d", 0.7, 8)]] * 3, [3.0, 1.0, 1.0], step_s, lambda *_: 0.0)
    assert found.budgets[0] > max(found.budgets[1:])


def test_each_request_takes_the_candidate_that_pays_best_for_it() -> None:
    own = [[chain("a", a, 8), chain("b", b, 8)] for a, b in ((0.9, 0.3), (0.2, 0.8), (0.01, 0.01))]
    assert choose(own, lambda rows: 1.0 + 0.05 * rows, lambda *_: 0.01).picks == (0, 1, None)


def test_what_a_new_drafter_reads_first_is_counted() -> None:
    cheap, late = ([chain("d", 0.6, 4, entry_s=entry_s)] for entry_s in (0.0, 5.0))
    assert [choose([one], lambda _: 1.0, lambda *_: 0.0).budgets for one in (cheap, late)] == [(4,), (0,)]
