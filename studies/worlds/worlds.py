"""The worlds: a cost profile, kinds of text, and requests at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REQUESTS = (1, 2, 4, 8, 16, 32)
MIXTURES: tuple[tuple[str, ...], ...] = (
    ("code", "chat"),
    ("edit", "random"),
    ("code", "docstring", "edit", "json", "chat", "random"),
)
_MIXED_REQUESTS = (4, 16, 32)


@dataclass(frozen=True)
class World:
    """`num_requests` run at a time, of the slices in turn, on the machine and model of a profile."""

    profile: str
    slices: tuple[str, ...]
    num_requests: int

    @property
    def name(self) -> str:
        """Such as 1b:16:code+chat."""
        return f"{self.profile}:{self.num_requests}:{'+'.join(self.slices)}"


def all_worlds(profiles: Iterable[str], slices: Sequence[str]) -> list[World]:
    """Every profile with every slice and mixture, at every number of requests; few requests have no mixture."""
    found = []
    for profile in profiles:
        found += [World(profile, (name,), count) for name in slices for count in REQUESTS]
        mixtures = [own for own in MIXTURES if set(own) <= set(slices)]
        found += [World(profile, own, count) for own in mixtures for count in _MIXED_REQUESTS]
    return found
