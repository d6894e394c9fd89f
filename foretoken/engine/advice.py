"""When speculation costs more than it need: functions from what is known to a warning with its remedy, or None.

No function here looks at a model, a clock or a machine; `engine.adviser` collects the facts and says each warning once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from foretoken.control.routing import RoutingRules, is_short
from foretoken.machine.neighbours import NEIGHBOUR_CORES

Topic = Literal["draft size", "draft text", "acceptance", "temperature", "short answer", "memory", "load", "neighbours"]

MIN_SIZE_RATIO = 3.0  # a draft that reads more than a third of the target's bytes leaves little to gain
MIN_ACCEPTANCE = 0.15  # of drafted tokens
MIN_ACCEPTED = 0.5  # of a draft, on average: trees are wide, so that their share of accepted tokens is small
ENOUGH_DRAFTED = 256  # tokens, before acceptance is judged
MIN_RESERVE = 0.15  # of the memory
CONCURRENT = 4.0  # requests in a step, from which on load is judged
ENOUGH_ROUNDS = 256  # of requests, before load is judged
MIN_DRAFTING = 0.05  # of the rounds of requests whose number of draft tokens is left open
MAX_DRAFTING = 0.5  # of the time of steps, beside a neighbour: alone, drafting takes less where it pays
MIN_SPEEDUP = 0.95  # of fixed numbers of draft tokens


@dataclass(frozen=True)
class Advice:
    """A finding and what to do about it."""

    topic: Topic
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}"


@dataclass(frozen=True)
class TextFormat:
    """How a model lays out its text: the chat template's source, and special tokens by name (their ids)."""

    chat_template: str | None
    special_tokens: Mapping[str, int | None]


@dataclass(frozen=True)
class LoadFacts:
    """Finished requests: their rounds, those with draft tokens, and how many requests ran in a step on average.

    `is_open`: the numbers of draft tokens are left to the engine. `estimated_speedup` is over plain decoding, None
    while unknown.
    """

    num_rounds: int
    num_drafts: int
    mean_requests: float
    is_open: bool
    estimated_speedup: float | None


def of_draft_size(name: str, target_bytes: int, draft_bytes: int) -> Advice | None:
    """A draft that is only two or three times smaller; `*_bytes` are the weights that a step of one token reads.

    One as large as the target has a warning of its own (`text.vocabulary`).
    """
    if not 0 < draft_bytes < target_bytes or target_bytes / draft_bytes > MIN_SIZE_RATIO:
        return None
    return Advice(
        "draft size",
        f"draft {name!r} is only {target_bytes / draft_bytes:.1f} times smaller than the target "
        f"({draft_bytes / 1e6:,.0f} of {target_bytes / 1e6:,.0f} MB per step), so drafting costs almost what it saves",
        "use a draft 10 or more times smaller, draft_dtype='int8' or 'int4', or a drafter without a model",
    )


def of_draft_text(name: str, target: TextFormat, draft: TextFormat) -> Advice | None:
    """A draft that was trained on chats laid out otherwise, or with other special tokens."""
    others = [
        token
        for token in target.special_tokens
        if token in draft.special_tokens and target.special_tokens[token] != draft.special_tokens[token]
    ]
    both = target.chat_template is not None and draft.chat_template is not None
    differs = ["chat template"] if both and target.chat_template != draft.chat_template else []
    if not differs and not others:
        return None
    found = " and ".join([*differs, *([f"{', '.join(others)}"] if others else [])])
    return Advice(
        "draft text",
        f"draft {name!r} has another {found} than the target, so it drafts worse in chats and at the end of answers",
        "use a draft of the same family and version, or one trained on the target's own chats",
    )


