"""A draft model with another tokenizer than the target's (Timor et al. 2025, arXiv 2502.05202).

Two ways, by request:

- `intersection` (TLI there): the draft chooses among the tokens that both vocabularies have; every draft token is one
  target token, drawn from the draft's distribution renormalised over these and moved to the target's ids. What the
  request asks for (penalties, masks, filters, the coupled rule's race) is done to the moved distribution, in the
  target's ids.
- `strings` (SLEM there): the draft goes on greedily in its own tokens, and its text is encoded again behind the end of
  the committed text. The draft is deterministic: the target's token must be the same one.

Under "auto" a greedy request takes strings, because there the draft uses its whole vocabulary, and a sampled one the
intersection: a drawn token is kept with probability sum min(p, q), a deterministic one with p at one token. Both are
exact for any draft.

The draft keeps the committed text in its own tokens. After a round the end of the text is encoded again, and the
draft's cache is cut back to the tokens that stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import Batch, BatchEntry, Draft, Processors, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.chain import Chain, assemble, extend
from foretoken.draft.own_cache import OwnCacheDrafter
from foretoken.draft.retokenize import DraftText, continuation, draft_writes
from foretoken.model.interface import LanguageModel, Segment
from foretoken.text.sampling import check_finite
from foretoken.text.vocabulary import Side, TextUse, shared_tokens, special_twins, spellings
from foretoken.transfer import to_device, to_host

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class _TranslatedDraft:
    """One request's round: `chain` grows in target tokens (`shared`) or in the draft's own."""

    entry: BatchEntry
    text: DraftText
    chain: Chain
    shared: bool


class OtherVocabularyDrafter(OwnCacheDrafter):
    """Chains from a draft model that has its own tokenizer, `draft`; `target` is the vocabulary to draft in."""

    name = "draft_model"

    def __init__(self, model: LanguageModel, target: Side, draft: Side, how: TextUse = "auto") -> None:
        self._texts: dict[int, DraftText] = {}
        super().__init__(model, lambda sequence: self._texts[sequence].ids)
        self.target, self.draft, self.how = target, draft, how
        self.shared = shared_tokens(target, draft) or {}  # target id -> draft id
        self._twins = special_twins(target, draft)
        self._spelling = spellings(target)
        ids = to_device([*self.shared.items()], model.device).reshape(-1, 2)
        self._target_ids, self._draft_ids = ids[:, 0], ids[:, 1]  # [S] each
        self._outside = torch.ones(target.num_columns, dtype=torch.bool, device=model.device)
        self._outside[self._target_ids] = False
        spoken = [
            token
            for token in range(draft.num_columns)
            if draft.tokenizer.token(token) is not None and token not in draft.tokenizer.special_ids
        ]
        # Columns that are neither text nor have a twin.
        self._mute = torch.ones(draft.num_columns, dtype=torch.bool, device=model.device)
        self._mute[to_device([*spoken, *self._twins.to_target], model.device)] = False
        # Draft tokens that the draft's cache holds, or held before it gave them back.
        self._cached: dict[int, list[int]] = {}

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        return type(self)(twin(self.model), self.target, self.draft, self.how)

    def start(self, request: Request) -> None:
        """Open a sequence; the prompt is run when something is first drafted."""
        text = DraftText(self.target.tokenizer, self.draft, self._twins.to_draft)
        text.push(request.prompt_ids)
        self._texts[request.request_id], self._cached[request.request_id] = text, []
        self._cache.start(request.request_id, request.params.tenant)

    def propose(self, batch: Batch) -> Draft:
        """Draft up to `num_draft` tokens per request; a request for which the draft has no room gets none."""
        self._cache.begin_round(entry.request.request_id for entry in batch.decoding if entry.num_draft)
        drafts = [self._begin(entry) for entry in batch.decoding]
        growing = [draft for draft in drafts if draft.chain.grows]
        while growing:
            self._extend(growing, self._advance(growing))
            growing = [draft for draft in growing if draft.chain.grows]
        return assemble(
            self.name,
            self.model.device,
            [draft.chain if draft.shared else self._in_target_tokens(draft) for draft in drafts],
        )

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Encode the end of the text again and cut the cache back to the tokens that stayed."""
        for b, entry in enumerate(batch.decoding):
            sequence = entry.request.request_id
            text, cached = self._texts[sequence], self._held(sequence)
            same = min(text.num_settled, len(cached))
            text.push(verdict.emitted(b))
            most = min(len(text.ids) - 1, len(cached))  # the last token is run again, if only for its logits
            while same < most and cached[same] == text.ids[same]:
                same += 1
            same = max(0, min(same, most))
            self.model.rollback(sequence, same)
            del cached[same:]
        self._cache.publish_read()

    def finish(self, request_id: int) -> None:
        """Close the sequence; what it holds of the text may serve another one."""
        self._cache.finish(request_id)
        del self._texts[request_id], self._cached[request_id]

    def _begin(self, entry: BatchEntry) -> _TranslatedDraft:
        text = self._texts[entry.request.request_id]
        shared = bool(self.shared) and (
            self.how == "intersection" or (self.how == "auto" and not entry.request.params.greedy)
        )
        # A distribution over whole tokens has nothing to say about the rest of a character.
        most = 0 if shared and text.ending.held else self._room(entry, text)
        if not shared:
            # Its own tokens are no business of the request's parameters, which speak of target tokens.
            own = replace(entry, request=replace(entry.request, params=_GREEDY), processors=None, noise=None)
            return _TranslatedDraft(entry, text, Chain(own, most), shared)
        return _TranslatedDraft(entry, text, Chain(entry, most), shared)

    def _room(self, entry: BatchEntry, text: DraftText) -> int:
        """How many tokens can be drafted within the draft's context and cache."""
        sequence = entry.request.request_id
        most = self._cache.room(entry) if text.ids else 0
        if most:
            self._cached[sequence] = text.ids[: self.model.length(sequence)]
        return most

    def _held(self, sequence: int) -> list[int]:
        """The draft tokens that the cache holds now: it may have given them back."""
        cached = self._cached[sequence]
        del cached[self.model.length(sequence) :]
        return cached

    def _advance(self, growing: Sequence[_TranslatedDraft]) -> Tensor:
        """Run the next input of every chain, after any backlog of committed tokens; the draft's logits `[A, V]`."""
        rows: list[int] = []
        segments: list[Segment] = []
        newest = _newest(growing)
        for draft, last in zip(growing, newest, strict=True):
            sequence = draft.entry.request.request_id
            cached = self._cached[sequence]
            if draft.chain.tokens:
                fresh = pending = [self.shared[last] if draft.shared else last]
            else:
                pending = self._cache.take_pending(sequence)
                fresh = draft.text.ids[len(cached) :]
            cached += fresh
            rows += pending
            segments.append(Segment(sequence, len(pending)))
        return self._cache.run(to_device(rows, self.model.device), segments)

    def _extend(self, growing: Sequence[_TranslatedDraft], logits: Tensor) -> None:
        """Draw the next token of every chain from the draft's `logits` `[A, V]`, or stop the chain there."""
        for shared in (True, False):
            rows = [i for i, draft in enumerate(growing) if draft.shared == shared]
            if rows:
                own = logits[to_device(rows, logits.device)]
                extend(
                    [growing[i].chain for i in rows],
                    self._moved(own) if shared else own.masked_fill(self._mute, -torch.inf),
                )
        if self._twins.to_target and not all(draft.shared for draft in growing):
            for draft, last in zip(growing, _newest(growing), strict=True):
                if not draft.shared and draft.chain.tokens and last in self._twins.to_target:
                    draft.chain.stopped = True

    def _moved(self, logits: Tensor) -> Tensor:
        """The draft's `logits` `[A, V draft]` at the target's ids, -inf where it has no such token: `[A, V target]`."""
        inside = logits[:, self._draft_ids]  # [A, S]
        inside = torch.where(check_finite(inside)[:, None], inside, torch.zeros_like(inside))
        moved = inside.new_full((logits.shape[0], self.target.num_columns), -torch.inf)
        moved[:, self._target_ids] = inside
        return moved

    def _in_target_tokens(self, draft: _TranslatedDraft) -> Chain:
        """The chain of the draft's own tokens as deterministic tokens of the target's."""
        text, entry, own = draft.text, draft.entry, list[int]()
        if draft.chain.tokens:
            own = to_host(torch.stack(draft.chain.tokens))[0]
        end = self._twins.to_target[own.pop()] if own and own[-1] in self._twins.to_target else None
        written = draft_writes(self.draft.tokenizer, text.ids, own, text.at_start) if own else ""
        ids = continuation(self.target, self._spelling, text.ending, written) if written else []
        if end is not None and (ids or not own):
            ids = [*ids, end]
        ids = ids[: entry.num_draft]
        tokens = to_device(ids[: _num_allowed(entry.processors, ids, self._outside)], self.model.device)
        return Chain(entry, draft.chain.most, list(tokens.unbind()), [None] * len(tokens))


def _newest(growing: Sequence[_TranslatedDraft]) -> list[int]:
    """The last draft token of each chain on the host, -1 for an empty one; one transfer for all."""
    held = [draft.chain.tokens[-1] for draft in growing if draft.chain.tokens]
    known = iter(to_host(torch.stack(held))[0] if held else ())
    return [next(known) if draft.chain.tokens else -1 for draft in growing]


def _num_allowed(processors: Processors | None, ids: Sequence[int], columns: Tensor) -> int:
    """How many of `ids`, from the first, the processors do not ban; `columns` [V] has the width of its logits."""
    if processors is None or not ids:
        return len(ids)
    flat = torch.zeros(len(ids), columns.shape[0], device=columns.device, dtype=torch.float32)  # [n, V]
    adjusted = processors.adjust(flat, [tuple(ids[:place]) for place in range(len(ids))], is_draft=True)
    (found,) = to_host(adjusted.gather(-1, to_device(ids, columns.device)[:, None]).squeeze(-1))
    banned = [place for place, logit in enumerate(found) if logit == -torch.inf]
    return banned[0] if banned else len(ids)
