"""GGUF files of Hugging Face folders, written with the `gguf` package as llama.cpp's converter does it.

Types that the package cannot quantise to (K-quants) are rounded here in the plainest way: what matters is that the
numbers are sane, since a reader is compared with the package's own dequantisation of the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file

from tests.helpers import gguf_experts
from tests.helpers.gguf_blocks import WRITERS

_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "cohere": "command-r"} | gguf_experts.ARCHITECTURES
_PERMUTED = ("llama", "smollm3", "granite")  # q and k, by the converter
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_TYPES, *WRITERS, "MXFP4")


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    tokenizer: bool = False,
    tensors_per_part: int = 0,
    fuse_qkv: bool = False,
    **extra: object,
) -> Path:
    """Write the checkpoint in `folder` to `path`, its matrices in `kind` (in Q8_0 where a row is no whole block) and
    all else in F32; with `tensors_per_part` to several files beside it, named as `llama-gguf-split` names them.
    `fuse_qkv` joins queries, keys and values, as the converter's option does. `extra` is metadata of the architecture,
    dots written as two underscores.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    state = {
        name: tensor.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    state = gguf_experts.stacked(state)
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    _add_config(writer, arch, config)
    for key, value in extra.items():
        _add(writer, f"{arch}.{key.replace('__', '.')}", value)
    if tokenizer:
        add_bpe(writer, folder)
    waiting: dict[str, dict[str, np.ndarray]] = {}  # parts of matrices that are joined
    for name, tensor in state.items():
        if arch in _PERMUTED and ("q_proj" in name or "k_proj" in name):
            tensor = interleaved(tensor, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        values = tensor.numpy()
        if fuse_qkv and ".attn_" in own and own.split(".")[2] in ("attn_q", "attn_k", "attn_v"):
            joined = own.replace(own.split(".")[2], "attn_qkv")
            held = waiting.setdefault(joined, {})
            held[own.split(".")[2]] = values
            if len(held) < 3:
                continue
            own, values = joined, np.concatenate([held[part] for part in ("attn_q", "attn_k", "attn_v")])
        add_tensor(writer, own, values, kind)
    for name in ("long", "short"):
        longrope = (config.get("rope_parameters") or {}).get(f"{name}_factor")
        if longrope is not None:
            add_tensor(writer, f"rope_factors_{name}.weight", np.array(longrope, np.float32), "F32")
    factors = rope_factors(config)
    if factors is not None:
        add_tensor(writer, "rope_freqs.weight", factors, "F32")
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's `permute`."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    if values.ndim == 1 or kind == "F32" or name.endswith(".bias") or "gate_inp" in name:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        return
    wanted = GGMLQuantizationType[kind]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        wanted = GGMLQuantizationType.Q8_0
    if wanted == GGMLQuantizationType.F16:
        writer.add_tensor(name, values.astype(np.float16))
        return
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])  # those of all experts, if there are
    if wanted.name in K_TYPES:
        raw = k_blocks(rows, wanted.name)
    elif wanted.name in WRITERS:
        block, write = WRITERS[wanted.name]
        raw = write(rows.reshape(-1, block))
    else:
        raw = quants.quantize(rows, wanted)
    writer.add_tensor(name, raw.reshape(*values.shape[:-1], -1), raw_dtype=wanted)


def k_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Rows [N, K] as K-quant blocks, rounded to the nearest step of each group."""
    rows = len(values)
    if kind == "Q6_K":
        groups = values.reshape(-1, 16, 16)
        wide = np.abs(groups).max(-1) / 31
        half = np.maximum(wide.max(-1, keepdims=True) / 127, 1e-7).astype(np.float16)
        steps = np.clip(np.round(wide / half.astype(np.float32)), 1, 127)
        scale = (half.astype(np.float32) * steps)[..., None]
        codes = (np.clip(np.round(groups / scale), -32, 31) + 32).astype(np.uint8).reshape(-1, 256)
        low, high = (codes & 15).reshape(-1, 2, 2, 64), (codes >> 4).reshape(-1, 2, 4, 32)
        packed = [
            (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128),
            (high << np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)).sum(2, dtype=np.uint8).reshape(-1, 64),
            steps.astype(np.int8).view(np.uint8),
            half.view(np.uint8),
        ]
        return np.concatenate(packed, axis=1).reshape(rows, -1)
    most = 15 if kind == "Q4_K" else 31
    groups = values.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    wide = (groups.max(-1) - least) / most
    d = np.maximum(wide.max(-1, keepdims=True) / 63, 1e-7).astype(np.float16)
    dmin = np.maximum(-least.min(-1, keepdims=True) / 63, 1e-7).astype(np.float16)
    steps = np.clip(np.round(wide / d.astype(np.float32)), 1, 63).astype(np.uint8)
    below = np.clip(np.round(-least / dmin.astype(np.float32)), 0, 63).astype(np.uint8)
    scale = (d.astype(np.float32) * steps)[..., None]
    floor = (dmin.astype(np.float32) * below)[..., None]
    codes = np.clip(np.round((groups + floor) / scale), 0, most).astype(np.uint8)
    scales = [
        (steps[:, :4] & 63) | (steps[:, 4:] >> 4) << 6,
        (below[:, :4] & 63) | (below[:, 4:] >> 4) << 6,
        (steps[:, 4:] & 15) | (below[:, 4:] & 15) << 4,
    ]
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    fifth = ((codes >> 4) << np.arange(8, dtype=np.uint8).reshape(1, 8, 1)).sum(1, dtype=np.uint8)
    high = [fifth] if kind == "Q5_K" else []
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *scales, *high, low], axis=1).reshape(rows, -1)


def _add_config(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
    if arch != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if not arch.startswith("gemma"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        scale = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(scale) / math.log(config["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(factor)
    _add_options(writer, arch, config)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 0)


def _add_options(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    """What only some converters write."""
    if "num_experts_per_tok" in config:
        gguf_experts.add_options(writer, config)
    slides = arch != "gemma3" or "sliding_attention" in config.get(
        "layer_types", ["sliding_attention"]
    )  # else the converter is silent
    if slides and arch in ("gemma2", "gemma3", "phi3", "cohere2"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if slides and "layer_types" in config and arch in ("gemma3", "cohere2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping") is not None:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping") is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, str(value))


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """The converter's `rope_freqs` of Llama 3's scaling; None for another one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original, found = rope["original_max_position_embeddings"], []
    for frequency in frequencies:
        length = 2 * torch.pi / frequency
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            found.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(found, np.float32)


def add_bpe(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """The byte-level BPE of `folder`, with its chat template."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary = described["model"]["vocab"]
    special = {token["content"]: token["special"] for token in described["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([(3 if special[token] else 4) if token in special else 1 for token in tokens])
    merges = described["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])


def add_sentencepiece(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The SentencePiece BPE of `folder`: scores instead of merges."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = described["model"]["vocab"]
    special = {token["content"] for token in described["added_tokens"]}
    merged = [merge.split(" ") if isinstance(merge, str) else merge for merge in described["model"]["merges"]]
    rank = {"".join(pair): place for place, pair in reversed(list(enumerate(merged)))}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank.get(token, 1e6)) for token in tokens])
    kinds = [3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens]
    writer.add_token_types(kinds)
    writer.add_unk_token_id(vocabulary["<unk>"])
