"""The exchange form of vLLM's speculators: the same tensors, another `config.json` (vllm-project/speculators).

It is read by rewriting it into the form of the kind it holds. Two traps: a missing `norm_before_residual` means true
here and false elsewhere, and all layer ids are counted "enter".
"""

from __future__ import annotations

from typing import Any

from foretoken.errors import ConfigError
from foretoken.heads.config import BlockConfig, EagleConfig
from foretoken.heads.formats.block import CORRECTION_KEYS, DFLASH, DSPARK, block_json
from foretoken.heads.formats.eagle import ARCHITECTURE_3, NORM_FLAGS, eagle_json, layer_ids
from foretoken.heads.formats.layers import layer_json, taps_to_outputs
from foretoken.model.fields import Fields

VERSION = "0.9.0"  # of speculators, whose keys these are
_BLOCK_KEYS = ("block_size", *CORRECTION_KEYS)


def from_speculators(fields: Fields) -> Fields:
    """The same head in the form of its kind.

    Raises:
        CheckpointError: a key that is missing or of the wrong type.
    """
    layer = fields.fields("transformer_layer_config")
    if layer is None:
        raise fields.refusal("transformer_layer_config", "an object: the head's layers")
    raw = dict(layer.raw)
    for key in ("draft_vocab_size", "target_hidden_size", "torch_dtype", "dtype"):
        if fields.has(key):
            raw[key] = fields.raw[key]
    ids = layer_ids(fields, "eagle_aux_hidden_state_layer_ids")
    if fields.text("speculators_model_type") == "eagle3":
        raw |= {"architectures": [ARCHITECTURE_3]} | {flag: fields.flag(flag) for flag in NORM_FLAGS}
        raw["norm_before_residual"] = fields.flag("norm_before_residual", default=True)
        if ids is not None:
            raw["eagle_aux_hidden_state_layer_ids"] = list(ids)
        return Fields(raw, fields.where)
    ids = layer_ids(fields, "aux_hidden_state_layer_ids") or ids
    if ids is None:
        raise fields.refusal("aux_hidden_state_layer_ids", "a list of layer numbers")
    own = {key: fields.raw[key] for key in ("mask_token_id", "causal", "sample_from_anchor") if fields.has(key)}
    raw |= {key: fields.raw[key] for key in _BLOCK_KEYS if fields.has(key)}
    raw["architectures"] = [DSPARK if fields.text("speculators_model_type") == "dspark" else DFLASH]
    return Fields(raw | {"dflash_config": own | {"target_layer_ids": taps_to_outputs(ids)}}, fields.where)


def speculators_json(
    config: EagleConfig | BlockConfig, dtype: str, num_draft: int, target_name: str, target_architecture: str
) -> dict[str, Any]:
    """`config.json` of a head in this form; `vllm serve DIRECTORY` then starts target and head.

    Raises:
        ConfigError: EAGLE-1, which the form has no words for.
    """
    if isinstance(config, EagleConfig) and config.version == 1:
        raise ConfigError("version", 1, "the speculators form is written for EAGLE-3 and block drafters")
    raw = eagle_json(config, dtype) if isinstance(config, EagleConfig) else block_json(config, dtype)
    of_layers = layer_json(config.layer, dtype).keys() - {"architectures", "torch_dtype"} | {"layer_types"}
    kind = "eagle3" if isinstance(config, EagleConfig) else "dspark" if raw["architectures"] == [DSPARK] else "dflash"
    names = {"eagle3": "Eagle3Speculator", "dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
    form: dict[str, Any] = {
        "architectures": [names[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "torch_dtype": dtype,
        "transformer_layer_config": {key: value for key, value in raw.items() if key in of_layers},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft}],
            "verifier": {"name_or_path": target_name, "architectures": [target_architecture]},
        },
    }
    if isinstance(config, EagleConfig):
        form |= {flag: getattr(config, flag) for flag in NORM_FLAGS}
        return form | {"eagle_aux_hidden_state_layer_ids": list(config.taps)}
    own = {key: value for key, value in raw["dflash_config"].items() if key != "target_layer_ids"}
    return (
        form
        | {key: raw[key] for key in _BLOCK_KEYS if key in raw}
        | own
        | {"aux_hidden_state_layer_ids": list(config.taps)}
    )
