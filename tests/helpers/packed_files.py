"""Checkpoints of packed matrices, written from plain ones, and the arithmetic of each format's own package.

Writers round in the plainest way. The twins below read what was written with shifts of whole int32 words and compute
in the dtype of the scales, as AutoGPTQ's `QuantLinear`, AutoAWQ's `dequantize_gemm`, compressed-tensors' `dequantize`
and DeepSeek's `weight_dequant` do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
State = dict[str, Tensor]


@dataclass(frozen=True)
class PackedForm:
    """One way of packing: `config` is the checkpoint's `quantization_config`."""

    config: Mapping[str, Any]
    pack: Callable[[Tensor], State]
    unpack: Callable[[State], Tensor]
    as_codes: bool = True
    skipped: tuple[str, ...] = field(default=("embed_tokens", "lm_head"))


def write_packed(folder: Path, source: Path, form: PackedForm) -> Path:
    """Write the plain checkpoint in `source` to `folder`, its matrices packed."""
    shutil.copytree(source, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": form.config}))
    state: State = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or any(part in name for part in form.skipped):
            state[name] = tensor
        else:
            base = name.removesuffix(".weight")
            state |= {f"{base}.{ending}": part.contiguous() for ending, part in form.pack(tensor.float()).items()}
    save_file(state, folder / "model.safetensors")
    return folder


def parts_of(folder: Path, base: str) -> State:
    """The stored tensors of one matrix, by their endings."""
    state = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{base}."): tensor for name, tensor in state.items() if name.startswith(f"{base}.")}


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [R, C] in int32 words along the columns, the first in the lowest bits."""
    held = 32 // bits
    wide = codes.to(torch.int64).view(len(codes), -1, held) << (torch.arange(held) * bits)
    words = wide.sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def spread_words(words: Tensor, bits: int) -> Tensor:
    """The reverse of `packed_words`."""
    shifted = words[:, :, None] >> torch.arange(0, 32, bits, dtype=torch.int32)
    return (shifted & (2**bits - 1)).reshape(len(words), -1)


def affine(
    weight: Tensor, bits: int, groups: Tensor, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales [N, G] and zero points [N, G] of a matrix whose input k belongs to `groups[k]`."""
    count, top = int(groups.max()) + 1, 2**bits - 1
    low = torch.stack([weight[:, groups == g].amin(1).clamp(max=0) for g in range(count)], 1)
    high = torch.stack([weight[:, groups == g].amax(1).clamp(min=0) for g in range(count)], 1)
    if symmetric:
        scales = torch.maximum(-low, high) / (top // 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(0, top)
    scales = scales.clamp(min=1e-4).to(dtype)
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return codes.to(torch.int64), scales, zeros.to(torch.int64)


def gptq(bits: int = 4, group: int = 32, symmetric: bool = True, offset: int = 1, ordered: bool = False) -> PackedForm:
    def groups_of(width: int) -> Tensor:
        plain = torch.arange(width) // (width if group == -1 else group)
        return plain[torch.randperm(width, generator=torch.Generator().manual_seed(1))] if ordered else plain

    ones = offset * {4: 0x11111111, 8: 0x01010101}[bits]  # GPTQModel takes them from whole words

    def pack(weight: Tensor) -> State:
        groups = groups_of(weight.shape[1])
        codes, scales, zeros = affine(weight, bits, groups, symmetric, torch.float16)
        return {
            "qweight": packed_words(codes, bits).t(),
            "qzeros": packed_words(zeros.t(), bits) - ones,
            "scales": scales.t(),
            "g_idx": groups.to(torch.int32),
        }

    def unpack(parts: State) -> Tensor:
        weight = spread_words(parts["qweight"].t(), bits).t()
        zeros = spread_words(parts["qzeros"] + ones, bits)
        index = parts["g_idx"].long()
        return (parts["scales"][index] * (weight - zeros[index])).t()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}
    if offset == 0:
        config["checkpoint_format"] = "gptq_v2"
    return PackedForm(config, pack, unpack, as_codes=not ordered and group in (-1, 32, 64))


def awq(group: int = 32) -> PackedForm:
    def pack(weight: Tensor) -> State:
        groups = torch.arange(weight.shape[1]) // group
        codes, scales, zeros = affine(weight, 4, groups, False, torch.float16)

        def words(values: Tensor) -> Tensor:
            return packed_words(values.view(len(values), -1, 8)[..., _AWQ_ORDER].flatten(1), 4)

        return {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t()}

    def unpack(parts: State) -> Tensor:
        def order(words: Tensor) -> Tensor:
            found, mixed = spread_words(words, 4), torch.empty(len(words), words.shape[1] * 8, dtype=torch.int32)
            for place, output in enumerate(_AWQ_ORDER):
                mixed[:, output::8] = found[:, place::8]
            return mixed

        scales = parts["scales"].repeat_interleave(group, 0)[: len(parts["qweight"])]
        zeros = order(parts["qzeros"]).repeat_interleave(group, 0)[: len(parts["qweight"])]
        return ((order(parts["qweight"]) - zeros) * scales).t()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return PackedForm(config, pack, unpack, as_codes=group % 32 == 0)


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def compressed_int(bits: int, group: int | None, symmetric: bool, ordered: bool = False) -> PackedForm:
    """int4 in int32, int8 as it is."""
    half, packed = 2 ** (bits - 1), bits == 4

    def pack(weight: Tensor) -> State:
        rows, width = weight.shape
        groups = torch.arange(width) // (group or width)
        if ordered:
            groups = groups[torch.randperm(width, generator=torch.Generator().manual_seed(1))]
        codes, scales, zeros = affine(weight, bits, groups, symmetric, torch.bfloat16)
        found = {"weight_scale": scales}
        if packed:
            found |= {"weight_packed": packed_words(codes, 4), "weight_shape": torch.tensor([rows, width])}
            if not symmetric:
                found["weight_zero_point"] = packed_words(zeros.t(), 4).t()
        else:
            found["weight"] = (codes - half).to(torch.int8)
            if not symmetric:
                found["weight_zero_point"] = (zeros - half).to(torch.int8)
        return found | ({"weight_g_idx": groups.to(torch.int32)} if ordered else {})

    def unpack(parts: State) -> Tensor:
        scales = parts["weight_scale"]
        codes = spread_words(parts["weight_packed"], 4) - half if packed else parts["weight"]
        zeros = torch.zeros(scales.shape)
        if not symmetric:
            stored = parts["weight_zero_point"]
            zeros = spread_words(stored.t(), 4).t()[: len(scales)] - half if packed else stored
        width = codes.shape[1]
        groups = parts["weight_g_idx"].long() if ordered else torch.arange(width) // (group or width)
        return (codes.to(scales.dtype) - zeros.to(scales.dtype)[:, groups]) * scales[:, groups]

    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    config = compressed_config("pack-quantized" if packed else "int-quantized", **args, group_size=group)
    return PackedForm(config, pack, unpack, as_codes=not ordered)


def _scaled(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 numbers, and the scales of their blocks."""
    rows, columns = torch.arange(len(weight)) // block[0], torch.arange(weight.shape[1]) // block[1]
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            scales[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    scales = scales.to(dtype)
    return (weight / scales.float()[rows][:, columns]).to(torch.float8_e4m3fn), scales


def fp8(kind: str, package: str = "fp8") -> PackedForm:
    """`kind` block, channel or tensor; of compressed-tensors with `package` "compressed"."""
    is_own = package == "fp8"
    dtype = torch.float32 if is_own else torch.bfloat16
    ending = "weight_scale_inv" if is_own and kind == "block" else "weight_scale"

    def block_of(shape: torch.Size) -> tuple[int, int]:
        return {"block": (48, 40), "channel": (1, shape[1]), "tensor": tuple(shape)}[kind]  # type: ignore[return-value]

    def pack(weight: Tensor) -> State:
        values, scales = _scaled(weight, block_of(weight.shape), dtype)
        unused = {} if kind != "tensor" else {"input_scale": torch.ones(())}
        return {"weight": values, ending: scales[0, 0] if kind == "tensor" else scales} | unused

    def unpack(parts: State) -> Tensor:
        values, scales, (height, width) = parts["weight"], parts[ending], block_of(parts["weight"].shape)
        if kind == "tensor":
            return values.to(dtype) * scales
        full = scales.repeat_interleave(height, 0)[: len(values)].repeat_interleave(width, 1)[:, : values.shape[1]]
        return values.to(dtype) * full

    if is_own:
        size = [48, 40] if kind == "block" else None
        config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size}
    else:
        args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": kind}
        more = {"block_structure": [48, 40]} if kind == "block" else {}
        config = compressed_config("float-quantized", **args, **more)
    return PackedForm(config, pack, unpack, as_codes=False)


FORMS: dict[str, PackedForm] = {
    "gptq": gptq(),
    "gptq-asymmetric": gptq(symmetric=False),
    "gptq-v2": gptq(symmetric=False, offset=0),
    "gptq-8": gptq(bits=8, symmetric=False),
    "gptq-per-output": gptq(group=-1),
    "gptq-short-group": gptq(group=64, symmetric=False),
    "gptq-act-order": gptq(symmetric=False, ordered=True),
    "gptq-groups-of-24": gptq(group=24),
    "awq": awq(),
    "awq-short-group": awq(64),
    "awq-groups-of-16": awq(16),
    "int4": compressed_int(4, 32, True),
    "int4-asymmetric": compressed_int(4, 32, False),
    "int4-per-output": compressed_int(4, None, False),
    "int4-act-order": compressed_int(4, 32, True, ordered=True),
    "int8": compressed_int(8, None, True),
    "int8-asymmetric": compressed_int(8, 32, False),
    "float8": fp8("channel", "compressed"),
    "float8-blocks": fp8("block", "compressed"),
    "fp8-blocks": fp8("block"),
    "fp8-per-output": fp8("channel"),
    "fp8-per-matrix": fp8("tensor"),
}
