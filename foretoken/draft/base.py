"""The interface of a drafter, and the optional capabilities that the engine asks for with `isinstance`.

A drafter keeps its own state per request, updated by `start` (the prompt) and `commit` (what the round emitted). It
never sees the target's probabilities of the step it drafts for, and may always propose nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.ngram_table import NgramTable
from foretoken.heads.base import Head
from foretoken.model.interface import LanguageModel
from foretoken.text.tokenizer import Tokenizer
from foretoken.transfer import to_device
from foretoken.verify import first_max

DrafterKey = str  # spells the name, and what else tells one instance from another; a text keeps its hash
MAX_VARIANTS = 8  # of one configuration


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
        own = self.logits[to_device(self.rows, self.logits.device)]
        return own.topk(min(count, self.logits.shape[-1]), dim=-1).indices

    def after_probes(self) -> Tensor | None:
        """The most probable token after every probe of the draft: [P]; None when the target did not run them."""
        if self.probe_logits is None:
            return None
        return first_max(self.probe_logits)[to_device(self.probe_rows, self.probe_logits.device)]


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
        """Draft at most `entry.num_draft` nodes for every decoding entry of `batch`; B segments, some may be empty.

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
class AdaptableDrafter(HiddenStateReader, Drafter, Protocol):
    """A drafter whose trained head may go on learning while it drafts (`adapt`)."""

    @property
    def head(self) -> Head:
        """The head it drafts with. Its weights may change between two steps (`heads.weights.replace_weights`)."""

    @property
    def fixed_weights(self) -> tuple[str, ...]:
        """Beginnings of the names of parameters that must not change: what the drafter keeps, and shares as prefix
        states, was computed with them.
        """

    def drop_computed(self) -> None:
        """Drop the keys and values of the old weights; called between two steps, after a change of weights."""


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
class FollowsText(Protocol):
    """A drafter that needs nothing but the emitted tokens of rounds in which it did not draft.

    Its `commit` is called only for rounds in which it drafted. What the other rounds emitted comes with one call of
    `follow` before it drafts again, so that a drafter that is not asked takes no time. One that `keeps_answers` gets
    the rest before `finish`, too. One with an attribute `only_follows` that is true gets what its own rounds emitted in
    the same way, and its `commit` is never called.
    """

    keeps_answers: bool

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        """Append tokens that rounds without a draft of this drafter emitted."""


@runtime_checkable
class Releases(Protocol):
    """A drafter that can free the cache of a request without forgetting the request."""

    def release(self, request_id: int) -> None:
        """Called between two rounds: free the request's cache. It is recomputed when the request drafts again."""


@runtime_checkable
class Resets(Protocol):
    """A drafter that can drop what it keeps from one request to the next, so that measured answers are independent.

    One without `reset` is made anew instead (`engine.drafters`), which is right for every drafter, and slow for
    one that loads weights or reads a file.
    """

    def reset(self) -> None:
        """Called while the drafter has no request: it proposes from now on what a new one would. Weights stay."""


class Factory(Protocol):
    """What a drafter's classmethod `make(factory, spec)` may use: `engine.drafters.DrafterFactory`."""

    @property
    def folder(self) -> Path:
        """The target's folder."""

    @property
    def target(self) -> LanguageModel:
        """The target."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer."""

    def between_steps(self) -> AbstractContextManager[object]:
        """While it is entered no step runs: drafters are made while the target serves, and its memory has one user."""

    def make(self, spec: SpecConfig) -> Drafter:
        """A drafter for another configuration, such as a part."""

    def open_draft(self, folder: Path, draft_dtype: str = "auto") -> LanguageModel:
        """A draft model with a cache of its own; its drafter must be a `ModelDrafter`."""

    def corpus(self, path: str) -> list[int]:
        """Token ids of a text file."""

    def ngram_table(self, name: str) -> NgramTable | None:
        """The table of `SpecConfig.ngram_table`; None where there is none for the target."""


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that runs a model, the target included: its cost is measured at start."""

    def models(self) -> Sequence[LanguageModel]:
        """The models that it holds beside the target."""

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Drafter:
        """The same drafter with nothing learnt and no requests; `twin` gives a model with the same weights and a cache
        of its own, for the target and for each of `models`.
        """


@runtime_checkable
class Parts(Protocol):
    """A drafter that asks others; each of them is measured by itself."""

    @property
    def parts(self) -> Sequence[Drafter]:
        """In the order of `SpecConfig.parts`."""


@runtime_checkable
class Variants(Protocol):
    """A drafter whose configuration leaves something open ("auto") that may be chosen anew in each round."""

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """The configurations among which the engine may choose in each round, `MAX_VARIANTS` at most; (spec,) where
        nothing is open.

        `start` gets `spec`. In a round `entry.request.spec` is the variant that was chosen, in `propose` and `commit`
        alike; rounds of one request may come under different variants.
        """


def variants_of(drafter: Drafter, spec: SpecConfig) -> tuple[SpecConfig, ...]:
    """The variants of a drafter's configuration, `spec` alone if it has none."""
    return drafter.variants(spec) if isinstance(drafter, Variants) else (spec,)


def parts_of(spec: SpecConfig, drafter: Drafter) -> Iterator[tuple[SpecConfig, Drafter]]:
    """The drafters that draft for themselves: `drafter`, or its parts, each with its configuration."""
    if not isinstance(drafter, Parts):
        yield spec, drafter
        return
    for own, part in zip(spec.configs, drafter.parts, strict=True):
        yield from parts_of(own, part)


def product_of(spec: SpecConfig, choices: Mapping[str, Sequence[Any]]) -> tuple[SpecConfig, ...]:
    """`spec` with every combination of values for the fields in `choices`, at most `MAX_VARIANTS`.

    Where there are more, every second value of the longest list is left out, counted so that the last one stays.
    """
    if not choices:
        return (spec,)
    values = [list(one) for one in choices.values()]
    while len(list(itertools.product(*values))) > MAX_VARIANTS:
        longest = max(values, key=len)
        longest[:] = longest[::-2][::-1]
    return tuple(replace(spec, **dict(zip(choices, chosen, strict=True))) for chosen in itertools.product(*values))
