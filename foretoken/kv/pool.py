"""The tensors behind the block tables: keys and values of every layer, one slot per token."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import CapacityError
from foretoken.kernels.launches import launches_for
from foretoken.machine.memory import group_memory
from foretoken.transfer import to_device


def largest_cache_bytes(device: torch.device) -> int | None:
    """Most bytes that a cache on `device` could hold; None if the system does not say.

    A GPU's cache is allocated at once, so the limit is the memory that is free now. A CPU's takes memory only as it
    fills, and what is free then is not known yet: the limit is all the memory of the machine, of a control group, or of
    this process's address space, whichever is least. A larger cache could never be filled.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = (_physical_bytes(), *(group.limit for group in group_memory()), _address_space_bytes())
    return min((limit for limit in known if limit is not None), default=None)


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _address_space_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


_CACHE_LINE = 64


class KVPool:
    """`keys` and `values`: one `[G, S, K]` tensor per layer (G key/value heads, S slots, K head_dim) of `dtype`, which
    may be narrower than the rows that are written.

    Raises:
        CapacityError: no memory for them.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        num_slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_kv_heads, num_slots, head_dim)
        try:
            self.keys = [_zeros(shape, dtype, device) for _ in range(num_layers)]  # each [G, S, K]
            self.values = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = num_slots * bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)
            raise CapacityError(
                f"no memory for a cache of {num_slots:,} tokens ({size / 2**30:,.1f} GiB); give a smaller cache_tokens"
            ) from error

    @property
    def dtype(self) -> torch.dtype:
        """The format of keys and values."""
        return self.keys[0].dtype

    @property
    def num_slots(self) -> int:
        """S."""
        return self.keys[0].shape[1]

    @functools.cached_property
    def addresses(self) -> tuple[Any, Any]:
        """Where keys and values of each layer begin, as two arrays for compiled code."""
        keys, values = ([tensor.data_ptr() for tensor in some] for some in (self.keys, self.values))
        return (ctypes.c_void_p * len(keys))(*keys), (ctypes.c_void_p * len(values))(*values)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` [T, G, K] in `slots` [T]."""
        launches = launches_for(key)
        if launches is not None:
            launches.write(key, value, (self.keys[layer], self.values[layer]), slots)
            return
        self.keys[layer].index_copy_(1, slots, key.transpose(0, 1).to(self.dtype))
        self.values[layer].index_copy_(1, slots, value.transpose(0, 1).to(self.dtype))

    def read(self, layer: int, slots: range | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[G, C, K]` of `slots`: a view of an unbroken run, otherwise a gathered copy."""
        if isinstance(slots, range):
            return self.keys[layer].narrow(1, slots.start, len(slots)), self.values[layer].narrow(
                1, slots.start, len(slots)
            )
        return self.keys[layer].index_select(1, slots), self.values[layer].index_select(1, slots)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy slots within every layer; all sources are read before any destination is written."""
        if not sources:
            return
        source, destination = to_device([sources, destinations], self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(1, destination, tensor.index_select(1, source))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on a CPU, take memory only where something is written, in small pages: a token is written for every
    head of every layer, and a large page of 2 MB for each of those would be a GB for the first token of some models.

    Raises:
        MemoryError: the system does not give so much address space.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows: numpy's zeros come untouched from the system, torch's do not
        raw = torch.from_numpy(np.zeros(size + _CACHE_LINE, dtype=np.uint8))
        start = -raw.data_ptr() % _CACHE_LINE
        return raw[start : start + size].view(dtype).view(shape)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # keeps the mapping


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one slot over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
