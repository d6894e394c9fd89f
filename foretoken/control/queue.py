"""Who is let in, in which order requests are served, and how many rows each gets in a step: pure decisions over plain
numbers.

The engine's scheduler and the simulator both ask here. Everything is counted in tokens; a cache in blocks says with its
`footprint` what a sequence of so many tokens takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from foretoken.errors import ConfigError

Urgency = tuple[int, float, int]  # smaller is served earlier: level, when the answer is wanted, order of arrival
Footprint = Callable[[int], int]

# A quarter: of a step's rows that prompts get at least, of the prompts' rows that short ones may take from the first.
_SHARE = 4


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of the cache.

    `max_batch_size` requests run at once. A step takes at most `max_prompt_tokens` of prompts, and at most
    `max_step_tokens` rows altogether: prompts, guesses, and a row for everyone who decodes (None: no bound beside the
    others). Nobody joins unless `cache_reserve`, a share of the cache, stays free for those who run. Who came `aging_s`
    seconds earlier is served like one whose priority is better by 1.

    Raises:
        ConfigError: names the field.
    """

    max_batch_size: int = 16
    max_prompt_tokens: int = 512
    max_step_tokens: int | None = field(default=None, kw_only=True)
    cache_reserve: float = field(default=0.1, kw_only=True)
    aging_s: float = field(default=30.0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.max_step_tokens is not None and self.max_step_tokens <= self.max_batch_size:
            remedy = (
                f"must be more than max_batch_size, {self.max_batch_size}: "
                "each running request takes a row, and prompts need one"
            )
            raise ConfigError("max_step_tokens", self.max_step_tokens, remedy)
        if not 0 <= self.cache_reserve <= 1:
            raise ConfigError("cache_reserve", self.cache_reserve, "must be a number from 0 to 1")
        if not (math.isfinite(self.aging_s) and self.aging_s > 0):
            raise ConfigError("aging_s", self.aging_s, "must be a number of seconds above 0")


def urgency(number: int, arrived_s: float, priority: int, deadline_s: float | None, aging_s: float) -> Urgency:
    """The one order of service: of the queue, of prompt chunks, and backwards of who gives way.

    It never changes while a request is there, so two requests cannot take turns at displacing each other. A period of
    `aging_s` counts as much as 1 of `priority`: whoever waits is passed only by what came soon after. Within a period
    the earliest deadline goes first (`deadline_s` after arrival; none comes last), then who came first.
    """
    return (
        priority + math.floor(arrived_s / aging_s),
        math.inf if deadline_s is None else arrived_s + deadline_s,
        number,
    )


def reserve_tokens(config: SchedulerConfig, capacity_tokens: float) -> float:
    """What stays free when somebody joins; an endless cache needs nothing."""
    return config.cache_reserve * capacity_tokens if math.isfinite(capacity_tokens) else 0.0


def may_join(needed_tokens: int, owed_tokens: int, reserved_tokens: float, free_tokens: float) -> bool:
    """Whether a text of `needed_tokens` fits beside the `owed_tokens` that running requests have yet to read, and the
    reserve.
    """
    return needed_tokens + owed_tokens + reserved_tokens <= free_tokens


@dataclass(frozen=True)
class RowDemand:
    """What a running request could do in a step: its cache holds `held` tokens.

    Either it decodes: one row (`missing` is 1), at most `num_draft` guesses and `num_probe` probes; or it reads,
    `missing` tokens at most. `fixed` guesses may not depend on neighbours.
    """

    held: int
    missing: int
    decodes: bool
    num_draft: int = 0
    num_probe: int = 0
    fixed: bool = False


@dataclass(frozen=True)
class RowGrant:
    """What it may do: run `num_pending` committed tokens (0: sit this step out), guesses and probes behind them."""

    num_pending: int
    num_draft: int = 0
    num_probe: int = 0

    @property
    def num_rows(self) -> int:
        """All of it."""
        return self.num_pending + self.num_draft + self.num_probe


def within_budget(asks: Sequence[RowDemand], config: SchedulerConfig) -> list[RowGrant]:
    """The rows of a step, `asks` most urgent first: a row for everyone who decodes, guesses, and prompts with what is
    left.

    Prompts get a quarter of what the first leave, if they want so much. Guesses are cut from the least urgent on, but
    `fixed` ones: those have what they would have in a full batch, whoever is there.
    """
    wanted = sum(ask.missing for ask in asks if not ask.decodes)
    prompt_tokens = min(wanted, config.max_prompt_tokens)
    grants = [RowGrant(1, ask.num_draft, ask.num_probe) if ask.decodes else RowGrant(0) for ask in asks]
    if config.max_step_tokens is not None:
        left = config.max_step_tokens - sum(ask.decodes for ask in asks)
        room, own = left - min(prompt_tokens, _least(left)), fixed_rows(config)
        room -= sum(
            _cut(grant, own).num_rows - 1 for ask, grant in zip(asks, grants, strict=True) if ask.decodes and ask.fixed
        )
        for place, ask in enumerate(asks):
            if ask.decodes:
                grants[place] = _cut(grants[place], own if ask.fixed else room)
                room -= 0 if ask.fixed else grants[place].num_rows - 1
        prompt_tokens = min(prompt_tokens, config.max_step_tokens - sum(grant.num_rows for grant in grants))
    reading = [place for place, ask in enumerate(asks) if not ask.decodes]
    for place, length in zip(reading, chunks([asks[place].missing for place in reading], prompt_tokens), strict=True):
        grants[place] = RowGrant(length)
    return grants


def fixed_rows(config: SchedulerConfig) -> int:
    """Guesses and probes that a request may have if neighbours have no say in their number: an equal share of a full
    batch's.
    """
    assert config.max_step_tokens is not None
    left = config.max_step_tokens - config.max_batch_size
    return (left - _least(left)) // config.max_batch_size


def chunks(missing: Sequence[int], budget: int) -> list[int]:
    """How much of each text is read in a step, most urgent first, `budget` tokens together.

    The first takes what it can, but a quarter goes to later ones that are thereby read to their end: a short prompt
    does not wait for a long one, nor can many short ones stop it.
    """
    lengths, spare = [0] * len(missing), budget // _SHARE
    for place, count in enumerate(missing[1:], 1):
        if count <= spare:
            lengths[place] = count
            spare -= count
    left = budget - sum(lengths)
    for place, count in enumerate(missing):
        if not lengths[place]:
            lengths[place] = min(count, left)
            left -= lengths[place]
    return lengths


def growth_tokens(asks: Sequence[RowDemand], grants: Sequence[RowGrant], footprint: Footprint) -> int:
    """Free tokens that the rows of a step take."""
    return sum(_growth(ask, grant, footprint) for ask, grant in zip(asks, grants, strict=True))


def within_cache(
    asks: Sequence[RowDemand], grants: Sequence[RowGrant], free_tokens: float, footprint: Footprint
) -> list[RowGrant] | None:
    """`grants` cut until their rows fit into `free_tokens`, `asks` most urgent first; None: the least urgent has to
    give way.

    First go guesses and probes that take room of their own, then what is read, each from the least urgent on. The most
    urgent goes on reading, if only by a row. `fixed` guesses are never cut: neighbours would have a say in what a seed
    draws.
    """
    cut = list(grants)
    excess = growth_tokens(asks, cut, footprint) - free_tokens
    for place in reversed(range(len(cut))):
        ask, grant = asks[place], cut[place]
        if excess > 0 and ask.decodes and not ask.fixed:
            cut[place] = _cut(grant, footprint(ask.held + 1) - ask.held - 1)
            excess -= _growth(ask, grant, footprint) - _growth(ask, cut[place], footprint)
    for place in reversed(range(len(cut))):
        ask, grant = asks[place], cut[place]
        if excess > 0 and not ask.decodes:
            room = footprint(ask.held) + max(0, _growth(ask, grant, footprint) - math.ceil(excess)) - ask.held
            cut[place] = RowGrant(max(min(grant.num_pending, room), int(place == 0)))
            excess -= _growth(ask, grant, footprint) - _growth(ask, cut[place], footprint)
    return None if excess > 0 and len(asks) > 1 else cut


def _least(left: int) -> int:
    """Rows that prompts get of `left` at least."""
    return max(1, left // _SHARE)


def _cut(grant: RowGrant, room: int) -> RowGrant:
    """At most `room` guesses and probes, guesses first."""
    num_draft = min(grant.num_draft, max(0, room))
    return replace(grant, num_draft=num_draft, num_probe=min(grant.num_probe, max(0, room - num_draft)))


def _growth(ask: RowDemand, grant: RowGrant, footprint: Footprint) -> int:
    return footprint(ask.held + grant.num_rows) - footprint(ask.held) if grant.num_rows else 0
