"""Whether a checkpoint holds the model that transformers would build from its config.json, before it is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from foretoken.errors import CheckpointError
from foretoken.model.fields import shown
from foretoken.model.weights import Weights

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

_Foreign: TypeAlias = Any  # objects of transformers, which has no types


def check_counts(raw: Mapping[str, Any], weights: Weights, where: str) -> None:
    """Refuse a number of layers or experts that the files cannot hold: each becomes an object, whatever its size.

    Raises:
        CheckpointError: names the key.
    """
    most = max([len(weights.names), *(weights.shape(name)[0] for name in weights.names if weights.shape(name))])
    for part in _objects(raw):
        for key in _COUNTS:
            value = part.get(key)
            if isinstance(value, int) and value > most:
                raise CheckpointError(
                    f"{where}: {key}={shown(value)} is more than the {len(weights.names):,} tensors of "
                    "the checkpoint can hold"
                )


def check_size(config: _Foreign, weights: Weights, where: str) -> None:
    """Build the model without memory and compare it with the headers of the files.

    Raises:
        CheckpointError: the model is larger than its files, or a tensor has another shape.
    """
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
