"""Which format `quantization_config` names."""

from __future__ import annotations

from foretoken.errors import UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.packed.awq import AwqFormat
from foretoken.model.packed.compressed import CompressedFormat
from foretoken.model.packed.form import PackedFormat
from foretoken.model.packed.fp8 import Fp8Format
from foretoken.model.packed.gptq import GptqFormat

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
