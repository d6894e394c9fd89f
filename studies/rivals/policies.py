"""How other engines choose the number of draft tokens, as policies in place of `control.policy.BudgetPolicy`.

Like that policy they decide before any token of the round is drawn, learn from finished rounds only, and keep a number
that the caller set. None of them takes the cost of a step into account, which is what the comparison is about.
"""

# ruff: noqa: ARG002, B027 - a policy is told more than these use

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence

from foretoken.control.candidates import (
    NO_DRAFT,
    DraftBudget,
    Mode,
    NoDraftReason,
    Preview,
    RequestView,
    RoundOutcome,
    StepOutcome,
)
from foretoken.control.chooser import Policy
from foretoken.control.cost import CostTable
from foretoken.errors import InputError
from foretoken.params import is_count

MEASURED = "measured"
TABLE: Mapping[int, int] = {1: 5, 4: 3, 16: 1, 32: 0}
STEP_SETS: Mapping[int, tuple[int, ...]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
_EMA_WEIGHT = 0.2
_WARM_ROUNDS = 10
_EVERY = 5
_FIRST_STEPS = 3
_HALF, _DOWN_HYSTERESIS = 0.5, -0.25
_HEURISTIC_FIRST, _HEURISTIC_MORE, _HEURISTIC_LESS = 5, 2, 1


class _RivalPolicy(ABC):
    """What these policies share: a request uses its first drafter, and accepted draft tokens are counted in one way.

    Step costs are recorded for the weights of late requests, and not used.
    """

    def __init__(self) -> None:
        self.target_cost = CostTable()
        self._granted: dict[int, int] = {}  # draft tokens of the last planned round, by request with an open number

    def plan(self, requests: Sequence[RequestView]) -> list[DraftBudget]:
        """The policy's number for every request that left it open, at most what its drafter can use."""
        drafting = {request.request_id for request in requests if request.is_open and request.options}
        numbers = self._numbers_for(requests)
        grants = [_granted(request, number) for request, number in zip(requests, numbers, strict=True)]
        self._granted = {
            request.request_id: grant.num_draft
            for request, grant in zip(requests, grants, strict=True)
            if request.request_id in drafting
        }
        return grants

    def begin(self, request_ids: Sequence[int], may_draft: bool = True) -> Mode:
        """In every round."""
        return "decide"

    def observe_step(self, step: StepOutcome, decision_s: float, preview_s: float) -> None:
        """Record the step's cost."""
        if step.only_decodes:
            self.target_cost.observe(step.num_rows, step.target_s)

    def observe_host(self, host_s: float) -> None:
        """Not used."""

    def observe_draft(
        self, drafter: Hashable, longest: int, draft_s: float, num_requests: int, num_read_tokens: int
    ) -> None:
        """Not used."""

    def observe_round(self, drafter: Hashable, round_: RoundOutcome) -> None:
        """Count accepted draft tokens."""
        if self._granted.get(round_.request_id) and round_.chances is not None:
            self._saw(round_.request_id, len(round_.chances), sum(round_.chances))

    def observe_preview(
        self, request_id: int, drafter: Hashable, preview: Preview, found: Sequence[bool | None]
    ) -> None:
        """Count accepted tokens of a preview, as far as it was drafted."""
        used = found[: self._granted.get(request_id, 0)]
        if used:
            self._saw(request_id, len(used), sum(right is True for right in used))

    def observe_rest(self, request_id: int) -> None:
        """Not used."""

    def why_none(self, request_id: int) -> NoDraftReason:
        """Its number is 0."""
        return "k0_cost"

    def finish(self, request_id: int) -> None:
        """Drop what is kept of a request."""
        self._granted.pop(request_id, None)

    @abstractmethod
    def _numbers_for(self, requests: Sequence[RequestView]) -> list[int]:
        """A number for each request."""

    def _saw(self, request_id: int, num_drafted: int, num_accepted: float) -> None:
        """Observe that `num_accepted` of a request's `num_drafted` draft tokens were accepted."""


class BatchTable(_RivalPolicy):
    """A number of draft tokens by batch size, the same for all requests: vLLM's dynamic speculation.

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
                "must map batch sizes of at least 1 to numbers of draft tokens of at least 0, such as 1:5,4:3,16:1",
            )
        super().__init__()
        self.table = dict(sorted(table.items()))

    def _numbers_for(self, requests: Sequence[RequestView]) -> list[int]:
        return [self.table[_slot(tuple(self.table), len(requests))]] * len(requests)


def measured_table(tokens_per_s: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    """The table of the fastest number of draft tokens by batch size; the smaller of two that are equally fast.

    `tokens_per_s` is by batch size and number of draft tokens.
    """
    return {batch: max(sorted(speeds), key=speeds.__getitem__) for batch, speeds in tokens_per_s.items()}


class _StepSlot:
    """One of several numbers of draft tokens, chosen by a moving average of accepted tokens."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = sorted(steps)
        self.current = _FIRST_STEPS if _FIRST_STEPS in self.steps else self.steps[len(self.steps) // 2]
        self.mean_accepted = float(self.current - 1)
        self._num_rounds = 0

    def take_in(self, accepted: Sequence[float]) -> None:
        """Count a round; `accepted` holds the accepted tokens of every request that drafted."""
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
        # From 0 it always rises: an interval without drafting is followed by a trial.
        while place < len(self.steps) - 1 and self.mean_accepted > self.steps[place] - _HALF:
            place += 1
        return place


class EmaPolicy(_RivalPolicy):
    """SGLang's adaptive speculation (`adaptive_spec_params.py`): an exponential moving average of accepted tokens per
    round and request selects the number of draft tokens from a set that depends on the batch size.

    Weight 0.2; no change in the first 10 rounds, then at most every 5th; going down needs a quarter of a token more
    than going up; after an interval without drafting the smallest number is tried. Where a rule reports acceptance
    probabilities, these are averaged.
    """

    def __init__(self, step_sets: Mapping[int, Sequence[int]] = STEP_SETS) -> None:
        if not step_sets or not all(step_sets.values()):
            raise InputError(
                "step_sets", dict(step_sets), "must map batch sizes to numbers of draft tokens, at least one each"
            )
        super().__init__()
        self.slots = {batch: _StepSlot(steps) for batch, steps in sorted(step_sets.items())}
        self._last: _StepSlot | None = None
        self._accepted: list[float] = []

    def _numbers_for(self, requests: Sequence[RequestView]) -> list[int]:
        if self._last is not None:
            self._last.take_in(self._accepted)
        self._accepted = []
        slot = self.slots[_slot(tuple(self.slots), len(requests))]
        self._last = slot if any(request.is_open and request.options for request in requests) else None
        return [slot.current] * len(requests)

    def _saw(self, request_id: int, num_drafted: int, num_accepted: float) -> None:
        self._accepted.append(num_accepted)


class HeuristicPolicy(_RivalPolicy):
    """The schedule "heuristic" of transformers' assisted generation, per request: two draft tokens more after a round
    in which all were accepted, one less after any other, at least one. It starts with 5; a round without drafting
    changes nothing.
    """

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

    def _numbers_for(self, requests: Sequence[RequestView]) -> list[int]:
        return [self._numbers.get(request.request_id, self.first) for request in requests]

    def _saw(self, request_id: int, num_drafted: int, num_accepted: float) -> None:
        if num_drafted:
            number = self._numbers.get(request_id, self.first)
            all_stood = num_accepted > num_drafted - _HALF
            self._numbers[request_id] = number + _HEURISTIC_MORE if all_stood else max(1, number - _HEURISTIC_LESS)


def rival_policies(table: Mapping[int, int] = TABLE) -> dict[str, Callable[[], Policy]]:
    """The policies by the names that settings of a load measurement use."""
    return {"table": lambda: BatchTable(table), "ema": EmaPolicy, "heuristic": HeuristicPolicy}


def parse_table(text: str) -> dict[int, int] | None:
    """A table written as 1:5,4:3,16:1; None for `measured`.

    Raises:
        InputError: anything else.
    """
    if text == MEASURED:
        return None
    pairs = [part.partition(":") for part in text.split(",") if part.strip()]
    if not pairs or not all(is_count(batch.strip()) and is_count(number.strip()) for batch, _, number in pairs):
        raise InputError(
            "table", text, f"must be BATCH:NUMBER separated by commas, such as {table_text(TABLE)}, or {MEASURED}"
        )
    return BatchTable({int(batch): int(number) for batch, _, number in pairs}).table


def table_text(table: Mapping[int, int]) -> str:
    """The table as `parse_table` reads it."""
    return ",".join(f"{batch}:{number}" for batch, number in table.items())


def _slot(sizes: Sequence[int], batch: int) -> int:
    """The largest of `sizes` (in order) that is not above `batch`, or the first one."""
    return sizes[max(0, bisect_right(sizes, batch) - 1)]


def _granted(request: RequestView, number: int) -> DraftBudget:
    if not request.options:
        return NO_DRAFT
    option = request.options[0]
    count = min(number, option.max_draft) if request.is_open else option.max_draft
    return DraftBudget(option.number, count) if count else NO_DRAFT
