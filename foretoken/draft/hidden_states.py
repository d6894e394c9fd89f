"""Hands the target's hidden states to the drafters that read them, every committed position once and in order.

A step commits for each request the rows it read (`pending`) and the accepted path: positions `start` up to the target's
new cache length. Their hidden states come from two places of `Feedback`, rows before the anchor and rows that decode,
and are joined here. For each request and drafter it is recorded how far the drafter has read; rows below that, which
the target computes again after a preemption, are left out.

Prefix cache: a block that the target adopts is not run, so it has no hidden states. How much a request may adopt is
therefore limited by its drafters (`most_adoptable`): by what each has read already, or by the states it attached to the
cached blocks (`PrefixStates`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Protocol, cast

import torch
from torch import Tensor

from foretoken.core import Batch, BatchEntry, Draft, Verdict
from foretoken.draft.base import Drafter, DrafterKey, Feedback, HiddenRows, HiddenStateReader, PrefixStates
from foretoken.draft.failures import DrafterFailures
from foretoken.errors import DraftError
from foretoken.model.interface import LanguageModel, PrefixModel
from foretoken.transfer import to_device


@cache
def reads_hidden_states(kind: type) -> bool:
    """Whether drafters of a class read hidden states of committed positions."""
    return issubclass(kind, HiddenStateReader)


class RowListener(Protocol):
    """Gets the rows of readers, too."""

    def layers(self, key: DrafterKey) -> tuple[int, ...]:
        """Layers to read for a reader's requests beside its own."""

    def read(self, key: DrafterKey, rows: Sequence[HiddenRows]) -> None:
        """What the reader has read just now; must not raise, or take time."""


