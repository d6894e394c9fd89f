"""The pairs of a replay, in blocks, and what was observed of each.

Every request is asked of both sides with the same seed. In a block half of the requests are asked of A first, in an
order drawn at random: what favours the second answer of a pair, such as a prefix that the first has left in a shared
cache, favours both sides alike within every block. Requests are shuffled, so that blocks are alike whatever the order
of the file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foretoken.backend.answering import Question
from foretoken.measure.ab.options import AbOptions
from foretoken.measure.workload import Prompt

_TOKEN_CHARS = 4  # of a token, where nobody counts them
METRICS = ("e2e", "ttft", "itl", "tokens_per_s")


@dataclass(frozen=True)
class PairPlan:
    """One request for both sides: `block` counts from 0, `a_first` says who is asked first."""

    index: int
    block: int
    a_first: bool
    name: str
    slice: str
    question: Question


@dataclass(frozen=True)
class Observed:
    """One answer as its client saw it, in seconds; `error` is "" for a complete answer. `text` is the answer.

    `itl_s` is the mean time between two tokens behind the first piece of the answer; None where there is none. Without
    `is_counted` the server did not say how many tokens there are, without `is_shown` nobody showed the text.
    """

    e2e_s: float
    num_tokens: int
    ttft_s: float | None = None
    itl_s: float | None = None
    text: str = ""
    error: str = ""
    is_counted: bool = True
    is_shown: bool = True

    def by_characters(self) -> Observed:
        """The same with a quarter of its characters as its tokens."""
        num_tokens = round(len(self.text) / _TOKEN_CHARS)
        if self.error or not num_tokens:
            return self
        itl_s = None if self.itl_s is None else self.itl_s * self.num_tokens / num_tokens
        return replace(self, num_tokens=num_tokens, itl_s=itl_s)


@dataclass(frozen=True)
class Pair:
    """What became of a planned request on both sides."""

    plan: PairPlan
    a: Observed
    b: Observed

    @property
    def is_ok(self) -> bool:
        """Whether both answers are complete."""
        return not self.a.error and not self.b.error

    @property
    def has_equal_texts(self) -> bool | None:
        """Whether both gave the same text; None where a side shows none."""
        return self.a.text == self.b.text if self.a.is_shown and self.b.is_shown else None

    @property
    def has_equal_lengths(self) -> bool:
        """Whether both answers have as many tokens, so that whole answers can be compared."""
        return self.a.num_tokens == self.b.num_tokens

    def log_ratio(self, metric: str) -> float | None:
        """log(A's time / B's): above 0 where B is faster; None where one of them is unknown.

        `e2e` is the time of the whole answer, per token where the lengths differ; `tokens_per_s` always per token.
        """
        if not self.is_ok:
            return None
        above, below = (_time(one, metric, per_token=not self.has_equal_lengths) for one in (self.a, self.b))
        if above is None or below is None or above <= 0 or below <= 0:
            return None
        return math.log(above / below)


def _time(one: Observed, metric: str, per_token: bool) -> float | None:
    if metric == "ttft":
        return one.ttft_s
    if metric == "itl":
        return one.itl_s
    if metric == "tokens_per_s" or per_token:
        return one.e2e_s / one.num_tokens if one.num_tokens else None
    return one.e2e_s


def paired(plan: PairPlan, a: Observed, b: Observed) -> Pair:
    """A pair whose answers are counted alike: by characters where a server does not say its tokens, because a piece of
    text of a server that speculates holds several.
    """
    if a.is_counted and b.is_counted:
        return Pair(plan, a, b)
    return Pair(plan, a.by_characters(), b.by_characters())


def plan_pairs(options: AbOptions, prompts: Sequence[Prompt]) -> list[PairPlan]:
    """Every request of the replay, in blocks, shuffled anew for each repeat; the same seed gives the same.

    The last block of a repeat may be smaller, and is left out where it has a single request, unless there is no other.
    """
    found: list[PairPlan] = []
    block = 0
    for repeat in range(options.repeats):
        rng = random.Random(f"ab {options.seed} {repeat}")
        order = rng.sample(range(len(prompts)), len(prompts))
        for begin in range(0, len(order), options.pairs_per_block):
            places = order[begin : begin + options.pairs_per_block]
            if len(places) == 1 and found:
                continue
            first = [place < len(places) // 2 for place in range(len(places))]
            if len(places) % 2:
                first[-1] = rng.random() < 0.5
            rng.shuffle(first)
            for place, a_first in zip(places, first, strict=True):
                prompt = prompts[place]
                question = _question(options, prompt, len(prompts) * repeat + place)
                found.append(PairPlan(len(found), block, a_first, prompt.name, prompt.slice, question))
            block += 1
    return found


def _question(options: AbOptions, prompt: Prompt, number: int) -> Question:
    """A request as both sides are asked it; sampled ones get a seed of their own."""
    messages = prompt.messages or ((("user", prompt.text),) if options.chat else ())
    temperature = options.temperature if prompt.temperature is None else float(prompt.temperature)
    return Question(
        text="" if messages else prompt.text,
        messages=messages,
        max_tokens=options.max_tokens if prompt.max_tokens is None else prompt.max_tokens,
        temperature=temperature,
        seed=options.seed + number if temperature > 0 else None,
        ignore_eos=options.ignore_eos,
        prediction=prompt.prediction,
    )


def block_means(pairs: Sequence[Pair], metric: str) -> list[float]:
    """The mean log-ratio of each block in their order, over its pairs that have one; no block without one."""
    return [math.fsum(values) / len(values) for values in in_blocks(pairs, lambda pair: pair.log_ratio(metric))]


def in_blocks(pairs: Sequence[Pair], value: Callable[[Pair], float | None]) -> list[list[float]]:
    """The values of pairs that have one, by block in their order."""
    blocks: dict[int, list[float]] = {}
    for pair in pairs:
        if (found := value(pair)) is not None:
            blocks.setdefault(pair.plan.block, []).append(found)
    return [values for _, values in sorted(blocks.items())]
