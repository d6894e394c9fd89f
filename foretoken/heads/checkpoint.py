"""Directories of trained heads: read one for a target, and write one.

Read are the portable EAGLE-3 directory, EAGLE-1/2, Medusa, DFlash and DSpark, speculators' form of them, and early-exit
adapters (`formats`). The names and shapes that `config.json` asks for are compared with the headers of the file before
a weight is read: engines load a head with a tensor too few, or too many, without a word.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError, ModelError, StorageError
from foretoken.files import writing_folder
from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.config import BlockConfig, EagleConfig, ExitAdapterConfig, HeadConfig, MedusaConfig
from foretoken.heads.formats.block import CONFIDENCE, CONFIDENCE_BIAS
from foretoken.heads.formats.eagle import network_name
from foretoken.heads.formats.medusa import MEDUSA_WEIGHTS, SHARED_OUTPUT, TOKEN_MAP, medusa_name
from foretoken.heads.formats.pairing import check_note, target_note
from foretoken.heads.formats.speculators import from_speculators, speculators_json
from foretoken.heads.kind import head_kind
from foretoken.heads.kinds import KINDS, kind_of_config
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import HEAD_NOTE, Fields, read_json
from foretoken.model.loader import open_weights, parse_dtype, stored_dtype
from foretoken.model.weights import EMBEDDING, INDEX, WEIGHTS, TensorSource, Weights

_OFFSETS, _MASK = "d2t", "t2d"  # target id = draft id + d2t[draft id]; the mask of the same ids
_EMBEDDING = "embed_tokens.weight"
_COMPARED_ROWS = 64  # of an embedding, from all over it
_ROUNDED, _QUANTISED = 1 / 64, 1 / 2  # how far a copy of numbers may be from those of the target, and from its codes
_SHOWN = 3  # tensors that an error names


def load_head(
    folder: Path,
    target: ModelConfig,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    target_folder: Path | None = None,
) -> Head:
    """The head in `folder`, its weights plain (not packed) and trainable. "auto" is the dtype it is stored in.

    With `target_folder` its tokenizer is compared with the one the head was trained with, where the head knows it, and
    its embedding with one that the head holds, which is otherwise taken for a copy.

    Raises:
        CheckpointError: a file or tensor that is missing, truncated, superfluous or malformed.
        MismatchError: made for another target or tokenizer.
        UnsupportedModelError: a kind or variant of head that is not run here.
        ConfigError: the target has too few layers for the head's defaults.
    """
    place = torch.device(device)
    check_note(folder, target, target_folder)
    fields, weights, head = open_head(folder, target, target_folder)
    stored = _stored_names(weights, head.config, len(head.vocabulary.ids))
    expected = tensor_shapes(head)
    absent = {CONFIDENCE_BIAS} & expected.keys() - stored.keys()  # heads trained before had none
    zeros = {name: torch.zeros(expected.pop(name), dtype=torch.float32) for name in absent}
    problems = tensor_problems(weights, stored, expected)
    if problems:
        raise CheckpointError(f"{folder}: " + "; ".join(problems[:_SHOWN]) + _more(len(problems) - _SHOWN))
    wanted = parse_dtype(dtype, stored_dtype(fields.raw, weights, fields.where))
    head.vocabulary = head.vocabulary.to(place)
    state = {name: weights.read(stored[name], shape).to(place, wanted, copy=True) for name, shape in expected.items()}
    state |= {name: tensor.to(place, wanted) for name, tensor in zeros.items()}
    head.load_state_dict(state, strict=True, assign=True)
    return head


def save_head(
    head: Head,
    folder: Path,
    target: ModelConfig,
    target_folder: Path | None = None,
    target_name: str | None = None,
    dtype: str | torch.dtype = "auto",
) -> None:
    """Write `head` as the directory of its kind, with a note on its target; "auto" keeps the dtype of the weights.

    `target_folder` adds the tokenizer's digest to the note; `target_name` is what TGI has to load beside Medusa heads.
    Files are written beside their final names first: a crash or a full disk leaves the old ones whole.

    Raises:
        StorageError: the folder cannot be written.
        ModelError: the head is packed.
        ConfigError: layers that the format has no words for.
    """
    state = head_state(head)
    wanted = parse_dtype(dtype, next(iter(state.values())).dtype)
    dtype_name, draft_vocab_size = str(wanted).removeprefix("torch."), len(head.vocabulary.ids)
    raw = kind_of_config(head.config).to_json(head.config, dtype_name, draft_vocab_size, target_name)
    tensors = {name: tensor.detach().to("cpu", wanted) for name, tensor in state.items()}
    tensors |= vocabulary_tables(head.config, head.vocabulary)
    write_head(folder, raw, tensors, {HEAD_NOTE: target_note(target, target_folder)})


def save_speculators(
    head: Head, folder: Path, target: ModelConfig, num_draft: int, target_name: str, target_architecture: str
) -> None:
    """Write `head` in the form of vLLM's speculators, whose directory also names the target and `num_draft`.

    Raises:
        StorageError, ModelError: see `save_head`.
        ConfigError: a kind of head that the form has no words for.
    """
    if not isinstance(head.config, EagleConfig | BlockConfig):
        raise ConfigError("head", head.name, "the speculators form is written for EAGLE-3 and block drafters")
    state = head_state(head)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    raw = speculators_json(head.config, dtype, num_draft, target_name, target_architecture)
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
    tables = vocabulary_tables(head.config, head.vocabulary)
    write_head(folder, raw, named | tables, {HEAD_NOTE: target_note(target, None)})


def write_head(
    folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], notes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write `config.json`, the weights under the name that its kind has, and `notes` by file name.

    Raises:
        StorageError: the folder cannot be written.
    """
    file = MEDUSA_WEIGHTS if raw.get("model_type") == "medusa" else WEIGHTS
    try:
        with writing_folder(folder, ".writing-") as draft:
            plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(plain, draft / file, metadata={"format": "pt"})
            for name, content in {"config.json": raw, **notes}.items():
                (draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            (folder / INDEX).unlink(missing_ok=True)  # of an older, sharded head
            for path in sorted(draft.iterdir(), reverse=True):  # the weights before what describes them
                path.chmod(0o644)
                os.replace(path, folder / path.name)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the head to {folder}: {error}") from error


class OpenedHead(NamedTuple):
    """`config.json` of a head, see `read_fields`, its file, and its network, whose parameters lie on no device."""

    fields: Fields
    weights: Weights
    network: Head


def open_head(folder: Path, target: ModelConfig, target_folder: Path | None = None) -> OpenedHead:
    """The head in `folder`, of whose tensors only headers are read, and rows of its embedding with `target_folder`."""
    kind, fields = KINDS[head_kind(folder)], read_fields(folder)
    weights = Weights(folder, MEDUSA_WEIGHTS if (folder / MEDUSA_WEIGHTS).exists() else WEIGHTS)
    config = kind.from_json(fields, target, frozenset(weights.own_names))
    if isinstance(config, EagleConfig | BlockConfig) and config.layer.num_layers > len(weights.own_names):
        raise CheckpointError(
            f"{folder}: config.json asks for {config.layer.num_layers:,} layers, the file holds "
            f"{len(weights.own_names):,} tensors"
        )
    if target_folder is not None and isinstance(config, EagleConfig | BlockConfig):
        config = _with_embedding(weights, config, target_folder)
    vocabulary = _read_vocabulary(weights, config, kind.draft_vocab_size(config, fields))
    try:
        return OpenedHead(fields, weights, _network(config, vocabulary))
    except RuntimeError as error:  # torch counts the bytes of a tensor in 64 bits
        raise CheckpointError(f"{folder}: config.json asks for a tensor that no memory holds ({error})") from error


def read_fields(folder: Path) -> Fields:
    """`config.json` of a head; speculators' form is rewritten into that of its kind.

    Raises:
        CheckpointError: missing or malformed.
    """
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    return from_speculators(fields) if fields.has("speculators_model_type") else fields


def make_head(config: HeadConfig, vocabulary: DraftVocabulary) -> Head:
    """The network of a configuration, on torch's default device."""
    return kind_of_config(config).network(config, vocabulary)


def _network(config: HeadConfig, vocabulary: DraftVocabulary) -> Head:
    """The network of a configuration, whose parameters have shapes and no numbers."""
    with torch.device("meta"):
        return make_head(config, vocabulary)


def tensor_shapes(head: Head) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a head that is not packed."""
    return {name: tuple(own.shape) for name, own in head.state_dict().items()}


def head_state(head: Head) -> dict[str, Tensor]:
    """The weights of a head by name.

    Raises:
        ModelError: it is packed.
    """
    state = head.state_dict()
    missing = sorted(tensor_shapes(_network(head.config, head.vocabulary)).keys() - state.keys())
    if missing:
        raise ModelError(
            f"the head has no plain weights left to write ({missing[0]}): load it again, without packing it"
        )
    return state


def vocabulary_tables(config: HeadConfig, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """The tables that tell an engine which tokens a head drafts from; none for the target's whole vocabulary.

    vLLM has a place for the tables only where the draft vocabulary is smaller than the target's, and refuses others.
    """
    if vocabulary.is_whole:
        return {}
    ids = vocabulary.ids.cpu()
    if isinstance(config, MedusaConfig):
        return {TOKEN_MAP: ids}
    mask = torch.zeros(vocabulary.target_vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {_OFFSETS: ids - torch.arange(len(ids)), _MASK: mask}


def tensor_problems(weights: Weights, stored: Mapping[str, str], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What the headers have too few, too many or in another shape; `stored` has the file's names by the network's."""
    problems = [f"tensor {name} is missing" for name in expected if name not in stored]
    for name, own in stored.items():
        if name not in expected:
            problems.append(f"tensor {own} has no place in the head that config.json describes")
        elif weights.shape(own) != expected[name]:
            found, wanted = list(weights.shape(own)), list(expected[name])
            problems.append(f"tensor {own} has shape {found}; config.json asks for {wanted}")
        else:
            weights.dtype(own)
    return problems


def _stored_names(weights: Weights, config: HeadConfig, vocab_size: int) -> dict[str, str]:
    """Name in the file of every tensor of the network, by the network's; tables and copies of the target's matrices
    left out. `vocab_size` is that of the head.
    """
    found: dict[str, str] = {}
    left_out = {_OFFSETS, _MASK, TOKEN_MAP}
    if isinstance(config, BlockConfig) and not config.has_confidence:
        left_out |= {CONFIDENCE, CONFIDENCE_BIAS}
    for name in weights.own_names:
        if name in left_out:
            continue
        if name == _EMBEDDING and isinstance(config, EagleConfig | BlockConfig) and not _owns_embedding(config):
            _check_embedding(weights, config)
            continue
        if name == SHARED_OUTPUT and (width := _shared_output_width(config, vocab_size)) is not None:
            weights.check_shape(name, (vocab_size, width))
            continue
        own = network_name(config, name) if isinstance(config, EagleConfig) else name
        own = medusa_name(name, config.num_blocks) if isinstance(config, MedusaConfig) else own
        if own in found:
            raise CheckpointError(f"{weights.folder} holds one tensor twice, as {found[own]} and {name}")
        found[own] = name
    return found


def _shared_output_width(config: HeadConfig, vocab_size: int) -> int | None:
    """Columns of the target's output matrix, where the head uses it; a copy is in vLLM's Medusa heads and in every
    block drafter that speculators saves.
    """
    if isinstance(config, MedusaConfig):
        return None if config.has_own_output else config.hidden_size
    if isinstance(config, BlockConfig) and vocab_size == config.layer.vocab_size:
        return config.layer.hidden_size
    return None


def _owns_embedding(config: HeadConfig) -> bool:
    return isinstance(config, EagleConfig) and config.has_own_embedding


def _check_embedding(weights: Weights, config: EagleConfig | BlockConfig) -> None:
    shape = (config.layer.vocab_size, config.target_hidden_size)
    if weights.shape(_EMBEDDING) != shape:
        raise CheckpointError(
            f"tensor {_EMBEDDING} in {weights.folder} has shape {list(weights.shape(_EMBEDDING))}, the target's is "
            f"{list(shape)}: a head with an embedding of its own is not run here"
        )


def _with_embedding(
    weights: Weights, config: EagleConfig | BlockConfig, target_folder: Path
) -> EagleConfig | BlockConfig:
    """The configuration of a head whose own embedding, if it holds one, may be another than the target's."""
    if _EMBEDDING not in weights or _owns_embedding(config):
        return config
    _check_embedding(weights, config)
    target = open_weights(target_folder)
    shape = weights.shape(_EMBEDDING)
    if EMBEDDING not in target or target.shape(EMBEDDING) != shape:
        return config
    own, other = weights.read(_EMBEDDING, shape), _first_or_all_rows(target, shape)
    rows = torch.linspace(0, len(other) - 1, _COMPARED_ROWS, dtype=torch.float64).long()
    first, second = own[rows].double(), other[rows].double()
    most = _ROUNDED if isinstance(target, Weights) else _QUANTISED
    if (first - second).norm() <= most * second.norm():
        return config
    if isinstance(config, BlockConfig):
        raise CheckpointError(
            f"tensor {_EMBEDDING} in {weights.folder} is not the embedding of {target_folder}, which a block drafter "
            "reads: take the target that the head was trained for"
        )
    return replace(config, keeps_embedding=True)


def _first_or_all_rows(target: TensorSource, shape: tuple[int, ...]) -> Tensor:
    """Rows of the target's embedding from the first on: of a quantised one a few, as all would take its full size."""
    codes = target.sample(EMBEDDING)
    return target.read(EMBEDDING, shape) if codes is None else codes.dequantised()


def _read_vocabulary(weights: Weights, config: HeadConfig, size: int) -> DraftVocabulary:
    """The head's tokens, `size` of them, from its tables."""
    if isinstance(config, MedusaConfig | ExitAdapterConfig):
        whole, table = config.vocab_size, TOKEN_MAP
    else:
        whole, table = config.layer.vocab_size, _OFFSETS
    if table not in weights and size == whole:
        return DraftVocabulary.whole(whole)
    ids = weights.read_table(table, (size,), "I64")
    if table == _OFFSETS:
        ids = ids + torch.arange(size)
    if not bool((ids >= 0).all() and (ids < whole).all()):
        raise CheckpointError(
            f"{table} of {weights.folder} names tokens outside of the target's {whole:,}; d2t holds offsets (the "
            "target's number minus the head's), not numbers"
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        raise CheckpointError(f"{table} of {weights.folder} does not name the target's tokens ascending, each once")
    if _MASK in weights:
        mask = weights.read_table(_MASK, (whole,), "BOOL")
        if not torch.equal(mask.nonzero().flatten(), ids):
            raise CheckpointError(f"t2d and d2t of {weights.folder} name different tokens")
    return DraftVocabulary(ids.clone(), whole)


def _more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""
