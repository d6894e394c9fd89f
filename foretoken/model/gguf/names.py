"""What llama.cpp calls things, and what Hugging Face does: tensors, and metadata as a `config.json` would say it.

Sources: llama.cpp's `convert_hf_to_gguf.py` (which wrote the files) and `llama-model.cpp` (which reads them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.families import FAMILIES, Family
from foretoken.model.fields import Fields, shown
from foretoken.model.gguf.families import GGUF_FAMILIES, MIXTRAL, GgufFamily, expert_fields
from foretoken.model.gguf.header import Header, MetadataArray
from foretoken.model.gguf.special_tokens import NO_TOKEN, end_tokens

ARCHITECTURES = tuple(GGUF_FAMILIES)
ROPE_FACTORS = "rope_freqs.weight"
# LongRoPE's, of short and of long texts; the second are not read, see `architecture.RopeConfig`.
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_EMBEDDING = "token_embd.weight"
_PATTERN = "attention.sliding_window_pattern"
_SECTIONS = "rope.dimension_sections"

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")

# Metadata that changes what the model computes and that the decoder of these families lacks, with its neutral value.
_NEUTRAL: dict[str, object] = {
    "attention.causal": True,
    "attention.scale": None,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def hf_name(name: str, parts: Mapping[str, str]) -> str:
    """The Hugging Face name of one of llama.cpp's tensors, or its own. `parts` are `families.layer_parts`."""
    found = _IN_LAYER.fullmatch(name)
    if found is not None and found[2] in parts:
        own = f"model.layers.{found[1]}.{parts[found[2]]}"
        return own if found[2] == "attn_sinks" else f"{own}.{found[3]}"
    found = _OUTSIDE.fullmatch(name)
    if found is not None and found[1] in _WHOLE:
        return f"{_WHOLE[found[1]]}.{found[2]}"
    return name


def interleaved_heads(name: str, family: GgufFamily, raw: dict[str, Any]) -> int | None:
    """The number of heads among which a tensor's rows were interleaved, by its Hugging Face name; None if not."""
    if not family.permutes:
        return None
    if ".self_attn.q_proj." in name:
        return int(raw["num_attention_heads"])
    return int(raw["num_key_value_heads"]) if ".self_attn.k_proj." in name else None


def has_halves(header: Header, family: GgufFamily) -> bool:
    """Whether the channels that are paired lie in two halves, though the family's safetensors have them side by side.

    The converter reorders the rows of q and k where positions have sections for images; a text turns as without them.

    Raises:
        CheckpointError: sections that are no numbers.
    """
    key = f"{architecture_of(header)}.{_SECTIONS}"
    if not family.has_sections or not isinstance(header.metadata.get(key), MetadataArray):
        return False
    counts = header.numbers(key)
    first = [] if counts is None else counts[:2].tolist()
    return len(first) > 1 and all(count > 0 for count in first)


def family_of(header: Header) -> GgufFamily:
    """What the file's architecture is."""
    architecture = architecture_of(header)
    if architecture == "llama" and header.metadata.get("llama.expert_count"):
        return MIXTRAL
    return GGUF_FAMILIES[architecture]


def architecture_of(header: Header) -> str:
    """The architecture, which has to be one that the native decoder runs.

    Raises:
        CheckpointError: the file names none.
        UnsupportedModelError: another one, or the file holds an adapter.
    """
    fields = header.fields
    name = fields.text("general.architecture")
    if fields.raw.get("general.type") == "adapter":  # its architecture is that of the model it belongs to
        raise UnsupportedModelError(
            f"{header.path} holds an adapter (general.type='adapter'), and adapters are not applied here: merge it "
            "(llama.cpp's llama-export-lora) and give the file of the result"
        )
    if name is None:
        raise fields.refusal("general.architecture", "a string")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} has general.architecture={shown(name)}: GGUF files of {', '.join(ARCHITECTURES)} run "
            "(Mistral's and Mixtral's are of 'llama'); take the model's safetensors checkpoint"
        )
    return name


