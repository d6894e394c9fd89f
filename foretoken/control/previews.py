"""Draft tokens that a drafter can show before anything is chosen, because nothing is drawn for them.

A lookup names for every draft token the chance that it is right. What it shows is compared with what was emitted, also
in rounds in which its draft tokens were not used: whether a lookup pays is known without running a row of the target
for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Preview:
    """Draft tokens that are ready, best first: the place each follows (-1: the text's end), the chance its drafter
    gives the path to it, and the token.
    """

    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()

    @cached_property
    def steps(self) -> tuple[float, ...]:
        """The chance of each draft token once the one before it was emitted, as its drafter names it."""
        return tuple(
            chance if parent < 0 else chance / self.chances[parent]
            for parent, chance in zip(self.parents, self.chances, strict=True)
        )

    def first(self, count: int) -> Preview:
        """The first `count` draft tokens, as of a smaller budget: none behind a draft token that is left out."""
        if count >= len(self.tokens):
            return self
        return Preview(self.parents[:count], self.chances[:count], self.tokens[:count])

    def outcomes(self, emitted: Sequence[int]) -> list[bool | None]:
        """For each draft token whether it is what was `emitted` there; None where the text had left its path."""
        depths: list[int] = []  # place among the emitted tokens while the path is the text's own, else -1
        found: list[bool | None] = []
        for parent, token in zip(self.parents, self.tokens, strict=True):
            depth = 0 if parent < 0 else depths[parent]
            if not 0 <= depth < len(emitted):
                found.append(None)
                depths.append(-1)
                continue
            right = emitted[depth] == token
            found.append(right)
            depths.append(depth + 1 if right else -1)
        return found


NO_PREVIEW = Preview()


class PreviewAsk(NamedTuple):
    """Ask the drafter of one option of a request for at most `num_draft` draft tokens."""

    request_id: int
    option: int
    num_draft: int


@dataclass(frozen=True)
class Previews:
    """What was shown in a round, by request and number of the option, and the seconds it took."""

    shown: Mapping[int, Mapping[int, Preview]] = field(default_factory=dict)
    seconds: float = 0.0

    def of(self, request_id: int) -> Mapping[int, Preview]:
        """By number of the option; empty where nothing was asked."""
        return self.shown.get(request_id, {})
