"""How ranks exchange numbers: torch.distributed, gloo on CPUs and NCCL on GPUs, without its process-wide state.

Ranks find each other through files in a private folder, and talk over the loopback interface: one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from foretoken.parallel.plan import FRAME_BYTES, Plan, framed, num_more, unframed

# A rank waits for rank 0 as long as that lives: it ends with it (`rank`). Only rank 0 gives up on others.
PATIENT_S = 10 * 365 * 86_400.0
_LOOPBACK = "127.0.0.1"
_POLL_S = 5e-5


class LostRankError(Exception):
    """Another rank, `rank`, has closed its connection, or (`is_silent`) did not answer in time."""

    def __init__(self, rank: int, is_silent: bool = False) -> None:
        super().__init__(f"no answer of rank {rank}" if is_silent else f"rank {rank} is gone")
        self.rank, self.is_silent = rank, is_silent


class RankExchange:
    """The `Collective` of one of `world` ranks; usable once `connect` was called on all of them."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._peers = [other for other in range(world) if other != rank]
        self._num_plans, self._patience_s = 0, 0.0
        self._host: Any = None  # ProcessGroupGloo
        self._fast: Any = None  # ProcessGroupNCCL, where tensors are on a GPU

    def connect(self, folder: Path, patience_s: float) -> None:
        """Meet the others in `folder`; from then on no operation waits longer than `patience_s`.

        Raises:
            RuntimeError: they did not come.
        """
        self._patience_s, patience = patience_s, timedelta(seconds=patience_s)
        store = FileStore(str(folder / "meeting"), self.world)
        store.set_timeout(patience)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout, options._threads = patience, 1
        self._host = dist.ProcessGroupGloo(PrefixStore("host", store), self.rank, self.world, options)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            own: Any = dist.ProcessGroupNCCL.Options()
            own._timeout = patience
            self._fast = dist.ProcessGroupNCCL(PrefixStore("device", store), self.rank, self.world, own)

    # ---- among all ranks

    def all_gather(self, x: Tensor) -> Tensor:
        """See `sharding.Collective`."""
        return torch.cat(self._parts(x), dim=-1)

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The ranks' tensors of the shape of `x`, in their order."""
        x = x.contiguous()
        if not x.numel():
            return [x] * self.world
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.world)]
        if self._fast is not None:
            parts[self.rank] = torch.empty_like(x)
            self._fast.allgather([parts], [x]).wait()
            return parts
        # Point to point: gloo's own gathering hands each operation to a thread, which takes five times as long.
        work = [(rank, _begun(self._host.send, _bytes_of(x), rank)) for rank in self._peers]
        work += [(rank, _begun(self._host.recv, _bytes_of(parts[rank]), rank)) for rank in self._peers]
        for rank, one in work:
            _wait(one, rank)
        return parts

    def settle(self) -> None:
        """Wait for what runs on a GPU: a collective of NCCL returns before it is done, and never is if a rank is lost.

        Raises:
            TimeoutError: it is not done in time.
        """
        if self._fast is None:
            return
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ends = time.monotonic() + self._patience_s
        done.record(torch.cuda.current_stream(self.device))  # another thread's own device is the first one
        while not done.query():
            if time.monotonic() > ends:
                raise TimeoutError
            time.sleep(_POLL_S)

    # ---- from rank 0 to the others

    def tell(self, plan: Plan, rows: Tensor | None) -> None:
        """Send a plan, and the `rows` that belong to it."""
        frames = framed(plan.encoded(), self._num_plans)
        self._num_plans += 1
        for frame in frames:
            self._send(frame)
        if rows is not None and rows.numel():
            self._broadcast(rows.contiguous())

    def listen(self, width: int, dtype: torch.dtype) -> tuple[Plan, Tensor]:
        """The next plan of rank 0, however long it takes, and its rows [num_rows, width]."""
        frames = [self._receive()]
        frames += [self._receive() for _ in range(num_more(frames[0], self._num_plans))]
        self._num_plans += 1
        plan = Plan.decoded(unframed(torch.stack(frames)))
        rows = torch.empty(plan.num_rows, width, dtype=dtype, device=self.device)
        if rows.numel():
            self._broadcast(rows)
        return plan, rows

    def _broadcast(self, rows: Tensor) -> None:
        if self._fast is not None:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._fast.broadcast([rows], options).wait()
        elif self.rank == 0:
            self._send(_bytes_of(rows))
        else:
            _wait(_begun(self._host.recv, _bytes_of(rows), 0), 0)

    def _send(self, frame: Tensor) -> None:
        for rank, work in [(rank, _begun(self._host.send, frame, rank)) for rank in self._peers]:
            _wait(work, rank)

    def _receive(self) -> Tensor:
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        _wait(_begun(self._host.recv, frame, 0), 0)
        return frame


def _begun(begin: Callable[[list[Tensor], int, int], Any], x: Tensor, rank: int) -> Any:  # noqa: ANN401 - gloo's Work
    """`begin` sends `x` to a rank or receives it: where the connection is known to be closed, that raises already."""
    try:
        return begin([x], rank, 0)
    except RuntimeError as error:
        raise _lost(rank, error) from error


def _wait(work: Any, rank: int) -> None:  # noqa: ANN401 - gloo's Work
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(rank, error) from error


def _lost(rank: int, error: RuntimeError) -> LostRankError:
    return LostRankError(rank, is_silent="timed out" in str(error).lower())


def _bytes_of(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor: gloo does not take every format of numbers."""
    return x.view(-1).view(torch.uint8)


def rank_devices(first: torch.device, world: int) -> list[torch.device]:
    """Where each rank computes: all on the CPU, or one GPU each from `first` on."""
    if first.type == "cpu":
        return [first] * world
    return [torch.device(first.type, (first.index or 0) + rank) for rank in range(world)]
