"""Hidden states of the frozen target on disk: windows that a run reads again are not computed again.

An entry is what one call of `FrozenTarget.read` gave, under the digest of its tokens, so that a run has the same loss
curve with and without it, bit for bit: a batch of several windows is found again as the same batch only. Windows come
again at every validation, when a run is repeated with other settings of the head, and where answers are shorter than a
window. Nothing is evicted: what does not fit into the bound is computed when it is needed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError, StorageError
from foretoken.files import to_json
from foretoken.heads.base import HeadBatch
from foretoken.model.fields import read_json
from foretoken.train.frozen_target import FrozenTarget

ABOUT = "states.json"
_NORMED = "normed"
_HEADER_BYTES = 1024  # of an entry, at most


def entry_bytes(target: FrozenTarget, num_windows: int, length: int, num_layers: int) -> int:
    """Disk that the states of a batch take, with `num_layers` layers read."""
    width = 4 if target.precision == "float32" else 2
    rows = num_windows * length
    return rows * target.decoder.config.hidden_size * (num_layers + 1) * width + _HEADER_BYTES


class StateCache:
    """States of `target` at `layers` in `folder`, at most `max_bytes` of them; `say` gets what the user should know.

    `origin` names what they depend on beside tokens and layers. States of another origin or other layers are dropped,
    with a notice. `wanted_bytes` is what the run would store without a bound.

    Raises:
        ConfigError: the disk has no room for that many.
        StorageError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        target: FrozenTarget,
        layers: Sequence[int],
        origin: Mapping[str, str],
        max_bytes: int,
        wanted_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.target, self.layers = folder, target, tuple(layers)
        self.max_bytes, self._say = max_bytes, say
        self._is_full = False
        about = {**origin, "layers": ",".join(map(str, self.layers)), "precision": target.precision}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.used_bytes = self._begin(about)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise StorageError(f"cannot write hidden states to {folder}: {error}") from error
        new_bytes = max(0, min(max_bytes, wanted_bytes) - self.used_bytes)
        if new_bytes > free:
            remedy = f"the states would take {new_bytes:,} bytes more in {folder}, which has {free:,} free: give less"
            raise ConfigError("state_cache_bytes", max_bytes, remedy)
        say(f"hidden states: up to {new_bytes / 2**20:,.1f} MiB will be written to {folder}{self._there()}")

    def read(self, tokens: Tensor, wanted: Tensor) -> HeadBatch:
        """`FrozenTarget.read` of windows `tokens` [B, S + 1], from the disk where they are there."""
        path = self.folder / f"{_digest(tokens)}.safetensors"
        known = self._load(path, (tokens.shape[0], tokens.shape[1] - 1))
        if known is not None:
            device = self.target.device
            states = {layer: known[str(layer)] for layer in self.layers}
            return HeadBatch(tokens.to(device), wanted.to(device), states, known[_NORMED])
        batch = self.target.read(tokens, wanted, self.layers)
        self._store(path, batch)
        return batch

    def _begin(self, about: Mapping[str, str]) -> int:
        """Drop what is of another origin or was not finished; bytes that are left."""
        path, there = self.folder / ABOUT, sorted(self.folder.glob("*.safetensors"))
        for partial in self.folder.glob("*.partial"):
            partial.unlink()
        if there and not _is_about(path, about):
            size = sum(one.stat().st_size for one in there)
            self._say(
                f"hidden states in {self.folder} are of another target, precision or choice of layers: "
                f"{size / 2**20:,.1f} MiB dropped"
            )
            for one in there:
                one.unlink()
            there = []
        path.write_text(to_json(dict(about), indent=2) + "\n")
        return sum(one.stat().st_size for one in there)

    def _there(self) -> str:
        return f"; {self.used_bytes / 2**20:,.1f} MiB are there" if self.used_bytes else ""

    def _load(self, path: Path, shape: tuple[int, int]) -> dict[str, Tensor] | None:
        """The tensors of an entry on the target's device; None without one. A broken one is dropped with a notice."""
        if not path.exists():
            return None
        expected, width = {*map(str, self.layers), _NORMED}, self.target.decoder.config.hidden_size
        try:
            found = load_file(path)
            if found.keys() != expected or any(one.shape != (*shape, width) for one in found.values()):
                raise ValueError("other tensors than expected")
        except (SafetensorError, OSError, ValueError) as error:
            self._say(f"{path} is truncated or corrupt ({error}): its states are computed again")
            self.used_bytes -= path.stat().st_size
            path.unlink()
            return None
        # Copied into memory that torch aligned: a product may depend on the alignment in its last bits.
        return {name: one.to(self.target.device, copy=True) for name, one in found.items()}

    def _store(self, path: Path, batch: HeadBatch) -> None:
        if self._is_full:
            return
        tensors = {str(layer): state for layer, state in batch.states.items()} | {_NORMED: batch.normed}
        size = sum(one.nbytes for one in tensors.values()) + _HEADER_BYTES
        if self.used_bytes + size > self.max_bytes:
            self._stop(f"the bound of {self.max_bytes / 2**20:,.1f} MiB is reached")
            return
        partial = path.with_name(path.name + ".partial")
        try:
            save_file({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, partial)
            partial.replace(path)
        except (SafetensorError, OSError) as error:
            partial.unlink(missing_ok=True)
            self._stop(f"{path} cannot be written: {error}")
            return
        self.used_bytes += path.stat().st_size

    def _stop(self, reason: str) -> None:
        self._is_full = True
        self._say(f"hidden states: {reason}; those of further windows are computed when they are needed")


def _is_about(path: Path, about: Mapping[str, str]) -> bool:
    try:
        return read_json(path) == about
    except CheckpointError:  # missing, or half written
        return False


def _digest(tokens: Tensor) -> str:
    """A name of the tokens of a batch."""
    ids = tokens.to("cpu", torch.int64).contiguous()
    return hashlib.blake2b(str(tuple(ids.shape)).encode() + ids.numpy().tobytes(), digest_size=16).hexdigest()
