"""What is simulated: requests with their times, lengths and chances, from a trace or drawn at random; and the drafters,
draft budgets and limits of the engines that answer them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from foretoken.control.queue import SchedulerConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.files import parse_json
from foretoken.option import same_option
from foretoken.params import DEADLINES_S, PRIORITIES, check_number, check_whole, is_count
from foretoken.plan.profile import Profile

Chances = tuple[float, ...]
MAX_REQUESTS = 1_000_000  # all are made before the first arrives
MAX_TOKENS = 1 << 24  # of a prompt or an answer: every step of it is simulated
_MAX_SECONDS = 1e9
_MIN_RATE = 1e-9  # of arrivals per second
PLAIN, AUTO = "plain", "auto"


@dataclass(frozen=True)
class Job:
    """One request: `acceptance` is the probability that a draft token is accepted given that all before it were, by
    place (the last value holds for all later places), or a name.

    A name stands for chances that were measured, a different one for each drafter (`chances_from_bench`). `priority`
    and `deadline_s` are `SamplingParams`'.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    acceptance: Chances | str = (0.0,)
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True)
class Lengths:
    """Whole numbers from `low` to `high`, all alike."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One of them."""
        return rng.randint(self.low, self.high)


def poisson(
    rate: float, count: int, prompts: Lengths, outputs: Lengths, acceptance: Chances | str, seed: int
) -> list[Job]:
    """`count` requests that come at random, `rate` per second on average; the same seed gives the same ones, scaled in
    time by the rate.

    Raises:
        InputError: a rate that is not above 0, or no request.
    """
    if not _MIN_RATE <= rate <= 1 / _MIN_RATE:
        remedy = f"the rate must be above 0 requests per second, from {_MIN_RATE:g} to {1 / _MIN_RATE:g}"
        raise InputError("arrivals", f"poisson:{rate:g}", remedy)
    check_whole("requests", count, low=1, high=MAX_REQUESTS)
    rng, now, jobs = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(1.0) / rate
        jobs.append(Job(now, prompts.draw(rng), outputs.draw(rng), acceptance))
    return jobs


def parse_trace(lines: Iterable[str], acceptance: Chances | str) -> list[Job]:
    """Requests from JSON lines in order of arrival; the keys are the fields of `Job`, and only the two lengths must be
    there.

    `acceptance` holds for lines that name none.

    Raises:
        InputError: names the line and what is wrong with it.
    """
    jobs = [_job(number, line, acceptance) for number, line in enumerate(lines, 1) if line.strip()]
    if not jobs:
        raise InputError("arrivals", "", "holds no request")
    return sorted(jobs, key=lambda job: job.arrival_s)


def _job(number: int, line: str, acceptance: Chances | str) -> Job:
    where = f"trace line {number}"
    raw = parse_json(where, line, line)
    if not isinstance(raw, Mapping):
        raise InputError(where, line, "must be an object")
    known = [field.name for field in fields(Job)]
    unknown = set(raw) - set(known)
    if unknown:
        raise InputError(where, sorted(unknown)[0], f"unknown key; known: {', '.join(known)}")
    arrival = raw.get("arrival_s", 0.0)
    check_number(f"{where}: arrival_s", arrival, low=0.0, high=_MAX_SECONDS)
    for name in ("prompt_tokens", "output_tokens"):
        check_whole(f"{where}: {name}", raw.get(name), low=1, high=MAX_TOKENS)
    given = acceptance
    if raw.get("acceptance") is not None:
        given = parse_acceptance(raw["acceptance"], f"{where}: acceptance")
    priority, deadline_s = raw.get("priority", 0), raw.get("deadline_s")
    check_whole(f"{where}: priority", priority, *PRIORITIES)
    if deadline_s is not None:
        check_number(f"{where}: deadline_s", deadline_s, *DEADLINES_S, open_low=True)
    return Job(float(arrival), raw["prompt_tokens"], raw["output_tokens"], given, priority, deadline_s)


