"""What is decided about replicas, as arithmetic: which of them reads a conversation, and how many there should be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from foretoken.control.autoscaling import wanted_replicas
from foretoken.server.life.replicas import PrefixRouting


def two_of(prefix: bytes, names: Iterable[str]) -> list[str]:
    """Two replicas for a beginning that nobody has read: the same two at every front, and for most beginnings also
    after a replica has come or gone (highest random weight: Thaler and Ravishankar, 1998).
    """

    def weight(name: str) -> bytes:
        return hashlib.sha256(prefix + name.encode()).digest()

    return sorted(names, key=weight, reverse=True)[:2]


class ReplicaRouting:
    """The same conversation goes to the same replica while that is not much busier than others; a new one to the less
    loaded of two (power of two choices: Mitzenmacher, 2001), and elsewhere if both are much busier than others.
    """

    def __init__(self) -> None:
        self._routing = PrefixRouting[str]()

    def ranked(self, prefix: bytes, loads: Mapping[str, int], wanted: str = "") -> list[str]:
        """The replicas of `loads` (calls in flight by replica), the best first. `wanted` is the one that a message is
        meant for: it goes nowhere else while that replica lives.
        """
        if wanted in loads:
            return [wanted]
        if not loads:
            return []
        two = two_of(prefix, loads)
        chosen = self._routing.choose(prefix, loads, two) if prefix else min(loads, key=loads.__getitem__)
        others = sorted(loads, key=lambda name: (name not in two, loads[name], name))
        return [chosen, *(name for name in others if name != chosen)]


_live: tuple[str, ...] = ()


def note_live(names: Iterable[str]) -> None:
    """Keep the names of the replicas that the router of this process knows: Serve makes it, and hands it to nobody."""
    global _live
    _live = tuple(names)


def live_replicas() -> tuple[str, ...]:
    """The names that `note_live` got last; () before a replica was there."""
    return _live


class ReplicaLoad:
    """An autoscaling policy of Ray Serve: as many replicas as it takes for each to have `aim` of the load `metric`.

    A request that no replica has yet counts as `usual` where none has reported. Ray applies the bounds and the delays.
    """

    def __init__(self, metric: str, aim: float, usual: float) -> None:
        self._metric, self._aim, self._usual = metric, aim, usual

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:  # noqa: ANN401 - ray.serve's AutoscalingContext
        """Replicas wanted, and the policy's state, of which there is none."""
        load = sum((context.aggregated_metrics or {}).get(self._metric, {}).values())
        requests, queued = context.total_num_requests, context.total_queued_requests
        return wanted_replicas(load, requests, queued, self._aim, self._usual), {}
