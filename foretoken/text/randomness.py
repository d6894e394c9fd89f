"""The only source of randomness.

Random numbers are counter-based. Those of a round are a pure function of (request seed, purpose, committed tokens when
the round began, index inside the round); the noise of the coupled rule of (request seed, absolute position, token).
What a request draws therefore never depends on its neighbours, and no two draws share a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core import Draft, RaceRows, Uniforms
from foretoken.kernels.sampling import runs_on, sampling_kernel
from foretoken.transfer import to_device


class Purpose(IntEnum):
    """What a random number decides; each purpose has its own stream."""

    DRAFT = 0  # which token a drafter proposes
    ACCEPT = 1  # whether a proposed token stands
    NEXT = 2  # the token that ends the round
    COIN = 3  # whether a position is drafted at all
    RACE = 4  # the noise of the coupled rule
    SAMPLE = 5  # the seeds of further answers to one prompt
    SHADOW = 6  # which finished requests are scored again
    SEARCH = 7  # which neighbour a search tries next
    INNER = 8  # what the levels of a cascade draw and accept among themselves


_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)  # [10, 2, 1]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 32-bit words, counter [4, n],
    key [2, n] -> [4, n].
    """
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _KEY_STEPS) & _LOW:
        product = even * _MULTIPLIERS  # 32 x 32 bits fit into 64
        even, odd = (product >> _HALF)[::-1] ^ odd ^ round_key, (product & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(
    seeds: Sequence[int], purpose: Purpose, round_starts: Sequence[int], indices: Sequence[int]
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, one per (seed, round start, index): three sequences of n -> [n].

    `seeds` are 64-bit. `round_starts` are the committed tokens when the round began, so that a position drafted again
    in a later round gets fresh numbers. The value can never round to 1.
    """
    return _uniforms(seeds, [int(purpose)] * len(seeds), round_starts, indices)


def round_uniforms(
    draft: Draft, seeds: Sequence[int], round_starts: Sequence[int], device: torch.device | str = "cpu"
) -> Uniforms:
    """The numbers a rule needs in one round: `seeds` [B] and `round_starts` [B] -> one per node and one per request."""
    assert len(seeds) == len(round_starts) == draft.num_requests
    owner = [b for b, length in enumerate(draft.lengths) for _ in range(length)] + list(range(draft.num_requests))
    indices = [node for length in draft.lengths for node in range(length)] + [0] * draft.num_requests
    purposes = [int(Purpose.ACCEPT)] * draft.num_nodes + [int(Purpose.NEXT)] * draft.num_requests
    made = _uniforms([seeds[b] for b in owner], purposes, [round_starts[b] for b in owner], indices)
    numbers = to_device(torch.from_numpy(made), device, None)
    return Uniforms(numbers[: draft.num_nodes], numbers[draft.num_nodes :])


def _uniforms(
    seeds: Sequence[int], purposes: Sequence[int], round_starts: Sequence[int], indices: Sequence[int]
) -> NDArray[np.float64]:
    """One number per column of (seed; index, round start, purpose): four sequences of n -> [n]."""
    kernel = sampling_kernel()
    if kernel is not None:
        return kernel.uniforms(np.array([seeds, indices, round_starts, purposes], dtype=np.uint64))
    wide = np.array(seeds, dtype=np.uint64)
    counter = np.array([indices, round_starts, purposes, [0] * len(seeds)], dtype=np.uint64)
    words = philox4x32(counter, np.stack((wide & _LOW, wide >> _HALF)))
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))  # 27 + 26 bits
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


class RaceNoise:
    """Exp(1) noise of one request for the coupled rule: a number per token, the same at a position whoever asks.

    Noise that was made is kept from drafting to verification; `forget` drops what is committed.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._seed, self._vocab_size, self._device = seed, vocab_size, torch.device(device)
        self._rows: dict[int, Tensor] = {}

    @property
    def key(self) -> tuple[int, int]:
        """The two words that key its random numbers."""
        return self._seed, int(Purpose.RACE)

    def rows(self, positions: Sequence[int]) -> Tensor | RaceRows:
        """See `core.Noise`: left to the compiled race where that runs, else made as in `at`."""
        return RaceRows(self, tuple(positions)) if runs_on(self._device) else self.at(positions)

    def at(self, positions: Sequence[int]) -> Tensor:
        """Noise `[n, V]` float32 for the tokens at absolute `positions` of the text."""
        for position in positions:
            if position not in self._rows:
                made = race_noise(self._seed, position, self._vocab_size)
                self._rows[position] = to_device(torch.from_numpy(made), self._device, None)
        return torch.stack([self._rows[position] for position in positions])

    def forget(self, before: int) -> None:
        """Drop positions below `before`."""
        self._rows = {position: row for position, row in self._rows.items() if position >= before}


def race_noise(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """Exp(1) noise `[V]` of one position: numpy's Philox4x64 keyed by the seed, its counter by the position.

    Only raw words are used, whose stream numpy promises never to change.
    """
    words = _philox(seed, Purpose.RACE, position).random_raw(vocab_size)
    middle = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0, never 1
    return -np.log(middle).astype(np.float32)


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer `index` to one prompt; answer 0 keeps the request's own."""
    if index == 0:
        return seed
    return int(_philox(seed, Purpose.SAMPLE, index).random_raw())


def _philox(seed: int, purpose: Purpose, place: int) -> np.random.Philox:
    key = np.array([seed, int(purpose)], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, place, 0], dtype=np.uint64))
