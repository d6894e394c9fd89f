"""Matrices as the `compressed-tensors` package writes them: integers of 4 bits in int32, of 8 bits as they are, FP8.

`weight_packed` [N, K / p] holds p = 32 / bits inputs in an int32, the first in the lowest bits, each code with half of
2 ** bits added; zero points are packed the same way along the outputs. Activations keep their format here, whatever
the file says of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.packed.form import (
    E4M3,
    NUMBERS,
    CodedMatrix,
    FoundParts,
    Packed,
    StoredPart,
    block_of,
    block_words,
    nibbles_or_bytes,
    part,
    scaled_matrix,
    scaled_parts,
    stored_matrix,
)
from foretoken.model.packed.gptq import checked_order, group_of, group_words
from foretoken.model.weights import Weights

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group", "block")
_SIGN = 128  # added to a code of int8


@dataclass(frozen=True)
class _Scheme:
    """The weights of one group of modules: a scale for `group` inputs (None: for an output or the matrix)."""

    is_float: bool
    bits: int
    group: int | None
    block: tuple[int, int] | None

    @classmethod
    def of(cls, fields: Fields) -> _Scheme:
        strategy, kind, bits = fields.text("strategy"), fields.text("type", "int"), fields.whole_or("num_bits", 8)
        if kind not in ("int", "float") or (bits not in (4, 8) if kind == "int" else bits != 8):
            raise UnsupportedModelError(f"{fields.where}: {bits} bits of type {shown(kind)} are not read here")
        group = group_of(fields, "group_size") if fields.has("group_size") else None
        if strategy is None:
            strategy = "channel" if group is None else "group"
        block = block_of(fields, "block_structure") if strategy == "block" else None
        if strategy not in _STRATEGIES or (kind == "float" and strategy == "group"):
            raise UnsupportedModelError(f"{fields.where}: strategy={shown(strategy)} is not read here")
        if strategy == "group" and group is None:
            raise fields.refusal("group_size", "a number of inputs")
        if (strategy == "block") != (block is not None) or (kind == "int" and block is not None):
            raise UnsupportedModelError(f"{fields.where}: strategy={shown(strategy)} of {kind} is not read here")
        return cls(kind == "float", bits, group if strategy == "group" else None, block)

    def takes(self, scales: tuple[int, ...], rows: int, width: int) -> bool:
        """Whether scales of this shape are those of a matrix [rows, width]."""
        if self.is_float:
            return scales in scaled_parts((rows, width), self.block, "weight_scale")[1].shapes
        return (scales[1:] or (1,)) == (1 if self.group is None else -(-width // self.group),)


_GROUP = 128  # inputs that share a scale in every preset of integers but W8A8
# What a group is called that is only a list of modules: the presets of `compressed_tensors.quantization` whose weights
# are read here.
_PRESETS: Mapping[str, _Scheme | None] = {
    "UNQUANTIZED": None,
    **dict.fromkeys(("W4A16", "W4A16_ASYM", "W4A8", "W4A4", "W4AFP8"), _Scheme(False, 4, _GROUP, None)),
    "W8A16": _Scheme(False, 8, _GROUP, None),
    **dict.fromkeys(("W8A8", "INT8"), _Scheme(False, 8, None, None)),
    **dict.fromkeys(("FP8", "FP8_DYNAMIC"), _Scheme(True, 8, None, None)),
    "FP8_BLOCK": _Scheme(True, 8, None, (128, 128)),
}


def _scheme_of(groups: Fields, name: str) -> _Scheme | None:
    """The weights of the group `name`, a description or a preset; None where only activations or the cache are
    quantised.
    """
    if isinstance(groups.raw[name], list):
        groups.texts(name)
        if name.upper() not in _PRESETS:
            known = ", ".join(_PRESETS)
            raise UnsupportedModelError(f"{groups.where}: the preset {shown(name)} is not read here: {known} are")
        return _PRESETS[name.upper()]
    group = groups.fields(name)
    if group is None:
        raise groups.refusal(name, "an object that describes some modules")
    weights = group.fields("weights")
    if weights is None:
        return None
    if group.text("format", "dense") not in _FORMATS:
        raise UnsupportedModelError(f"{group.where}: format={shown(group.raw['format'])} is not read here")
    return _Scheme.of(weights)


@dataclass(frozen=True)
class CompressedFormat:
    """The schemes of a compressed-tensors checkpoint; a matrix is of the first that its tensors have the form of."""

    schemes: tuple[_Scheme, ...]

    @classmethod
    def of(cls, fields: Fields) -> CompressedFormat:
        """What `quantization_config` says."""
        if fields.text("format", "dense") not in _FORMATS:
            raise UnsupportedModelError(f"{fields.where}: format={shown(fields.raw['format'])} is not read here")
        sparsity, transform = fields.fields("sparsity_config"), fields.fields("transform_config")
        if sparsity is not None and sparsity.text("format", "dense") != "dense":
            raise UnsupportedModelError(f"{fields.where}: sparsity_config is not read here")
        if transform is not None and transform.raw.get("config_groups"):
            raise UnsupportedModelError(f"{fields.where}: transform_config is not read here")
        groups = fields.fields("config_groups")
        if groups is None or not (groups.raw or fields.has("kv_cache_scheme")):
            raise fields.refusal("config_groups", "an object that describes the quantised modules")
        found = (_scheme_of(groups, name) for name in groups.raw)
        return cls(tuple(dict.fromkeys(scheme for scheme in found if scheme is not None)))

    def base_of(self, name: str, stored: str) -> str | None:
        """See `PackedFormat`."""
        if name.endswith(".weight_packed"):
            return name.removesuffix(".weight_packed")
        return name.removesuffix(".weight") if name.endswith(".weight") and stored in (E4M3, "I8") else None

    def shape(self, base: str, files: Weights) -> tuple[int, int]:
        """See `PackedFormat`."""
        if f"{base}.weight" in files:
            return stored_matrix(f"{base}.weight", files)
        rows, packed = stored_matrix(f"{base}.weight_packed", files)
        return rows, packed * (32 // self._scheme(base, files).bits)

    def label(self, base: str, files: Weights) -> str:
        """See `PackedFormat`."""
        scheme = self._scheme(base, files)
        if scheme.is_float:
            return f"compressed-tensors, FP8, {block_words(scheme.block)}"
        return f"compressed-tensors, int{scheme.bits}, {group_words(scheme.group)}"

    def parts(self, base: str, shape: tuple[int, int], files: Weights) -> list[StoredPart]:
        """See `PackedFormat`."""
        rows, width = shape
        scheme, is_packed = self._scheme(base, files), f"{base}.weight_packed" in files
        if scheme.is_float:
            return scaled_parts(shape, scheme.block, "weight_scale")
        held = 32 // scheme.bits
        if is_packed and width % held:
            raise CheckpointError(f"tensor {base}.weight_packed packs {held} codes in an int32, and has {width} inputs")
        groups = 1 if scheme.group is None else -(-width // scheme.group)
        whole: tuple[tuple[int, ...], ...] = () if groups > 1 else ((), (1,), (1, 1))  # a scale for the matrix
        points = ((rows, groups), *whole)
        found = [StoredPart("weight_scale", points, NUMBERS)]
        if is_packed:
            found += [part("weight_packed", (rows, width // held), "I32"), part("weight_shape", (2,), "I64", "I32")]
        else:
            found.append(part("weight", shape, "I8"))
        if f"{base}.weight_zero_point" in files:
            packed = part("weight_zero_point", (-(-rows // held), groups), "I32")
            is_whole = not is_packed or files.stored(f"{base}.weight_zero_point") == "I8"  # until 0.9.2, and per matrix
            found.append(StoredPart("weight_zero_point", points, ("I8",)) if is_whole else packed)
        if f"{base}.weight_g_idx" in files:
            found.append(part("weight_g_idx", (width,), "I32", "I64"))
        return found

    def matrix(self, found: FoundParts) -> Packed:
        """See `PackedFormat`."""
        (rows, width), tensors = found.shape, found.tensors
        scheme, scales = self._scheme(found.base, found.files), tensors["weight_scale"]
        if scheme.is_float:
            return scaled_matrix(tensors["weight"], scales, scheme.block)
        spread = _spread(scales.to(torch.float32), rows)
        order, group = tensors.get("weight_g_idx"), scheme.group or width
        if order is not None and bool((order == -1).all()):  # "none", as some writers say it
            order = None
        return CodedMatrix(
            unpack=_unpacker(found, scheme.bits),
            scales=spread,
            zeros=_zeros(tensors, scheme.bits, tuple(spread.shape)),
            width=width,
            bits=8 if "weight" in tensors else scheme.bits,
            group=group,
            order=None if order is None else checked_order(f"{found.base}.weight_g_idx", order, group, spread.shape[1]),
        )

    def _scheme(self, base: str, files: Weights) -> _Scheme:
        """The scheme of a matrix: the first that its scales fit, or the first of the stored type. Where its
        words may hold few long codes or many short ones, weight_shape says which.
        """
        packed, plain = f"{base}.weight_packed", f"{base}.weight"
        is_packed = packed in files
        codes = packed if is_packed else plain
        is_float = not is_packed and files.stored(plain) == E4M3
        own = [scheme for scheme in self.schemes if scheme.is_float == is_float]
        if not own:
            what = f"tensor {codes} in {files.folder} is {files.stored(codes)}"
            raise CheckpointError(f"{what}, for which quantization_config has no scheme")
        shape, scales = files.shape(codes), files.shape(f"{base}.weight_scale")
        if len(shape) != 2:
            return own[0]
        rows, stored = shape
        width_of = {scheme: stored * 32 // scheme.bits if is_packed else stored for scheme in own}
        fitting = [scheme for scheme in own if scheme.takes(scales, rows, width_of[scheme])]
        if is_packed and len({width_of[scheme] for scheme in fitting}) > 1 and f"{base}.weight_shape" in files:
            claimed = files.part(f"{base}.weight_shape").tolist()
            fitting = [scheme for scheme in fitting if [rows, width_of[scheme]] == claimed] or fitting
        return fitting[0] if fitting else own[0]


def _spread(scales: Tensor, rows: int) -> Tensor:
    """Scales or zero points of one of the stored shapes, for every output: [N, G]."""
    matrix = scales.reshape(-1, scales.shape[-1] if scales.dim() == 2 else 1)
    return matrix.expand(rows, matrix.shape[1])


def _zeros(tensors: Mapping[str, Tensor], bits: int, shape: tuple[int, ...]) -> Tensor:
    """Zero points as codes, [N, G] uint8; half of the range where the file has none."""
    stored, rows = tensors.get("weight_zero_point"), shape[0]
    if stored is None:
        return torch.tensor(_SIGN if "weight" in tensors else 2 ** (bits - 1), dtype=torch.uint8).expand(shape)
    if stored.dtype == torch.int8:
        half = _SIGN if "weight" in tensors else 2 ** (bits - 1)
        return _spread((stored.to(torch.int16) + half).to(torch.uint8), rows)
    return nibbles_or_bytes(stored.t(), bits)[:, :rows].t().contiguous()


def _unpacker(found: FoundParts, bits: int) -> Callable[[int, int], Tensor]:
    """The codes of some rows, [n, K] uint8."""
    tensors = found.tensors
    if "weight" in tensors:
        stored = tensors["weight"]
        return lambda start, stop: stored[start:stop].contiguous().view(torch.uint8) ^ _SIGN
    claimed = tuple(tensors["weight_shape"].tolist())
    if claimed != found.shape:
        raise CheckpointError(
            f"tensor {found.base}.weight_shape says {list(claimed)}; config.json asks for {list(found.shape)}"
        )
    words = tensors["weight_packed"]
    return lambda start, stop: nibbles_or_bytes(words[start:stop], bits)
