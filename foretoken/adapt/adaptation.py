"""How one drafter adapts: a copy of its head learns on windows of served text and is judged on held-out text; its
weights are offered, and taken back if they were a mistake.

The learner's thread runs `work`, a generator that rests at every `yield`. What is to be used next waits in `offer`
until the engine's thread takes it between two steps (`taken`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from foretoken.adapt.buffer import ExampleBuffer, Window
from foretoken.control.adaptation import MIN_WINDOWS, AdaptConfig, change, emitted_per_step
from foretoken.heads.base import Head, HeadBatch
from foretoken.heads.losses import LossConfig, acceptance, compare, same_argmax, target_logits, weighted_loss
from foretoken.heads.weights import HeadWeight, held_in, in_format, numbers, plain_copy, weights_of
from foretoken.model.interface import SharesWeights

_PASSES = 8  # over the same text: more would learn it by heart
_WINDOWS_PER_ROUND = 48  # learnt between two judgements, which read every held-out window
_MAX_JUDGED = 24  # windows, the newest: a judgement should not take longer than what it judges
Weights = Mapping[str, HeadWeight]  # of a head's `state_dict`, those that are learnt, in the formats in use
NUM_PLACES = 4  # deeper places of a draft are reached rarely, and each costs another pass of the head
_LEARNING_RATE = 5e-4  # a few hundred updates should show: a fifth of what training from nothing bears is too slow
_CLIP = 0.5  # of the gradient's norm, as in training (SafeAILab/EAGLE)
_WINDOWS_PER_UPDATE = 4  # smooths the gradient of single texts


class Rest(Enum):
    """What the learner's thread does after a unit of work."""

    SHORT = "after work, as the share of the machine demands"
    LONG = "nothing to do until more is served"


@dataclass(frozen=True)
class Offer:
    """Weights that the engine shall draft with from the next step on."""

    version: int
    weights: Weights


@dataclass(frozen=True)
class AdaptationState:
    """How far adapting one drafter has come.

    `version` counts the changes of the weights in use, returns to earlier ones included. `before` and `after` are the
    tokens per step along held-out text at the last judgement, under the weights in use and under those learnt.
    """

    drafter: str
    version: int = 0
    num_swaps: int = 0
    num_returns: int = 0
    num_judged: int = 0
    num_learnt_tokens: int = 0
    num_kept_tokens: int = 0
    before: float | None = None
    after: float | None = None


