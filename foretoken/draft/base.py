"""The interface of a drafter, and the optional capabilities that the engine asks for with `isinstance`.

A drafter keeps its own state per request, updated by `start` (the prompt) and `commit` (what the round emitted). It
never sees the target's probabilities of the step it drafts for, and may always propose nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.verify import first_max

DrafterKey = tuple[Hashable, ...]  # the name, and what else tells one instance from another


@dataclass(frozen=True)
class Feedback:
    """What the target computed at the R rows of a draft; `rows` are their indices in the tensors of the whole step.

    `prompt_taps` are the hidden states of rows that only read text, by request and layer; `draft.hidden_states` joins
    them with `taps` and hands them to each `HiddenStateReader`.
    """

    logits: Tensor  # [R_step, V] after each request's processors
    rows: tuple[int, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # by layer, each [R_step, D]
    probe_logits: Tensor | None = None  # [P_step, V] the model's own behind every probe; None when none was run
    probe_rows: tuple[int, ...] = ()  # indices of the draft's own probes in it
    prompt_taps: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)  # each [n, D], before the anchor

    def top_tokens(self, count: int) -> Tensor:
        """The `count` most probable tokens after every row, most probable first: [R, count]."""
        return self._own(self.logits).topk(min(count, self.logits.shape[-1]), dim=-1).indices

    def tap(self, layer: int) -> Tensor:
        """The residual stream after `layer` layers at every row: [R, D]."""
        return self._own(self.taps[layer])

    def after_probes(self) -> Tensor | None:
        """The most probable token after every probe of the draft: [P]; None when the target did not run them."""
        if self.probe_logits is None:
            return None
        return first_max(self.probe_logits)[
            torch.tensor(self.probe_rows, dtype=torch.int64, device=self.probe_logits.device)
        ]

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor[torch.tensor(self.rows, dtype=torch.int64, device=tensor.device)]


@dataclass(frozen=True)
class HiddenRows:
    """Hidden states of the target at consecutive committed positions of one request.

    Row i was computed from `tokens[i]`, which stands at position `start + i`; `next_token` stands behind the last row.
    `states` holds by layer [n, D]: layer `l` is the residual stream after `l` layers.
    """

    request_id: int
    start: int
    tokens: tuple[int, ...]
    next_token: int
    states: Mapping[int, Tensor]

    @property
    def stop(self) -> int:
        """Position behind the last row."""
        return self.start + len(self.tokens)

    def after(self, position: int) -> HiddenRows:
        """The rows from `position` on."""
        skipped = position - self.start
        if skipped <= 0:
            return self
        states = {layer: rows[skipped:] for layer, rows in self.states.items()}
        return HiddenRows(self.request_id, position, self.tokens[skipped:], self.next_token, states)


class Drafter(Protocol):
    """Proposes tokens that the target then verifies."""

    @property
    def name(self) -> str:
        """The name in `SpecConfig.drafter` and in each token's provenance."""

    def start(self, request: Request) -> None:
        """Take in a new request's prompt."""

    def propose(self, batch: Batch) -> Draft:
        """Draft for every decoding entry of `batch`, at most `entry.num_draft` nodes each; B segments, empty ones
        allowed.

        In addition `Draft.probes`, at most `entry.num_probe` each and none deeper than `entry.probe_depth`.
        """

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Record what the round emitted: `draft`, `verdict` and `feedback` are aligned with `batch.decoding`.

        A request's nodes may come from another drafter (or a grammar): what counts is what was emitted. Probes need not
        have been run.
        """

    def finish(self, request_id: int) -> None:
        """Drop everything kept for a request."""


@runtime_checkable
class Taps(Protocol):
    """A drafter that reads the target's hidden states at the rows of a round (`Feedback.tap`), draft nodes included.

    Prompt rows are not part of it: see `HiddenStateReader`.
    """

    def taps(self) -> tuple[int, ...]:
        """Called between `propose` and the target's forward: layers whose taps the feedback should hold this round."""


@runtime_checkable
class HiddenStateReader(Protocol):
    """A drafter that reads the target's hidden states at every committed position of its requests: a trained head.

    Each request's rows come as one stream, in order of position, every position exactly once: chunks of the prompt as
    they are read, then the anchor and the accepted path of each round. The last committed token has no row yet. A
    reader that is also `Releases` starts again from position 0 after `release`; any other keeps what it has read, and
    rows that the target computes again after a preemption are left out.

    A prefix that the target adopts from its cache has no hidden states. A request of such a drafter therefore adopts
    only as much as the drafter has read already or can adopt itself (`PrefixStates`), and computes the rest.
    """

    def hidden_layers(self) -> tuple[int, ...]:
        """Layers it reads, the same in every round; () for a drafter that needs none in its configuration."""

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Take the new rows of some requests, before the `commit` of the same step. `HiddenRows.states` has at least
        the layers asked for; tensors may be kept, not changed.
        """


@runtime_checkable
class PrefixStates(HiddenStateReader, Protocol):
    """A reader whose per-token states (its own K/V, or the hidden states themselves) can be shared between requests of
    one tenant that begin alike.

    The states are stored with the target's prefix blocks and evicted with them. Those of a block must depend on tokens
    up to the end of that block only. A head whose row t combines the hidden state of position t with the token at
    t + 1 (EAGLE) must therefore count that row to position t + 1.
    """

    def export_states(self, request_id: int, start: int, stop: int) -> object:
        """The states of positions `start` .. `stop` of a request, one block; not to be changed afterwards."""

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        """Begin a request, of which nothing was read yet, with states that `export_states` returned for the leading
        blocks of the same text; the stream of rows goes on behind them.
        """


@runtime_checkable
class Reads(Protocol):
    """A drafter with models of its own, which must read committed text that they have not run yet: a prompt, the tokens
    of rounds without a draft.
    """

    @property
    def num_read_tokens(self) -> int:
        """Committed tokens that its models read in the last `propose`, over all requests; 0 where none had more than a
        few to read.

        The time of such a round does not measure what its draft costs.
        """


@runtime_checkable
class Releases(Protocol):
    """A drafter that can free the cache of a request without forgetting the request."""

    def release(self, request_id: int) -> None:
        """Called between two rounds: free the request's cache. It is recomputed when the request drafts again."""
