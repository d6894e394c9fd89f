"""What llama.cpp calls things, and what Hugging Face does: tensors, and metadata as a `config.json` would say it.

Sources: llama.cpp's `convert_hf_to_gguf.py` (which wrote the files) and `llama-model.cpp` (which reads them).
"""

from __future__ import annotations

import re
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, shown
from foretoken.model.gguf.experts import MIXTURE_ARCHITECTURES, Mixture, expert_fields, mixture_of
from foretoken.model.gguf.header import Header
from foretoken.model.gguf.special_tokens import NO_TOKEN, end_tokens

# Mistral's and Mixtral's files are of architecture "llama" too.
ARCHITECTURES = ("llama", "qwen2", "qwen3", *MIXTURE_ARCHITECTURES)
# The converter reorders the rows of q and k of these, because llama.cpp then rotates neighbouring channels.
_INTERLEAVED = ("llama",)
ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
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


def hf_name(name: str) -> str:
    """The Hugging Face name of one of llama.cpp's tensors; its own where there is none."""
    found = _IN_LAYER.fullmatch(name)
    if found is not None and found[2] in _LAYER:
        return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"
    found = _OUTSIDE.fullmatch(name)
    if found is not None and found[1] in _WHOLE:
        return f"{_WHOLE[found[1]]}.{found[2]}"
    return name


def interleaved_heads(name: str, architecture: str, raw: dict[str, Any]) -> int | None:
    """The number of heads among which the rows of a tensor (by its Hugging Face name) were interleaved; None if they
    were not.
    """
    if architecture not in _INTERLEAVED:
        return None
    if ".self_attn.q_proj." in name:
        return int(raw["num_attention_heads"])
    return int(raw["num_key_value_heads"]) if ".self_attn.k_proj." in name else None


def architecture_of(header: Header) -> str:
    """The architecture, which has to be one that the native decoder runs.

    Raises:
        CheckpointError: the file names none.
        UnsupportedModelError: another one.
    """
    fields = header.fields
    name = fields.text("general.architecture")
    if name is None:
        raise fields.refusal("general.architecture", "a string")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} has general.architecture={shown(name)}: GGUF files of {', '.join(ARCHITECTURES)} run "
            "(Mistral's and Mixtral's are of 'llama'); take the model's safetensors checkpoint"
        )
    return name


def mixture_in(header: Header) -> Mixture | None:
    """The mixture of experts that the file describes; None for an ordinary decoder."""
    architecture = architecture_of(header)
    return mixture_of(architecture, _of_architecture(header, architecture))


def config_fields(header: Header) -> dict[str, Any]:
    """The metadata as the `config.json` of the same model would say it.

    Raises:
        CheckpointError: metadata that is missing, of the wrong type or out of bounds.
        UnsupportedModelError: an architecture or an option without a native implementation.
    """
    architecture = architecture_of(header)
    fields = Fields(_of_architecture(header, architecture), f"{header.path}: metadata {architecture}")
    _refuse_options(fields)
    mixture = mixture_in(header)
    if mixture is None and fields.whole_or("expert_count", 0, least=0):
        raise UnsupportedModelError(f"{fields.where}: expert_count={fields.raw['expert_count']} of this architecture")
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    kv_heads = fields.whole_or("attention.head_count_kv", heads)
    head_dim = fields.whole_or("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.whole_or(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{fields.where}: {key}={fields.raw[key]} beside heads of {head_dim} has no native implementation"
            )
    context = fields.whole("context_length")
    if fields.whole_or("attention.sliding_window", context) < context:
        raise UnsupportedModelError(
            f"{fields.where}: attention.sliding_window={fields.raw['attention.sliding_window']} is not read from GGUF "
            "files; take the model's safetensors checkpoint"
        )
    vocab_size = _vocab_size(header, fields)
    own = header.fields
    bos = own.whole_or("tokenizer.ggml.bos_token_id", NO_TOKEN, least=0, most=NO_TOKEN)
    inner = (
        {"model_type": architecture, "intermediate_size": fields.whole("feed_forward_length")}
        if mixture is None
        else expert_fields(mixture, fields)
    )
    return {
        **inner,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", zero=True),
        "rope_parameters": _rope(fields, context),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "use_sliding_window": False,
        "bos_token_id": bos if bos < vocab_size else None,
        "eos_token_id": end_tokens(header, vocab_size),
    }


def _of_architecture(header: Header, architecture: str) -> dict[str, Any]:
    """The metadata of one architecture, without its prefix."""
    prefix = f"{architecture}."
    return {key[len(prefix) :]: value for key, value in header.metadata.items() if key.startswith(prefix)}


def _refuse_options(fields: Fields) -> None:
    for key, neutral in _NEUTRAL.items():
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


def _rope(fields: Fields, context: int) -> dict[str, Any]:
    """Base and scaling of the rotary embeddings, in transformers' words."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": fields.number_or("rope.freq_base", 10_000.0, above=1.0),
    }
    kind = fields.text("rope.scaling.type", "none")
    if fields.has("rope.scale_linear"):  # how old files say it
        factor, kind = fields.number("rope.scale_linear"), "linear"
    else:
        factor = fields.number_or("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(f"{fields.where}: rope.scaling.type={shown(kind)} has no native implementation")
    if fields.number_or("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.where}: rope.scaling.attn_factor has no native implementation")
    return rope | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.whole_or("rope.scaling.original_context_length", context),
        "beta_fast": fields.number_or("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number_or("rope.scaling.yarn_beta_slow", 1.0),
    }
