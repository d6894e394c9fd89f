"""A CUDA device where there is none: fake tensors, which have a device, a shape and a dtype but no numbers.

Inside `fake_cuda` whatever would need numbers raises, and so does every wait for the device and every tensor that was
left on the CPU. `transfer.to_host` is the one exception: it is counted, and gives made-up numbers.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from foretoken import transfer
from foretoken.kernels import launches
from foretoken.model import expert_launches, strict
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention import choice, paged
from foretoken.model.config_json import config_from_hf
from foretoken.model.decoder import Decoder
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import _FAMILY, _SHAPE, VARIANTS

DEVICE = torch.device("cuda:0")  # always with its number, which the stand-in for a guard does not know
_CUDA, _META = 1, 14  # c10::DeviceType
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


class LeftBehind(AssertionError):
    """Something waits for the device, or is not on it."""


# torch 2.11 has no name of its own for tensors on two devices.
_OTHER_DEVICE = getattr(fake_tensor, "FakeTensorDeviceMismatchError", RuntimeError)
REFUSALS = (LeftBehind, DataDependentOutputException, DynamicOutputShapeException, _OTHER_DEVICE)


class OnDevice(TorchDispatchMode):
    """Refuses what a GPU would accept, but wait for: blocking copies either way, and indices on the CPU."""

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
        kinds = {tensor.device.type for tensor in given if tensor.dim() or func is torch.ops.aten.copy_.default}
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self._copied(func, args, kwargs)
        elif len(kinds) > 1:
            raise LeftBehind(f"{func} of tensors on {' and '.join(sorted(kinds))}")
        return func(*args, **kwargs)

    def _copied(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0].device.type, args[1].device.type
            waits = not (args[2:] and args[2]) and not kwargs.get("non_blocking", False)
        else:
            source = args[0].device.type
            target = torch.device(kwargs.get("device") or source).type
            assert target != "meta", "name the device with its number"
            waits = not kwargs.get("non_blocking", False)
        if (source, target) == ("cuda", "cpu"):
            raise LeftBehind(f"{func} brings something to the host beside to_host")
        if (source, target) == ("cpu", "cuda") and waits:
            raise LeftBehind(f"{func} to the device waits for it; use to_device")


class Transfers:
    """Stands in for the copy to the host: `lengths` has the vectors of each one. Numbers are made up, of the dtype that
    was asked for: probabilities for floats, and for integers ids below `vocab_size`, one after another, so that
    siblings differ.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.lengths: list[list[int]] = []
        self._rng, self._vocab_size, self._last = random.Random(seed), vocab_size, 0

    def __call__(self, parts: Sequence[Tensor]) -> list[Any]:
        on_device = any(part.device.type == "cuda" for part in parts)
        assert len({part.device.type for part in parts}) == 1, "a transfer brings what is in one place"
        if on_device:
            self.lengths.append([part.shape[0] for part in parts])
        if len(parts) == 1 and parts[0].dtype == torch.bool:
            return [[True] * parts[0].shape[0]]  # a check: what fails it is not run
        return [self._made_up(part.shape, part.dtype) for part in parts]

    def _made_up(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        return [self._made_up(shape[1:], dtype) for _ in range(shape[0])] if shape else self._number(dtype)

    def _number(self, dtype: torch.dtype) -> float:
        if dtype == torch.bool:
            return self._rng.random() < 0.5
        if dtype.is_floating_point:
            return self._rng.random()
        self._last = (self._last + 1) % self._vocab_size
        return self._last


@contextmanager
def _guard() -> Iterator[None]:
    """A build without CUDA has no device guard, which even fake tensors need; that of meta tensors does nothing."""
    if torch.backends.cuda.is_built():
        yield
        return
    try:
        library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"))
        registry = (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    except (StopIteration, OSError, ValueError) as error:
        pytest.skip(f"no device guard can be set in this build of torch: {error}")
    registry[_CUDA] = registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = None


@contextmanager
def fake_cuda(seed: int = 0, vocab_size: int = 97) -> Iterator[Transfers]:
    """A CUDA device of fake tensors; yields the count of transfers to the host."""
    transfers = Transfers(seed, vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_bring", transfers)
        patch.setattr(transfer, "_pinned", _as_it_is)
        known = launches.has_triton
        for place in (launches, choice, expert_launches, strict):
            if place.has_triton is known:  # its kernels want numbers, unless a test says what is installed
                patch.setattr(place, "has_triton", lambda: False)
        paged._slots_in.cache_clear()
        try:
            with _guard(), FakeTensorMode(allow_non_fake_inputs=True), OnDevice():
                yield transfers
        finally:
            paged._slots_in.cache_clear()


def _as_it_is(host: Tensor) -> Tensor:
    return host


MISTAKES: dict[str, Callable[[Tensor], object]] = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).all()),
    "cpu": lambda x: x.cpu(),
    "copy to the host": lambda x: torch.empty(3, 4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "index by a mask": lambda x: x[x[:, 0] > 0],
    "index of the host": lambda x: x[torch.tensor([0, 1])],
    "operand of the host": lambda x: x + torch.ones(4),
    "blocking copy": lambda x: torch.ones(4).to(x.device) + x,
    "tensor made there": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) + x,
    "index by a list": lambda x: x[[0, 1]],
}


def config_of(name: str, **shape: Any) -> ModelConfig:
    family, overrides = VARIANTS[name]
    return config_from_hf(AutoConfig.for_model(family, **(_SHAPE | _FAMILY[family] | overrides | shape)).to_dict())


def fake_model(name: str, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> PagedModel:
    """A model of fake weights, in a `fake_cuda`; `shape` in place of what the variant says."""
    config, before = config_of(name, **shape), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with DEVICE:
            return PagedModel(Decoder(config), 400, 4)
    finally:
        torch.set_default_dtype(before)
