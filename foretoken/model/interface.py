"""What the engine and the drafters ask of any language model: rows in, logits out, and a past that can be cut back.

Two implementations: `paged.PagedModel` (our decoder over a block-table cache) and `hf.TransformersModel` (any other
causal model of transformers). A sequence is known by a number that its owner chooses. Only the first can also run some
of its layers (`EarlyExitModel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.kv.prefix import PrefixStats


@dataclass(frozen=True)
class Segment:
    """The new rows of one sequence in a forward: `num_pending` committed tokens, then a tree of guesses.

    `parents[i]` is the tree node that node i follows, -1 the last pending token. `num_logits` counts rows from the end
    whose logits are wanted; it is `1 + len(parents)` when the sequence decodes, 0 for a chunk of a prompt. The first
    `num_held` nodes were run by earlier forwards since the last commit, in this order: they are no rows now, and the
    others may follow them.
    """

    sequence: int
    num_pending: int
    parents: tuple[int, ...] = ()
    num_logits: int = 1
    num_held: int = 0

    def __post_init__(self) -> None:
        assert not (self.num_held and self.num_pending), "nodes are held behind what is committed"
        assert self.num_held <= len(self.parents)

    @property
    def num_rows(self) -> int:
        """Rows this segment adds to the flat run."""
        return self.num_pending + len(self.parents) - self.num_held

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))


@dataclass(frozen=True)
class ForwardOutput:
    """`logits` [R, V] of the wanted rows in order, and `taps` by layer for the same rows, each [R, D]."""

    logits: Tensor
    taps: dict[int, Tensor]


class LanguageModel(Protocol):
    """A causal language model with its own memory of every open sequence.

    The memory of a sequence holds `length(sequence)` tokens. `forward` adds rows that count as guesses until `commit`
    makes some of them part of the past; what is not committed can never be read again.
    """

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence the model was made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers; taps are numbered 0 (embedding) to this."""

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied ones counted once."""

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""

    @property
    def step_bytes(self) -> int:
        """Weights that a step of one token reads: all of them, except a table of embeddings that serves nothing
        else.
        """

    @property
    def device(self) -> torch.device:
        """Where tokens are expected and logits come out."""

    def open(self, sequence: int) -> None:
        """Begin an empty sequence."""

    def close(self, sequence: int) -> None:
        """Forget a sequence and give back its memory."""

    def length(self, sequence: int) -> int:
        """Number of committed tokens held for `sequence`."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that an empty memory can hold over all sequences."""

    def num_free_tokens(self) -> int:
        """Tokens that can still be held over all sequences."""

    def footprint_tokens(self, num_tokens: int) -> int:
        """What a sequence of `num_tokens` takes out of `num_free_tokens`, rounding included."""

    def reserve(self, sequence: int, num_rows: int) -> bool:
        """Make room for `num_rows` rows of `sequence` behind what is committed; False (and no change) if there is
        none.
        """

    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Run the flat `tokens` [T] int64, laid out segment after segment.

        Raises:
            CapacityError: no room for the rows.
        """

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        """After a forward: keep the pending rows and the nodes of `path` (root to leaf), forget the other nodes."""

    def rollback(self, sequence: int, length: int) -> None:
        """Forget everything after the first `length` tokens."""


class OpenModel(LanguageModel, Protocol):
    """A language model as it was loaded."""

    def fresh(self) -> OpenModel:
        """The same weights with an empty memory of its own, as large as this one's."""


@runtime_checkable
class PrefixModel(LanguageModel, Protocol):
    """A language model that can begin a sequence with what another one of the same tenant has computed for the same
    text.
    """

    def adopt(self, sequence: int, tokens: Sequence[int], tenant: str) -> int:
        """Take over what is known of the beginning of `tokens` for a sequence just opened; the number of tokens it now
        holds, never all.
        """

    def shared_tokens(self, tokens: Sequence[int], tenant: str) -> int:
        """How much of what `adopt` would find lies in memory that open sequences hold: it takes nothing out of
        `num_free_tokens`.
        """

    def publish(self, sequence: int, tokens: Sequence[int], tenant: str) -> None:
        """Let later sequences take over what `sequence`, whose text begins with `tokens`, holds of them."""

    @property
    def prefix_stats(self) -> PrefixStats:
        """How often that helped."""


@runtime_checkable
class TwinModel(LanguageModel, Protocol):
    """A language model that can be tried out without a trace, as long as its memory is empty."""

    def twin(self) -> LanguageModel:
        """The same weights with another memory, in the same place: what happens to it is not remembered here.

        Only while no sequence is open and no text is kept; not to be used any more once one is.
        """


@dataclass(frozen=True)
class EarlySegment:
    """New rows of one sequence that run only some layers: behind its past and the `offset` rows that have run so before
    them.

    Rows run early beyond `offset` are forgotten first: a chain of guesses may be taken up again anywhere, or begun anew
    at 0.
    """

    sequence: int
    offset: int
    num_rows: int
    num_logits: int = 1


@runtime_checkable
class EarlyExitModel(LanguageModel, Protocol):
    """A language model that can draft for itself: it runs some of its layers over rows that its next `forward` will
    verify.

    Keys and values go where that `forward` will want them. What the leading layers computed for a row is not computed
    again when `forward` meets the same token at the same place behind the same rows; whatever else it meets, it runs in
    full.
    """

    def forward_early(self, tokens: Tensor, segments: Sequence[EarlySegment], layers: Sequence[int]) -> Tensor:
        """Run `layers` (ascending, not all of them), final norm and head over `tokens` [T]: logits `[R, V]` of the rows
        wanted.

        Nothing is committed. The next `forward`, `commit`, `rollback` or `close` of a sequence forgets its early rows.

        Raises:
            CapacityError: no room for the rows.
        """

    def exit_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of what the final norm and the head make of a residual stream `hidden` [R, D]: a tap of any
        layer.
        """

    def head_cost(self) -> float:
        """What final norm and head cost, in layers: the ratio of their weights."""

    def fork(self, sequence: int, child: int) -> None:
        """Open `child` with the committed past of `sequence`."""
