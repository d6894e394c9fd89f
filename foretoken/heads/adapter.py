"""An early-exit adapter: a small network that turns the residual stream after a few layers into what the last layer
would give, so that the target's own final norm and output matrix predict better from it.

x + MLP(norm(x)), one gated MLP (SwiGLU) and no attention. Kangaroo (Liu et al. 2404.18911) puts an attention layer with
a cache of its own at this place. Without one, drafting needs no state beside the target's, and what the target
computes for a row when it verifies is what the adapter was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, Head, HeadBatch, Place
from foretoken.heads.config import ExitAdapterConfig
from foretoken.heads.layers import initialise_weights
from foretoken.model.interface import SharedWeights
from foretoken.model.layers import MLP, RMSNorm


class ExitAdapter(Head):
    """See the module.

    Raises:
        ConfigError: a cut vocabulary; the output matrix is the target's.
    """

    name = "early_exit"
    samples_rows = False
    config: ExitAdapterConfig

    def __init__(self, config: ExitAdapterConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        if not vocabulary.is_whole or vocabulary.target_vocab_size != config.vocab_size:
            raise ConfigError("vocab_size", config.vocab_size, "an adapter has the target's vocabulary, all of it")
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=False)

    def hidden_layers(self) -> tuple[int, ...]:
        """See `Head`: the exit."""
        return (self.config.exit_layer,)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """See `Head`: an adapter that changes nothing, so that training begins at the plain exit."""
        initialise_weights(self, 1, seed)
        assert self.mlp.down_proj.weight is not None, "training begins before matrices are packed"
        self.mlp.down_proj.weight.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """The residual stream `hidden` [R, D] after `exit_layer` layers, as the final norm wants it: [R, D]."""
        out: Tensor = hidden + self.mlp(self.norm(hidden))
        return out

    def places(self, batch: HeadBatch, target: SharedWeights, num_places: int, seed: int) -> Iterator[Place]:  # noqa: ARG002
        """See `Head`. A prediction depends only on the text before it, not on earlier draft tokens: training has one
        place, evaluation takes later rows as later places.
        """
        num_windows, num_rows = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        wanted = batch.wanted[:, 1:]  # [B, S]
        exit_states = batch.states[self.config.exit_layer].flatten(0, 1).to(self.norm.weight.dtype)  # [B * S, D]
        chosen = wanted.flatten().nonzero().squeeze(1)  # [R]
        adapted = self(exit_states[chosen]).to(batch.normed.dtype)
        logits = target.output_logits(target.final_norm(adapted))  # [R, V]
        column = torch.arange(num_rows, device=wanted.device).repeat(num_windows)[chosen]  # [R]
        for number in range(1 if self.training else min(num_places, num_rows)):
            later = column >= number
            yield Place(number, logits[later], chosen[later])
