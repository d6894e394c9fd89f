"""Loading a checkpoint with transformers: refused where the files do not hold the model that it would build from
config.json, before it is built, and where a tensor is left over or missing, after that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from foretoken.errors import CheckpointError, ModelError, UnsupportedModelError
from foretoken.model.config_json import check_causal
from foretoken.model.families import NATIVE_MODEL_TYPES
from foretoken.model.fields import shown
from foretoken.model.loader import parse_dtype, read_config
from foretoken.model.weights import WEIGHTS, Weights

# Keys that say how many modules are built. A layer has at least one tensor; experts have one each, or are rows of one.
_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)
# Weights that a model computes instead of reading them, such as tables of positions, are a small part of it.
_MAX_TIMES = 2
_SPARE_NUMBERS = 1 << 22
_MAX_BUFFER_BYTES = 1 << 30

_IN_A_LAYER = re.compile(r"\.\d+(\.|$)")

_Foreign: TypeAlias = Any  # objects of transformers, which has no types


def load_with_transformers(
    folder: Path, raw: dict[str, Any], dtype: str | torch.dtype, device: torch.device, reports: list[str]
) -> _Foreign:
    """The model in `folder`, whose config.json is `raw`; `reports` is what transformers says while it loads.

    Raises:
        CheckpointError, UnsupportedModelError: names what is wrong.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = check_causal(raw)
    if model_type not in CONFIG_MAPPING:
        code = "; it needs code from its own repository (auto_map), which is never run" if raw.get("auto_map") else ""
        raise UnsupportedModelError(
            f"model_type={model_type!r} is unknown to foretoken and to this version of transformers{code}"
        )
    where = str(folder / "config.json")
    weights = Weights(folder)  # names the broken or missing file before transformers builds anything
    _check_counts(raw, weights, where)
    wanted = "auto" if dtype == "auto" else parse_dtype(dtype)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModelError(
                f"model_type={model_type!r} has no causal language model in transformers: foretoken "
                "cannot continue text with it"
            )
        if "lsh" in (
            getattr(config, "attn_layers", None) or ()
        ):  # in texts longer than a chunk, which no trial at loading reads
            raise UnsupportedModelError(
                f"model_type={model_type!r} hashes at random which tokens attend to each other: its "
                "answers cannot be repeated"
            )
        _check_size(config, weights, where)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=wanted,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
        )
    except ModelError:
        raise
    except Exception as error:  # whatever a foreign library raises; quantised ones need their own packages
        said = " ".join(" ".join(reports).split())
        raise CheckpointError(
            f"transformers cannot load the {model_type!r} model in {folder}: {error}{f' ({said})' if said else ''}"
            f"{_why_not_native(folder, model_type)}"
        ) from error
    _check_report(weights, model, report)
    return model.to(device).eval()


def _why_not_native(folder: Path, model_type: str) -> str:
    """What sent a checkpoint of a native family to transformers, whose own error may name no key (`'foo'`)."""
    if model_type in NATIVE_MODEL_TYPES:
        try:
            read_config(folder)
        except UnsupportedModelError as error:
            return f". It went there because foretoken's own decoder does not run it: {error}"
    return ""


def _check_report(weights: Weights, model: _Foreign, report: dict[str, Any]) -> None:
    """Every weight of the model comes from the file, and every tensor of a layer that the model has goes into it.

    Tensors of parts that the model lacks as a whole (a vision tower, a classifier, layers that predict further tokens)
    stay behind.
    """
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"tensor {name} in {weights.folder} has shape {list(stored)}; config.json asks for {list(wanted)}"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"tensor {missing[0]} is missing in {weights.folder}/{WEIGHTS}: the checkpoint is incomplete "
            "or of another architecture"
        )
    modules = {name for name, _ in model.named_modules()}
    for name in sorted(set(report["unexpected_keys"]) & set(weights.own_names)):
        parents = (name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1))
        owner = next(
            (parent for parent in parents if parent in modules or f"{model.base_model_prefix}.{parent}" in modules), ""
        )
        if _IN_A_LAYER.search(owner):
            reason = (
                f"belongs to {owner}, and the {model.config.model_type!r} model of transformers has no place for it"
            )
            raise CheckpointError(
                f"tensor {name} in {weights.folder} {reason}: the checkpoint is of another architecture"
            )


def _check_counts(raw: Mapping[str, Any], weights: Weights, where: str) -> None:
    """Refuse a number of layers or experts that the files cannot hold: each becomes an object, whatever its size."""
    most = max([len(weights.names), *(weights.shape(name)[0] for name in weights.names if weights.shape(name))])
    for part in _objects(raw):
        for key in _COUNTS:
            value = part.get(key)
            if isinstance(value, int) and value > most:
                raise CheckpointError(
                    f"{where}: {key}={shown(value)} is more than the {len(weights.names):,} tensors of "
                    "the checkpoint can hold"
                )


def _check_size(config: _Foreign, weights: Weights, where: str) -> None:
    """Build the model without memory and compare it with the headers of the files."""
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None) is not None:  # stored in a form of its own
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    for name, parameter in model.named_parameters():
        if name in weights and weights.shape(name) != tuple(parameter.shape):
            raise CheckpointError(
                f"tensor {name} in {weights.folder} has shape {list(weights.shape(name))}; config.json "
                f"asks for {list(parameter.shape)}"
            )
    asked, held = (
        sum(parameter.numel() for parameter in model.parameters()),
        sum(math.prod(weights.shape(name)) for name in weights.names),
    )
    if asked > _MAX_TIMES * held + _SPARE_NUMBERS:
        raise CheckpointError(f"{where} describes a model of {asked:,} numbers, and the files hold {held:,}")
    tables = sum(buffer.nbytes for buffer in model.buffers())
    if tables > _MAX_BUFFER_BYTES:
        raise CheckpointError(
            f"{where} describes a model with {tables / 2**30:,.1f} GiB of computed tables; at most 1 GiB is built"
        )


def _objects(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration and those of its parts."""
    yield raw
    for value in raw.values():
        if isinstance(value, Mapping):
            yield from _objects(value)
