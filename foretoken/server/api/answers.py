"""What came of each answer of a call so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from foretoken.backend.events import AnswerEnded, Event, Piece, RoundEvent, TokenEvent


@dataclass
class AnswerProgress:
    """One answer: its tokens and rounds as they came, and its end."""

    tokens: list[TokenEvent] = field(default_factory=list)
    rounds: list[RoundEvent] = field(default_factory=list)
    ended: AnswerEnded | None = None
    last_s: float = 0.0

    @property
    def text(self) -> str:
        """The whole text, once it has ended."""
        return "" if self.ended is None else self.ended.text

    def steps(self) -> Iterator[list[TokenEvent]]:
        """The tokens by step."""
        begin = 0
        for end in range(1, len(self.tokens) + 1):
            if end == len(self.tokens) or self.tokens[end].step != self.tokens[begin].step:
                yield self.tokens[begin:end]
                begin = end


class AnswerBook:
    """All answers of a call, by index, and when their tokens came (seconds since `began_s`)."""

    def __init__(self, num_answers: int, began_s: float) -> None:
        self.answers = [AnswerProgress() for _ in range(num_answers)]
        self.began_s = began_s
        self.ttft_s: float | None = None
        self.inter_token_s: list[float] = []

    def note(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Piece):
            self._note_piece(self.answers[event.index], event)
        elif isinstance(event, AnswerEnded):
            self.answers[event.index].ended = event

    @property
    def ended(self) -> list[AnswerEnded]:
        """The ends of all answers that have one."""
        return [answer.ended for answer in self.answers if answer.ended is not None]

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    def _note_piece(self, answer: AnswerProgress, piece: Piece) -> None:
        now = time.perf_counter()
        if piece.tokens:
            if self.ttft_s is None:
                self.ttft_s = now - self.began_s
            if answer.tokens:
                gap_s = (now - answer.last_s) / len(piece.tokens)
                self.inter_token_s += [gap_s] * len(piece.tokens)
            answer.last_s = now
        answer.tokens += piece.tokens
        if piece.round is not None:
            answer.rounds.append(piece.round)
