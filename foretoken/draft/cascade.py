"""A drafter of drafters: cheap drafts are verified by a draft model, whose tokens a bigger one may verify, and so on
to the target.

After CS-Drafting (Chen et al. 2023, arXiv 2312.11462) and TriForce (Sun et al. 2024, arXiv 2404.11912). Every level
verifies the one below it exactly, so what leaves a level has that level's own distribution: the mass handed to the
target is the distribution of the LAST level, whatever drafted below. How many tokens a level returns is fixed before
any is drawn; it never makes more.

A level's cache runs ahead of the committed text. What it ran is remembered, and cut back to what stands before it is
used again, so no level ever needs to be told that its tokens were refused. Lookups are asked what follows the
provisional tokens and learn committed ones only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Uniforms, Verdict, empty_draft
from foretoken.draft.base import Factory, Feedback, ModelDrafter, Resets
from foretoken.draft.chain import Chain, adjusted, assemble, draft_numbers
from foretoken.draft.lookup_tree import EMPTY, Lookup
from foretoken.draft.lookup_tree import assemble as assemble_trees
from foretoken.draft.own_cache import OwnCache
from foretoken.errors import ConfigError
from foretoken.kv.prefix import shared_length
from foretoken.model.interface import LanguageModel, Segment
from foretoken.text.randomness import Purpose
from foretoken.text.sampling import draft_probs
from foretoken.transfer import to_device, to_host
from foretoken.verify import first_max, verify_batch

_MAX_INNER = 4  # tokens that a model hands to the level above it at once, unless its part says otherwise


class CascadeLevel:
    """A model and what it has run of every request, whose committed text `text_of` tells."""

    def __init__(self, model: LanguageModel, text_of: Callable[[int], Sequence[int]]) -> None:
        self.model, self.cache = model, OwnCache(model, text_of)
        self.ran: dict[int, list[int]] = {}  # tokens in the cache behind the committed text

    def settle(self, sequence: int, num_committed: int, follows: Sequence[int], most: int) -> None:
        """Cut the cache back to where it agrees with the text, which goes on with `follows` after `num_committed`
        tokens, and to `most` tokens.
        """
        ran = self.ran[sequence]
        agreed = min(shared_length(ran, follows), max(0, most - num_committed))
        if agreed < len(ran):
            self.model.rollback(sequence, num_committed + agreed)
            del ran[agreed:]


@dataclass
class _CascadeRequest:
    """One request while a round is drafted: its committed text, the random numbers its levels have used, draft tokens
    judged and kept among them.
    """

    entry: BatchEntry
    text: list[int]
    num_used: int = 0
    inner: tuple[int, int] = (0, 0)

    @property
    def rule(self) -> str:
        """By which a level judges the one below it: what the target's own rule comes down to."""
        return "greedy" if self.entry.request.params.greedy else "coupled" if self.entry.noise is not None else "auto"

    def part(self, level: int) -> SpecConfig:
        """The configuration of a level, counted from the top: -1 is the last part."""
        return self.entry.request.spec.configs[level]


@dataclass
class _LevelTokens:
    """Tokens of one level that follow `before`, provisional ones too: `most` of them, each with the distribution it was
    drawn from (None: a point).
    """

    course: _CascadeRequest
    before: list[int]
    most: int
    tokens: list[int] = field(default_factory=list)
    masses: list[Tensor | None] = field(default_factory=list)
    stopped: bool = False

    def take(self, tokens: Sequence[int], rows: Sequence[int], probs: Tensor, sure: Sequence[bool]) -> None:
        """Append what a round emitted at `rows`, up to a place where the distribution is too unsure."""
        assert len(tokens) <= self.missing
        entry = self.course.entry
        a_point = entry.request.params.greedy or entry.noise is not None
        for token, row in zip(tokens, rows, strict=True):
            if not sure[row]:
                self.stopped = True
                return
            self.tokens.append(token)
            self.masses.append(None if a_point else probs[row])

    @property
    def sequence(self) -> int:
        return self.course.entry.request.request_id

    @property
    def ahead(self) -> list[int]:
        return [*self.before, *self.tokens]

    @property
    def missing(self) -> int:
        return 0 if self.stopped else self.most - len(self.tokens)


