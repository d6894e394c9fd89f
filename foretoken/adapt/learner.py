"""Trains a copy of a drafter's head on windows of served text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from foretoken.adapt.buffer import Window
from foretoken.control.adaptation import emitted_per_step
from foretoken.heads.base import Head, HeadBatch
from foretoken.heads.losses import (
    LossConfig,
    acceptance,
    compare,
    restricted,
    same_argmax,
    target_logits,
    weighted_loss,
)
from foretoken.heads.weights import HeadWeight, held_in, in_format, numbers, plain_copy, weights_of
from foretoken.model.interface import SharesWeights

Weights = Mapping[str, HeadWeight]  # of a head's `state_dict`, those that are learnt, in the formats in use

NUM_PLACES = 4  # deeper places of a draft are reached rarely, and each costs another pass of the head
_LEARNING_RATE = 5e-4  # a few hundred updates should show: a fifth of what training from nothing bears is too slow
_CLIP = 0.5  # of the gradient's norm, as in training (SafeAILab/EAGLE)
_WINDOWS_PER_UPDATE = 4  # smooths the gradient of single texts


class Learner(Protocol):
    """What learns in the background; each call is one unit of work."""

    def learn(self, window: Window) -> None:
        """Take in one window."""

    def score(self, weights: Weights, window: Window) -> float:
        """Tokens that a step would emit along a window under `weights`."""

    def weights(self) -> Weights:
        """What was learnt so far: a copy, in the formats of the weights in use."""

    def restart(self, weights: Weights) -> None:
        """Go on from these weights."""


class HeadLearner:
    """Updates a float32 copy of `head` by AdamW with a loss of training; parameters whose names begin with one of
    `fixed` stay as they are. What is judged and handed out of a quantised matrix is quantised.

    `target` is only read: its embedding, final norm and output matrix.
    """

    def __init__(
        self, head: Head, target: SharesWeights, fixed: Sequence[str], config: LossConfig | None = None
    ) -> None:
        dtype = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device)).dtype
        self._config, self._target = config or LossConfig(), _FrozenTarget(target, dtype)
        self._last_layer, self._num_windows = head.config.target_num_layers, 0
        in_use = {name: own for name, own in weights_of(head).items() if not name.startswith(tuple(fixed))}
        self._formats = {name: held_in(own) for name, own in in_use.items()}
        self._head = plain_copy(head).requires_grad_(False)
        self._judge = plain_copy(head).requires_grad_(False)  # holds the weights that are scored
        self._learnt = {name: own.requires_grad_(True) for name, own in self._parameters(self._head)}
        self._optimizer = self._new_optimizer()

    def learn(self, window: Window) -> None:
        """See `Learner`: every fourth window changes the weights."""
        self._num_windows += 1
        batch = self._batch(window)
        logits = restricted(target_logits(batch, self._target.output_logits), self._head.vocabulary)
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
        """See `Learner`: by equal likeliest tokens for greedy requests, else by sum min(p, q) at temperature 1."""
        for name, own in self._parameters(self._judge):
            own.copy_(numbers(weights[name]))
        batch = self._batch(window)
        logits, vocabulary = target_logits(batch, self._target.output_logits), self._judge.vocabulary
        accepted = [
            same_argmax(place, logits, vocabulary).float()
            if window.is_greedy
            else acceptance(place, logits, vocabulary)
            for place in self._judge.places(batch, self._target, NUM_PLACES, seed=0)
            if len(place.rows)
        ]
        return emitted_per_step([float(rows.mean()) for rows in accepted])

    def weights(self) -> Weights:
        """See `Learner`."""
        return {name: in_format(own.detach(), self._formats[name]) for name, own in self._learnt.items()}

    @torch.no_grad()
    def restart(self, weights: Weights) -> None:
        """See `Learner`; what the optimizer knew of the old ones is forgotten."""
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
        self._target = target
        self._matrix: Tensor | None = None  # [V, D]; only for heads without an output matrix of their own
        self._dtype = dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """See `SharedWeights`."""
        return self._target.embed(tokens).float()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See `SharedWeights`."""
        return self._target.final_norm(hidden.to(self._dtype)).float()

    def output_logits(self, normed: Tensor) -> Tensor:
        """See `SharedWeights`."""
        rows = normed.to(self._dtype)
        if not rows.requires_grad:
            return self._target.output_logits(rows)
        cap = self._target.logit_softcap
        if self._matrix is None:
            self._matrix = self._product_matrix(rows, cap)
        logits = F.linear(rows, self._matrix)
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.no_grad()
    def _product_matrix(self, rows: Tensor, cap: float) -> Tensor:
        """[V, D]: a packed matrix gives its weights only in products, and those may be capped."""
        identity = torch.eye(rows.shape[-1], dtype=self._dtype, device=rows.device)
        products = self._target.output_logits(identity).t().contiguous()
        return cap * torch.atanh(products / cap) if cap else products
