"""GPTQ's tensors, as AutoGPTQ and GPTQModel write them (Frantar et al. 2210.17323).

`qweight` [K / p, N] holds p = 32 / bits inputs of one output in an int32, the first in the lowest bits; `qzeros`
[G, N / p] packs outputs. The older of the two formats stores each zero point less one, modulo 2 ** bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.packed.form import NUMBERS, FoundParts, StoredPart, part, stored_matrix
from foretoken.model.packed.matrix import CodedMatrix, nibbles_or_bytes
from foretoken.model.weights import Weights

_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # of the stored zero points, by `checkpoint_format`


@dataclass(frozen=True)
class GptqFormat:
    """GPTQ in 4 or 8 bits; `group` None is one scale per output, `ordered` that groups need not be neighbours."""

    bits: int
    group: int | None
    offset: int
    ordered: bool

    @classmethod
    def of(cls, fields: Fields) -> GptqFormat:
        """What `quantization_config` says.

        Raises:
            CheckpointError: a value that is missing or out of bounds.
            UnsupportedModelError: bits or a variant without an implementation.
        """
        bits = fields.whole("bits")
        if bits not in (4, 8):
            raise UnsupportedModelError(f"{fields.where}: bits={bits} of GPTQ is not read here: 4 and 8 are")
        version = fields.text("checkpoint_format", "gptq")
        if version not in _OFFSETS or fields.flag("is_marlin_format"):
            raise UnsupportedModelError(f"{fields.where}: checkpoint_format={shown(version)} is not read here")
        if fields.text("pack_dtype", "int32") != "int32":
            raise UnsupportedModelError(
                f"{fields.where}: pack_dtype={shown(fields.raw['pack_dtype'])} is not read here"
            )
        dynamic = fields.fields("dynamic")
        if dynamic is not None and any(not name.startswith("-:") for name in dynamic.raw):
            raise UnsupportedModelError(f"{fields.where}: dynamic settings of single modules are not read here")
        return cls(bits, group_of(fields, "group_size"), _OFFSETS[version], fields.flag("desc_act"))

    def base_of(self, name: str, stored: str) -> str | None:  # noqa: ARG002 - the name tells
        """See `PackedFormat`."""
        return name.removesuffix(".qweight") if name.endswith(".qweight") else None

    def shape(self, base: str, files: Weights) -> tuple[int, int]:
        """See `PackedFormat`."""
        packed, rows = stored_matrix(f"{base}.qweight", files)
        return rows, packed * (32 // self.bits)

    def label(self, base: str, files: Weights) -> str:  # noqa: ARG002 - all matrices are alike
        """See `PackedFormat`."""
        return f"GPTQ, {self.bits} bits, {group_words(self.group)}"

    def parts(self, base: str, shape: tuple[int, int], files: Weights) -> list[StoredPart]:
        """See `PackedFormat`."""
        rows, width = shape
        held = 32 // self.bits
        check_divides(base, held, rows, width)
        groups = 1 if self.group is None else -(-width // self.group)
        found = [
            part("qweight", (width // held, rows), "I32"),
            part("qzeros", (groups, rows // held), "I32"),
            part("scales", (groups, rows), *NUMBERS),
        ]
        if self.ordered or f"{base}.g_idx" in files:
            found.append(part("g_idx", (width,), "I32", "I64"))
        return found

    def matrix(self, found: FoundParts) -> CodedMatrix:
        """See `PackedFormat`."""
        (rows, width), tensors = found.shape, found.tensors
        words, group = tensors["qweight"], self.group or width
        stored = nibbles_or_bytes(tensors["qzeros"], self.bits)[:, :rows]  # [G, N]
        zeros = (stored + self.offset) & (2**self.bits - 1)
        order = tensors.get("g_idx")
        return CodedMatrix(
            unpack=lambda start, stop: nibbles_or_bytes(words[:, start:stop].t(), self.bits),
            scales=tensors["scales"].to(torch.float32).t().contiguous(),
            zeros=zeros.t().contiguous(),
            width=width,
            bits=self.bits,
            group=group,
            order=None if order is None else checked_order(f"{found.base}.g_idx", order, group, len(stored)),
        )


def group_of(fields: Fields, key: str) -> int | None:
    """A group size; None for -1, one scale per output.

    Raises:
        CheckpointError: missing, 0 or out of bounds.
    """
    group = fields.whole(key, least=-1)
    if group == 0:
        raise fields.refusal(key, "a number of inputs, or -1 for one scale per output")
    return None if group == -1 else group


def group_words(group: int | None) -> str:
    """A group size in words."""
    return "a scale per output" if group is None else f"groups of {group}"


def check_divides(base: str, held: int, rows: int, width: int) -> None:
    """Refuse sizes that whole int32 words cannot hold.

    Raises:
        CheckpointError: names the matrix.
    """
    if rows % held or width % held:
        raise CheckpointError(
            f"tensor {base}.qweight stands for a matrix of shape {[rows, width]}, and packs {held} codes in an int32: "
            "both sizes must be multiples of that"
        )


def checked_order(name: str, order: Tensor, group: int, num_groups: int) -> Tensor | None:
    """The group of each input [K] int64; None where groups follow one another.

    Raises:
        CheckpointError: a group that has no scale.
    """
    found = order.to(torch.int64)
    outside = (found < 0) | (found >= num_groups)
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        raise CheckpointError(
            f"tensor {name}: input {place} is of group {int(found[place])}, and there are {num_groups} groups: the "
            "file is corrupt"
        )
    return None if torch.equal(found, torch.arange(len(found)) // group) else found
