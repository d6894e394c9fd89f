"""A drafter that runs a model and has one option, in one file, as a new one would be added to the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Factory, Feedback
from foretoken.draft.chain import Chain, assemble, extend
from foretoken.draft.own_cache import OwnCache
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.names import model_folder
from foretoken.params import check_whole


@dataclass(frozen=True)
class Options:
    """Options of the toy."""

    width: int = field(default=3, metadata={"help": "draft from so many of the likeliest tokens"})

    def __post_init__(self) -> None:
        check_whole("width", self.width, low=1)


class ToyDrafter:
    """Chains drawn from the likeliest tokens of a draft model."""

    name = "toy"
    Options = Options

    def __init__(self, model: LanguageModel, width: int) -> None:
        self.model, self.width = model, width
        self.texts: dict[int, list[int]] = {}
        self._cache = OwnCache(model, self.texts.__getitem__)

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        assert spec.draft is not None
        return cls(factory.open_draft(model_folder(spec.draft)), Options(**spec.options).width)

    def models(self) -> Sequence[LanguageModel]:
        return (self.model,)

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        return type(self)(twin(self.model), self.width)

    @property
    def num_read_tokens(self) -> int:
        return self._cache.num_read_tokens

    def start(self, request: Request) -> None:
        self.texts[request.request_id] = list(request.prompt_ids)
        self._cache.start(request.request_id, "")

    def propose(self, batch: Batch) -> Draft:
        self._cache.begin_round(entry.request.request_id for entry in batch.decoding if entry.num_draft)
        chains = []
        for entry in batch.decoding:
            spec = replace(entry.request.spec, draft_top_k=self.width)
            room = min(entry.num_draft, self.model.max_context_tokens - entry.round_start)
            has_room = room > 0 and self._cache.make_room(entry.request.request_id, room)
            chains.append(Chain(replace(entry, request=replace(entry.request, spec=spec)), room if has_room else 0))
        while growing := [chain for chain in chains if chain.grows]:
            extend(growing, self._advance(growing))
        return assemble(self.name, self.model.device, chains)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        for b, entry in enumerate(batch.decoding):
            sequence = entry.request.request_id
            self.texts[sequence] += verdict.emitted(b)
            most = entry.round_start + len(verdict.accepted[b])
            self.model.rollback(sequence, min(self.model.length(sequence), most))
        self._cache.publish_read()

    def release(self, request_id: int) -> None:
        self._cache.release(request_id)

    def finish(self, request_id: int) -> None:
        self._cache.finish(request_id)
        del self.texts[request_id]

    def _advance(self, chains: Sequence[Chain]) -> Tensor:
        """Run what the model has not run of each text, and the last draft token: logits [A, V]."""
        rows: list[int] = []
        segments: list[Segment] = []
        for chain in chains:
            sequence = chain.entry.request.request_id
            if not chain.tokens:
                self._cache.catch_up(sequence)
            ahead = [*self.texts[sequence], *(int(token) for token in chain.tokens)]
            pending = ahead[self.model.length(sequence) :]
            rows += pending
            segments.append(Segment(sequence, len(pending)))
        logits = self.model.forward(torch.tensor(rows, device=self.model.device), segments).logits
        for segment in segments:
            self.model.commit(segment.sequence, segment.num_pending)
        return logits
