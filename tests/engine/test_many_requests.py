"""Thousands of requests at once: the work per request does not grow with their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from foretoken.control.queue import Queue, SchedulerConfig, urgency
from foretoken.core import StepOutput
from foretoken.engine.driver import Driver, Turns
from foretoken.engine.engine import Engine
from foretoken.engine.request import PreparedRequest


class CountedState:
    """A request that counts how often somebody asks whether it has ended."""

    num_looks = 0

    def __init__(self, request_id: int) -> None:
        self.request_id, self._reason = request_id, cast(str | None, None)

    @property
    def finish_reason(self) -> str | None:
        CountedState.num_looks += 1
        return self._reason

    def end(self) -> None:
        self._reason = "stop"


class OneAtATime:
    """An engine that ends one request in every step, in the order given."""

    def __init__(self, order: Sequence[int]) -> None:
        self.states: dict[int, CountedState] = {}
        self._order = list(order)

    def enqueue(self, prepared: PreparedRequest) -> CountedState:
        state = self.states[len(self.states)] = CountedState(len(self.states))
        return state

    def step(self) -> list[StepOutput]:
        self.states[self._order.pop(0)].end()
        return []

    def abort(self, request_id: int) -> None:
        """All have ended."""


@pytest.mark.parametrize("order", [range(1000), range(999, -1, -1), [*range(500, 1000), *range(500)]])
def test_waiting_for_many_answers_looks_at_each_a_few_times(order: Sequence[int]) -> None:
    CountedState.num_looks = 0
    driver = Driver(cast(Engine, OneAtATime(order)), Turns(), "it", lambda: None, lambda: None)
    states = driver.answer([cast(PreparedRequest, None)] * 1000, None)
    assert [state.request_id for state in states] == list(range(1000))
    assert CountedState.num_looks < 4 * 1000


@dataclass
class Waiting:
    """A request as the queue sees it."""

    request_id: int
    num_tokens: int = 1
    has_emitted: bool = False


class CountingQueue(Queue[Waiting]):
    """Counts how often two requests are compared."""

    num_keys = 0

    def key(self, request: Waiting) -> Any:
        self.num_keys += 1
        return super().key(request)


def test_leaving_a_long_queue_looks_at_few_others() -> None:
    queue = CountingQueue(cast(Any, None), SchedulerConfig())
    for number in range(1000):
        queue.enqueue(Waiting(number), urgency(number, 0.0, number % 7, None, 30.0))
    queue.num_keys = 0
    assert all(queue.remove(number) == Waiting(number) for number in range(0, 1000, 2))
    assert queue.remove(0) is queue.remove(5000) is None
    assert queue.num_keys < 500 * 12
    assert sorted(one.request_id for one in queue.waiting) == list(range(1, 1000, 2))
    assert queue.waiting == sorted(queue.waiting, key=queue.key)
    assert queue.remove(1) == Waiting(1)
    assert queue.remove(1) is None
