"""Data parallelism over the processes that torchrun started: every rank has the whole head and a part of each batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foretoken.errors import ConfigError


class Ranks:
    """This process among `world` of them; one process needs no group of torch.distributed."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of `count` pieces of a batch this rank computes.

        Raises:
            ConfigError: they cannot be dealt evenly.
        """
        if count % self.world:
            remedy = f"must be a multiple of the {self.world} processes; use {self.world}"
            raise ConfigError("accumulate", count, remedy)
        return range(self.rank, count, self.world)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of `value` over all ranks."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks, in one message. A parameter that has none on any rank keeps
        none: optimisers leave it out, as those of one process do.
        """
        if self.world == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        known = grads[0].new_tensor([p.grad is not None for p in parameters])
        flat = self.sum(torch.cat([known, *(grad.flatten() for grad in grads)]))
        start = len(parameters)
        for parameter, grad, num_known in zip(parameters, grads, flat[:start].tolist(), strict=True):
            parameter.grad = flat[start : start + grad.numel()].view_as(grad) if num_known else None
            start += grad.numel()

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(float(flag))).item())


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks of torchrun (its environment variables), joined over gloo; one rank without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
