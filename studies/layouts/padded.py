"""Speculative decoding in padded batches, kept for comparison: EQSPEC, EXSPEC, and plain decoding in the same layout.

After "Batch Speculative Decoding Done Right" (`eBay/spec_dec`), over our own decoder and kernels, so that against the
engine the layout alone differs. Greedy only. Every round the target runs a rectangle: each row's last token and as many
columns as the longest draft of the round. Rows then differ in what they accepted.

- EQSPEC takes the sequences in batches, and realigns the rows before every round.
- EXSPEC holds a window of sequences larger than the batch. A round takes a batch of equal lengths, which needs no pads;
  where there is none it takes the first of the window and realigns them.

Both are made as well as the layout allows, and so not quite as published: a finished row leaves at once, rows that need
not move are not copied, and the cache is written in place. Two things of the published EQSPEC can be had with
`published`: its target runs finished rows to the end of the batch, and every round copies every row into new tensors,
also when they only get longer. Not followed at all: a draft model that reads the whole text anew in every round, and a
round that emits nothing after a draft that was accepted whole. New sequences of EXSPEC's window read their prompts when
they enter; when fewer are left than a batch holds, all of them at equal length are a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.draft.base import Drafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.admission import check_request
from foretoken.errors import ConfigError, InputError
from foretoken.model.decoder import Decoder
from foretoken.model.families import NATIVE_MODEL_TYPES
from foretoken.model.interface import LanguageModel
from foretoken.model.paged import PagedModel
from foretoken.verify import first_max
from studies.layouts.padded_cache import PaddedCache, PooledCache, PublishedCache, in_place
from studies.layouts.padded_draft import Chain, Clock, PaddedDrafter, PaddedDraftModel, PaddedLookup, PaddedNone, Row
from studies.layouts.padded_model import PaddedModel

_HONOURED = frozenset({"max_tokens", "temperature", "seed", "ignore_eos"})


@dataclass(frozen=True)
class PaddedRun:
    """What a run answered, and what it took.

    `answers` are the output tokens by prompt. `clock` tells the seconds. `num_emitted` are the tokens of the
    `num_rounds` rounds, without those that came with the prompts. Of the rounds `num_grouped` took rows of equal
    length. `num_moved` rows were copied for alignment.
    """

    answers: tuple[tuple[int, ...], ...]
    clock: Clock
    num_rounds: int
    num_grouped: int
    num_emitted: int
    num_drafted: int
    num_accepted: int
    num_moved: int


class PaddedDecoder:
    """Answers prompts greedily in padded batches of `batch_size` rows.

    `drafter` None is plain decoding. `window` None is EQSPEC, a number EXSPEC over so many sequences at a time.
    `published` keeps EQSPEC's batch as the published code does.

    Raises:
        ConfigError: a target, draft or drafter that cannot run in this layout, or sizes that make no sense.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        num_draft: int,
        batch_size: int,
        window: int | None = None,
        published: bool = False,
    ) -> None:
        for name, value, low in (
            ("num_draft", num_draft, 0),
            ("batch_size", batch_size, 1),
            ("window", batch_size if window is None else window, 1),
        ):
            if value < low:
                raise ConfigError(name, value, f"must be at least {low}")
        if window is not None and window < batch_size:
            raise ConfigError("window", window, f"holds fewer sequences than a batch of {batch_size}; make it larger")
        if published and window is not None:
            raise ConfigError("published", published, "is for EQSPEC; leave out the window")
        if (drafter is None) != (num_draft == 0):
            raise ConfigError("num_draft", num_draft, "must be 0 without a drafter, and at least 1 with one")
        self.target_model, self.drafter = native(target, "target"), drafter
        self.num_draft, self.batch_size, self.window, self.published = num_draft, batch_size, window, published
        self.draft_model = native(drafter.model, "draft") if isinstance(drafter, DraftModelDrafter) else None
        if drafter is not None and not isinstance(drafter, DraftModelDrafter | NgramDrafter):
            raise ConfigError("drafter", drafter.name, "padded batches are compared with ngram and draft_model")

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, eos_token_ids: Sequence[int] | None = None
    ) -> PaddedRun:
        """Answer `prompts` (token ids); the target's own end tokens count unless others are given.

        Raises:
            InputError: a parameter that this comparison does not know, a prompt that the engine would refuse too.
        """
        check_params(params)
        eos = self.target_model.eos_token_ids if eos_token_ids is None else eos_token_ids
        rows = [
            Row(
                number,
                list(prompt),
                len(prompt),
                self._max_total(prompt, params),
                frozenset(() if params.ignore_eos else eos),
            )
            for number, prompt in enumerate(prompts)
        ]
        run = _Run(self)
        if self.window is None:
            for first in range(0, len(rows), self.batch_size):
                run.batch(rows[first : first + self.batch_size])
        else:
            run.pool(rows, self.window)
        answers = tuple(tuple(row.tokens[row.num_prompt :]) for row in rows)
        return PaddedRun(
            answers,
            run.clock,
            run.num_rounds,
            run.num_grouped,
            run.num_emitted,
            run.num_drafted,
            run.num_accepted,
            run.num_moved,
        )

    def _max_total(self, prompt: Sequence[int], params: SamplingParams) -> int:
        most = check_request(prompt, params, SpecConfig(), self.target_model, has_text=False)
        if self.draft_model is not None and most > self.draft_model.max_context_tokens:
            raise InputError(
                "max_tokens",
                params.max_tokens,
                f"the draft's context ends after {self.draft_model.max_context_tokens} tokens",
            )
        return most


