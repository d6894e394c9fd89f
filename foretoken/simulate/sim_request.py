"""One request on its way through a simulation: how far it has come, and what is drafted for it next.

What is left to chance is whether a draft token is right. It is drawn once for every request and place of its answer:
common random numbers across settings, so that settings differ by what they do, and so that more acceptance can never
make a round emit less. Where answers were recorded a request follows one of them instead.

Records hold what a drafter drafted in real rounds and what of it stood. Lookups draft where the text repeats itself and
nothing elsewhere, and a place that was found goes on: their draft tokens do not stand independently of each other, nor
do all answers gain alike. So no rates are kept but whole answers, place by place. Studies make records of answers of
the engine (`studies.validation.records`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.control.candidates import DrafterOption, Preview, RequestView
from foretoken.control.queue import Urgency, urgency
from foretoken.errors import CapacityError, InputError
from foretoken.simulate.inputs import Chances, Job, Limits, SimSetting


@dataclass(frozen=True)
class Round:
    """Draft tokens as a tree: `parents` of nodes in the drafter's order (-1 none), the `path` that stood."""

    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()

    def within(self, num_draft: int) -> Round:
        """The round under a smaller budget, which is given the first nodes of the larger one."""
        if num_draft >= len(self.parents):
            return self
        return Round(self.parents[:num_draft], tuple(node for node in self.path if node < num_draft))


def chain(num_draft: int, num_kept: int) -> Round:
    """`num_draft` draft tokens one after the other, of which the first ones stood."""
    return Round(tuple(range(-1, num_draft - 1)), tuple(range(num_kept)))


@dataclass(frozen=True)
class Record:
    """One answer: the round that begins at each of its places, the second token's first (the first is never drafted).

    Of a drafter that shows its draft tokens also the answer's `tokens`, the `previews` at each place, and the seconds
    that one takes.
    """

    rounds: tuple[Round, ...]
    tokens: tuple[int, ...] = ()
    previews: tuple[Preview, ...] = ()
    preview_s: float = 0.0

    def at(self, place: int, num_draft: int) -> Round:
        """The round at `place` with a budget of `num_draft`; beyond its end the answer begins anew."""
        return self.rounds[place % len(self.rounds)].within(num_draft)

    def preview_at(self, place: int, most: int) -> Preview:
        """What was shown at `place`, `most` draft tokens at most."""
        return self.previews[place % len(self.previews)].first(most)

    def emitted(self, place: int, count: int) -> tuple[int, ...]:
        """The `count` tokens that a round at `place` emits, fewer at the answer's end."""
        first = place % len(self.previews) + 1
        return self.tokens[first : first + count]


@dataclass(frozen=True)
class Records:
    """Answers to prompts of one kind, at least one: a request goes the way of one of them."""

    answers: tuple[Record, ...]


Known = Mapping[str, Mapping[str, Chances | Records]]  # by drafter and name: chances, or recorded answers


@dataclass
class SimRequest:
    """One request on its way: `num_tokens` is prompt and output so far. Times are None until they come.

    `recorded` is what is known of its drafters' draft tokens, by option. A drafter that drafts for a request for the
    first time, not in `read_by` yet, reads its text first.
    """

    request_id: int
    job: Job
    setting: SimSetting
    recorded: tuple[Chances | Record, ...]
    draws: tuple[float, ...]  # [output tokens] uniforms: whether a draft token of this token would be right
    output_tokens: int
    urgency: Urgency
    options: tuple[DrafterOption, ...] = ()
    num_tokens: int = 0
    num_preempted: int = 0
    read_by: set[int] = field(default_factory=set)
    first_s: float | None = None
    finish_s: float | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        return self.num_tokens - self.job.prompt_tokens

    @property
    def has_emitted(self) -> bool:
        """Whether the answer has begun."""
        return self.num_emitted > 0

    def view(self, now_s: float) -> RequestView:
        """The request as the control sees it; the first token is never drafted."""
        deadline_s = self.job.deadline_s
        return RequestView(
            request_id=self.request_id,
            options=self.options if self.has_emitted else (),
            num_draft=self.setting.num_draft,
            num_tokens=self.num_tokens,
            num_remaining=self.output_tokens - self.num_emitted,
            max_new_tokens=self.output_tokens,
            priority=self.job.priority,
            deadline_s=None if deadline_s is None else self.job.arrival_s + deadline_s - now_s,
        )

    def draft_round(self, option: int | None, num_draft: int) -> Round:
        """The next round with a budget of `num_draft` under an option."""
        if option is None or not num_draft:
            return Round()
        source = self.recorded[option]
        if isinstance(source, Record):
            return source.at(self.num_emitted - 1, num_draft)
        return chain(num_draft, self.num_kept(source, num_draft))

    def num_kept(self, chances: Chances, num_draft: int) -> int:
        """How many of the next `num_draft` draft tokens are right."""
        for place in range(num_draft):
            if self.draws[self.num_emitted + place] >= chances[min(place, len(chances) - 1)]:
                return place
        return num_draft

    def emitted(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens where the answer was recorded; stand-ins where it was not."""
        for source in self.recorded:
            if isinstance(source, Record) and source.previews:
                return source.emitted(self.num_emitted - 1, count)
        return (0,) * count


def start(index: int, job: Job, setting: SimSetting, limits: Limits, seed: int, known: Known) -> SimRequest:
    """A request at its beginning; the same arguments draw the same numbers.

    Raises:
        InputError: a prompt beyond the context, or a name without chances.
        CapacityError: a request that the cache can never hold.
    """
    context = limits.max_context_tokens
    if context is not None and job.prompt_tokens >= context:
        remedy = f"the context holds {context} tokens; a prompt at most {context - 1}"
        raise InputError("prompt_tokens", job.prompt_tokens, remedy)
    output_tokens = job.output_tokens if context is None else min(job.output_tokens, context - job.prompt_tokens)
    if limits.footprint_tokens(job.prompt_tokens + output_tokens) > limits.capacity_tokens:
        needed = limits.footprint_tokens(job.prompt_tokens + output_tokens)
        raise CapacityError(
            f"out of KV blocks: request {index} may need {needed} tokens and the cache holds {limits.cache_tokens}; "
            "raise cache_tokens"
        )
    rng = random.Random(f"{seed} {index}")
    draws = tuple(rng.random() for _ in range(output_tokens))
    answer = rng.random()  # the same answer for every drafter
    sources = tuple(_source(job, drafter, known, answer) for drafter in setting.drafters)
    return SimRequest(
        request_id=index,
        job=job,
        setting=setting,
        recorded=sources,
        draws=draws,
        output_tokens=output_tokens,
        urgency=urgency(index, job.arrival_s, job.priority, job.deadline_s, limits.aging_s),
        options=tuple(
            DrafterOption(number, drafter, shows=isinstance(source, Record) and bool(source.previews))
            for number, (drafter, source) in enumerate(zip(setting.drafters, sources, strict=True))
        ),
        num_tokens=job.prompt_tokens,
    )


def _source(job: Job, drafter: str, known: Known, answer: float) -> Chances | Record:
    if not isinstance(job.acceptance, str):
        return job.acceptance
    named = known.get(drafter, {})
    if job.acceptance not in named:
        names = ", ".join(sorted(named)) or "none"
        remedy = f"no chances of this name were measured for {drafter}; known: {names}"
        raise InputError("acceptance", job.acceptance, remedy)
    found = named[job.acceptance]
    return found.answers[int(answer * len(found.answers))] if isinstance(found, Records) else found
