"""Many drafters in one batch: each request goes to its own, and the drafts are merged into one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import cast

import torch

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, TapRequest, Verdict, empty_draft, merge_drafts
from foretoken.draft.base import Drafter, DrafterKey, Feedback, Releases, Taps
from foretoken.draft.boundary import check_tree, draft_faults
from foretoken.draft.deadline import Deadline
from foretoken.draft.failures import DrafterFailures
from foretoken.draft.hidden_states import HiddenStates, check_layers
from foretoken.draft.lookup_tree import EMPTY, Lookup, LookupTree, assemble
from foretoken.model.interface import LanguageModel

GRAMMAR = "grammar"  # the drafter's name in the provenance of tokens that a grammar forced


def drafter_key(spec: SpecConfig) -> DrafterKey | None:
    """Which drafter serves `spec`: its name, the draft model (its format, the use of its vocabulary) or corpus it works
    with, its parts.

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


def arm_keys(spec: SpecConfig) -> list[DrafterKey]:
    """The drafter of each of `spec.arms`."""
    keys = [drafter_key(arm) for arm in spec.arms]
    return [key for key in keys if key is not None]


def own_drafters(spec: SpecConfig) -> dict[DrafterKey, SpecConfig]:
    """The drafters that keep up with a request's text: one, or for `auto` all that may guess, each with a configuration
    for it.
    """
    return dict(reversed(list(zip(arm_keys(spec), spec.arms, strict=True))))


@cache
def shows_guesses(kind: type) -> bool:
    """Whether drafters of a class can tell their guesses before they are chosen."""
    return callable(getattr(kind, "guess", None))


@cache
def _wants_taps(kind: type) -> bool:
    return issubclass(kind, Taps)


def chosen_arm(entry: BatchEntry) -> int | None:
    """Which of `spec.arms` guesses for `entry`: the only one, or the one that was chosen."""
    return 0 if len(entry.request.spec.arms) == 1 else entry.arm


