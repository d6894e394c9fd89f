"""What `engine.controller` does around the policy, for simulated requests: their wishes, the looks they show, and what
a round taught.

A setting has one drafter. Draft probabilities, probes, routing rules and slices play no part in a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.control.candidates import RequestOptions, options_of, weight_of
from foretoken.control.policy import MOST_NUM_DRAFT, BudgetPolicy
from foretoken.control.previews import NO_PREVIEW, Preview, PreviewThrottle, outcomes, reach
from foretoken.simulate.records import Ready, Round
from foretoken.simulate.setting import SimSetting
from foretoken.simulate.sim_request import SimRequest


class Chooser:
    """Chooses how much is guessed in each round; it learns from finished rounds only."""

    def __init__(self, setting: SimSetting) -> None:
        self.setting = setting
        self.policy = BudgetPolicy()
        self._shown: dict[int, Ready] = {}  # in this round, by request
        self._sights: dict[int, PreviewThrottle] = {}
        self._last_grants: dict[int, int] = {}

    def plan(self, anchors: Sequence[SimRequest], clock_s: float) -> list[int]:
        """Guesses for each of the requests that decode in the next step."""
        self._shown.clear()
        return (
            [grant.num_draft for grant in self.policy.plan([self._wish(one, len(anchors), clock_s) for one in anchors])]
            if anchors
            else []
        )

    def observe_step(self, num_rows: int, rounds: Sequence[Round], target_s: float, draft_s: float) -> None:
        """Take in a step in which nothing but decoding ran."""
        num_tokens = len(rounds) + sum(len(found.path) for found in rounds)
        self.policy.observe_step(num_rows, num_rows - len(rounds), target_s, num_tokens, draft_s)

    def observe_round(self, course: SimRequest, budget: int, found: Round) -> None:
        """Take in one request's round; called before the request goes on."""
        drafter = self.setting.drafter
        ready = self._shown.get(course.index)
        if ready is not None:
            assert course.record is not None
            right = outcomes(
                ready.look, ready.tokens, course.record.emitted(course.num_emitted - 1, len(found.path) + 1)
            )
            self._sights[course.index].brought(sum(one is True for one in right))
            self.policy.observe_preview(course.index, drafter, ready.look, right)
        if drafter is None or not budget:
            self.policy.observe_rest(course.index)
            return
        self._last_grants[course.index] = budget
        if ready is None:
            chances = [float(node in found.path) for node in range(len(found.parents))]
            self.policy.observe_round(course.index, drafter, budget, chances, found.parents)

    def observe_draft(self, drafting: Sequence[tuple[SimRequest, int]], draft_s: float, num_unread: int) -> None:
        """Take in what the drafter took for requests with their budgets; guesses that were shown were paid for
        before.
        """
        blind = [budget for course, budget in drafting if course.index not in self._shown]
        if blind:
            self.policy.observe_draft(self.setting.drafter, max(blind), draft_s, len(blind), num_unread)

    def finish(self, index: int) -> None:
        """Forget a request."""
        self._shown.pop(index, None)
        self._sights.pop(index, None)
        self._last_grants.pop(index, None)
        self.policy.finish(index)

    def _wish(self, course: SimRequest, num_running: int, clock_s: float) -> RequestOptions:
        drafter, is_open, left = (
            self.setting.drafter,
            self.setting.num_draft is None,
            course.output_tokens - course.num_emitted,
        )
        most = min(MOST_NUM_DRAFT if self.setting.num_draft is None else self.setting.num_draft, course.most_guesses)
        look = self._see(course, most, num_running) if is_open and drafter is not None and most > 0 else None
        num_draft = most if look is None else len(look.parents)
        return options_of(
            course.index,
            drafter,
            num_draft,
            is_open,
            course.tokens,
            left,
            self._weight(course, left, num_running, clock_s),
            look,
        )

    def _see(self, course: SimRequest, most: int, num_running: int) -> Preview | None:
        """The guesses that are ready; None of a drafter that does not show them."""
        if course.record is None or not course.record.ready:
            return None
        sight = self._sights.setdefault(course.index, PreviewThrottle())
        if not sight.opens(self.policy.target_cost.seconds(num_running) / num_running):
            return NO_PREVIEW
        ready = course.record.ready_at(course.num_emitted - 1, min(most, reach(self._last_grants.get(course.index, 0))))
        sight.took(course.record.look_s)
        self._shown[course.index] = ready
        return ready.look

    def _weight(self, course: SimRequest, num_remaining: int, num_running: int, clock_s: float) -> float:
        job = course.job
        if not job.priority and job.deadline_s is None:
            return 1.0
        left_s = None if job.deadline_s is None else job.arrival_s + job.deadline_s - clock_s
        return weight_of(job.priority, left_s, num_remaining * self.policy.target_cost.seconds(num_running))
