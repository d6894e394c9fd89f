"""How many replicas a load needs, as arithmetic: Ray Serve's policies and the plan of a fleet ask here."""

from __future__ import annotations

import math

# Near a full batch queued tokens fall much faster than the load of a replica: with all of a wish downwards taken at
# once, steady traffic gets too few replicas, then too many, for ever (tests/simulate/fleet/test_day.py).
DOWN_SHARE = 0.2
# What is aimed at where no number of tokens is given: so many requests of a full batch. Beyond 0.9 requests begin to
# wait for others to end while a replica starts; below 0.7 replicas cost more and first tokens come no sooner.
# Seconds of work are no measure: what one answer takes is more than a second on one machine, and a batch on another.
AIM_SHARE = 0.8


def wanted_replicas(load: float, num_requests: float, num_unrouted: float, aim: float, usual: float) -> float:
    """Replicas for a load, in any unit: that of all replicas together, of which each is to have `aim`.

    `num_requests` are those in replicas and fronts; the `num_unrouted` still in fronts count with the mean of the
    others, or `usual` where there are no others.
    """
    num_routed = num_requests - num_unrouted
    mean = load / num_routed if num_routed > 0 and load else usual
    return (load + num_unrouted * mean) / aim


def stepped_replicas(wanted: float, live: int) -> int:
    """The number of replicas to go to from `live` ones that serve: all that are `wanted` upwards, `DOWN_SHARE` of the
    way downwards, at least one; as Ray Serve does with that `downscaling_factor`.
    """
    if wanted >= live:
        return math.ceil(wanted)
    down = math.ceil(live + DOWN_SHARE * (wanted - live))
    return down - 1 if down == live and math.ceil(wanted) < live else down
