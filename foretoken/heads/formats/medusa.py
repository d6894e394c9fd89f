"""Medusa heads: one directory that vLLM (up to 0.32) and TGI read (FasterDecoding/Medusa)."""

from __future__ import annotations

import re
from typing import Any

from foretoken.heads.config import MedusaConfig
from foretoken.heads.formats.pairing import check_sizes
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import Fields

MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
TOKEN_MAP = "token_map"  # vLLM's name of a cut vocabulary: the target's number of each token
SHARED_OUTPUT = "lm_head.weight"  # the target's output matrix, which vLLM reads from the heads' file
_MAX_HEADS = 64
_PREFIX = "medusa_head."  # of heads that were cut out of a checkpoint with its target
_NUMBER = re.compile(r"(\d+)\.")
_NATIVE_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_NATIVE_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")


def medusa_json(config: MedusaConfig, dtype: str, draft_vocab_size: int, target_name: str | None) -> dict[str, Any]:
    """`config.json` of the heads, without `architectures`: TGI would take them for a plain model.

    vLLM takes every key with "num" and "heads" in it for the number of heads, and drops biases unless told otherwise.
    """
    raw: dict[str, Any] = {
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "medusa_fc_bias": True,
        "torch_dtype": dtype,
    }
    if draft_vocab_size < config.vocab_size:
        raw["truncated_vocab_size"] = draft_vocab_size
    if not config.has_own_output:
        raw["original_lm_head"] = True
    if config.is_sequential:
        raw["is_sequential"] = True
    if target_name is not None:
        raw["base_model_name_or_path"] = target_name
    return raw


def medusa_from_json(fields: Fields, target: ModelConfig, names: frozenset[str]) -> MedusaConfig:
    """The heads that a `config.json` and the `names` of its tensors describe."""
    hidden = fields.whole_or("hidden_size", target.hidden_size)  # FasterDecoding's own files leave both out
    vocab = fields.whole_or("vocab_size", target.vocab_size)
    check_sizes(fields.where, target, hidden, vocab, ())
    layers = fields.whole("medusa_num_layers", most=_MAX_HEADS)
    heads = fields.whole("medusa_num_heads", most=_MAX_HEADS)
    stored = {int(found[1]) for name in names if (found := _NUMBER.match(medusa_name(name, layers)))}
    if len(stored) > heads:  # FasterDecoding's own files hold five and name two
        raise fields.refusal("medusa_num_heads", f"{len(stored)}, as many heads as the file holds")
    return MedusaConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        target_num_layers=target.num_layers,
        num_heads=heads,
        num_blocks=layers,
        is_sequential=fields.flag("is_sequential"),
        has_own_output=any(medusa_name(name, layers) == f"0.{layers}.weight" for name in names),
    )


def medusa_vocab_size(config: MedusaConfig, fields: Fields) -> int:
    """Size of the vocabulary that the heads draft from."""
    return fields.whole_or("truncated_vocab_size", config.vocab_size, most=config.vocab_size)


def medusa_name(name: str, num_blocks: int) -> str:
    """The trained name of a tensor that may have vLLM's native one, or that of a checkpoint with its target."""
    name = name.removeprefix(_PREFIX)
    block, output = _NATIVE_BLOCK.fullmatch(name), _NATIVE_OUTPUT.fullmatch(name)
    if block is not None:
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    return name if output is None else f"{output[1]}.{num_blocks}.weight"
