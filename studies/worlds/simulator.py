"""One world under one setting, simulated: the only place that knows the simulator."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foretoken.control.policy import PolicyConfig
from foretoken.control.previews import Preview
from foretoken.plan.profile import DrafterCost, Profile
from foretoken.simulate.arrivals import Job
from foretoken.simulate.metrics import outcome
from foretoken.simulate.records import Record, Records, chain, told
from foretoken.simulate.setting import Limits, parse_setting
from foretoken.simulate.sim_request import Known
from foretoken.simulate.simulate import simulate
from studies.worlds.data import RecordedAnswer, Recording
from studies.worlds.record import PROMPT_TOKENS
from studies.worlds.worlds import World

DRAFTERS = ("ngram", "suffix", "draft_model")
FIXED = tuple(f"{drafter}-{number}" for drafter in DRAFTERS for number in (2, 3, 5, 8))
PLAIN = "plain"
_MAX_PROMPT_TOKENS = 4096
_PAUSE_SHARE, _PAUSE = 0.004, 3.0  # of the steps take so many times as long: machines pause
_WAVES, _LEAST_JOBS = 2, 8


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
    config: PolicyConfig | None = None


def run(world: World, setting: str, machine: Machine, known: Known, answer_tokens: int, seed: int) -> Result:
    """Simulate a world under a setting; steps scatter alike in all settings of a seed."""
    count = max(_WAVES * world.num_requests, _LEAST_JOBS)
    jobs = [Job(0.0, PROMPT_TOKENS, answer_tokens, world.slices[place % len(world.slices)]) for place in range(count)]
    ended = simulate(
        noisy(machine.profile, machine.noise, seed),
        jobs,
        parse_setting(setting, DRAFTERS),
        Limits(world.num_requests, _MAX_PROMPT_TOKENS),
        seed,
        known=known,
        config=machine.config,
    )
    found = outcome(ended)
    return Result(found.tokens_per_s, found.num_drafted, found.num_accepted, found.num_steps)


def known_of(recording: Recording) -> Known:
    """The records of every drafter, by slice."""
    made = {"ngram": _from_looks, "suffix": _from_looks, "draft_model": _from_chains}
    return {
        drafter: {
            name: Records(tuple(make(answer, drafter) for answer in recording.of(name))) for name in recording.slices
        }
        for drafter, make in made.items()
    }


def _from_looks(answer: RecordedAnswer, drafter: str) -> Record:
    looks = answer.looks[drafter]
    previews = [Preview(one.parents, one.chances, one.tokens) for one in looks.places]
    return told(answer.tokens, previews, looks.look_s)


def _from_chains(answer: RecordedAnswer, drafter: str) -> Record:
    rounds = []
    for place, guesses in enumerate(answer.chains[drafter]):
        rest = answer.tokens[place + 1 :]
        kept = next((i for i, (one, other) in enumerate(zip(guesses, rest, strict=False)) if one != other), None)
        rounds.append(chain(len(guesses), min(len(guesses), len(rest)) if kept is None else kept))
    return Record(tuple(rounds))


@dataclass(frozen=True)
class NoisyCost(DrafterCost):
    """A drafter's cost that scatters."""

    rng: random.Random = field(default_factory=random.Random, compare=False)
    noise: float = 0.0

    def seconds(self, num_draft: int, batch: int = 1, prompt_tokens: int = 0) -> float:
        """See `DrafterCost.seconds`."""
        return super().seconds(num_draft, batch, prompt_tokens) * _factor(self.rng, self.noise)


@dataclass(frozen=True)
class NoisyProfile(Profile):
    """A profile whose steps scatter, and now and then take several times as long."""

    rng: random.Random = field(default_factory=random.Random, compare=False)
    noise: float = 0.0

    def step_s(self, decode_rows: int, contexts: Any, prompt_tokens: int = 0) -> float:  # noqa: ANN401 - as in Profile
        """See `Profile.step_s`."""
        return super().step_s(decode_rows, contexts, prompt_tokens) * _factor(self.rng, self.noise)


def noisy(profile: Profile, noise: float, seed: int) -> Profile:
    """The profile with scatter; itself without."""
    if noise == 0:
        return profile
    drafters: Mapping[str, DrafterCost] = {
        name: NoisyCost(**_values(cost), rng=random.Random(f"{name} {seed}"), noise=noise)
        for name, cost in profile.drafters.items()
    }
    values = _values(replace(profile, drafters=drafters))
    return NoisyProfile(**values, rng=random.Random(f"steps {seed}"), noise=noise)


def _factor(rng: random.Random, noise: float) -> float:
    pauses = rng.random() < _PAUSE_SHARE
    return max(0.5, rng.gauss(1.0, noise)) * (_PAUSE if pauses else 1.0)


def _values(value: Profile | DrafterCost) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in fields(value)}
