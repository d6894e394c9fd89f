"""Drafters for a padded batch: a lookup drafter of the engine's, or a draft model that is padded too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, NextKind, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.lookup_tree import Lookup
from foretoken.model.decoder import Decoder
from foretoken.verify import first_max
from studies.layouts.padded_cache import PaddedCache
from studies.layouts.padded_model import PaddedModel

Chain = tuple[int, ...]


@dataclass
class Row:
    """One sequence: prompt and output in `tokens`; it ends at `max_total` tokens, or with one of `eos_token_ids`."""

    number: int
    tokens: list[int]
    num_prompt: int
    max_total: int
    eos_token_ids: frozenset[int]
    finished: bool = False

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_total - len(self.tokens)

    def take(self, emitted: Sequence[int]) -> int:
        """Append what a round gave, up to the answer's end; how many tokens that were."""
        for count, token in enumerate(emitted, 1):
            self.tokens.append(token)
            self.finished = token in self.eos_token_ids or self.num_remaining <= 0
            if self.finished:
                return count
        return len(emitted)


@dataclass
class Clock:
    """Seconds by what they went to; `lap` gives the time since the last one to a field.

    `prompt_s` is what reading prompts took, target and draft together; the others leave it out. `realign_s` is moving
    keys and values of the target and of a draft model, `draft_s` drafting without that.
    """

    device: torch.device
    prompt_s: float = 0.0
    forward_s: float = 0.0
    realign_s: float = 0.0
    draft_s: float = 0.0
    rest_s: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self._last)
        self._last = now


class PaddedDrafter(Protocol):
    """Drafts for the rows of a padded batch."""

    def start(self, rows: Sequence[Row]) -> None:
        """Take in the prompts of new rows."""

    def propose(self, rows: Sequence[Row], most: Sequence[int], clock: Clock) -> list[Chain]:
        """At most `most[b]` tokens that may follow row b."""

    def learn(self, rows: Sequence[Row], accepted: Sequence[Chain], next_tokens: Sequence[int]) -> None:
        """Take in what a round accepted, and the target's own token behind it; the rows hold it already."""

    def finish(self, row: Row) -> None:
        """Forget a row."""


class PaddedNone:
    """Plain decoding."""

    def start(self, rows: Sequence[Row]) -> None:
        """Nothing to take in."""

    def propose(self, rows: Sequence[Row], most: Sequence[int], clock: Clock) -> list[Chain]:  # noqa: ARG002
        """No draft for any row."""
        return [()] * len(rows)

    def learn(self, rows: Sequence[Row], accepted: Sequence[Chain], next_tokens: Sequence[int]) -> None:
        """Nothing to learn."""

    def finish(self, row: Row) -> None:
        """Nothing to forget."""


class PaddedLookup:
    """A lookup drafter of the engine's, asked for chains."""

    def __init__(self, drafter: Lookup) -> None:
        self.drafter = drafter
        self._requests: dict[int, Request] = {}

    def start(self, rows: Sequence[Row]) -> None:
        """Index the prompts, and the first token after each."""
        for row in rows:
            request = Request(
                row.number, tuple(row.tokens[: row.num_prompt]), SamplingParams(), SpecConfig(self.drafter.name), 0
            )
            self._requests[row.number] = request
            self.drafter.start(request)
        self.learn(rows, [()] * len(rows), [row.tokens[-1] for row in rows])

    def propose(self, rows: Sequence[Row], most: Sequence[int], clock: Clock) -> list[Chain]:  # noqa: ARG002
        """See `PaddedDrafter`."""
        return [self.drafter.look_up(self._entry(row, count)).tokens for row, count in zip(rows, most, strict=True)]

    def learn(self, rows: Sequence[Row], accepted: Sequence[Chain], next_tokens: Sequence[int]) -> None:
        """See `PaddedDrafter`."""
        size = len(rows)
        kinds: list[NextKind] = ["bonus" for _ in rows]
        verdict = Verdict(
            tuple(tuple(range(len(tokens))) for tokens in accepted), tuple(accepted), tuple(next_tokens), tuple(kinds)
        )
        draft = Draft(torch.empty(0, dtype=torch.int64), (), (0,) * (size + 1), (None,) * size)
        self.drafter.commit(
            Batch(tuple(self._entry(row, 0) for row in rows)), draft, verdict, Feedback(torch.empty(0, 0), ())
        )

    def finish(self, row: Row) -> None:
        """See `PaddedDrafter`."""
        del self._requests[row.number]
        self.drafter.finish(row.number)

    def _entry(self, row: Row, num_draft: int) -> BatchEntry:
        return BatchEntry(
            self._requests[row.number], len(row.tokens) - 1, (row.tokens[-1],), True, num_draft, takes_trees=False
        )


class PaddedDraftModel:
    """A draft model in the same layout as the target, with a cache of its own."""

    def __init__(self, decoder: Decoder, cache: PaddedCache) -> None:
        self.model = PaddedModel(decoder, cache)
        self._held: dict[int, int] = {}  # committed tokens in the draft's cache
        self._ran = 0  # draft tokens of the last round that were inputs too

    def start(self, rows: Sequence[Row]) -> None:
        """Read the prompts."""
        self.model.read_prompts([row.number for row in rows], [row.tokens[: row.num_prompt] for row in rows], 0)
        self._held |= {row.number: row.num_prompt for row in rows}

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row], most: Sequence[int], clock: Clock) -> list[Chain]:
        """See `PaddedDrafter`; every row drafts as many tokens as the one that may draft most.

        After a round that accepted everything a row lacks its last draft token and the target's token, others the
        latter alone. All rows then run their last two tokens: that costs B rows of the draft, a second forward would
        cost a pass over its weights.
        """
        num_behind = max(len(row.tokens) - self._held[row.number] for row in rows)
        clock.lap("draft_s")
        self.model.align([row.number for row in rows], [len(row.tokens) - num_behind for row in rows])
        clock.lap("realign_s")
        tokens = torch.tensor([row.tokens[-num_behind:] for row in rows], device=self.model.cache.device)  # [B, 1 or 2]
        chosen = []
        for _ in range(max(most)):
            best = first_max(self.model.forward(tokens, 1))  # [B, 1]
            self.model.keep(tokens.shape[1])
            chosen.append(best)
            tokens = best
        self._ran = max(most) - 1
        for row in rows:
            self._held[row.number] = len(row.tokens)
        drafts: list[list[int]] = torch.cat(chosen, dim=1).tolist()
        return [tuple(draft[:count]) for draft, count in zip(drafts, most, strict=True)]

    def learn(self, rows: Sequence[Row], accepted: Sequence[Chain], next_tokens: Sequence[int]) -> None:  # noqa: ARG002
        """See `PaddedDrafter`."""
        for row, tokens in zip(rows, accepted, strict=True):
            self._held[row.number] += min(len(tokens), self._ran)

    def finish(self, row: Row) -> None:
        """See `PaddedDrafter`."""
        del self._held[row.number]
        self.model.cache.end(row.number)