class CascadeDrafter:
    """Chains that follow the distribution of the last of `models`; each verifies the one before, the first `lookup`."""

    name = "cascade"

    def __init__(self, models: Sequence[LanguageModel], lookup: Lookup | None = None) -> None:
        assert models
        self._texts: dict[int, list[int]] = {}
        self.levels, self.lookup = [CascadeLevel(model, self._texts.__getitem__) for model in models], lookup

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """Load the draft models, which must share the target's tokens, and make the lookup below them."""
        models: list[LanguageModel] = []
        for part in spec.configs:
            if part.drafter == "draft_model":
                drafter = factory.make(replace(part, draft_vocabulary="same"))
                assert isinstance(drafter, ModelDrafter)
                models += drafter.models()
        first = None if spec.configs[0].drafter == "draft_model" else factory.make(spec.configs[0])
        if first is not None and not isinstance(first, Lookup):
            raise ConfigError("parts", first.name, "as the first level of a cascade it must show its drafts (Lookup)")
        return cls(models, first)

    def models(self) -> Sequence[LanguageModel]:
        """See `base.ModelDrafter`: one per level."""
        return [level.model for level in self.levels]

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        return type(self)([twin(level.model) for level in self.levels], copy.deepcopy(self.lookup))

    @property
    def num_read_tokens(self) -> int:
        """See `base.Reads`: over all levels."""
        return sum(level.cache.num_read_tokens for level in self.levels)

    def start(self, request: Request) -> None:
        """Open a sequence at every level; the prompt is run when something is first drafted."""
        self._texts[request.request_id] = list(request.prompt_ids)
        for level in self.levels:
            level.cache.start(request.request_id, request.params.tenant)
            level.ran[request.request_id] = []
        if self.lookup is not None:
            self.lookup.start(replace(request, spec=request.spec.configs[0]))

    def propose(self, batch: Batch) -> Draft:
        """Up to `num_draft` tokens of the last model per request; none where a context or a cache has no room."""
        for level in self.levels:
            level.cache.begin_round(entry.request.request_id for entry in batch.decoding if entry.num_draft)
        courses = [_CascadeRequest(entry, self._texts[entry.request.request_id]) for entry in batch.decoding]
        runs = [_LevelTokens(course, [], self._room(course)) for course in courses]
        self._extend(len(self.levels) - 1, runs)
        return replace(
            _as_draft(self.name, self.levels[-1].model.device, runs), inner=tuple(course.inner for course in courses)
        )

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Keep at every level what it ran of what was emitted."""
        for b, entry in enumerate(batch.decoding):
            sequence, emitted = entry.request.request_id, verdict.emitted(b)
            text = self._texts[sequence]
            for level in self.levels:
                level.settle(sequence, len(text), emitted, len(text) + len(emitted) - 1)
                level.ran[sequence].clear()
            text += emitted
        for level in self.levels:
            level.cache.publish_read()
        if self.lookup is not None:
            self.lookup.commit(batch, draft, verdict, feedback)

    def release(self, request_id: int) -> None:
        """See `base.Releases`: every level's cache."""
        for level in self.levels:
            level.cache.release(request_id)

    def finish(self, request_id: int) -> None:
        """Close the sequences and drop the text; what the levels hold of it may serve another request."""
        for level in self.levels:
            level.cache.finish(request_id)
            del level.ran[request_id]
        del self._texts[request_id]
        if self.lookup is not None:
            self.lookup.finish(request_id)

    def reset(self) -> None:
        """See `base.Resets`: every level's cached beginnings of texts, and what the lookup keeps."""
        for level in self.levels:
            level.cache.reset()
        if isinstance(self.lookup, Resets):
            self.lookup.reset()

    def _room(self, course: _CascadeRequest) -> int:
        """How many tokens can be drafted within every level's context and cache."""
        entry, asked = course.entry, course.part(-1).at_most(course.entry.num_draft)
        most = min(asked, *(level.model.max_context_tokens - entry.round_start for level in self.levels))
        if asked and most <= 0:
            self.release(entry.request.request_id)  # the text has outgrown a level for good
        if most <= 0:
            return 0
        for place, level in enumerate(self.levels):
            if not level.cache.make_room(entry.request.request_id, most):
                for other in self.levels[:place]:  # what it took beyond the text serves nobody now
                    other.model.rollback(entry.request.request_id, other.model.length(entry.request.request_id))
                return 0
        return most

    def _extend(self, level: int, runs: Sequence[_LevelTokens]) -> None:
        """Complete `runs` with tokens of the distribution of `levels[level]`: draft below and verify here, in rounds.

        A round drafts one token less than is missing, since it always ends with one of the level's own.
        """
        here = self.levels[level]
        while growing := [run for run in runs if run.missing]:
            draft = self._draft_below(level, growing).on(here.model.device)
            segments, logits = self._forward(here, growing, draft)
            parts = [run.course.part(level - len(self.levels)) for run in growing]
            probs, sure = _level_probs(growing, draft, logits, parts)
            verdict = _judge(growing, draft, probs)
            for b, (run, segment) in enumerate(zip(growing, segments, strict=True)):
                here.model.commit(segment.sequence, segment.num_pending, verdict.paths[b])
                here.ran[segment.sequence] = [*run.ahead, *verdict.accepted[b]]
                drafted, kept = run.course.inner
                run.course.inner = (drafted + draft.lengths[b], kept + len(verdict.accepted[b]))
                rows = [draft.anchor_row(b) + row for row in (0, *(1 + node for node in verdict.paths[b]))]
                run.take(verdict.emitted(b), rows, probs, sure)

    def _draft_below(self, level: int, runs: Sequence[_LevelTokens]) -> Draft:
        if level > 0:
            place = level - 1 - len(self.levels)
            below = [
                _LevelTokens(run.course, run.ahead, run.course.part(place).at_most(min(run.missing - 1, _MAX_INNER)))
                for run in runs
            ]
            self._extend(level - 1, below)
            return _as_draft(self.name, self.levels[level - 1].model.device, below)
        if self.lookup is None:
            return empty_draft(len(runs))
        trees = []
        for run in runs:
            entry, part = run.course.entry, run.course.part(0)
            asked = replace(
                entry,
                request=replace(entry.request, spec=part),
                num_draft=part.at_most(run.missing - 1),
                takes_trees=True,
            )
            trees.append(self.lookup.look_up(asked, run.ahead) if asked.num_draft else EMPTY)
        return assemble_trees(self.lookup.name, trees)

    def _forward(self, here: CascadeLevel, runs: Sequence[_LevelTokens], draft: Draft) -> tuple[list[Segment], Tensor]:
        """Run what the level has not run of each text, and the draft tokens; logits `[R, V]`."""
        pieces: list[Tensor] = []
        segments: list[Segment] = []
        device = here.model.device
        for b, run in enumerate(runs):
            sequence, text, ahead = run.sequence, run.course.text, run.ahead
            here.settle(sequence, len(text), ahead, len(text) + len(ahead) - 1)
            if not here.ran[sequence]:
                here.cache.catch_up(sequence)
            length = here.model.length(sequence)
            pending = [*text[length:], *ahead[max(0, length - len(text)) :]]
            nodes = slice(draft.offsets[b], draft.offsets[b + 1])
            pieces += [to_device(pending, device), draft.tokens[nodes]]
            segments.append(Segment(sequence, len(pending), draft.parents[nodes], 1 + draft.lengths[b]))
        return segments, here.model.forward(torch.cat(pieces), segments).logits


