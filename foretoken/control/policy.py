"""Who guesses for the requests of a round, and how much, learnt from rounds that ended; the engine and the simulator
run this same code.

A number of guesses that the caller set always stands. What is left open, all requests of the step together get from
what promises the most expected tokens per second (`budget`), zero included. Drafters that show their guesses beforehand
are judged by every round whether they were used or not (`looks`); others are tried again for a small share of the time
when they were given up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from foretoken.control.acceptance_history import AcceptanceHistory
from foretoken.control.budget import Allocation, Candidate, StepSeconds, choose_budgets
from foretoken.control.candidates import NO_DRAFT, DraftBudget, DrafterOption, RequestOptions
from foretoken.control.cost import CostTable, StepCosts, load_of
from foretoken.control.previews import Preview

MOST_NUM_DRAFT = 24  # guesses per request and round that are considered where the caller leaves the number open
_PROBE_SHARE = 0.015  # of the time goes into trying again what did not pay
_MOST_TRIALS = 8  # of one drafter in one round
_MOST_CREDIT_STEPS = 4  # saved up at most, in steps of the target
_FIRST_PLAIN = 4  # steps after which a step without guesses is measured for the first time
_PLAIN_EVERY = 128  # ... and again
_READ_MEMORY = 4
_RATE_MEMORY = 0.96  # weight of the past per request and step
_FIRST_GUESSES = 2  # of a drafter whose price is not known
_REST_ROUNDS = 48
_FREE_ROWS, _FREE_ROWS_EACH = 48, 8  # so many rows more, and for each request, take as long as another step at least
_FIRST_ROWS = 8  # that may be run beside the requests' own before anything is known
_THINKING_S = 4e-5  # what weighing one option takes ...
_THINKING_SHARE = 0.01  # ... and the share of the time that it may take
_MOST_HELD_STEPS = 16  # for which prices are kept at most
_FEW_REQUESTS = 2  # whose options are weighed in every round


class Policy(Protocol):
    """Who decides the numbers of guesses: plans before a round, and takes in what finished rounds showed (see
    `BudgetPolicy`).
    """

    @property
    def target_cost(self) -> CostTable:
        """Seconds of a step of the target by rows."""

    def plan(self, wishes: Sequence[RequestOptions]) -> list[DraftBudget]:
        """What each request of the next round may do."""

    def observe_step(
        self, num_rows: int, num_nodes: int, target_s: float, num_tokens: int = 0, draft_s: float = 0.0
    ) -> None:
        """A step in which nothing but decoding ran took `target_s`."""

    def observe_draft(
        self, drafter: Hashable, longest: int, draft_s: float, num_requests: int = 1, num_read_tokens: int = 0
    ) -> None:
        """A drafter took `draft_s` for `num_requests` requests and `longest` guesses at most."""

    def observe_round(
        self,
        request_id: int,
        drafter: Hashable,
        num_offered: int,
        chances: Sequence[float],
        parents: Sequence[int] = (),
    ) -> None:
        """For each guess of a request the chance with which the round emitted it."""

    def observe_preview(self, request_id: int, drafter: Hashable, look: Preview, found: Sequence[bool | None]) -> None:
        """What became of guesses that a drafter showed, used or not."""

    def observe_rest(self, request_id: int) -> None:
        """A request was given no guess."""

    def finish(self, request_id: int) -> None:
        """A request is over."""


class BudgetPolicy:
    """Plans a round before anything in it is drawn; what it learns comes from finished rounds only."""

    def __init__(self) -> None:
        self.step_costs = StepCosts()
        self._num_requests = 1  # of the round that is planned or was last
        self.draft_cost: dict[
            Hashable, dict[int, CostTable]
        ] = {}  # seconds of a drafter by requests (`_crowd`), then by its longest draft
        self.experience = AcceptanceHistory()
        self._read_token_s: dict[Hashable, float] = {}  # what a drafter takes for a token of a text that is new to it
        self._num_users: dict[Hashable, int] = {}  # requests that may use a drafter in this round
        self._credit_s = 0.0  # seconds that trials may lose; those that gain pay back
        self._token_s = 0.0  # what a token takes without guesses
        self._worth_s = 0.0  # what a token takes of late, guesses and all
        self._rate = _Rate()
        self._since_plain: dict[int, int] = {}  # steps with guesses since one without, by load
        self._rounds_at_rest = 0  # in which nobody was given guesses
        self._prices: _Prices | None = None

    def seed(self, target_cost: CostTable, draft_cost: Mapping[Hashable, CostTable]) -> None:
        """Begin with these tables, before any step was observed."""
        self.step_costs.seed(target_cost)
        self._since_plain[load_of(1)] = 0
        self.draft_cost = {drafter: {0: table} for drafter, table in draft_cost.items()}

    @property
    def target_cost(self) -> CostTable:
        """Seconds of a step of the target by rows, at the present number of requests."""
        return self.step_costs.at(self._num_requests)

    def plan(self, wishes: Sequence[RequestOptions]) -> list[DraftBudget]:
        """What each request of the next round may do."""
        self._num_requests = len(wishes)
        for wish in wishes:
            self.experience.of(wish.request_id, wish.label).trial_tokens = None
        if self._since_plain.get(load_of(len(wishes)), _PLAIN_EVERY - _FIRST_PLAIN) >= _PLAIN_EVERY:
            wishes = [
                RequestOptions(wish.request_id) if wish.is_open else wish for wish in wishes
            ]  # what guesses gain is told by a step without
        if self._prices is not None and self._prices.hold_for(wishes):
            return [self._at_prices(wish, self._prices) for wish in wishes]
        return self._weigh(wishes)

    def observe_step(
        self, num_rows: int, num_nodes: int, target_s: float, num_tokens: int = 0, draft_s: float = 0.0
    ) -> None:
        """Take in a step in which nothing but decoding ran: `num_rows` rows, `num_nodes` of them guesses or probes.

        It gave `num_tokens` to its requests and took `target_s` and `draft_s`; where tokens are left out it does not
        count as a rate.
        """
        self.step_costs.observe(num_rows - num_nodes, num_rows, target_s)
        if num_tokens and self._token_s:
            self._rate.observe(num_tokens * self._token_s, target_s + draft_s, num_rows - num_nodes)
        self._credit_s = min(self._credit_s + _PROBE_SHARE * target_s, _MOST_CREDIT_STEPS * target_s)
        load = load_of(num_rows - num_nodes)
        self._since_plain[load] = self._since_plain.get(load, _PLAIN_EVERY - _FIRST_PLAIN) + 1 if num_nodes else 0

    def observe_draft(
        self, drafter: Hashable, longest: int, draft_s: float, num_requests: int = 1, num_read_tokens: int = 0
    ) -> None:
        """Take in what a drafter took for `num_requests` requests, the longest draft being `longest`.

        A round in which it first read `num_read_tokens` that it had missed of a text, such as the prompt of a request
        that drafts for the first time, tells the price of reading instead of that of guesses.
        """
        if num_read_tokens:
            price_s = max(0.0, draft_s - self._draft_s(drafter, longest)) / num_read_tokens
            known_s = self._read_token_s.get(drafter, price_s)
            self._read_token_s[drafter] = known_s + (price_s - known_s) / _READ_MEMORY
            return
        self.draft_cost.setdefault(drafter, {}).setdefault(_crowd(num_requests), CostTable(grows=True)).observe(
            longest, draft_s
        )

    def observe_round(
        self,
        request_id: int,
        drafter: Hashable,
        num_offered: int,
        chances: Sequence[float],
        parents: Sequence[int] = (),
    ) -> None:
        """Take in which guesses of a request stood: for each place the chance of being emitted.

        `parents` are the guesses that they follow (-1 none), a chain where it is left out.
        """
        self.experience.observe_round(request_id, drafter, num_offered, chances, parents)
        known = self.experience.of(request_id)
        for other in known.untried:
            known.untried[other] += 1
        known.untried[drafter] = 0
        if known.trial_tokens is not None:
            self._credit_s += (sum(chances) - known.trial_tokens) * self._worth_s

    def observe_preview(self, request_id: int, drafter: Hashable, look: Preview, found: Sequence[bool | None]) -> None:
        """Take in how the guesses that a drafter showed compare with what was emitted, used or not: True right, None
        not judged.
        """
        self.experience.observe_preview(request_id, drafter, look, found)

    def observe_rest(self, request_id: int) -> None:
        """Take in a round in which a request was given no guess."""
        known = self.experience.of(request_id)
        for drafter in known.untried:
            known.untried[drafter] += 1

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self.experience.finish(request_id)
        if self._prices is not None:
            self._prices.finish(request_id)

    def _weigh(self, wishes: Sequence[RequestOptions]) -> list[DraftBudget]:
        """The best for all together; what was given up is tried again where there is time for it."""
        self._num_users = {}
        wishes = self._one_by_one(wishes)
        mean_weight = sum(wish.weight for wish in wishes) / max(1, len(wishes))
        for wish in wishes:
            for arm in wish.arms:
                self._num_users[arm.drafter] = self._num_users.get(arm.drafter, 0) + 1
        options = [[self._option(wish, arm, wish.weight / mean_weight) for arm in wish.arms] for wish in wishes]
        self._token_s = self.target_cost.seconds(len(wishes)) / max(1, len(wishes))
        rate = self._rate.of_late / self._token_s if self._token_s else 0.0
        self._worth_s = 1 / rate if rate else self._token_s
        step_s = self._step_times()
        choice = choose_budgets(options, 0, step_s, self._draft_s, rate)
        self._rounds_at_rest = 0 if any(choice.budgets) else self._rounds_at_rest + 1
        if self._rounds_at_rest > _REST_ROUNDS and any(
            options
        ):  # what rows cost was learnt long ago: suppose that they cost little, once
            choice = choose_budgets(options, 0, self._least_times(), self._draft_s, rate)
            self._rounds_at_rest = 0
        for wish, pick in zip(wishes, choice.picks, strict=True):
            if pick is not None:
                self.experience.of(wish.request_id).in_use = wish.arms[pick].drafter
        self._prices = self._prices_of(wishes, options, choice)
        trials = self._trials(wishes, options, choice, step_s)
        picked = [
            (trials.get(b, pick), 1 if b in trials else budget)
            for b, (pick, budget) in enumerate(zip(choice.picks, choice.budgets, strict=True))
        ]
        return [
            NO_DRAFT if pick is None else DraftBudget(wish.arms[pick].number, budget)
            for wish, (pick, budget) in zip(wishes, picked, strict=True)
        ]

    def _one_by_one(self, wishes: Sequence[RequestOptions]) -> Sequence[RequestOptions]:
        """Leave a drafter whose price is not known to one request and few guesses: it may be dear, and all would read
        their prompts for it.
        """
        unknown: dict[Hashable, int] = {}
        for wish in wishes:
            for arm in wish.arms:
                if wish.is_open and arm.look is None and arm.drafter not in self.draft_cost:
                    unknown.setdefault(arm.drafter, wish.request_id)
        if not unknown:
            return wishes
        return [
            replace(
                wish,
                arms=tuple(
                    replace(arm, most=min(arm.most, _FIRST_GUESSES)) if arm.drafter in unknown else arm
                    for arm in wish.arms
                    if unknown.get(arm.drafter, wish.request_id) == wish.request_id
                ),
            )
            if wish.is_open
            else wish
            for wish in wishes
        ]

    def _option(self, wish: RequestOptions, arm: DrafterOption, weight: float = 1.0) -> Candidate:
        known = self.experience.of(wish.request_id)
        entry_s = 0.0
        if arm.look is not None:
            emitted = self.experience.chances(wish.request_id, arm.drafter, arm.look)
            drafted = [1.0] * len(emitted)
        else:
            drafted, emitted = self.experience.shares(wish.request_id, arm.drafter, arm.most)
            entry_s = self._entry_s(wish, arm.drafter) * min(1.0, (1 + sum(emitted)) / max(1, wish.num_remaining))
        if arm.num_probe and drafted:
            drafted[0] += arm.num_probe
        at_least = 0 if wish.is_open else arm.most
        return Candidate(
            arm.drafter, tuple(drafted), tuple(emitted), at_least, entry_s, known.in_use == arm.drafter, weight
        )

    def _least_times(self) -> StepSeconds:
        """What a step takes at least by rows, from what is known without guesses; only few rows more."""
        own_rows, own_s = self._num_requests, self.target_cost.seconds(self._num_requests)
        least_s = own_s / (_FREE_ROWS + _FREE_ROWS_EACH * own_rows)
        return lambda num_rows: (
            own_s + least_s * (num_rows - own_rows) if num_rows <= own_rows + own_rows // 4 + 4 else math.inf
        )

    def _step_times(self) -> StepSeconds:
        """What a step takes by rows; rows far beyond what was ever run are tried in steps of twice as many.

        A further row is never free: measured times scatter, and a low one by chance would make room for guesses that
        bring nothing.
        """
        table, known, own_rows = self.target_cost, dict[float, float](), self._num_requests
        own_s = table.seconds(own_rows)
        least_s = own_s / (_FREE_ROWS + _FREE_ROWS_EACH * own_rows)
        most_rows = 2 * max(table.largest, self._num_requests) + _FIRST_ROWS

        def step_s(num_rows: float) -> float:
            if num_rows not in known:
                known[num_rows] = (
                    max(table.seconds(num_rows), own_s + least_s * (num_rows - own_rows))
                    if num_rows <= most_rows
                    else math.inf
                )
            return known[num_rows]

        return step_s

    def _draft_s(self, drafter: Hashable, num_draft: int) -> float:
        """What a drafter takes, as it was with about as many requests as there are now."""
        tables = self.draft_cost.get(drafter)
        if not tables:
            return 0.0
        crowd = _crowd(self._num_users.get(drafter, 1))
        return tables[min(tables, key=lambda known: abs(known - crowd))].seconds(num_draft)

    def _entry_s(self, wish: RequestOptions, drafter: Hashable) -> float:
        """What a drafter takes to read the text of a request that it never guessed for."""
        return (
            wish.num_tokens * self._read_token_s.get(drafter, 0.0)
            if self.experience.is_new(wish.request_id, drafter)
            else 0.0
        )

    def _trials(
        self,
        wishes: Sequence[RequestOptions],
        options: Sequence[Sequence[Candidate]],
        choice: Allocation,
        step_s: StepSeconds,
    ) -> dict[int, int]:
        """Requests that give a guess to a drafter which was passed over, by its place: as many at once as there is time
        saved up for.

        Most of what a drafter takes it takes once for all of them, and every one of them tells how good it is.
        """
        rows = len(wishes) + sum(choice.budgets)
        running = {wish.arms[pick].drafter for wish, pick in zip(wishes, choice.picks, strict=True) if pick is not None}
        trials: dict[int, int] = {}
        num_tried: dict[Hashable, int] = {}
        for _, b, place in sorted(self._passed_over(wishes, choice), reverse=True):
            known, arm, pick = self.experience.of(wishes[b].request_id), wishes[b].arms[place], choice.picks[b]
            if b in trials or num_tried.get(arm.drafter, 0) >= _MOST_TRIALS:
                continue
            gain = options[b][place].emitted[0] - (
                sum(options[b][pick].emitted[: choice.budgets[b]]) if pick is not None else 0.0
            )
            loss_s = (
                max(0.0, step_s(rows + 1 + arm.num_probe) - step_s(rows))
                + self._entry_s(wishes[b], arm.drafter)
                - gain * self._worth_s
            )
            if arm.drafter not in running:
                loss_s += self._draft_s(arm.drafter, 1)
            if loss_s <= max(0.0, self._credit_s):
                self._credit_s -= loss_s
                known.trial_tokens = options[b][place].emitted[0]
                trials[b] = place
                rows += 1 + arm.num_probe - (choice.budgets[b] if pick is not None else 0)
                running.add(arm.drafter)
                num_tried[arm.drafter] = num_tried.get(arm.drafter, 0) + 1
        return trials

    def _passed_over(self, wishes: Sequence[RequestOptions], choice: Allocation) -> list[tuple[int, int, int]]:
        """Rounds since the last guess, request and place of the arm, of all that were given nothing and do not show
        their guesses.
        """
        found: list[tuple[int, int, int]] = []
        for b, wish in enumerate(wishes):
            untried = self.experience.of(wish.request_id).untried
            for place, arm in enumerate(wish.arms):
                if wish.is_open and arm.look is None and arm.most and place != choice.picks[b]:
                    found.append((untried.get(arm.drafter, 1 << 30), b, place))
        return found

    def _prices_of(
        self, wishes: Sequence[RequestOptions], options: Sequence[Sequence[Candidate]], choice: Allocation
    ) -> _Prices | None:
        """What a row and a token are worth at this choice, to decide by in the next rounds; None where weighing anew is
        cheap.
        """
        num_options = sum(map(len, options))
        steps = min(_MOST_HELD_STEPS, int(num_options * _THINKING_S / max(1e-9, _THINKING_SHARE * choice.seconds)))
        if len(wishes) <= _FEW_REQUESTS or steps < 1 or not choice.seconds:
            return None
        rows = len(wishes) + sum(choice.budgets)
        own_rows, step_s = len(wishes), self._step_times()
        far = min(rows + rows // 4 + 2, 2 * max(self.target_cost.largest, own_rows) + _FIRST_ROWS)
        slope_s = (step_s(far) - step_s(own_rows)) / (far - own_rows)
        rate = self._rate.of_late / self._token_s if self._rate.took_s and self._token_s else choice.tokens_per_s
        row_price = rate * slope_s
        surplus: dict[tuple[int, Hashable], tuple[int, float]] = {}
        for wish, own, pick, budget in zip(wishes, options, choice.picks, choice.budgets, strict=True):
            if pick is None:
                continue
            option = own[pick]
            assert option.drafter is not None
            share_s = self._draft_s(option.drafter, budget) / self._num_users[option.drafter]
            gain = sum(option.emitted[:budget]) - row_price * sum(option.drafted[:budget]) - rate * share_s
            surplus[wish.request_id, option.drafter] = budget, gain
        return _Prices(steps, row_price, surplus, {wish.request_id for wish in wishes}, len(wishes))

    def _at_prices(self, wish: RequestOptions, prices: _Prices) -> DraftBudget:
        """The arm with the largest gain at the prices of the last choice."""
        best, grant = 0.0, NO_DRAFT
        for arm in wish.arms:
            if not wish.is_open:
                count, gain = arm.most, 2.0 if self.experience.of(wish.request_id).in_use == arm.drafter else 1.0
            elif arm.look is not None:
                count, gain = 0, 0.0
                for chance in self.experience.chances(wish.request_id, arm.drafter, arm.look):
                    if wish.weight * chance <= prices.row:
                        break
                    count, gain = count + 1, gain + wish.weight * chance - prices.row
            else:
                count, gain = prices.surplus.get((wish.request_id, arm.drafter), (0, 0.0))
            if count and gain > best:
                best, grant = gain, DraftBudget(arm.number, min(count, arm.most))
        return grant


@dataclass
class _Rate:
    """Tokens per second over those without guesses, of late: it is compared across loads, which change what a second
    brings.
    """

    saved_s: float = 0.0
    took_s: float = 0.0

    @property
    def of_late(self) -> float:
        """0 while nothing is known."""
        return self.saved_s / self.took_s if self.took_s else 0.0

    def observe(self, plain_s: float, took_s: float, num_requests: int) -> None:
        """Take in a step whose tokens would have taken `plain_s` without guesses; one of many requests tells as much as
        many of one.
        """
        keep = _RATE_MEMORY**num_requests
        self.saved_s = keep * self.saved_s + plain_s
        self.took_s = keep * self.took_s + took_s


@dataclass
class _Prices:
    """What the last choice said: tokens that a row must bring, and guesses and gain of the drafters that were chosen,
    by request.
    """

    steps_left: int
    row: float
    surplus: dict[tuple[int, Hashable], tuple[int, float]]
    requests: set[int]  # that are there still ...
    num_requests: int  # ... of so many

    def hold_for(self, wishes: Sequence[RequestOptions]) -> bool:
        """Whether to decide by them once more: for some steps, and while most requests are the same and about as
        many.
        """
        self.steps_left -= 1
        num_known = sum(wish.request_id in self.requests for wish in wishes)
        return self.steps_left >= 0 and 4 * num_known >= 3 * max(len(wishes), self.num_requests)

    def finish(self, request_id: int) -> None:
        """Forget a request; it still counts as one of those the prices were made for."""
        self.requests.discard(request_id)
        for key in [key for key in self.surplus if key[0] == request_id]:
            del self.surplus[key]


def _crowd(num_requests: int) -> int:
    """Numbers of requests at which a drafter takes about the same: powers of two, by their exponent."""
    return (max(1, num_requests) - 1).bit_length()
