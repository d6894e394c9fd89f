"""From a checkpoint to a running model: our decoder where it can, transformers for every other causal family."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from foretoken.config import CACHE_DTYPES, NUMERICS, QUANTISED
from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.kv.pool import bytes_per_token, largest_cache_bytes
from foretoken.machine.identity import warn_of_slow_bf16
from foretoken.machine.process import note_computing
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import check_causal
from foretoken.model.decoder import Decoder
from foretoken.model.families import NATIVE_MODEL_TYPES
from foretoken.model.fields import shown
from foretoken.model.gguf.header import is_gguf
from foretoken.model.interface import OpenModel
from foretoken.model.layer_pass import has_exact_rows
from foretoken.model.layers import Linear
from foretoken.model.loader import load_decoder, open_weights, read_config, read_raw_config
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import DEFAULT_BLOCK_SIZE
from foretoken.model.strict import strict_kind
from foretoken.model.weights import Weights

# When the user names no size: room for many short requests, and for one that fills the context if that is affordable.
_DEFAULT_CACHE_BYTES = 512 * 1024**2
_LONGEST_CACHE_BYTES = 4 * 1024**3  # address space; a CPU's cache takes memory only as it fills


def open_model(
    folder: Path,
    dtype: str = "auto",
    device: str = "auto",
    cache_tokens: int | None = None,
    numerics: str = "default",
    weights: str = "auto",
    cache_dtype: str = "auto",
) -> OpenModel:
    """Load the checkpoint in `folder` with a cache of `cache_tokens` tokens (None: 512 MB, or up to 4 GB to hold one
    whole context).

    `numerics` "strict" makes the logits of a position bitwise the same however its rows are batched, see `strict`.
    `weights` "int8" or "int4" quantises the matrices at load; everything else runs in `dtype`. They are multiplied in
    integers, which gives a row the same bits in any batch (`grouped_kernel`). `cache_dtype` "model" keeps keys and
    values in the format that the model computes in, "float16" halves those in float32, "auto" does so where it can.

    Raises:
        CheckpointError, UnsupportedModelError: see `loader`.
        ConfigError: an option that does not exist; strict numerics, quantised weights or another cache format of a
        model that runs through transformers; a cache in float16 of a model whose kernels do not take it.
        InputError: quantised weights with a dtype or device that has no kernel for them; a forked process.
    """
    note_computing(torch.get_num_threads())
    if numerics not in NUMERICS:
        raise ConfigError("numerics", numerics, f"choose one of {', '.join(NUMERICS)}")
    if cache_dtype not in CACHE_DTYPES:
        raise ConfigError("cache_dtype", cache_dtype, f"choose one of {', '.join(CACHE_DTYPES)}")
    place = open_device(device)
    config = native_config(folder)
    if config is None:
        if cache_dtype == "float16":
            remedy = f"{folder} runs through transformers, which keeps the model's own format; use auto or model"
            raise ConfigError("cache_dtype", cache_dtype, remedy)
        if weights != "auto":
            remedy = (
                f"{folder} runs through transformers, which has no quantised weights here; "
                "load it in bfloat16 or float32"
            )
            raise ConfigError("weights", weights, f"{remedy}, or take a checkpoint of {', '.join(NATIVE_MODEL_TYPES)}")
        if numerics == "strict":
            remedy = f"{folder} runs through transformers, whose results depend on the batch; use numerics='default'"
            raise ConfigError("numerics", numerics, f"{remedy}, or a checkpoint of {', '.join(NATIVE_MODEL_TYPES)}")
        from foretoken.model.hf import (
            TransformersModel,  # imports transformers: seconds that a native model need not pay
        )

        foreign = TransformersModel(folder, dtype, place, cache_tokens)
        _check_precision(foreign.dtype, place)
        return foreign
    quant = None if weights == "auto" else weights
    decoder = load_decoder(folder, dtype=dtype, device=place, quant=quant)
    if any(isinstance(module, Linear) and module.weight is not None for module in decoder.layers.modules()):
        _check_precision(decoder.norm.weight.dtype, place)
    kind = strict_kind(decoder) if numerics == "strict" else PagedModel
    kept = kept_dtype(decoder, cache_dtype)
    num_tokens = cache_size(decoder.local, kept, place, cache_tokens)
    return kind(decoder, num_tokens, kept=kept)


def kept_dtype(decoder: Decoder, cache_dtype: str) -> torch.dtype:
    """The format of keys and values: narrower than the model's where its compiled kernels take that.

    Raises:
        ConfigError: float16 was asked for, and they do not.
    """
    own = decoder.norm.weight.dtype
    if cache_dtype == "model" or own == torch.float16:
        return own
    if own == torch.float32 and has_exact_rows(decoder):  # only quantised weights are multiplied in float32 by kernels
        return torch.float16
    if cache_dtype == "float16":
        remedy = "only quantised weights on a CPU, computed in float32, are read with it here; use auto or model"
        raise ConfigError("cache_dtype", cache_dtype, remedy)
    return own


def _check_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Warn of matrices in bfloat16 on a processor without arithmetic for them."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        warn_of_slow_bf16()


def native_config(folder: Path) -> ModelConfig | None:
    """The configuration if our own decoder runs the checkpoint, None if it is left to transformers.

    Raises:
        CheckpointError: the configuration cannot be read.
        UnsupportedModelError: no causal language model, or a family that transformers does not know either; a GGUF file
        that the native decoder does not run.
    """
    if is_gguf(folder):
        return read_config(folder)
    family = check_causal(read_raw_config(folder), str(folder / "config.json"))
    if family in NATIVE_MODEL_TYPES:
        with suppress(UnsupportedModelError):  # an option the decoder lacks: transformers has it
            return read_config(folder)
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if family not in CONFIG_MAPPING_NAMES:
            raise UnsupportedModelError(f"model_type={shown(family)} is known neither to foretoken nor to transformers")
    Weights(folder)  # names the broken or missing file
    return None


def cache_size(config: ModelConfig, kept: torch.dtype, device: torch.device, wanted: int | None) -> int:
    """Size of the cache: `wanted`, or a default.

    Raises:
        ConfigError: fewer tokens than a block, or more than this machine could ever hold.
    """
    size = bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, kept)
    limit = largest_cache_bytes(device)
    if wanted is not None:
        if wanted < DEFAULT_BLOCK_SIZE:
            raise ConfigError("cache_tokens", wanted, f"must be at least one block of {DEFAULT_BLOCK_SIZE} tokens")
        if limit is not None and wanted > limit // size:
            whose = "of the GPU that is free" if device.type == "cuda" else "of this machine"
            reason = (
                f"a token takes {size:,} bytes, and the memory {whose} ({limit / 2**30:,.1f} GiB) "
                f"holds at most {limit // size:,} of them"
            )
            raise ConfigError("cache_tokens", wanted, f"{reason}; give a number up to that, or leave it out")
        return wanted
    most = _LONGEST_CACHE_BYTES if limit is None else min(_LONGEST_CACHE_BYTES, limit // 2)
    context = -(-config.max_context_tokens // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE
    fits = min(max(_DEFAULT_CACHE_BYTES, context * size), most) // size
    return max(DEFAULT_BLOCK_SIZE, min(fits, 32 * config.max_context_tokens))


def open_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: not a device of this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", name, "use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", name, "use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "this machine has no CUDA device that torch can use; try device='cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", name, f"this machine has {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def draft_weights(folder: Path, draft_dtype: str, target_format: str) -> str:
    """`weights` of `open_model` for the draft model in `folder`.

    `draft_dtype` "auto" takes the format of the target's matrices, `target_format`, as trained heads do; a draft whose
    file holds codes keeps those, and one that runs through transformers keeps its numbers.

    Raises:
        CheckpointError, UnsupportedModelError: a file of the draft is missing or broken.
    """
    if draft_dtype in QUANTISED:
        return draft_dtype
    if draft_dtype != "auto" or target_format == "auto" or native_config(folder) is None:
        return "auto"
    stored = open_weights(folder)
    return "auto" if any(stored.sample(name) is not None for name in stored.own_names) else target_format