def _level_probs(
    runs: Sequence[_LevelTokens], draft: Draft, logits: Tensor, parts: Sequence[SpecConfig]
) -> tuple[Tensor, list[bool]]:
    """What a level says of every row of `draft`, from `logits` `[R, V]` and the `parts` of its requests: the
    distribution `[R, V]` of the token that follows, and whether it is sure enough to be drafted.
    """

    def paths(b: int) -> list[tuple[int, ...]]:
        ahead = tuple(runs[b].ahead)
        return [(*ahead, *path) for path in draft.paths(b)]

    logits = adjusted(logits, [run.course.entry for run in runs], [1 + length for length in draft.lengths], paths)
    owners = [b for b, length in enumerate(draft.lengths) for _ in range(1 + length)]  # [R]
    params = [runs[b].course.entry.request.params for b in owners]
    # [R, V]; temperature 1 where the request is greedy
    probs = draft_probs(logits, params, [parts[b].draft_top_k for b in owners])
    sure = [True] * len(owners)
    if any(part.min_confidence for part in parts):
        least = to_device([parts[b].min_confidence for b in owners], probs.device, torch.float32)
        sure = to_host(probs.amax(-1) >= least)[0]
    greedy = to_device([row for row, choice in enumerate(params) if choice.greedy], probs.device)
    probs[greedy] = torch.zeros_like(probs[greedy]).scatter_(-1, first_max(logits[greedy])[:, None], 1)
    return probs, sure


def _judge(runs: Sequence[_LevelTokens], draft: Draft, probs: Tensor) -> Verdict:
    """One level's verdict on the draft of the level below: `probs` `[R, V]`."""
    entries = [run.course.entry for run in runs]
    owners: list[int] = []
    indices: list[int] = []
    for b, run in enumerate(runs):  # every test and draw of a round has a number of its own, at whatever level and turn
        owners += [b] * (1 + draft.lengths[b])
        indices += range(run.course.num_used, run.course.num_used + 1 + draft.lengths[b])
        run.course.num_used += 1 + draft.lengths[b]
    numbers = draft_numbers(Purpose.INNER, [entries[b] for b in owners], indices)
    rows = to_device(torch.from_numpy(numbers), probs.device, None)  # [R]: of each request its draw, then its tests
    first = [draft.anchor_row(b) for b in range(len(runs))]
    tests, draws = (to_device(own, rows.device) for own in (sorted(set(range(draft.num_rows)) - set(first)), first))
    race = tuple(
        None
        if entry.noise is None
        else entry.noise.rows([entry.round_start + len(run.ahead) + d for d in (0, *draft.depths(b))])
        for b, (entry, run) in enumerate(zip(entries, runs, strict=True))
    )
    return verify_batch(draft, probs, Uniforms(rows[tests], rows[draws], race), [run.course.rule for run in runs])


def _as_draft(name: str, device: torch.device, runs: Sequence[_LevelTokens]) -> Draft:
    chains = [
        Chain(run.course.entry, run.most, list(to_device(run.tokens, device).unbind()), run.masses) for run in runs
    ]
    return assemble(name, device, chains)
