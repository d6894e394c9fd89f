"""Sampling compiled for the CPU: `sampling.cpp`.

Torch's operations, in `text/sampling.py` and `verify`, do the same on other devices, in other formats and where nothing
can be compiled; results are equal up to the last bits of an exponential or a sum.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.kernels.build import loaded, opened

SOURCE = Path(__file__).resolve().parent / "sampling.cpp"
_INTERFACE = 4  # of the compiled library: what its functions take


RaceKey = tuple[int, int, int]  # two words of a key and a position


class Choice(ctypes.Structure):
    """`foretoken_choice`: how a row is sampled."""

    _fields_ = (
        ("top_k", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("temperature", "dropped", "min_p")),
    )


class _ChainsIn(ctypes.Structure):
    """`foretoken_chains_in`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("requests", "size")),
        *((name, ctypes.c_void_p) for name in ("choices", "best", "offsets", "tokens", "accept", "next")),
    )


class _ChainsOut(ctypes.Structure):
    """`foretoken_chains_out`."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("rows", "next_tokens", "probabilities"))


class _CoupledIn(ctypes.Structure):
    """`foretoken_coupled_in`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("requests", "size")),
        *((name, ctypes.c_void_p) for name in ("choices", "best", "starts", "parents", "tokens", "keys")),
    )


