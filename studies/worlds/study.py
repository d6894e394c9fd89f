"""Every world under the full policy, under each ablation, without drafting and under each fixed setting."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from foretoken.plan.profile import Profile
from studies.worlds.ablations import FULL, Ablation
from studies.worlds.data import Recording
from studies.worlds.simulator import FIXED, PLAIN, Machine, known_of, run
from studies.worlds.worlds import World

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Tokens per second of one setting in a world, the mean over seeds; `ablation` is `full` where none applies."""

    world: str
    setting: str
    ablation: str
    tokens_per_s: float
    num_drafted: float
    num_accepted: float


@dataclass(frozen=True)
class Comparison:
    """A policy against a reference over worlds: geometric mean, worst and best world with their names."""

    mean: float
    worst: float
    worst_at: str
    best: float
    best_at: str
    num_below: int  # worlds below 0.97


@dataclass(frozen=True)
class Study:
    """What is run: `noise` is the relative scatter of a step's seconds."""

    worlds: tuple[World, ...]
    ablations: tuple[Ablation, ...]
    profiles: Mapping[str, Profile]
    recording: Recording
    settings: tuple[str, ...] = ("auto",)  # in which the policy decides
    noise: float = 0.05
    seeds: int = 2

    def measure(self, outcomes: list[Outcome], tell: Tell = lambda _words: None, workers: int = 1) -> None:
        """Add the outcomes of world after world; what there is stays in `outcomes` after an interruption."""
        if workers == 1:
            self._collect(map(self.outcomes_of, self.worlds), outcomes, tell)
            return
        with ProcessPoolExecutor(workers, get_context("spawn"), _leave_interrupts_to_the_parent) as pool:
            try:
                self._collect(pool.map(self.outcomes_of, self.worlds), outcomes, tell)
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def outcomes_of(self, world: World) -> list[Outcome]:
        """Every setting and ablation in one world."""
        known = known_of(self.recording, world)
        answer_tokens = max(len(answer.tokens) for name in world.slices for answer in self.recording.of(name))
        plans = [(setting, FULL) for setting in (PLAIN, *FIXED, *self.settings)]
        plans += [(setting, ablation) for ablation in self.ablations for setting in self.settings]
        outcomes = []
        for setting, ablation in plans:
            machine = Machine(self.profiles[world.profile], self.noise, ablation.policy_config())
            found = [run(world, setting, machine, known, answer_tokens, seed) for seed in range(self.seeds)]
            outcomes.append(
                Outcome(
                    world.name,
                    setting,
                    ablation.name,
                    fmean(one.tokens_per_s for one in found),
                    fmean(one.num_drafted for one in found),
                    fmean(one.num_accepted for one in found),
                )
            )
        return outcomes

    def _collect(self, found: Iterable[list[Outcome]], outcomes: list[Outcome], tell: Tell) -> None:
        for number, (world, own) in enumerate(zip(self.worlds, found, strict=True)):
            outcomes += own
            tell(f"{number + 1} of {len(self.worlds)}: {world.name}")


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Outcomes:
    """Outcomes by world, setting and ablation."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._speeds = {(one.world, one.setting, one.ablation): one.tokens_per_s for one in outcomes}
        self.worlds = list(dict.fromkeys(one.world for one in outcomes))
        self.ablations = list(dict.fromkeys(one.ablation for one in outcomes))
        self.settings = list(dict.fromkeys(one.setting for one in outcomes if one.setting not in (PLAIN, *FIXED)))

    def speed(self, world: str, setting: str, ablation: str = FULL.name) -> float | None:
        """Tokens per second; None where it was not run."""
        return self._speeds.get((world, setting, ablation))

    def best_fixed(self, world: str) -> float | None:
        """The fastest setting that never changes, plain among them."""
        return max((speed for name in (PLAIN, *FIXED) if (speed := self.speed(world, name)) is not None), default=None)

    def compared(self, setting: str, ablation: str, to: str) -> Comparison | None:
        """An adaptive setting under an ablation against `full`, `plain` or `best_fixed` of the same worlds."""
        ratios: dict[str, float] = {}
        for world in self.worlds:
            own = self.speed(world, setting, ablation)
            other = {
                "full": self.speed(world, setting),
                "plain": self.speed(world, PLAIN),
                "best_fixed": self.best_fixed(world),
            }[to]
            if own is not None and other:
                ratios[world] = own / other
        if not ratios:
            return None
        worst, best = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        return Comparison(
            mean=math.exp(fmean(map(math.log, ratios.values()))),
            worst=ratios[worst],
            worst_at=worst,
            best=ratios[best],
            best_at=best,
            num_below=sum(ratio < 0.97 for ratio in ratios.values()),
        )

    def summary(self) -> dict[str, Any]:
        """All comparisons, by setting and ablation."""
        found: dict[str, Any] = {}
        for setting in self.settings:
            for ablation in self.ablations:
                own = {to: self.compared(setting, ablation, to) for to in ("full", "plain", "best_fixed")}
                found.setdefault(setting, {})[ablation] = {
                    to: None if one is None else asdict(one) for to, one in own.items()
                }
        return found
