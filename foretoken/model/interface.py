"""What the engine and the drafters require of a language model: rows in, logits and hidden states out, a cache per
sequence that can be cut back.

Two implementations: `paged.PagedModel` (our decoder over a block-table cache) and `hf.TransformersModel` (any other
causal model of transformers). Code outside `model/` depends on these protocols only, never on a class that implements
them. A sequence is identified by a number that the caller chooses. Optional capabilities are protocols of their own
(`PrefixModel`, `TwinModel`, `SharesWeights`, `SharesModules`, `RankedModel`, `MixtureModel`, `QuantisedModel`,
`EarlyExitModel`), tested with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.errors import RankError
from foretoken.kv.prefix import PrefixStats, StatesOf

if TYPE_CHECKING:
    from foretoken.model.layers import Embedding, Linear


@dataclass(frozen=True)
class Segment:
    """The new rows of one sequence in a forward: `num_pending` committed tokens, then a tree of drafted tokens.

    `parents[i]` is the tree node that node i follows, -1 the last pending token. `num_logits` and `num_taps` count rows
    from the end, independently of each other: the rows whose logits, and whose taps, are returned. `num_logits` is
    `1 + len(parents)` when the sequence decodes and 0 for a chunk of a prompt. The first `num_held` nodes were run by
    earlier forwards since the last commit, in this order: they add no rows now, and the others may follow them.
    """

    sequence: int
    num_pending: int
    parents: tuple[int, ...] = ()
    num_logits: int = 1
    num_held: int = 0
    num_taps: int = 0

    def __post_init__(self) -> None:
        assert not (self.num_held and self.num_pending), "nodes are held behind what is committed"
        assert self.num_held <= len(self.parents)
        assert self.num_taps <= self.num_rows

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
    """`logits` [R, V] of the rows that asked for logits, and by layer the hidden states `taps` [U, D] of the rows that
    asked for taps, both in the order of the segments.
    """

    logits: Tensor
    taps: dict[int, Tensor]


class LanguageModel(Protocol):
    """A causal language model with its own cache of every open sequence.

    The cache of a sequence holds `length(sequence)` tokens. Rows of a `forward` are provisional until `commit` keeps
    some of them; rows that are not committed are never read again.
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
        """Number of decoder layers; tap `l` is the residual stream after `l` layers, 0 (the embedding) to this."""

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied ones counted once."""

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""

    @property
    def step_bytes(self) -> int:
        """Weights that a step of one token reads: all, except a table of embeddings that serves nothing else."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory of one token over all layers; 0 where it is not known."""

    @property
    def numerics(self) -> str:
        """ "strict" if the logits of a position are bitwise independent of the batch, otherwise "default"."""

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
        """Make room for `num_rows` rows of `sequence` behind what is committed; False, and no change, without room."""

    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Run the flat `tokens` [T] int64, laid out segment after segment.

        `taps` lists the layers whose hidden states are returned, for the rows that the segments' `num_taps` select.

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
    """A language model with a prefix cache: a sequence can begin with blocks that another one of the same tenant
    computed for the same text.

    A block holds `footprint_tokens(1)` tokens. Drafters may attach per-token states of their own to a published block
    (`attach`); they are dropped when the block is evicted or overwritten.
    """

    def adopt(self, sequence: int, tokens: Sequence[int], tenant: str, max_tokens: int | None = None) -> int:
        """Begin a sequence just opened with the cached blocks of `tokens`, at most `max_tokens` of them; returns the
        number of tokens it then holds, never all.
        """

    def shared_tokens(self, tokens: Sequence[int], tenant: str, max_tokens: int | None = None) -> int:
        """How many of the tokens that `adopt` would find open sequences hold: those take no `num_free_tokens`."""

    def publish(self, sequence: int, tokens: Sequence[int], tenant: str) -> None:
        """Make the full blocks of `sequence`, whose text begins with `tokens`, available to later sequences."""

    def attach(
        self, sequence: int, tokens: Sequence[int], tenant: str, num_blocks: int, owner: Hashable, states_of: StatesOf
    ) -> None:
        """Store states with those of the first `num_blocks` blocks of `tokens` that are published and have none of this
        owner yet: `states_of(first, stop)` makes those of blocks `first` .. `stop`, one each. `sequence`, whose text
        begins with `tokens`, has just been published; `owner` tells states of different drafters apart.

        States must depend on the tokens up to the end of their block only, and not be changed afterwards.
        """

    def attached(self, tokens: Sequence[int], tenant: str, owner: Hashable) -> list[object]:
        """The states that `owner` attached to the leading published blocks of `tokens`, up to the first without."""

    def drop_prefixes(self) -> None:
        """Forget every published block and what is attached to it: later sequences begin with none of them. Open
        sequences keep what they hold.
        """

    @property
    def prefix_stats(self) -> PrefixStats:
        """How often a prefix was found."""


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

    Rows run early beyond `offset` are forgotten first: a draft may be resumed anywhere, or begun anew at 0.
    """

    sequence: int
    offset: int
    num_rows: int
    num_logits: int = 1


class SharedWeights(Protocol):
    """The parts of a target that trained heads use as they are: embedding, final norm, output matrix."""

    def embed(self, tokens: Tensor) -> Tensor:
        """`tokens` [T] -> the residual stream [T, D] before the first layer."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The final norm of a residual stream [R, D]."""

    def output_logits(self, normed: Tensor) -> Tensor:
        """Logits `[R, V]` of rows `normed` [R, D] behind the final norm."""


