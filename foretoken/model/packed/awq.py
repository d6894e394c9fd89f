"""AWQ's tensors in the layout of its matrix product, "gemm" (Lin et al. 2306.00978; AutoAWQ's `packing_utils.py`).

`qweight` [K, N / 8] and `qzeros` [G, N / 8] hold eight outputs in an int32, in the order 0, 2, 4, 6, 1, 3, 5, 7 from
the lowest bits on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.packed.form import NUMBERS, FoundParts, StoredPart, part, stored_matrix
from foretoken.model.packed.gptq import check_divides, group_of, group_words
from foretoken.model.packed.matrix import CodedMatrix, nibbles_or_bytes
from foretoken.model.weights import Weights

_BITS, _HELD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs 0 to 7 stand


@dataclass(frozen=True)
class AwqFormat:
    """AWQ in 4 bits; `group` None is one scale per output."""

    group: int | None

    @classmethod
    def of(cls, fields: Fields) -> AwqFormat:
        """What `quantization_config` says.

        Raises:
            CheckpointError: a value that is missing or out of bounds.
            UnsupportedModelError: bits or a layout without an implementation.
        """
        bits = fields.whole("bits" if fields.has("bits") else "w_bit")
        if bits != _BITS:
            raise UnsupportedModelError(f"{fields.where}: bits={bits} of AWQ is not read here: 4 is")
        version = fields.text("version", "gemm") or ""
        if version.lower() != "gemm":
            raise UnsupportedModelError(f"{fields.where}: version={shown(version)} of AWQ is not read here: gemm is")
        return cls(group_of(fields, "group_size" if fields.has("group_size") else "q_group_size"))

    def base_of(self, name: str, stored: str) -> str | None:  # noqa: ARG002 - the name tells
        """See `PackedFormat`."""
        return name.removesuffix(".qweight") if name.endswith(".qweight") else None

    def shape(self, base: str, files: Weights) -> tuple[int, int]:
        """See `PackedFormat`."""
        width, packed = stored_matrix(f"{base}.qweight", files)
        return packed * _HELD, width

    def label(self, base: str, files: Weights) -> str:  # noqa: ARG002 - all matrices are alike
        """See `PackedFormat`."""
        return f"AWQ, {_BITS} bits, {group_words(self.group)}"

    def parts(self, base: str, shape: tuple[int, int], files: Weights) -> list[StoredPart]:  # noqa: ARG002
        """See `PackedFormat`."""
        rows, width = shape
        check_divides(base, _HELD, rows, _HELD)
        groups = 1 if self.group is None else -(-width // self.group)
        return [
            part("qweight", (width, rows // _HELD), "I32"),
            part("qzeros", (groups, rows // _HELD), "I32"),
            part("scales", (groups, rows), *NUMBERS),
        ]

    def matrix(self, found: FoundParts) -> CodedMatrix:
        """See `PackedFormat`."""
        tensors, width = found.tensors, found.shape[1]
        words = tensors["qweight"]

        def unpack(start: int, stop: int) -> Tensor:
            first = start // _HELD
            return _in_order(words[:, first : -(-stop // _HELD)])[start - first * _HELD : stop - first * _HELD]

        return CodedMatrix(
            unpack=unpack,
            scales=tensors["scales"].to(torch.float32).t().contiguous(),
            zeros=_in_order(tensors["qzeros"]),
            width=width,
            bits=_BITS,
            group=self.group or width,
        )


def _in_order(words: Tensor) -> Tensor:
    """`words` [R, W] as codes of their outputs, [8 W, R] uint8."""
    codes = nibbles_or_bytes(words, _BITS).view(len(words), -1, _HELD)[..., _PLACES]  # [R, W, 8]
    return codes.flatten(1).t().contiguous()
