"""What requests bring into a round, what they may do in it, and what came of it: plain values without tensors.

Those made for every request in every step are named tuples: one is made in a third of the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from foretoken.control.config import DEFAULT, BudgetConfig
from foretoken.control.previews import Preview


@dataclass(frozen=True)
class OptionTraits:
    """One drafter option of a request, as long as it is there: the `drafter` whose costs and acceptance it shares.

    `most` draft tokens at once; `num_probe` rows come with the first of them. One that `previews` shows its draft
    tokens.
    """

    drafter: Hashable
    most: int | None = None
    num_probe: int = 0
    previews: bool = False


class RequestView(NamedTuple):
    """One decoding request as the control sees it before a round.

    `options` are its drafter options; those at `disabled` places may not be used. `num_draft` is the number that the
    caller set, None where it is left open. `num_tokens` are there by now, `num_remaining` may still come,
    `max_new_tokens` is its limit. `deadline_s` is how long is left, None without a deadline.
    """

    request_id: int
    options: tuple[OptionTraits, ...] = ()
    num_draft: int | None = None
    slice: str = ""
    num_tokens: int = 0
    num_remaining: int = 1 << 30
    max_new_tokens: int = 1 << 30
    priority: int = 0
    deadline_s: float | None = None
    disabled: frozenset[int] = frozenset()


class DrafterOption(NamedTuple):
    """One drafter that a request may use now: by the `number` of its option, at most `most` draft tokens."""

    number: int
    drafter: Hashable
    most: int
    num_probe: int = 0
    preview: Preview | None = None


class RequestOptions(NamedTuple):
    """What a request brings into a round: its drafter options, none if it does not draft now.

    `is_open`: the number of draft tokens is left to the policy; otherwise as many are made as the option allows.
    `weight` is what a token of the request counts.
    """

    request_id: int
    options: tuple[DrafterOption, ...] = ()
    is_open: bool = True
    slice: str = ""
    num_tokens: int = 0
    num_remaining: int = 1 << 30
    weight: float = 1.0


class DraftBudget(NamedTuple):
    """What a request may do in a round: the number of its option (None: no draft tokens), and how many draft tokens."""

    option: int | None
    num_draft: int


NO_DRAFT = DraftBudget(None, 0)

# Why a request that may draft was given no draft tokens; the words of the server's trace.
# - k0_short, k0_load: routing rules, about the length of the answer and the number of requests.
# - prefill: the first token, which is never drafted. length_clamped: at most one token is still to come.
# - warmup: what steps or the drafter cost is still being learnt. no_match: a lookup found nothing.
# - k0_acceptance: no draft token would be emitted often enough to be weighed. k0_cost: draft tokens take more than they
#   bring.
# - drafter_disabled: it failed too often. drafter_failed: it failed in this step.
# - budget_trimmed: the step had no room for draft tokens.
NoDraftReason = Literal[
    "prefill",
    "length_clamped",
    "warmup",
    "no_match",
    "k0_short",
    "k0_load",
    "k0_acceptance",
    "k0_cost",
    "drafter_disabled",
    "drafter_failed",
    "budget_trimmed",
]


class RoundOutcome(NamedTuple):
    """What came of one request's round, under the budget it was given.

    `chances` are those with which each draft token was emitted, given what was drawn; None where the draft tokens were
    not those of the option's drafter (a grammar's). `parents` are the draft tokens they follow (-1: none), `emitted`
    the tokens.
    """

    request_id: int
    budget: DraftBudget
    chances: Sequence[float] | None
    parents: Sequence[int]
    emitted: Sequence[int]
    num_probed: int = 0


@dataclass(frozen=True)
class StepOutcome:
    """What came of a step: its rounds, and where its time went.

    `only_decodes`: no prompt was read in it and it ran on the usual threads, so that its time is that of decoding.
    `num_rows` rows of which `num_nodes`
    are draft tokens or probes. `draft_s` and `num_read_tokens` are those of drafters that drafted and show no previews:
    seconds, and tokens that were new to them. What drafters take that only follow the text is no part of it: nobody
    chose it.
    """

    rounds: Sequence[RoundOutcome]
    only_decodes: bool
    num_rows: int
    num_nodes: int
    target_s: float
    draft_s: Mapping[Hashable, float] = field(default_factory=dict)
    num_read_tokens: Mapping[Hashable, int] = field(default_factory=dict)


def weight_of(
    priority: int, seconds_left: float | None, seconds_needed: float, config: BudgetConfig = DEFAULT.budget
) -> float:
    """What a request's tokens count: a fifth more for every step of priority, twice where its deadline will be missed.

    `seconds_left` until the deadline, None if it has none; `seconds_needed` for what may still come without a draft.
    """
    is_late = seconds_left is not None and seconds_needed > seconds_left
    factor = config.priority_factor ** -max(-config.max_priority, min(config.max_priority, priority))
    return factor * (config.lateness_factor if is_late else 1.0)
