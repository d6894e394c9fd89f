"""When speculation costs more than it need: functions from what is known to a warning with its remedy, or None; and
`Adviser`, which collects the facts while an engine runs and says each warning once.

The functions `of_...` look at no model, clock or machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from foretoken.config import SpecConfig
from foretoken.control.candidates import set_number
from foretoken.control.routing import RoutingRules, is_short
from foretoken.draft.base import DrafterKey
from foretoken.draft.group import drafter_key
from foretoken.engine.request import RequestState
from foretoken.engine.watch import Watcher
from foretoken.errors import SpeculationWarning, warn
from foretoken.kv.pool import largest_cache_bytes
from foretoken.machine.neighbours import NEIGHBOUR_CORES, OtherLoad
from foretoken.machine.threads import current_waiting
from foretoken.model.interface import LanguageModel
from foretoken.model.names import model_folder
from foretoken.text.tokenizer import Tokenizer, load_tokenizer

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


class Adviser(Watcher):
    """An observer of one engine, and of the models that are loaded for it.

    What is known when a request begins is said then; what its rounds tell is said by `conclude`, which callers run
    between answers: a warning must not stand in the middle of a streamed one.
    """

    def __init__(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        self._step_bytes, self._device, self._tokenizer = target.step_bytes, target.device, tokenizer
        self._told: set[Topic] = set()
        self._drafts: set[tuple[str, str]] = set()  # those that were looked at: name and format
        self._weight_bytes, self._cache_bytes = target.weight_bytes, _cache_bytes(target)
        # Heads and full caches; one that is made anew counts once.
        self._drafter_bytes: dict[DrafterKey | None, int] = {}
        self._num_steps = self._num_rounds = 0  # of finished requests the rounds
        self._drafted: dict[str, list[int]] = {}  # by drafter: drafted and accepted tokens of finished requests
        self._num_accepted = 0
        # Rounds with draft tokens of finished requests, by whether numbers are open.
        self._num_drafts = {True: 0, False: 0}
        self._num_own_rounds = {True: 0, False: 0}
        self._seconds = {True: [0.0, 0.0], False: [0.0, 0.0]}  # plain decoding's estimate, and what was taken
        self._has_news = False
        self._others = OtherLoad()  # since the last conclusion
        self._draft_s = self._step_s = 0.0  # of requests that finished since then

    # ---- models

    def loaded(self, spec: SpecConfig, models: Sequence[LanguageModel], head_bytes: int) -> None:
        """A drafter of `spec` was loaded, with its `models`; its heads take `head_bytes`, full caches included."""
        self._drafter_bytes[drafter_key(spec)] = head_bytes + sum(_cache_bytes(model) for model in models)
        name = spec.draft or next((part.draft for part in spec.configs if part.draft), None)
        if name is not None and models and (name, spec.draft_dtype) not in self._drafts:
            self._drafts.add((name, spec.draft_dtype))
            self._weight_bytes += models[0].weight_bytes
            self._tell(of_draft_size(name, self._step_bytes, models[0].step_bytes))
            self._compare_text(name)
        self.look_at_memory()

    def look_at_memory(self) -> None:
        """Whether weights and caches leave enough of the device's memory."""
        device = self._device
        if device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(device)  # all is allocated by now
            self._tell(of_memory(whole - free, whole, "the GPU"))
            return
        limit = largest_cache_bytes(device)
        if limit:
            used = self._weight_bytes + self._cache_bytes + sum(self._drafter_bytes.values())
            self._tell(of_memory(used, limit, "memory"))

    def _compare_text(self, name: str) -> None:
        other = load_tokenizer(Path(model_folder(name)))
        if self._tokenizer is not None and other is not None:
            self._tell(of_draft_text(name, text_format(self._tokenizer), text_format(other)))

    # ---- requests (`watch.Watcher`)

    def begin(self, state: RequestState) -> None:
        """A request was queued: its temperature and its length."""
        params, spec = state.request.params, state.request.spec
        if spec.drafter is None:
            return
        self._tell(of_temperature(params.temperature))
        leaves_draft_out = spec.drafter == "auto" and set_number(spec) is None  # by the routing rules
        if spec.draft is not None and not leaves_draft_out:
            self._tell(of_short_answer(params.max_tokens, len(state.request.prompt_ids), spec.draft))

    def end(self, state: RequestState) -> None:
        """A request is over: the outcome of its draft tokens."""
        spec, stats = state.request.spec, state.stats
        self._num_rounds += state.num_rounds
        if spec.drafter is None:
            return
        is_open = set_number(spec) is None
        self._num_drafts[is_open] += stats.num_drafts
        self._num_own_rounds[is_open] += state.num_rounds
        self._num_accepted += stats.num_accepted
        for drafter, count in stats.drafted_by.items():
            own = self._drafted.setdefault(drafter, [0, 0])
            own[0] += count
            own[1] += stats.accepted_by.get(drafter, 0)
        self._seconds[is_open][0] += stats.plain_s
        self._seconds[is_open][1] += stats.compared_s
        self._draft_s += stats.draft_s
        self._step_s += stats.draft_s + stats.verify_s
        self._has_news = True

    def between_steps(self) -> None:
        """A step is over."""
        self._num_steps += 1

    # ---- what rounds tell

    def conclude(self) -> None:
        """Say what finished requests tell about acceptance and load."""
        if not self._has_news:
            return
        self._has_news = False
        self._look_at_neighbours()
        per_draft = self._num_accepted / max(1, sum(self._num_drafts.values()))
        for drafter, (num_drafted, num_accepted) in self._drafted.items():
            self._tell(of_acceptance(drafter, num_drafted, num_accepted, per_draft))
        mean = self._num_rounds / max(1, self._num_steps)
        for is_open, (plain_s, took_s) in self._seconds.items():
            speedup = plain_s / took_s if took_s > 0 else None
            self._tell(
                of_load(LoadFacts(self._num_own_rounds[is_open], self._num_drafts[is_open], mean, is_open, speedup))
            )

    def _look_at_neighbours(self) -> None:
        """Whether others took cores since the last conclusion while drafting was slow."""
        if self._device.type == "cpu" and self._step_s > 0:
            share = self._draft_s / self._step_s
            is_spinning = current_waiting() == "spin"
            self._tell(of_neighbours(self._others.cores(), share, torch.get_num_threads(), is_spinning))
        self._draft_s = self._step_s = 0.0
        self._others.start()

    def _tell(self, advice: Advice | None) -> None:
        """Warn, once for each topic."""
        if advice is None or advice.topic in self._told:
            return
        self._told.add(advice.topic)
        warn(SpeculationWarning(str(advice)), stacklevel=3)


def text_format(tokenizer: Tokenizer) -> TextFormat:
    """How a model's tokenizer lays out text."""
    return TextFormat(
        tokenizer.chat_template, {"eos_token": tokenizer.eos_token_id, "bos_token": tokenizer.bos_token_id}
    )


def _cache_bytes(model: LanguageModel) -> int:
    return model.capacity_tokens * model.kv_bytes_per_token
