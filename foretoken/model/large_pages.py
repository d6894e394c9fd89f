"""Memory for what every step reads from end to end, in large pages where the system has them.

A page of 4 KB ends a prefetcher's run and costs a walk through the page table; weights in pages of 2 MB are read about
a fifth faster. Linux gives them on request (`madvise`); elsewhere, and for small tensors, this is ordinary memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_PAGE_BYTES = 2**21


def large_page_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the CPU that is not filled, on a page's boundary if it takes at least one large page."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping until the last tensor of it is gone
        start = -whole.data_ptr() % LARGE_PAGE_BYTES
        # Whole pages only: one that the end fills in part would be resident all the same.
        memory.madvise(mmap.MADV_HUGEPAGE, start, size - size % LARGE_PAGE_BYTES)
    except OSError:  # a system built without large pages, or no memory, which the next line reports
        return torch.empty(shape, dtype=dtype)
    return whole[start : start + size].view(dtype).view(shape)
