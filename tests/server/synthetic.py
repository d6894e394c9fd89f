"""A drafter whose draft tokens are accepted as often as a test says: it runs the target's weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.draft.base import Factory
from foretoken.draft.chain import Chain
from foretoken.model.interface import LanguageModel
from foretoken.model.names import model_folder
from foretoken.params import check_number
from foretoken.registry import Traits
from tests.draft.toy_model_drafter import ToyDrafter
from tests.helpers import audit


@dataclass(frozen=True)
class SyntheticOptions:
    """Options of the drafter."""

    rate: float = field(default=1.0, metadata={"help": "share of places with the target's own distribution"})

    def __post_init__(self) -> None:
        check_number("rate", self.rate, 0.0, 1.0)


class SyntheticDrafter(ToyDrafter):
    """At a share of places its draft tokens are drawn as the target draws them; elsewhere from the same distribution
    moved by one token, so that a greedy target never agrees. Which places is a matter of the place alone.
    """

    name = "synthetic"
    Options = SyntheticOptions

    def __init__(self, model: LanguageModel, rate: float) -> None:
        super().__init__(model, model.vocab_size)
        self.rate = rate

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        return cls(factory.open_draft(model_folder("reference:target")), SyntheticOptions(**spec.options).rate)

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        return type(self)(twin(self.model), self.rate)

    def _advance(self, chains: Sequence[Chain]) -> Tensor:
        logits = super()._advance(chains)
        places = [chain.entry.round_start + len(chain.tokens) for chain in chains]
        is_wrong = torch.tensor([random.Random(place).random() >= self.rate for place in places])
        return torch.where(is_wrong[:, None], logits.roll(1, -1), logits)


SYNTHETIC = Traits(SyntheticDrafter, samples=True, options=SyntheticOptions, limit_s=60.0)
audit.KEPT_BY_DRAFTER[SyntheticDrafter] = lambda drafter: drafter.texts
