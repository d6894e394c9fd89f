"""One request on its way through a simulation: how far it has come, and what is guessed for it next.

What is left to chance is whether a guess stands. It is drawn once for every request and place of its answer, so that
two settings differ by what they do and not by luck, and so that more acceptance can never make a round emit less. Where
answers were recorded a request goes the way of one of them instead.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.control.queue import Urgency, urgency
from foretoken.errors import CapacityError, InputError
from foretoken.simulate.arrivals import Chances, Job
from foretoken.simulate.records import Record, Records, Round, chain
from foretoken.simulate.setting import Limits, SimSetting

Known = Mapping[str, Mapping[str, Chances | Records]]  # by drafter and name: chances, or answers that were looked at


@dataclass
class SimRequest:
    """One request on its way: `tokens` is prompt and output, `held` what the cache holds. Times are None until they
    come.

    A drafter that is to guess for a request that `has_drafted` not yet reads its text first.
    """

    index: int
    job: Job
    chances: Chances
    draws: tuple[float, ...]  # [output tokens] uniforms: whether a guess of this token would stand
    output_tokens: int
    urgency: Urgency
    record: Record | None = None  # takes the place of chances and draws
    tokens: int = 0
    held: int = 0
    num_preempted: int = 0
    has_drafted: bool = False
    first_s: float | None = None
    finish_s: float | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        return self.tokens - self.job.prompt_tokens

    @property
    def most_guesses(self) -> int:
        """More could not be used; the first token is never guessed."""
        return self.output_tokens - self.num_emitted - 1 if self.num_emitted else 0

    def num_kept(self, num_draft: int) -> int:
        """How many of the next `num_draft` guesses stand."""
        for place in range(num_draft):
            if self.draws[self.num_emitted + place] >= self.chances[min(place, len(self.chances) - 1)]:
                return place
        return num_draft

    def guess(self, num_draft: int) -> Round:
        """The next round with a budget of `num_draft`."""
        if self.record is not None and num_draft:
            return self.record.at(self.num_emitted - 1, num_draft)
        return chain(num_draft, self.num_kept(num_draft))


def start(index: int, job: Job, setting: SimSetting, limits: Limits, seed: int, known: Known) -> SimRequest:
    """A request at its beginning; the same arguments draw the same luck.

    Raises:
        InputError: a prompt beyond the context, or a name without chances.
        CapacityError: a request that the cache can never hold.
    """
    context = limits.max_context_tokens
    if context is not None and job.prompt_tokens >= context:
        raise InputError(
            "prompt_tokens", job.prompt_tokens, f"the context holds {context} tokens; a prompt at most {context - 1}"
        )
    output_tokens = job.output_tokens if context is None else min(job.output_tokens, context - job.prompt_tokens)
    if limits.footprint_tokens(job.prompt_tokens + output_tokens) > limits.capacity_tokens:
        needed = limits.footprint_tokens(job.prompt_tokens + output_tokens)
        raise CapacityError(
            f"out of KV blocks: request {index} may need {needed} tokens and the cache holds "
            f"{limits.cache_tokens}; raise cache_tokens"
        )
    rng = random.Random(f"{seed} {index}")
    draws = tuple(rng.random() for _ in range(output_tokens))
    order = urgency(index, job.arrival_s, job.priority, job.deadline_s, limits.aging_s)
    found = _acceptance(job, setting, known)
    if isinstance(found, Records):
        return SimRequest(index, job, (), draws, output_tokens, order, rng.choice(found.answers))
    return SimRequest(index, job, found, draws, output_tokens, order)


def _acceptance(job: Job, setting: SimSetting, known: Known) -> Chances | Records:
    if setting.drafter is None:
        return (0.0,)
    if not isinstance(job.acceptance, str):
        return job.acceptance
    named = known.get(setting.drafter, {})
    if job.acceptance not in named:
        names = ", ".join(sorted(named)) or "none"
        raise InputError(
            "acceptance", job.acceptance, f"no chances of this name were measured for {setting.drafter}; known: {names}"
        )
    return named[job.acceptance]