def native(model: LanguageModel, role: str) -> PagedModel:
    """The model, if it is our own decoder.

    Raises:
        ConfigError: it runs through transformers.
    """
    if not isinstance(model, PagedModel):
        raise ConfigError(
            role,
            type(model).__name__,
            f"padded batches run our own decoder; take a checkpoint of {', '.join(NATIVE_MODEL_TYPES)}",
        )
    return model


def check_params(params: SamplingParams) -> None:
    """Refuse what a padded batch does not do: everything but greedy tokens up to a number.

    Raises:
        InputError: names the parameter.
    """
    if params.temperature != 0:
        raise InputError(
            "temperature", params.temperature, "padded batches, kept for comparison, are greedy; set it to 0"
        )
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in _HONOURED and value != field.default:
            raise InputError(field.name, value, "padded batches, kept for comparison, do not know it; leave it out")


class _Run:
    """One call of `PaddedDecoder.generate`: its caches, its clock, its counts."""

    def __init__(self, decoder: PaddedDecoder) -> None:
        self.decoder, self.device = decoder, decoder.target_model.device
        self.target = PaddedModel(decoder.target_model.decoder, self._cache(decoder.target_model.decoder))
        self.drafter = self._make_drafter()
        self.clock = Clock(self.device)
        self.num_rounds = self.num_grouped = self.num_emitted = self.num_drafted = self.num_accepted = (
            self.num_moved
        ) = 0

    def batch(self, rows: Sequence[Row]) -> None:
        """EQSPEC: one batch to its end; a row that finishes leaves, or, as published, is run on without a draft."""
        self._read(rows)
        while alive := [row for row in rows if not row.finished]:
            self._round(list(rows) if self.decoder.published else self._ordered(alive))

    def pool(self, rows: Sequence[Row], window: int) -> None:
        """EXSPEC: a window over all sequences, shortest first, in which rounds choose their batches."""
        waiting = iter(sorted(rows, key=lambda row: len(row.tokens)))
        alive: list[Row] = []
        while True:
            entering = list(itertools.islice(waiting, window - len(alive)))
            for first in range(0, len(entering), self.decoder.batch_size):
                self._read(entering[first : first + self.decoder.batch_size])
            alive = [row for row in (*alive, *entering) if not row.finished]
            if not alive and not entering:
                return
            if alive:
                chosen, grouped = choose_batch(alive, self.decoder.batch_size)
                self._round(self._ordered(chosen))
                self.num_grouped += grouped
                alive = [row for row in alive if not row.finished]

    def _read(self, rows: Sequence[Row]) -> None:
        """Read the prompts of new rows, and emit the token after each."""
        self.clock.lap("rest_s")
        logits = self.target.read_prompts([row.number for row in rows], [row.tokens for row in rows], 1)  # [B, 1, V]
        for row, token in zip(rows, first_max(logits[:, 0]).tolist(), strict=True):
            row.take([token])
        self.drafter.start(rows)
        for row in rows:
            self._leave(row)
        self.clock.lap("prompt_s")

    def _round(self, rows: Sequence[Row]) -> None:
        """Draft, realign, verify, accept; rows that have finished already are run, and nothing comes of it."""
        clock, live = self.clock, [row for row in rows if not row.finished]
        clock.lap("rest_s")
        most = [min(self.decoder.num_draft, row.num_remaining - 1) for row in live]
        found = self.drafter.propose(live, most, clock) if any(most) else [()] * len(live)
        clock.lap("draft_s")
        self.num_moved += self.target.align([row.number for row in rows], [len(row.tokens) - 1 for row in rows])
        clock.lap("realign_s")
        drafts = {row.number: draft for row, draft in zip(live, found, strict=True)}
        best = self._verify(rows, drafts)
        clock.lap("forward_s")
        accepted = [accepted_of(draft, best[row.number]) for row, draft in zip(live, found, strict=True)]
        next_tokens = [best[row.number][len(stood)] for row, stood in zip(live, accepted, strict=True)]
        for row, draft, stood, token in zip(live, found, accepted, next_tokens, strict=True):
            count = row.take([*stood, token])
            self.num_emitted += count
            self.num_drafted += len(draft)
            self.num_accepted += min(count, len(stood))
        self.drafter.learn(live, accepted, next_tokens)
        for row in live:
            self._leave(row)
        self.num_rounds += 1
        clock.lap("rest_s")

    def _verify(self, rows: Sequence[Row], drafts: Mapping[int, Chain]) -> dict[int, list[int]]:
        """What the target would say after the last token of every row and after each draft token, by row."""
        width = max(map(len, drafts.values()))
        given = [(row.tokens[-1], *drafts.get(row.number, ())) for row in rows]
        columns = [[*tokens, *[0] * (1 + width - len(tokens))] for tokens in given]
        logits = self.target.forward(torch.tensor(columns, device=self.device), 1 + width)  # [B, 1 + width, V]
        return {row.number: best for row, best in zip(rows, first_max(logits).tolist(), strict=True)}

    def _leave(self, row: Row) -> None:
        """Let the caches and the drafter forget a row that has finished."""
        if row.finished:
            self.target.cache.end(row.number)
            self.drafter.finish(row)

    def _ordered(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in the order that moves least in the target's cache."""
        by_number = {row.number: row for row in rows}
        return [by_number[number] for number in in_place(self.target.cache.sequences, list(by_number))]

    def _cache(self, model: Decoder) -> PaddedCache:
        weight, window = model.norm.weight, self.decoder.window
        if self.decoder.published:
            return PublishedCache(model.config, weight.dtype, weight.device)
        if window is None:
            return PaddedCache(model.config, weight.dtype, weight.device)
        return PooledCache(model.config, weight.dtype, weight.device, window)

    def _make_drafter(self) -> PaddedDrafter:
        draft, drafter = self.decoder.draft_model, self.decoder.drafter
        if draft is not None:
            return PaddedDraftModel(draft.decoder, self._cache(draft.decoder))
        return PaddedLookup(drafter) if isinstance(drafter, NgramDrafter) else PaddedNone()


def choose_batch(alive: Sequence[Row], batch_size: int) -> tuple[list[Row], bool]:
    """EXSPEC's choice: the first rows of equal length that fill a batch, else the first rows; whether they are of equal
    length.
    """
    size = min(batch_size, len(alive))
    groups: dict[int, list[Row]] = {}
    for row in alive:
        group = groups.setdefault(len(row.tokens), [])
        group.append(row)
        if len(group) == size:
            return group, True
    return list(alive[:size]), False


def accepted_of(draft: Chain, own: Sequence[int]) -> Chain:
    """The accepted draft tokens: those before the first that is not the target's own choice."""
    count = 0
    while count < len(draft) and draft[count] == own[count]:
        count += 1
    return draft[:count]
