"""The architectures of llama.cpp that run natively: the family that each is, and how its metadata reads as that
family's `config.json`.

Sources: llama.cpp's `conversion` (which wrote the files) and `src/models` (which reads them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from foretoken.errors import UnsupportedModelError
from foretoken.model.expert_config import ExpertNames
from foretoken.model.families import FAMILIES, LayerNames
from foretoken.model.fields import MAX_LAYERS, Fields, shown
from foretoken.model.gguf.header import TensorInfo

_SOFTCAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
Reader = Callable[[Fields], dict[str, Any]]
_JOINED = re.compile(r"blk\.(0|[1-9]\d{0,5})\.attn_qkv\.(weight|bias)")


def whole_context(fields: Fields) -> dict[str, Any]:
    """Families whose windows GGUF files do not describe.

    Raises:
        UnsupportedModelError: a window that is shorter than the context.
    """
    if 0 < fields.whole_or("attention.sliding_window", 0, least=0) < fields.whole("context_length"):
        raise UnsupportedModelError(
            f"{fields.where}: attention.sliding_window={shown(fields.raw['attention.sliding_window'])} is not read "
            "from files of this architecture; take the model's safetensors checkpoint"
        )
    return {"use_sliding_window": False, "sliding_window": None}


def _gemma(fields: Fields) -> dict[str, Any]:
    return windows(fields) | _softcaps_and_scale(fields)


def _softcaps_and_scale(fields: Fields) -> dict[str, Any]:
    """llama.cpp knows by the number of layers which of them scale queries by their width instead of the head's."""
    heads, layers = fields.whole("attention.head_count"), fields.whole("block_count")
    by_width = fields.whole("embedding_length") // heads if layers in (46, 62) else 0
    caps = {key: fields.number(key, zero=True) or None for key in _SOFTCAPS if fields.has(key)}
    return {"query_pre_attn_scalar": by_width or fields.whole("attention.key_length")} | caps


def _gemma3(fields: Fields) -> dict[str, Any]:
    """The converter leaves the window out where all layers look at all positions, and so rotate in one way."""
    if not fields.whole_or("attention.sliding_window", 0, least=0):
        layers = fields.whole("block_count", most=MAX_LAYERS)
        whole = {"sliding_window": None, "layer_types": ["full_attention"] * layers}
        return _softcaps_and_scale(fields) | whole | {"local_rope": {"rope_type": "default"}}
    local = {"rope_type": "default", "rope_theta": fields.number_or("rope.freq_base_swa", 10_000.0, above=1.0)}
    return _gemma(fields) | {"local_rope": local}


def windows(fields: Fields) -> dict[str, Any]:
    """The window, and which layers have it where that is not the family's own pattern."""
    found: dict[str, Any] = {}
    if fields.has("attention.sliding_window"):
        found["sliding_window"] = fields.whole("attention.sliding_window")
    pattern = fields.raw.get("attention.sliding_window_pattern")
    layers = fields.whole("block_count", most=MAX_LAYERS)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        every = fields.whole("attention.sliding_window_pattern", least=0)
        pattern = [bool(every and (layer + 1) % every) for layer in range(layers)]
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if own else "full_attention" for own in pattern]
    elif pattern is not None:
        raise fields.refusal("attention.sliding_window_pattern", "a whole number or a list")
    return found


def _phi3(fields: Fields) -> dict[str, Any]:
    context = fields.whole("context_length")
    return {
        "sliding_window": fields.whole_or("attention.sliding_window", 0, least=0) or None,
        "original_max_position_embeddings": fields.whole_or("rope.scaling.original_context_length", context),
    }


def _granite(fields: Fields) -> dict[str, Any]:
    size = fields.whole("embedding_length") // fields.whole("attention.head_count")
    return whole_context(fields) | {
        "embedding_multiplier": fields.number_or("embedding_scale", 1.0),
        "residual_multiplier": fields.number_or("residual_scale", 1.0),
        "attention_multiplier": fields.number_or("attention.scale", size**-0.5),
        "logits_scaling": fields.number_or("logit_scale", 1.0),
    }


def _command_r(fields: Fields) -> dict[str, Any]:
    return whole_context(fields) | {"logit_scale": fields.number_or("logit_scale", 1.0)}


def _cohere2(fields: Fields) -> dict[str, Any]:
    return windows(fields) | {"logit_scale": fields.number("logit_scale")}


