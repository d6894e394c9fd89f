"""How many replicas queued tokens need, as arithmetic: Ray Serve's policy and the plan of a fleet ask here."""

from __future__ import annotations


def wanted_replicas(queued_tokens: float, num_requests: float, num_unrouted: float, replica_tokens: int) -> float:
    """Replicas that `queued_tokens` need. `num_requests` are those in replicas and fronts; the `num_unrouted` still in
    fronts count with the mean of the others, or `replica_tokens` where there are no others.
    """
    num_routed = num_requests - num_unrouted
    mean = queued_tokens / num_routed if num_routed > 0 and queued_tokens else replica_tokens
    return (queued_tokens + num_unrouted * mean) / replica_tokens
