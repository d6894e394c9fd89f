"""What requests bring into a round, what they may do in it, and its outcome: plain values without tensors.

Those made for every request in every step are named tuples: one is made in a third of the time of a frozen dataclass.

A lookup can show its draft tokens before anything is chosen (`Preview`), because nothing is drawn for them, and names
for each the chance that it is right. What it shows is compared with what was emitted, also in rounds in which its draft
tokens were not used: whether a lookup pays is known without running a row of the target for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from foretoken.config import SpecConfig
from foretoken.control.config import DEFAULT, BudgetConfig

NO_BOUND = 1 << 30
Mode = Literal["decide", "repeat", "plain"]  # what a round does about budgets that are open


class DrafterOption(NamedTuple):
    """One drafter option of a request, by its `number` among them: the `drafter` whose costs and acceptance it shares.

    At most `max_draft` draft tokens at once; `num_probe` rows come with the first of them. One that `shows` its draft
    tokens has a `preview` in rounds in which it was asked for.
    """

    number: int
    drafter: Hashable
    max_draft: int = NO_BOUND
    num_probe: int = 0
    shows: bool = False
    preview: Preview | None = None


class RequestView(NamedTuple):
    """One decoding request as the control sees it before a round.

    `options` are its drafter options; those at `disabled` places may not be used. The policy sees those that can
    draft now, under what the request can still use. `num_draft` is the number that the caller set, None where it is
    left open. `num_tokens` are there by now, `num_remaining` may still come, `max_new_tokens` is its limit.
    `deadline_s` is how long is left, None without a deadline. `weight` is what a token of the request counts.
    """

    request_id: int
    options: tuple[DrafterOption, ...] = ()
    num_draft: int | None = None
    slice: str = ""
    num_tokens: int = 0
    num_remaining: int = NO_BOUND
    max_new_tokens: int = NO_BOUND
    priority: int = 0
    deadline_s: float | None = None
    disabled: frozenset[int] = frozenset()
    weight: float = 1.0

    @property
    def is_open(self) -> bool:
        """Whether the number of draft tokens is left to the policy; otherwise as many are made as an option allows."""
        return self.num_draft is None


class Candidate(NamedTuple):
    """What one request gains by one drafter: for each place of its draft the share of rounds in which it is drafted,
    and in which it is emitted.

    `at_least` draft tokens are not up for choice (a number that the caller set). `entry_s` is what the drafter takes on
    top because the request is new to it, spread over the rounds it may serve.
    """

    drafter: Hashable
    drafted: tuple[float, ...] = ()
    emitted: tuple[float, ...] = ()
    at_least: int = 0
    entry_s: float = 0.0


class DraftBudget(NamedTuple):
    """What a request may do in a round: the number of its option (None: no draft tokens), at most so many draft tokens
    and probes, each position drafted with `draft_probability`.

    `is_fixed`: what its seed draws depends on how much is drafted, and that on nothing but the request.
    """

    option: int | None
    num_draft: int
    num_probe: int = 0
    draft_probability: float = 1.0
    is_fixed: bool = False


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

    `parents` are the draft tokens that each draft token follows (-1: none), `path` those that were emitted, `emitted`
    all tokens. `chances` are those with which each was emitted once its parent was, 0 where that was not; None where
    the draft tokens were not those of the option's drafter (a grammar's). `has_run`: the drafter was able to draft, for
    which a draft model or head needs room in its cache.
    """

    request_id: int
    budget: DraftBudget
    chances: Sequence[float] | None
    parents: Sequence[int]
    path: Sequence[int]
    emitted: Sequence[int]
    num_probed: int = 0
    has_run: bool = True


@dataclass(frozen=True)
class StepOutcome:
    """What came of a step: its rounds, and where its time went.

    `only_decodes`: no prompt was read in it and it ran on the usual threads, so that its time is that of decoding.
    `num_rows` rows of which `num_nodes` are draft tokens or probes. `draft_s` are the seconds of drafters that drafted,
    without those in which they showed previews; `num_read_tokens` the tokens that were new to those that show none.
    What drafters take that only follow the text is no part of it: nobody chose it.
    """

    rounds: Sequence[RoundOutcome]
    only_decodes: bool
    num_rows: int
    num_nodes: int
    target_s: float
    draft_s: Mapping[Hashable, float] = field(default_factory=dict)
    num_read_tokens: Mapping[Hashable, int] = field(default_factory=dict)


def set_number(spec: SpecConfig) -> int | None:
    """The number of draft tokens that the caller set, None where it is left open."""
    return None if spec.num_draft == "auto" else spec.num_draft


def max_useful_draft(num_remaining: int) -> int:
    """Draft tokens of use while `num_remaining` tokens may come: the round itself emits one of the target's own."""
    return max(0, num_remaining - 1)


def weight_of(
    priority: int, seconds_left: float | None, seconds_needed: float, config: BudgetConfig = DEFAULT.budget
) -> float:
    """What a request's tokens count: a fifth more for every step of priority, twice where its deadline will be missed.

    `seconds_left` until the deadline, None if it has none; `seconds_needed` for what may still come without a draft.
    """
    is_late = seconds_left is not None and seconds_needed > seconds_left
    factor = config.priority_factor ** -max(-config.max_priority, min(config.max_priority, priority))
    return factor * (config.lateness_factor if is_late else 1.0)


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