@runtime_checkable
class SharesWeights(LanguageModel, SharedWeights, Protocol):
    """A language model whose embedding, final norm and output matrix a trained head may use."""

    @property
    def logit_softcap(self) -> float:
        """The cap c of `output_logits`, which are c * tanh(x / c) of the matrix product x; 0: they are x."""
        ...


@runtime_checkable
class SharesModules(Protocol):
    """A target that shows what `SharedWeights` reads, for compiled code that reads it itself."""

    def embedding_module(self) -> Embedding | None:
        """The table whose rows `embed` gives; None where it does more than reading them."""

    def output_module(self) -> Linear | None:
        """The matrix whose products `output_logits` gives; None where it does more than multiplying."""


@runtime_checkable
class CapturesSteps(Protocol):
    """A language model whose steps may be captured when their shape is first met, which takes a while."""

    def capture_ahead(self, taps: Sequence[int], has_trees: bool) -> None:
        """Capture steps of few rows, with the hidden states `taps` and without, and compile the kernels of long texts
        and, with `has_trees`, those of trees, before any request waits for them.
        """


@runtime_checkable
class NeedsEqualThreads(Protocol):
    """A language model of which something is promised only while torch's number of threads stays the same."""

    @property
    def needs_equal_threads(self) -> bool:
        """Always true."""


@runtime_checkable
class RankedModel(Protocol):
    """A language model of which other processes hold parts."""

    @property
    def failure(self) -> RankError | None:
        """Why it runs no more; None while all of them live."""

    def end(self) -> None:
        """End the other processes; again it does nothing."""


@runtime_checkable
class MixtureModel(Protocol):
    """A language model that may be a mixture of experts: more rows of a step read more of its weights."""

    @property
    def expert_bytes(self) -> int:
        """Memory of all experts that a router chooses among; 0 where there are none."""

    @property
    def expert_share(self) -> float:
        """Share of them that a step of one token reads."""


@runtime_checkable
class QuantisedModel(Protocol):
    """A language model that tells how its weights are held."""

    @property
    def weight_format(self) -> str:
        """ "int8" or "int4" where most weights of its layers have so many bits or fewer, otherwise "auto"."""


@runtime_checkable
class EarlyExitModel(LanguageModel, Protocol):
    """A language model that can draft for itself: it runs some of its layers over rows that its next `forward` will
    verify.

    Keys and values go where that `forward` will want them. What the leading layers computed for a row is not computed
    again when `forward` meets the same token at the same place behind the same rows; whatever else it meets, it runs in
    full.
    """

    def forward_early(
        self,
        tokens: Tensor,
        segments: Sequence[EarlySegment],
        layers: Sequence[int],
        adapter: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run `layers` (ascending, not all of them), final norm and head over `tokens` [T]: logits `[R, V]` of the rows
        wanted. An `adapter` changes their residual stream [R, D] before the norm; it is not part of what `forward`
        takes up.

        Nothing is committed. The next `forward`, `commit`, `rollback` or `close` of a sequence forgets its early rows.

        Raises:
            CapacityError: no room for the rows.
        """

    def head_cost(self) -> float:
        """What final norm and head cost, in layers: the ratio of their weights."""

    def fork(self, sequence: int, child: int) -> None:
        """Open `child` with the committed past of `sequence`."""
