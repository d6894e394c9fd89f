"""What every trained head is to the trainer, the checkpoint reader and its drafter; and its own vocabulary."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foretoken.heads.config import HeadConfig
from foretoken.model.interface import SharedWeights
from foretoken.model.layers import Linear


class DraftVocabulary:
    """`ids` [V_d], ascending, are the target's numbers of the head's tokens; all of them where there is no cut."""

    def __init__(self, ids: Tensor, target_vocab_size: int) -> None:
        assert ids.dim() == 1
        assert bool((ids[1:] > ids[:-1]).all()), "ids must ascend"
        assert 0 <= int(ids[0]) <= int(ids[-1]) < target_vocab_size
        self.ids, self.target_vocab_size = ids, target_vocab_size

    @staticmethod
    def whole(size: int) -> DraftVocabulary:
        """Every token of the target."""
        return DraftVocabulary(torch.arange(size), size)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut."""
        return len(self.ids) == self.target_vocab_size

    def to(self, device: torch.device | str) -> DraftVocabulary:
        """The same vocabulary on a device."""
        moved = copy.copy(self)  # checked when it was made: asking a device again would wait for it
        moved.ids = self.ids.to(device)
        return moved

    def to_target(self, tokens: Tensor) -> Tensor:
        """Numbers in the target's vocabulary of the head's own `tokens`, same shape."""
        return tokens if self.is_whole else self.ids[tokens]

    def restrict(self, logits: Tensor) -> Tensor:
        """Columns `[..., V_d]` of the target's logits [..., V]."""
        return logits if self.is_whole else logits[..., self.ids]

    def expand(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary `[..., V]` of the head's own [..., V_d]: -inf where it has no token."""
        if self.is_whole:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.target_vocab_size), float("-inf"))
        whole[..., self.ids] = logits
        return whole


# A head whose states are read by the target's output matrix learns the target's states beside its distributions: each
# row then teaches D numbers more. EAGLE-1's loss is 1.0 on features and 0.1 on tokens (eagle/train/main.py); here the
# loss on tokens has weight 1.
FEATURE_WEIGHT = 10.0


@dataclass(frozen=True)
class HeadBatch:
    """Windows of text with what the frozen target computed for them: B windows of S rows.

    Row t was computed from `tokens[:, t]`; the target's distribution at it is that of `tokens[:, t + 1]`. `wanted`
    says of each token whether the target will have to write it (answers, not prompts): only such tokens are learnt.
    """

    tokens: Tensor  # [B, S + 1] int64
    wanted: Tensor  # [B, S + 1] bool
    states: Mapping[int, Tensor]  # by layer, each [B, S, D]
    normed: Tensor  # [B, S, D] behind the target's final norm
    mask: Tensor | None = None  # `wanted` on the host, where it was made there: reading it back would wait

    def wanted_on_host(self) -> Tensor:
        """`wanted`, [B, S + 1], on the host."""
        return self.wanted.cpu() if self.mask is None else self.mask


@dataclass(frozen=True)
class Place:
    """A head's predictions at one place of a draft, for some rows of a batch, in training.

    `logits` [R, V_d] over the head's vocabulary should equal the target's at `rows` [R] (of the batch, flattened over
    [B, S]). `number` counts from 0, the first drafted token. `extra_loss` is a scalar that the kind of head adds
    (features, confidence).
    """

    number: int
    logits: Tensor
    rows: Tensor
    extra_loss: Tensor | None = None


class RandomRows(NamedTuple):
    """`rows` [B, Q] of B windows, and which of them are allowed: the others only fill up windows that allow few."""

    rows: Tensor
    is_allowed: Tensor


def random_rows(allowed: Tensor, per_row: int, seed: int) -> RandomRows:
    """One in `per_row` of the rows of each window, those that are `allowed` [B, S] first; a function of the seed."""
    chance = torch.rand(allowed.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).masked_fill(
        ~allowed.cpu(), -1.0
    )
    best = chance.topk(-(-allowed.shape[1] // per_row), dim=1)
    return RandomRows(best.indices.to(allowed.device), (best.values >= 0).to(allowed.device))


class Head(nn.Module, ABC):
    """A trained head; frozen parts of the target (`SharedWeights`) are handed in, never part of `state_dict`."""

    name: str  # of its drafter
    samples_rows = True  # `places` chooses rows by its seed

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary

    @abstractmethod
    def hidden_layers(self) -> tuple[int, ...]:
        """Taps of the target that it reads."""

    @abstractmethod
    def initialise(self, seed: int) -> None:
        """Random weights for training."""

    def output_matrices(self) -> tuple[Linear, ...]:
        """Those of its own, over its vocabulary."""
        return ()

    @torch.no_grad()
    def begin_from(self, output_logits: Callable[[Tensor], Tensor]) -> None:
        """Before training, after `initialise`: output matrices of its own begin as the target's, whose `output_logits`
        are given.
        """
        for output in self.output_matrices():
            weight = output.weight
            assert weight is not None, "training begins before matrices are packed"
            identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
            weight.copy_(self.vocabulary.restrict(output_logits(identity)).T)

    @abstractmethod
    def places(self, batch: HeadBatch, target: SharedWeights, num_places: int, seed: int) -> Iterator[Place]:
        """Its predictions along `batch` at the first `num_places` places of a draft, as they would be at inference:
        later places build on its own earlier ones. `seed` chooses anchors, where a kind of head samples them.

        Rows whose target row would lie outside the window, or whose token is not `wanted`, are left out.
        """