@dataclass(frozen=True)
class SamplingKernel:
    """The functions of a compiled library; tensors are on the CPU, each row is on its own.

    Raises:
        MemoryError: no memory for what lies between two operations.
    """

    library: ctypes.CDLL

    def top_two(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `text.sampling.top_two`: float32 or bfloat16 logits [R, V] -> places [R] of the largest, and the two
        largest [2, R] in float32.
        """
        logits = logits.contiguous()
        places, tops = torch.empty(len(logits), dtype=torch.int64), torch.empty(2, len(logits), dtype=torch.float32)
        is_bf16, threads = logits.dtype == torch.bfloat16, torch.get_num_threads()
        pointers = (places.data_ptr(), tops.data_ptr())
        self.library.foretoken_top_two(logits.data_ptr(), *logits.shape, *pointers, is_bf16, threads)
        return places, tops

    def distributions(self, logits: Tensor, choices: Sequence[Choice], best: Tensor | None = None) -> Tensor:
        """See `text.sampling.target_probs`: float32 or bfloat16 logits [R, V], a choice for each row -> float32 [R, V].

        `best` [R] is the argmax of each row, needed where a temperature is 0.
        """
        logits = logits.contiguous()
        best = None if best is None else best.contiguous()
        out, rows = torch.empty(logits.shape, dtype=torch.float32), (Choice * len(choices))(*choices)
        place = 0 if best is None else best.data_ptr()
        is_bf16 = logits.dtype == torch.bfloat16
        self._call("distributions", logits.data_ptr(), rows, place, *logits.shape, out.data_ptr(), is_bf16)
        return out

    def chains(
        self,
        logits: Tensor,
        choices: Sequence[Choice],
        best: Tensor,
        offsets: Sequence[int],
        tokens: Tensor,
        accept: Tensor,
        following: Tensor,
    ) -> tuple[list[int], list[int], list[float]]:
        """See `engine.from_logits`: float32 or bfloat16 logits [R, V], a choice and the argmax [R] of each row, draft
        tokens [N] (those of request b from offsets[b] to offsets[b + 1]), float64 numbers [N] and [B] -> the row where
        each round ends, the token drawn there, both [B], and the probability of accepting each node [N].
        """
        logits, best, tokens = logits.contiguous(), best.contiguous(), tokens.contiguous()
        accept, following = accept.contiguous(), following.contiguous()
        num_requests, starts, laws = len(following), np.array(offsets, np.int64), (Choice * len(choices))(*choices)
        assert len(logits) == len(choices) == len(best) == num_requests + len(tokens)
        assert best.dtype == tokens.dtype == torch.int64
        assert accept.dtype == following.dtype == torch.float64
        given = (ctypes.addressof(laws), best.data_ptr(), starts.ctypes.data, tokens.data_ptr(), accept.data_ptr())
        ends, chances = np.empty((2, num_requests), np.int64), np.empty(len(tokens), np.float32)
        chains = _ChainsIn(num_requests, logits.shape[-1], *given, following.data_ptr())
        found = _ChainsOut(ends[0].ctypes.data, ends[1].ctypes.data, chances.ctypes.data)
        is_bf16 = logits.dtype == torch.bfloat16
        self._call("chains", logits.data_ptr(), ctypes.byref(chains), ctypes.byref(found), is_bf16)
        rows, next_tokens = ends.tolist()
        return rows, next_tokens, chances.tolist()

    def coupled(
        self,
        logits: Tensor,
        choices: Sequence[Choice],
        best: Tensor,
        starts: Sequence[int],
        parents: Sequence[int],
        tokens: Sequence[int],
        keys: Sequence[RaceKey],
    ) -> list[int]:
        """See `engine.from_logits`: float32 or bfloat16 logits [R, V] (those of request b from starts[b] to
        starts[b + 1], its anchor first), and of each row a choice, the argmax, the row of its parent and its token (-1
        for an anchor), the key of its race -> the winner of each row [R], -1 where the round does not come.
        """
        logits, best = logits.contiguous(), best.contiguous()
        assert len(logits) == len(choices) == len(best) == len(parents) == len(tokens) == len(keys) == starts[-1]
        assert best.dtype == torch.int64
        laws, words = (Choice * len(choices))(*choices), np.array(keys, dtype=np.uint64).reshape(-1, 3)
        nodes, firsts = np.array((parents, tokens), np.int64), np.array(starts, np.int64)
        winners = np.empty(len(choices), np.int64)
        given = (ctypes.addressof(laws), best.data_ptr(), firsts.ctypes.data, nodes[0].ctypes.data)
        drafts = _CoupledIn(len(starts) - 1, logits.shape[-1], *given, nodes[1].ctypes.data, words.ctypes.data)
        is_bf16 = logits.dtype == torch.bfloat16
        self._call("coupled", logits.data_ptr(), ctypes.byref(drafts), winners.ctypes.data, is_bf16)
        found: list[int] = winners.tolist()
        return found

    def uniforms(self, words: NDArray[np.uint64]) -> NDArray[np.float64]:
        """See `text.randomness.uniforms`: seeds, indices, round starts and purposes [4, n] -> [n]."""
        words = np.ascontiguousarray(words)
        out = np.empty(words.shape[1])
        self.library.foretoken_uniforms(words.ctypes.data, words.shape[1], out.ctypes.data)
        return out

    def race(self, weights: Tensor, keys: Sequence[RaceKey]) -> Tensor:
        """See `verify.race_winners`: float32 weights [R, V], a key's words and a position for each row -> ids [R]."""
        weights = weights.contiguous()
        words = np.array(keys, dtype=np.uint64).reshape(-1, 3)
        winners = torch.empty(len(weights), dtype=torch.int64)
        assert len(words) == len(weights)
        self._call("race", weights.data_ptr(), words.ctypes.data, *weights.shape, winners.data_ptr())
        return winners

    def draw(self, weights: Tensor, u: Tensor) -> Tensor:
        """See `verify.draw`: float32 weights [B, V], float64 numbers [B] -> ids [B]."""
        weights, u = weights.contiguous(), u.contiguous()
        tokens = torch.empty(len(weights), dtype=torch.int64)
        self._call("draw", weights.data_ptr(), u.data_ptr(), *weights.shape, tokens.data_ptr())
        return tokens

    def _call(self, name: str, *arguments: object) -> None:
        if not getattr(self.library, f"foretoken_{name}")(*arguments, torch.get_num_threads()):
            raise MemoryError(f"no memory to sample from {name}; run fewer requests at a time")


def kernel_for(rows: Tensor, dtypes: Collection[torch.dtype] = (torch.float32,)) -> SamplingKernel | None:
    """The kernel, if it can take `rows` here: numbers of these formats on a CPU that no gradient is wanted of."""
    if rows.dtype not in dtypes or rows.device.type != "cpu" or rows.requires_grad:
        return None
    return sampling_kernel()


def runs_on(device: torch.device) -> bool:
    """Whether the kernel takes what lies on `device`."""
    return device.type == "cpu" and sampling_kernel() is not None


@functools.cache
def sampling_kernel() -> SamplingKernel | None:
    """The compiled kernel, None where there is none (the first time with a warning)."""
    return loaded(SOURCE, load, "tokens are sampled by torch's own operations, slower")


def load(path: Path) -> SamplingKernel:
    """The kernel of the compiled library `path`."""
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library = opened(path, "foretoken_sampling_interface", _INTERFACE)
    distributions, chains, coupled, uniforms = (
        getattr(library, f"foretoken_{name}") for name in ("distributions", "chains", "coupled", "uniforms")
    )
    distributions.argtypes = (pointer, pointer, pointer, number, number, pointer, small, small)
    chains.argtypes = coupled.argtypes = (pointer, pointer, pointer, small, small)
    distributions.restype = chains.restype = coupled.restype = ctypes.c_bool
    uniforms.argtypes, uniforms.restype = (pointer, number, pointer), None
    for name in ("race", "draw"):
        function = getattr(library, f"foretoken_{name}")
        function.argtypes, function.restype = (pointer, pointer, number, number, pointer, small), ctypes.c_bool
    top_two = library.foretoken_top_two
    top_two.argtypes, top_two.restype = (pointer, number, number, pointer, pointer, small, small), None
    return SamplingKernel(library)
