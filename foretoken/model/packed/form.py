"""Packed matrices, codes with a scale and a zero point per group or FP8 with scales, and which tensors make them up.

FP8 are numbers of 8 bits (e4m3) with a scale per block, per output or per matrix. DeepSeek-V3's checkpoints
(2412.19437, section 3.3) call it `weight_scale_inv`, by which numbers are multiplied all the same, in blocks of
128 x 128. Activations keep their format here; a checkpoint's scales of activations are not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.matrices.codes import GroupedCodes
from foretoken.model.matrices.grouped_kernel import SPAN
from foretoken.model.weights import Weights

# ---- a matrix after its tensors were read
#
# number = scale * (code - zero), in float32. A code and a zero point have 8 bits at most and scales are usually
# float16 or bfloat16, so the product is exact: rounded to the format of the scales it is what the formats' own
# packages compute.

_NIBBLE = 4
_LOW_BITS = 0xFF  # of a float32: without them 16 significant bits are left, and the product with 8 bits is exact


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix [N, K] in codes of `bits` (4 or 8).

    `unpack(start, stop)` gives the codes of some rows, [n, K] uint8. `scales` [N, G] float32, `zeros` [N, G] uint8.
    `group` inputs that follow one another share a scale, the last group may be shorter; with `order` [K] (GPTQ's g_idx)
    the group of each input is named instead.
    """

    unpack: Callable[[int, int], Tensor]
    scales: Tensor
    zeros: Tensor
    width: int
    bits: int
    group: int
    order: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.scales)

    def numbers(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` as numbers, [n, K] float32."""
        groups = torch.arange(self.width) // self.group if self.order is None else self.order  # [K]
        away = self.unpack(start, stop).to(torch.int16) - self.zeros[start:stop].to(torch.int16)[:, groups]
        return self.scales[start:stop][:, groups] * away

    @functools.cached_property
    def why_numbers(self) -> str | None:
        """Why the kernel of `grouped_kernel` cannot take the codes; None if it can."""
        if self.order is not None:
            return "act-order: inputs of a group do not follow one another"
        if self.width % SPAN:
            return f"{self.width:,} inputs, which groups of {SPAN} do not divide"
        if self.scales.shape[1] > 1 and self.group % SPAN:
            return f"groups of {self.group}, which {SPAN} does not divide"
        if self._one_zero is None and bool((self.scales.contiguous().view(torch.int32) & _LOW_BITS).any()):
            return "zero points beside scales of more than 16 bits"
        return None

    def grouped(self, start: int, stop: int) -> GroupedCodes:
        """Rows `start` to `stop` for the kernel, the same numbers; only where `why_numbers` has no objection."""
        assert self.why_numbers is None
        scales, zeros, group = self.scales[start:stop], self.zeros[start:stop], min(self.group, self.width)
        if self.width % group:  # a short group at the end: shorter ones all along
            repeats = torch.arange(self.width // SPAN) * SPAN // group
            scales, zeros, group = scales[:, repeats], zeros[:, repeats], SPAN
        codes, zero = self.unpack(start, stop), self._one_zero
        if zero is not None:
            return GroupedCodes(codes, scales, None, zero, self.bits, group)
        multiples = -zeros.to(torch.int8) if self.bits == _NIBBLE else None  # a zero point of 8 bits may be 255
        # exact, as its sum with scale * code is
        return GroupedCodes(codes, scales, -(scales * zeros), 0, self.bits, group, multiples=multiples)

    @functools.cached_property
    def _one_zero(self) -> int | None:
        """The zero point if all groups have the same."""
        first = int(self.zeros.flatten()[0])
        return first if bool((self.zeros == first).all()) else None


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix [N, K] in FP8 whose blocks of `block` rows and inputs have a scale each: `scales` [blocks, blocks]."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    why_numbers = "FP8"

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.values)

    def numbers(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` as numbers, [n, K] float32."""
        rows, columns = torch.arange(start, stop) // self.block[0], torch.arange(self.values.shape[1]) // self.block[1]
        return self.values[start:stop].to(torch.float32) * self.scales[rows][:, columns]


def nibbles_or_bytes(words: Tensor, bits: int) -> Tensor:
    """The codes of 4 or 8 bits in `words` [R, W] int32, lowest bits first: [R, W * 32 / bits] uint8."""
    found = words.contiguous().view(torch.uint8)  # [R, 4 W]
    if bits == 8:
        return found
    return torch.stack((found & 15, found >> 4), dim=-1).flatten(1)


Packed: TypeAlias = CodedMatrix | ScaledMatrix
NUMBERS = ("F16", "BF16", "F32")  # what scales are stored in


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a packed matrix: what its name ends in, and the shapes and types that it may have."""

    ending: str
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]


@dataclass(frozen=True)
class FoundParts:
    """The tensors of the matrix `base` of shape [N, K], by their endings, out of `files`."""

    base: str
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]
    files: Weights


