"""The loop of both trainers: steps until the run is over; its state is saved from time to time, and when it is
interrupted.

The file of the state is written beside the earlier one and renamed: a run that is killed, or a full disk, leaves the
earlier one.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.errors import CheckpointError, ConfigError, StorageError
from foretoken.printing.console import Bar, Console
from foretoken.train.head_train_config import HeadTrainConfig
from foretoken.train.parallel import Ranks
from foretoken.train.run_options import TrainConfig

STATE_WEIGHTS, STATE_JSON = "state.safetensors", "state.json"
_META = {"step": int, "seconds": int | float, "config": dict}  # of every state; trainers add their own


def save_state(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], meta: Mapping[str, Any]
) -> None:
    """Write parameters, the optimisers' state and `meta`, at once.

    Raises:
        StorageError: an earlier state is kept.
    """
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for index, optimizer in enumerate(optimizers):
        for key, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"optimizer.{index}.{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    partial = folder / (STATE_WEIGHTS + ".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata={"state": json.dumps(meta)})
        partial.replace(folder / STATE_WEIGHTS)
        (folder / STATE_JSON).write_text(json.dumps(meta, indent=1) + "\n")
    except (OSError, SafetensorError) as error:  # a full disk is an error of safetensors
        if folder.is_dir():
            partial.unlink(missing_ok=True)
        raise StorageError(f"cannot write the training state to {folder}: {error}") from error


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The `meta` of the state in `folder`, None if there is no state.

    Raises:
        CheckpointError: truncated or corrupt.
    """
    path = folder / STATE_WEIGHTS
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as handle:
            meta: dict[str, Any] = json.loads(handle.metadata()["state"])
        for name, kind in _META.items():
            if not isinstance(meta[name], kind) or isinstance(meta[name], bool):
                raise TypeError(f"{name} is {meta[name]!r:.40}")
        return meta
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a complete training state ({error}); remove it to start again") from error


def check_same(earlier: Mapping[str, Any], own: Mapping[str, Any], folder: Path, prefix: str = "") -> None:
    """Compare settings of the run in `folder`, or the shape that it trains, with those of the run that would continue
    it, both as JSON has them: weights of the same sizes may be those of another network.

    Raises:
        ConfigError: names what differs.
    """
    for name, now in own.items():
        before = earlier.get(name, now)  # an earlier version may know less
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            check_same(before, now, folder, f"{prefix}{name}.")
        elif before != now:
            remedy = f"the run in {folder} was started with {before}; use that or another folder"
            raise ConfigError(f"{prefix}{name}", now, remedy)


def restore_state(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Load what `save_state` wrote.

    Raises:
        CheckpointError: it is the state of a model of another shape.
    """
    path = folder / STATE_WEIGHTS
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            saved = tensors.get(f"model.{name}")
            if saved is None or saved.shape != parameter.shape:
                raise CheckpointError(f"{path} holds another model: {name} is missing or has another shape")
            parameter.copy_(saved)
    for index, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        prefix = f"optimizer.{index}."
        for name, value in tensors.items():
            if name.startswith(prefix):
                key, field = name[len(prefix) :].split(".")
                state["state"].setdefault(int(key), {})[field] = value
        optimizer.load_state_dict(state)


class TrainingLoop(ABC):
    """A resumable run: `step` steps are done, which took `seconds`; the first of `ranks` writes and prints."""

    config: TrainConfig | HeadTrainConfig

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.step, self.seconds, self.ranks = 0, 0.0, ranks or Ranks()
        self._console = Console(stderr=True)

    @abstractmethod
    def train_step(self) -> float:
        """One step of the optimiser; its loss."""

    @abstractmethod
    def save(self) -> None:
        """Write weights, optimiser state and counters atomically."""

    @abstractmethod
    def _after_step(self, loss: float) -> None:
        """Record and validate, where it is time to."""

    @property
    def _is_over(self) -> bool:
        return self.step >= self.config.num_steps

    def _figures(self) -> str:
        """What is shown behind the loss."""
        return ""

    def _train(self) -> float | None:
        """The steps that are left; the loss of the last one."""
        started = saved = time.monotonic()
        before, loss, is_stopped = self.seconds, None, False
        bar = self._console.bar("training", self.config.num_steps, counts=True, stays=True)
        with interruption() as interrupted, bar as shown:
            shown.update(completed=self.step)
            while not self._is_over:
                loss = self.train_step()
                now = time.monotonic()
                self.seconds = before + now - started
                if self.ranks.is_first:
                    self._show(shown, loss)
                self._after_step(loss)
                is_stopped = self.ranks.any(bool(interrupted))
                if is_stopped:
                    break
                if now - saved > self.config.save_every_s:
                    self.save()
                    saved = now
            self.save()
        if is_stopped or interrupted:  # of another rank alone, this one ends with it: its run is not over
            _end_by(interrupted)
        return loss

    def _show(self, bar: Bar, loss: float) -> None:
        config = self.config
        rate = self.step * config.step_tokens / max(self.seconds, 1e-9)
        line = f"loss {loss:.4f}{self._figures()}, {rate:,.0f} tokens/s"
        bar.update(line, completed=self.step)
        if self.step % config.report_every_steps == 0 and not self._console.is_terminal:
            left_s = (config.num_steps - self.step) * config.step_tokens / max(rate, 1e-9)
            self._console.line(f"step {self.step}/{config.num_steps} {line}, about {left_s / 60:.0f} min left")

    def _say(self, line: str) -> None:
        if self.ranks.is_first:
            self._console.line(line)


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Collects the signals that would end the process, so that no step is cut. In the main thread only."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # Those that have an effect: nohup ignores SIGHUP, and a shell's background jobs ignore Ctrl-C.
    ending = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    old = {number: signal.signal(number, lambda caught, _frame: came.append(caught)) for number in ending}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _end_by(came: Sequence[int]) -> None:
    """End as the first signal that `came` would have, once the state is saved: its handler is called first.

    Raises:
        KeyboardInterrupt: it has no handler, the handler returned, or none came to this process.
    """
    if came and callable(signal.getsignal(came[0])):
        signal.raise_signal(came[0])
    raise KeyboardInterrupt
