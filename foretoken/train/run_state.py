"""The state of a training run on disk: one file that is whole or not there, with weights, optimiser and counters.

The file is written beside the earlier one and renamed: a run that is killed, or a full disk, leaves the earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.errors import CheckpointError, ConfigError, StorageError

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
