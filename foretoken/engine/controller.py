"""How much to draft: a fixed number per request, or a default for its drafter when it asks for "auto"."""

from __future__ import annotations

from collections.abc import Collection

from foretoken.core import Batch, Draft, Verdict
from foretoken.engine.request import RequestState

# A draft model pays for every guess, a lookup for none; both stay below the rows that a CPU verifies at the price of one.
_AUTO_NUM_DRAFT = {"draft_model": 4, "ngram": 8}


class Controller:
    """Chooses `num_draft` before anything is drawn, from the request alone, and keeps count of what came of it."""

    def choose(self, state: RequestState) -> int:
        """Most nodes to draft for a request in its next round."""
        spec = state.request.spec
        if spec.drafter is None:
            return 0
        return _AUTO_NUM_DRAFT[spec.drafter] if spec.num_draft == "auto" else spec.num_draft

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, broken: Collection[int], states: dict[int, RequestState]) -> None:
        """Book drafted and accepted tokens by position; the verdict on a `broken` request means nothing."""
        for b, entry in enumerate(batch.decoding):
            if b in broken:
                continue
            depths: list[int] = []
            for node in range(draft.offsets[b], draft.offsets[b + 1]):
                parent = draft.parents[node]
                depths.append(1 if parent < 0 else depths[parent] + 1)
            states[entry.request.request_id].stats.count_draft(depths, len(verdict.accepted[b]))
