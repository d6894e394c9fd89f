"""Collects the facts that advice is about while an engine runs, and says each warning once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from foretoken.config import SpecConfig
from foretoken.control.candidates import set_number
from foretoken.draft.base import DrafterKey
from foretoken.draft.group import drafter_key
from foretoken.engine.advice import (
    Advice,
    LoadFacts,
    TextFormat,
    Topic,
    of_acceptance,
    of_draft_size,
    of_draft_text,
    of_load,
    of_memory,
    of_neighbours,
    of_short_answer,
    of_temperature,
)
from foretoken.engine.request import RequestState
from foretoken.engine.watch import Watcher
from foretoken.errors import SpeculationWarning
from foretoken.kv.pool import largest_cache_bytes
from foretoken.machine.neighbours import OtherLoad
from foretoken.machine.threads import current_waiting
from foretoken.model.interface import LanguageModel
from foretoken.model.names import model_folder
from foretoken.text.tokenizer import Tokenizer, load_tokenizer


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
        """Warn, once for each topic; where the caller's filters make errors of warnings, answers still come."""
        if advice is None or advice.topic in self._told:
            return
        self._told.add(advice.topic)
        with suppress(Warning):
            warnings.warn(SpeculationWarning(str(advice)), stacklevel=3)


def text_format(tokenizer: Tokenizer) -> TextFormat:
    """How a model's tokenizer lays out text."""
    return TextFormat(
        tokenizer.chat_template, {"eos_token": tokenizer.eos_token_id, "bos_token": tokenizer.bos_token_id}
    )


def _cache_bytes(model: LanguageModel) -> int:
    return model.capacity_tokens * model.kv_bytes_per_token
