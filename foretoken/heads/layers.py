"""Attention and MLP of a head's decoder layer, with one matrix per projection, named as the checkpoints name them."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.heads.base import Head
from foretoken.heads.config import BlockConfig, EagleConfig
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import SharedWeights
from foretoken.model.layer_pass import LayerParts
from foretoken.model.layers import Linear, RMSNorm
from foretoken.model.rope import rotate
from foretoken.model.row_kernels import kernels_for


class PlainAttention(Protocol):
    """`decoder.Attention` without sinks, which no head has."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` [T, H, K], `key` and `value` [T, G, K] -> [T, H, K]."""
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: PlainAttention, layer: int) -> Tensor:
        """`x` [T, in] -> [T, D]; `layer` is the number that keys and values are kept under."""
        heads = (x.shape[0], -1, self.shape.head_dim)
        query, key = self.q_proj(x).view(heads), self.k_proj(x).view(heads)  # [T, H, K], [T, G, K]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        value = self.v_proj(x).view(heads)
        read = attention.attend(layer, rotate(query, cos, sin), rotate(key, cos, sin), value)
        out: Tensor = self.o_proj(read.reshape(x.shape[0], -1))
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


class LayeredHead(Head):
    """A head with decoder layers, which the compiled pass can run (`layer_pass.LayerStack`)."""

    config: EagleConfig | BlockConfig
    lm_head: Linear | None

    def hidden_layers(self) -> tuple[int, ...]:
        """See `Head`."""
        return self.config.taps

    def logits(self, output: Tensor, target: SharedWeights) -> Tensor:
        """Logits over the head's vocabulary `[R, V_d]` of rows `output` [R, D] behind its last norm; uncorrected."""
        own: Tensor = target.output_logits(output) if self.lm_head is None else self.lm_head(output)
        return own

    @property
    def layer_shape(self) -> ModelConfig:
        """See `layer_pass.LayerStack`."""
        return self.config.layer

    @abstractmethod
    def layer_parts(self) -> list[LayerParts]:
        """See `layer_pass.LayerStack`."""

    def output_parts(self) -> None:
        """See `layer_pass.LayerStack`: a head's logits are made of rows that it chooses afterwards."""

    def weight_marks(self) -> tuple[object, ...]:
        """See `layer_pass.LayerStack`: adaptation replaces any packed matrix; norms and biases keep their place."""
        return tuple([linear.packed for linear in self._linears])

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
