"""Which replica reads a conversation, and how many there are: arithmetic, without Ray."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from foretoken.control.autoscaling import AIM_SHARE, wanted_replicas
from foretoken.scale.decide import ReplicaLoad, ReplicaRouting, live_replicas, note_live, two_of

NAMES = [f"replica-{number}" for number in range(10)]


def prefix(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_a_conversation_stays_while_its_replica_is_not_much_busier() -> None:
    routing = ReplicaRouting()
    loads = dict.fromkeys(NAMES, 0)
    first = routing.ranked(prefix(1), loads)[0]
    assert routing.ranked(prefix(1), loads | {first: 4})[0] == first
    other = routing.ranked(prefix(1), loads | {first: 5})[0]
    assert other != first
    assert routing.ranked(prefix(1), loads)[0] == other  # which has read it now
    without = {name: 0 for name in NAMES if name != other}
    assert routing.ranked(prefix(1), without)[0] in without


def test_a_new_conversation_takes_the_less_loaded_of_its_two() -> None:
    for number in range(50):
        one, other = two_of(prefix(number), NAMES)
        loads = dict.fromkeys(NAMES, 0) | {one: 2, other: 1}
        assert ReplicaRouting().ranked(prefix(number), loads)[:2] == [other, one]
    ranked = ReplicaRouting().ranked(prefix(0), dict.fromkeys(NAMES, 0))
    assert sorted(ranked) == sorted(NAMES)  # where one is full the next is tried


def test_calls_that_all_begin_alike_use_every_replica() -> None:
    """Those of one application, with a long system prompt: by their two replicas alone the others would be idle."""
    routing, loads = ReplicaRouting(), dict.fromkeys(NAMES, 0)
    for _ in range(100):  # none of which ends
        loads[routing.ranked(prefix(1), loads)[0]] += 1
    assert max(loads.values()) <= min(loads.values()) + 5


def test_the_two_are_spread_and_mostly_survive_a_change() -> None:
    before = {number: two_of(prefix(number), NAMES) for number in range(2000)}
    counts = Counter(name for two in before.values() for name in two)
    assert min(counts.values()) > 300  # 400 each on average, with a deviation of about 18
    after = {number: two_of(prefix(number), NAMES[:-1]) for number in before}
    kept = [number for number in before if before[number] == after[number]]
    assert kept == [number for number, two in before.items() if NAMES[-1] not in two]


def test_a_message_for_one_replica_goes_there_while_it_lives() -> None:
    routing = ReplicaRouting()
    assert routing.ranked(b"", {"a": 9, "b": 0}, "a") == ["a"]
    assert routing.ranked(b"", {"c": 9, "b": 0}, "a") == ["b", "c"]
    assert routing.ranked(b"x", {}) == []


@pytest.mark.parametrize(
    ("queued", "requests", "unrouted", "wanted"),
    [
        (0, 0, 0, 0.0),  # Ray keeps the smallest number
        (1000, 10, 0, 1.0),
        (2500, 10, 0, 2.5),
        (1000, 15, 5, 1.5),  # those in fronts are as long as the others
        (0, 3, 3, 3.0),  # no replica yet
    ],
)
def test_replicas_follow_queued_tokens(queued: float, requests: float, unrouted: float, wanted: float) -> None:
    metrics = {"queued_tokens": {"a": queued / 2, "b": queued / 2}, "other": {"a": 1e9}}
    context = SimpleNamespace(aggregated_metrics=metrics, total_num_requests=requests, total_queued_requests=unrouted)
    assert ReplicaLoad("queued_tokens", 1000, 1000)(context) == (wanted, {})


def test_many_short_requests_do_not_count_as_one_long_one() -> None:
    assert wanted_replicas(100 * 16, 100, 0, 4096, 0) < 1 < wanted_replicas(4 * 4000, 4, 0, 4096, 0)


@pytest.mark.parametrize(
    ("batches", "requests", "unrouted", "wanted"),
    [
        ([0.8, 0.8], 26, 0, 2.0),  # as aimed at
        ([1.0, 2.0], 48, 0, 3.75),
        ([0.5], 10, 2, 0.78125),  # 8 of 16 run: those in fronts are a sixteenth each
        ([], 16, 16, 1.25),  # no replica yet: a full batch waits
    ],
)
def test_without_tokens_replicas_follow_full_batches(
    batches: list[float], requests: float, unrouted: float, wanted: float
) -> None:
    metrics = {"batches": dict(zip("abc", batches, strict=False)), "queued_tokens": {"a": 1e9}}
    context = SimpleNamespace(aggregated_metrics=metrics, total_num_requests=requests, total_queued_requests=unrouted)
    assert ReplicaLoad("batches", AIM_SHARE, 1 / 16)(context) == (pytest.approx(wanted), {})
    assert AIM_SHARE == 0.8


def test_live_replicas_are_those_noted_last() -> None:
    note_live(["a", "b"])
    note_live(name for name in ["b"])
    assert live_replicas() == ("b",)
