"""CUDA graphs where there is no device: a step is recorded as operations on tensors, and replayed on the same memory.

What the Python of a step decides, and every tensor that it makes, is frozen as a graph freezes it: a replay runs the
recorded operations over the recorded tensors, and nothing else. What a capture forbids is refused: reads by the host,
shapes and branches that depend on numbers, tensors made from numbers of the host, random numbers.

The attention kernel is one operation here, a twin of `kernels.paged_triton.attend` over the same work list, tile by
tile and part by part, padding included; what no tile writes is NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, List, Optional  # noqa: UP035 - what torch.library reads
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretoken import transfer
from foretoken.kernels import paged_work
from foretoken.kernels.paged_work import MERGE_FIELDS, SEGMENT_FIELDS, TILE_FIELDS, PagedWork, tile_lines
from foretoken.model import expert_launches, paged_cache
from foretoken.model.attention import fused
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.graphs import cache, choice
from foretoken.model.graphs.cache import Capture, Step
from tests.helpers import emulated_experts

NAN = float("nan")
_READS = ("tolist", "numpy", "data_ptr")  # that no operator stands for
_to_list = Tensor.tolist


class NotCapturable(AssertionError):
    """A CUDA graph cannot hold this, or would hold something else."""


class Recorder(TorchDispatchMode):
    """Keeps every operation with its tensors; `inputs` are those that no operation made, by their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor]]] = []
        self.inputs: dict[int, Tensor] = {}
        self.overwritten: list[tuple[Tensor, Tensor]] = []  # inputs, and what stood in them
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:  # under inference mode, operators that consist of others arrive whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        _check(func, given)
        for tensor in given:
            if memory_of(tensor) not in self._made:
                self.inputs[memory_of(tensor)] = tensor
        if func._schema.is_mutable:
            self.overwritten += [(args[0], args[0].clone())] if memory_of(args[0]) in self.inputs else []
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._made.update(memory_of(tensor) for tensor in made if memory_of(tensor) not in self.inputs)
        self.operations.append((func, args, kwargs, made))
        return out


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _check(func: Any, given: Sequence[Tensor]) -> None:
    by_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given)
    if func is torch.ops.aten.index.Tensor and not by_mask:
        return
    refused = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
    if refused & set(func.tags):
        raise NotCapturable(f"{func} depends on numbers")
    if func is torch.ops.aten.lift_fresh.default and given[0].dim():
        raise NotCapturable("a tensor is made of numbers of the host")


class EmulatedCapture:
    """Stands in for `CudaCapture`; `graphs` are the recorders of all captures."""

    def __init__(self, *_: object) -> None:
        self.graphs: list[Recorder] = []
        self.num_replays = 0

    def __call__(self, step: Step) -> Step:
        if not self.graphs:
            step()  # the warm-up
        recorder = Recorder()
        with no_reads(), recorder:
            step()
        for tensor, before in reversed(recorder.overwritten):  # a capture computes nothing
            tensor.copy_(before)
        self.graphs.append(recorder)
        return lambda: self._replay(recorder)

    def _replay(self, recorder: Recorder) -> None:
        self.num_replays += 1
        for func, args, kwargs, kept in recorder.operations:
            made = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(kept, made, strict=True):
                assert old.shape == new.shape
                if memory_of(old) != memory_of(new):  # neither a view nor written in place
                    old.copy_(new)


def launched(*_: object) -> Capture:
    """Instead of `EmulatedCapture` where tensors have no numbers: the step runs once, a replay does nothing."""

    def capture(step: Step) -> Step:
        with no_reads():
            step()
        return lambda: None

    return capture


@contextmanager
def no_reads() -> Iterator[None]:
    """Reads by the host that no operator stands for raise, and copies from the host to the device."""

    def refuse(*_: object, **__: object) -> None:
        raise NotCapturable("the host reads numbers of the device")

    with ExitStack() as stack:
        for name in _READS:
            stack.enter_context(mock.patch.object(Tensor, name, refuse))
        for name in ("_bring", "_pinned"):
            stack.enter_context(mock.patch.object(transfer, name, refuse))
        yield


