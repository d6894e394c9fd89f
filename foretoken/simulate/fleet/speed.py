"""What one replica does while n requests share it, from the curves of a profile: how fast they end, how far apart their
tokens are, how long a new one waits for its first.

Continuous batching is processor sharing whose speed depends on how many share: n requests get a row each (or a row and
draft tokens) of every step. A step reads prompts beside the others' rows, so a prompt takes its additional seconds from
everyone. Up to `max_batch_size` requests run, the others wait in order of arrival.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from foretoken.control.config import DEFAULT
from foretoken.errors import InputError
from foretoken.plan.profile import Profile
from foretoken.simulate.inputs import Chances, Lengths, Limits, SimSetting


@dataclass(frozen=True)
class RequestMix:
    """Lengths of requests, and by drafter the chance that a draft token is accepted, by place; drafters that are not in
    `chances` have those at "".
    """

    prompts: Lengths
    outputs: Lengths
    chances: Mapping[str, Chances]

    def chances_of(self, drafter: str) -> Chances:
        """Of one drafter.

        Raises:
            InputError: none are known.
        """
        found = self.chances.get(drafter, self.chances.get(""))
        if found is None:
            raise InputError("acceptance", drafter, "no chances of this drafter are known: name a number, or a slice")
        return found

    @property
    def prompt_tokens(self) -> float:
        """Of a request, on average."""
        return (self.prompts.low + self.prompts.high) / 2

    @property
    def output_tokens(self) -> float:
        """Of a request, on average."""
        return (self.outputs.low + self.outputs.high) / 2

    @property
    def output_left(self) -> float:
        """Tokens that a running request has still to write: E[L^2] / (2 E[L]), as of any renewal process."""
        low, high = self.outputs.low, self.outputs.high
        variance = ((high - low + 1) ** 2 - 1) / 12
        return (variance + self.output_tokens**2) / (2 * self.output_tokens)


@dataclass(frozen=True)
class DecodeRound:
    """One step in which all running requests decode: its seconds, and tokens per request."""

    seconds: float
    emitted: float
    second_moment: float

    def rounds_for(self, tokens: float) -> float:
        """Rounds until `tokens` are out, with what the last one emits beyond them (renewal theory)."""
        beyond = (self.second_moment / self.emitted - 1) / 2
        return max(0.0, (tokens + beyond) / self.emitted)


@dataclass(frozen=True)
class ReplicaSpeed:
    """A replica by the number of requests that run, index 0 for one: seconds of a step without and with draft tokens,
    what a prompt adds (`prompt_s`), and tokens between first and last come `token_s` apart.

    `finish_rates` are requests per second that end, with prompts coming in as fast as answers end.
    """

    mix: RequestMix
    step_s: tuple[float, ...]
    prompt_s: tuple[float, ...]
    prompt_steps: int
    finish_rates: tuple[float, ...]
    token_s: tuple[float, ...]

    @cached_property
    def max_batch_size(self) -> int:
        """Requests that run at once."""
        return len(self.step_s)

    def finish_rate(self, present: int) -> float:
        """Requests per second that end while so many are there."""
        return self.finish_rates[min(present, self.max_batch_size) - 1] if present else 0.0

    def queued_tokens(self, present: float) -> float:
        """What the autoscaler counts: tokens that requests may still write, and prompts of those that wait."""
        running = min(present, self.max_batch_size)
        waiting = present - running
        return running * self.mix.output_left + waiting * (self.mix.prompt_tokens + self.mix.output_tokens)

    def first_tail(self, weights: Sequence[float], limit_s: float) -> float:
        """The share of requests whose first token comes later than `limit_s`; `weights` are shares of requests that
        found 0, 1, ... others there.

        One that finds a free place waits for the rest of the step in progress, uniform in it, and for the step or steps
        that read its prompt. One that finds k waiting waits for k + 1 to end (Erlang) and for the latter.
        """
        late = 0.0
        batch = self.max_batch_size
        for found, weight in enumerate(weights[:batch]):
            late += weight * self._read_tail(found, limit_s)
        waiting = weights[batch:]
        if waiting:
            beyond_s = max(0.0, limit_s - self._read_s(batch - 1))
            tails = _erlang_tails(beyond_s * self.finish_rates[-1], len(waiting))
            late += sum(map(mul, waiting, tails))
        return late

    def _read_tail(self, found: int, limit_s: float) -> float:
        """Of requests that find `found` others, a free place among them. The step in progress reads a prompt with the
        share of time that such steps take while as many requests come as end.
        """
        slack_s = limit_s - self._read_s(found)
        if not found:
            return float(slack_s < 0)
        step_s = self.step_s[found - 1]
        longer_s = step_s + self.prompt_s[found - 1]
        reads = min(1.0, self.finish_rates[found - 1] * longer_s)
        return (1 - reads) * _uniform_tail(step_s, slack_s) + reads * _uniform_tail(longer_s, slack_s)

    def _read_s(self, found: int) -> float:
        """Seconds of the steps that read a prompt beside `found` others."""
        return self.prompt_s[found] + (self.prompt_steps * self.step_s[found - 1] if found else 0.0)


def _uniform_tail(most: float, limit: float) -> float:
    """P(U > limit), U uniform from 0 to `most`."""
    return min(1.0, max(0.0, 1 - limit / most))


def _erlang_tails(mean: float, count: int) -> list[float]:
    """P(Poisson(mean) <= k) for k = 0 ... count - 1: that k + 1 ends take longer than expected for `mean` of them."""
    tails, log_term, total = [], -mean, 0.0
    for k in range(count):
        total += math.exp(log_term)
        tails.append(min(1.0, total))
        log_term += math.log(mean) - math.log(k + 1) if mean > 0 else -math.inf
    return tails


def replica_speed(profile: Profile, setting: SimSetting, mix: RequestMix, limits: Limits) -> ReplicaSpeed:
    """The replica of a profile under a setting; where the setting leaves the number of draft tokens open, the one that
    gives most tokens per second for each number of requests.

    Raises:
        ConfigError: a drafter that the profile does not know.
        InputError: a drafter without chances.
    """
    setting.check_with(profile)
    batch = range(1, limits.max_batch_size + 1)
    chosen = [_best_round(profile, setting, mix, running) for running in batch]
    rounds = [one for one, _ in chosen]
    chunks = _chunks(mix.prompt_tokens, limits.max_prompt_tokens)
    after_first = mix.output_tokens - 1
    prompt_s, finish, token_s = [], [], []
    for running, (one, drafter) in zip(batch, chosen, strict=True):
        prompt = sum(_beside_s(profile, mix, running - 1, chunk) for chunk in chunks)
        prompt += 0.0 if drafter is None else profile.drafters[drafter].prompt.seconds(mix.prompt_tokens)
        decode = one.rounds_for(after_first) * one.seconds
        prompt_s.append(prompt)
        finish.append(running / (running * prompt + decode))
        token_s.append(((running - 1) * prompt + decode) / max(1.0, after_first))
    return ReplicaSpeed(
        mix, tuple(one.seconds for one in rounds), tuple(prompt_s), len(chunks), tuple(finish), tuple(token_s)
    )


def _context(mix: RequestMix) -> int:
    """Tokens of a running request, on average over its answer."""
    return round(mix.prompt_tokens + mix.output_left)


def _best_round(profile: Profile, setting: SimSetting, mix: RequestMix, running: int) -> tuple[DecodeRound, str | None]:
    """The round of `running` requests, and its drafter (None: none drafts)."""
    fixed = setting.num_draft
    counts = range(1, DEFAULT.max_num_draft + 1) if fixed is None else [fixed]
    pairs = itertools.product(setting.drafters, filter(None, counts))
    drafted = [(_round(profile, mix, running, drafter, count), drafter) for drafter, count in pairs]
    plain: tuple[DecodeRound, str | None] = (_round(profile, mix, running, None, 0), None)
    choices = [plain, *drafted] if fixed is None or not drafted else drafted
    return max(choices, key=lambda choice: choice[0].emitted / choice[0].seconds)


def _round(profile: Profile, mix: RequestMix, running: int, drafter: str | None, num_draft: int) -> DecodeRound:
    seconds = profile.step_s(running * (1 + num_draft), [_context(mix)] * running)
    if drafter is None:
        return DecodeRound(seconds, 1.0, 1.0)
    chances, stands, emitted, moment = mix.chances_of(drafter), 1.0, 1.0, 1.0
    for place in range(num_draft):
        stands *= chances[min(place, len(chances) - 1)]
        emitted += stands
        moment += stands * (2 * place + 3)  # E[n^2] is the sum over n of (2n - 1) P(at least n)
    return DecodeRound(seconds + profile.drafters[drafter].seconds(num_draft, running), emitted, moment)


def _chunks(prompt_tokens: float, max_prompt_tokens: int) -> list[int]:
    whole, rest = divmod(round(prompt_tokens), max_prompt_tokens)
    return [max_prompt_tokens] * whole + [rest] * bool(rest)


def _beside_s(profile: Profile, mix: RequestMix, decoding: int, chunk: int) -> float:
    """What a chunk of a prompt adds to a step in which `decoding` others have a row each."""
    contexts = [_context(mix)] * decoding
    alone_s = profile.step_s(decoding, contexts) if decoding else 0.0
    return profile.step_s(decoding, [*contexts, 0], chunk) - alone_s
