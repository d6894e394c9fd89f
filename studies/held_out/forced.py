"""An answer that is a known text: the target still computes every row, and the text decides what is emitted.

The text enters after the target's forward and nowhere else: a draft model that saw it through the request's processors
would only have to repeat it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretoken.core import NO_TAPS, Batch, BatchEntry, Draft, TapRequest
from foretoken.engine.llm import LLM
from foretoken.engine.runner import Runner, TargetOutput

_AHEAD = 100.0  # in logits: more than any other token can have


@dataclass
class ForcedText:
    """Makes token n of a greedy answer the likeliest behind the first n (`core.Processors`, for one step of a target).

    A draft token is then accepted where it equals the text. Other tokens keep their logits: drafters that read the
    target's runner-up tokens see them as they are. `chances` collects, by place in the draft, the probability at
    temperature 1 that the target itself gives to each draft token whose predecessors agree with the text.
    """

    text: tuple[int, ...]
    num_emitted: int = 0
    chances: list[list[float]] = field(default_factory=list)

    def adjust(self, logits: Tensor, paths: Sequence[tuple[int, ...]], is_draft: bool = False) -> Tensor:  # noqa: ARG002
        """Logits `[n, V]` behind the committed text and `paths[i]` -> the same shape, forced."""
        forced = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
        self._count(forced, paths)
        for row, path in enumerate(paths):
            place = self.num_emitted + len(path)
            if place < len(self.text):
                forced[row, self.text[place]] = forced[row].max() + _AHEAD
        return forced

    def forced(self, most: int) -> tuple[int, ...]:  # noqa: ARG002
        """Nothing is told in advance."""
        return ()

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:  # noqa: ARG002
        """Nothing is told in advance."""
        return [True] * len(tokens)

    def _count(self, logits: Tensor, paths: Sequence[tuple[int, ...]]) -> None:
        rows = {path: row for row, path in enumerate(paths)}
        for path in paths:
            before = path[:-1]
            if path and before == self.text[self.num_emitted : self.num_emitted + len(before)]:
                chance = float(torch.softmax(logits[rows[before]].double(), -1)[path[-1]])
                while len(self.chances) < len(path):
                    self.chances.append([])
                self.chances[len(path) - 1].append(chance)


class ForcingRunner(Runner):
    """A runner under which some requests, by number, have their texts forced."""

    texts: dict[int, ForcedText]

    def forward(self, batch: Batch, draft: Draft, taps: TapRequest = NO_TAPS) -> TargetOutput:
        """See `Runner`."""
        return super().forward(Batch(tuple(map(self._forced, batch.entries))), draft, taps)

    def _forced(self, entry: BatchEntry) -> BatchEntry:
        text = self.texts.get(entry.request.request_id)
        if text is None or not entry.decodes:
            return entry
        text.num_emitted = entry.start + len(entry.pending) - len(entry.request.prompt_ids)
        return replace(entry, processors=text)


@contextmanager
def forcing(llm: LLM) -> Iterator[dict[int, ForcedText]]:
    """Force the texts that are put into the result, by request, while this is open."""
    engine = llm.engine
    before, runner = engine.runner, ForcingRunner(engine.runner.target)
    runner.texts = {}
    engine.runner = runner
    try:
        yield runner.texts
    finally:
        engine.runner = before
