"""The same drafts in every layout: those of `ngram` along the answers of plain decoding, by prompt and place.

In 16 bits two layouts resolve near ties differently, their texts part, and a lookup then finds other drafts in them.
Replayed drafts depend on the prompt and the number of tokens emitted alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from foretoken.core import BatchEntry, Request
from foretoken.draft.lookup_tree import EMPTY, LookupTree
from foretoken.draft.ngram import NgramDrafter
from studies.layouts.padded_draft import Chain, Clock, PaddedLookup, Row

Recorded = Mapping[tuple[int, ...], Sequence[Chain]]  # by prompt; place n holds the draft behind n emitted tokens


class ReplayedDrafter(NgramDrafter):
    """Drafts what was recorded; costs a look-up in a table."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self.recorded = recorded
        self._prompts: dict[int, tuple[int, ...]] = {}

    def start(self, request: Request) -> None:
        """Note whose answer this is."""
        super().start(request)
        self._prompts[request.request_id] = tuple(request.prompt_ids)

    def finish(self, request_id: int) -> None:
        """Drop the request."""
        super().finish(request_id)
        del self._prompts[request_id]

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """The draft recorded for this place of the answer."""
        prompt = self._prompts[entry.request.request_id]
        place = entry.start + len(entry.pending) + len(ahead) - len(prompt)
        recorded = self.recorded[prompt]
        tokens = recorded[place][: entry.num_draft] if place < len(recorded) else ()
        return LookupTree(tokens, tuple(range(-1, len(tokens) - 1)), (1.0,) * len(tokens)) if tokens else EMPTY


def record_drafts(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], num_draft: int
) -> dict[tuple[int, ...], tuple[Chain, ...]]:
    """What `ngram` drafts behind every token of each answer, at most `num_draft` tokens."""
    recorded = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        drafter, clock = PaddedLookup(NgramDrafter()), Clock(torch.device("cpu"))
        row = Row(number, [*prompt, answer[0]], len(prompt), len(prompt) + len(answer), frozenset())
        drafter.start([row])
        drafts: list[Chain] = [()]  # before the first token nothing is drafted
        for token in answer[1:]:
            drafts += drafter.propose([row], [num_draft], clock)
            row.tokens.append(token)
            drafter.learn([row], [()], [token])
        drafter.finish(row)
        recorded[tuple(prompt)] = tuple(drafts)
    return recorded
