"""The frozen target of a training run: what it computes for windows of text, and its hidden states kept on disk.

Windows that a run reads again are not computed again (`StateCache`). An entry is what one call of `FrozenTarget.read`
gave, under the digest of its tokens, so that a run has the same loss curve with and without it, bit for bit: a batch of
several windows is found again as the same batch only. Windows come again at every validation, when a run is repeated
with other settings of the head, and where answers are shorter than a window. Nothing is evicted: what does not fit into
the bound is computed when it is needed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError, StorageError, UnsupportedModelError
from foretoken.files import to_json
from foretoken.heads.base import DraftVocabulary, HeadBatch
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.fields import read_json
from foretoken.model.loader import load_decoder
from foretoken.model.open import native_config
from foretoken.transfer import to_device

Precision = Literal["bfloat16", "float32"]
ABOUT = "states.json"
_NORMED = "normed"
_HEADER_BYTES = 1024  # of an entry, at most


def fast_precision(device: torch.device | str) -> Precision:
    """bfloat16 where matrices are multiplied faster in it: on GPUs, and on processors with AMX or AVX-512 BF16 (2.5
    times as fast as float32 on Zen 4); else float32.
    """
    if torch.device(device).type != "cpu":
        return "bfloat16"
    is_fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if is_fast else "float32"


class FrozenTarget:
    """A target whose weights stay as they are; `autocast` is the context of its computations and of the head's.

    `folder` is that of its checkpoint, where it was loaded from one.
    """

    def __init__(self, decoder: Decoder, precision: Precision = "float32", folder: Path = Path()) -> None:
        self.decoder, self.precision, self.folder = decoder.requires_grad_(False).eval(), precision, folder

    @staticmethod
    def load(folder: Path, device: str | torch.device = "cpu", precision: Precision = "float32") -> FrozenTarget:
        """The checkpoint in `folder`.

        Raises:
            CheckpointError: it cannot be read.
            UnsupportedModelError: its family does not run in our decoder.
        """
        if native_config(folder) is None:
            raise UnsupportedModelError(
                f"{folder} runs through transformers; heads are trained for the families of our own decoder"
            )
        return FrozenTarget(load_decoder(folder, dtype=precision, device=device, pack=False), precision, folder)

    def autocast(self) -> AbstractContextManager[object]:
        """Multiply matrices in bfloat16, if that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.decoder.norm.weight.device

    def output_over(self, vocabulary: DraftVocabulary) -> Callable[[Tensor], Tensor]:
        """A function from rows behind the final norm [R, D] to logits over a head's `vocabulary` [R, V_d], which
        multiplies by these rows of the output matrix only.
        """
        matrix = self.decoder.lm_head.weight
        if vocabulary.is_whole or matrix is None or self.decoder.lm_head.bias is not None:
            return lambda normed: vocabulary.restrict(self.decoder.output_logits(normed))
        rows = matrix.detach()[vocabulary.ids]  # [V_d, D]
        return lambda normed: self.decoder.scaled_logits(F.linear(normed, rows))

    @torch.no_grad()
    def read(self, tokens: Tensor, wanted: Tensor, layers: Sequence[int]) -> HeadBatch:
        """Run windows `tokens` [B, S + 1] and keep the states of `layers`."""
        mask = wanted if wanted.device.type == "cpu" else None
        tokens, wanted = to_device(tokens, self.device), to_device(wanted, self.device, None)
        num_windows, length = tokens.shape[0], tokens.shape[1] - 1
        positions = torch.arange(length, device=self.device).repeat(num_windows)
        attention = PackedAttention(self.decoder.config, num_windows, length)
        with self.autocast():
            hidden = self.decoder(tokens[:, :-1].reshape(-1), positions, attention, taps=layers)
            normed = self.decoder.final_norm(hidden.last)
        shape = (num_windows, length, -1)
        return HeadBatch(
            tokens, wanted, {layer: state.view(shape) for layer, state in hidden.taps.items()}, normed.view(shape), mask
        )


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
        there = f"; {self.used_bytes / 2**20:,.1f} MiB are there" if self.used_bytes else ""
        say(f"hidden states: up to {new_bytes / 2**20:,.1f} MiB will be written to {folder}{there}")

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
