"""Requests that arrive, engines that share them, and the virtual time in which all of it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.control.config import DEFAULT, PolicyConfig
from foretoken.errors import ConfigError
from foretoken.option import check_fields, option
from foretoken.plan.profile import Profile
from foretoken.simulate.arrivals import Job
from foretoken.simulate.setting import Limits, SimSetting
from foretoken.simulate.sim_engine import SimEngine, Step
from foretoken.simulate.sim_request import Known, SimRequest, start

DISPATCHES = ("round_robin", "least_loaded")


@dataclass(frozen=True)
class Fleet:
    """Engines that share the arrivals: each request goes to the next one, or to that with the fewest unfinished."""

    replicas: int = field(default=1, metadata=option("Engines that share the requests."))
    dispatch: str = field(
        default="round_robin", metadata=option("How requests are assigned to replicas: {choices}.", choices=DISPATCHES)
    )

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError("replicas", self.replicas, "must be at least 1")
        check_fields(self)


@dataclass(frozen=True)
class Ended:
    """All requests of a simulation, finished, in order of arrival, and the engines that ran them."""

    setting: SimSetting
    requests: tuple[SimRequest, ...]
    engines: tuple[SimEngine, ...]


def simulate(
    profile: Profile,
    jobs: Sequence[Job],
    setting: SimSetting,
    limits: Limits,
    seed: int = 0,
    fleet: Fleet | None = None,
    known: Known | None = None,
    watch: Callable[[Step], None] | None = None,
    config: PolicyConfig = DEFAULT,
) -> Ended:
    """Run `jobs`, in order of arrival, to their end; the same arguments give the same result.

    `known` holds chances or records by drafter and name, for jobs that name theirs; of several records each job draws
    one. `watch` is called after each step; `config` are the policy's constants.

    Raises:
        ConfigError: a drafter that the profile does not know.
        InputError: a prompt beyond the context, or a name without chances.
        CapacityError: a request that the cache can never hold.
    """
    fleet = fleet or Fleet()
    for drafter in setting.drafters:
        if drafter not in profile.drafters:
            names = ", ".join(sorted(profile.drafters)) or "none"
            raise ConfigError("settings", setting.name, f"the profile has no cost of {drafter}; it knows {names}")
    requests = tuple(start(index, job, setting, limits, seed, known or {}) for index, job in enumerate(jobs))
    engines = tuple(SimEngine(number, profile, setting, limits, watch, config) for number in range(fleet.replicas))
    for request in requests:
        for engine in engines:
            engine.run_until(request.job.arrival_s)
        _choose(engines, fleet, request).add(request)
    for engine in engines:
        engine.run_until(float("inf"))
    return Ended(setting, requests, engines)


def _choose(engines: Sequence[SimEngine], fleet: Fleet, request: SimRequest) -> SimEngine:
    if fleet.dispatch == "round_robin":
        return engines[request.index % len(engines)]
    return min(engines, key=lambda engine: engine.load_at(request.job.arrival_s))
