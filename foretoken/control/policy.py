"""Which drafter drafts for the requests of a round, and how much, learnt from rounds that ended.

A number of draft tokens that the caller set always stands. Budgets left open are chosen jointly for all requests of the
step, to maximise expected tokens per second (`budget`), zero included.

While the account (`cost.TimeAccount`) is overdrawn, steps run without a draft: the engine does not fall behind plain
decoding, whatever the estimates say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress

from foretoken.control.acceptance import Acceptance
from foretoken.control.budget import Allocation, DraftSeconds, StepSeconds, TokenRate, allocate
from foretoken.control.candidates import (
    NO_DRAFT,
    Candidate,
    DraftBudget,
    DrafterOption,
    Mode,
    NoDraftReason,
    Preview,
    RequestView,
    RoundOutcome,
    StepOutcome,
)
from foretoken.control.config import DEFAULT, PolicyConfig
from foretoken.control.cost import CostTable, DraftCosts, HostCosts, StepCosts, TimeAccount, load_of
from foretoken.plan.profile import Curve


@dataclass
class _RequestHistory:
    """What is kept of one request: its last budget, and its drafters' rounds."""

    budget: DraftBudget | None = None  # of its last round
    untried: dict[Hashable, int] = field(default_factory=dict)  # rounds since the drafter drafted
    trial_tokens: float | None = None  # expected of this round's trial


