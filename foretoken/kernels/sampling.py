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
from torch import Tensor

from foretoken.kernels.build import loaded, opened

SOURCE = Path(__file__).resolve().parent / "sampling.cpp"
_INTERFACE = 2  # of the compiled library: what its functions take


class Choice(ctypes.Structure):
    """`foretoken_choice`: how a row is sampled."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("best", "top_k")),
        *((name, ctypes.c_float) for name in ("temperature", "dropped", "min_p")),
    )


@dataclass(frozen=True)
class SamplingKernel:
    """The functions of a compiled library; tensors are on the CPU, each row is on its own."""

    library: ctypes.CDLL

    def top_two(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `text.sampling.top_two`: float32 or bfloat16 logits [R, V] -> places [R] of the largest, and the two
        largest [2, R] in float32.
        """
        logits = logits.contiguous()
        places, tops = torch.empty(len(logits), dtype=torch.int64), torch.empty(2, len(logits))
        is_bf16, threads = logits.dtype == torch.bfloat16, torch.get_num_threads()
        pointers = (places.data_ptr(), tops.data_ptr())
        self.library.foretoken_top_two(logits.data_ptr(), *logits.shape, *pointers, is_bf16, threads)
        return places, tops

    def distributions(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        """See `text.sampling.target_probs`: float32 logits [R, V], a choice for each row -> [R, V].

        Raises:
            MemoryError: no memory for the tokens that filters keep.
        """
        logits = logits.contiguous()
        out, rows = torch.empty_like(logits), (Choice * len(choices))(*choices)
        self._call("distributions", logits.data_ptr(), rows, *logits.shape, out.data_ptr())
        return out

    def race(self, weights: Tensor, keys: Sequence[tuple[int, int, int]]) -> Tensor:
        """See `verify.race_winners`: float32 weights [R, V], two words of a key and a position for each row -> ids [R].

        Raises:
            MemoryError: no memory for the leaders of the pieces.
        """
        weights = weights.contiguous()
        words = np.array(keys, dtype=np.uint64).reshape(-1, 3)
        winners = torch.empty(len(weights), dtype=torch.int64)
        assert len(words) == len(weights)
        self._call("race", weights.data_ptr(), words.ctypes.data, *weights.shape, winners.data_ptr())
        return winners

    def draw(self, weights: Tensor, u: Tensor) -> Tensor:
        """See `verify.draw`: float32 weights [B, V], float64 numbers [B] -> ids [B].

        Raises:
            MemoryError: no memory for the sums of parts of a row.
        """
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
    """The kernel of the compiled library `path`.

    Raises:
        BuildError: it cannot be loaded here, or is none of ours.
    """
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library = opened(path, "foretoken_sampling_interface", _INTERFACE)
    for name in ("distributions", "race", "draw"):
        function = getattr(library, f"foretoken_{name}")
        function.argtypes, function.restype = (pointer, pointer, number, number, pointer, small), ctypes.c_bool
    top_two = library.foretoken_top_two
    top_two.argtypes, top_two.restype = (pointer, number, number, pointer, pointer, small, small), None
    return SamplingKernel(library)
