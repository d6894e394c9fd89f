"""The state of a training run on disk: one file that is whole or not there, with weights, optimiser and counters.

The file is written beside the earlier one and renamed: a run that is killed, or a full disk, leaves the earlier one.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.errors import CheckpointError, ConfigError, StorageError
from foretoken.printing.console import Console

STATE_WEIGHTS, STATE_JSON = "state.safetensors", "state.json"


def save_state(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], meta: Mapping[str, Any]
) -> None:
    """Write the trained parameters, the optimisers' state and `meta`, atomically.

    Raises:
        StorageError: it cannot be written; an earlier state is kept.
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
            return meta
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a complete training state ({error}); remove it to start again") from error


def check_same(meta: Mapping[str, Any], config: object, names: Sequence[str], folder: Path) -> None:
    """Compare the settings `names` of the run in `folder` with those of the run that would continue it.

    Raises:
        ConfigError: names the setting.
    """
    for name in names:
        earlier, own = meta["config"][name], getattr(config, name)
        if earlier != own:
            raise ConfigError(name, own, f"the run in {folder} was started with {earlier}; use that or another folder")


def check_same_shape(earlier: Mapping[str, Any], own: Mapping[str, Any], folder: Path, prefix: str = "") -> None:
    """Compare the shape that the run in `folder` trains with that of the run that would continue it, both as JSON has
    them: weights of the same sizes may be those of another network.

    Raises:
        ConfigError: names what differs.
    """
    for name, now in own.items():
        before = earlier.get(name, now)  # an earlier version may know less
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            check_same_shape(before, now, folder, f"{prefix}{name}.")
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


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Collects the signals that would end the process, so that no step is cut. In the main thread only."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    old = {
        number: signal.signal(number, lambda caught, _frame: came.append(caught)) for number in numbers if _ends(number)
    }
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def end_by(number: int) -> None:
    """End as the signal `number` would have, once the state is saved: its handler is called first.

    Raises:
        KeyboardInterrupt: it has no handler, or the handler returned.
    """
    if callable(signal.getsignal(number)):
        signal.raise_signal(number)
    raise KeyboardInterrupt


def _ends(number: int) -> bool:
    """Whether a signal has an effect: nohup ignores SIGHUP, and a shell's background jobs ignore Ctrl-C."""
    return signal.getsignal(number) is not signal.SIG_IGN


Show = Callable[[int, float, str], None]  # steps that are done, seconds that they took, what else to say


@contextmanager
def training_progress(
    console: Console, first: int, num_steps: int, step_tokens: int, every_steps: int
) -> Iterator[Show]:
    """A function to call after every step of a run that begins behind `first` steps of `step_tokens` tokens each."""
    with console.bar("training", num_steps, counts=True, stays=True) as bar:
        bar.update(completed=first)

        def show(done: int, seconds: float, words: str) -> None:
            rate = done * step_tokens / max(seconds, 1e-9)
            line = f"{words}, {rate:,.0f} tokens/s"
            bar.update(line, completed=done)
            if done % every_steps == 0 and not console.is_terminal:
                left_s = (num_steps - done) * step_tokens / max(rate, 1e-9)
                console.line(f"step {done}/{num_steps} {line}, about {left_s / 60:.0f} min left")

        yield show
