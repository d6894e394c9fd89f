"""A drafter alone: one request, no model; the test says what was emitted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretoken import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Drafter, Feedback

NO_FEEDBACK = Feedback(torch.empty(0, 0), ())


class Alone:
    """One request of a drafter."""

    def __init__(
        self,
        drafter: Drafter,
        prompt: Sequence[int],
        request_id: int = 0,
        spec: SpecConfig | None = None,
        prediction: Sequence[int] = (),
        takes_trees: bool = True,
        tenant: str = "",
    ) -> None:
        self.drafter, self.text, self.takes_trees = drafter, list(prompt), takes_trees
        self.request = Request(
            request_id, tuple(prompt), SamplingParams(tenant=tenant), spec or SpecConfig(), 0, tuple(prediction)
        )
        drafter.start(self.request)

    def batch(self, num_draft: int) -> Batch:
        start = len(self.text) - 1
        return Batch(
            (
                BatchEntry(
                    self.request, start, (self.text[-1],), True, num_draft, takes_trees=self.takes_trees, option=0
                ),
            )
        )

    def propose(self, num_draft: int) -> Draft:
        return self.drafter.propose(self.batch(num_draft))

    def chain(self, num_draft: int) -> list[int]:
        """The draft of a drafter that makes chains here."""
        draft = self.propose(num_draft)
        assert draft.is_chain(0)
        return draft.tokens.tolist()

    def emit(self, *tokens: int, feedback: Feedback = NO_FEEDBACK) -> None:
        """Tokens of the target's own, a round each."""
        for token in tokens:
            draft = Draft(torch.empty(0, dtype=torch.int64), (), (0, 0), (None,))
            self.drafter.commit(self.batch(0), draft, Verdict(((),), ((),), (token,), ("bonus",)), feedback)
            self.text.append(token)

    def run(self, answer: Sequence[int], num_draft: int) -> tuple[int, int]:
        """Rounds until `answer` is out, and tokens drafted in vain; the first token is the target's own, as in the
        engine.
        """
        self.emit(answer[0])
        rounds, wasted, done = 1, 0, 1
        while done < len(answer):
            draft = self.propose(min(num_draft, len(answer) - done - 1))
            assert draft.is_chain(0)
            kept: list[int] = []
            for token in draft.tokens.tolist():
                if token != answer[done + len(kept)]:
                    break
                kept.append(token)
            verdict = Verdict((tuple(range(len(kept))),), (tuple(kept),), (answer[done + len(kept)],), ("bonus",))
            self.drafter.commit(self.batch(num_draft), draft, verdict, NO_FEEDBACK)
            self.text += verdict.emitted(0)
            done += len(kept) + 1
            rounds, wasted = rounds + 1, wasted + draft.num_nodes - len(kept)
        return rounds, wasted

    def finish(self) -> None:
        self.drafter.finish(self.request.request_id)
