"""How much to draft: a fixed number per request, or a default for its drafter when it asks for "auto"."""

from __future__ import annotations

from foretoken.engine.request import RequestState

# A draft model pays for every guess, a lookup for none; both stay below the rows that a CPU verifies at the price of one.
_AUTO_NUM_DRAFT = {"draft_model": 4, "ngram": 8}


class Controller:
    """Chooses `num_draft` before anything is drawn, from the request alone."""

    def choose(self, state: RequestState) -> int:
        """Most nodes to draft for a request in its next round."""
        spec = state.request.spec
        if spec.drafter is None:
            return 0
        return _AUTO_NUM_DRAFT[spec.drafter] if spec.num_draft == "auto" else spec.num_draft
