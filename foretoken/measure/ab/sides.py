"""A side of a replay: an open backend with a way to draft, asked and timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from foretoken.backend.answering import Question, check_question
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.measure.ab.pairs import Observed
from foretoken.measure.sides import OpenSide

_MAX_FAILED_IN_A_ROW = 5


@dataclass
class AbSide:
    """One side, and how many answers in a row it has failed."""

    side: OpenSide
    num_failed_in_a_row: int = field(default=0)

    def ask(self, question: Question) -> Observed:
        """The answer to one question, timed; a failure is kept in it. An engine in this process has forgotten earlier
        answers by then: both sides may be one, and the other side has just answered the same.

        Raises:
            UnavailableError: so many answers in a row failed that there is nothing to compare.
        """
        self.side.backend.reset()
        began = time.perf_counter()
        try:
            answer = self.side.backend.answer(question, self.side.drafting)
        except ForetokenError as error:
            self.num_failed_in_a_row += 1
            if self.num_failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
                raise UnavailableError(
                    f"{self.side.title} failed {self.num_failed_in_a_row} times in a row: {error}"
                ) from error
            return Observed(time.perf_counter() - began, 0, error=f"{type(error).__name__}: {error}")
        e2e_s = time.perf_counter() - began
        self.num_failed_in_a_row = 0
        itl_s = answer.decode_s / answer.decode_tokens if answer.decode_tokens > 0 and answer.decode_s > 0 else None
        return Observed(e2e_s, answer.num_emitted, answer.ttft_s, itl_s, answer.text)

    def check(self, question: Question) -> None:
        """Refuse what the backend cannot be asked.

        Raises:
            InputError: names the field.
        """
        check_question(self.side.title, question, self.side.drafting, self.side.backend.capabilities)
