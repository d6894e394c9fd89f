"""Experts in GGUF files: those of a layer lie in one tensor, and the metadata says how they are chosen.

Sources: llama.cpp's converters, and `src/models` of what reads their files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretoken.errors import UnsupportedModelError
from foretoken.model.expert_config import ExpertNames
from foretoken.model.families import FAMILIES
from foretoken.model.fields import Fields, shown
from foretoken.model.gguf.families import Reader, whole_context, windows
from foretoken.model.gguf.header import TensorInfo

_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,5})\.ffn_(\w+)\.(weight|bias)")
_MATRICES = ("gate", "up", "down")
# Metadata that changes how experts are chosen, with the values that mean what the families here do.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
}


def _of_mixtral(fields: Fields) -> dict[str, Any]:
    return {"num_local_experts": fields.whole("expert_count"), "intermediate_size": fields.whole("feed_forward_length")}


def _of_qwen(fields: Fields) -> dict[str, Any]:
    wide = fields.whole_or("feed_forward_length", 1)
    return {
        "num_experts": fields.whole("expert_count"),
        "intermediate_size": wide,
        "moe_intermediate_size": fields.whole_or(
            "expert_feed_forward_length", max(1, wide // fields.whole("expert_used_count"))
        ),
        "shared_expert_intermediate_size": fields.whole_or("expert_shared_feed_forward_length", wide),
        "norm_topk_prob": fields.flag("expert_weights_norm", default=True),
    }


def _of_qwen2(fields: Fields) -> dict[str, Any]:
    return _of_qwen(fields) | {"norm_topk_prob": False}


def _of_gpt_oss(fields: Fields) -> dict[str, Any]:
    return {
        "num_local_experts": fields.whole("expert_count"),
        "intermediate_size": fields.whole("expert_feed_forward_length"),
    }


@dataclass(frozen=True)
class Mixture:
    """An architecture with experts: the family that it is of, and the keys of its `config.json`: those of experts that
    `read` finds, and others that `options` does.
    """

    model_type: str
    read: Reader
    options: Reader = whole_context

    @property
    def names(self) -> ExpertNames:
        """What the family calls the tensors of experts."""
        keys = FAMILIES[self.model_type].experts
        assert keys is not None
        return keys.names


_MIXTURES = {
    "qwen2moe": Mixture("qwen2_moe", _of_qwen2),
    "qwen3moe": Mixture("qwen3_moe", _of_qwen),
    "gpt-oss": Mixture("gpt_oss", _of_gpt_oss, windows),
    "llama": Mixture("mixtral", _of_mixtral),
}
MIXTURE_ARCHITECTURES = tuple(name for name in _MIXTURES if name != "llama")


def mixture_of(architecture: str, metadata: Mapping[str, Any]) -> Mixture | None:
    """What the file is a mixture of, None for a plain decoder. `metadata`: the architecture's, without prefix."""
    found = _MIXTURES.get(architecture)
    return None if architecture == "llama" and not metadata.get("expert_count") else found


def expert_fields(mixture: Mixture, fields: Fields) -> dict[str, Any]:
    """The keys of a `config.json` that differ from those of an ordinary decoder.

    Raises:
        CheckpointError: metadata that is missing, of the wrong type or out of bounds.
        UnsupportedModelError: another way of choosing among experts.
    """
    for key, allowed in _NEUTRAL.items():
        if fields.has(key) and fields.raw[key] not in allowed:
            raise UnsupportedModelError(f"{fields.where}: {key}={shown(fields.raw[key])} has no native implementation")
    active = {"num_experts_per_tok": fields.whole("expert_used_count")}
    return {"model_type": mixture.model_type, **active, **mixture.read(fields)}


def expert_tensors(tensors: Mapping[str, TensorInfo], names: ExpertNames) -> dict[str, TensorInfo]:
    """The tensors of routers and experts by their Hugging Face names, each expert by itself."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is not None:
            found |= _split(f"model.layers.{match[1]}", match[2], match[3], info, names)
    return found


def _split(prefix: str, part: str, kind: str, info: TensorInfo, names: ExpertNames) -> dict[str, TensorInfo]:
    """One tensor, or its parts by expert; nothing for a tensor that is none of experts."""
    matrix, _, of = part.partition("_")
    if part == "gate_inp":
        return {f"{prefix}.{names.router}.{kind}": info}
    if part == "gate_inp_shexp":
        return {f"{prefix}.{names.shared_gate}.{kind}": replace(info, shape=(1, info.shape[-1]))}
    if matrix not in _MATRICES:
        return {}
    if of == "shexp":
        return {f"{prefix}.{names.shared}.{matrix}_proj.{kind}": info}
    if of != "exps" or len(info.shape) != (3 if kind == "weight" else 2):
        return {}
    size = info.num_bytes // info.shape[0]
    own = getattr(names, matrix)
    return {
        f"{prefix}.{names.experts}.{number}.{own}.{kind}": replace(
            info, shape=info.shape[1:], start=info.start + number * size
        )
        for number in range(info.shape[0])
    }