class HiddenStates:
    """The streams of hidden states of all requests; `failures` are those of the drafter group."""

    listener: RowListener | None = None

    def __init__(self, target: LanguageModel, failures: DrafterFailures) -> None:
        self._prefix = target if isinstance(target, PrefixModel) else None
        self._block_tokens = target.footprint_tokens(1)
        self._num_layers, self._failures = target.num_layers, failures
        self._drafters: dict[DrafterKey, Drafter] = {}  # those that read
        self._layers: dict[DrafterKey, tuple[int, ...]] = {}
        self._num_read: dict[int, dict[DrafterKey, int]] = {}  # positions read, by request; only requests with readers

    def start(self, request_id: int, drafters: Mapping[DrafterKey, Drafter]) -> None:
        """A request begins with these drafters."""
        readers = {key: drafter for key, drafter in drafters.items() if reads_hidden_states(type(drafter))}
        for key, drafter in readers.items():
            call = partial(self._layers_of, cast(HiddenStateReader, drafter))
            self._layers[key] = self._failures.attempt(key, drafter, [request_id], call, must_succeed=True) or ()
        self._drafters |= readers
        if any(self._layers[key] for key in readers):
            self._num_read[request_id] = {key: 0 for key in readers if self._layers[key]}

    def release(self, request_id: int, key: DrafterKey) -> None:
        """The drafter has freed what it held of the request."""
        if key in self._num_read.get(request_id, ()):
            self._num_read[request_id][key] = 0

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._num_read.pop(request_id, None)
        if not self._num_read:
            self._drafters.clear()  # others may take their places now

    def wanted(self, batch: Batch) -> tuple[set[int], frozenset[int]]:
        """The layers that readers want from a step, and the requests of it that they want them of."""
        layers: set[int] = set()
        requests: set[int] = set()
        for entry in batch.entries if self._num_read else ():
            for key in self._readers_of(entry.request.request_id):
                layers.update(self._layers[key])
                layers.update(() if self.listener is None else self.listener.layers(key))
                requests.add(entry.request.request_id)
        return layers, frozenset(requests)

    def deliver(
        self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback
    ) -> dict[DrafterKey, tuple[float, int]]:
        """Give every reader the rows that the step has committed.

        Returns, for the readers that serve a decoding request of the step, the seconds it took and the number of rows
        that were text the target read (prompts), not the outcome of a round.
        """
        if not self._num_read:
            return {}
        new: dict[DrafterKey, list[HiddenRows]] = {}
        decoding: dict[DrafterKey, int] = {}  # rows that rounds emitted, of readers with a decoding request
        for b, entry in enumerate(batch.entries):
            keys = list(self._readers_of(entry.request.request_id))
            if not keys:
                continue
            rows = _committed_rows(b, entry, draft, verdict, feedback)
            for key in keys:
                num_read = self._num_read[rows.request_id][key]
                assert rows.start <= num_read, "positions were skipped that a drafter has not read"
                if rows.stop > num_read:
                    new.setdefault(key, []).append(rows.after(num_read))
                    self._num_read[rows.request_id][key] = rows.stop
                if entry.decodes:
                    decoding[key] = decoding.get(key, 0) + 1 + len(verdict.paths[b])
        spent: dict[DrafterKey, tuple[float, int]] = {}
        for key, found in new.items():
            began, drafter = time.perf_counter(), self._drafters[key]
            users = [rows.request_id for rows in found]
            call = partial(cast(HiddenStateReader, drafter).read_hidden, found)
            self._failures.attempt(key, drafter, users, call, must_succeed=True)
            if self.listener is not None:
                self.listener.read(key, found)
            if key in decoding:
                num_text_rows = sum(len(rows.tokens) for rows in found) - decoding[key]
                spent[key] = (time.perf_counter() - began, max(0, num_text_rows))
        return spent

    def most_adoptable(self, request_id: int, tokens: Sequence[int], tenant: str) -> int | None:
        """How many of `tokens` the request may adopt from the target's prefix cache; None: as many as there are."""
        limits = [self._limit(request_id, key, tokens, tenant) for key in self._readers_of(request_id)]
        return min(limits, default=None)

    def adopted(self, request_id: int, tokens: Sequence[int], tenant: str, num_tokens: int) -> None:
        """The target has adopted `num_tokens`: let the request's readers adopt their states of these."""
        for key in list(self._readers_of(request_id)):
            num_read = self._num_read[request_id][key]
            if num_read >= num_tokens:
                continue
            assert num_read == 0
            assert self._prefix is not None
            drafter = self._drafters[key]
            blocks = self._prefix.attached(tokens, tenant, key)[: num_tokens // self._block_tokens]
            call = partial(cast(PrefixStates, drafter).adopt_states, request_id, blocks)
            self._failures.attempt(key, drafter, [request_id], call, must_succeed=True)
            self._num_read[request_id][key] = num_tokens

    def publish(self, request_id: int, tokens: Sequence[int], tenant: str) -> None:
        """Attach the readers' states to the published blocks of `tokens` that have none yet."""
        if self._prefix is None:
            return
        for key in list(self._readers_of(request_id)):
            if isinstance(self._drafters[key], PrefixStates):
                full = min(self._num_read[request_id][key], len(tokens)) // self._block_tokens
                states_of = partial(self._exported, key, request_id)
                self._prefix.attach(request_id, tokens, tenant, full, key, states_of)

    def shares_states(self, request_id: int, other: int) -> bool:
        """Whether `request_id` could adopt a prefix that request `other` is computing, as far as its readers go."""
        followed = set(self._readers_of(other))
        return all(
            key in followed and isinstance(self._drafters[key], PrefixStates) for key in self._readers_of(request_id)
        )

    def _readers_of(self, request_id: int) -> Iterator[DrafterKey]:
        keys = self._num_read.get(request_id, ())
        return (key for key in keys if not self._failures.is_off(request_id, key))

    def _limit(self, request_id: int, key: DrafterKey, tokens: Sequence[int], tenant: str) -> int:
        num_read = self._num_read[request_id][key]
        if num_read or self._prefix is None or not isinstance(self._drafters[key], PrefixStates):
            return num_read
        return len(self._prefix.attached(tokens, tenant, key)) * self._block_tokens

    def _exported(self, key: DrafterKey, request_id: int, first: int, stop: int) -> list[object]:
        """A drafter's states of the blocks `first` .. `stop` of a request; none where it fails."""
        drafter, size = self._drafters[key], self._block_tokens

        def exported() -> list[object]:
            export = cast(PrefixStates, drafter).export_states
            return [export(request_id, start, start + size) for start in range(first * size, stop * size, size)]

        return self._failures.attempt(key, drafter, [request_id], exported) or []

    def _layers_of(self, drafter: HiddenStateReader) -> tuple[int, ...]:
        layers, last = tuple(drafter.hidden_layers()), self._num_layers
        if any(isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= last for layer in layers):
            raise DraftError(f"taps {layers} of a target with {last} layers")
        return layers


def _committed_rows(b: int, entry: BatchEntry, draft: Draft, verdict: Verdict, feedback: Feedback) -> HiddenRows:
    """The rows of entry number `b` that the step has committed: what it read, and the accepted path."""
    request_id = entry.request.request_id
    before = feedback.prompt_taps.get(request_id, {})
    if not entry.decodes:
        assert entry.next_token is not None, "a chunk is followed by text"
        return HiddenRows(request_id, entry.start, entry.pending, entry.next_token, before)
    anchor = draft.anchor_row(b)
    rows = to_device([anchor, *(anchor + 1 + node for node in verdict.paths[b])], draft.tokens.device)
    states: dict[int, Tensor] = {}
    for layer, tap in feedback.taps.items():
        own = tap[to_device(rows, tap.device)]
        states[layer] = torch.cat((before[layer], own)) if layer in before else own
    tokens = (*entry.pending, *verdict.accepted[b])
    return HiddenRows(request_id, entry.start, tokens, verdict.next_tokens[b], states)
