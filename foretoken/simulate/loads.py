"""Built-in traces, scaled to a machine: a steady stream, bursts, a ramp to nearly full load, and by name one into
overload.

Rates are shares of what the slowest of the settings manages, so the same names mean the same load on any machine and
under any setting: how long requests wait is then a property of the system, and not of which side of full load it
happens to be on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.plan.profile import Profile
from foretoken.simulate.inputs import Job, Lengths, Limits, SimSetting
from foretoken.simulate.sim_request import Known
from foretoken.simulate.simulate import simulate

_FEWEST_S, _MAX_S = 12.0, 40.0  # bounds of a trace's length
_ALONE_TIMES = 20.0  # a trace lasts so many times as long as one answer alone
_SAMPLE = 8  # requests per place of the batch, for the capacity


@dataclass(frozen=True)
class Phase:
    """A part of a trace: its share of the time, and the rate at its begin and at its end, as shares of the capacity."""

    share: float
    begin: float
    end: float


@dataclass(frozen=True)
class LoadShape:
    """What a built-in trace is made of: phases in sequence, `times` over; slices that take turns at random; lengths."""

    phases: tuple[Phase, ...]
    slices: tuple[str, ...]
    prompts: Lengths
    outputs: Lengths
    times: int = 1


SHAPES: dict[str, LoadShape] = {
    "steady": LoadShape((Phase(1.0, 0.6, 0.6),), ("code",), Lengths(32, 96), Lengths(32, 64)),
    "bursts": LoadShape(
        (Phase(0.2, 1.2, 1.2), Phase(0.8, 0.4, 0.4)),
        ("code", "docstring", "edit", "json", "text"),
        Lengths(16, 160),
        Lengths(16, 80),
        6,
    ),
    "ramp": LoadShape((Phase(1.0, 0.2, 0.9),), ("code", "docstring"), Lengths(32, 96), Lengths(24, 48)),
    "overload": LoadShape(
        (Phase(0.5, 0.2, 2.0), Phase(0.5, 0.1, 0.1)), ("code", "docstring"), Lengths(32, 96), Lengths(24, 48)
    ),
}


@dataclass(frozen=True)
class Server:
    """Who is to serve a trace: the machine, the limits, and the settings with what is known of their draft tokens."""

    profile: Profile
    limits: Limits
    settings: tuple[SimSetting, ...] = (SimSetting(),)
    known: Known = field(default_factory=dict)

    def capacity(self, jobs: Sequence[Job]) -> float:
        """Requests per second that the slowest setting finishes when all of `jobs` are there at once."""
        return min(self._rate(jobs, setting, self.limits) for setting in self.settings)

    def alone_s(self, jobs: Sequence[Job]) -> float:
        """What one request takes on the average that has an engine without a draft for itself."""
        return 1 / self._rate(jobs, SimSetting(), replace(self.limits, max_batch_size=1, max_step_tokens=None))

    def _rate(self, jobs: Sequence[Job], setting: SimSetting, limits: Limits) -> float:
        ended = simulate(self.profile, [replace(job, arrival_s=0.0) for job in jobs], setting, limits, known=self.known)
        return len(jobs) / max(engine.clock_s for engine in ended.engines)


def sample(name: str, count: int, seed: int) -> list[Job]:
    """`count` requests such as a built-in trace consists of, all there from the begin."""
    rng = random.Random(f"trace {name} {seed}")
    return [_request(SHAPES[name], rng) for _ in range(count)]


def built_in(name: str, server: Server, seed: int, seconds: float | None = None) -> list[Job]:
    """The requests of a built-in trace for `server`; `seconds` is how long they come, chosen by the machine if None."""
    few = sample(name, _SAMPLE * server.limits.max_batch_size, seed)
    if seconds is None:
        seconds = min(_MAX_S, max(_FEWEST_S, _ALONE_TIMES * server.alone_s(few)))
    shape, rng = SHAPES[name], random.Random(f"arrivals {name} {seed}")
    times = _arrivals(shape, server.capacity(few), seconds, rng)
    return [replace(_request(shape, rng), arrival_s=time_s) for time_s in times]


def _request(shape: LoadShape, rng: random.Random) -> Job:
    return Job(0.0, shape.prompts.draw(rng), shape.outputs.draw(rng), rng.choice(shape.slices))


def _arrivals(shape: LoadShape, rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Times of a Poisson process whose rate follows the phases; at least one."""
    phases = [replace(phase, share=phase.share / shape.times) for _ in range(shape.times) for phase in shape.phases]
    highest = max(max(phase.begin, phase.end) for phase in phases) * rate
    times: list[float] = []
    now = 0.0
    while now < seconds or not times:
        now += rng.expovariate(highest)
        if rng.random() * highest < _rate(phases, min(now / seconds, 1.0)) * rate:  # thinning
            times.append(now)
    return times if times[-1] < seconds or len(times) == 1 else times[:-1]


def _rate(phases: Sequence[Phase], place: float) -> float:
    for phase in phases:
        if place <= phase.share:
            return phase.begin + (phase.end - phase.begin) * place / phase.share
        place -= phase.share
    return phases[-1].end
