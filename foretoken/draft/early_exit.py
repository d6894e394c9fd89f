"""The target drafts for itself with some of its layers, in its own cache, and the verify pass goes on from there.

Exit mode (LayerSkip, Elhoushi et al. 2404.16710): the first layers, final norm and head. What they computed for a row,
keys, values and residual stream, is what the verify pass would compute, so it runs only the other layers for it. With
`exit_layer="auto"` every candidate exit is a variant (`base.Variants`), and the engine chooses. Skip mode (SWIFT, Xia
et al. 2410.06916): some layers are left out; what ran before the first gap is reused, the rest is run again.

A trained adapter (`heads.adapter`, `SpecConfig.head`) changes what the final norm reads at the exit that it was trained
for, and nothing of what the verify pass takes up.

Nothing is kept of a request between rounds except, while a set of layers is searched for, the end of its text. The set
that was found holds for all requests of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Factory, Feedback, product_of
from foretoken.draft.chain import PROBABILITIES, Chain, assemble, extend
from foretoken.draft.open_head import open_head
from foretoken.errors import ConfigError
from foretoken.heads.adapter import ExitAdapter
from foretoken.model.families import NATIVE_MODEL_TYPES
from foretoken.model.interface import EarlyExitModel, EarlySegment, LanguageModel
from foretoken.text.randomness import Purpose, uniforms
from foretoken.transfer import to_device, to_host
from foretoken.verify import first_max


def relative_speed(rate: float, num_draft: int, draft_cost: float, target_cost: float) -> float:
    """Expected tokens per cost of rounds of `num_draft` tokens, each accepted with chance `rate`; plain decoding is 1.

    1 + a + ... + a^n tokens for n draft steps and one of the target (tokens per layer of DEL, Entezari Zarch et al.
    2504.05598).
    """
    tokens = sum(rate**place for place in range(num_draft + 1))
    return tokens * target_cost / (num_draft * draft_cost + target_cost)


def exit_candidates(num_layers: int) -> tuple[int, ...]:
    """Exit layers to choose from: the first, an eighth, a quarter, a half and three quarters of the way."""
    return tuple(sorted({max(1, num_layers * eighths // 8) for eighths in (0, 1, 2, 4, 6)} - {num_layers}))


def first_skips(num_layers: int) -> frozenset[int]:
    """Every other layer but the first and the last: where the search for a set begins, as in SWIFT (2410.06916)."""
    return frozenset(range(1, num_layers - 1, 2))


def changed_skips(skipped: frozenset[int], num_layers: int, numbers: Sequence[float]) -> frozenset[int]:
    """A neighbour of a set: one layer more, one less, or one for another, as three `numbers` in [0, 1) have it.

    First and last layer are never skipped, and something always is.
    """
    inner = range(1, num_layers - 1)
    spare, used = sorted(set(inner) - skipped), sorted(skipped)
    added = frozenset(spare[int(numbers[1] * len(spare)) :][:1])
    dropped = frozenset(used[int(numbers[2] * len(used)) :][:1])
    if numbers[0] < 1 / 3 or len(used) == 1:
        return skipped | added
    if numbers[0] < 2 / 3 or not spare:
        return skipped - dropped
    return (skipped - dropped) | added


_TRIAL_EVERY = 8  # rounds between two trials of a set of skipped layers
NUM_TRIALS = 48  # trials of the search


@dataclass
class SkipSearch:
    """A set of layers to leave out, found by trying neighbours of the best so far on text that was generated already
    (SWIFT, 2410.06916).

    A trial runs the best set and a neighbour over the same recent rows and keeps the one with the greater expected
    speed. There is a trial every eighth round, or as soon after as there is text enough, `NUM_TRIALS` in all.
    """

    num_layers: int
    head: float
    skipped: frozenset[int] = field(init=False)
    num_trials: int = 0
    _rounds: int = 0  # since the last trial

    def __post_init__(self) -> None:
        self.skipped = first_skips(self.num_layers)

    def layers(self, skipped: frozenset[int] | None = None) -> tuple[int, ...]:
        """The layers that run."""
        return kept_layers(self.skipped if skipped is None else skipped, self.num_layers)

    def tries(self) -> bool:
        """End a round; whether a trial is due."""
        self._rounds += 1
        return self.num_trials < NUM_TRIALS and self._rounds >= _TRIAL_EVERY

    def trial(self, agree: Callable[[tuple[int, ...]], Sequence[float]], most: int) -> None:
        """Learn from rows of finished text: `agree(layers)` tells for each whether a draft of these layers would have
        said what was said; `most` is the number of draft tokens in a round.
        """
        self._rounds = 0
        numbers = uniforms([0] * 3, Purpose.SEARCH, [self.num_trials] * 3, range(3))
        self.num_trials += 1
        other = changed_skips(self.skipped, self.num_layers, [float(number) for number in numbers])
        if other == self.skipped:
            return
        known, found = agree(self.layers()), agree(self.layers(other))
        if self._speed(found, other, most) > self._speed(known, self.skipped, most):
            self.skipped = other

    def _cost(self, skipped: frozenset[int]) -> float:
        return self.num_layers - len(skipped) + self.head

    def _speed(self, shares: Sequence[float], skipped: frozenset[int], most: int) -> float:
        rate, whole = sum(shares) / len(shares), self.num_layers + self.head
        return max(relative_speed(rate, num, self._cost(skipped), whole) for num in range(1, max(most, 1) + 1))


def kept_layers(skipped: frozenset[int], num_layers: int) -> tuple[int, ...]:
    """The layers that are left, ascending."""
    return tuple(layer for layer in range(num_layers) if layer not in skipped)


_TRIAL_ROWS = 24  # rows of finished text in a trial of a set of layers
_TRIAL_SEQUENCE = -(1 << 50)  # opened and closed within one call


class EarlyExitDrafter:
    """Chains sampled from the target's first layers, or from all but some, with the request's sampling parameters."""

    name = "early_exit"

    def __init__(self, target: EarlyExitModel, adapter: ExitAdapter | None = None) -> None:
        self.target, self.adapter = target, adapter
        self.exits = exit_candidates(target.num_layers) if adapter is None else (adapter.config.exit_layer,)
        self.skips = SkipSearch(target.num_layers, target.head_cost())
        self._recent: dict[int, list[int]] = {}  # last emitted tokens of requests for which layers are searched

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`."""
        if not isinstance(factory.target, EarlyExitModel):
            reason = f"{factory.folder} runs through transformers, which cannot stop between two layers"
            remedy = f"choose another drafter, or a checkpoint of {', '.join(NATIVE_MODEL_TYPES)}"
            raise ConfigError("drafter", spec.drafter, f"{reason}; {remedy}")
        if spec.head is None:
            return cls(factory.target)
        adapter, _ = open_head(factory, spec, ExitAdapter)
        return cls(factory.target, adapter)

    def models(self) -> Sequence[LanguageModel]:
        """See `base.ModelDrafter`: none beside the target."""
        return ()

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        target = twin(self.target)
        assert isinstance(target, EarlyExitModel)
        return type(self)(target, self.adapter)

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """See `base.Variants`: the exit layer, and the chance that a position is drafted."""
        choices: dict[str, Sequence[Any]] = {}
        if spec.exit_layer == "auto" and spec.skip_layers is None and self.adapter is None:
            choices["exit_layer"] = self.exits
        if spec.draft_probability == "auto":
            choices |= PROBABILITIES
        return product_of(spec, choices)

    def start(self, request: Request) -> None:
        """Keep the end of the text if layers are to be searched for it."""
        if request.spec.skip_layers == "auto":
            self._recent[request.request_id] = []

    def propose(self, batch: Batch) -> Draft:
        """Draft `num_draft` tokens for every entry; none where the cache has no room."""
        chains: list[Chain] = []
        by_layers: dict[tuple[int, ...], list[Chain]] = {}
        for entry in batch.decoding:
            chains.append(Chain(entry, self._room(entry)))
            by_layers.setdefault(self._layers(entry.request.spec), []).append(chains[-1])
        for layers, members in by_layers.items():
            growing = [chain for chain in members if chain.grows]
            while growing:
                extend(growing, self._advance(growing, layers))
                growing = [chain for chain in growing if chain.grows]
        return assemble(self.name, self.target.device, chains)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Search on for a set of layers where one is wanted."""
        if self._recent:
            for b, entry in enumerate(batch.decoding):
                recent = self._recent.get(entry.request.request_id)
                if recent is not None:
                    recent += verdict.emitted(b)
                    del recent[: -_TRIAL_ROWS - 1]
            self._try_skips(batch)

    def finish(self, request_id: int) -> None:
        """Forget the end of its text."""
        self._recent.pop(request_id, None)

    def reset(self) -> None:
        """See `base.Resets`: the set of layers that was found."""
        self.skips = SkipSearch(self.target.num_layers, self.skips.head)

    def _layers(self, spec: SpecConfig) -> tuple[int, ...]:
        """The layers that draft under a configuration; where the exit is open, those up to the middle candidate."""
        if spec.skip_layers == "auto":
            return self.skips.layers()
        if spec.skip_layers is not None:
            return kept_layers(frozenset(int(layer) for layer in spec.skip_layers), self.target.num_layers)
        exit_layer = self.exits[len(self.exits) // 2] if spec.exit_layer == "auto" else spec.exit_layer
        return tuple(range(exit_layer))

    def _room(self, entry: BatchEntry) -> int:
        """`num_draft`, or 0 if the cache cannot take the rows that the verify pass will bring."""
        most = entry.num_draft
        return most if most and self.target.reserve(entry.request.request_id, len(entry.pending) + most) else 0

    def _advance(self, chains: Sequence[Chain], layers: Sequence[int]) -> Tensor:
        """Run the next input of every chain through `layers`, the anchor first; logits `[A, V]` after it."""
        device = self.target.device
        pieces: list[Tensor] = []
        segments: list[EarlySegment] = []
        for chain in chains:
            sequence, pending = chain.entry.request.request_id, chain.entry.pending
            if chain.tokens:
                pieces.append(chain.tokens[-1][None])
                segments.append(EarlySegment(sequence, len(pending) + len(chain.tokens) - 1, 1))
            else:
                pieces.append(to_device(pending, device))
                segments.append(EarlySegment(sequence, 0, len(pending)))
        return self.target.forward_early(torch.cat(pieces), segments, layers, self.adapter)

    def _try_skips(self, batch: Batch) -> None:
        """Run a trial on the end of the first long enough text, when one is due and a copy of its last block fits."""
        if not self.skips.tries():
            return
        ready = [entry for entry in batch.decoding if len(self._recent.get(entry.request.request_id, ())) > _TRIAL_ROWS]
        if not ready:
            return
        target, sequence = self.target, ready[0].request.request_id
        *rows, _ = recent = self._recent[sequence]
        target.fork(sequence, _TRIAL_SEQUENCE)
        try:
            target.rollback(_TRIAL_SEQUENCE, target.length(sequence) - len(rows))
            if target.reserve(_TRIAL_SEQUENCE, len(rows)):
                said = to_device(recent[1:], target.device)
                inputs = to_device(rows, target.device)
                segment = EarlySegment(_TRIAL_SEQUENCE, 0, len(rows), len(rows))

                def agree(layers: tuple[int, ...]) -> list[float]:
                    same = first_max(target.forward_early(inputs, [segment], layers)) == said
                    return list[float](to_host(same.double())[0])

                self.skips.trial(agree, max(1, ready[0].num_draft))
        finally:
            target.close(_TRIAL_SEQUENCE)
