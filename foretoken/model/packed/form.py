"""What the formats of packed matrices have in common: which tensors make up a matrix, and how they are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.model.packed.matrix import CodedMatrix, ScaledMatrix
from foretoken.model.weights import Weights

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
