"""Attention and MLP of a head's decoder layer, with one matrix per projection, named as the checkpoints name them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.config import BlockConfig, EagleConfig
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import SharedWeights
from foretoken.model.layer_pass import LayerParts
from foretoken.model.layers import Linear, RMSNorm
from foretoken.model.rope import RotaryTable, rotate
from foretoken.model.row_kernels import kernels_for


class PlainAttention(Protocol):
    """`decoder.Attention` without sinks, which no head has. It may store keys and values of the pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` [T, H, K], `key` and `value` [C + T, G, K] of C context rows, if there are any, and T others ->
        [T, H, K].
        """
        ...


class HeadAttention(nn.Module):
    """Self-attention of `shape` over rows of `in_features`; what a row sees is decided by the attention it is given.

    Queries and keys have norms of their own where `shape.qk_norm` (Qwen3).
    """

    def __init__(self, shape: ModelConfig, in_features: int) -> None:
        super().__init__()
        self.shape = shape
        rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(in_features, rows, shape.qkv_bias)
        self.k_proj = Linear(in_features, kv_rows, shape.qkv_bias)
        self.v_proj = Linear(in_features, kv_rows, shape.qkv_bias)
        self.o_proj = Linear(rows, shape.hidden_size, shape.o_bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None

    def keys_and_values(self, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Key and value [R, G, K] of `rows` [R, in] at the places of `rotary`."""
        key, value = (project(rows).view(len(rows), -1, self.shape.head_dim) for project in (self.k_proj, self.v_proj))
        return rotate(key if self.k_norm is None else self.k_norm(key), *rotary), value

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: PlainAttention,
        layer: int,
        context: Tensor | None = None,
    ) -> Tensor:
        """`x` [T, in] -> [T, D]; `layer` is the number that keys and values are kept under.

        Keys and values are made of the rows `context` [C, in] too; `rotary` is then that of all C + T rows.
        """
        first, seen = (0, x) if context is None else (len(context), torch.cat((context, x)))
        query = self.q_proj(x).view(len(x), -1, self.shape.head_dim)  # [T, H, K]
        query = query if self.q_norm is None else self.q_norm(query)
        key, value = self.keys_and_values(seen, rotary)
        read = attention.attend(layer, rotate(query, *(table[first:] for table in rotary)), key, value)
        out: Tensor = self.o_proj(read.reshape(len(x), -1))
        return out


class HeadMLP(nn.Module):
    """SwiGLU (Shazeer 2002.05202)."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, shape.mlp_bias)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, shape.mlp_bias)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, D], same shape back."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        kernels = kernels_for(x)
        gated = F.silu(gate) * up if kernels is None else kernels.gate(torch.cat((gate, up), dim=-1))
        out: Tensor = self.down_proj(gated)
        return out


def layer_parts(
    attention: HeadAttention,
    mlp: HeadMLP,
    attention_norm: RMSNorm | None,
    mlp_norm: RMSNorm,
    beside_norm: RMSNorm | None = None,
    keeps_normed: bool = False,
) -> LayerParts:
    """A layer of these parts, for the compiled pass."""
    return LayerParts(
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        o=(attention.o_proj,),
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj,),
        attention_norm=attention_norm,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        mlp_norm=mlp_norm,
        beside_norm=beside_norm,
        keeps_normed=keeps_normed,
    )


class HeadLayer(nn.Module, ABC):
    """A decoder layer of a head."""

    post_attention_layernorm: RMSNorm

    @abstractmethod
    def parts(self) -> LayerParts:
        """What the compiled pass runs."""


class LayeredHead(Head):
    """A head with decoder layers, which the compiled pass can run (`layer_pass.LayerStack`).

    Raises:
        ConfigError: layers with a window, or a vocabulary of another size.
    """

    config: EagleConfig | BlockConfig
    lm_head: Linear | None
    decoder_layers: tuple[HeadLayer, ...]

    def __init__(self, config: EagleConfig | BlockConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self._rotary: RotaryTable | None = None
        if config.layer.sliding_window:
            raise ConfigError("sliding_window", config.layer.sliding_window, "heads attend to the whole text")
        if len(vocabulary.ids) != config.draft_vocab_size:
            raise ConfigError(
                "draft_vocab_size", config.draft_vocab_size, f"the vocabulary has {len(vocabulary.ids)} tokens"
            )

    def hidden_layers(self) -> tuple[int, ...]:
        """See `Head`."""
        return self.config.taps

    def output_matrices(self) -> tuple[Linear, ...]:
        """See `Head`."""
        return () if self.lm_head is None else (self.lm_head,)

    def logits(self, output: Tensor, target: SharedWeights) -> Tensor:
        """Logits over the head's vocabulary `[R, V_d]` of rows `output` [R, D] behind its last norm; uncorrected."""
        own: Tensor = target.output_logits(output) if self.lm_head is None else self.lm_head(output)
        return own

    @property
    def layer_shape(self) -> ModelConfig:
        """See `layer_pass.LayerStack`."""
        return self.config.layer

    def layer_parts(self) -> list[LayerParts]:
        """See `layer_pass.LayerStack`."""
        return [layer.parts() for layer in self.decoder_layers]

    def output_parts(self) -> None:
        """See `layer_pass.LayerStack`: a head's logits are made of rows that it chooses afterwards."""

    def weight_marks(self) -> tuple[object, ...]:
        """See `layer_pass.LayerStack`: adaptation replaces any packed matrix; norms and biases keep their place."""
        return tuple([linear.packed for linear in self._linears])

    @property
    def norm_dtype(self) -> torch.dtype:
        """Number format of the weights that are never packed."""
        return self.decoder_layers[0].post_attention_layernorm.weight.dtype

    @property
    def rotary(self) -> RotaryTable:
        """cos and sin table in the weights' own dtype and device."""
        if self._rotary is None:
            weight = self.decoder_layers[0].post_attention_layernorm.weight
            self._rotary = RotaryTable(self.layer_shape, weight.device, weight.dtype)
        return self._rotary

    @functools.cached_property
    def _linears(self) -> tuple[Linear, ...]:
        return tuple(linear for layer in self.layer_parts() for linears in layer.matrices for linear in linears)


@torch.no_grad()
def initialise_weights(head: nn.Module, num_layers: int, seed: int) -> None:
    """Random weights for training: normal(0.02), output matrices of layers scaled down by depth (GPT-2), norms 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = (2 * num_layers) ** -0.5
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            std = 0.02 * (scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
            parameter.normal_(0.0, std, generator=generator)