class Adaptation:
    """One drafter's learning; `weights` are those in use at the beginning."""

    def __init__(
        self, name: str, buffer: ExampleBuffer, learner: HeadLearner, config: AdaptConfig, clock_s: Callable[[], float]
    ) -> None:
        self.buffer, self._learner, self._config, self._clock_s = buffer, learner, config, clock_s
        self.offer: Offer | None = None
        self._state = AdaptationState(name)
        self._in_use: Weights = learner.weights()
        self._earlier: Weights | None = None  # in use before these; None once these have proven themselves
        self._changed_s = -math.inf
        self._first_window = 0  # number of the first window that was served after the last change
        self._known: dict[int, float] = {}  # scores of the weights in use, by window
        self._is_judged = True  # nothing was learnt since the last judgement

    @property
    def state(self) -> AdaptationState:
        """How far it has come: text seen, weights offered, kept and taken back."""
        return replace(self._state, num_kept_tokens=self.buffer.num_tokens)

    def taken(self, offer: Offer) -> None:
        """The engine drafts with the offered weights from now on."""
        assert offer is self.offer
        self._state = replace(self._state, version=offer.version)
        self._changed_s, self._first_window = self._clock_s(), self.buffer.num_windows
        self.offer = None

    def work(self) -> Iterator[Rest]:
        """Units of work without an end."""
        while True:
            if self.offer is not None or len(self.buffer.held_out()) < MIN_WINDOWS:
                yield Rest.LONG
                continue
            yield from self._prove()
            if self.offer is not None:
                continue
            yield from self._learn()
            if self._is_judged or self._clock_s() - self._changed_s < self._config.swap_interval_s:
                yield Rest.LONG if self._may_not_learn else Rest.SHORT
            else:
                yield from self._judge()

    @property
    def _may_not_learn(self) -> bool:
        return self._state.num_learnt_tokens >= _PASSES * self.buffer.num_added

    def _learn(self) -> Iterator[Rest]:
        for _ in range(_WINDOWS_PER_ROUND):
            window = None if self._may_not_learn else self.buffer.sample()
            if window is None:
                return
            self._learner.learn(window)
            self._is_judged = False
            self._state = replace(self._state, num_learnt_tokens=self._state.num_learnt_tokens + window.num_rows)
            yield Rest.SHORT

    def _judge(self) -> Iterator[Rest]:
        """Offer what was learnt if it is better; begin again from the weights in use if it is worse."""
        learnt, windows = self._learner.weights(), self.buffer.held_out()[-_MAX_JUDGED:]
        before, after = yield from self._scores(windows, learnt)
        found = change(before, after)
        self._is_judged = True
        num_judged, means = self._state.num_judged + 1, (statistics.fmean(before), statistics.fmean(after))
        self._state = replace(self._state, num_judged=num_judged, before=means[0], after=means[1])
        if found.rises:
            self._earlier = self._in_use
            self._state = replace(self._state, num_swaps=self._state.num_swaps + 1)
            self._use(learnt)
        elif found.falls:
            self._learner.restart(self._in_use)

    def _prove(self) -> Iterator[Rest]:
        """Compare the weights in use with the earlier ones on text served since; return to those if better."""
        fresh = self.buffer.held_out(self._first_window)[-_MAX_JUDGED:]
        if self._earlier is None or len(fresh) < MIN_WINDOWS:
            return
        earlier, self._earlier = self._earlier, None
        in_use, other = yield from self._scores(fresh, earlier)
        if change(in_use, other).rises or change(other, in_use).falls:
            self._learner.restart(earlier)
            self._state = replace(self._state, num_returns=self._state.num_returns + 1)
            self._use(earlier)

    def _scores(
        self, windows: Sequence[Window], other: Weights
    ) -> Generator[Rest, None, tuple[list[float], list[float]]]:
        """Scores of the weights in use, and of `other`, along each of `windows`."""
        numbers = {window.number for window in windows}
        self._known = {number: score for number, score in self._known.items() if number in numbers}
        found: list[float] = []
        for window in windows:
            if window.number not in self._known:
                self._known[window.number] = self._learner.score(self._in_use, window)
                yield Rest.SHORT
            found.append(self._learner.score(other, window))
            yield Rest.SHORT
        return [self._known[window.number] for window in windows], found

    def _use(self, weights: Weights) -> None:
        self._in_use = weights
        self._known.clear()
        self.offer = Offer(self._state.version + 1, weights)


