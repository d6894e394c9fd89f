"""The tensors of a safetensors folder whose matrices are packed, as the loader reads those of a plain one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, read_json, shown
from foretoken.model.matrices.codes import BLOCK_ROWS, Allocate, GroupedCodes, large_page_tensor
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.names import OLDER_SETTINGS
from foretoken.model.packed.compressed import CompressedFormat
from foretoken.model.packed.form import CodedMatrix, FoundParts, Fp8Format, Packed, PackedFormat
from foretoken.model.packed.gptq import AwqFormat, GptqFormat
from foretoken.model.weights import AS_CODES, StoredKind, TensorSource, Weights, stored_bytes, stored_kinds

# ---- which format `quantization_config` names

_NO_SUPERS: dict[str, Any] = {"super_scales": None, "super_minimums": None}


def assembled(
    parts: Iterable[GroupedCodes], num_rows: int, dtype: torch.dtype, allocate: Allocate = large_page_tensor
) -> GroupedWeight:
    """The matrix [N, K] of `parts`, all but the last of whole blocks of rows; `dtype` is that of a table's rows."""
    blocks, filled = -(-num_rows // BLOCK_ROWS), 0
    whole: dict[str, Tensor] = {}  # by field
    for part in parts:
        weight = GroupedWeight.of(part, dtype)
        count, own = len(weight.codes), _tensors(weight)
        if not whole:
            whole = {name: allocate((blocks, *own[name].shape[1:]), own[name].dtype) for name in own}
        elif weight.form != (before := replace(weight, **_NO_SUPERS | whole)).form:
            # float16 may hold the scales of some rows exactly, and not of others; a broken file has infinite ones
            own, whole = _expanded(weight), _expanded(before)
        for name, tensor in own.items():
            whole[name][filled : filled + count] = tensor
        filled += count
    assert filled == blocks, "the parts do not make up the matrix"
    return replace(weight, num_rows=num_rows, **_NO_SUPERS | whole)


def _tensors(weight: GroupedWeight) -> dict[str, Tensor]:
    return {field.name: value for field in fields(weight) if isinstance(value := getattr(weight, field.name), Tensor)}


def _expanded(weight: GroupedWeight) -> dict[str, Tensor]:
    """The same with one float32 scale and minimum for each group."""
    scales, minimums = weight.numbers(slice(None))
    return {"codes": weight.codes, "scales": scales} | ({} if minimums is None else {"minimums": minimums})


METHODS = ("gptq", "awq", "compressed-tensors", "fp8")


def method_of(config: Fields) -> str | None:
    """What a `config.json` calls its way of packing matrices; None where nothing is packed."""
    fields = config.fields("quantization_config")
    return None if fields is None or not fields.raw else fields.text("quant_method", "unknown")


def with_older_settings(folder: Path, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Path]:
    """A `config.json`'s content with what older packages kept in a file of their own, as `config.json` has it now, and
    the file to name in errors; `raw` itself where it has these settings, or no matrix is packed.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    path = next((folder / name for name in OLDER_SETTINGS if (folder / name).exists()), None)
    if path is None or raw.get("quantization_config") is not None:
        return raw, folder / "config.json"
    if not any(name.endswith(".qweight") for name in Weights(folder).names):
        return raw, folder / "config.json"
    settings = read_json(path)
    method = "awq" if "w_bit" in settings else OLDER_SETTINGS[path.name]  # some of AWQ were saved by AutoGPTQ's name
    return {**raw, "quantization_config": {"quant_method": method, **settings}}, path


def packed_format(config: Fields) -> PackedFormat | None:
    """The format of a `config.json`'s packed matrices; None if it has none.

    Raises:
        CheckpointError: a value that is missing, of the wrong type or out of bounds.
        UnsupportedModelError: a method or a variant of one that is not read here.
    """
    fields, method = config.fields("quantization_config"), method_of(config)
    if fields is None or method is None:
        return None
    if method == "gptq":
        return GptqFormat.of(fields)
    if method == "awq":
        return AwqFormat.of(fields)
    if method == "compressed-tensors":
        return CompressedFormat.of(fields)
    if method == "fp8":
        return Fp8Format.of(fields)
    raise UnsupportedModelError(
        f"quantization_config (quant_method={shown(method)}): {', '.join(METHODS)} are read here; take one of these, "
        "or the checkpoint's float16 or bfloat16 version"
    )


_CHUNK_NUMBERS = 1 << 20  # converted at a time
# What a checkpoint has for activations and caches in fewer bits, which keep their format here.
_UNUSED = re.compile(r"\.(input|activation|output|k|v|q|kv_cache)_(scale|zero_point|global_scale)(_inv)?$")


class PackedWeights(TensorSource):
    """The tensors of a checkpoint folder by name; a packed matrix goes by the name that it would have unpacked."""

    def __init__(self, folder: Path, form: PackedFormat) -> None:
        self.folder, self._files, self._form = folder, Weights(folder, is_decoder=True), form
        found = (form.base_of(name, self._files.stored(name)) for name in self._files.names)
        self._packed = {f"{base}.weight": base for base in found if base is not None}
        if not self._packed and isinstance(form, GptqFormat | AwqFormat):  # which pack something of every model
            raise CheckpointError(
                f"{folder}: config.json has a quantization_config, and no tensor is packed (none is named *.qweight): "
                "download the folder again, or take the key out to run the plain weights"
            )
        self._shapes = {name: form.shape(base, self._files) for name, base in self._packed.items()}
        self._parts = {
            f"{base}.{part.ending}"
            for name, base in self._packed.items()
            for part in form.parts(base, self._shapes[name], self._files)
        }

    def take_head(self) -> None:
        """See `Weights`."""
        self._files.take_head()

    @property
    def names(self) -> list[str]:
        """Names of all tensors that are no part of a packed matrix, and of the packed matrices."""
        return [name for name in self._files.names if name not in self._parts] + list(self._packed)

    @property
    def own_names(self) -> list[str]:
        """See `TensorSource`."""
        plain = [name for name in self._files.own_names if name not in self._parts and not _UNUSED.search(name)]
        return plain + list(self._packed)

    def __contains__(self, name: str) -> bool:
        return name in self._packed or name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, unpacked."""
        return self._shapes[name] if name in self._packed else self._files.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return torch.float32 if name in self._packed else self._files.dtype(name)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `TensorSource`."""
        if name not in self._packed:
            return self._files.read(name, shape)
        matrix = self._matrix(name, shape)
        full = torch.empty(shape, dtype=torch.float32)  # [N, K]
        for start, stop in _row_blocks(*shape):
            full[start:stop] = matrix.numbers(start, stop)
        return full

    def grouped_rows(self, name: str) -> Iterator[GroupedCodes] | None:
        """See `TensorSource`."""
        if self.why_numbers(name) is not None or name not in self._packed:
            return None
        rows, width = self._shapes[name]
        matrix = self._matrix(name, (rows, width))
        assert isinstance(matrix, CodedMatrix)
        return (matrix.grouped(start, stop) for start, stop in _row_blocks(rows, width))

    def sample(self, name: str) -> GroupedCodes | None:
        """See `TensorSource`."""
        if self.why_numbers(name) is not None or name not in self._packed:
            return None
        matrix = self._matrix(name, self._shapes[name])
        assert isinstance(matrix, CodedMatrix)
        return matrix.grouped(0, min(BLOCK_ROWS, matrix.num_rows))

    def why_numbers(self, name: str) -> str | None:
        """See `TensorSource`."""
        return self._matrix(name, self._shapes[name]).why_numbers if name in self._packed else None

    def kinds(self) -> list[StoredKind]:
        """The types in which the tensors are stored, packed matrices by their format."""
        label_of: dict[str, str] = {}
        ways: dict[str, str] = {}
        for name, base in self._packed.items():
            matrix, label = self._matrix(name, self._shapes[name]), self._form.label(base, self._files)
            if matrix.why_numbers is not None and isinstance(matrix, CodedMatrix):
                label += f" ({matrix.why_numbers})"
            ways[label] = AS_CODES if matrix.why_numbers is None else "dequantised when loaded"
            parts = self._form.parts(base, self._shapes[name], self._files)
            label_of |= {f"{base}.{part.ending}": label for part in parts}
        unused = "scales of activations"
        stored = []
        for name in self._files.names:
            label = label_of.get(name) or (unused if _UNUSED.search(name) else self._files.stored(name))
            stored.append((label, stored_bytes(self._files.shape(name), self._files.stored(name))))
        plain = {kind.name: kind.read for kind in self._files.kinds()}
        ways = plain | ways | {unused: "not used: activations keep their format"}
        return stored_kinds(stored, ways.__getitem__)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """See `TensorSource`; all parts of a packed matrix are checked."""
        if name not in self._packed:
            self._files.check_shape(name, shape)
            return
        if len(shape) != 2 or self._shapes[name] != shape:
            raise CheckpointError(
                f"tensor {name} in {self.folder} is packed from shape {list(self._shapes[name])}; config.json asks for "
                f"{list(shape)}"
            )
        base = self._packed[name]
        for part in self._form.parts(base, (shape[0], shape[1]), self._files):
            self._files.check_part(f"{base}.{part.ending}", part.shapes, part.types)

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Packed:
        """A packed matrix, its codes not yet unpacked."""
        self.check_shape(name, shape)
        base, rows, width = self._packed[name], *shape
        parts = self._form.parts(base, (rows, width), self._files)
        tensors = {part.ending: self._files.part(f"{base}.{part.ending}") for part in parts}
        return self._form.matrix(FoundParts(base, (rows, width), tensors, self._files))

    def _is_spare(self, name: str) -> bool:
        """A bias of zeros beside a packed matrix is: older GPTQ writers gave every matrix one."""
        if not name.endswith(".bias") or f"{name.removesuffix('.bias')}.weight" not in self._packed:
            return False
        return not bool(self._files.read(name, self._files.shape(name)).any())


def _row_blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """First and last row of the parts in which a matrix is converted: whole blocks of the kernel's rows."""
    step = max(1, _CHUNK_NUMBERS // width // BLOCK_ROWS) * BLOCK_ROWS
    return ((start, min(start + step, rows)) for start in range(0, rows, step))
