"""Many drafters in one batch: each request goes to its own, and the drafts are merged into one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import cast

import torch

from foretoken.config import SpecConfig
from foretoken.control.candidates import NO_BOUND, NO_PREVIEW, DrafterOption, Preview, PreviewAsk, Previews, set_number
from foretoken.core import Batch, BatchEntry, Draft, Request, TapRequest, Verdict, empty_draft
from foretoken.draft.base import (
    Drafter,
    DrafterKey,
    Feedback,
    FollowsText,
    HiddenStateReader,
    Releases,
    variants_of,
)
from foretoken.draft.boundary import check_tree, draft_faults
from foretoken.draft.failures import Deadline, DrafterFailures
from foretoken.draft.hidden_states import HiddenStates
from foretoken.draft.lookup_tree import EMPTY, Lookup, LookupTree, assemble
from foretoken.draft.merging import allowed_draft, allowed_tree, merge_drafts
from foretoken.model.interface import LanguageModel

GRAMMAR = "grammar"  # the drafter's name in the provenance of tokens that a grammar forced


def drafter_key(spec: SpecConfig) -> DrafterKey | None:
    """Which drafter serves `spec`: its name, the draft model (its format, the use of its vocabulary), head, corpus or
    n-gram table it works with, its own options, its parts.

    None for plain decoding.
    """
    if spec.drafter is None:
        return None
    parts = [drafter_key(part) for part in spec.configs]
    model = (spec.draft, spec.draft_dtype, spec.draft_vocabulary, spec.head)
    return repr((spec.drafter, *model, spec.corpus, spec.ngram_table, spec.options, *parts))


def own_drafters(spec: SpecConfig) -> dict[DrafterKey, SpecConfig]:
    """The drafters that follow a request's text: one, or for `auto` all that may draft, each with a configuration."""
    own: dict[DrafterKey, SpecConfig] = {}
    for option in spec.drafter_options:
        key = drafter_key(option)
        if key is not None:
            own.setdefault(key, option)
    return own


def option_kind(spec: SpecConfig) -> str:
    """Spells what tells apart options of different cost and acceptance: the drafter, and the shape of its drafts."""
    shape = (spec.tree, spec.branching, spec.draft_probability, spec.exit_layer, spec.lookahead_window)
    return f"{drafter_key(spec)} {shape}"


@cache
def previews_drafts(kind: type) -> bool:
    """Whether drafters of a class can tell their drafts before they are chosen."""
    return callable(getattr(kind, "look_up", None))


@dataclass(frozen=True)
class _Routed:
    """The options of one request: the drafter of each, its configuration, the request under it, and what the
    control knows of it.

    `emitted` are all of the request's tokens so far, if any drafter only follows the text: `num_told` of them each such
    drafter knows.
    """

    keys: tuple[DrafterKey, ...]
    specs: tuple[SpecConfig, ...]
    requests: tuple[Request, ...]
    options: tuple[DrafterOption, ...]
    emitted: list[int]
    num_told: dict[DrafterKey, int]


