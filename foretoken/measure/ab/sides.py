"""The two sides of a comparison: an open backend with a way to draft, asked and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from foretoken.backend.answering import SERVED, AnsweringBackend, Drafting, Question, check_question
from foretoken.backend.registry import is_address
from foretoken.errors import ConfigError, ForetokenError, UnavailableError
from foretoken.measure.ab.options import AbOptions
from foretoken.measure.ab.pairs import Observed
from foretoken.measure.asked import BackendSource, chosen_draftings, drafting_name
from foretoken.measure.options import PLAIN

_MAX_FAILED_IN_A_ROW = 5


@dataclass
class AbSide:
    """A backend under a letter, and how it drafts; `identity` is what a report says of it."""

    label: str
    backend: AnsweringBackend
    drafting: Drafting
    identity: dict[str, str]
    num_failed_in_a_row: int = field(default=0)

    def ask(self, question: Question) -> Observed:
        """The answer to one question, timed; a failure is kept in it. An engine in this process has forgotten earlier
        answers by then: both sides may be one, and the other side has just answered the same.

        Raises:
            UnavailableError: so many answers in a row failed that there is nothing to compare.
        """
        self.backend.reset()
        began = time.perf_counter()
        try:
            answer = self.backend.answer(question, self.drafting)
        except ForetokenError as error:
            self.num_failed_in_a_row += 1
            if self.num_failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
                raise UnavailableError(
                    f"{self.label} ({self.backend.name}) failed {self.num_failed_in_a_row} times in a row: {error}"
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
        check_question(f"{self.label} ({self.backend.name})", question, self.drafting, self.backend.capabilities)


@contextmanager
def open_sides(options: AbOptions) -> Iterator[tuple[AbSide, AbSide]]:
    """A and B, closed at the end; one engine in this process that both name is opened once.

    Raises:
        InputError: a way to draft that a backend does not have.
        ForetokenError: see `BackendSource.open`.
    """
    sources = {side: _source(options, side) for side in ("a", "b")}
    with ExitStack() as stack:
        opened: dict[BackendSource, AnsweringBackend] = {}
        found = []
        for side, source in sources.items():
            if source not in opened:
                opened[source] = stack.enter_context(source.open())
            backend = opened[source]
            drafting = _drafting(options, side, backend)
            about = source.identity_of(backend) | {
                "drafter": PLAIN if drafting.kind is None else drafting_name(drafting)
            }
            found.append(AbSide(side.upper(), backend, drafting, about))
        yield found[0], found[1]


def _source(options: AbOptions, side: str) -> BackendSource:
    backend: str = getattr(options, side)
    if is_address(backend):
        return BackendSource(backend, served_model=getattr(options, f"{side}_model"))
    return BackendSource(
        backend, options.target, options.draft, dtype=options.dtype, device=options.device, threads=options.threads
    )


def _drafting(options: AbOptions, side: str, backend: AnsweringBackend) -> Drafting:
    name: str | None = getattr(options, f"{side}_drafter")
    field_name = f"{side}_drafter"
    if name is None:
        return Drafting(SERVED) if is_address(backend.name) else Drafting()
    if name == PLAIN:
        if not backend.capabilities.plain:
            remedy = f"{backend.name} cannot be asked to leave out drafting: start it without"
            raise ConfigError(field_name, name, f"{remedy}, and leave this option out")
        return Drafting()
    return chosen_draftings(backend, field_name, (name,), options.num_draft)[0]
