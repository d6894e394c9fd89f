"""Many draft tokens of a trained head in one call: `foretoken_draft_chain` of `kernels/draft.cpp`.

A pass of a small head takes less time than the calls of Python and torch around it. Where all that a head computes has
a kernel, these call one another: output matrix, largest logit, embedding, layers. What they compute is what they
compute when Python calls them, bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.kernels.build import loaded, opened
from foretoken.model.layer_pass import PassFields
from foretoken.model.layers import Embedding, RMSNorm
from foretoken.model.matrices import grouped_kernel
from foretoken.model.matrices.dense import ProductFields, array_of
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.paged_cache import PagedCache
from foretoken.model.row_kernels import FLAGS, NormFields, RowKernels

SOURCE = Path(__file__).resolve().parent.parent / "kernels" / "draft.cpp"
_INTERFACE = 3  # of the compiled library: what its function takes


class RequestFields(ctypes.Structure):
    """`foretoken_chain_request`."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first_slot", "num_past", "num_text", "num_tokens")),
    )


class TableFields(ctypes.Structure):
    """`foretoken_table`."""

    _fields_ = (("read", ctypes.c_void_p), ("table", ctypes.c_void_p))


class NormCall(ctypes.Structure):
    """`foretoken_norm_call`."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("weights", NormFields),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        ("is_layer", ctypes.c_int32),
    )

    @classmethod
    def of(cls, norm: RMSNorm | None, kernels: RowKernels) -> NormCall:
        """`norm`, which lives on, in the format of the rows; None: there is none."""
        if norm is None:
            return cls()
        run = address_of(kernels.library.foretoken_norm)
        return cls(run, NormFields.of(norm.weight, norm.bias), norm.eps, norm.offset, False)


class ChainFields(ctypes.Structure):
    """`foretoken_chain`."""

    _fields_ = (
        ("run_layers", ctypes.c_void_p),
        ("layers", PassFields),
        *((name, NormCall) for name in ("norm", "embedding_norm", "feature_norm")),
        *((name, ProductFields) for name in ("join", "output")),
        ("embedding", TableFields),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "vocabulary", "requests", "text", "features", "tokens")),
        *((name, ctypes.c_int32) for name in ("num_requests", "feeds_normed")),
    )


class Reach(NamedTuple):
    """One request of a chain: where its rows are, how many of them the cache holds, how many rows of its text come
    behind them, and how many tokens it drafts.
    """

    slots: range | Tensor
    num_past: int
    num_text: int
    num_tokens: int

    @property
    def fields(self) -> RequestFields:
        """As the kernel takes it."""
        counts = (self.num_past, self.num_text, self.num_tokens)
        if isinstance(self.slots, range):
            return RequestFields(None, self.slots.start, *counts)
        return RequestFields(self.slots.data_ptr(), 0, *counts)

    @property
    def num_rows(self) -> int:
        """Rows of the request in the end; the last token is not run."""
        return self.num_past + self.num_text + self.num_tokens - 1


def reach(cache: PagedCache, sequence: int, num_text: int, num_tokens: int) -> Reach:
    """A request that drafts `num_tokens` behind `num_text` rows that `cache` does not hold yet.

    Raises:
        CapacityError: no room for its rows.
    """
    slots = cache.room_behind(sequence, num_text + num_tokens - 1).index
    return Reach(slots, cache.length(sequence), num_text, num_tokens)


def draft_chain(
    library: ctypes.CDLL, fields: ChainFields, text: Tensor, features: Tensor, requests: Sequence[Reach]
) -> Tensor:
    """Run the rows of all texts, `text` [T] int64 with `features` [T, D], and draft the tokens of all `requests`, one
    behind the other, int64.

    Raises:
        MemoryError: no memory for what lies between two operations.
    """
    assert len(text) == len(features) == sum(one.num_text for one in requests)
    text, features = text.contiguous(), features.contiguous()
    own = array_of(RequestFields, [one.fields for one in requests])
    tokens = torch.empty(sum(one.num_tokens for one in requests), dtype=torch.int64)
    fields.requests, fields.num_requests = ctypes.addressof(own), len(requests)
    fields.text, fields.features, fields.tokens = text.data_ptr(), features.data_ptr(), tokens.data_ptr()
    fields.layers.threads = torch.get_num_threads()
    if not library.foretoken_draft_chain(ctypes.byref(fields)):
        raise MemoryError(f"no memory to draft for {len(requests)} requests; run fewer at a time")
    return tokens


def table_fields(embedding: Embedding, dtype: torch.dtype) -> TableFields | None:
    """How rows of a table, which lives on, are read as `dtype`; None where only torch reads them so."""
    packed, weight = embedding.packed, embedding.weight
    if weight is not None:
        is_plain = weight.dtype == dtype and weight.device.type == "cpu" and weight.is_contiguous()
        return TableFields(None, weight.data_ptr()) if is_plain else None
    compiled = grouped_kernel.kernel()
    if compiled is None or not isinstance(packed, GroupedWeight) or packed.dtype != dtype or packed.product is None:
        return None
    return TableFields(address_of(compiled.rows), ctypes.addressof(packed.product.parts))


def address_of(function: Callable[..., Any]) -> int | None:
    """Where a function of a compiled library begins."""
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]


@functools.cache
def chain_library() -> ctypes.CDLL | None:
    """The compiled library, None where there is none (the first time with a warning)."""
    return loaded(SOURCE, load, "heads draft with a call for each pass, slower", FLAGS)


def load(path: Path) -> ctypes.CDLL:
    """The compiled library `path`."""
    library = opened(path, "foretoken_draft_interface", _INTERFACE)
    library.foretoken_draft_chain.argtypes, library.foretoken_draft_chain.restype = (ctypes.c_void_p,), ctypes.c_bool
    return library