def part(ending: str, shape: tuple[int, ...], *types: str) -> StoredPart:
    """A tensor of exactly this shape, of one of these types."""
    return StoredPart(ending, (shape,), types)


def stored_matrix(name: str, files: Weights) -> tuple[int, int]:
    """The shape of a stored tensor that has to be a matrix with entries.

    Raises:
        CheckpointError: missing, or of another number of dimensions.
    """
    shape = files.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"tensor {name} in {files.folder} has shape {list(shape)}; it must be a matrix")
    return shape[0], shape[1]


class PackedFormat(Protocol):
    """How a checkpoint packs matrices; `base` is a module's name, such as `model.layers.0.mlp.up_proj`."""

    def base_of(self, name: str, stored: str) -> str | None:
        """The matrix that a tensor is the codes of, by the tensor's name and type; None for any other tensor."""
        ...

    def shape(self, base: str, files: Weights) -> tuple[int, int]:
        """[N, K] as the stored shapes have it.

        Raises:
            CheckpointError: codes that are no matrix.
        """
        ...

    def label(self, base: str, files: Weights) -> str:
        """The format of one matrix in words."""
        ...

    def parts(self, base: str, shape: tuple[int, int], files: Weights) -> list[StoredPart]:
        """The tensors of a matrix of this shape.

        Raises:
            CheckpointError: a shape that the format cannot hold.
        """
        ...

    def matrix(self, found: FoundParts) -> Packed:
        """The matrix of stored tensors.

        Raises:
            CheckpointError: contents that are out of bounds.
        """
        ...


E4M3 = "F8_E4M3"


@dataclass(frozen=True)
class Fp8Format:
    """FP8; `block` (outputs, inputs) share a scale, None: outputs or the whole matrix do."""

    block: tuple[int, int] | None

    @classmethod
    def of(cls, fields: Fields) -> Fp8Format:
        """What `quantization_config` says."""
        if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedModelError(f"{fields.where}: fmt={shown(fields.raw['fmt'])} is not read here: e4m3 is")
        return cls(block_of(fields, "weight_block_size"))

    def base_of(self, name: str, stored: str) -> str | None:
        """See `PackedFormat`."""
        return name.removesuffix(".weight") if name.endswith(".weight") and stored == E4M3 else None

    def shape(self, base: str, files: Weights) -> tuple[int, int]:
        """See `PackedFormat`."""
        return stored_matrix(f"{base}.weight", files)

    def label(self, base: str, files: Weights) -> str:  # noqa: ARG002 - all matrices are alike
        """See `PackedFormat`."""
        return f"FP8, {block_words(self.block)}"

    def parts(self, base: str, shape: tuple[int, int], files: Weights) -> list[StoredPart]:
        """See `PackedFormat`."""
        ending = "weight_scale" if f"{base}.weight_scale" in files else "weight_scale_inv"
        return scaled_parts(shape, self.block, ending)

    def matrix(self, found: FoundParts) -> ScaledMatrix:
        """See `PackedFormat`."""
        scales = next(tensor for ending, tensor in found.tensors.items() if ending != "weight")
        return scaled_matrix(found.tensors["weight"], scales, self.block)


def block_of(fields: Fields, key: str) -> tuple[int, int] | None:
    """The sizes of a block, as a list or as text such as "128x128"; None without.

    Raises:
        CheckpointError: not two positive numbers.
    """
    value = fields.raw.get(key)
    if value is None:
        return None
    if isinstance(value, str) and all(size.isdecimal() and len(size) < 10 for size in value.split("x")):
        value = [int(size) for size in value.split("x")]
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**31 for size in value)
    ):
        raise fields.refusal(key, "two positive numbers, outputs and inputs of a block")
    return value[0], value[1]


def block_words(block: tuple[int, int] | None) -> str:
    """A block in words."""
    return "a scale per output or matrix" if block is None else f"blocks of {block[0]} x {block[1]}"


def scaled_parts(shape: tuple[int, int], block: tuple[int, int] | None, ending: str) -> list[StoredPart]:
    """The tensors of an FP8 matrix, its scales under the name `ending`."""
    rows, width = shape
    scales: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows, 1), (rows,))
    if block is not None:
        scales = ((-(-rows // block[0]), -(-width // block[1])),)
    return [StoredPart("weight", (shape,), (E4M3,)), StoredPart(ending, scales, NUMBERS)]


def scaled_matrix(values: Tensor, scales: Tensor, block: tuple[int, int] | None) -> ScaledMatrix:
    """The matrix of FP8 `values` [N, K], with scales of one of the shapes of `scaled_parts`."""
    numbers, (rows, width) = scales.to(torch.float32), values.shape
    if block is not None:
        return ScaledMatrix(values, numbers, block)
    numbers = numbers.reshape(-1, 1)  # [N, 1] or [1, 1]
    return ScaledMatrix(values, numbers, (1 if len(numbers) == rows else rows, width))
