"""A profile put right by steps that really ran: how much longer than said they took, by kind and by size.

A profile's curves are measured one at a time and added up; in a step with many requests, guesses and prompts at once that sum is off
by some share. Steps of a real run, of other requests than those to be predicted, tell this share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

from foretoken.plan.profile import DrafterCost, Profile

_FEWEST = 6  # steps that a share is taken from
_TURNS = 4
_OUTLIER = 4.0  # a step counts as at most so many times the usual share: machines pause


@dataclass(frozen=True)
class RealStep:
    """What a real step consisted of, as `Profile.step_s` and `DrafterCost.seconds` are asked for it, and what it took.

    `target_s` is all but the drafter; time between this step and the one before is part of it.
    """

    decode_rows: int
    contexts: tuple[int, ...]
    prompt_tokens: int
    target_s: float
    longest_draft: int = 0
    num_drafting: int = 0
    num_unread: int = 0
    draft_s: float = 0.0


@dataclass(frozen=True)
class Shares:
    """Measured seconds as a share of those said, by size; straight between points and flat outside, 1 where nothing is known."""

    points: tuple[tuple[float, float], ...] = ()

    def at(self, size: float) -> float:
        """The share for this size."""
        if not self.points:
            return 1.0
        place = bisect_left(self.points, (size,))
        if place in (0, len(self.points)):
            return self.points[min(place, len(self.points) - 1)][1]
        (low, below), (high, above) = self.points[place - 1 : place + 1]
        return below + (above - below) * (size - low) / (high - low)


@dataclass(frozen=True)
class RefinedCost(DrafterCost):
    """A drafter's cost with its shares, by drafting requests: of later rounds, and of those in which a text is new to it."""

    later: Shares = Shares()
    first: Shares = Shares()

    def seconds(self, num_draft: int, batch: int = 1, prompt_tokens: int = 0) -> float:
        """See `DrafterCost.seconds`."""
        return super().seconds(num_draft, batch, prompt_tokens) * (self.first if prompt_tokens else self.later).at(batch)


@dataclass(frozen=True)
class StepShares:
    """Shares of steps: by their requests, and of what that leaves by their rows. Sixteen rows of one request are not one row of sixteen."""

    requests: Shares = Shares()
    rows: Shares = Shares()

    def at(self, num_requests: int, num_rows: int) -> float:
        """The share of a step."""
        return self.requests.at(num_requests) * self.rows.at(num_rows)


@dataclass(frozen=True)
class RefinedProfile(Profile):
    """A profile with its shares: of steps that only decode, and of steps that take in prompts, by all their rows."""

    decode: StepShares = field(default_factory=StepShares)
    prompt: StepShares = field(default_factory=StepShares)

    def step_s(self, decode_rows: int, contexts: Sequence[int], prompt_tokens: int = 0) -> float:
        """See `Profile.step_s`."""
        shares = self.prompt if prompt_tokens else self.decode
        return super().step_s(decode_rows, contexts, prompt_tokens) * shares.at(len(contexts), decode_rows + prompt_tokens)


def refine(profile: Profile, steps: Iterable[RealStep], drafter: str | None) -> RefinedProfile:
    """The profile with the shares that `steps` tell; `drafter` is who guessed in them."""
    decode: list[tuple[float, float, float, float]] = []
    prompt: list[tuple[float, float, float, float]] = []
    later: list[tuple[float, float, float]] = []
    first: list[tuple[float, float, float]] = []
    for step in steps:
        said_s = profile.step_s(step.decode_rows, step.contexts, step.prompt_tokens)
        rows = step.decode_rows + step.prompt_tokens
        (prompt if step.prompt_tokens else decode).append((len(step.contexts), rows, said_s, step.target_s))
        if drafter is not None and step.num_drafting:
            said_s = profile.drafters[drafter].seconds(step.longest_draft, step.num_drafting, step.num_unread)
            (first if step.num_unread else later).append((step.num_drafting, said_s, step.draft_s))
    drafters: Mapping[str, DrafterCost] = profile.drafters
    if drafter is not None:
        drafters = {**drafters, drafter: RefinedCost(**_values(drafters[drafter]), later=_shares(later), first=_shares(first))}
    return RefinedProfile(**_values(replace(profile, drafters=drafters)), decode=_step_shares(decode), prompt=_step_shares(prompt))


def _values(value: Profile | DrafterCost) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in fields(value)}


def _step_shares(seen: Sequence[tuple[float, float, float, float]]) -> StepShares:
    """From (requests, rows, said, measured) of each step: each kind of share is taken from what the other one leaves, in turn."""
    found = StepShares()
    for _ in range(_TURNS):
        requests = _shares([(count, said_s * found.rows.at(rows), took_s) for count, rows, said_s, took_s in seen])
        found = StepShares(requests, _shares([(rows, said_s * requests.at(count), took_s) for count, rows, said_s, took_s in seen]))
    return found


def _shares(seen: Sequence[tuple[float, float, float]]) -> Shares:
    """From (size, said, measured): a share for each doubling of the size, groups that are too small joined with the next larger."""
    usable = sorted(one for one in seen if one[1] > 0)
    groups: list[list[tuple[float, float, float]]] = []
    for one in usable:
        if not groups or (_doubling(one[0]) > _doubling(groups[-1][0][0]) and len(groups[-1]) >= _FEWEST):
            groups.append([])
        groups[-1].append(one)
    if len(groups) > 1 and len(groups[-1]) < _FEWEST:
        last = groups.pop()
        groups[-1].extend(last)
    return Shares(tuple(_share(group) for group in groups if len(group) >= _FEWEST))


def _doubling(size: float) -> int:
    return int(size).bit_length()


def _share(group: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    usual = median(measured / said for _, said, measured in group)
    measured_s = sum(min(measured, _OUTLIER * usual * said) for _, said, measured in group)
    return sum(size for size, _, _ in group) / len(group), measured_s / sum(said for _, said, _ in group)
