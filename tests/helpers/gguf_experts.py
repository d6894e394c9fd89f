"""Experts as llama.cpp's converters write them: those of a layer in one tensor, and what the metadata says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder with those of all experts of a layer in one, and gpt-oss's gates apart from its ups."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        elif name.endswith("sinks"):
            found[f"{name}.weight"] = tensor
        elif "experts.gate_up_proj" in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            outputs_last = tensor if kind == "bias" else tensor.transpose(1, 2)
            for place, part in enumerate(("gate_proj", "up_proj")):
                base = name.removesuffix("_bias").replace("gate_up_proj", part)
                found[f"{base}.{kind}"] = outputs_last[:, place::2]
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor.transpose(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = tensor
        else:
            found[name] = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
    stacks = {name: torch.stack([own[number] for number in sorted(own)]) for name, own in experts.items()}
    return {name: tensor.contiguous() for name, tensor in (found | stacks).items()}


def add_options(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The metadata of experts."""
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
