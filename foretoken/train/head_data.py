"""Windows of token ids for the training of heads, with a mask of the tokens that the target will have to write."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.errors import InputError

_MIN_WINDOW = 64  # tokens that a batch is not cut below, so that every place of a draft has a row
_Window = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class TokenText:
    """Documents laid end to end: `ids` [N], `wanted` [N], and where each begins and ends, `bounds` [M + 1].

    A document is a prompt with its answer, or a whole corpus of running text, whose windows then begin anywhere.
    """

    ids: npt.NDArray[np.int32]
    wanted: npt.NDArray[np.bool_]
    bounds: npt.NDArray[np.int64]

    @staticmethod
    def running(ids: npt.NDArray[np.uint16]) -> TokenText:
        """Running text: one document, every token of which is wanted."""
        return TokenText(ids.astype(np.int32), np.ones(len(ids), dtype=np.bool_), np.array([0, len(ids)]))

    @staticmethod
    def answered(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TokenText:
        """Prompts with their answers, of which only the answers are wanted."""
        ids = [np.array([*prompt, *answer], dtype=np.int32) for prompt, answer in pairs]
        wanted = [np.arange(len(prompt) + len(answer)) >= len(prompt) for prompt, answer in pairs]
        bounds = np.cumsum([0, *map(len, ids)])
        empty = np.empty(0, dtype=np.int32)
        masks = np.concatenate([empty.astype(np.bool_), *wanted])
        return TokenText(np.concatenate([empty, *ids]), masks, bounds.astype(np.int64))

    @cached_property
    def num_wanted(self) -> int:
        """Tokens that the target has to write."""
        return int(self.wanted.sum())

    @cached_property
    def digest(self) -> str:
        """A name of the content."""
        parts = (self.ids.tobytes(), self.wanted.tobytes(), self.bounds.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def counts(self, vocab_size: int) -> Tensor:
        """How often each token of the target is wanted, `[V]`."""
        return torch.from_numpy(np.bincount(self.ids[self.wanted], minlength=vocab_size))

    def window(self, number: int, length: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Window `number`: `[length + 1]` ids and their mask, a function of (seed, number) alone.

        A document is drawn by its wanted tokens. It is read from its beginning, as the target will, unless it is longer
        than the window; a shorter one is padded with tokens that nobody wants.
        """
        rng = np.random.default_rng((seed, number))
        place = rng.integers(0, self.num_wanted)
        document = int(np.searchsorted(self._cumulated[1:], place, side="right"))
        start, stop = int(self.bounds[document]), int(self.bounds[document + 1])
        if stop - start > length + 1:
            start += int(rng.integers(0, stop - start - length))
        ids, wanted = np.zeros(length + 1, dtype=np.int64), np.zeros(length + 1, dtype=np.bool_)
        count = min(length + 1, stop - start)
        ids[:count], wanted[:count] = self.ids[start : start + count], self.wanted[start : start + count]
        return ids, wanted

    def batch(self, numbers: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Windows `numbers`: tokens and mask, each `[B, S + 1]`, cut behind the last token that is wanted: S is at most
        `length`, and short answers are not computed with their padding.
        """
        return _stacked([self.window(number, length, seed) for number in numbers])

    @cached_property
    def _cumulated(self) -> npt.NDArray[np.int64]:
        """Wanted tokens before each bound, `[M + 1]`."""
        return np.concatenate([[0], np.cumsum(self.wanted)])[self.bounds]


def _stacked(windows: Sequence[_Window]) -> tuple[Tensor, Tensor]:
    """Windows of one length as tokens and mask, cut behind the last token that is wanted."""
    tokens, wanted = np.stack([ids for ids, _ in windows]), np.stack([wanted for _, wanted in windows])
    used = np.flatnonzero(wanted.any(axis=0))
    stop = max(_MIN_WINDOW, int(used[-1]) + 1) if len(used) else tokens.shape[1]
    return torch.from_numpy(tokens[:, :stop]), torch.from_numpy(wanted[:, :stop])


class Batches:
    """Batches of `num_windows` windows of `text`, each a function of its number and `seed` alone.

    With a `group` above 1 the windows of so many batches are sorted by length and dealt out again: a batch then has
    windows of similar length, as many of them as make about its share of the group's tokens, and little padding.
    """

    def __init__(self, text: TokenText, num_windows: int, length: int, seed: int, group: int = 1) -> None:
        self.text, self.num_windows, self.length, self.seed, self.group = text, num_windows, length, seed, group
        self._group: tuple[int, list[tuple[list[_Window], float]]] | None = None  # the last one, and its number

    def at(self, number: int) -> tuple[Tensor, Tensor, float]:
        """Tokens and mask of batch `number`, each [B, S + 1], and its weight: the tokens that it wants over the mean of
        its group, so that every token of the group counts alike.
        """
        if self.group == 1:
            numbers = range(number * self.num_windows, (number + 1) * self.num_windows)
            return *self.text.batch(numbers, self.length, self.seed), 1.0
        place, part = divmod(number, self.group)
        if self._group is None or self._group[0] != place:
            self._group = place, self._dealt(place)
        windows, weight = self._group[1][part]
        return *_stacked(windows), weight

    def _dealt(self, place: int) -> list[tuple[list[_Window], float]]:
        """The windows of group `place`, by batch, and weights; the batches are in an order drawn at random."""
        count = self.group * self.num_windows
        drawn = [self.text.window(place * count + one, self.length, self.seed) for one in range(count)]
        masks = np.stack([mask for _, mask in drawn])  # [N, length + 1]
        wanted = masks.sum(1)
        used = np.where(wanted > 0, masks.shape[1] - masks[:, ::-1].argmax(1), 1)
        order = np.argsort(used, kind="stable")
        before = np.cumsum(used[order])
        ends = np.searchsorted(before, before[-1] * np.arange(1, self.group) / self.group) + 1
        steps = np.arange(1, self.group)
        ends = np.clip(np.maximum.accumulate(ends - steps) + steps, steps, count - self.group + steps)  # none is empty
        parts = np.split(order, ends)
        shuffled = np.random.default_rng((self.seed, place, self.group)).permutation(self.group)
        mean = max(1.0, float(wanted.sum())) / self.group
        return [([drawn[one] for one in parts[part]], float(wanted[parts[part]].sum()) / mean) for part in shuffled]


@dataclass(frozen=True)
class HeadData:
    """Text to train on and text held out, and in words where both are from."""

    train: TokenText
    held_out: TokenText
    source: str

    def __post_init__(self) -> None:
        for name, text in (("train", self.train), ("held_out", self.held_out)):
            if not text.num_wanted:
                raise InputError(name, 0, f"no token of {self.source} is to be written by the target; give more text")


def split_documents(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], source: str, held_out_share: float = 0.05
) -> HeadData:
    """Every n-th document is held out, with all that equal it.

    Raises:
        InputError: fewer than two differ.
    """
    with_answer = [(tuple(prompt), tuple(answer)) for prompt, answer in pairs if answer]
    places = {pair: place for place, pair in enumerate(dict.fromkeys(with_answer))}
    if len(places) < 2:
        remedy = "training needs at least two answers that differ, one of them held out"
        raise InputError("answers", len(places), remedy)
    every = max(2, min(len(places), round(1 / held_out_share)))
    held_out = [pair for pair in with_answer if places[pair] % every == every - 1]
    train = [pair for pair in with_answer if places[pair] % every != every - 1]
    return HeadData(TokenText.answered(train), TokenText.answered(held_out), source)