class HeadLearner:
    """Updates a float32 copy of `head` by AdamW with a loss of training; parameters whose names begin with one of
    `fixed` stay as they are. What is judged and handed out of a quantised matrix is quantised.

    `target` is only read: its embedding, final norm and output matrix. Each call is one unit of work.
    """

    def __init__(self, head: Head, target: SharesWeights, fixed: Sequence[str]) -> None:
        dtype = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device)).dtype
        self._config, self._target = LossConfig(), _FrozenTarget(target, dtype)
        self._last_layer, self._num_windows = head.config.target_num_layers, 0
        in_use = {name: own for name, own in weights_of(head).items() if not name.startswith(tuple(fixed))}
        self._formats = {name: held_in(own) for name, own in in_use.items()}
        self._head = plain_copy(head).requires_grad_(False)
        self._judge = plain_copy(head).requires_grad_(False)  # holds the weights that are scored
        self._learnt = {name: own.requires_grad_(True) for name, own in self._parameters(self._head)}
        self._optimizer = self._new_optimizer()

    def learn(self, window: Window) -> None:
        """Take in one window; every fourth changes the weights."""
        self._num_windows += 1
        batch = self._batch(window)
        vocabulary = self._head.vocabulary
        logits = target_logits(batch, lambda normed: vocabulary.restrict(self._target.output_logits(normed)))
        with torch.enable_grad():
            losses = [
                weighted_loss(place, compare(place, logits, self._config), self._config)
                for place in self._head.places(batch, self._target, NUM_PLACES, self._num_windows)
                if len(place.rows)
            ]
            if not losses:
                return
            torch.autograd.backward(torch.stack(losses).sum() / _WINDOWS_PER_UPDATE)
        if self._num_windows % _WINDOWS_PER_UPDATE == 0:
            torch.nn.utils.clip_grad_norm_(self._learnt.values(), _CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad()

    @torch.no_grad()
    def score(self, weights: Weights, window: Window) -> float:
        """Tokens that a step would emit along a window under `weights`: by equal likeliest tokens for greedy requests,
        else by sum min(p, q) at temperature 1.
        """
        for name, own in self._parameters(self._judge):
            own.copy_(numbers(weights[name]))
        batch = self._batch(window)
        logits, vocabulary = target_logits(batch, self._target.output_logits), self._judge.vocabulary
        rate = same_argmax if window.is_greedy else acceptance
        places = self._judge.places(batch, self._target, NUM_PLACES, seed=0)
        accepted = [rate(place, logits, vocabulary).float() for place in places if len(place.rows)]
        return emitted_per_step([float(rows.mean()) for rows in accepted])

    def weights(self) -> Weights:
        """What was learnt so far: a copy, in the formats of the weights in use."""
        return {name: in_format(own.detach(), self._formats[name]) for name, own in self._learnt.items()}

    @torch.no_grad()
    def restart(self, weights: Weights) -> None:
        """Resume from these weights; what the optimizer knew of the old ones is forgotten."""
        for name, own in self._learnt.items():
            own.copy_(numbers(weights[name]))
            own.grad = None
        self._optimizer = self._new_optimizer()

    def _batch(self, window: Window) -> HeadBatch:
        """A window as a batch of one, in float32."""
        states = {layer: rows[None].float() for layer, rows in window.states.items()}
        normed = self._target.final_norm(states[self._last_layer])
        device = normed.device
        return HeadBatch(window.tokens[None].to(device), window.wanted[None].to(device), states, normed)

    def _parameters(self, head: Head) -> Iterator[tuple[str, Parameter]]:
        return ((name, own) for name, own in head.named_parameters() if name in self._formats)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._learnt.values(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)


class _FrozenTarget:
    """The target's weights for a head in float32: rows are brought into the target's format, and gradients pass through
    its output matrix, which may be packed for inference, to the head.
    """

    def __init__(self, target: SharesWeights, dtype: torch.dtype) -> None:
        self._target, self._dtype = target, dtype
        self._product: tuple[Tensor, Tensor] | None = None  # [V, D], [V]; for heads without an output matrix

    def embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens).float()

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._target.final_norm(hidden.to(self._dtype)).float()

    def output_logits(self, normed: Tensor) -> Tensor:
        rows = normed.to(self._dtype)
        if not rows.requires_grad:
            return self._target.output_logits(rows)
        cap = self._target.logit_softcap
        if self._product is None:
            self._product = self._matrix_and_bias(rows, cap)
        logits = F.linear(rows, *self._product)
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.no_grad()
    def _matrix_and_bias(self, rows: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """[V, D] and [V]: a packed matrix gives its weights only in products, and those may be capped. A row of zeros
        gives the bias that some families have (Phi), which stands in every product.
        """
        width = rows.shape[-1]
        probes = torch.cat((torch.eye(width, dtype=self._dtype), torch.zeros(1, width, dtype=self._dtype)))
        products = self._target.output_logits(probes.to(rows.device))
        products = cap * torch.atanh(products / cap) if cap else products
        bias = products[-1].clone()
        return (products[:-1] - bias).t().contiguous(), bias
