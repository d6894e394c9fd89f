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
from torch import Tensor, nn

from foretoken.errors import ModelError, StorageError
from foretoken.files import writing_folder
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import config_to_hf
from foretoken.model.decoder import Decoder
from foretoken.model.layer_tensors import layer_matrices, layer_norms, layer_scores, sinks_name
from foretoken.model.layers import Linear
from foretoken.model.loader import parse_dtype
from foretoken.model.rope import RowOrders, in_order
from foretoken.model.weights import EMBEDDING, INDEX, WEIGHTS

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
    """Yield the decoder's weights under their Hugging Face names, merged matrices split (as views where rows keep their
    order).

    Raises:
        ModelError: the decoder is packed (load it with `pack=False`), quantised, or one rank's part.
    """
    orders = RowOrders(decoder.config)
    for name, tensor in _own_state(decoder):
        order = orders.of(name)
        yield name, tensor if order is None else in_order(tensor, order.argsort())


def _own_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The same with heads' channels in the decoder's order."""
    config = decoder.config
    if decoder.shard.world > 1:
        raise ModelError("one rank's part of a decoder is no checkpoint; load it with world=1")
    if decoder.embedding.weight is None:
        raise ModelError("a quantised decoder has no plain weights left to write; load it without quant")
    yield EMBEDDING, decoder.embedding.weight.detach()
    for index, layer in enumerate(decoder.layers):
        for module, matrix in layer_matrices(config, index).items():
            yield from _split(layer.get_submodule(module), list(matrix.rows), list(matrix.rows.values()))
        for module, matrix in layer_scores(config, index).items():
            (name,) = matrix.rows
            yield from _named(layer.get_submodule(module), name)
        for module, (name, _) in layer_norms(config, index).items():
            yield from _named(layer.get_submodule(module), name)
        if config.has_sinks:
            assert isinstance(layer.sinks, Tensor)
            yield sinks_name(config, index), layer.sinks.detach()
    yield from _named(decoder.norm, "model.norm")
    if not config.tie_embeddings:
        yield from _split(decoder.lm_head, ["lm_head"], [config.vocab_size])


def _named(module: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    for kind, parameter in module.named_parameters():
        yield f"{name}.{kind}", parameter.detach()


def _split(module: nn.Module, names: list[str], rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    assert isinstance(module, Linear)
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
        UnsupportedModelError: a family whose checkpoints are only read.
    """
    target = parse_dtype(dtype)
    raw = config_to_hf(config) | {"torch_dtype": str(target).removeprefix("torch.")}
    pairs = hf_state(decoder_or_state) if isinstance(decoder_or_state, Decoder) else decoder_or_state.items()
    tensors = {name: tensor.detach().to("cpu", target).contiguous().clone() for name, tensor in pairs}
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
