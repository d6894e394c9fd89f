"""The tensors of a GGUF file under their Hugging Face names, as the loader reads those of a safetensors folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import config_from_hf
from foretoken.model.gguf.blocks import grouped, is_grouped, plain, plain_dtype, runnable_types
from foretoken.model.gguf.families import expert_tensors, layer_parts, parted_tensors
from foretoken.model.gguf.header import GgmlType, Header, TensorInfo
from foretoken.model.gguf.names import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    config_fields,
    family_of,
    has_halves,
    hf_name,
    interleaved_heads,
)
from foretoken.model.gguf.parts import read_header
from foretoken.model.matrices.codes import BLOCK_ROWS, GroupedCodes
from foretoken.model.weights import AS_CODES, StoredKind, TensorSource, stored_kinds

_CHUNK_NUMBERS = 1 << 24  # dequantised at a time: intermediate results take some ten bytes a number
_CODED_NUMBERS = 1 << 20  # unpacked at a time for the kernel, which takes some five bytes a number


class GgufWeights(TensorSource):
    """The tensors of a GGUF file, or of all its parts, by their Hugging Face names; nothing is read until asked for.

    Rows that llama.cpp's converter interleaved are put back in order, quantised ones as well.

    Raises:
        CheckpointError: a broken file.
        UnsupportedModelError: a family that does not run from GGUF files.
    """

    described_by = "the metadata"

    def __init__(self, path: Path) -> None:
        self.folder = path  # what the messages of the loader call it
        self.header: Header = read_header(path)
        self._family, self._raw = family_of(self.header), config_fields(self.header)
        # A table that older converters wrote; the decoder computes it.
        tensors = {
            name: info for name, info in self.header.tensors.items() if not name.endswith("attn_rot_embd.weight")
        }
        own = parted_tensors(tensors, self._raw, self._family.names.qkv)
        if self._family.experts is not None:
            own |= expert_tensors(tensors, self._family.expert_names)
        apart = {info.name for info in own.values()}
        parts = layer_parts(self._family.names)
        self._info = {hf_name(name, parts): info for name, info in tensors.items() if name not in apart} | own

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._info)

    @property
    def own_names(self) -> list[str]:
        """Names of the tensors that become weights of the decoder."""
        return [name for name in self._info if name not in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)]

    def __contains__(self, name: str) -> bool:
        return name in self._info

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies and how it is stored.

        Raises:
            CheckpointError: missing.
        """
        if name not in self._info:
            raise CheckpointError(
                f"tensor {name} is missing in {self.folder}: the file is incomplete or of another architecture"
            )
        return self._info[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        kind = self.info(name).kind
        if is_grouped(kind):
            return torch.float32
        stored = plain_dtype(kind)
        if stored is None:
            raise CheckpointError(
                f"tensor {self.info(name).name} in {self.folder} is of type {kind.name}, which is not read here: take "
                f"a file in {', '.join(runnable_types())}, such as Q4_K_M or Q8_0"
            )
        return stored

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `TensorSource`."""
        self.check_shape(name, shape)
        info = self.info(name)
        if not is_grouped(info.kind):
            numbers = self._in_order(name, plain(self._bytes(info), info.kind, shape))
            shifted = self._family.norm_shift and name.endswith("norm.weight")
            return numbers - self._family.norm_shift if shifted else numbers
        rows, columns = shape
        full = torch.empty(shape, dtype=torch.float32)  # [N, K]
        step = max(1, _CHUNK_NUMBERS // columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            full[start:stop] = self._coded(info, start, stop).dequantised()
        return self._in_order(name, full)

    def grouped_rows(self, name: str) -> Iterator[GroupedCodes] | None:
        """See `TensorSource`. An interleaved matrix, which is small, comes whole."""
        self.dtype(name)
        info = self.info(name)
        if not is_grouped(info.kind):
            return None
        rows, columns = info.shape
        if interleaved_heads(name, self._family, self._raw) is not None:
            return iter((self._coded(info, 0, rows).reordered(lambda own: self._in_order(name, own)),))
        step = max(1, _CODED_NUMBERS // columns // BLOCK_ROWS) * BLOCK_ROWS
        return (self._coded(info, start, min(start + step, rows)) for start in range(0, rows, step))

    def sample(self, name: str) -> GroupedCodes | None:
        """See `TensorSource`."""
        self.dtype(name)
        info = self.info(name)
        return self._coded(info, 0, min(info.shape[0], BLOCK_ROWS)) if is_grouped(info.kind) else None

    def _coded(self, info: TensorInfo, start: int, stop: int) -> GroupedCodes:
        """Some rows of a quantised matrix, in the file's order."""
        return grouped(self._bytes(info, start, stop), info.kind, (stop - start, info.shape[1]))

    def check(self, config: ModelConfig, beside: frozenset[str] = frozenset()) -> None:
        """See `TensorSource`."""
        super().check(config, beside)
        if ROPE_FACTORS in self:
            self.check_shape(ROPE_FACTORS, (config.head_dim // 2,))

    def config(self) -> ModelConfig:
        """The configuration that the metadata describes, with the factors that slow down single channels.

        Raises:
            CheckpointError: a value that is out of bounds.
            UnsupportedModelError: an option that the native decoder lacks.
        """
        config = config_from_hf(self._with_short_factors(), str(self.folder))
        if has_halves(self.header, self._family):
            config = replace(config, rope=replace(config.rope, is_interleaved=False))
        if ROPE_FACTORS not in self:
            return config
        factors = self.read(ROPE_FACTORS, (config.head_dim // 2,)).to(torch.float32)
        if config.rope.kind != "default" or not bool((torch.isfinite(factors) & (factors > 0)).all()):
            raise CheckpointError(
                f"tensor {ROPE_FACTORS} in {self.folder} must be positive numbers, and the only scaling of positions"
            )
        return replace(config, rope=replace(config.rope, kind="factors", factors=tuple(factors.tolist())))

    def _with_short_factors(self) -> dict[str, Any]:
        """The configuration with LongRoPE's factors of short texts, if the file has them."""
        if SHORT_FACTORS not in self:
            return self._raw
        factors = self.read(SHORT_FACTORS, self.shape(SHORT_FACTORS)).to(torch.float32)
        scaling = {"rope_type": "longrope", "short_factor": factors.flatten().tolist()}
        attention = self.header.metadata.get(f"{self._raw['model_type']}.rope.scaling.attn_factor")
        rope = self._raw["rope_parameters"] | scaling | {"attention_factor": attention}
        return self._raw | {"rope_parameters": rope}

    def kinds(self) -> list[StoredKind]:
        """The types in which the tensors are stored."""
        stored = self.header.tensors.values()
        ways = {info.kind.name: _way(info.kind) for info in stored}
        return stored_kinds([(info.kind.name, info.num_bytes) for info in stored], ways.__getitem__)

    def _stored_name(self, name: str) -> str:
        return self._info[name].name

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """See `TensorSource`."""
        self.dtype(name)
        if self.shape(name) != shape:
            raise CheckpointError(
                f"tensor {self.info(name).name} in {self.folder} has shape {list(self.shape(name))}; the metadata asks "
                f"for {list(shape)}"
            )
        if is_grouped(self.info(name).kind) and len(shape) != 2:
            raise CheckpointError(f"tensor {self.info(name).name} in {self.folder} is quantised, and no matrix")

    def _bytes(self, info: TensorInfo, first: int = 0, last: int | None = None) -> npt.NDArray[np.uint8]:
        """The bytes of some rows, copied: the mapped pages are given back when this returns."""
        row = info.kind.bytes_of(info.shape[-1])
        rows = info.num_bytes // row
        start, stop = info.start + first * row, info.start + (rows if last is None else last) * row
        try:
            return np.array(np.memmap(info.path, np.uint8, "r", start, (stop - start,)))
        except (OSError, ValueError) as error:  # cut short since its header was read
            raise CheckpointError(f"tensor {info.name} in {info.path} cannot be read ({error})") from error

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Undo the converter's `permute`: within a head its row 2 i + j stood at j * head_dim / 2 + i."""
        heads = interleaved_heads(name, self._family, self._raw)
        if heads is None:
            return rows
        pairs = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


def _way(kind: GgmlType) -> str:
    """What becomes of numbers of a type, in words."""
    if is_grouped(kind):
        return AS_CODES
    return "as stored" if plain_dtype(kind) is not None else "not read"
