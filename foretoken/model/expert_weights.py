"""Checkpoints whose experts lie in one tensor a layer, read as if each expert had tensors of its own.

- transformers' own layout: `gate_up_proj` [E, 2 I, D], gates before ups, and `down_proj` [E, D, I];
- gpt-oss: `gate_up_proj` [E, D, 2 I], gates and ups in turn, and `down_proj` [E, I, D], with biases of both;
- gpt-oss in MXFP4: `_blocks` [E, N, K / 32, 16] and `_scales` [E, N, K / 32], again with gates and ups in turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foretoken.model.expert_config import MAX_EXPERTS, ExpertKeys
from foretoken.model.matrices.codes import BLOCK_ROWS, GROUP, GroupedCodes, mxfp4_codes
from foretoken.model.weights import AS_CODES, StoredKind, Weights, opened, stored_bytes, stored_kinds

_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4}
_BLOCK_BYTES = GROUP // 2


@dataclass(frozen=True)
class _View:
    """A part of a stored tensor: some outputs of one expert. `scales`: the tensor of exponents and its file, for
    MXFP4.
    """

    stored: str
    expert: int
    outputs: slice
    is_transposed: bool = False
    scales: tuple[str, Path] | None = None


class ExpertWeights(Weights):
    """`Weights` with a name for every matrix and bias of every expert."""

    def __init__(self, folder: Path, keys: ExpertKeys) -> None:
        super().__init__(folder, is_decoder=True)
        self._stored_about = dict(self._about)
        self._views: dict[str, _View] = {}
        pattern = re.compile(rf"(.+\.{re.escape(keys.names.experts)})\.(gate_up|down)_proj(|_bias|_blocks)")
        for name in list(self._about):
            found = pattern.fullmatch(name)
            if found is not None:
                self._split(name, found[1], found[2], found[3], keys)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights`; a matrix in MXFP4 as float32 numbers."""
        view = self._views.get(name)
        if view is None:
            return super().read(name, shape)
        self.check_shape(name, shape)
        if view.scales is not None:
            return self._codes(name).dequantised()
        with opened(self._file_of[name]) as tensors:
            own: Tensor = tensors.get_slice(self._stored_name(view.stored))[view.expert]
        return (own.T if view.is_transposed else own)[view.outputs]

    def grouped_rows(self, name: str) -> Iterator[GroupedCodes] | None:
        """See `Weights`: matrices in MXFP4 have codes, and come whole."""
        return iter((self._codes(name),)) if self._is_packed(name) else None

    def sample(self, name: str) -> GroupedCodes | None:
        """See `Weights`."""
        return self._codes(name, BLOCK_ROWS) if self._is_packed(name) else None

    def kinds(self) -> list[StoredKind]:
        """See `Weights`: the types of the tensors in the files, not of their parts."""
        packed = {view.stored for view in self._views.values() if view.scales is not None}
        packed |= {view.scales[0] for view in self._views.values() if view.scales is not None}

        def kind(name: str, stored: str) -> str:
            return "MXFP4" if name in packed else stored

        about = self._stored_about.items()
        tensors = [(kind(name, stored), stored_bytes(shape, stored)) for name, (shape, stored) in about]
        return stored_kinds(tensors, lambda stored: AS_CODES if stored == "MXFP4" else "as stored")

    def _is_packed(self, name: str) -> bool:
        return name in self._views and self._views[name].scales is not None

    def _codes(self, name: str, num_rows: int | None = None) -> GroupedCodes:
        """A matrix in MXFP4, or its first rows."""
        view = self._views[name]
        assert view.scales is not None
        with opened(self._file_of[name]) as tensors:
            blocks = tensors.get_slice(self._stored_name(view.stored))[view.expert]  # [N, K / 32, 16]
        scales, file = view.scales
        with opened(file) as tensors:
            exponents = tensors.get_slice(self._stored_name(scales))[view.expert]  # [N, K / 32]
        own, exponents = blocks[view.outputs][:num_rows], exponents[view.outputs][:num_rows]
        return mxfp4_codes(own.numpy(), exponents.numpy())

    def _split(self, name: str, prefix: str, part: str, ending: str, keys: ExpertKeys) -> None:
        """Name the parts of one tensor; one of another form stays as it is, and has no place in any model."""
        shape, stored = self._about[name]
        if len(shape) != _DIMENSIONS[ending] or 0 in shape or shape[0] > MAX_EXPERTS:
            return
        scales = None
        if ending == "_blocks":
            other = f"{name.removesuffix('_blocks')}_scales"
            if shape[3] != _BLOCK_BYTES or stored != "U8" or self._about.get(other) != (shape[:3], "U8"):
                return
            scales = other, self._file_of[other]
        is_transposed = keys.is_transposed and not ending
        outputs, inputs = _matrix_shape(shape, ending, is_transposed)
        names = keys.names
        wanted = {names.down: slice(None)}
        if part == "gate_up":
            half = outputs // 2
            turns = keys.is_transposed
            gates, ups = (slice(0, None, 2), slice(1, None, 2)) if turns else (slice(0, half), slice(half, None))
            wanted = {names.gate: gates, names.up: ups}
        kind = "bias" if ending == "_bias" else "weight"
        for expert in range(shape[0]):
            for own, rows in wanted.items():
                view = f"{prefix}.{expert}.{own}.{kind}"
                count = len(range(outputs)[rows])
                self._views[view] = _View(name, expert, rows, is_transposed, scales)
                self._file_of[view] = self._file_of[name]
                self._about[view] = ((count, *inputs), stored if scales is None else "F32")
        for gone in (name,) if scales is None else (name, scales[0]):
            del self._about[gone], self._file_of[gone]


def _matrix_shape(shape: Sequence[int], ending: str, is_transposed: bool) -> tuple[int, tuple[int, ...]]:
    """Outputs of one expert, and its inputs if it is a matrix."""
    if ending == "_bias":
        return shape[1], ()
    if ending == "_blocks":
        return shape[1], (shape[2] * GROUP,)
    return (shape[2], (shape[1],)) if is_transposed else (shape[1], (shape[2],))
