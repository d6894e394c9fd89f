"""How many guesses the requests of a round get, learnt from rounds that ended; the engine and the simulator run this same code.

A number of guesses that the caller set always stands. Where it is left open, all requests of the step together get the budgets with
the most expected tokens per second (`budget`), zero included; what was given up is tried again for a small share of the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from foretoken.plan.budget import Option, choose_budgets
from foretoken.plan.cost import CostTable
from foretoken.plan.survival import Survival

MOST_NUM_DRAFT = 24  # guesses per request and round that are considered where the caller leaves the number open
_PROBE_SHARE = 0.015  # of the time goes into trying again what did not pay
_PROBE_NUM_DRAFT = 1
_PATIENCE = 3
_MOST_DEBT_STEPS = 3
_MOST_CREDIT_STEPS = 4  # saved up at most, in steps of the target
_FIRST_PLAIN = 4  # steps after which a step without guesses is measured for the first time
_PLAIN_EVERY = 128  # ... and again


@dataclass(frozen=True)
class Wish:
    """What a request brings into a round: its drafter (None: it does not draft now) and the most guesses it can use.

    `is_open`: the number is left to the policy; otherwise `most` guesses are made. `num_probe` rows beside the guesses come with
    the first of them.
    """

    request_id: int
    drafter: Hashable | None
    most: int
    is_open: bool
    num_probe: int = 0

    @property
    def drafts(self) -> bool:
        """Whether guesses are possible at all."""
        return self.drafter is not None and self.most > 0


class BudgetPolicy:
    """Plans a round before anything in it is drawn; what it learns comes from finished rounds only."""

    def __init__(self) -> None:
        self.target_cost = CostTable()  # seconds of a target step by rows
        self.draft_cost: dict[Hashable, CostTable] = {}  # seconds of a drafter by its longest draft
        self._by_drafter: dict[Hashable, Survival] = {}
        self._by_request: dict[int, Survival] = {}
        self._patience: dict[int, int] = {}  # trials that a request still gets for nothing since one of them gained
        self._untried: dict[int, int] = {}  # rounds since a request last guessed
        self._on_trial: set[int] = set()
        self._reading: set[Hashable] = set()  # drafters for which some request of the round was new
        self._credit_s = 0.0  # seconds that trials may lose; those that gain pay back
        self._token_s = 0.0  # what a token takes without guesses
        self._steps_since_plain = 0
        self._plain_seen = False

    def seed(self, target_cost: CostTable, draft_cost: Mapping[Hashable, CostTable]) -> None:
        """Begin with these tables, before any step was observed."""
        assert self.target_cost.is_empty
        self.target_cost, self.draft_cost = target_cost, dict(draft_cost)

    def plan(self, wishes: Sequence[Wish]) -> list[int]:
        """Guesses for each request of the next round."""
        options = [self._option(wish) for wish in wishes]
        open_places = [b for b, wish in enumerate(wishes) if wish.is_open and wish.drafts]
        if not open_places or self._steps_since_plain >= (_PLAIN_EVERY if self._plain_seen else _FIRST_PLAIN):
            return [option.at_least for option in options]  # what guesses gain is told by a step without
        budgets = list(choose_budgets(options, 0, self.target_cost.seconds, self._draft_s).budgets)
        trials = self._trials(wishes, options, budgets, open_places)
        for b in trials:
            budgets[b] = min(_PROBE_NUM_DRAFT, wishes[b].most)
        self._on_trial = {wishes[b].request_id for b in trials}
        self._token_s = self.target_cost.seconds(len(wishes)) / len(wishes)
        return budgets

    def observe_step(self, num_rows: int, num_nodes: int, target_s: float) -> None:
        """Take in a step in which nothing but decoding ran: `num_rows` rows, `num_nodes` of them guesses or probes."""
        self.target_cost.observe(num_rows, target_s)
        self._credit_s = min(self._credit_s + _PROBE_SHARE * target_s, _MOST_CREDIT_STEPS * target_s)
        self._steps_since_plain = self._steps_since_plain + 1 if num_nodes else 0
        self._plain_seen |= not num_nodes

    def observe_draft(self, drafter: Hashable, longest: int, draft_s: float) -> None:
        """Take in what a drafter took in a round in which `longest` guesses were the most that a request was given; after `observe_round`.

        The round in which a request drafts for the first time does not count: a draft model reads the whole prompt then.
        """
        if drafter in self._reading:
            self._reading.discard(drafter)
            return
        self.draft_cost.setdefault(drafter, CostTable(grows=True)).observe(longest, draft_s)

    def observe_round(
        self, request_id: int, drafter: Hashable, num_offered: int, chances: Sequence[float], gained: bool, parents: Sequence[int] = ()
    ) -> None:
        """Take in which guesses of a request stood: for each place the chance of being emitted; `gained`: at least one was.

        `parents` are the guesses that they follow (-1 none), a chain where it is left out.
        """
        if request_id not in self._by_request:
            self._reading.add(drafter)
        prior = self._by_drafter.setdefault(drafter, Survival())
        own = self._by_request.setdefault(request_id, Survival(prior))
        for survival in (own, prior):
            survival.observe(num_offered, chances, parents)
        self._untried[request_id] = 0
        if request_id in self._on_trial:
            self._credit_s += sum(chances) * self._token_s
        self._patience[request_id] = _PATIENCE if gained else max(0, self._patience.get(request_id, 0) - 1)

    def observe_rest(self, request_id: int) -> None:
        """Take in a round in which a request was given no guess."""
        self._untried[request_id] = self._untried.get(request_id, 0) + 1

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._by_request.pop(request_id, None)
        self._untried.pop(request_id, None)
        self._patience.pop(request_id, None)

    def _option(self, wish: Wish) -> Option:
        if wish.drafter is None or not wish.most:
            return Option(None)
        survival = self._by_request.get(wish.request_id) or self._by_drafter.get(wish.drafter) or Survival()
        drafted, emitted = survival.shares(wish.most)
        drafted[0] += wish.num_probe
        return Option(wish.drafter, tuple(drafted), tuple(emitted), 0 if wish.is_open else wish.most)

    def _draft_s(self, drafter: Hashable, num_draft: int) -> float:
        cost = self.draft_cost.get(drafter)
        return 0.0 if cost is None else cost.seconds(num_draft)

    def _trials(self, wishes: Sequence[Wish], options: Sequence[Option], budgets: Sequence[int], open_places: Sequence[int]) -> list[int]:
        """Requests that were given no guess and try a few all the same: while the trials gain, or when their time was saved up."""
        chosen: list[int] = []
        rows = len(wishes) + sum(budgets)
        for b in sorted(open_places, key=lambda b: -self._untried.get(wishes[b].request_id, 0)):
            if budgets[b]:
                continue
            loss_s = self._draft_s(options[b].drafter, _PROBE_NUM_DRAFT)
            tried = rows + _PROBE_NUM_DRAFT + wishes[b].num_probe
            loss_s += max(0.0, self.target_cost.seconds(tried) - self.target_cost.seconds(rows))
            # A trial that gained is followed by others at once, on credit: whether it pays again should be known soon.
            overdraft_s = _MOST_DEBT_STEPS * self.target_cost.seconds(rows) if self._patience.get(wishes[b].request_id, 0) else 0.0
            if loss_s <= self._credit_s + overdraft_s:
                self._credit_s -= loss_s
                chosen.append(b)
        return chosen