def layer_parts(names: LayerNames) -> dict[str, str]:
    """The Hugging Face names of llama.cpp's tensors of a layer."""
    parts = {
        "attn_norm": names.attention_norm,
        "attn_output": names.o,
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_sinks": names.sinks,
        # What comes behind attention: a norm of its result, or (gpt-oss) that of what the MLP reads.
        "post_attention_norm": names.attention_out_norm or names.mlp_norm,
        "ffn_norm": names.mlp_norm,
        "post_ffw_norm": names.mlp_out_norm,
        "ffn_up": names.gate_up[-1],  # or gate and up together, as the checkpoint has them
        "ffn_down": names.down,
    }
    if len(names.gate_up) > 1:
        parts["ffn_gate"] = names.gate_up[0]
    merged = len(names.qkv) == 1
    parts |= zip(("attn_qkv",) if merged else ("attn_q", "attn_k", "attn_v"), names.qkv, strict=True)
    return {part: name for part, name in parts.items() if name is not None}


def parted_tensors(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], qkv: tuple[str, ...]
) -> dict[str, TensorInfo]:
    """Queries, keys and values that the converter joined (`--fuse-qkv`), by the Hugging Face names `qkv` of a layer's
    matrices; none for a family that has one matrix of them.
    """
    heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    counts = (heads * size, kv_heads * size, kv_heads * size)
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match = _JOINED.fullmatch(name)
        if match is None or len(qkv) == 1 or info.shape[0] != sum(counts):
            continue
        row_bytes, first = info.num_bytes // info.shape[0], 0
        for own, count in zip(qkv, counts, strict=True):
            part = replace(info, shape=(count, *info.shape[1:]), start=info.start + first * row_bytes)
            found[f"model.layers.{match[1]}.{own}.{match[2]}"] = part
            first += count
    return found


# ---- experts: those of a layer lie in one tensor, and the metadata says how they are chosen

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
class GgufFamily:
    """One architecture. `reads`: keys of its metadata that `options` takes and other families lack. `permutes`: the
    converter reorders the rows of q and k, because llama.cpp then rotates neighbouring channels. `norm_shift` is what
    it adds to the weights of norms. `has_sections`: see `names.has_halves`. `experts` finds the keys of a `config.json`
    about experts; None: it has none.
    """

    model_type: str
    options: Reader
    reads: frozenset[str] = field(default_factory=frozenset)
    permutes: bool = False
    norm_shift: float = 0.0
    has_sections: bool = False
    experts: Reader | None = None

    @property
    def names(self) -> LayerNames:
        """What the family calls the tensors of a layer."""
        return FAMILIES[self.model_type].names

    @property
    def expert_names(self) -> ExpertNames:
        """What the family calls the tensors of experts."""
        keys = FAMILIES[self.model_type].experts
        assert keys is not None
        return keys.names


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("llama", whole_context, permutes=True),  # Mistral's files too
        "qwen2": GgufFamily("qwen2", whole_context),
        "qwen3": GgufFamily("qwen3", whole_context),
        "gemma2": GgufFamily("gemma2", _gemma, _SOFTCAPS, norm_shift=1.0),
        "gemma3": GgufFamily("gemma3_text", _gemma3, _SOFTCAPS | {"rope.freq_base_swa"}, norm_shift=1.0),
        "phi3": GgufFamily("phi3", _phi3),
        "olmo2": GgufFamily("olmo2", whole_context),
        "smollm3": GgufFamily("smollm3", whole_context, permutes=True),
        "granite": GgufFamily(
            "granite",
            _granite,
            frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"}),
            permutes=True,
        ),
        "glm4": GgufFamily("glm4", whole_context, has_sections=True),  # GLM-4V's text model too
        "starcoder2": GgufFamily("starcoder2", whole_context),
        "command-r": GgufFamily("cohere", _command_r, frozenset({"logit_scale"})),
        "cohere2": GgufFamily("cohere2", _cohere2, frozenset({"logit_scale"})),
        "qwen2moe": GgufFamily("qwen2_moe", whole_context, experts=_of_qwen2),
        "qwen3moe": GgufFamily("qwen3_moe", whole_context, experts=_of_qwen),
        "gpt-oss": GgufFamily("gpt_oss", windows, experts=_of_gpt_oss),
    }
)
MIXTRAL = GgufFamily("mixtral", whole_context, permutes=True, experts=_of_mixtral)  # files of "llama" with experts


def expert_fields(experts: Reader, fields: Fields) -> dict[str, Any]:
    """The keys of a `config.json` that an ordinary decoder lacks; `experts`: see `GgufFamily`.

    Raises:
        CheckpointError: metadata that is missing, of the wrong type or out of bounds.
        UnsupportedModelError: another way of choosing among experts.
    """
    for key, allowed in _NEUTRAL.items():
        if fields.has(key) and fields.raw[key] not in allowed:
            raise UnsupportedModelError(f"{fields.where}: {key}={shown(fields.raw[key])} has no native implementation")
    return {"num_experts_per_tok": fields.whole("expert_used_count"), **experts(fields)}


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