Sums = tuple[
    Tensor, Tensor, Tensor
]  # of softmax: largest score [..., H], weights [..., H], weighted values [..., H, K]


def _merged(one: Sums, other: Sums) -> Sums:
    top = torch.maximum(one[0], other[0])
    at = top.where(top != -torch.inf, 0.0)
    own, others = (one[0] - at).exp(), (other[0] - at).exp()
    return top, one[1] * own + other[1] * others, one[2] * own[..., None] + other[2] * others[..., None]


class _Launch:
    """One call of the kernel; tiles of one segment are computed together."""

    def __init__(
        self,
        lists: Sequence[Tensor],
        sizes: Sequence[int],
        cache: tuple[Tensor, Tensor],
        query: Tensor,
        sinks: Tensor | None,
    ) -> None:
        self.lists, self.sinks = lists, sinks
        self.num_tiles, self.num_parts, self.num_merged, num_part_rows, self.block_size = sizes
        self.keys, self.values, self.query = *cache, query
        self.heads, self.size = query.shape[1:]
        self.per_group = self.heads // len(self.keys)
        self.out = torch.full_like(query, NAN, memory_format=torch.contiguous_format)
        shapes = ((num_part_rows, self.heads), (num_part_rows, self.heads), (num_part_rows, self.heads, self.size))
        self.parts = [query.new_full(shape, NAN) for shape in shapes]

    def run(self, scale: float, softcap: float, window: int, has_trees: bool) -> Tensor:
        segments, tiles, merged = self.lists[:3]
        fields = _to_list(segments.view(-1, SEGMENT_FIELDS))
        rows_of: dict[int, list[int]] = {}
        for index, first in _to_list(tiles.view(-1, TILE_FIELDS))[: self.num_tiles]:
            stop = min(first + tile_lines(self.per_group, self.size) // self.per_group, fields[index][2])
            rows_of.setdefault(index, []).extend(range(first, stop))
        for index, rows in rows_of.items():
            _, num_columns, num_rows, first_row, _, _, part_spans, first_part_row = fields[index]
            width = part_spans * paged_work.SPAN_COLUMNS
            count = min(self.num_parts, -(-num_columns // width)) if num_columns else 0
            if not count:
                continue
            own = torch.tensor(rows)
            sums = self._sums(fields[index], own, count, width, scale, softcap, window, has_trees)
            if width >= num_columns:
                self.out[first_row + own] = self._result(*(one[:, 0] for one in sums))
                continue
            at = first_part_row + torch.arange(count) * num_rows + own[:, None]
            for kept, new in zip(self.parts, sums, strict=True):
                kept[at] = new
        if self.num_merged:
            self._merge(merged.view(-1, MERGE_FIELDS)[: self.num_merged].long())
        return self.out

    def _merge(self, merged: Tensor) -> None:
        merged = merged[merged[:, 3] > 0]
        row, first, step, num_parts = merged.T
        found = [part[first] for part in self.parts]
        for part in range(1, max(_to_list(num_parts), default=0)):
            has = num_parts > part
            at = (first + part * step)[has]
            both = _merged(tuple(one[has] for one in found), tuple(one[at] for one in self.parts))  # type: ignore
            for one, new in zip(found, both, strict=True):
                one[has] = new
        self.out[row] = self._result(*found)

    def _result(self, top: Tensor, total: Tensor, read: Tensor) -> Tensor:
        """Of sums [n, H, ...], in which the sink of a head takes part."""
        if self.sinks is None:
            return read / total[..., None]
        peak = torch.maximum(top, self.sinks)
        kept = (top - peak).exp()
        return read * kept[..., None] / (total * kept + (self.sinks - peak).exp())[..., None]

    def _sums(
        self,
        fields: Sequence[int],
        rows: Tensor,
        num_parts: int,
        width: int,
        scale: float,
        softcap: float,
        window: int,
        has_trees: bool,
    ) -> Sums:
        """Of `rows` [n] over so many parts, `width` columns each: [n, parts, ...]."""
        blocks, positions, distances = self.lists[3:]
        past, num_columns, _, first_row, first_block, first_distance = fields[:6]
        columns = torch.arange(min(num_columns, num_parts * width))
        slots = blocks[first_block + columns // self.block_size].long() * self.block_size + columns % self.block_size
        distance = positions[first_row + rows].long()[:, None] - columns
        if has_trees and first_distance >= 0:
            new = (columns - past).clamp(min=0)
            told = distances[first_distance + rows[:, None] * (num_columns - past) + new].long()
            distance = torch.where(columns >= past, told, distance)
        query = self.query[first_row + rows].view(len(rows), len(self.keys), self.per_group, self.size)
        score = torch.einsum("ngpk,gck->ngpc", query, self.keys[:, slots]) * scale
        score = softcap * torch.tanh(score / softcap) if softcap else score
        seen = (distance >= 0) & (distance < window)
        score = score.masked_fill(~seen[:, None, None], -torch.inf).flatten(1, 2)
        missing = num_parts * width - len(columns)
        score = F.pad(score, (0, missing), value=-torch.inf).unflatten(-1, (num_parts, width))  # [n, H, parts, width]
        top = score.amax(-1)
        weight = (score - top.where(top != -torch.inf, 0.0)[..., None]).exp()
        values = F.pad(self.values[:, slots], (0, 0, 0, missing)).unflatten(1, (num_parts, width))
        grouped = weight.unflatten(1, (len(self.keys), self.per_group))
        read = torch.einsum("ngpaw,gawk->nagpk", grouped, values).flatten(2, 3)
        return top.transpose(1, 2), weight.sum(-1).transpose(1, 2), read


@torch.library.custom_op("foretoken_tests::paged_attend", mutates_args=())
def _paged_attend(
    lists: List[Tensor],  # noqa: UP006
    sizes: List[int],  # noqa: UP006
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    sinks: Optional[Tensor],  # noqa: UP045
    scale: float,
    softcap: float,
    window: int,
    has_trees: bool,
) -> Tensor:
    return _Launch(lists, sizes, (keys, values), query, sinks).run(scale, softcap, window, has_trees)


@_paged_attend.register_fake
def _(lists: Any, sizes: Any, keys: Any, values: Any, query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def attend(
    work: PagedWork,
    cache: tuple[Tensor, Tensor],
    block_size: int,
    query: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `kernels.paged_triton.attend`."""
    lists = [work.segments, work.tiles, work.merged, work.blocks, work.positions, work.distances]
    sizes = [work.num_tiles, work.num_parts, work.num_merged, work.num_part_rows, block_size]
    window = 2**30 if window is None else window
    return _paged_attend(lists, sizes, *cache, query, sinks, scale, softcap, window, work.has_trees)  # type: ignore


@contextmanager
def emulated_graphs(span_columns: int = 16, capture: Callable[..., Capture] = EmulatedCapture) -> Iterator[None]:
    """Models that are made here read their cache by the kernel's twin and capture their steps; a long text is one of
    more than `span_columns` tokens.
    """
    module = ModuleType("foretoken.kernels.paged_triton")
    module.attend = attend  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        for place in (paged_work, fused):
            patch.setattr(place, "SPAN_COLUMNS", span_columns)
        for place in (choice, expert_launches):
            patch.setattr(place, "can_launch", lambda _: True)
        patch.setattr(expert_launches, "_experts_triton", lambda: emulated_experts)
        patch.setattr(paged_cache, "chosen", lambda *_: FusedAttention)
        patch.setattr(cache, "CudaCapture", capture)
        yield
