"""The model on rank 0: a `PagedModel` that sends every pass to the other ranks before it begins.

Rank 0 has the tables, the requests and all decisions; each method here turns what is decided into a `Plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from foretoken.errors import ConfigError, RankError
from foretoken.model.decoder import Decoder
from foretoken.model.interface import ForwardOutput
from foretoken.model.paged import PagedModel, Pass
from foretoken.model.strict import StrictModel
from foretoken.parallel.group import RankGroup
from foretoken.parallel.plan import Move, Plan, PlanKind
from foretoken.transfer import to_host


class LeadModel(PagedModel):
    """See `interface.RankedModel`; numbers of threads stay as they are, since ranks wait for each other."""

    def __init__(self, group: RankGroup, decoder: Decoder, num_slots: int, kept: torch.dtype) -> None:
        self.group = group
        self._moves: list[Move] = []  # done here, and not sent yet
        with group.together(Plan(PlanKind.CACHE, numbers=[num_slots])):
            super().__init__(decoder, num_slots, kept=kept)

    @property
    def needs_equal_threads(self) -> bool:
        """See `interface.NeedsEqualThreads`."""
        return True

    @property
    def failure(self) -> RankError | None:
        """See `interface.RankedModel`."""
        return self.group.failure

    def end(self) -> None:
        """See `interface.RankedModel`."""
        self.group.end()

    def fresh(self) -> Self:
        """Other ranks have one cache.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("tensor_parallel", self.decoder.shard.world, "the target has one cache; open it anew")

    def run_pass(self, one: Pass) -> ForwardOutput:
        """See `PagedModel.run_pass`."""
        rows = torch.cat([join.hidden for join in one.joins]) if one.joins else None
        with self.group.together(self._plan(PlanKind.PASS, one), rows):
            return super().run_pass(one)

    def run_early(self, one: Pass) -> tuple[Tensor, Tensor]:
        """See `PagedModel.run_early`."""
        with self.group.together(self._plan(PlanKind.EARLY, one)):
            return super().run_early(one)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `interface.SharesWeights`."""
        with self.group.together(Plan(PlanKind.EMBED, self._taken(), tokens=to_host(tokens)[0])):
            return super().embed(tokens)

    def output_logits(self, normed: Tensor) -> Tensor:
        """See `interface.SharesWeights`."""
        assert normed.dtype == self.decoder.norm.weight.dtype, "rows of another format than the ranks expect"
        with self.group.together(Plan(PlanKind.OUTPUT, self._taken(), [len(normed)]), normed):
            return super().output_logits(normed)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """See `PagedCache.move`; sent with the next plan."""
        super().move(sources, destinations)
        self._moves.append((sources, destinations))

    def _plan(self, kind: PlanKind, one: Pass) -> Plan:
        return Plan.of_pass(kind, one, to_host(one.tokens)[0], self._taken())

    def _taken(self) -> list[Move]:
        """The moves to send with a plan; none are left."""
        moves = list(self._moves)
        self._moves.clear()  # in place: twins share them, as they share the cache
        return moves


class StrictLeadModel(LeadModel, StrictModel):
    """`LeadModel` with strict numerics: what rows share a product was proven on all ranks."""