class DrafterGroup:
    """Routes requests to drafters by `drafter_key`; all drafters that a request may choose follow its text.

    Every draft is checked (`boundary`); when a drafter fails, only its draft tokens are lost (`failures`).
    """

    def __init__(self, target: LanguageModel) -> None:
        self.drafters: dict[DrafterKey, Drafter] = {}
        self.failures = DrafterFailures()
        self.hidden_states = HiddenStates(target, self.failures)
        self.device, self.vocab_size = target.device, target.vocab_size
        self.spent_s: dict[DrafterKey, float] = {}  # what each drafter took in the last round, proposing and committing
        self.shown_s: dict[DrafterKey, float] = {}  # the part of it in which drafts were shown
        self.num_read_tokens: dict[DrafterKey, int] = {}  # read in the last round before each could draft
        self._requests: dict[int, _Routed] = {}
        self._shown: dict[int, dict[int, LookupTree]] = {}  # previews of the coming round, by request and option

    def add(self, key: DrafterKey, drafter: Drafter, limit_s: float | None = None) -> None:
        """Serve requests with `drafter`; a call that lasts longer than `limit_s` is interrupted and fails."""
        self.drafters[key] = drafter
        if limit_s is not None:
            self.failures.deadlines[key] = Deadline(limit_s)

    def start(self, request: Request) -> None:
        """Hand a new request to its drafters."""
        specs, keys = list[SpecConfig](), list[DrafterKey]()
        base: dict[DrafterKey, SpecConfig] = {}  # what each drafter begins with
        for option in request.spec.drafter_options:
            key = drafter_key(option)
            assert key is not None
            base.setdefault(key, option)
            for variant in variants_of(self.drafters[key], option):
                specs.append(variant)
                keys.append(key)
        self._requests[request.request_id] = _Routed(
            keys=tuple(keys),
            specs=tuple(specs),
            requests=tuple(request if spec is request.spec else replace(request, spec=spec) for spec in specs),
            options=tuple(map(self._option, range(len(keys)), keys, specs)),
            emitted=[],
            num_told={key: 0 for key in base if isinstance(self.drafters[key], FollowsText)},
        )
        for key, spec in base.items():
            drafter, own = self.drafters[key], replace(request, spec=spec)
            self.failures.attempt(key, drafter, [request.request_id], partial(drafter.start, own), must_succeed=True)
        self.hidden_states.start(request.request_id, {key: self.drafters[key] for key in base})

    def keys(self, request_id: int) -> tuple[DrafterKey, ...]:
        """The drafter of each option of a request."""
        return self._requests[request_id].keys

    def specs(self, request_id: int) -> tuple[SpecConfig, ...]:
        """The configuration of each option of a request."""
        return self._requests[request_id].specs

    def options(self, request_id: int) -> tuple[DrafterOption, ...]:
        """The options of a request as the control sees them."""
        return self._requests[request_id].options

    def disabled(self, request_id: int) -> frozenset[int]:
        """Options of a request whose drafters are switched off because they failed."""
        if not self.failures.any_off(request_id):
            return frozenset()
        keys = self._requests[request_id].keys
        return frozenset(number for number, key in enumerate(keys) if self.failures.is_off(request_id, key))

    def preview(self, asks: Sequence[PreviewAsk], entries: Mapping[int, BatchEntry]) -> Previews:
        """The drafts that drafters have ready; `entries` are the coming round's, by request."""
        self.spent_s, self.shown_s, self._shown = {}, {}, {}
        previews: dict[int, dict[int, Preview]] = {}
        total_s = 0.0
        for ask in asks:
            began = time.perf_counter()
            key = self._requests[ask.request_id].keys[ask.option]
            drafter = self.drafters[key]
            if not self._tell(key, ask.request_id):
                continue
            own = self._under(entries[ask.request_id], ask.option, ask.num_draft)
            call = partial(self._checked_tree, cast(Lookup, drafter), own)
            tree = self.failures.attempt(key, drafter, [ask.request_id], call) or EMPTY
            tree = allowed_tree(tree, own.processors)
            self._shown.setdefault(ask.request_id, {})[ask.option] = tree
            shown = Preview(tree.parents, tree.chances, tree.tokens) if tree.tokens else NO_PREVIEW
            previews.setdefault(ask.request_id, {})[ask.option] = shown
            took_s = time.perf_counter() - began
            self.spent_s[key] = self.shown_s[key] = self.spent_s.get(key, 0.0) + took_s
            total_s += took_s
        return Previews(previews, total_s)

    def propose(self, batch: Batch) -> Draft:
        """Every drafter drafts for its own requests."""
        entries = batch.decoding
        forced = {b: tokens for b, entry in enumerate(entries) if (tokens := _forced(entry))}
        parts: list[tuple[Sequence[int], Draft]] = [([b], _chain(tokens)) for b, tokens in forced.items()]
        self.num_read_tokens = {}
        for key, routed in self._proposers(entries).items():
            began = time.perf_counter()
            told = {b: entry for b, entry in routed.items() if self._tell(key, entry.request.request_id)}
            free = {b: entry for b, entry in told.items() if b not in forced}
            if free:
                parts += self._sound_drafts(key, free)
            self.spent_s[key] = self.spent_s.get(key, 0.0) + time.perf_counter() - began
        return merge_drafts(len(entries), parts, self.device) if parts else empty_draft(len(entries), self.device)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers that drafters read of every step, as far as they are loaded."""
        readers = (drafter for drafter in self.drafters.values() if isinstance(drafter, HiddenStateReader))
        return tuple(sorted({layer for reader in readers for layer in reader.hidden_layers()}))

    def taps(self, batch: Batch) -> TapRequest:
        """The hidden states that drafters want from the step's forward."""
        wanted, whole = self.hidden_states.wanted(batch)
        return TapRequest(tuple(sorted(wanted)), whole)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Give every drafter the hidden states it reads, then what its requests emitted."""
        entries = batch.decoding
        self._shown = {}
        for key, (seconds, num_tokens) in self.hidden_states.deliver(batch, draft, verdict, feedback).items():
            self.spent_s[key] = self.spent_s.get(key, 0.0) + seconds
            self.num_read_tokens[key] = self.num_read_tokens.get(key, 0) + num_tokens
        for b, entry in enumerate(entries):
            own = self._requests[entry.request.request_id]
            if own.num_told:
                own.emitted.extend(verdict.emitted(b))
        for key, routed in self._followers(entries).items():
            began, drafter = time.perf_counter(), self.drafters[key]
            if len(routed) == len(entries):
                call = partial(drafter.commit, Batch(tuple(routed.values())), draft, verdict, feedback)
            else:
                call = partial(self._commit_some, drafter, routed, draft, verdict, feedback)
            users = [entry.request.request_id for entry in routed.values()]
            self.failures.attempt(key, drafter, users, call, must_succeed=True)
            for own in (self._requests[request_id] for request_id in users):
                if key in own.num_told:
                    own.num_told[key] = len(own.emitted)
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
        """Let the request's drafters free what they hold in their own caches; the request may resume at any time."""
        request_id = request.request_id
        for key in dict.fromkeys(self._requests[request_id].keys):
            drafter = self.drafters[key]
            if isinstance(drafter, Releases) and not self.failures.is_off(request_id, key):
                self.failures.attempt(key, drafter, [request_id], partial(drafter.release, request_id))
                self.hidden_states.release(request_id, key)

    def finish(self, request: Request) -> None:
        """Let the request's drafters forget it."""
        request_id = request.request_id
        self._shown.pop(request_id, None)
        self.hidden_states.finish(request_id)
        for key in dict.fromkeys(self._requests[request_id].keys):
            drafter = self.drafters[key]
            if getattr(drafter, "keeps_answers", False):  # `base.FollowsText`
                self._tell(key, request_id)
            if not self.failures.is_off(request_id, key):
                self.failures.attempt(key, drafter, [request_id], partial(drafter.finish, request_id))
        del self._requests[request_id]
        self.failures.finish(request_id)

    def _tell(self, key: DrafterKey, request_id: int) -> bool:
        """Give a drafter what was emitted since it last drafted; False if it is off for the request."""
        routed, drafter = self._requests[request_id], self.drafters[key]
        told, count = routed.num_told.get(key, -1), len(routed.emitted)
        if 0 <= told < count and not self.failures.is_off(request_id, key):
            routed.num_told[key] = count
            call = partial(cast(FollowsText, drafter).follow, request_id, routed.emitted[told:])
            self.failures.attempt(key, drafter, [request_id], call, must_succeed=True)
        return not self.failures.is_off(request_id, key)

    def _sound_drafts(self, key: DrafterKey, routed: Mapping[int, BatchEntry]) -> list[tuple[Sequence[int], Draft]]:
        """What one drafter proposes, as (places in the batch, draft), without requests whose drafts cannot be used."""
        drafter, places, entries = self.drafters[key], list(routed), list(routed.values())
        shown = self._shown_draft(drafter, entries)

        def checked() -> tuple[Draft, dict[int, str]]:
            draft = drafter.propose(Batch(tuple(entries))) if shown is None else shown
            self.num_read_tokens[key] = int(getattr(drafter, "num_read_tokens", 0))  # `base.Reads`
            return draft, draft_faults(draft, entries, self.vocab_size)

        found = self.failures.attempt(key, drafter, [entry.request.request_id for entry in entries], checked)
        if found is None:
            return []
        draft, faults = found
        for place, fault in faults.items():
            self.failures.add(key, drafter, entries[place].request.request_id, fault)
        sound = [place for place in range(len(places)) if place not in faults]
        if not sound:
            return []
        draft = draft.select(sound)
        if shown is None and previews_drafts(type(drafter)):
            draft = allowed_draft(draft, [entries[place] for place in sound])
        return [([places[place] for place in sound], draft)]

    def _shown_draft(self, drafter: Drafter, entries: Sequence[BatchEntry]) -> Draft | None:
        """What a drafter has shown already, which need not be looked up again; None where it showed not all of it."""
        trees: list[LookupTree] = []
        if any(entry.num_probe for entry in entries):
            return None  # probes were not shown
        for entry in entries:
            tree = self._shown.get(entry.request.request_id, {}).get(entry.option or 0)
            if tree is None:
                return None
            trees.append(tree.first(entry.num_draft))
        return assemble(drafter.name, trees)

    def _checked_tree(self, drafter: Lookup, entry: BatchEntry) -> LookupTree:
        return check_tree(drafter.look_up(entry), entry.num_draft, self.vocab_size, entry.takes_trees)

    def _option(self, number: int, key: DrafterKey, spec: SpecConfig) -> DrafterOption:
        num_draft, shows = set_number(spec), previews_drafts(type(self.drafters[key]))
        return DrafterOption(
            number, option_kind(spec), NO_BOUND if num_draft is None else num_draft, spec.num_probe, shows
        )

    def _proposers(self, entries: Sequence[BatchEntry]) -> dict[DrafterKey, dict[int, BatchEntry]]:
        """Which drafter drafts in this round: the entries of its requests, by their places in the batch."""
        routes: dict[DrafterKey, dict[int, BatchEntry]] = {}
        for b, entry in enumerate(entries):
            if entry.option is None or not entry.num_draft:
                continue
            key = self._requests[entry.request.request_id].keys[entry.option]
            if not self.failures.is_off(entry.request.request_id, key):
                routes.setdefault(key, {})[b] = self._under(entry, entry.option)
        return routes

    def _followers(self, entries: Sequence[BatchEntry]) -> dict[DrafterKey, dict[int, BatchEntry]]:
        """Which drafters must hear at once what was emitted: those that drafted, under the configuration they drafted
        with, and the others, as far as they need more than the text.
        """
        routes: dict[DrafterKey, dict[int, BatchEntry]] = {}
        for b, entry in enumerate(entries):
            request_id = entry.request.request_id
            routed = self._requests[request_id]
            for option, key in enumerate(routed.keys):
                if key in routed.num_told:
                    drafted = option == entry.option and entry.num_draft > 0
                    hears = drafted and not getattr(self.drafters[key], "only_follows", False)  # `base.FollowsText`
                else:
                    hears = option == entry.option or b not in routes.get(key, {})
                if hears and not self.failures.is_off(request_id, key):
                    routes.setdefault(key, {})[b] = self._under(entry, option)
        return routes

    def _under(self, entry: BatchEntry, option: int, num_draft: int | None = None) -> BatchEntry:
        """`entry` as the drafter of one of the request's options sees it, maybe with another number of draft tokens."""
        request = self._requests[entry.request.request_id].requests[option]
        if num_draft is None:
            num_draft = entry.num_draft
        return entry if request is entry.request and num_draft == entry.num_draft else entry.under(request, num_draft)


def _forced(entry: BatchEntry) -> tuple[int, ...]:
    """Tokens whose text the request's grammar leaves no choice about: a draft at no cost, in place of a drafter's.

    One alone is left to the drafter, which goes on behind it.
    """
    forced = entry.processors.forced(entry.num_draft) if entry.num_draft and entry.processors is not None else ()
    return forced if len(forced) > 1 else ()


def _chain(tokens: tuple[int, ...]) -> Draft:
    parents = tuple(range(-1, len(tokens) - 1))
    return Draft(torch.tensor(tokens, dtype=torch.int64), parents, (0, len(tokens)), (GRAMMAR,))
