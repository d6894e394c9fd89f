"""From an engine's configuration to its target: in this process, or divided among several."""

from __future__ import annotations

from pathlib import Path

import torch

from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.machine.process import note_computing
from foretoken.model.interface import LanguageModel
from foretoken.model.open import cache_size, kept_dtype, native_config, open_device, open_model
from foretoken.model.sharding import Shard
from foretoken.model.strict import StrictModel, strict_kind
from foretoken.parallel.exchange import RankExchange, rank_devices
from foretoken.parallel.group import RankGroup, RankSetup, meeting_folder
from foretoken.parallel.lead import LeadModel, StrictLeadModel
from foretoken.parallel.rank import load_rank


def open_target(folder: Path, config: EngineConfig) -> LanguageModel:
    """The target of `config`, whose checkpoint is in `folder`.

    Raises:
        ConfigError: a model, or a form of weights, that is not divided among processes; too few devices for them.
        RankError: a rank could not be started, or could not load its part.
        CheckpointError, UnsupportedModelError, InputError: see `open_model`.
    """
    options = (config.cache_tokens, config.numerics, config.weights, config.cache_dtype)
    if config.tensor_parallel == 1:
        return open_model(folder, config.dtype, config.device, *options)
    note_computing(torch.get_num_threads())
    devices = rank_devices(open_device(config.device), config.tensor_parallel)
    open_device(str(devices[-1]))
    _check_divides(folder, config.tensor_parallel)
    return _open_ranks(folder, config, devices)


def _open_ranks(folder: Path, config: EngineConfig, devices: list[torch.device]) -> LeadModel:
    world, meeting = len(devices), meeting_folder()
    num_threads = max(1, torch.get_num_threads() // world)
    shared = (config.numerics, config.weights, config.cache_dtype, num_threads, str(meeting))
    setups = [RankSetup(i, world, str(folder), config.dtype, str(devices[i]), *shared) for i in range(world)]
    exchange = RankExchange(0, world, devices[0])
    group = RankGroup(setups[1:], exchange, meeting)
    try:
        decoder = load_rank(setups[0], exchange)
        kept = kept_dtype(decoder, config.cache_dtype)
        num_slots = cache_size(decoder.local, kept, devices[0], config.cache_tokens)
        group.connect()
        is_tiled = config.numerics == "strict" and strict_kind(decoder) is StrictModel
        return (StrictLeadModel if is_tiled else LeadModel)(group, decoder, num_slots, kept)
    except BaseException:
        group.end()
        raise


def _check_divides(folder: Path, world: int) -> None:
    """Refuse by name what no rank could hold a part of.

    Raises:
        ConfigError: see there.
    """
    config = native_config(folder)
    if config is None:
        remedy = f"{folder} runs through transformers, whose models are not divided here; leave it out"
        raise ConfigError("tensor_parallel", world, remedy)
    Shard(config, 0, world)
