"""Rules of other engines for how many guesses a round gets, each in the place of `control.policy.BudgetPolicy`, to be
compared with it.

Like the policy they decide before anything of the round is drawn and learn from finished rounds only, and a number that
the caller set stands. None of them looks at what a step costs; that is what they are compared for.
"""

# ruff: noqa: ARG002 - a rule is told more than it looks at

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence

from foretoken.control.candidates import NO_DRAFT, DraftBudget, RequestOptions
from foretoken.control.cost import CostTable
from foretoken.control.previews import Preview
from foretoken.errors import InputError

TABLE: Mapping[int, int] = {1: 5, 4: 3, 16: 1, 32: 0}
STEP_SETS: Mapping[int, tuple[int, ...]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
_EMA_WEIGHT = 0.2
_WARM_ROUNDS = 10
_EVERY = 5
_FIRST_STEPS = 3
_HALF, _DOWN_HYSTERESIS = 0.5, -0.25
_HEURISTIC_FIRST, _HEURISTIC_MORE, _HEURISTIC_LESS = 5, 2, 1


class _Rule:
    """What the rules have in common: the first drafter of a request guesses, and what guesses stood is told in one way.

    Costs are kept for the controller's own accounts; no rule looks at them.
    """

    def __init__(self) -> None:
        self.target_cost = CostTable()
        self._granted: dict[
            int, int
        ] = {}  # guesses of the round that was planned last, of requests that left the number open

    def plan(self, wishes: Sequence[RequestOptions]) -> list[DraftBudget]:
        """The rule's number for every request that left it open, as far as its drafter can use it."""
        drafting = {wish.request_id for wish in wishes if wish.is_open and wish.arms}
        numbers = self._numbers_for(wishes)
        grants = [_granted(wish, number) for wish, number in zip(wishes, numbers, strict=True)]
        self._granted = {
            wish.request_id: grant.num_draft
            for wish, grant in zip(wishes, grants, strict=True)
            if wish.request_id in drafting
        }
        return grants

    def observe_step(
        self, num_rows: int, num_nodes: int, target_s: float, num_tokens: int = 0, draft_s: float = 0.0
    ) -> None:
        """For the controller's accounts."""
        self.target_cost.observe(num_rows, target_s)

    def observe_draft(
        self, drafter: Hashable, longest: int, draft_s: float, num_requests: int = 1, num_read_tokens: int = 0
    ) -> None:
        """Not looked at."""

    def observe_round(
        self,
        request_id: int,
        drafter: Hashable,
        num_offered: int,
        chances: Sequence[float],
        parents: Sequence[int] = (),
    ) -> None:
        """Guesses that stood."""
        if self._granted.get(request_id):
            self._saw(request_id, len(chances), sum(chances))

    def observe_preview(self, request_id: int, drafter: Hashable, look: Preview, found: Sequence[bool | None]) -> None:
        """The same of a drafter that shows its guesses, as far as they were used."""
        used = found[: self._granted.get(request_id, 0)]
        if used:
            self._saw(request_id, len(used), sum(right is True for right in used))

    def observe_rest(self, request_id: int) -> None:
        """Not looked at."""

    def finish(self, request_id: int) -> None:
        """Drop what is kept of a request."""
        self._granted.pop(request_id, None)

    def _numbers_for(self, wishes: Sequence[RequestOptions]) -> list[int]:
        """A number for each request."""
        raise NotImplementedError

    def _saw(self, request_id: int, num_guesses: int, num_accepted: float) -> None:
        """Take in that so many of a request's guesses stood."""


class BatchTable(_Rule):
    """A number of guesses by the size of the batch, the same for all its requests, as vLLM's dynamic speculation takes
    from a table.

    `table` maps the least size of a batch to the number that it gets; smaller batches than any in it get the first
    number.

    Raises:
        InputError: an empty table, a size below 1 or a number below 0.
    """

    def __init__(self, table: Mapping[int, int] = TABLE) -> None:
        if not table or min(table) < 1 or min(table.values()) < 0:
            raise InputError(
                "table",
                dict(table),
                "must map batch sizes of at least 1 to numbers of guesses of at least 0, such as 1:5,4:3,16:1",
            )
        super().__init__()
        self.table = dict(sorted(table.items()))

    def _numbers_for(self, wishes: Sequence[RequestOptions]) -> list[int]:
        return [self.table[_slot(tuple(self.table), len(wishes))]] * len(wishes)


def measured_table(tokens_per_s: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    """The table whose number of guesses was the fastest at every batch size; the smaller of two that were equally fast.

    `tokens_per_s` holds what each number of guesses reached, by batch size and number.
    """
    return {batch: max(sorted(speeds), key=speeds.__getitem__) for batch, speeds in tokens_per_s.items()}


class _StepSlot:
    """The chosen one of some step numbers, moved by an average of accepted guesses."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = sorted(steps)
        self.current = _FIRST_STEPS if _FIRST_STEPS in self.steps else self.steps[len(self.steps) // 2]
        self.mean_accepted = float(self.current - 1)
        self._num_rounds = 0

    def take_in(self, accepted: Sequence[float]) -> None:
        """Count a round; `accepted` holds the guesses that stood for every request that drafted."""
        if self.current and accepted:
            self.mean_accepted += _EMA_WEIGHT * (sum(accepted) / len(accepted) - self.mean_accepted)
        self._num_rounds += 1
        if self._num_rounds > _WARM_ROUNDS and (self._num_rounds - _WARM_ROUNDS) % _EVERY == 0:
            self.current = self.steps[self._next_place(self.steps.index(self.current))]

    def _next_place(self, place: int) -> int:
        lowest = place
        while lowest and self.mean_accepted <= max(_HALF, self.steps[lowest - 1] - _HALF) + _DOWN_HYSTERESIS:
            lowest -= 1
        if lowest < place:
            return lowest
        # From 0 it always rises: an interval without guesses is followed by a trial.
        while place < len(self.steps) - 1 and self.mean_accepted > self.steps[place] - _HALF:
            place += 1
        return place


class EmaRule(_Rule):
    """SGLang's adaptive speculation (`adaptive_spec_params.py`): an exponential mean of the guesses accepted per round
    and request moves the number of guesses within a set of steps that belongs to the size of the batch.

    Weight 0.2, nothing changes in the first 10 rounds, then every 5th may change; going down needs a quarter of a guess
    more than going up; after an interval without guesses the least number is tried. Where a rule tells probabilities of
    acceptance, these are averaged.
    """

    def __init__(self, step_sets: Mapping[int, Sequence[int]] = STEP_SETS) -> None:
        if not step_sets or not all(step_sets.values()):
            raise InputError(
                "step_sets", dict(step_sets), "must map batch sizes to numbers of guesses, at least one each"
            )
        super().__init__()
        self.slots = {batch: _StepSlot(steps) for batch, steps in sorted(step_sets.items())}
        self._last: _StepSlot | None = None
        self._accepted: list[float] = []

    def _numbers_for(self, wishes: Sequence[RequestOptions]) -> list[int]:
        if self._last is not None:
            self._last.take_in(self._accepted)
        self._accepted = []
        slot = self.slots[_slot(tuple(self.slots), len(wishes))]
        self._last = slot if any(wish.is_open and wish.arms for wish in wishes) else None
        return [slot.current] * len(wishes)

    def _saw(self, request_id: int, num_guesses: int, num_accepted: float) -> None:
        self._accepted.append(num_accepted)


class HeuristicRule(_Rule):
    """The schedule "heuristic" of transformers' assisted generation, for each request: two guesses more after a round
    in which all of them stood, one less after any other, never fewer than one. It begins with 5. A round without a
    guess changes nothing."""

    def __init__(self, first: int = _HEURISTIC_FIRST) -> None:
        if first < 1:
            raise InputError("first", first, "must be at least 1")
        super().__init__()
        self.first = first
        self._numbers: dict[int, int] = {}

    def finish(self, request_id: int) -> None:
        """Drop its number."""
        super().finish(request_id)
        self._numbers.pop(request_id, None)

    def _numbers_for(self, wishes: Sequence[RequestOptions]) -> list[int]:
        return [self._numbers.get(wish.request_id, self.first) for wish in wishes]

    def _saw(self, request_id: int, num_guesses: int, num_accepted: float) -> None:
        if num_guesses:
            number = self._numbers.get(request_id, self.first)
            all_stood = num_accepted > num_guesses - _HALF
            self._numbers[request_id] = number + _HEURISTIC_MORE if all_stood else max(1, number - _HEURISTIC_LESS)


def _slot(sizes: Sequence[int], batch: int) -> int:
    """The largest of `sizes` (in order) that is not above `batch`, or the first one."""
    return sizes[max(0, bisect_right(sizes, batch) - 1)]


def _granted(wish: RequestOptions, number: int) -> DraftBudget:
    if not wish.arms:
        return NO_DRAFT
    arm = wish.arms[0]
    count = min(number, arm.most) if wish.is_open else arm.most
    return DraftBudget(arm.number, count) if count else NO_DRAFT
