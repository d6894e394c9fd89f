"""Which format `quantization_config` names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.matrices.codes import BLOCK_ROWS, GroupedCodes, large_page_tensor
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.packed.awq import AwqFormat
from foretoken.model.packed.compressed import CompressedFormat
from foretoken.model.packed.form import PackedFormat
from foretoken.model.packed.fp8 import Fp8Format
from foretoken.model.packed.gptq import GptqFormat

_NO_SUPERS: dict[str, Any] = {"super_scales": None, "super_minimums": None}


def assembled(parts: Iterable[GroupedCodes], num_rows: int, dtype: torch.dtype) -> GroupedWeight:
    """The matrix [N, K] of `parts`, all but the last of whole blocks of rows; `dtype` is that of a table's rows."""
    blocks, filled = -(-num_rows // BLOCK_ROWS), 0
    whole: dict[str, Tensor] = {}  # by field
    for part in parts:
        weight = GroupedWeight.of(part, dtype)
        count, own = len(weight.codes), _tensors(weight)
        if count == blocks:
            return weight
        if not whole:
            whole = {name: large_page_tensor((blocks, *own[name].shape[1:]), own[name].dtype) for name in own}
        elif weight.form != (before := replace(weight, **_NO_SUPERS | whole)).form:
            # float16 may hold the scales of some rows exactly, and not of others; a broken file has infinite ones
            own, whole = _expanded(weight), _expanded(before)
        for name, tensor in own.items():
            whole[name][filled : filled + count] = tensor
        filled += count
    assert filled == blocks, "the parts do not make up the matrix"
    return replace(weight, num_rows=num_rows, **_NO_SUPERS | whole)


def _tensors(weight: GroupedWeight) -> dict[str, Tensor]:
    """The tensors of a matrix by field."""
    return {field.name: value for field in fields(weight) if isinstance(value := getattr(weight, field.name), Tensor)}


def _expanded(weight: GroupedWeight) -> dict[str, Tensor]:
    """The same with one float32 scale and minimum for each group."""
    scales, minimums = weight.numbers(slice(None))
    return {"codes": weight.codes, "scales": scales} | ({} if minimums is None else {"minimums": minimums})


METHODS = ("gptq", "awq", "compressed-tensors", "fp8")


def method_of(config: Fields) -> str | None:
    """What a `config.json` calls its way of packing matrices; None where nothing is packed.

    Raises:
        CheckpointError: a value of the wrong type.
    """
    fields = config.fields("quantization_config")
    return None if fields is None or not fields.raw else fields.text("quant_method", "unknown")


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