class BudgetPolicy:
    """Plans a round before anything in it is drawn; what it learns comes from finished rounds only."""

    def __init__(self, config: PolicyConfig = DEFAULT) -> None:
        self.config = config
        self.step_costs, self.draft_costs = StepCosts(config=config.cost), DraftCosts(config=config.cost)
        self.host_costs = HostCosts(config.cost)
        self.acceptance = Acceptance(config.acceptance)
        self._requests: dict[int, _RequestHistory] = {}
        self._num_requests = 1  # of the round that is planned or was last
        self._open: set[int] = set()  # requests of this round whose number of draft tokens is left open
        self._num_users: dict[Hashable, int] = {}  # requests that may use a drafter in this round
        self._mode: Mode = "decide"
        self._is_overdrawn = False  # why this round is plain, if it is
        self._weighed: list[
            tuple[RequestView, tuple[Candidate, ...]]
        ] = []  # when budgets were last decided, of live requests
        self._repeats_left = 0
        self.account = TimeAccount(config)
        self._joined = 0.0  # share of this round's requests that are new
        self._token_s = 0.0  # what a token takes without a draft
        self._worth_s = 0.0  # what a token takes of late, draft tokens and all
        self._rate = TokenRate()
        self._last_kind: tuple[int, bool] | None = None  # of a step of decoding: its requests, with draft tokens or not
        self._num_declined = 0  # decisions against any draft token, in a row
        self._decisions_per_trial: dict[int, int] = {}  # by load
        self._since_plain: dict[int, int] = {}  # steps with draft tokens since one without, by load

    def seed(self, target_cost: Curve, draft_costs: Mapping[Hashable, Curve]) -> None:
        """Begin with these costs, before any step was observed."""
        self.step_costs = StepCosts(target_cost, self.config.cost)
        self.draft_costs = DraftCosts(draft_costs, self.config.cost)
        self._since_plain[load_of(1)] = 0

    @property
    def target_cost(self) -> CostTable:
        """Seconds of a step of the target by rows, at the present number of requests."""
        return self.step_costs.at(self._num_requests)

    def begin(self, request_ids: Sequence[int], may_draft: bool = True) -> Mode:
        """See `chooser.Policy.begin`."""
        self._num_requests, self._mode = len(request_ids), "plain"
        if not may_draft:
            self._open.clear()
            return self._mode
        due, self._is_overdrawn = self.config.plain_every, self.account.is_overdrawn
        if self._since_plain.get(load_of(len(request_ids)), due - self.config.first_plain) >= due or self._is_overdrawn:
            self._mode = "plain"
        elif self._repeats_left > 0 and self._may_repeat(request_ids):
            self._repeats_left -= 1
            self._mode = "repeat"
        else:
            self._mode = "decide"
        return self._mode

    def _may_repeat(self, request_ids: Sequence[int]) -> bool:
        """Whether enough of the round's requests have a budget."""
        known = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        return sum(one.budget is not None for one in known) >= self.config.repeat_share * len(request_ids)

    def plan(self, requests: Sequence[RequestView]) -> list[DraftBudget]:
        """What each request of the round may do."""
        self._num_requests = len(requests)
        self._open = {request.request_id for request in requests if request.is_open}
        self._joined = sum(one.request_id not in self._requests for one in requests) / max(1, len(requests))
        for request in requests:
            self.acceptance.begin(request.request_id, request.slice)
            known = self._requests.get(request.request_id)
            if known is None:
                known = self._requests[request.request_id] = _RequestHistory()
            known.trial_tokens = None
        budgets = self._weigh(requests) if self._mode == "decide" else [self._repeated(one) for one in requests]
        if self._mode != "plain":
            for request, budget in zip(requests, budgets, strict=True):
                self._requests[request.request_id].budget = budget
        return budgets

    def observe_step(self, step: StepOutcome, decision_s: float = 0.0, preview_s: float = 0.0) -> None:
        """See `chooser.Policy.observe_step`."""
        num_requests, draft_s = len(step.rounds), sum(step.draft_s.values())
        self._last_kind = (num_requests, step.num_nodes > 0) if step.only_decodes and num_requests else None
        if self._mode == "decide":
            allowed_s = self.config.decision_share * (step.target_s + draft_s)
            self._repeats_left = min(self.config.max_repeats, int(decision_s / max(allowed_s, 1e-9)))
        if not num_requests:
            return
        if step.only_decodes:
            self.step_costs.observe(num_requests, step.num_rows, step.target_s)
            num_tokens = sum(len(round_.emitted) for round_ in step.rounds)
            if self._token_s:
                keep = self.config.rate_memory**num_requests
                host_s = self.host_costs.plain_s(num_requests)
                host_s += self.host_costs.extra_s(num_requests) if step.num_nodes else 0.0
                took_s = step.target_s + draft_s + preview_s + decision_s + host_s
                self._rate.observe(num_tokens * self._token_s, took_s, keep)
            load, due = load_of(num_requests), self.config.plain_every - self.config.first_plain
            was_plain = self._mode == "plain" or not step.num_nodes  # but for numbers that were set
            self._since_plain[load] = 0 if was_plain else self._since_plain.get(load, due) + 1
        self.account.credit_s += self.config.trial_share * step.target_s
        self._charge(step, decision_s, preview_s)

    def observe_host(self, host_s: float) -> None:
        """See `chooser.Policy.observe_host`."""
        if self._last_kind is not None:
            num_requests, has_draft = self._last_kind
            self.host_costs.observe(num_requests, host_s, has_draft)

    def observe_draft(
        self, drafter: Hashable, longest: int, draft_s: float, num_requests: int = 1, num_read_tokens: int = 0
    ) -> None:
        """See `chooser.Policy.observe_draft`."""
        self.draft_costs.observe(drafter, longest, draft_s, num_requests, num_read_tokens)
        self.draft_costs.keep_pace(drafter, self._num_requests, self.target_cost.seconds(self._num_requests))

    def observe_round(self, drafter: Hashable, round_: RoundOutcome) -> None:
        """See `chooser.Policy.observe_round`."""
        assert round_.chances is not None
        self.acceptance.observe_round(drafter, round_)
        known = self._requests[round_.request_id]
        self.observe_rest(round_.request_id)
        known.untried[drafter] = 0
        if known.trial_tokens is not None:
            self.account.credit_s += (sum(round_.chances) - known.trial_tokens) * self._worth_s

    def observe_preview(
        self, request_id: int, drafter: Hashable, preview: Preview, found: Sequence[bool | None]
    ) -> None:
        """See `chooser.Policy.observe_preview`."""
        self.acceptance.observe_preview(request_id, drafter, preview, found)

    def observe_rest(self, request_id: int) -> None:
        """See `chooser.Policy.observe_rest`."""
        untried = self._requests[request_id].untried
        for drafter in untried:
            untried[drafter] += 1

    def why_none(self, request_id: int) -> NoDraftReason:
        """See `chooser.Policy.why_none`."""
        if self._mode == "plain":
            return "k0_cost" if self._is_overdrawn else "warmup"
        for request, candidates in self._weighed:
            if request.request_id != request_id:
                continue
            if not request.options:
                return "no_match"
            if not candidates:  # left to another request, as long as the drafter's cost is not known
                return "warmup"
            return "k0_cost" if any(one.emitted for one in candidates) else "k0_acceptance"
        return "warmup"  # it joined after the last decision

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self.acceptance.finish(request_id)
        self._requests.pop(request_id, None)
        self._open.discard(request_id)
        self._weighed = [pair for pair in self._weighed if pair[0].request_id != request_id]

    def _charge(self, step: StepOutcome, decision_s: float, preview_s: float) -> None:
        """Charge what open draft tokens and deciding made the step longer, and credit the tokens that they brought.

        Of the drafters' time the share of requests whose number was set is not charged, nor what reading a new text
        took: that is weighed against all that the request may still gain (`_entry_s`). A step in which nothing was left
        open, or nothing decided, is charged nothing.
        """
        if not self._open:
            return
        cost, num_requests = self.step_costs.at(len(step.rounds)), len(step.rounds)
        drafting = [one for one in step.rounds if one.budget.num_draft]
        drafted = [one for one in drafting if one.request_id in self._open]
        rows = step.num_nodes + num_requests
        base_s = cost.seconds(rows - sum(len(one.parents) + one.num_probed for one in drafted))
        more_s = 0.0
        if self._mode != "plain":
            more_s = max(0.0, cost.seconds(rows) - base_s) + decision_s + preview_s
        for drafter, draft_s in step.draft_s.items() if drafted else ():
            read_s = self.draft_costs.read_s(drafter, step.num_read_tokens.get(drafter, 0))
            more_s += max(0.0, draft_s - read_s) * len(drafted) / len(drafting)
        if drafted:
            more_s += self.host_costs.extra_s(num_requests) * len(drafted) / len(drafting)
        gained = sum(len(one.emitted) - 1 for one in drafted) / num_requests
        self.account.settle(base_s + self.host_costs.plain_s(num_requests), gained, more_s, self._joined)

    def _repeated(self, request: RequestView) -> DraftBudget:
        """The request's last budget again, as far as its option is there; a number that was set stands in any case."""
        if self._mode == "plain" and request.is_open:
            return NO_DRAFT
        known = self._requests[request.request_id].budget
        last = None if known is None else next((one for one in request.options if one.number == known.option), None)
        if not request.is_open:
            option = last or (request.options[0] if request.options else None)
            return NO_DRAFT if option is None else DraftBudget(option.number, option.max_draft)
        if last is None or known is None:
            return NO_DRAFT
        return DraftBudget(last.number, min(known.num_draft, last.max_draft))

    def _weigh(self, requests: Sequence[RequestView]) -> list[DraftBudget]:
        """The best for all together; what was given up is tried again where there is time for it."""
        self.draft_costs.drop_outpaced(len(requests), self.target_cost.seconds(len(requests)))
        given, requests = requests, self._one_by_one(requests)
        self._num_users = {}
        for request in requests:
            for option in request.options:
                self._num_users[option.drafter] = self._num_users.get(option.drafter, 0) + 1
        mean_weight = sum(request.weight for request in requests) / max(1, len(requests))
        weights = [request.weight / mean_weight for request in requests]
        candidates = [_within_reach([self._candidate(one, option) for option in one.options]) for one in requests]
        self._weighed = list(zip(given, candidates, strict=True))
        host_s, extra_s = self.host_costs.plain_s(len(requests)), self.host_costs.extra_s(len(requests))
        self._token_s = (self.target_cost.seconds(len(requests)) + host_s) / max(1, len(requests))
        # Without a draft the rate is 1: what pays less is never worth its time, whatever noise and trials made of late.
        rate = max(1.0, self._rate.of_late) / self._token_s if self._token_s and self._rate.of_late else 0.0
        self._worth_s = 1 / rate if rate else self._token_s
        step_s, draft_s = self._step_times(host_s), self._draft_times()

        def chosen(step_s: StepSeconds) -> Allocation:
            return allocate(candidates, weights, step_s, draft_s, rate, extra_s, self.config.budget)

        found = self._with_cheaper_rows(chosen, chosen(step_s), requests, step_s)
        trial = self._trial(requests, candidates, found, step_s, draft_s)
        budgets = []
        for b, (request, pick, budget) in enumerate(zip(requests, found.picks, found.budgets, strict=True)):
            place, count = (trial[1], 1) if trial is not None and trial[0] == b else (pick, budget)
            budgets.append(NO_DRAFT if place is None else DraftBudget(request.options[place].number, count))
        return budgets

    def _one_by_one(self, requests: Sequence[RequestView]) -> Sequence[RequestView]:
        """Leave a drafter of unknown cost to one request and few draft tokens: it would read the others' texts."""
        unknown: dict[Hashable, int] = {}
        for request in requests:
            for option in request.options:
                if request.is_open and option.preview is None and not self.draft_costs.knows(option.drafter):
                    unknown.setdefault(option.drafter, request.request_id)
        if not unknown:
            return requests

        def few(option: DrafterOption) -> DrafterOption:
            return option._replace(max_draft=min(option.max_draft, self.config.first_draft_tokens))

        return [
            request._replace(
                options=tuple(
                    few(option) if option.drafter in unknown else option
                    for option in request.options
                    if unknown.get(option.drafter, request.request_id) == request.request_id
                )
            )
            if request.is_open
            else request
            for request in requests
        ]

    def _candidate(self, request: RequestView, option: DrafterOption) -> Candidate:
        request_id, entry_s = request.request_id, 0.0
        if option.preview is not None:
            emitted = tuple(self.acceptance.of_preview(request_id, option.drafter, option.preview))
            drafted = (1.0,) * len(emitted)
        else:
            least = self.config.budget.min_emitted if request.is_open else 0.0
            drafted, emitted = self.acceptance.of_places(request_id, option.drafter, option.max_draft, least)
            entry_s = self._entry_s(request, option) * min(1.0, (1 + sum(emitted)) / max(1, request.num_remaining))
        if option.num_probe and drafted:
            drafted = (drafted[0] + option.num_probe, *drafted[1:])
        at_least = 0 if request.is_open else option.max_draft
        return Candidate(option.drafter, drafted, emitted, at_least, entry_s)

    def _entry_s(self, request: RequestView, option: DrafterOption) -> float:
        """What a drafter takes to read the text of a request that it never drafted for."""
        if not self.acceptance.is_new(request.request_id, option.drafter):
            return 0.0
        return self.draft_costs.read_s(option.drafter, request.num_tokens)

    def _step_times(self, host_s: float) -> StepSeconds:
        """What a step takes by rows, `host_s` included; rows far beyond those ever run are tried in steps of twice as
        many.
        """
        table = self.target_cost
        max_rows = 2 * max(table.largest, self._num_requests) + self.config.first_rows

        @cache
        def step_s(num_rows: float) -> float:
            return table.seconds(num_rows) + host_s if num_rows <= max_rows else math.inf

        return step_s

    def _draft_times(self) -> DraftSeconds:
        """What each drafter takes by its longest draft, for the requests that may use it."""

        @cache
        def draft_s(drafter: Hashable, num_draft: int) -> float:
            return self.draft_costs.seconds(drafter, num_draft, self._num_users.get(drafter, 1))

        return draft_s

    def _trial(
        self,
        requests: Sequence[RequestView],
        candidates: Sequence[Sequence[Candidate]],
        found: Allocation,
        step_s: StepSeconds,
        draft_s: DraftSeconds,
    ) -> tuple[int, int] | None:
        """The request that tries a drafter which was passed over, and the place of its option: the one untried longest.

        None while the seconds that trials may lose are spent.
        """
        rows = len(requests) + sum(found.budgets)
        running = {
            request.options[pick].drafter
            for request, pick in zip(requests, found.picks, strict=True)
            if pick is not None
        }
        for _, b, place in sorted(self._passed_over(requests, found), reverse=True):
            request, option, pick = requests[b], requests[b].options[place], found.picks[b]
            expected = candidates[b][place].emitted[0]
            gain = expected - (sum(candidates[b][pick].emitted[: found.budgets[b]]) if pick is not None else 0.0)
            more_s = max(0.0, step_s(rows + 1 + option.num_probe) - step_s(rows)) + self._entry_s(request, option)
            if option.drafter not in running:
                more_s += draft_s(option.drafter, 1)
            loss_s = more_s - gain * self._worth_s
            if loss_s <= self.account.trial_s:
                self.account.credit_s -= loss_s
                self._requests[request.request_id].trial_tokens = expected
                return b, place
        return None

    def _with_cheaper_rows(
        self,
        chosen: Callable[[StepSeconds], Allocation],
        found: Allocation,
        requests: Sequence[RequestView],
        step_s: StepSeconds,
    ) -> Allocation:
        """Where no draft token was chosen for some time beside those that callers set: what would be if rows took half
        as long, as far as trials may lose.

        A draft token more or less is not told from the noise of a step, many are.
        """
        is_open, num_set = [request.is_open for request in requests], sum(found.budgets)
        self._num_declined = 0 if any(compress(found.budgets, is_open)) else self._num_declined + any(is_open)
        load = load_of(len(requests))
        wait = self._decisions_per_trial.get(load, self.config.decisions_per_trial)
        if self._num_declined < wait:
            return found
        self._num_declined, own_s = 0, step_s(len(requests) + num_set)
        hoped = chosen(lambda rows: own_s + (step_s(rows) - own_s) / 2)
        more_s = 2 * (hoped.seconds - found.seconds)
        more_s -= 0.0 if num_set else self.host_costs.extra_s(len(requests))  # that part is not halved
        loss_s = more_s - (hoped.tokens - found.tokens) * self._worth_s
        if not any(compress(hoped.budgets, is_open)) or loss_s > self.account.credit_s:
            return found
        self.account.credit_s -= max(0.0, loss_s)
        self._decisions_per_trial[load] = 2 * wait
        return hoped

    def _passed_over(self, requests: Sequence[RequestView], found: Allocation) -> list[tuple[int, int, int]]:
        """Rounds since the last draft token, request and option, of those passed over that show no draft tokens."""
        passed: list[tuple[int, int, int]] = []
        for b, request in enumerate(requests):
            untried = self._requests[request.request_id].untried
            for place, option in enumerate(request.options):
                if request.is_open and option.preview is None and option.max_draft and place != found.picks[b]:
                    passed.append((untried.get(option.drafter, 1 << 30), b, place))
        return passed


def _within_reach(own: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates of one request; a number that was set stands as far as the longest draft that one of them has."""
    longest = max((len(one.emitted) for one in own), default=0)
    return tuple(one._replace(at_least=longest) if one.at_least > longest else one for one in own)
