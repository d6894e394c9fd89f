"""A profile corrected by measured steps: how much longer they took than predicted, by kind and size.

The curves of a profile are measured one at a time and added up, which is inaccurate for steps with many requests, draft
tokens and prompts at once. Steps of a real run on other requests give the correction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretoken.plan.profile import DrafterCost, Profile

_FEWEST = 6  # steps that an estimate needs
_RIDGE = 1.0  # weight of the ridge penalty, in steps
_LEAST = 0.25
_OUTLIER = 4.0  # a step counts as at most so many times the median ratio: machines pause


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
class Levels:
    """Numbers by size: straight between points and flat outside, `otherwise` where there are none."""

    points: tuple[tuple[float, float], ...] = ()
    otherwise: float = 1.0

    def at(self, size: float) -> float:
        """The number for this size."""
        if not self.points:
            return self.otherwise
        place = bisect_left(self.points, (size,))
        if place in (0, len(self.points)):
            return self.points[min(place, len(self.points) - 1)][1]
        (low, below), (high, above) = self.points[place - 1 : place + 1]
        return below + (above - below) * (size - low) / (high - low)


@dataclass(frozen=True)
class RefinedCost(DrafterCost):
    """A drafter's cost with its shares, by drafting requests: of later rounds, and of those in which a text is new to
    it.
    """

    later: Levels = Levels()
    first: Levels = Levels()

    def seconds(self, num_draft: int, batch: int = 1, prompt_tokens: int = 0) -> float:
        """See `DrafterCost.seconds`."""
        return super().seconds(num_draft, batch, prompt_tokens) * (self.first if prompt_tokens else self.later).at(
            batch
        )


@dataclass(frozen=True)
class StepFit:
    """What steps take by what the profile says of them: a share of it, and seconds by their requests and by their rows
    on top.

    The two are apart because sixteen rows of one request are not one row of sixteen.
    """

    share: float = 1.0
    requests: Levels = Levels(otherwise=0.0)
    rows: Levels = Levels(otherwise=0.0)

    def seconds(self, said_s: float, num_requests: int, num_rows: int) -> float:
        """What a step takes; never less than a small part of what is said, should few steps have led the fit astray."""
        return max(
            _LEAST * self.share * said_s, self.share * said_s + self.requests.at(num_requests) + self.rows.at(num_rows)
        )


@dataclass(frozen=True)
class RefinedProfile(Profile):
    """A profile with its fits: of steps that only decode, and of steps that take in prompts."""

    decode: StepFit = field(default_factory=StepFit)
    prompt: StepFit = field(default_factory=StepFit)

    def step_s(self, decode_rows: int, contexts: Sequence[int], prompt_tokens: int = 0) -> float:
        """See `Profile.step_s`."""
        fit = self.prompt if prompt_tokens else self.decode
        return fit.seconds(
            super().step_s(decode_rows, contexts, prompt_tokens), len(contexts), decode_rows + prompt_tokens
        )


def refine(profile: Profile, steps: Iterable[RealStep], drafter: str | None) -> RefinedProfile:
    """The profile corrected by `steps`; `drafter` is the one that drafted in them."""
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
        drafters = {
            **drafters,
            drafter: RefinedCost(**_values(drafters[drafter]), later=_shares(later), first=_shares(first)),
        }
    return RefinedProfile(
        **_values(replace(profile, drafters=drafters)), decode=_step_fit(decode), prompt=_step_fit(prompt)
    )


def _values(value: Profile | DrafterCost) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in fields(value)}


def _step_fit(seen: Sequence[tuple[float, float, float, float]]) -> StepFit:
    """From (requests, rows, said, measured) of each step, by least squares of what the fit is off relative to what is
    said.

    Levels cost a little (ridge), so that what the profile says is kept wherever steps do not contradict it.
    """
    if len(seen) < _FEWEST:
        return StepFit()
    requests, rows, said_s, took_s = np.array(seen, dtype=np.float64).T
    took_s = np.minimum(took_s, _OUTLIER * np.median(took_s / said_s) * said_s)
    knots = [_knots(sizes) for sizes in (requests, rows)]
    levels = np.hstack([_hats(sizes, at) for sizes, at in zip((requests, rows), knots, strict=True)])  # [n, k]
    unit_s = float(np.median(said_s))
    left = np.vstack(
        [
            np.column_stack([np.ones_like(said_s), unit_s * levels / said_s[:, None]]),
            _RIDGE * np.eye(1 + levels.shape[1])[1:],
        ]
    )
    right = np.concatenate([took_s / said_s, np.zeros(levels.shape[1])])
    share, *found = np.linalg.lstsq(left, right, rcond=None)[0].tolist()
    heights = [unit_s * one for one in found]
    first = len(knots[0])
    return StepFit(
        share,
        Levels(tuple(zip(knots[0], heights[:first], strict=True)), otherwise=0.0),
        Levels(tuple(zip(knots[1], heights[first:], strict=True)), otherwise=0.0),
    )


def _knots(sizes: NDArray[np.float64]) -> list[float]:
    """The mean size of each group of steps of like size."""
    return [sum(size for (size,) in group) / len(group) for group in _groups([(float(size),) for size in sizes])]


def _hats(sizes: NDArray[np.float64], knots: Sequence[float]) -> NDArray[np.float64]:
    """How much each knot counts at each size, [n, knots]: straight lines between, flat outside."""
    return np.column_stack([np.interp(sizes, knots, row) for row in np.eye(len(knots))])


def _shares(seen: Sequence[tuple[float, float, float]]) -> Levels:
    """From (size, said, measured): a share for each doubling of the size."""
    return Levels(tuple(_share(group) for group in _groups([one for one in seen if one[1] > 0])))


Sized = TypeVar("Sized", bound=tuple[float, ...])


def _groups(seen: Sequence[Sized]) -> list[list[Sized]]:
    """By the first number, a group for each doubling of it; groups that are too small are joined with the next
    larger.
    """
    groups: list[list[Sized]] = []
    for one in sorted(seen):
        if not groups or (_doubling(one[0]) > _doubling(groups[-1][0][0]) and len(groups[-1]) >= _FEWEST):
            groups.append([])
        groups[-1].append(one)
    if len(groups) > 1 and len(groups[-1]) < _FEWEST:
        last = groups.pop()
        groups[-1].extend(last)
    return [group for group in groups if len(group) >= _FEWEST]


def _doubling(size: float) -> int:
    return int(size).bit_length()


def _share(group: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    usual = median(measured / said for _, said, measured in group)
    measured_s = sum(min(measured, _OUTLIER * usual * said) for _, said, measured in group)
    return sum(size for size, _, _ in group) / len(group), measured_s / sum(said for _, said, _ in group)
