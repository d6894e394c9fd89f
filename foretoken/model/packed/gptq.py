"""GPTQ's and AWQ's tensors: codes in groups, several of them in an int32.

GPTQ's as AutoGPTQ and GPTQModel write them (Frantar et al. 2210.17323): `qweight` [K / p, N] holds p = 32 / bits inputs
of one output in an int32, the first in the lowest bits; `qzeros` [G, N / p] packs outputs. The older of the two formats
stores each zero point less one. GPTQModel subtracts the ones from whole int32, so that a zero point of 0 borrows from
the next, and adds them to whole int32 again when it reads; so does this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.packed.form import (
    NUMBERS,
    CodedMatrix,
    FoundParts,
    StoredPart,
    nibbles_or_bytes,
    part,
    stored_matrix,
)
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
        """What `quantization_config` says."""
        bits = fields.whole("bits")
        if bits not in (4, 8):
            raise UnsupportedModelError(f"{fields.where}: bits={bits} of GPTQ is not read here: 4 and 8 are")
        key = "checkpoint_format" if fields.has("checkpoint_format") else "format"  # the older of two names
        version = fields.text(key, "gptq")
        if version not in _OFFSETS or fields.flag("is_marlin_format"):
            raise UnsupportedModelError(f"{fields.where}: {key}={shown(version)} is not read here")
        check_rotation(fields)
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
        ones = self.offset * (2**32 - 1) // (2**self.bits - 1)  # the offset in each place of a word
        zeros = nibbles_or_bytes(tensors["qzeros"] + ones, self.bits)[:, :rows]  # [G, N]
        order = tensors.get("g_idx")
        return CodedMatrix(
            unpack=lambda start, stop: nibbles_or_bytes(words[:, start:stop].t(), self.bits),
            scales=tensors["scales"].to(torch.float32).t().contiguous(),
            zeros=zeros.t().contiguous(),
            width=width,
            bits=self.bits,
            group=group,
            order=None if order is None else checked_order(f"{found.base}.g_idx", order, group, len(zeros)),
        )


def check_rotation(fields: Fields) -> None:
    """Refuse matrices whose inputs have to be rotated (QuaRot, Ashkboos et al. 2404.00456), as GPTQModel writes them.

    Raises:
        CheckpointError: a value of the wrong type.
        UnsupportedModelError: there is a rotation.
    """
    rotation = fields.text("rotation")
    if rotation is not None:
        raise UnsupportedModelError(f"{fields.where}: rotation={shown(rotation)} is not read here")


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


# ---- AWQ's tensors in the layout of its matrix product, "gemm" (Lin et al. 2306.00978; AutoAWQ's `packing_utils.py`)
#
# `qweight` [K, N / 8] and `qzeros` [G, N / 8] hold eight outputs in an int32, in the order 0, 2, 4, 6, 1, 3, 5, 7
# from the lowest bits on.

_BITS, _HELD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs 0 to 7 stand


@dataclass(frozen=True)
class AwqFormat:
    """AWQ in 4 bits; `group` None is one scale per output."""

    group: int | None

    @classmethod
    def of(cls, fields: Fields) -> AwqFormat:
        """What `quantization_config` says."""
        bits = fields.whole("bits" if fields.has("bits") else "w_bit")
        if bits != _BITS:
            raise UnsupportedModelError(f"{fields.where}: bits={bits} of AWQ is not read here: 4 is")
        version = fields.text("version", "gemm") or ""
        if version.lower() != "gemm":
            raise UnsupportedModelError(f"{fields.where}: version={shown(version)} of AWQ is not read here: gemm is")
        check_rotation(fields)
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
