"""Checkpoints written to disk: a decoder's weights under their Hugging Face names, its configuration, its tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foretoken.errors import ModelError, StorageError
from foretoken.model.architecture import ModelConfig, config_to_hf
from foretoken.model.decoder import Decoder, DecoderLayer
from foretoken.model.layers import Linear
from foretoken.model.loader import parse_dtype
from foretoken.model.weights import EMBEDDING, INDEX, WEIGHTS
from foretoken.model.writing import writing_folder

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def hf_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the decoder's weights under their Hugging Face names, merged matrices split (as views).

    Raises:
        ModelError: the decoder is packed (load it with `pack=False`), quantised, or one rank's part.
    """
    config = decoder.config
    if decoder.shard.world > 1:
        raise ModelError("one rank's part of a decoder is no checkpoint; load it with world=1")
    q, kv, wide = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    if decoder.embedding.weight is None:
        raise ModelError("a quantised decoder has no plain weights left to write; load it without quant")
    yield EMBEDDING, decoder.embedding.weight.detach()
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        yield f"model.layers.{index}.input_layernorm.weight", layer.input_norm.weight.detach()
        yield from _split(
            layer.qkv_proj, [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"], [q, kv, kv]
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            yield f"{attention}.q_norm.weight", layer.q_norm.weight.detach()
            yield f"{attention}.k_norm.weight", layer.k_norm.weight.detach()
        yield from _split(layer.o_proj, [f"{attention}.o_proj"], [config.hidden_size])
        yield f"model.layers.{index}.post_attention_layernorm.weight", layer.post_norm.weight.detach()
        yield from _split(layer.mlp.gate_up_proj, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [wide, wide])
        yield from _split(layer.mlp.down_proj, [f"{mlp}.down_proj"], [config.hidden_size])
    yield "model.norm.weight", decoder.norm.weight.detach()
    if not config.tie_embeddings:
        yield from _split(decoder.lm_head, ["lm_head"], [config.vocab_size])


def _split(module: Linear, names: list[str], rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    if module.weight is None:
        raise ModelError("a packed decoder has no plain weights left to write; load it with pack=False")
    for kind, full in (("weight", module.weight), ("bias", module.bias)):
        if full is not None:
            yield from (
                (f"{name}.{kind}", part) for name, part in zip(names, torch.split(full.detach(), rows), strict=True)
            )


def save_checkpoint(
    decoder_or_state: Decoder | Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path,
    tokenizer_folder: Path | None = None,
    dtype: str | torch.dtype = "bfloat16",
) -> None:
    """Write a standard Hugging Face folder: `config.json`, `model.safetensors` and the tokenizer's files if given.

    A state has Hugging Face names. Files are written beside their final names first: a crash leaves the old ones whole.

    Raises:
        StorageError: the folder cannot be written.
        ModelError: the decoder is packed.
    """
    target = parse_dtype(dtype)
    pairs = hf_state(decoder_or_state) if isinstance(decoder_or_state, Decoder) else decoder_or_state.items()
    tensors = {name: tensor.detach().to("cpu", target).contiguous().clone() for name, tensor in pairs}
    raw = config_to_hf(config) | {"torch_dtype": str(target).removeprefix("torch.")}
    try:
        with writing_folder(folder, ".writing-") as draft:
            save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
            (draft / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            if tokenizer_folder is not None:
                copy_tokenizer(tokenizer_folder, draft)
            (folder / INDEX).unlink(missing_ok=True)  # of an older, sharded checkpoint: it would win over the new file
            for file in draft.iterdir():
                file.chmod(0o644)
                os.replace(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the checkpoint to {folder}: {error}") from error


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files, those that exist."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
