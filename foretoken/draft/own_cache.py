"""The KV cache of a draft model over many requests: prefixes are shared within a tenant, idle requests are evicted.

The cache of a request that has not drafted for a while can be recomputed. So its blocks are given to a request that
wants to draft, least recently used first; they stay in the prefix cache until they are overwritten (`kv.prefix`), and
what is missing is read, in pieces, when the request drafts again. Sequences have the numbers of their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import BatchEntry
from foretoken.draft.base import product_of
from foretoken.draft.chain import PROBABILITIES
from foretoken.kv.prefix import shared_length
from foretoken.model.interface import LanguageModel, PrefixModel, Segment
from foretoken.transfer import to_device

_PIECE_TOKENS = 512  # rows of a long backlog that a model takes in one forward
_USUAL_TOKENS = 8  # rows of committed text that any round may bring; more of them count as reading
# A request that drafted within so many rounds keeps its cache: reading costs more than a few draft tokens gain.
_IDLE_ROUNDS = 8


class OwnCache:
    """The cache of `model`, which drafts for many requests.

    `text_of` tells the committed text that a sequence stands for, in the model's tokens. What the cache holds is a
    beginning of it, the draft tokens of a round that is not committed apart. `num_read_tokens` is what the last round
    read of texts that it had not seen.
    """

    def __init__(self, model: LanguageModel, text_of: Callable[[int], Sequence[int]]) -> None:
        self.model, self._text_of = model, text_of
        self.num_read_tokens = 0
        self._prefix = model if isinstance(model, PrefixModel) else None
        self._block_tokens = model.footprint_tokens(1)
        self._tenants: dict[int, str] = {}
        self._used: dict[int, int] = {}  # round in which a sequence last drafted
        self._readers: list[int] = []  # sequences that have more than a block to read in this round
        self._round = 0

    def start(self, sequence: int, tenant: str) -> None:
        """Open a sequence; it holds nothing before it drafts."""
        self.model.open(sequence)
        self._tenants[sequence], self._used[sequence] = tenant, self._round

    def begin_round(self, sequences: Iterable[int]) -> None:
        """Protect `sequences`, which draft in this round, from giving way; call before its first `make_room`."""
        self._round += 1
        self._used.update(dict.fromkeys(sequences, self._round))
        self._readers.clear()
        self.num_read_tokens = 0

    def room(self, entry: BatchEntry) -> int:
        """How many tokens can follow one another in a draft for `entry`, within the model's context and cache."""
        sequence = entry.request.request_id
        length = min(entry.num_draft, self.model.max_context_tokens - len(self._text_of(sequence)))
        if entry.num_draft and length <= 0:
            self.release(sequence)  # the text has outgrown the model, as far as can be seen
        return length if length > 0 and self.make_room(sequence, length) else 0

    def make_room(self, sequence: int, num_rows: int) -> bool:
        """Make room for the missing text and `num_rows` more; False, with nothing read or held, if there is none.

        An empty sequence begins with what is known of its text. Where another one is about to read the same in this
        round, that happens first, so that it is read once.
        """
        model, text = self.model, self._text_of(sequence)
        was_empty = not model.length(sequence)
        if was_empty:
            self._adopt(sequence, text)
        length = model.length(sequence)
        if not self._reserve(sequence, len(text) - length + num_rows):
            model.rollback(sequence, 0 if was_empty else length)
            return False
        if len(text) - length > self._block_tokens:
            self._readers.append(sequence)
        return True

    def catch_up(self, sequence: int) -> None:
        """Read a long backlog in pieces; what is left, at most one piece, is to be run with everybody else's rows."""
        missing = len(self._text_of(sequence)) - self.model.length(sequence)
        pieces = max(0, missing - 1) // _PIECE_TOKENS
        self._read(sequence, self.model.length(sequence) + pieces * _PIECE_TOKENS)
        left = missing - pieces * _PIECE_TOKENS
        self.num_read_tokens += left if left > _USUAL_TOKENS else 0

    def take_pending(self, sequence: int) -> list[int]:
        """The committed tokens to run now, the last of them included; a longer backlog is caught up with first."""
        self.catch_up(sequence)
        return list(self._text_of(sequence)[self.model.length(sequence) :])

    def run(self, tokens: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Logits of a forward of the model, whose pending rows are committed."""
        logits = self.model.forward(tokens, segments).logits
        for segment in segments:
            if segment.num_pending:
                self.model.commit(segment.sequence, segment.num_pending)
        return logits

    def publish_read(self) -> None:
        """Call when a round is committed: what was read in it may serve other sequences from now on."""
        for sequence in self._readers:
            self._publish(sequence)
        self._readers.clear()

    def release(self, sequence: int) -> None:
        """Give back what a sequence holds, between two rounds; it begins anew when it drafts again."""
        if self.model.length(sequence):
            self._publish(sequence)
        self.model.rollback(sequence, 0)

    def finish(self, sequence: int) -> None:
        """Close a sequence; what it holds of its text may serve another one."""
        self._publish(sequence)
        self.model.close(sequence)
        del self._tenants[sequence], self._used[sequence]
        if sequence in self._readers:
            self._readers.remove(sequence)

    def reset(self) -> None:
        """Drop what finished sequences left for later ones; none is open."""
        if self._prefix is not None:
            self._prefix.drop_prefixes()

    def _adopt(self, sequence: int, text: Sequence[int]) -> None:
        if self._prefix is None:
            return
        tenant, size = self._tenants[sequence], self._block_tokens
        for other in self._readers:
            theirs = self._text_of(other)
            shared = min(shared_length(text, theirs), len(text) - 1, len(theirs) - 1) // size * size
            if self._tenants[other] == tenant and shared > self.model.length(other):
                self._read(other, shared)
                self._publish(other)
        self.model.rollback(sequence, 0)  # room that it was given and did not use
        self._prefix.adopt(sequence, text, tenant)

    def _publish(self, sequence: int) -> None:
        if self._prefix is not None:
            self._prefix.publish(sequence, self._text_of(sequence), self._tenants[sequence])

    def _read(self, sequence: int, stop: int) -> None:
        """Run the first `stop` tokens of a text as far as they are missing."""
        text, model = self._text_of(sequence), self.model
        while (start := model.length(sequence)) < stop:
            piece = text[start : min(stop, start + _PIECE_TOKENS)]
            model.forward(to_device(piece, model.device), [Segment(sequence, len(piece), (), 0)])
            model.commit(sequence, len(piece))
            self.num_read_tokens += len(piece)

    def _reserve(self, sequence: int, num_rows: int) -> bool:
        """Room for `num_rows` rows, with what idle sequences hold if need be."""
        model = self.model
        if model.reserve(sequence, num_rows):
            return True
        last = self._round - _IDLE_ROUNDS
        idle = sorted(
            (one for one, used in self._used.items() if used <= last and model.length(one)), key=self._used.__getitem__
        )
        length = model.length(sequence)
        needed = model.footprint_tokens(length + num_rows) - model.footprint_tokens(length)
        if model.num_free_tokens() + sum(model.footprint_tokens(model.length(one)) for one in idle) < needed:
            return False
        for one in idle:
            self.release(one)
            if model.reserve(sequence, num_rows):
                return True
        return False


class OwnCacheDrafter:
    """What drafters that are a model with a cache of its own answer alike; tokens are the model's own."""

    def __init__(self, model: LanguageModel, text_of: Callable[[int], Sequence[int]]) -> None:
        self.model = model
        self._cache = OwnCache(model, text_of)

    def models(self) -> Sequence[LanguageModel]:
        """See `base.ModelDrafter`."""
        return (self.model,)

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """See `base.Variants`: the chance that a position is drafted."""
        return product_of(spec, PROBABILITIES if spec.draft_probability == "auto" else {})

    @property
    def num_read_tokens(self) -> int:
        """See `base.Reads`."""
        return self._cache.num_read_tokens

    def release(self, request_id: int) -> None:
        """See `base.Releases`."""
        self._cache.release(request_id)

    def reset(self) -> None:
        """See `base.Resets`: the cached beginnings of texts."""
        self._cache.reset()