def parse_acceptance(value: object, field: str = "acceptance") -> Chances | str:
    """A chance, a list of chances by place, or a name.

    Raises:
        InputError: a number outside [0, 1] or another thing.
    """
    if isinstance(value, str) and value:
        return value
    given = value if isinstance(value, list | tuple) else [value]
    numbers = [c for c in given if isinstance(c, int | float) and not isinstance(c, bool)]
    chances = tuple(float(c) for c in numbers if 0 <= c <= 1)  # no NaN
    if not chances or len(chances) < len(given):
        raise InputError(field, value, "must be a chance from 0 to 1, a list of them by place, or a name")
    return chances


def chances_from_bench(raw: object) -> dict[str, dict[str, Chances]]:
    """By drafter and slice, the chances in a result of `foretoken bench`: of each drafter's longest drafts, all
    temperatures alike.

    Raises:
        InputError: not such a result.
    """
    rows = raw.get("rows") if isinstance(raw, Mapping) else None
    if not isinstance(rows, list):
        raise InputError("bench", type(raw).__name__, "not a result of `foretoken bench --json` or `--out`")
    found: dict[str, dict[str, Chances]] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise InputError(f"bench row {number}", row, "must be an object")
        drafter, name, shares = row.get("drafter"), row.get("slice"), row.get("acceptance_per_position") or ()
        if drafter is None or not shares:
            continue
        if not isinstance(drafter, str) or not isinstance(name, str) or not isinstance(shares, list):
            remedy = "must name a drafter and a slice, with a list of shares at acceptance_per_position"
            raise InputError(f"bench row {number}", row, remedy)
        for share in shares:
            check_number(f"bench row {number}: acceptance_per_position", share, low=0.0, high=1.0)
        known = found.setdefault(drafter, {})
        if len(shares) > len(known.get(name, ())):
            # From the share of draft tokens kept at each place to the chance given that those before were kept.
            pairs = zip((1.0, *shares), shares, strict=False)
            known[name] = tuple(min(1.0, share / before) if before > 0 else 0.0 for before, share in pairs)
    return found


@dataclass(frozen=True)
class SimSetting:
    """Which drafters draft (none: plain decoding) and how much (None: the policy chooses, also among drafters)."""

    drafters: tuple[str, ...] = ()
    num_draft: int | None = 0

    @property
    def name(self) -> str:
        """As rows of the bench are called: plain, ngram-5, draft_model-auto; auto for several drafters."""
        if not self.drafters:
            return PLAIN
        if len(self.drafters) > 1:
            return AUTO
        return f"{self.drafters[0]}-{AUTO if self.num_draft is None else self.num_draft}"

    def check_with(self, profile: Profile) -> None:
        """Refuse drafters whose cost is not known.

        Raises:
            ConfigError: a drafter that the profile does not know.
        """
        for drafter in self.drafters:
            if drafter not in profile.drafters:
                names = ", ".join(sorted(profile.drafters)) or "none"
                raise ConfigError("settings", self.name, f"the profile has no cost of {drafter}; it knows {names}")


def parse_setting(text: str) -> SimSetting:
    """The setting called `text`: plain, or drafter and number or auto (ngram-5).

    Raises:
        ConfigError: none of these.
    """
    drafter, found, number = text.rpartition("-")
    if text == PLAIN:
        return SimSetting()
    if not found or not drafter or not (number == AUTO or is_count(number)):
        remedy = "must be plain, or a drafter and a number or auto, such as ngram-5 or draft_model-auto"
        raise ConfigError("settings", text, remedy)
    return SimSetting((drafter,), None if number == AUTO else int(number))


@dataclass(frozen=True)
class Limits(SchedulerConfig):
    """Limits of scheduler and cache. `cache_tokens` None: more than is needed; `max_context_tokens` None: no bound."""

    cache_tokens: int | None = field(default=None, metadata=same_option(EngineConfig, "cache_tokens"))
    block_tokens: int = 32
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cache_tokens", "block_tokens", "max_context_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "must be at least 1")

    def footprint_tokens(self, num_tokens: int) -> int:
        """`num_tokens` in whole blocks."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens

    @property
    def capacity_tokens(self) -> float:
        """What all whole blocks hold."""
        return float("inf") if self.cache_tokens is None else self.cache_tokens // self.block_tokens * self.block_tokens
