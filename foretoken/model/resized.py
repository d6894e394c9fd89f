"""A model with another number of logit columns: models that share a tokenizer differ in padding at the end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from foretoken.kv.prefix import PrefixStats
from foretoken.model.interface import ForwardOutput, LanguageModel, PrefixModel, Segment, TwinModel


def resized(model: LanguageModel, vocab_size: int) -> LanguageModel:
    """`model` with logits `[R, vocab_size]`: cut, or filled with -inf. Tokens it lacks are read as its last one."""
    if model.vocab_size == vocab_size:
        return model
    return _ResizedPrefix(model, vocab_size) if isinstance(model, PrefixModel) else _Resized(model, vocab_size)


class _Resized:
    """Everything but the columns is `inner`'s.

    Every method is written out: from Python 3.12 on `isinstance` does not find in a class what `__getattr__` would
    answer for, and the model would pass for one that cannot share prefixes.
    """

    def __init__(self, inner: LanguageModel, vocab_size: int) -> None:
        self.inner, self._vocab_size = inner, vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        return self._vocab_size

    @property
    def max_context_tokens(self) -> int:
        """See `interface.LanguageModel`, as for all that follows."""
        return self.inner.max_context_tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.inner.eos_token_ids

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.inner.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied ones counted once."""
        return self.inner.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return self.inner.weight_bytes

    @property
    def step_bytes(self) -> int:
        """Weights that a step of one token reads."""
        return self.inner.step_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory of one token; 0 where it is not known."""
        return self.inner.kv_bytes_per_token

    @property
    def numerics(self) -> str:
        """See `interface.LanguageModel`."""
        return self.inner.numerics

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.inner.device

    @property
    def capacity_tokens(self) -> int:
        """Tokens that an empty memory holds."""
        return self.inner.capacity_tokens

    def open(self, sequence: int) -> None:
        """Begin an empty sequence."""
        self.inner.open(sequence)

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        self.inner.close(sequence)

    def length(self, sequence: int) -> int:
        """Number of committed tokens held for `sequence`."""
        return self.inner.length(sequence)

    def num_free_tokens(self) -> int:
        """Tokens that can still be held."""
        return self.inner.num_free_tokens()

    def footprint_tokens(self, num_tokens: int) -> int:
        """What a sequence of `num_tokens` takes out of `num_free_tokens`."""
        return self.inner.footprint_tokens(num_tokens)

    def reserve(self, sequence: int, num_rows: int) -> bool:
        """Make room for `num_rows` more rows."""
        return self.inner.reserve(sequence, num_rows)

    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Run the model and fit its logits."""
        out = self.inner.forward(tokens.clamp(max=self.inner.vocab_size - 1), segments, taps)
        return ForwardOutput(
            torch.nn.functional.pad(out.logits, (0, self.vocab_size - self.inner.vocab_size), value=-torch.inf),
            out.taps,
        )

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        """Keep the pending rows and the nodes of `path`."""
        self.inner.commit(sequence, num_pending, path)

    def rollback(self, sequence: int, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        self.inner.rollback(sequence, length)

    def twin(self) -> LanguageModel:
        """See `interface.TwinModel`; a model that has none is one itself, once its sequences are closed."""
        return resized(self.inner.twin() if isinstance(self.inner, TwinModel) else self.inner, self.vocab_size)


class _ResizedPrefix(_Resized):
    """A resized model whose `inner` can begin a sequence with what another one left."""

    inner: PrefixModel

    def adopt(self, sequence: int, tokens: Sequence[int], tenant: str, max_tokens: int | None = None) -> int:
        """See `interface.PrefixModel`."""
        return self.inner.adopt(sequence, tokens, tenant, max_tokens)

    def shared_tokens(self, tokens: Sequence[int], tenant: str, max_tokens: int | None = None) -> int:
        """See `interface.PrefixModel`."""
        return self.inner.shared_tokens(tokens, tenant, max_tokens)

    def publish(self, sequence: int, tokens: Sequence[int], tenant: str) -> None:
        """See `interface.PrefixModel`."""
        self.inner.publish(sequence, tokens, tenant)

    def attach(self, tokens: Sequence[int], tenant: str, owner: Hashable, first: int, states: Sequence[object]) -> None:
        """See `interface.PrefixModel`."""
        self.inner.attach(tokens, tenant, owner, first, states)

    def attached(self, tokens: Sequence[int], tenant: str, owner: Hashable) -> list[object]:
        """See `interface.PrefixModel`."""
        return self.inner.attached(tokens, tenant, owner)

    def drop_prefixes(self) -> None:
        """See `interface.PrefixModel`."""
        self.inner.drop_prefixes()

    @property
    def prefix_stats(self) -> PrefixStats:
        """See `interface.PrefixModel`."""
        return self.inner.prefix_stats
