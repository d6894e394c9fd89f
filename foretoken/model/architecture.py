"""What a decoder computes: one frozen description, whatever family it is of.

`families` says how a family's `config.json` becomes this description, `layer_tensors` which tensors it asks for, and
`decoder` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from foretoken.model.expert_config import ExpertsConfig

Activation = Literal["silu", "gelu", "gelu_tanh"]
# Which heads are normed together, and with whose weights: each head by itself with one vector [K] for all of them, each
# by itself with weights of its own [H, K], or all of a row at once [H * K].
QkNorm = Literal["head", "own head", "projection"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling (`kind` as in transformers' `rope_type`)."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3 | longrope | factors (GGUF)
    factor: float = 1.0
    original_max_tokens: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # factors, longrope: what the frequency of each pair of channels is divided by
    partial_factor: float = 1.0  # share of a head's channels that is rotated, the first ones
    is_interleaved: bool = False  # a checkpoint's pairs are channels 2 i and 2 i + 1, not i and i + half


@dataclass(frozen=True)
class NormConfig:
    """The norm before or behind a part of a layer: root mean square, or LayerNorm with or without a bias."""

    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0  # added to the weights of an RMSNorm: 1 in Gemma
    has_bias: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of one decoder-only checkpoint."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: tuple[int | None, ...] = ()  # one entry per layer; empty = full attention everywhere
    attention_scale: float | None = None  # of dot products of queries and keys; None: head_dim ** -0.5
    attention_softcap: float = 0.0  # a score s becomes cap * tanh(s / cap); 0: it stays
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    norm: NormConfig = NormConfig()
    norms: Literal["before", "after", "around"] = "before"  # of attention and MLP
    is_parallel: bool = False  # attention and MLP read the same norm, and are added together
    qk_norm_over: QkNorm = "head"
    activation: Activation = "silu"
    is_gated: bool = True  # the MLP: the activated half of a row times the other half
    local_rope: RopeConfig | None = None  # of layers with a window; None: `rope`
    rope_layers: tuple[bool, ...] = ()  # one entry per layer, whether it rotates; empty = all do
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    has_sinks: bool = False  # a learnt logit per head that takes a share of each softmax
    experts: ExpertsConfig | None = None  # in place of the MLP of some layers

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has experts in place of an MLP."""
        return self.experts is not None and layer in self.experts.layers

    def window(self, layer: int) -> int | None:
        """Number of positions that `layer` may look back over, itself included; None = all of them."""
        return self.sliding_window[layer] if self.sliding_window else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """How `layer` rotates queries and keys; None: not at all."""
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.window(layer) is not None else self.rope

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotations of all layers, each once."""
        of_layers = (self.rope_of(layer) for layer in range(self.num_layers))
        return tuple(dict.fromkeys(rope for rope in of_layers if rope is not None))

    def llama_layers(self, num_layers: int) -> ModelConfig:
        """So many layers of this width and these heads that compute what Llama's do, as those of trained heads do."""
        # A head's `config.json` has no words for the other kinds.
        has_plain_rope = self.rope.partial_factor == 1.0 and self.rope.kind not in ("longrope", "factors")
        return ModelConfig(
            model_type="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_context_tokens=self.max_context_tokens,
            rope=replace(self.rope, is_interleaved=False) if has_plain_rope else RopeConfig(theta=self.rope.theta),
            norm_eps=self.norm_eps,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            dtype=self.dtype,
        )

    @property
    def has_llama_layers(self) -> bool:
        """Whether a dense layer computes what Llama's do, but for biases and norms of the heads."""
        plain = self.llama_layers(self.num_layers)
        own = replace(
            self,
            model_type=plain.model_type,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            tie_embeddings=False,
            sliding_window=(),
            experts=None,
        )
        return own == plain

    @property
    def score_scale(self) -> float:
        """What dot products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = self.num_layers * self.num_layer_parameters
        if self.experts is not None:
            mixture = self.experts.layer_parameters(self.hidden_size)
            layers += len(self.experts.layers) * (mixture - self._num_mlp_parameters)
        return layers + embeddings + self.num_norm_parameters

    @property
    def num_norm_parameters(self) -> int:
        """Number of weights of one norm of the residual stream."""
        return self.hidden_size * (2 if self.norm.has_bias else 1)

    @property
    def num_layer_norms(self) -> int:
        """How many norms of the residual stream a layer has."""
        return 1 if self.is_parallel else 4 if self.norms == "around" else 2

    @property
    def num_layer_parameters(self) -> int:
        """Number of weights of one layer, which has an MLP."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q + kv)
        bias = (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.o_bias
        qk_norms = (2 * self.head_dim if self.qk_norm_over == "head" else q + kv) * self.qk_norm
        norms = self.num_layer_norms * self.num_norm_parameters + qk_norms + self.num_heads * self.has_sinks
        return attention + self._num_mlp_parameters + bias + norms

    @property
    def step_layer_parameters(self) -> float:
        """Weights of a layer that a step of one token reads, on average over the layers."""
        if self.experts is None:
            return self.num_layer_parameters
        mixture = self.experts.step_parameters(self.hidden_size) - self._num_mlp_parameters
        return self.num_layer_parameters + mixture * len(self.experts.layers) / self.num_layers

    @property
    def _num_mlp_parameters(self) -> int:
        wide = self.intermediate_size * (2 if self.is_gated else 1)
        bias = (wide + self.hidden_size) * self.mlp_bias
        return self.hidden_size * (wide + self.intermediate_size) + bias
