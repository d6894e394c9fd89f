"""One world under one setting, simulated: the only place that knows the simulator."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foretoken.control.candidates import Preview
from foretoken.control.config import DEFAULT, PolicyConfig
from foretoken.plan.profile import DrafterCost, Profile
from foretoken.simulate.inputs import AUTO, Job, Limits, SimSetting, parse_setting
from foretoken.simulate.metrics import outcome
from foretoken.simulate.sim_request import Known, Record, Records, chain
from foretoken.simulate.simulate import simulate
from studies.validation.records import told
from studies.worlds.data import Look, RecordedAnswer, Recording
from studies.worlds.record import PROMPT_TOKENS
from studies.worlds.worlds import World

DRAFTERS = ("suffix", "draft_model")  # that auto chooses among
FIXED = tuple(f"{drafter}-{number}" for drafter in ("ngram", *DRAFTERS) for number in (2, 3, 5, 8))
PLAIN = "plain"
_MAX_PROMPT_TOKENS = 4096
_PAUSE_SHARE, _PAUSE = 0.004, 3.0  # of the steps take so many times as long: machines pause
_DISTURBED_NOISE, _DISTURBED_PAUSE_SHARE, _DISTURBED_PAUSE = 0.15, 0.02, 8.0
_SLOW, _PERIOD = 1.8, 100  # a disturbed machine is so much slower in every second period of so many calls
_WAVES, _MIN_JOBS = 2, 8


@dataclass(frozen=True)
class Result:
    """What a simulation came to."""

    tokens_per_s: float
    num_drafted: int
    num_accepted: int
    num_steps: int


@dataclass(frozen=True)
class Machine:
    """What steps cost, and the policy: steps differ from the profile by `noise`, a relative standard deviation."""

    profile: Profile
    noise: float = 0.0
    config: PolicyConfig = DEFAULT


@dataclass
class Scatter:
    """By what factor a call takes longer than the profile says; `disturbance` is shared by target and drafters."""

    rng: random.Random
    noise: float
    disturbance: list[int] | None = None  # calls so far, where other work disturbs the machine

    def factor(self) -> float:
        """Of the next call."""
        if self.disturbance is None:
            pauses = self.rng.random() < _PAUSE_SHARE
            return max(0.5, self.rng.gauss(1.0, self.noise)) * (_PAUSE if pauses else 1.0)
        self.disturbance[0] += 1
        pauses = self.rng.random() < _DISTURBED_PAUSE_SHARE
        slow = _SLOW if self.disturbance[0] // _PERIOD % 2 else 1.0
        return slow * max(0.5, self.rng.gauss(1.0, _DISTURBED_NOISE)) * (_DISTURBED_PAUSE if pauses else 1.0)


def run(world: World, setting: str, machine: Machine, known: Known, answer_tokens: int, seed: int) -> Result:
    """Simulate a world under a setting; steps scatter alike in all settings of a seed."""
    count = max(_WAVES * world.num_requests, _MIN_JOBS)
    jobs = [Job(0.0, PROMPT_TOKENS, answer_tokens, world.slices[place % len(world.slices)]) for place in range(count)]
    ended = simulate(
        noisy(machine.profile, machine.noise, seed, world.condition == "disturbed machine"),
        jobs,
        SimSetting(DRAFTERS, None) if setting == AUTO else parse_setting(setting),
        Limits(world.num_requests, _MAX_PROMPT_TOKENS),
        seed,
        known=known,
        config=machine.config,
    )
    found = outcome(ended)
    return Result(found.tokens_per_s, found.num_drafted, found.num_accepted, found.num_steps)


def known_of(recording: Recording, world: World) -> Known:
    """The records of every drafter, by slice of a world."""
    made = {"ngram": _from_looks, "suffix": _from_looks, "draft_model": _from_chains}
    return {
        drafter: {
            name: Records(tuple(make(answer, drafter, world) for answer in recording.of(name))) for name in world.slices
        }
        for drafter, make in made.items()
    }


def _from_looks(answer: RecordedAnswer, drafter: str, world: World) -> Record:
    looks = answer.looks[drafter]
    previews = [Preview(one.parents, _named(one, world), one.tokens) for one in looks.places]
    return told(answer.tokens, previews, looks.look_s)


def _named(look: Look, world: World) -> tuple[float, ...]:
    """The chances that a lookup names, all of them wrong where the world says so."""
    if world.condition == "chances too high":
        return tuple(chance**0.25 for chance in look.chances)
    return tuple(0.3 * chance for chance in look.chances) if world.condition == "chances too low" else look.chances


def _from_chains(answer: RecordedAnswer, drafter: str, world: World) -> Record:  # noqa: ARG001 - as `_from_looks`
    rounds = []
    for place, drafted in enumerate(answer.chains[drafter]):
        rest = answer.tokens[place + 1 :]
        kept = next((i for i, (one, other) in enumerate(zip(drafted, rest, strict=False)) if one != other), None)
        rounds.append(chain(len(drafted), min(len(drafted), len(rest)) if kept is None else kept))
    return Record(tuple(rounds))


@dataclass(frozen=True)
class NoisyCost(DrafterCost):
    """A drafter's cost that scatters."""

    scatter: Scatter | None = field(default=None, compare=False)

    def seconds(self, num_draft: int, batch: int = 1, prompt_tokens: int = 0) -> float:
        """See `DrafterCost.seconds`."""
        assert self.scatter is not None
        return super().seconds(num_draft, batch, prompt_tokens) * self.scatter.factor()


@dataclass(frozen=True)
class NoisyProfile(Profile):
    """A profile whose steps scatter, and now and then take several times as long."""

    scatter: Scatter | None = field(default=None, compare=False)

    def step_s(self, decode_rows: int, contexts: Any, prompt_tokens: int = 0) -> float:  # noqa: ANN401 - as in Profile
        """See `Profile.step_s`."""
        assert self.scatter is not None
        return super().step_s(decode_rows, contexts, prompt_tokens) * self.scatter.factor()


def noisy(profile: Profile, noise: float, seed: int, is_disturbed: bool = False) -> Profile:
    """The profile with scatter; itself without."""
    if noise == 0 and not is_disturbed:
        return profile
    calls = [0] if is_disturbed else None
    drafters: Mapping[str, DrafterCost] = {
        name: NoisyCost(**_values(cost), scatter=Scatter(random.Random(f"{name} {seed}"), noise, calls))
        for name, cost in profile.drafters.items()
    }
    values = _values(replace(profile, drafters=drafters))
    return NoisyProfile(**values, scatter=Scatter(random.Random(f"steps {seed}"), noise, calls))


def _values(value: Profile | DrafterCost) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in fields(value)}
