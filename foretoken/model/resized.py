"""A model with another number of logit columns: models that share a tokenizer differ in padding at the end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor

from foretoken.model.interface import ForwardOutput, LanguageModel, PrefixModel, Segment, TwinModel


def resized(model: LanguageModel, vocab_size: int) -> LanguageModel:
    """`model` with logits `[R, vocab_size]`: cut, or filled with -inf. Tokens it lacks are read as its last one."""
    if model.vocab_size == vocab_size:
        return model
    kind = _ResizedPrefix if isinstance(model, PrefixModel) else _Resized
    return cast(LanguageModel, kind(model, vocab_size))


class _Resized:
    """Everything but the columns is `inner`'s."""

    def __init__(self, inner: LanguageModel, vocab_size: int) -> None:
        self.inner, self.vocab_size = inner, vocab_size

    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        out = self.inner.forward(tokens.clamp(max=self.inner.vocab_size - 1), segments, taps)
        missing = self.vocab_size - self.inner.vocab_size
        return ForwardOutput(torch.nn.functional.pad(out.logits, (0, missing), value=-torch.inf), out.taps)

    def twin(self) -> LanguageModel:
        """See `interface.TwinModel`; a model that has none is one itself, once its sequences are closed."""
        return resized(self.inner.twin() if isinstance(self.inner, TwinModel) else self.inner, self.vocab_size)


class _ResizedPrefix(_Resized):
    """A resized model whose `inner` can begin a sequence with what another one left."""


def _hand_over(kind: type[_Resized], protocol: type) -> None:
    """Let `inner` answer for what `protocol` asks and `kind` does not do itself.

    Each name becomes a property of the class: from Python 3.12 on `isinstance` does not find in a class what
    `__getattr__` would answer for, and the model would pass for one that cannot share prefixes.
    """
    for name in vars(protocol).keys() - vars(_Resized).keys():
        if not name.startswith("_") and name != "vocab_size":
            setattr(kind, name, property(attrgetter(f"inner.{name}")))


_hand_over(_Resized, LanguageModel)
_hand_over(_ResizedPrefix, PrefixModel)