class DrafterGroup:
    """Routes requests to drafters by `drafter_key`; where a request may choose among several, all of them follow its
    text.

    What a drafter hands over is checked (`boundary`), and a drafter that fails costs its guesses alone (`failures`).
    """

    def __init__(self, target: LanguageModel) -> None:
        self.drafters: dict[DrafterKey, Drafter] = {}
        self.failures = DrafterFailures()
        self.hidden_states = HiddenStates(target, self.failures)
        self.device, self.vocab_size, self.num_layers = target.device, target.vocab_size, target.num_layers
        self.spent_s: dict[DrafterKey, float] = {}  # what each drafter took in the last round, proposing and committing
        self.num_read_tokens: dict[
            DrafterKey, int
        ] = {}  # what the models of each read in the last round before they could guess
        self._keys: dict[int, list[DrafterKey]] = {}  # by request, of its arms
        self._requests: dict[int, list[Request]] = {}  # each under one of its arms
        self._looks: dict[
            int, dict[int, LookupTree]
        ] = {}  # guesses that were shown for the coming round, by request and arm

    def add(self, key: DrafterKey, drafter: Drafter, limit_s: float | None = None) -> None:
        """Serve requests with `drafter`; a call of it that lasts longer than `limit_s` is interrupted and has
        failed.
        """
        self.drafters[key] = drafter
        if limit_s is not None:
            self.failures.deadlines[key] = Deadline(limit_s)

    def start(self, request: Request) -> None:
        """Hand a new request to its drafters."""
        request_id = request.request_id
        keys = self._keys[request_id] = arm_keys(request.spec)
        self._requests[request_id] = [
            request if arm is request.spec else replace(request, spec=arm) for arm in request.spec.arms
        ]
        for key in dict.fromkeys(keys):
            drafter, own = self.drafters[key], self._requests[request_id][keys.index(key)]
            self.failures.attempt(key, drafter, [request_id], partial(drafter.start, own), must_succeed=True)
        self.hidden_states.start(request_id, {key: self.drafters[key] for key in keys})

    def serves(self, request_id: int, arm: int) -> bool:
        """Whether the drafter of one of a request's arms may still guess for it."""
        return not self.failures.is_off(request_id, self._keys[request_id][arm])

    def look(self, entry: BatchEntry, arm: int) -> LookupTree | None:
        """The guesses that one arm of `entry` has ready; None if its drafter cannot tell them before it is chosen."""
        request_id = entry.request.request_id
        key = self._keys[request_id][arm]
        drafter = self.drafters[key]
        if not shows_guesses(type(drafter)):
            return None
        guess, own = cast(Lookup, drafter).guess, self._under(entry, arm)
        tree = self.failures.attempt(
            key, drafter, [request_id], lambda: check_tree(guess(own), own.num_draft, self.vocab_size, own.takes_trees)
        )
        if tree is None:
            tree = EMPTY
        self._looks.setdefault(request_id, {})[arm] = tree
        return tree

    def propose(self, batch: Batch) -> Draft:
        """Every drafter guesses for its own requests."""
        entries = batch.decoding
        forced = {b: tokens for b, entry in enumerate(entries) if (tokens := _forced(entry))}
        parts: list[tuple[Sequence[int], Draft]] = [([b], _chain(tokens)) for b, tokens in forced.items()]
        self.spent_s, self.num_read_tokens = {}, {}
        for key, routed in self._proposers(entries).items():
            free = {b: entry for b, entry in routed.items() if b not in forced}
            if any(entry.num_draft for entry in free.values()):
                began = time.perf_counter()
                parts += self._sound_guesses(key, free)
                self.spent_s[key] = time.perf_counter() - began
        return merge_drafts(len(entries), parts, self.device) if parts else empty_draft(len(entries), self.device)

    def taps(self) -> TapRequest:
        """The hidden states that drafters want from the step's forward."""
        wanted, whole = self.hidden_states.wanted()
        for key, drafter in self.drafters.items():
            if not _wants_taps(type(drafter)):
                continue
            users = [
                request_id
                for request_id, keys in self._keys.items()
                if key in keys and not self.failures.is_off(request_id, key)
            ]
            if users:
                wanted.update(
                    self.failures.attempt(key, drafter, users, partial(self._layers, cast(Taps, drafter))) or ()
                )
        return TapRequest(tuple(sorted(wanted)), whole)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Give every drafter the hidden states it reads, then what its requests emitted."""
        entries = batch.decoding
        self._looks.clear()
        for key, (seconds, num_tokens) in self.hidden_states.deliver(batch, draft, verdict, feedback).items():
            self.spent_s[key] = self.spent_s.get(key, 0.0) + seconds
            self.num_read_tokens[key] = self.num_read_tokens.get(key, 0) + num_tokens
        for key, routed in self._followers(entries).items():
            began, drafter = time.perf_counter(), self.drafters[key]
            if len(routed) == len(entries):
                call = partial(drafter.commit, Batch(tuple(routed.values())), draft, verdict, feedback)
            else:
                call = partial(self._commit_some, drafter, routed, draft, verdict, feedback)
            users = [entry.request.request_id for entry in routed.values()]
            self.failures.attempt(key, drafter, users, call, must_succeed=True)
            self.spent_s[key] = self.spent_s.get(key, 0.0) + time.perf_counter() - began

    def _commit_some(
        self, drafter: Drafter, routed: Mapping[int, BatchEntry], draft: Draft, verdict: Verdict, feedback: Feedback
    ) -> None:
        """Tell a drafter what some requests of the round emitted."""
        indices = list(routed)
        part = Verdict(
            paths=tuple(verdict.paths[b] for b in indices),
            accepted=tuple(verdict.accepted[b] for b in indices),
            next_tokens=tuple(verdict.next_tokens[b] for b in indices),
            next_kinds=tuple(verdict.next_kinds[b] for b in indices),
        )
        probe_rows = () if draft.probes is None else tuple(draft.probes.rows_of(indices))
        own = replace(feedback, rows=tuple(draft.rows_of(indices)), probe_rows=probe_rows)
        drafter.commit(Batch(tuple(routed.values())), draft.select(indices), part, own)

    def release(self, request: Request) -> None:
        """Let the request's drafters give back what they hold in caches of their own; the request may go on, at once or
        later.
        """
        request_id = request.request_id
        for key in dict.fromkeys(self._keys[request_id]):
            drafter = self.drafters[key]
            if isinstance(drafter, Releases) and not self.failures.is_off(request_id, key):
                self.failures.attempt(key, drafter, [request_id], partial(drafter.release, request_id))
                self.hidden_states.release(request_id, key)

    def finish(self, request: Request) -> None:
        """Let the request's drafters forget it."""
        request_id = request.request_id
        self._looks.pop(request_id, None)
        self.hidden_states.finish(request_id)
        del self._requests[request_id]
        for key in dict.fromkeys(self._keys.pop(request_id)):
            drafter = self.drafters[key]
            if not self.failures.is_off(request_id, key):
                self.failures.attempt(key, drafter, [request_id], partial(drafter.finish, request_id))
        self.failures.finish(request_id)

    def _sound_guesses(self, key: DrafterKey, routed: Mapping[int, BatchEntry]) -> list[tuple[Sequence[int], Draft]]:
        """What one drafter guesses, as (places in the batch, draft), without requests whose guesses cannot be used."""
        drafter, places, entries = self.drafters[key], list(routed), list(routed.values())

        def checked() -> tuple[Draft, dict[int, str]]:
            draft = self._guess(drafter, entries)
            self.num_read_tokens[key] = int(getattr(drafter, "num_read_tokens", 0))  # `base.Reads`
            return draft, draft_faults(draft, entries, self.vocab_size)

        found = self.failures.attempt(key, drafter, [entry.request.request_id for entry in entries], checked)
        if found is None:
            return []
        draft, faults = found
        if not faults:
            return [(places, draft)]
        for place, fault in faults.items():
            self.failures.add(key, drafter, entries[place].request.request_id, fault)
        sound = [place for place in range(len(places)) if place not in faults]
        return [([places[place] for place in sound], draft.select(sound))] if sound else []

    def _guess(self, drafter: Drafter, entries: Sequence[BatchEntry]) -> Draft:
        """What one drafter guesses; what it has shown already is not looked up again."""
        if shows_guesses(type(drafter)):
            shown = [self._looks.get(entry.request.request_id, {}).get(entry.arm or 0) for entry in entries]
            if all(tree is not None for tree in shown):
                return assemble(
                    drafter.name,
                    [
                        tree.first(entry.num_draft)
                        for tree, entry in zip(shown, entries, strict=True)
                        if tree is not None
                    ],
                )
        return drafter.propose(Batch(tuple(entries)))

    def _layers(self, drafter: Taps) -> tuple[int, ...]:
        """The layers that one drafter wants.

        Raises:
            DraftError: one that the target does not have.
        """
        return check_layers(drafter.taps(), self.num_layers)

    def _proposers(self, entries: Sequence[BatchEntry]) -> dict[DrafterKey, dict[int, BatchEntry]]:
        """Who guesses for whom in this round: by drafter the entries of its requests, by their places in the batch."""
        routes: dict[DrafterKey, dict[int, BatchEntry]] = {}
        for b, entry in enumerate(entries):
            arm = chosen_arm(entry)
            if arm is not None and self.serves(entry.request.request_id, arm):
                routes.setdefault(self._keys[entry.request.request_id][arm], {})[b] = self._under(entry, arm)
        return routes

    def _followers(self, entries: Sequence[BatchEntry]) -> dict[DrafterKey, dict[int, BatchEntry]]:
        """Who must hear what was emitted for whom; a drafter that guessed hears it under the configuration it guessed
        with.
        """
        routes: dict[DrafterKey, dict[int, BatchEntry]] = {}
        for b, entry in enumerate(entries):
            keys, chosen = self._keys[entry.request.request_id], chosen_arm(entry)
            for arm, key in enumerate(keys):
                if not self.serves(entry.request.request_id, arm):
                    continue
                if arm == chosen or b not in routes.get(key, {}):
                    routes.setdefault(key, {})[b] = self._under(entry, arm)
        return routes

    def _under(self, entry: BatchEntry, arm: int) -> BatchEntry:
        """`entry` as the drafter of one of the request's arms sees it."""
        request = self._requests[entry.request.request_id][arm]
        return entry if request is entry.request else entry.under(request)


def _forced(entry: BatchEntry) -> tuple[int, ...]:
    """Tokens whose text the request's grammar leaves no choice about: guesses that cost nothing, whoever drafts
    otherwise.

    One alone is left to the drafter, which goes on behind it.
    """
    forced = entry.processors.forced(entry.num_draft) if entry.num_draft and entry.processors is not None else ()
    return forced if len(forced) > 1 else ()


def _chain(tokens: tuple[int, ...]) -> Draft:
    """One request's draft of given tokens."""
    parents = tuple(range(-1, len(tokens) - 1))
    return Draft(torch.tensor(tokens, dtype=torch.int64), parents, (0, len(tokens)), (GRAMMAR,))
