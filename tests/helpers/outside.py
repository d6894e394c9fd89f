"""Another engine for tests: ours behind the interface of a backend, with what a test breaks or takes from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from foretoken.backend.answering import Answer, AnsweringBackend, Capabilities, Drafting, Question
from foretoken.backend.registry import BACKENDS, BackendOptions

NAME = "outside"
Answering = Callable[[Question], Answer]
_OPEN: list[AnsweringBackend] = []


@dataclass
class Outside:
    """`inner` with other answers (`alter`) and fewer capabilities (`limits`); it drafts with `ngram`."""

    inner: AnsweringBackend
    alter: Callable[[Answering, Question, Drafting], Answer] = lambda ask, question, _: ask(question)
    limits: Mapping[str, Any] = field(default_factory=dict)
    name: str = NAME
    asked: list[tuple[Question, Drafting]] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, **self.limits)

    def version(self) -> str:
        return "outside 1"

    def draftings(
        self, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int] | None = None
    ) -> Sequence[Drafting]:
        return [Drafting("lookup", number) for number in (None, *num_drafts)]

    def room(self, question: Question) -> tuple[int, int] | None:
        return self.inner.room(question)

    def notes(self) -> Sequence[str]:
        return ()

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        self.asked.append((question, drafting))
        own = drafting if drafting.kind is None else replace(drafting, kind="ngram")
        found = self.alter(lambda asked: self.inner.answer(asked, own), question, drafting)
        return found if self.capabilities.token_ids else replace(found, token_ids=())

    def counters(self) -> Mapping[str, float] | None:
        return self.inner.counters()

    def reset(self) -> None:
        self.inner.reset()

    def close(self) -> None:
        """The inner one is the test's."""


def opened(_options: BackendOptions) -> AnsweringBackend:
    """What `register` was given."""
    return _OPEN[-1]


def register(monkeypatch: pytest.MonkeyPatch, backend: AnsweringBackend) -> None:
    """Let `NAME` mean `backend` until the test ends."""
    monkeypatch.setitem(BACKENDS, NAME, f"{__name__}:opened")
    monkeypatch.setattr(f"{__name__}._OPEN", [backend])
