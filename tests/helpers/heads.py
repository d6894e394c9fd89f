"""Drafters that read hidden states, for tests: they draft like another drafter and keep every row they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Drafter, Feedback, HiddenRows, Releases


@dataclass
class Recording:
    """What a head holds of one request: its text by `commit`, and by position the rows it has read or adopted."""

    text: list[int]
    tokens: list[int] = field(default_factory=list)
    states: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, each [D]
    num_adopted: int = 0
    num_restarts: int = 0


class RecordingHead:
    """Drafts like `inner`; keeps the hidden states of `layers` at every position, also through a preemption."""

    def __init__(self, inner: Drafter, layers: Sequence[int]) -> None:
        self.inner, self.name, self.layers = inner, inner.name, tuple(layers)
        self.open: dict[int, Recording] = {}
        self.finished: dict[int, Recording] = {}

    def start(self, request: Request) -> None:
        self.open[request.request_id] = Recording(list(request.prompt_ids), states={layer: [] for layer in self.layers})
        self.inner.start(request)

    def propose(self, batch: Batch) -> Draft:
        for entry in batch.decoding:
            own = self.open[entry.request.request_id]
            # Rows are known up to the anchor, which the coming forward runs.
            assert len(own.tokens) == len(own.text) - 1 == entry.start or len(entry.pending) > 1
        return self.inner.propose(batch)

    def hidden_layers(self) -> tuple[int, ...]:
        return self.layers

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        for one in rows:
            own = self.open[one.request_id]
            assert one.start == len(own.tokens), "a position is missing, or comes twice"
            own.tokens += one.tokens
            assert self.layers == tuple(layer for layer in sorted(one.states) if layer in self.layers)
            for layer in self.layers:
                assert len(one.states[layer]) == len(one.tokens)
                own.states[layer] += one.states[layer].unbind()
            known = [*own.text, one.next_token]  # a round's own tokens come with its commit
            assert own.tokens[: len(own.text)] == own.text[: len(own.tokens)]
            assert one.next_token == known[min(one.stop, len(own.text))]

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        for b, entry in enumerate(batch.decoding):
            own = self.open[entry.request.request_id]
            own.text += verdict.emitted(b)
            assert len(own.tokens) == len(own.text) - 1, "hidden states come before the commit of their round"
        self.inner.commit(batch, draft, verdict, feedback)

    def finish(self, request_id: int) -> None:
        self.finished[request_id] = self.open.pop(request_id)
        self.inner.finish(request_id)


class ReleasingHead(RecordingHead):
    """Drops its states when a request is preempted, like a head with a cache."""

    def release(self, request_id: int) -> None:
        own = self.open[request_id]
        own.tokens, own.states = [], {layer: [] for layer in self.layers}
        own.num_restarts += 1
        if isinstance(self.inner, Releases):
            self.inner.release(request_id)


class SharingHead(ReleasingHead):
    """Stores its states with the target's prefix blocks, and adopts them."""

    def export_states(self, request_id: int, start: int, stop: int) -> object:
        own = self.open[request_id]
        assert stop <= len(own.tokens)
        states = {layer: torch.stack(rows[start:stop]) for layer, rows in own.states.items()}
        return own.tokens[start:stop], states

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        own = self.open[request_id]
        assert not own.tokens
        for tokens, states in blocks:  # type: ignore[misc]  # what `export_states` made
            own.tokens += tokens
            for layer in self.layers:
                own.states[layer] += states[layer].unbind()
        own.num_adopted += len(own.tokens)
