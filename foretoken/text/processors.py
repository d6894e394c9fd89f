"""What a request's parameters make of logits before temperature and filters: bias, penalties, bans, structure.

All of it depends on the text in front of a row, so every row is processed for its own draft tokens: they count in
penalties, complete bad words and advance grammars as if they had been emitted. One penalty for a whole draft would
change the distribution behind its first token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.errors import InputError
from foretoken.text.bad_words import BannedTexts, TokenSequences, split_words
from foretoken.text.tokenizer import Tokenizer
from foretoken.transfer import to_device, to_host

if TYPE_CHECKING:
    from foretoken.text.structure import Structure


class RequestProcessors:
    """The processors of one request, with what they remember of its text (`core.Processors`).

    Drafted tokens leave no trace: only `commit` changes what later rows see. A row in which every token is excluded is
    left as the model made it, and `error` says why once the committed text arrives there: plain decoding may never
    reach a row behind drafted tokens. Check `error` before each further token, unless the answer has ended.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Collection[int],
        bad_words: Collection[tuple[int, ...]],
        structure: Structure | None = None,
        bad_texts: BannedTexts | None = None,
    ) -> None:
        self._params, self._vocab_size, self._structure = params, vocab_size, structure
        self._end_ids = sorted(end_ids)
        self._touched = _Touched(params, prompt_ids, vocab_size)
        self._bad_words, self._bad_texts = TokenSequences(bad_words, prompt_ids), bad_texts
        single = {word[0] for word in bad_words if len(word) == 1} | set(
            bad_texts.single_ids if bad_texts is not None else ()
        )
        if params.allowed_token_ids is not None:
            single |= set(range(vocab_size)).difference(params.allowed_token_ids)
        self._has_bans = bool(single) or bool(bad_words) or bad_texts is not None
        self._single = frozenset(single)  # banned everywhere
        self._single_ids = torch.tensor(sorted(single), dtype=torch.int64)  # the same, where they were last needed
        self._num_output = 0
        self._error: InputError | None = None
        self._dead: dict[tuple[int, ...], InputError] = {}  # by path: rows that had no token left
        self._unread: list[tuple[Sequence[tuple[int, ...]], Tensor]] = []  # paths, and which had none: on a device

    @property
    def error(self) -> Exception | None:
        """Why the request cannot go on: its parameters leave no token, or the grammar engine gave up."""
        self._read()
        if self._error is None and self._structure is not None:
            return self._structure.error
        return self._error

    @property
    def finished(self) -> bool:
        """Whether the structure is complete and nothing can follow."""
        return self._structure is not None and self._structure.finished

    def adjust(self, logits: Tensor, paths: Sequence[tuple[int, ...]], is_draft: bool = False) -> Tensor:
        """Logits `[n, V]` of rows that follow the committed text and `paths[i]` -> the same shape, processed.

        float32, or float64 for float64 logits; -inf for banned tokens. `logits` keeps its values; where nothing applies
        the result may be `logits` itself. A row in which no token is left keeps its logits, and ends the request once
        the text is there; not with `is_draft`, since a draft may lack a token that the target has.
        """
        assert logits.shape == (len(paths), self._vocab_size)
        raw = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
        if not paths:
            return raw
        scores = self._touched.correct(raw, paths)
        rows, ids = self._bans(paths)
        if not rows and not self._single and self._bad_texts is None and self._structure is None:
            return scores
        scores = scores.clone() if scores is raw else scores
        if self._single:
            if self._single_ids.device != raw.device:
                self._single_ids = to_device(self._single_ids, raw.device)
            scores.index_fill_(1, self._single_ids, -torch.inf)
        for row, path in enumerate(paths if self._bad_texts is not None else ()):
            for part in self._completing(path):
                scores[row, to_device(part, raw.device)] = -torch.inf
        if rows:
            where = to_device([rows, ids], raw.device)  # [2, bans]
            scores[where[0], where[1]] = -torch.inf
        if self._structure is not None:
            scores.masked_fill_(~to_device(self._structure.mask(paths), raw.device, None), -torch.inf)
        return self._revived(scores, raw, None if is_draft else paths)

    def _revived(self, scores: Tensor, raw: Tensor, paths: Sequence[tuple[int, ...]] | None) -> Tensor:
        """`scores` [n, V] with the rows of `raw` where no token is left; `paths`: those are remembered, on a device
        unread.
        """
        dead = scores.amax(-1) == -torch.inf  # [n]
        if dead.device.type == "cpu" and not bool(dead.any()):
            return scores
        if paths is not None:
            # A row that was no distribution to begin with is the model's fault, and found elsewhere.
            self._unread.append((tuple(paths), dead & raw.amax(-1).isfinite()))
            if dead.device.type == "cpu":
                self._read()
        return torch.where(dead[:, None], raw, scores)

    @property
    def unread(self) -> list[Tensor]:
        """Flags on a device, a vector for every `adjust` since they were last read: the rows that had no token left."""
        return [flags for _, flags in self._unread]

    def take(self, flags: Sequence[Sequence[float]]) -> None:
        """Take the host copies of `unread`, which whoever reads many requests' at once brings in one transfer."""
        unread, self._unread = self._unread, []
        for (paths, _), dead in zip(unread, flags, strict=True):
            self._remember([path for path, is_dead in zip(paths, dead, strict=True) if is_dead])

    def _read(self) -> None:
        if self._unread:
            self.take(to_host(*self.unread))

    def commit(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens, those that became part of the output."""
        self._read()
        tokens = tuple(tokens)
        before = self._error
        for length in range(1 + len(tokens) if self._dead else 0):
            self._error = self._error or self._dead.get(tokens[:length])
        self._dead = {path[len(tokens) :]: error for path, error in self._dead.items() if path[: len(tokens)] == tokens}
        self._num_output += len(tokens)
        self._touched.commit(tokens)
        self._bad_words.commit(tokens)
        if self._bad_texts is not None:
            self._bad_texts.commit(tokens)
        if self._structure is not None:
            self._structure.commit(tokens)
            if self._structure.finished and self._num_output < self._params.min_tokens:
                remedy = f"the structure was complete after {self._num_output} tokens; ask for no more than it needs"
                # In place of what a row behind draft tokens said of this place, where plain decoding has no row.
                self._error = before or InputError("min_tokens", self._params.min_tokens, remedy)

    def forced(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens of text that must come next; () for a choice, or when the only token is banned."""
        tokens = self._structure.forced(most) if self._structure is not None else ()
        for length, token in enumerate(tokens):
            if self._is_banned(token, tokens[:length]):
                return tokens[:length]
        return tokens

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """See `core.Processors.allowed`: the structure, and no token that other parameters ban."""
        if self._structure is None and not self._has_bans and not self._is_short(()):
            return [True] * len(tokens)
        found = [True] * len(tokens) if self._structure is None else self._structure.allowed(tokens, parents)
        paths: list[tuple[int, ...]] = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before = paths[parent] if parent >= 0 else ()
            paths.append((*before, token))
            found[node] = found[node] and (parent < 0 or found[parent]) and not self._is_banned(token, before)
        return found

    def _is_banned(self, token: int, before: tuple[int, ...]) -> bool:
        """Whether a token may not stand behind the committed text and `before`, whatever the structure says."""
        return (
            token in self._single
            or token in self._bans([before])[1]
            or any(bool((part == token).any()) for part in self._completing(before))
        )

    def _completing(self, path: tuple[int, ...]) -> list[Tensor]:
        """Tokens, in parts, that would complete a banned text behind `path`."""
        return [] if self._bad_texts is None else self._bad_texts.after(path)

    def _bans(self, paths: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """(row, token) of tokens that a longer bad word or `min_tokens` forbids behind their path, as two lists."""
        rows, ids = [], []
        for row, path in enumerate(paths):
            banned = self._bad_words.after(path) + (self._end_ids if self._is_short(path) else [])
            rows += [row] * len(banned)
            ids += banned
        return rows, ids

    def _is_short(self, path: tuple[int, ...]) -> bool:
        """Whether the output with `path` has not reached `min_tokens`."""
        return self._num_output + len(path) < self._params.min_tokens

    def _remember(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Note the rows that the request's own parameters left without a token."""
        structures = [name for name in ("json_schema", "regex", "grammar") if getattr(self._params, name) is not None]
        for path in paths:
            guilty = ["allowed_token_ids"] if self._params.allowed_token_ids is not None else []
            if self._params.bad_words and (self._single or self._bad_words.after(path) or self._completing(path)):
                guilty.append("bad_words")
            guilty += ["min_tokens"] if self._end_ids and self._is_short(path) else []
            field, *others = guilty + structures
            together = f"together with {' and '.join(others)} it" if others else "it"
            remedy = (
                f"{together} bans every token after {self._num_output + len(path)} tokens of the answer; ask for less"
            )
            self._dead[path] = InputError(field, getattr(self._params, field), remedy)
        self._error = self._error or self._dead.get(())


class _Touched:
    """Bias and penalties: a column for every token that any of them touches, U in all, grown as text is emitted."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self._repetition, self._presence, self._frequency = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        bias = {token: value for token, value in (params.logit_bias or {}).items() if value != 0}
        prompt = {token for token in prompt_ids if token < vocab_size} if self._repetition != 1 else set()
        ids = sorted(bias.keys() | prompt)
        self._counting = self._repetition != 1 or self._presence != 0 or self._frequency != 0
        self._column = {token: column for column, token in enumerate(ids)}
        self._ids = torch.tensor(ids, dtype=torch.int64)  # [U]
        self._bias = torch.tensor([bias.get(token, 0.0) for token in ids], dtype=torch.float64)  # [U]
        self._in_prompt = torch.tensor([token in prompt for token in ids], dtype=torch.bool)  # [U]
        self._counts = torch.zeros(len(ids), dtype=torch.int64)  # [U] in the output

    def correct(self, raw: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """Logits `[n, V]` with bias and penalties, each row counting its own path; `raw` if none applies."""
        flat = list(chain.from_iterable(paths)) if self._counting else []
        unseen = {token: len(self._column) + i for i, token in enumerate(sorted(set(flat) - self._column.keys()))}
        if not self._column and not unseen:
            return raw
        self._move(raw.device)
        ids, bias, in_prompt, counts = self._widened(unseen)
        counts = counts.repeat(len(paths), 1)  # [n, U]
        if flat:
            owner = [row for row, path in enumerate(paths) for _ in path]
            columns = [unseen[token] if token in unseen else self._column[token] for token in flat]
            where = to_device([owner, columns], raw.device)
            counts.index_put_((where[0], where[1]), torch.ones_like(where[0]), accumulate=True)
        scores = raw.index_select(1, ids) + bias.to(raw.dtype)  # [n, U]
        if self._repetition != 1:
            milder = torch.where(scores < 0, scores * self._repetition, scores / self._repetition)
            scores = torch.where(in_prompt | (counts > 0), milder, scores)
        if self._frequency != 0:
            scores = scores - counts.to(raw.dtype) * self._frequency
        if self._presence != 0:
            scores = scores - (counts > 0).to(raw.dtype) * self._presence
        return raw.index_copy(1, ids, scores)

    def commit(self, tokens: Sequence[int]) -> None:
        if not self._counting or not tokens:
            return
        unseen = {token: len(self._column) + i for i, token in enumerate(sorted(set(tokens) - self._column.keys()))}
        self._ids, self._bias, self._in_prompt, self._counts = self._widened(unseen)
        self._column |= unseen
        columns = to_device([self._column[token] for token in tokens], self._ids.device)
        self._counts = self._counts.index_add(0, columns, torch.ones_like(columns))

    def _widened(self, unseen: dict[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids, bias, prompt membership and counts with columns for `unseen` tokens at the end, each `[U]`."""
        held = self._ids, self._bias, self._in_prompt, self._counts
        if not unseen:
            return held
        new = to_device(list(unseen), self._ids.device)
        bias, in_prompt, counts = (torch.cat((column, column.new_zeros(len(unseen)))) for column in held[1:])
        return torch.cat((held[0], new)), bias, in_prompt, counts

    def _move(self, device: torch.device) -> None:
        if self._ids.device != device:
            self._ids, self._bias, self._in_prompt, self._counts = (
                to_device(x, device, None) for x in (self._ids, self._bias, self._in_prompt, self._counts)
            )


def make_processors(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    vocab_size: int,
    eos_token_ids: Iterable[int],
    tokenizer: Tokenizer | None = None,
    structure: Structure | None = None,
) -> RequestProcessors | None:
    """The processors of one request; None when its distribution depends on the logits, temperature and filters alone.

    Raises:
        InputError: a token of logit_bias or bad_words outside the vocabulary, a bad word that is a text where there is
        no tokenizer
            or that encodes to nothing.
    """
    for token in params.logit_bias or ():
        if token >= vocab_size:
            raise InputError("logit_bias", token, f"token ids go from 0 to {vocab_size - 1}")
    words, texts = split_words(params.bad_words, vocab_size, tokenizer)
    end_ids = {token for token in eos_token_ids if token < vocab_size} if params.min_tokens else set()
    penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    bans = words or texts or end_ids or params.allowed_token_ids is not None
    if not (any((params.logit_bias or {}).values()) or penalised or bans or structure is not None):
        return None
    return RequestProcessors(params, prompt_ids, vocab_size, end_ids, words, structure, texts)