def of_acceptance(drafter: str, num_drafted: int, num_accepted: int, accepted_per_draft: float) -> Advice | None:
    """Draft tokens that are mostly rejected, after enough of them; `accepted_per_draft` is of all drafters together."""
    if num_drafted < ENOUGH_DRAFTED or accepted_per_draft >= MIN_ACCEPTED:
        return None
    rate = num_accepted / num_drafted
    if rate >= MIN_ACCEPTANCE:
        return None
    return Advice(
        "acceptance",
        f"{rate:.0%} of {num_drafted:,} tokens drafted by {drafter!r} were accepted",
        "leave num_draft to 'auto', compare drafters on your texts with `foretoken bench`, or use drafter='none'",
    )


def of_temperature(temperature: float) -> Advice | None:
    """Sampling that makes the target's own next token hard to predict."""
    if temperature <= 1.0:
        return None
    return Advice(
        "temperature",
        f"temperature={temperature:g} flattens the target's distribution, so fewer draft tokens are accepted",
        "use a temperature of at most 1, or drafter='none' where it must be higher",
    )


def of_short_answer(max_tokens: int, num_prompt_tokens: int, draft: str) -> Advice | None:
    """An answer too short for the draft model that has to read a prompt at least as long for it."""
    rules = RoutingRules()
    if not is_short(num_prompt_tokens, max_tokens, rules):
        return None
    return Advice(
        "short answer",
        f"max_tokens={max_tokens}: for an answer of under {rules.min_tokens_for_draft_model} tokens, reading a prompt "
        f"of {num_prompt_tokens} with draft {draft!r} may take longer than its draft tokens save",
        "use drafter='auto', which then drafts without the draft model, or 'ngram'",
    )


def of_memory(used_bytes: int, memory_bytes: int, where: str) -> Advice | None:
    """Weights and full caches that leave too little of the memory for everything else."""
    reserve = 1 - used_bytes / memory_bytes
    if reserve >= MIN_RESERVE:
        return None
    return Advice(
        "memory",
        f"weights and full caches take {used_bytes / 2**30:,.1f} of the {memory_bytes / 2**30:,.1f} GiB of {where}, "
        f"which leaves {max(0.0, reserve):.0%} in reserve where {MIN_RESERVE:.0%} to 20% are usual",
        "lower cache_tokens, quantise the draft (draft_dtype), or use a drafter without a model",
    )


def of_load(facts: LoadFacts) -> Advice | None:
    """Many requests at once, at which draft tokens were not worth making, or cost more than they brought."""
    if facts.num_rounds < ENOUGH_ROUNDS or facts.mean_requests < CONCURRENT:
        return None
    if facts.is_open and facts.num_drafts < MIN_DRAFTING * facts.num_rounds:
        return Advice(
            "load",
            f"with {facts.mean_requests:.0f} requests at once, draft tokens were worth making in only "
            f"{facts.num_drafts / facts.num_rounds:.0%} of {facts.num_rounds:,} rounds",
            "use drafter='none' under this load, or a lower max_batch_size",
        )
    speedup = facts.estimated_speedup
    if not facts.is_open and speedup is not None and speedup < MIN_SPEEDUP:
        return Advice(
            "load",
            f"with {facts.mean_requests:.0f} requests at once, speculative decoding was {speedup:.2f}x as fast as "
            "plain decoding is estimated to be",
            "leave num_draft to 'auto', which makes no draft tokens where they do not pay",
        )
    return None


def of_neighbours(
    others_cores: float | None, drafting_share: float, num_threads: int, is_spinning: bool
) -> Advice | None:
    """Another process takes cores while threads of this one spin, and drafting takes most of the time."""
    if others_cores is None or others_cores < NEIGHBOUR_CORES or drafting_share < MAX_DRAFTING:
        return None
    if not is_spinning or num_threads < 2:
        return None
    return Advice(
        "neighbours",
        f"other processes take {others_cores:.1f} cores, threads that wait for each other spin, and drafting takes "
        f"{drafting_share:.0%} of the time",
        "set OMP_WAIT_POLICY=passive before torch is imported, or use fewer threads (torch.set_num_threads)",
    )
