"""From an engine's configuration to its target: in this process, or divided among several.

Of a divided one this process is rank 0, which has the tables, the requests and all decisions: `LeadModel` turns what is
decided into a `Plan` and sends it to the other ranks before each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, RankError
from foretoken.machine.process import note_computing
from foretoken.model.decoder import Decoder
from foretoken.model.interface import ForwardOutput, LanguageModel
from foretoken.model.open import cache_size, kept_dtype, native_config, open_device, open_model
from foretoken.model.paged import PagedModel, Pass
from foretoken.model.sharding import Shard
from foretoken.model.strict import StrictModel, strict_kind
from foretoken.parallel.exchange import RankExchange, rank_devices
from foretoken.parallel.group import RankGroup, RankSetup, meeting_folder
from foretoken.parallel.plan import Move, Plan, PlanKind
from foretoken.parallel.rank import files_of, load_rank
from foretoken.transfer import to_host


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
    shared = (config.numerics, config.weights, config.cache_dtype, num_threads, str(meeting), files_of(folder))
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
    """Refuse by name what no rank could hold a part of."""
    config = native_config(folder)
    if config is None:
        remedy = f"{folder} runs through transformers, whose models are not divided here; leave it out"
        raise ConfigError("tensor_parallel", world, remedy)
    Shard(config, 0, world)


class LeadModel(PagedModel):
    """See `interface.RankedModel`; numbers of threads stay as they are, since ranks wait for each other."""

    needs_equal_threads = True

    def __init__(self, group: RankGroup, decoder: Decoder, num_slots: int, kept: torch.dtype) -> None:
        self.group = group
        self._moves: list[Move] = []  # done here, and not sent yet
        with group.together(Plan(PlanKind.CACHE, numbers=[num_slots])):
            super().__init__(decoder, num_slots, kept=kept)

    @property
    def failure(self) -> RankError | None:
        """See `interface.RankedModel`."""
        return self.group.failure

    def end(self) -> None:
        """See `interface.RankedModel`."""
        self.group.end()

    def fresh(self) -> Self:
        """Refused with a ConfigError: other ranks have one cache."""
        raise ConfigError("tensor_parallel", self.decoder.shard.world, "the target has one cache; open it anew")

    def run_pass(self, one: Pass) -> ForwardOutput:
        """See `PagedModel.run_pass`."""
        rows = torch.cat([join.hidden for join in one.joins]) if one.joins else None
        with self.group.turn, self.group.together(self._plan(PlanKind.PASS, one), rows):
            return super().run_pass(one)

    def run_early(self, one: Pass) -> tuple[Tensor, Tensor]:
        """See `PagedModel.run_early`."""
        with self.group.turn, self.group.together(self._plan(PlanKind.EARLY, one)):
            return super().run_early(one)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `interface.SharesWeights`."""
        with self.group.turn:
            plan = Plan(PlanKind.EMBED, self._taken(), tokens=to_host(tokens)[0])
            with self.group.together(plan):
                return super().embed(tokens)

    def output_logits(self, normed: Tensor) -> Tensor:
        """See `interface.SharesWeights`."""
        assert normed.dtype == self.decoder.norm.weight.dtype, "rows of another format than the ranks expect"
        with self.group.turn:
            plan = Plan(PlanKind.OUTPUT, self._taken(), [len(normed)])
            with self.group.together(plan, normed):
                return super().output_logits(normed)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """See `PagedCache.move`; sent with the next plan."""
        with self.group.turn:
            super().move(sources, destinations)
            self._moves.append((sources, destinations))

    def _plan(self, kind: PlanKind, one: Pass) -> Plan:
        return Plan.of_pass(kind, one, to_host(one.tokens)[0], self._taken())

    def _taken(self) -> list[Move]:
        """The moves to send with a plan; none are left. Asked for in the plan's turn: a drafter that learns sends plans
        from its own thread, and a pass that overtook the plan with its moves would read rows that no rank has moved.
        """
        moves = list(self._moves)
        self._moves.clear()  # in place: twins share them, as they share the cache
        return moves


class StrictLeadModel(LeadModel, StrictModel):
    """`LeadModel` with strict numerics: what rows share a product was proven on all ranks."""
