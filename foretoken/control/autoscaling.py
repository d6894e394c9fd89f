"""How many replicas queued tokens need, as arithmetic: Ray Serve's policy and the plan of a fleet ask here."""

from __future__ import annotations

import math

# Near a full batch queued tokens fall much faster than the load of a replica: with all of a wish downwards taken at
# once, steady traffic gets too few replicas, then too many, for ever (tests/simulate/fleet/test_day.py).
DOWN_SHARE = 0.2


def wanted_replicas(queued_tokens: float, num_requests: float, num_unrouted: float, replica_tokens: int) -> float:
    """Replicas that `queued_tokens` need. `num_requests` are those in replicas and fronts; the `num_unrouted` still in
    fronts count with the mean of the others, or `replica_tokens` where there are no others.
    """
    num_routed = num_requests - num_unrouted
    mean = queued_tokens / num_routed if num_routed > 0 and queued_tokens else replica_tokens
    return (queued_tokens + num_unrouted * mean) / replica_tokens


def stepped_replicas(wanted: float, live: int) -> int:
    """The number of replicas to go to from `live` ones that serve: all that are `wanted` upwards, `DOWN_SHARE` of the
    way downwards, at least one; as Ray Serve does with that `downscaling_factor`.
    """
    if wanted >= live:
        return math.ceil(wanted)
    down = math.ceil(live + DOWN_SHARE * (wanted - live))
    return down - 1 if down == live and math.ceil(wanted) < live else down
