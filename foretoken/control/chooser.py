"""The one place where numbers of draft tokens are decided: the engine and the simulator drive the same object.

A round is `begin` (which previews are computed), `plan` (drafter and number of draft tokens of each request) and
`observe` (the outcome). Routing rules (`routing`) come first, then the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

from foretoken.control.candidates import (
    NO_DRAFT,
    DraftBudget,
    DrafterOption,
    Mode,
    NoDraftReason,
    Preview,
    PreviewAsk,
    Previews,
    RequestView,
    RoundOutcome,
    StepOutcome,
    max_useful_draft,
    weight_of,
)
from foretoken.control.config import DEFAULT, PolicyConfig
from foretoken.control.cost import CostTable
from foretoken.control.policy import BudgetPolicy
from foretoken.control.routing import Routing, RoutingRules
from foretoken.plan.profile import Curve


class Policy(Protocol):
    """Decides numbers of draft tokens before a round, and learns from finished rounds."""

    @property
    def target_cost(self) -> CostTable:
        """Seconds of a step of the target by rows."""

    def begin(self, request_ids: Sequence[int], may_draft: bool = True) -> Mode:
        """Called first in every round: whether budgets that are open are chosen anew, repeated, or zero.

        `may_draft`: any request of it has a drafter. Where none has, `plan` is not called.
        """

    def plan(self, requests: Sequence[RequestView]) -> list[DraftBudget]:
        """What each request of the round may do."""

    def observe_step(self, step: StepOutcome, decision_s: float, preview_s: float) -> None:
        """Take in a step: deciding took `decision_s`, and `preview_s` of its drafting were previews."""

    def observe_host(self, host_s: float) -> None:
        """Take in what the host took for the step observed last, without drafting and deciding."""

    def observe_draft(
        self, drafter: Hashable, longest: int, draft_s: float, num_requests: int, num_read_tokens: int
    ) -> None:
        """Take in what a drafter took for `num_requests` requests, the longest draft being `longest`."""

    def observe_round(self, drafter: Hashable, round_: RoundOutcome) -> None:
        """Take in a round in which a drafter that shows no previews drafted."""

    def observe_preview(
        self, request_id: int, drafter: Hashable, preview: Preview, found: Sequence[bool | None]
    ) -> None:
        """Take in what became of draft tokens that a drafter showed, used or not."""

    def observe_rest(self, request_id: int) -> None:
        """Take in a round in which a request was given no draft token."""

    def why_none(self, request_id: int) -> NoDraftReason:
        """Why a request that might draft was given no draft token in the round that ran last."""

    def finish(self, request_id: int) -> None:
        """Forget a request."""


_Key = tuple[tuple[DrafterOption, ...], frozenset[int], int, int | None]  # options, disabled, draft tokens, probes
_Usable = tuple[_Key, tuple[DrafterOption, ...]]


class Chooser:
    """Chooses the budgets of each round before anything in it is drawn; learns from finished rounds only.

    `clock` tells seconds: the time spent here counts as overhead of the step.
    """

    def __init__(
        self, clock: Callable[[], float], rules: RoutingRules | None = None, config: PolicyConfig = DEFAULT
    ) -> None:
        self.clock = clock
        self.routing = Routing(rules or RoutingRules())
        self.config = config
        self._known_costs: tuple[Curve, Mapping[Hashable, Curve]] | None = None  # see `seed`
        self.policy: Policy = BudgetPolicy(config)
        self._views: dict[int, RequestView] = {}  # of the round that is planned or ran last
        self._previews = Previews()
        self._last_num_draft: dict[int, int] = {}
        self._usable: dict[int, _Usable] = {}  # made anew where something changed
        self._num_probed: dict[int, int] = {}  # probes that came with a request's last draft tokens
        self._overhead_s = self._decision_s = 0.0  # of this step so far, of the one observed last
        self._mode: Mode = "decide"
        self._may_draft = False  # any request of the round that is planned or ran last

    def seed(self, target_cost: Curve, draft_costs: Mapping[Hashable, Curve]) -> None:
        """Begin with these costs, now and whenever the policy is reset."""
        self._known_costs = (target_cost, draft_costs)
        self.reset()

    def reset(self, policy: Policy | None = None) -> Policy:
        """Decide by `policy` from now on; None: by a new one, which knows the costs of `seed` and has observed nothing.
        Returns the policy in use: given here again later, it goes on from what it has observed until then.
        """
        if policy is None:
            policy = new = BudgetPolicy(self.config)
            if self._known_costs is not None:
                new.seed(*self._known_costs)
        self.policy = policy
        return policy

    def begin(self, requests: Sequence[RequestView]) -> list[PreviewAsk]:
        """What drafters should show for `requests`, which decode next: nothing where the last budgets are repeated."""
        began = self.clock()
        asks: list[PreviewAsk] = []
        self._may_draft = any(request.options for request in requests)
        self._mode = self.policy.begin([request.request_id for request in requests], self._may_draft)
        if self._mode == "decide":
            for request in requests:
                asks += self._asks(request, len(requests))
        self._overhead_s = self.clock() - began
        return asks

    def plan(self, requests: Sequence[RequestView], previews: Previews) -> list[DraftBudget]:
        """What each request of the round may do; `previews` are those that `begin` asked for."""
        if not self._may_draft:
            self._views = {}
            return [NO_DRAFT] * len(requests)
        began = self.clock()
        self._views = {request.request_id: request for request in requests}
        self._previews = previews
        budgets = self.policy.plan([self._seen(request, len(requests)) for request in requests])
        self._overhead_s += self.clock() - began
        return budgets

    def observe(self, step: StepOutcome) -> None:
        """Learn from a step."""
        began = self.clock()
        drafting: dict[Hashable, list[int]] = {}  # numbers of draft tokens, by drafter
        for round_ in step.rounds:
            if round_.request_id not in self._views:
                continue  # its first token, which is never drafted
            self._observe_previews(round_)
            option = self._option_of(round_)
            if option is None:
                self.policy.observe_rest(round_.request_id)
                continue
            self._last_num_draft[round_.request_id] = round_.budget.num_draft
            if option.shows:
                continue  # judged by what it showed; what it took was spent before it was chosen
            if round_.chances is None:
                continue  # a grammar forced the tokens: the drafter was not asked
            if round_.has_run:
                drafting.setdefault(option.drafter, []).append(round_.budget.num_draft)
                self._num_probed[round_.request_id] = round_.num_probed
            self.policy.observe_round(option.drafter, round_)
        for drafter, counts in drafting.items():
            num_read = step.num_read_tokens.get(drafter, 0)
            self.policy.observe_draft(drafter, max(counts), step.draft_s.get(drafter, 0.0), len(counts), num_read)
        self._overhead_s += self.clock() - began
        self.policy.observe_step(step, self._overhead_s, self._previews.seconds)
        self._previews, self._decision_s, self._overhead_s = Previews(), self._overhead_s, 0.0

    def observe_host(self, host_s: float) -> None:
        """Learn what the host took for the step observed last: all but drafting, deciding included."""
        self.policy.observe_host(max(0.0, host_s - self._decision_s))

    def why_none(self, request_id: int, is_planned: bool) -> NoDraftReason:
        """Why a request with a drafter made no draft token in the round that ran last; `is_planned`: `plan` gave it
        some.

        A routing rule is counted here as well, which changes nothing: it was counted when it was followed.
        """
        view = self._views.get(request_id)
        if view is None or not view.options:
            return "prefill"
        if not self._max_draft(view):
            return "length_clamped"
        if is_planned:
            return "budget_trimmed"
        if len(view.disabled) == len(view.options):
            return "drafter_disabled"
        routed = self.routing.reason(request_id, view.max_new_tokens, len(self._views))
        if routed is not None:
            return "k0_load" if routed == "load" else "k0_short"
        return self.policy.why_none(request_id)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        for own in (self._views, self._last_num_draft, self._num_probed, self._usable):
            own.pop(request_id, None)
        self.routing.finish(request_id)
        self.policy.finish(request_id)

    def _asks(self, request: RequestView, num_running: int) -> list[PreviewAsk]:
        max_draft = self._max_draft(request)
        if not max_draft or (request.is_open and self._is_routed_away(request, num_running)):
            return []
        if not request.is_open and len(request.options) < 2:
            return []
        reach = self.config.budget.first_preview + 2 * self._last_num_draft.get(request.request_id, 0)
        return [
            PreviewAsk(request.request_id, number, min(option.max_draft, max_draft, reach))
            for number, option in enumerate(request.options)
            if option.shows and number not in request.disabled
        ]

    def _seen(self, request: RequestView, num_running: int) -> RequestView:
        """The request as the policy sees it, with the options that can draft now."""
        weight = self._weight(request, num_running)
        if request.is_open and self._mode == "plain":
            return request if weight == request.weight else request._replace(weight=weight)
        max_draft = self._max_draft(request)
        if not max_draft or (request.is_open and self._is_routed_away(request, num_running)):
            return request._replace(options=())
        options = self._usable_options(request, max_draft)
        shown = self._previews.of(request.request_id)
        if shown:
            options = tuple(
                found
                for option in options
                if (found := _shown(option, shown.get(option.number), request.is_open)).max_draft or not request.is_open
            )
        return request._replace(options=options, weight=weight)

    def _usable_options(self, request: RequestView, max_draft: int) -> tuple[DrafterOption, ...]:
        """Options that are not switched off, under what the request can still use."""
        num_probed = self._num_probed.get(request.request_id)
        key = (request.options, request.disabled, max_draft, num_probed)
        known = self._usable.get(request.request_id)
        if known is not None and known[0] == key:
            return known[1]
        options = tuple(
            option._replace(
                max_draft=min(max_draft, option.max_draft),
                num_probe=option.num_probe and (option.num_probe if num_probed is None else num_probed),
            )
            for option in request.options
            if option.number not in request.disabled and (option.max_draft or not request.is_open)
        )
        self._usable[request.request_id] = (key, options)
        return options

    def _max_draft(self, request: RequestView) -> int:
        """Draft tokens that can still be used."""
        if not request.options:
            return 0
        wanted = self.config.max_num_draft if request.num_draft is None else request.num_draft
        return min(wanted, max_useful_draft(request.num_remaining))

    def _weight(self, request: RequestView, num_running: int) -> float:
        if not request.priority and request.deadline_s is None:
            return 1.0
        needed_s = request.num_remaining * self.policy.target_cost.seconds(num_running)
        return weight_of(request.priority, request.deadline_s, needed_s, self.config.budget)

    def _is_routed_away(self, request: RequestView, num_running: int) -> bool:
        return self.routing.reason(request.request_id, request.max_new_tokens, num_running) is not None

    def _observe_previews(self, round_: RoundOutcome) -> None:
        options = self._views[round_.request_id].options
        for number, preview in self._previews.of(round_.request_id).items():
            if not preview.tokens:
                continue
            found = preview.outcomes(round_.emitted)
            self.policy.observe_preview(round_.request_id, options[number].drafter, preview, found)

    def _option_of(self, round_: RoundOutcome) -> DrafterOption | None:
        number = round_.budget.option
        if number is None or not round_.budget.num_draft:
            return None
        return self._views[round_.request_id].options[number]


def _shown(option: DrafterOption, preview: Preview | None, is_open: bool) -> DrafterOption:
    """An option with what it shows; where the number is open no more than that."""
    if preview is None:
        return option
    count = min(option.max_draft, len(preview.parents)) if is_open else option.max_draft
    return option._replace(max_draft=count, preview=preview)
