"""Medusa heads (Cai et al. 2401.10774), with Hydra's dependence on earlier draft tokens (Ankner et al. 2402.05109)
as an option.

Each head reads the state behind the target's final norm at position t and predicts one token: head k that at t + 2 + k,
which the target's row t + 1 + k would give. The token at t + 1, the anchor, is known when the heads are asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, Head, HeadBatch, Place
from foretoken.heads.config import MedusaConfig
from foretoken.model.interface import SharedWeights
from foretoken.model.layers import Linear


class MedusaBlock(nn.Module):
    """x + SiLU(W x + b); W may see more than x."""

    def __init__(self, in_features: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = Linear(in_features, hidden_size, bias=True)

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """`x` [R, D], `beside` [R, in - D] -> [R, D]."""
        seen = x if beside is None else torch.cat((x, beside), dim=-1)
        out: Tensor = x + F.silu(self.linear(seen))
        return out


class MedusaHead(Head):
    """See the module.

    Raises:
        ConfigError: a vocabulary that the heads' output matrices do not have.
    """

    name = "medusa"
    samples_rows = False
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        if vocabulary.target_vocab_size != config.vocab_size:
            raise ConfigError(
                "vocab_size", config.vocab_size, f"the vocabulary is one of {vocabulary.target_vocab_size} tokens"
            )
        blocks: list[tuple[MedusaBlock, ...]] = []
        outputs: list[Linear | None] = []
        for number in range(config.num_heads):
            beside = (number + 1) * config.hidden_size if config.is_sequential else 0
            blocks.append(
                tuple(
                    MedusaBlock(config.hidden_size + (0 if place else beside), config.hidden_size)
                    for place in range(config.num_blocks)
                )
            )
            outputs.append(Linear(config.hidden_size, len(vocabulary.ids)) if config.has_own_output else None)
            own = [module for module in (*blocks[-1], outputs[-1]) if module is not None]
            self.add_module(str(number), nn.ModuleList(own))  # parameters `{head}.{block}.linear.weight`, as trained
        self._blocks, self._outputs = tuple(blocks), tuple(outputs)

    def hidden_layers(self) -> tuple[int, ...]:
        """See `Head`: the last."""
        return (self.config.target_num_layers,)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """See `Head`: blocks that change nothing."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if ".linear." in name:
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.02, generator=generator)

    def output_matrices(self) -> tuple[Linear, ...]:
        """See `Head`: one for each head, as in Medusa-1."""
        return tuple(output for output in self._outputs if output is not None)

    def predict(self, number: int, state: Tensor, beside: Tensor | None, target: SharedWeights) -> Tensor:
        """Logits `[R, V_d]` of head `number` over its vocabulary.

        `state` [R, D] behind the target's final norm; `beside` [R, (number + 1) * D], the embeddings of the anchor and
        of the draft tokens before this one, is for sequential heads.
        """
        assert (beside is not None) == self.config.is_sequential
        first, *others = self._blocks[number]
        x = first(state, beside)
        for block in others:
            x = block(x)
        output = self._outputs[number]
        if output is None:
            return self.vocabulary.restrict(target.output_logits(x))
        logits: Tensor = output(x)
        return logits

    def places(self, batch: HeadBatch, target: SharedWeights, num_places: int, seed: int) -> Iterator[Place]:  # noqa: ARG002
        """See `Head`: head k along every row; a sequential one sees the text's tokens in place of draft tokens."""
        num_windows, num_rows = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        embedded = None
        if self.config.is_sequential:
            embedded = target.embed(batch.tokens.flatten()).view(num_windows, num_rows + 1, -1)  # [B, S + 1, D]
        for number in range(min(num_places, self.config.num_heads)):
            ahead = number + 1  # row t predicts what row t + ahead of the target gives
            if ahead >= num_rows:
                return
            window, row = batch.wanted[:, ahead + 1 :].nonzero(as_tuple=True)  # [R] each
            beside = None
            if embedded is not None:
                tokens = row[:, None] + torch.arange(1, ahead + 1, device=row.device)  # [R, ahead]
                beside = embedded[window[:, None], tokens].flatten(1)
            logits = self.predict(number, batch.normed[window, row], beside, target)
            yield Place(number, logits, window * num_rows + row + ahead)
