"""A model with another number of columns: what two models of one tokenizer differ in is padding at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from foretoken.model.interface import ForwardOutput, LanguageModel, Segment, TwinModel


def resized(model: LanguageModel, vocab_size: int) -> LanguageModel:
    """`model` with logits `[R, vocab_size]`: cut, or filled up with -inf. Tokens it has no column for are read as its last one."""
    return model if model.vocab_size == vocab_size else cast(LanguageModel, _Resized(model, vocab_size))


class _Resized:
    """Everything but the columns is `inner`'s."""

    def __init__(self, inner: LanguageModel, vocab_size: int) -> None:
        self.inner, self.vocab_size = inner, vocab_size

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.inner, name)

    def twin(self) -> LanguageModel:
        """See `interface.TwinModel`; a model that has none is one itself, once its sequences are closed."""
        return cast(LanguageModel, _Resized(self.inner.twin() if isinstance(self.inner, TwinModel) else self.inner, self.vocab_size))

    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Run the model and fit its logits."""
        out = self.inner.forward(tokens.clamp(max=self.inner.vocab_size - 1), segments, taps)
        return ForwardOutput(torch.nn.functional.pad(out.logits, (0, self.vocab_size - self.inner.vocab_size), value=-torch.inf), out.taps)
