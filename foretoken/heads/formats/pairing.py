"""Whether a head was made for a target: sizes, layers, and the note about its target that a head's folder carries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.errors import MismatchError
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import HEAD_NOTE, Fields, read_json
from foretoken.model.gguf.parts import part_files

_WEIGHTS = "*.safetensors"
# What is read of a checkpoint to tell it from others: its beginnings, and pieces from all over it. A target that was
# trained on may have the same embedding, with which a file of weights begins.
_FIRST_BYTES, _PIECE_BYTES, _NUM_PIECES = 1 << 20, 1 << 12, 512
_SAMPLED = "sha256-samples:"


def check_sizes(where: str, target: ModelConfig, hidden_size: int, vocab_size: int, taps: tuple[int, ...]) -> None:
    """Compare what a head says of its target with the target.

    Raises:
        MismatchError: another hidden size or vocabulary, or too few layers.
    """
    pairs = (("hidden_size", hidden_size, target.hidden_size), ("vocab_size", vocab_size, target.vocab_size))
    for name, own, real in pairs:
        if own != real:
            raise MismatchError(
                f"{where}: the head was made for a target with {name}={own:,}, this one has {real:,}; "
                "take the head of this target"
            )
    if taps and taps[-1] > target.num_layers:
        raise MismatchError(
            f"{where}: the head reads the hidden state after layer {taps[-1]}, the target has {target.num_layers} "
            "layers; take the head of this target"
        )


def beside_target(layer: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The same layers for every position of the target, whose texts they continue. Published heads often name the
    length of their training, and ends of text of another model.
    """
    return replace(
        layer,
        max_context_tokens=max(layer.max_context_tokens, target.max_context_tokens),
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def target_note(target: ModelConfig, folder: Path | None) -> dict[str, Any]:
    """What is kept of the target beside a head; `folder` is the target's, for its tokenizer."""
    note: dict[str, Any] = {
        "model_type": target.model_type,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }
    if folder is None:
        return note
    digests = {"tokenizer": tokenizer_digest(folder), "weights": weights_digest(folder)}
    return note | {name: digest for name, digest in digests.items() if digest is not None}


def check_note(head: Path, target: ModelConfig, folder: Path | None) -> None:
    """Compare the note of a head with the target, if it has one.

    Raises:
        MismatchError: made for another number of layers, or for another tokenizer.
        CheckpointError: the note is malformed.
    """
    path = head / HEAD_NOTE
    if not path.exists():
        return
    fields = Fields(read_json(path), str(path))
    layers = fields.whole("num_hidden_layers")
    if layers != target.num_layers:
        raise MismatchError(
            f"{path}: the head was trained on a target of {layers} layers, this one has {target.num_layers}; its "
            "hidden states are not those the head knows"
        )
    trained, own = fields.text("tokenizer"), None if folder is None else tokenizer_digest(folder)
    if trained is not None and own is not None and trained != own:
        raise MismatchError(
            f"{path}: the head was trained with another tokenizer than that of {folder}: the same numbers are other "
            "texts; take the tokenizer's files from the head's own target"
        )


def weights_digest(folder: Path) -> str | None:
    """Digest of the checkpoint's files of weights, by their sizes and samples; None where there are none.

    A head for other weights of the same sizes may still draft well (a fine-tuned target): it is not refused.
    """
    digest = hashlib.sha256()
    return _SAMPLED + digest.hexdigest() if add_weights(digest, folder) else None


def are_other_weights(trained: object, here: str | None) -> bool:
    """Whether two digests are those of other weights; one of an earlier version, made otherwise, does not tell."""
    return here is not None and isinstance(trained, str) and trained.startswith(_SAMPLED) and trained != here


def add_weights(digest: hashlib._Hash, folder: Path) -> bool:
    """Feed names, sizes and samples of a checkpoint's files of weights to `digest`; whether there are any."""
    paths = part_files(folder) if folder.is_file() else sorted(folder.glob(_WEIGHTS))
    for path in paths:
        size, count = path.stat().st_size, -(-_NUM_PIECES // len(paths))
        rest = max(0, size - _FIRST_BYTES)
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_FIRST_BYTES))
            for piece in range(count if rest else 0):
                file.seek(_FIRST_BYTES + rest * piece // count)
                digest.update(file.read(_PIECE_BYTES))
    return bool(paths)


def tokenizer_digest(folder: Path) -> str | None:
    """Digest of what a `tokenizer.json` makes of a text, without settings of length; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    described: Mapping[str, Any] = {
        key: value for key, value in read_json(path).items() if key not in ("truncation", "padding", "version")
    }
    text = json.dumps(described, sort_keys=True, ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
