"""What was drafted in each step, for the calls that want to know (`Call.trace`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from foretoken.backend.call import Alternative, RoundEvent, TokenEvent
from foretoken.core import StepOutput, TokenLogprobs
from foretoken.engine.request import RequestState
from foretoken.engine.ticket import Ticket
from foretoken.engine.watch import RoundView, RoundWatcher, Watcher
from foretoken.text.tokenizer import Tokenizer


class TokenSpellings:
    """What single tokens write, kept once looked up."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._data = None if tokenizer is None else tokenizer.token_bytes
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def of(self, token_id: int) -> tuple[str, bytes | None]:
        """Text and bytes of a token; ("", None) without a tokenizer."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def event(
        self,
        token_id: int,
        scored: TokenLogprobs | None,
        kind: str,
        drafter: str | None = None,
        step: int = 0,
        probability: float | None = None,
    ) -> TokenEvent:
        """A token with its provenance and log-probabilities."""
        text, data = self.of(token_id)
        if scored is None:
            return TokenEvent(token_id, text, data, kind, drafter, step, probability)
        top = tuple(Alternative(one, *self.of(one), logprob) for one, logprob in scored.top)
        return TokenEvent(token_id, text, data, kind, drafter, step, probability, scored.logprob, scored.rank, top)

    def _look_up(self, token_id: int) -> tuple[str, bytes | None]:
        if self._tokenizer is None:
            return "", None
        if self._data is None:
            return self._tokenizer.decode([token_id]), None
        data = self._data.get(token_id, b"")
        return data.decode("utf-8", "replace"), data


class RoundLog(RoundWatcher):
    """An observer of the engine that is there only while a call is traced: views of rounds cost time in every step.

    It writes in the engine's thread and is read in the event loop's. While a traced call is being queued the engine may
    begin it before its tickets are known here: until then every round is kept.
    """

    def __init__(self, watchers: list[Watcher], texts: TokenSpellings) -> None:
        self._watchers, self._texts = watchers, texts
        self._lock = threading.Lock()
        self._rounds: dict[tuple[int, int], RoundEvent] = {}  # by request and step
        self._arrived_s: dict[int, float] = {}  # by request
        self._tickets: list[Ticket] = []
        self._num_opening = 0

    @contextlib.contextmanager
    def opening(self) -> Iterator[Callable[[Sequence[Ticket]], None]]:
        """Keep every round until the traced tickets are given to what is yielded."""
        with self._lock:
            self._num_opening += 1
            if self not in self._watchers:
                self._watchers.append(self)
        try:
            yield self._follow
        finally:
            with self._lock:
                self._num_opening -= 1
                self._forget_others()

    def _follow(self, tickets: Sequence[Ticket]) -> None:
        with self._lock:  # `closed` of another call makes a new list
            self._tickets.extend(tickets)

    def take(self, output: StepOutput) -> RoundEvent | None:
        """The round that emitted this, once."""
        if not output.provenance:
            return None
        with self._lock:
            return self._rounds.pop((output.request_id, output.provenance[0].step), None)

    def closed(self, tickets: Sequence[Ticket]) -> None:
        """Nobody reads these any more."""
        with self._lock:
            self._tickets = [ticket for ticket in self._tickets if ticket not in tickets]
            self._forget_others()

    # ---- what the engine calls

    def begin(self, state: RequestState) -> None:
        """See `Watcher`."""
        with self._lock:
            self._arrived_s[state.request_id] = state.arrived_s

    def round(self, view: RoundView) -> None:
        """See `RoundWatcher`."""
        request_id = view.output.request_id
        if not view.output.provenance:
            return
        with self._lock:
            if self._num_opening or any(ticket.request_id == request_id for ticket in self._tickets):
                self._rounds[request_id, view.output.provenance[0].step] = self._event(view)

    def _forget_others(self) -> None:
        """Keep the rounds of traced tickets only; leave the engine where there are none."""
        if self._num_opening:
            return
        if any(ticket.request_id is None for ticket in self._tickets):
            return  # begins soon
        known = {ticket.request_id for ticket in self._tickets}
        self._rounds = {place: one for place, one in self._rounds.items() if place[0] in known}
        self._arrived_s = {number: when_s for number, when_s in self._arrived_s.items() if number in known}
        if not self._tickets:
            self._watchers[:] = [watcher for watcher in self._watchers if watcher is not self]

    def _event(self, view: RoundView) -> RoundEvent:
        draft, verdict, b, clock = view.draft, view.verdict, view.b, view.clock
        nodes = slice(draft.offsets[b], draft.offsets[b + 1])
        tokens = tuple(draft.host_tokens[nodes])
        num_accepted = min(len(verdict.paths[b]), len(view.output.token_ids))
        return RoundEvent(
            step=view.output.provenance[0].step,
            time_s=clock.observed - self._arrived_s.get(view.output.request_id, clock.observed),
            draft_s=clock.draft_s,
            verify_s=clock.target_s + clock.rule_s,
            batch_size=draft.num_requests,
            num_planned=view.entry.num_draft,
            drafter=draft.drafters[b],
            token_ids=tokens,
            texts=tuple(self._texts.of(token)[0] for token in tokens),
            parents=tuple(draft.parents[nodes]),
            probabilities=verdict.probabilities[b] if verdict.probabilities else (None,) * len(tokens),
            num_accepted=num_accepted,
            why=_why(view, len(tokens), num_accepted),
        )


def _why(view: RoundView, num_drafted: int, num_accepted: int) -> str:
    """Why nothing was drafted, or not everything accepted."""
    if num_drafted:
        return f"mismatch_at:{num_accepted}" if view.verdict.next_kinds[view.b] == "residual" else ""
    return view.why_none or "off"
