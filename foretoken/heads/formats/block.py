"""Block drafters: DFlash (z-lab/dflash) and, with a correction or a confidence, DSpark (deepseek-ai/DeepSpec)."""

from __future__ import annotations

from typing import Any

from foretoken.errors import ConfigError, MismatchError, UnsupportedModelError
from foretoken.heads.config import BlockConfig
from foretoken.heads.formats.eagle import layer_ids
from foretoken.heads.formats.layers import layer_from_json, layer_json, outputs_to_taps, taps_to_outputs
from foretoken.heads.formats.pairing import beside_target, check_sizes
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import Fields, shown

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
MARKOV_IN = "markov_head.markov_w1.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
MARKOV_TYPE = "vanilla"  # the sum of W2 W1[token before] and the logits
CORRECTION_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_MAX_BLOCK = 1024


def block_json(config: BlockConfig, dtype: str) -> dict[str, Any]:
    """`config.json` of a block drafter; one without correction and confidence is a DFlash.

    Raises:
        ConfigError: layers that the format has no words for.
    """
    if config.layer.model_type != "qwen3":
        raise ConfigError("model_type", config.layer.model_type, "the layers of a block drafter are written as qwen3's")
    own = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": taps_to_outputs(config.taps),
        "causal": config.is_causal,
        "sample_from_anchor": config.predicts_at_anchor,
    }
    raw = layer_json(config.layer, dtype) | {
        "architectures": [DSPARK if config.markov_rank or config.has_confidence else DFLASH],
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.target_num_layers,
        "block_size": config.block_size,
        "layer_types": ["full_attention"] * config.layer.num_layers,
        "dflash_config": own,
    }
    if config.draft_vocab_size < config.layer.vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.markov_rank:
        raw |= {"markov_rank": config.markov_rank, "markov_head_type": MARKOV_TYPE}
    if config.has_confidence:
        raw |= {"enable_confidence_head": True, "confidence_head_with_markov": False}
    return raw


def block_from_json(fields: Fields, target: ModelConfig) -> BlockConfig:
    """The block drafter that a `config.json` describes; keys may stand in `dflash_config` or at the top level."""
    own = fields.fields("dflash_config") or Fields({}, fields.where)
    both = Fields({**fields.raw, **own.raw}, fields.where)
    is_dspark = any("dspark" in name.lower() for name in fields.texts("architectures") or ())
    _refuse_variants(both)
    raw = dict(fields.raw)
    if not both.flag("use_swa") and raw.get("layer_types") == ["full_attention"] * len(raw.get("layer_types") or ()):
        raw.pop("layer_types", None)
        raw["use_sliding_window"] = False
    layer = beside_target(layer_from_json(raw, fields.where, "qwen3"), target)
    ids = layer_ids(both, "target_layer_ids", least=-1)
    if ids is None:
        raise both.refusal("target_layer_ids", "a list of layer numbers")
    taps = outputs_to_taps(ids)
    trained = fields.whole_or("num_target_layers", target.num_layers)
    if trained != target.num_layers:
        raise MismatchError(
            f"{fields.where}: the head was made for a target of {trained} layers, this one has {target.num_layers}; "
            "take the head of this target"
        )
    wide = fields.whole_or("target_hidden_size", layer.hidden_size)
    check_sizes(fields.where, target, wide, layer.vocab_size, taps)
    rank = both.whole_or("markov_rank", 0, least=0)
    return BlockConfig(
        layer=layer,
        target_hidden_size=wide,
        target_num_layers=target.num_layers,
        taps=taps,
        draft_vocab_size=fields.whole_or("draft_vocab_size", layer.vocab_size, most=layer.vocab_size),
        block_size=both.whole("block_size", most=_MAX_BLOCK),
        markov_rank=rank,
        is_causal=both.flag("causal"),
        # One that also reads the token before is left out: without it the head drafts the same.
        has_confidence=both.flag("enable_confidence_head") and not both.flag("confidence_head_with_markov"),
        mask_token=both.whole("mask_token_id", least=0, most=layer.vocab_size - 1),
        predicts_at_anchor=both.flag("sample_from_anchor", default=is_dspark),
    )


def _refuse_variants(fields: Fields) -> None:
    """Refuse by name what the network here does not compute."""
    kind = fields.text("markov_head_type", MARKOV_TYPE)
    if fields.whole_or("markov_rank", 0, least=0) and kind != MARKOV_TYPE:
        raise UnsupportedModelError(
            f"{fields.where}: markov_head_type={shown(kind)} is not run here, only {MARKOV_TYPE!r}"
        )
    if fields.flag("use_swa"):
        raise UnsupportedModelError(f"{fields.where}: use_swa=true (a sliding window) is not run here")
