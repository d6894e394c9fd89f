"""A head's own vocabulary: the target's most frequent tokens, so that its output matrix is small."""

from __future__ import annotations

import copy

import torch
from torch import Tensor


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
