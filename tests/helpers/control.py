"""The policy's calls of one round, for tests whose costs and chances are known."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from foretoken.control.candidates import DraftBudget, DrafterOption, Preview, RequestView, RoundOutcome, StepOutcome
from foretoken.control.chooser import Policy


def options_of(
    request_id: int, drafter: Hashable | None, most: int, is_open: bool = True, preview: Preview | None = None, **given
) -> RequestView:
    """A request with a single drafter; None does not draft."""
    options = () if drafter is None or most < 1 else (DrafterOption(0, drafter, most, preview=preview),)
    return RequestView(request_id, options, None if is_open else most, **given)


def plan(policy: Policy, requests: Sequence[RequestView]) -> list[DraftBudget]:
    """What each may do."""
    policy.begin([request.request_id for request in requests])
    return policy.plan(requests)


def observe(
    policy: Policy,
    requests: Sequence[RequestView],
    budgets: Sequence[DraftBudget],
    accepted: Sequence[int],
    target_s: float,
    draft_s: Mapping[Hashable, float] | None = None,
    num_read: Mapping[Hashable, int] | None = None,
    decision_s: float = 0.0,
) -> None:
    """Of each request's chain the first `accepted` tokens were emitted; drafters took `draft_s`."""
    draft_s, num_read = draft_s or {}, num_read or {}
    rounds = []
    counts: dict[Hashable, list[int]] = {}
    for request, budget, kept in zip(requests, budgets, accepted, strict=True):
        chances = [float(k < kept) for k in range(budget.num_draft)]
        parents = range(-1, budget.num_draft - 1)
        rounds.append(RoundOutcome(request.request_id, budget, chances, parents, range(kept), (0,) * (kept + 1)))
        option = next((one for one in request.options if one.number == budget.option), None)
        if option is None or not budget.num_draft:
            policy.observe_rest(request.request_id)
        elif option.preview is None:
            policy.observe_round(option.drafter, rounds[-1])
            counts.setdefault(option.drafter, []).append(budget.num_draft)
    for drafter, own in counts.items():
        policy.observe_draft(drafter, max(own), draft_s.get(drafter, 0.0), len(own), num_read.get(drafter, 0))
    nodes = sum(budget.num_draft for budget in budgets)
    outcome = StepOutcome(rounds, True, len(requests) + nodes, nodes, target_s, draft_s, num_read)
    policy.observe_step(outcome, decision_s, 0.0)
