"""Many drafters in one batch: each request goes to its own, and the drafts are merged into one."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import replace

import torch

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict, empty_draft, merge_drafts
from foretoken.draft.base import Drafter, Feedback, Taps

DrafterKey = tuple[Hashable, ...]  # the name, and what else tells one instance from another
GRAMMAR = "grammar"  # the drafter's name in the provenance of tokens that a grammar forced


def drafter_key(spec: SpecConfig) -> DrafterKey | None:
    """Which drafter serves `spec`: its name, the draft model (its format, the use of its vocabulary) or corpus it works with, its parts.

    None for plain decoding.
    """
    if spec.drafter is None:
        return None
    return (
        spec.drafter,
        spec.draft,
        spec.draft_dtype,
        spec.draft_vocabulary,
        spec.corpus,
        *(drafter_key(part) for part in spec.parts if isinstance(part, SpecConfig)),
    )


class DrafterGroup:
    """Routes requests to drafters by `drafter_key`."""

    def __init__(self, device: torch.device) -> None:
        self.drafters: dict[DrafterKey, Drafter] = {}
        self.device = device
        self.spent_s: dict[DrafterKey, float] = {}  # what each drafter took in the last round, proposing and committing

    def start(self, request: Request) -> None:
        """Hand a new request to its drafter, if it has one."""
        drafter = self._of(request)
        if drafter is not None:
            drafter.start(request)

    def propose(self, batch: Batch) -> Draft:
        """Every drafter guesses for its own requests."""
        entries = batch.decoding
        forced = {b: tokens for b, entry in enumerate(entries) if (tokens := _forced(entry))}
        parts = [([b], _chain(tokens)) for b, tokens in forced.items()]
        self.spent_s = {}
        for key, indices in self._routes(entries):
            free = [b for b in indices if b not in forced]
            if any(entries[b].num_draft for b in free):
                began = time.perf_counter()
                parts.append((free, self.drafters[key].propose(Batch(tuple(entries[b] for b in free)))))
                self.spent_s[key] = time.perf_counter() - began
        return merge_drafts(len(entries), parts, self.device) if parts else empty_draft(len(entries), self.device)

    def taps(self) -> tuple[int, ...]:
        """Layers whose residual stream some drafter wants from the round's forward."""
        return tuple(sorted({layer for drafter in self.drafters.values() if isinstance(drafter, Taps) for layer in drafter.taps()}))

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Tell every drafter what its requests emitted."""
        entries = batch.decoding
        for key, indices in self._routes(entries):
            began = time.perf_counter()
            part = Verdict(
                paths=tuple(verdict.paths[b] for b in indices),
                accepted=tuple(verdict.accepted[b] for b in indices),
                next_tokens=tuple(verdict.next_tokens[b] for b in indices),
                next_kinds=tuple(verdict.next_kinds[b] for b in indices),
            )
            probe_rows = () if draft.probes is None else tuple(draft.probes.rows_of(indices))
            own = replace(feedback, rows=tuple(draft.rows_of(indices)), probe_rows=probe_rows)
            self.drafters[key].commit(Batch(tuple(entries[b] for b in indices)), draft.select(indices), part, own)
            self.spent_s[key] = self.spent_s.get(key, 0.0) + time.perf_counter() - began

    def finish(self, request: Request) -> None:
        """Let the request's drafter forget it."""
        drafter = self._of(request)
        if drafter is not None:
            drafter.finish(request.request_id)

    def _of(self, request: Request) -> Drafter | None:
        key = drafter_key(request.spec)
        return None if key is None else self.drafters[key]

    def _routes(self, entries: tuple[BatchEntry, ...]) -> list[tuple[DrafterKey, list[int]]]:
        routes: dict[DrafterKey, list[int]] = {}
        for index, entry in enumerate(entries):
            key = drafter_key(entry.request.spec)
            if key is not None:
                routes.setdefault(key, []).append(index)
        return list(routes.items())


def _forced(entry: BatchEntry) -> tuple[int, ...]:
    """Tokens whose text the request's grammar leaves no choice about: guesses that cost nothing, whoever drafts otherwise.

    One alone is left to the drafter, which goes on behind it.
    """
    forced = entry.processors.forced(entry.num_draft) if entry.num_draft and entry.processors is not None else ()
    return forced if len(forced) > 1 else ()


def _chain(tokens: tuple[int, ...]) -> Draft:
    """One request's draft of given tokens."""
    parents = tuple(range(-1, len(tokens) - 1))
    return Draft(torch.tensor(tokens, dtype=torch.int64), parents, (0, len(tokens)), (GRAMMAR,))
