"""The worlds: a cost profile, kinds of text, and requests at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

REQUESTS = (1, 2, 4, 8, 16, 32)
MIXTURES: tuple[tuple[str, ...], ...] = (
    ("code", "chat"),
    ("edit", "random"),
    ("code", "docstring", "edit", "json", "chat", "random"),
)
_MIXED_REQUESTS = (4, 16, 32)
Condition = Literal["usual", "disturbed machine", "chances too high", "chances too low"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
_CONDITION_SLICES, _CONDITION_REQUESTS = ("code", "edit", "chat"), (2, 16)
CHANGING = ("random>edit", "edit>random", "random>edit>random")  # texts that change within an answer
_CHANGING_REQUESTS = (1, 4, 16)


@dataclass(frozen=True)
class World:
    """`num_requests` run at a time, of the slices in turn, on the machine and model of a profile.

    `condition`: on a disturbed machine steps scatter more, pause more often, and take 1.8 times as long for periods;
    lookups may name chances that are all too high or too low, as they would for texts of another kind.
    """

    profile: str
    slices: tuple[str, ...]
    num_requests: int
    condition: Condition = "usual"

    @property
    def name(self) -> str:
        """Such as 1b:16:code+chat."""
        usual = self.condition == "usual"
        return f"{self.profile}:{self.num_requests}:{'+'.join(self.slices)}{'' if usual else f' ({self.condition})'}"


def all_worlds(profiles: Iterable[str], slices: Sequence[str]) -> list[World]:
    """Every profile with every slice and mixture, at every number of requests, few requests without a mixture; texts
    that change; and under each condition a few of them.
    """
    found = []
    for profile in profiles:
        found += [World(profile, (name,), count) for name in slices for count in REQUESTS]
        mixtures = [own for own in MIXTURES if set(own) <= set(slices)]
        found += [World(profile, own, count) for own in mixtures for count in _MIXED_REQUESTS]
        changing = [name for name in CHANGING if set(name.split(">")) <= set(slices)]
        found += [World(profile, (name,), count) for name in changing for count in _CHANGING_REQUESTS]
        found += [
            World(profile, (name,), count, condition)
            for condition in CONDITIONS
            if condition != "usual"
            for name in _CONDITION_SLICES
            if name in slices
            for count in _CONDITION_REQUESTS
        ]
    return found
