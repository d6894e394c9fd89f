"""FP8 matrices: numbers of 8 bits (e4m3) with a scale per block, per output or per matrix.

DeepSeek-V3's checkpoints (2412.19437, section 3.3) call it `weight_scale_inv`, by which numbers are multiplied all the
same, in blocks of 128 x 128. Activations keep their format here; a checkpoint's scales of activations are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.packed.form import NUMBERS, FoundParts, ScaledMatrix, StoredPart, stored_matrix
from foretoken.model.weights import Weights

E4M3 = "F8_E4M3"


@dataclass(frozen=True)
class Fp8Format:
    """FP8; `block` (outputs, inputs) share a scale, None: outputs or the whole matrix do."""

    block: tuple[int, int] | None

    @classmethod
    def of(cls, fields: Fields) -> Fp8Format:
        """What `quantization_config` says.

        Raises:
            CheckpointError: a value that is out of bounds.
            UnsupportedModelError: another kind of 8-bit numbers.
        """
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
