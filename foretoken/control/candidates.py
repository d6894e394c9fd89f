"""What requests bring into a round, and what they may do in it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from foretoken.control.previews import Preview

_WEIGHT_OF_PRIORITY, _MOST_PRIORITY, _WEIGHT_OF_LATENESS = 1.2, 8, 2.0


@dataclass(frozen=True)
class DrafterOption:
    """One drafter that a request may use now, by the caller's own `number`: the most guesses it can use, rows that come
    with the first of them.

    `look` are the guesses that are ready, of a drafter that shows them.
    """

    number: int
    drafter: Hashable
    most: int
    num_probe: int = 0
    look: Preview | None = None


@dataclass(frozen=True)
class RequestOptions:
    """What a request brings into a round: its drafters, none if it does not draft now.

    `is_open`: the number is left to the policy; otherwise as many guesses are made as the arm allows. `label` names the
    kind of text, whose earlier requests tell what to expect of a new one. The text has `num_tokens` by now, and
    `num_remaining` may still come. `weight` is what its tokens count.
    """

    request_id: int
    arms: tuple[DrafterOption, ...] = ()
    is_open: bool = True
    label: str = ""
    num_tokens: int = 0
    num_remaining: int = 1 << 30
    weight: float = 1.0


def weight_of(priority: int, seconds_left: float | None, seconds_needed: float) -> float:
    """What a request's tokens count beside others': a fifth more for every step of priority, twice where its deadline
    cannot be met plainly.

    `seconds_left` until the deadline, None if it has none; `seconds_needed` for what may still come without guesses.
    """
    late = seconds_left is not None and seconds_needed > seconds_left
    return _WEIGHT_OF_PRIORITY ** -max(-_MOST_PRIORITY, min(_MOST_PRIORITY, priority)) * (
        _WEIGHT_OF_LATENESS if late else 1.0
    )


class DraftBudget(NamedTuple):
    """What a request may do in a round: the number of its arm (None: nobody guesses), and how many guesses."""

    arm: int | None
    num_draft: int


NO_DRAFT = DraftBudget(None, 0)


def options_of(
    request_id: int,
    drafter: Hashable | None,
    most: int,
    is_open: bool,
    num_tokens: int = 0,
    num_remaining: int = 1 << 30,
    weight: float = 1.0,
    look: Preview | None = None,
) -> RequestOptions:
    """The wish of a request with a single drafter; None does not draft."""
    arms = () if drafter is None or most < 1 else (DrafterOption(0, drafter, most, look=look),)
    return RequestOptions(request_id, arms, is_open, num_tokens=num_tokens, num_remaining=num_remaining, weight=weight)