def config_fields(header: Header) -> dict[str, Any]:
    """The metadata as the `config.json` of the same model would say it.

    Raises:
        CheckpointError: metadata that is missing, of the wrong type or out of bounds.
        UnsupportedModelError: an architecture or an option without a native implementation.
    """
    architecture = architecture_of(header)
    fields = Fields(_of_architecture(header, architecture), f"{header.path}: metadata {architecture}")
    family = family_of(header)
    _refuse_options(fields, family)
    if family.experts is None and fields.whole_or("expert_count", 0, least=0):
        raise UnsupportedModelError(f"{fields.where}: expert_count={fields.raw['expert_count']} of this architecture")
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    kv_heads = fields.whole_or("attention.head_count_kv", heads)
    head_dim = fields.whole_or("attention.key_length", hidden // heads)
    if fields.whole_or("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{fields.where}: attention.value_length={fields.raw['attention.value_length']} beside heads of {head_dim} "
            "has no native implementation"
        )
    context = fields.whole("context_length")
    kind = FAMILIES[family.model_type]
    options = family.options(fields)
    rope, local_rope = _rope(fields, context, kind, head_dim), options.pop("local_rope", None)
    if rope["rope_type"] == "yarn":  # which files do not say
        rope["truncate"] = kind.defaults.get("rope_parameters", {}).get("truncate", True)
    norm = "rms_epsilon" if kind.norm.kind == "rms" else "epsilon"
    has_biases = any(f"blk.0.{name}.bias" in header.tensors for name in ("attn_q", "attn_qkv"))
    vocab_size = _vocab_size(header, fields)
    own = header.fields
    bos = own.whole_or("tokenizer.ggml.bos_token_id", NO_TOKEN, least=0, most=NO_TOKEN)
    if family.experts is None:
        inner = {"intermediate_size": fields.whole("feed_forward_length")}
    else:
        inner = expert_fields(family.experts, fields)
    return {
        "model_type": family.model_type,
        **inner,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        kind.eps: fields.number(f"attention.layer_norm_{norm}", zero=True),
        "rope_parameters": rope if local_rope is None else {"full_attention": rope, "sliding_attention": local_rope},
        "attention_bias": has_biases,
        "use_bias": has_biases,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **options,
        "bos_token_id": bos if bos < vocab_size else None,
        "eos_token_id": end_tokens(header, vocab_size),
    }


def _of_architecture(header: Header, architecture: str) -> dict[str, Any]:
    """The metadata of one architecture, without its prefix; which layers have windows may be a list in the file."""
    prefix = f"{architecture}."
    found: dict[str, Any] = {
        key[len(prefix) :]: value for key, value in header.metadata.items() if key.startswith(prefix)
    }
    if isinstance(found.get(_PATTERN), MetadataArray):
        pattern = header.numbers(prefix + _PATTERN)
        found[_PATTERN] = None if pattern is None else pattern.tolist()
    return found


def _refuse_options(fields: Fields, family: GgufFamily) -> None:
    one_base = {"rope.freq_base_swa": fields.raw.get("rope.freq_base", 10_000.0)}  # of layers with a window, too
    for key, neutral in (_NEUTRAL | one_base).items():
        if key in family.reads:
            continue
        value = fields.raw.get(key, neutral)
        if value != neutral:
            raise UnsupportedModelError(f"{fields.where}: {key}={shown(value)} has no native implementation")


def _vocab_size(header: Header, fields: Fields) -> int:
    """Rows of the embedding, which the metadata must not contradict."""
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"tensor {_EMBEDDING} is missing in {header.path}, or is no matrix: the file is incomplete"
        )
    rows = embedding.shape[0]
    claimed = fields.whole_or("vocab_size", rows)
    if claimed != rows:
        raise CheckpointError(
            f"{fields.where}: vocab_size={claimed:,}, and tensor {_EMBEDDING} has {rows:,} rows: the file is corrupt"
        )
    return rows


def _rope(fields: Fields, context: int, kind_of: Family, head_dim: int) -> dict[str, Any]:
    """Base and scaling of the rotary embeddings, in transformers' words."""
    rotated = fields.whole_or("rope.dimension_count", head_dim)
    if rotated != head_dim and not kind_of.is_partial:
        raise UnsupportedModelError(
            f"{fields.where}: rope.dimension_count={rotated} beside heads of {head_dim} has no native implementation"
        )
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": fields.number_or("rope.freq_base", 10_000.0, above=1.0),
    }
    if kind_of.is_partial:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = fields.text("rope.scaling.type", "linear")  # llama.cpp's default
    key = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"  # how old files say it
    factor = fields.number_or(key, 1.0)
    has_longrope = kind_of.has_longrope and (kind in ("none", "longrope") or factor == 1.0)
    if has_longrope:  # the factors are tensors
        return rope
    if fields.number_or("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.where}: rope.scaling.attn_factor has no native implementation")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(f"{fields.where}: rope.scaling.type={shown(kind)} has no native implementation")
    return rope | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.whole_or("rope.scaling.original_context_length", context),
        "beta_fast": fields.number_or("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number_or("rope.scaling.yarn_beta_slow", 1.0),
    }
