"""One decoder for every family of `families`: a flat run of tokens in, hidden states out.

The decoder runs `[T]` tokens of any number of sequences. Which token attends to which is decided by the `Attention`
object given to `forward`: packed causal attention in training, block tables in the engine.

Shapes: T tokens, D hidden size, H heads, G key/value heads, K head_dim, V vocabulary. Under tensor parallelism H and G
are those of the rank (`sharding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from foretoken.kernels.launches import launches_for
from foretoken.model.architecture import ModelConfig, NormConfig
from foretoken.model.experts import Experts
from foretoken.model.layer_pass import LayerParts, LayerPass, layer_pass
from foretoken.model.layer_tensors import layer_norms
from foretoken.model.layers import MLP, Embedding, Linear, Norm, RMSNorm, norm_of, softcapped
from foretoken.model.matrices.held import usual_format
from foretoken.model.rope import RotaryTable, rotate
from foretoken.model.sharding import Collective, Shard, SingleRank

Rotation = tuple[Tensor, Tensor]  # cos and sin, each [T, 1, K]


class Attention(Protocol):
    """Stores this pass's keys and values and returns what each token's query reads."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """`query` [T, H, K], `key` and `value` [T, G, K] -> [T, H, K].

        `sinks` [H] are scores that take part in the softmax and have no value (gpt-oss).
        """
        ...


@dataclass(frozen=True)
class Hidden:
    """Output of the decoder: `last` [T, D] before the final norm, `taps` by layer, each [T, D], and `logits` [R, V] of
    the rows that were asked for.

    Tap `l` is the residual stream after `l` layers: tap 0 is the embedding.
    """

    last: Tensor
    taps: dict[int, Tensor]
    logits: Tensor | None = None


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms; `config` has the shape of this rank's part, `layer` is its number."""

    def __init__(self, config: ModelConfig, collective: Collective, layer: int) -> None:
        super().__init__()
        self.collective = collective
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.is_parallel, self.multiplier = config.is_parallel, config.residual_multiplier
        self.norms_projection = config.qk_norm_over == "projection"
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        norms = layer_norms(config, layer)

        def norm(name: str, of: NormConfig = config.norm) -> Norm | None:
            return norm_of(of, norms[name][1], config.norm_eps) if name in norms else None

        of_heads = replace(config.norm, has_bias=False)
        self.attention_norm = norm("attention_norm")
        self.qkv_proj = Linear(config.hidden_size, rows, config.qkv_bias)
        self.q_norm, self.k_norm = norm("q_norm", of_heads), norm("k_norm", of_heads)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.has_sinks else None
        outputs = config.hidden_size // collective.world
        self.o_proj = Linear(config.num_heads * config.head_dim * collective.world, outputs, config.o_bias)
        self.attention_out_norm = norm("attention_out_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = _mlp(config, collective, layer)
        self.mlp_out_norm = norm("mlp_out_norm")

    def forward(self, x: Tensor, rotation: Rotation | None, attention: Attention, layer: int) -> Tensor:
        """One layer over `x` [T, D]; `layer` is its number, which the cache needs."""
        normed = _normed(x, self.attention_norm)
        query, key, value = self._qkv(normed, rotation)
        read = attention.attend(layer, query, key, value, self.sinks)  # [T, H, K]
        heads = self.collective.all_gather(read.reshape(x.shape[0], -1))
        if self.is_parallel:
            x = self._added(x, self.o_proj(heads), self.attention_out_norm)
        else:
            x, normed = self._added_and_normed(x, self.o_proj(heads))
        if isinstance(self.mlp, MLP) and self.mlp_out_norm is None and self._adds_plainly:
            return self.mlp.added_to(x, normed)
        return self._added(x, self.mlp(normed), self.mlp_out_norm)

    def parts(self, rope: int | None) -> LayerParts:
        """What the compiled pass runs; `rope` is the number of the table that the layer rotates by."""
        mlp = self.mlp
        return LayerParts(
            *((self.qkv_proj,), (self.o_proj,)),
            gate_up=(mlp.gate_up_proj,) if isinstance(mlp, MLP) else (),
            down=(mlp.down_proj,) if isinstance(mlp, MLP) else (),
            experts=mlp.parts() if isinstance(mlp, Experts) else None,
            attention_norm=self.attention_norm,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            attention_out_norm=self.attention_out_norm,
            mlp_norm=self.mlp_norm,
            mlp_out_norm=self.mlp_out_norm,
            rope=rope,
            sinks=self.sinks,
        )

    def _added_and_normed(self, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream `x` [T, D] behind attention, and what the MLP reads of it."""
        launches, norm = launches_for(x), self.mlp_norm
        adds = self._adds_plainly and self.attention_out_norm is None
        if launches is not None and adds and isinstance(norm, RMSNorm) and norm.is_plain_for(x):
            both: tuple[Tensor, Tensor] = launches.add_rms_norm(x, change, norm.weight, norm.eps, norm.offset)
            return both
        x = self._added(x, change, self.attention_out_norm)
        return x, _normed(x, norm)

    @property
    def _adds_plainly(self) -> bool:
        """Whether what this rank computes is all, and is added as it is."""
        return self.multiplier == 1.0 and self.collective.world == 1

    def _added(self, x: Tensor, change: Tensor, norm: Norm | None) -> Tensor:
        """The residual stream `x` [T, D] with what attention or MLP, behind the `norm`, adds to it; `change` is this
        rank's part.
        """
        change = _normed(self.collective.all_gather(change), norm)
        return x + (change if self.multiplier == 1.0 else change * self.multiplier)

    def _qkv(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)  # [T, H + 2G, K]
        value = qkv[:, heads + kv_heads :]
        if self.q_norm is None or self.k_norm is None:
            turned = qkv if rotation is None else rotate(qkv[:, : heads + kv_heads], *rotation)
            return turned[:, :heads], turned[:, heads : heads + kv_heads], value
        query = self._normed_heads(qkv[:, :heads], self.q_norm)
        key = self._normed_heads(qkv[:, heads : heads + kv_heads], self.k_norm)
        if rotation is None:
            return query, key, value
        return rotate(query, *rotation), rotate(key, *rotation), value

    def _normed_heads(self, heads: Tensor, norm: Norm) -> Tensor:
        """`heads` [T, H, K] normed one by one, or those of a row together."""
        normed: Tensor = norm(heads.flatten(1)).view(heads.shape) if self.norms_projection else norm(heads)
        return normed


def _mlp(config: ModelConfig, collective: Collective, layer: int) -> MLP | Experts:
    if config.experts is not None and config.has_experts(layer):
        return Experts(config.hidden_size, config.experts, collective)
    form = (config.mlp_bias, config.activation, config.is_gated)
    return MLP(config.hidden_size, config.intermediate_size, *form, collective)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    normed: Tensor = norm(x)
    return normed


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head: all of them, or one rank's part.

    `config` describes the whole model; `local` the part that this rank holds, which attention and caches follow.
    """

    def __init__(self, config: ModelConfig, shard: Shard | None = None, collective: Collective | None = None) -> None:
        super().__init__()
        self.config, self.shard = config, shard or Shard(config)
        self.local = local = self.shard.local
        self.collective = collective or SingleRank()
        self.embedding = Embedding(local.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(local, self.collective, layer) for layer in range(config.num_layers))
        self.norm = norm_of(config.norm, config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, local.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        # By layer, the number of the table that it rotates by.
        self._rope_numbers = [None if rope is None else config.ropes.index(rope) for rope in ropes]
        self._rotaries: list[RotaryTable] | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        num_layers: int | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Run the first `num_layers` layers (all by default) over `tokens` [T] at `positions` [T].

        `taps` lists layer counts whose residual stream is wanted; 0 is the embedding.
        """
        layers = range(self.config.num_layers if num_layers is None else num_layers)
        return self.run(self.embed(tokens), positions, attention, layers, taps)

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream [T, D] before the first layer."""
        multiplier = self.config.embedding_multiplier
        embedded = self._looked_up(tokens)
        # The factor is rounded as the weights are, as in transformers.
        return embedded if multiplier == 1.0 else embedded * torch.tensor(multiplier, dtype=embedded.dtype)

    def _looked_up(self, tokens: Tensor) -> Tensor:
        if self.shard.world == 1:
            embedded: Tensor = self.embedding(tokens)
            return embedded
        rows, own = self.shard.own_tokens(tokens)
        parts = self.collective.all_gather(self.embedding(rows).masked_fill(~own[:, None], 0))
        return parts.view(len(rows), self.shard.world, -1).sum(1)  # all but one are zero

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        attention: Attention,
        layers: Sequence[int],
        taps: Sequence[int] = (),
        wanted: Tensor | slice | None = None,
    ) -> Hidden:
        """Run some `layers`, in ascending order, over the residual stream `x` [T, D]; tap `l` is what layer `l` gets,
        or layer `l - 1` gives. `wanted`: rows whose logits are made of what the last of them gives.
        """
        compiled, logits = self._compiled(x, positions, attention), None
        kept: dict[int, Tensor] = {}
        if compiled is not None and layers:
            x, kept, logits = compiled.run(x, layers, taps, wanted if compiled.has_head else None)
            logits = None if logits is None else self.scaled_logits(logits)
        else:
            rotations = [table.at(positions) for table in self.rotaries]
            for index in layers:
                if index in taps:
                    kept[index] = x
                number = self._rope_numbers[index]
                x = self.layers[index](x, None if number is None else rotations[number], attention, index)
        if layers and layers[-1] + 1 in taps:
            kept[layers[-1] + 1] = x
        return Hidden(x, kept, self.logits(x[wanted]) if logits is None and wanted is not None else logits)

    def _compiled(self, x: Tensor, positions: Tensor, attention: Attention) -> LayerPass | None:
        if self.shard.world > 1:
            return None
        for table in self.rotaries:
            table.reach(positions)
        rotations = [(table.cos, table.sin) for table in self.rotaries]
        return layer_pass(self, x, attention, rotations, positions=positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of the rows `hidden` [R, D]; call it for the rows that somebody reads."""
        return self.output_logits(self.final_norm(hidden))

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The final norm of a residual stream [R, D]."""
        normed: Tensor = self.norm(hidden)
        return normed

    def output_logits(self, normed: Tensor) -> Tensor:
        """Logits `[R, V]` of rows `normed` [R, D] behind the final norm."""
        logits: Tensor = self.lm_head(normed)
        if self.shard.world > 1:
            logits = self.collective.all_gather(logits)[:, : self.config.vocab_size]
        return self.scaled_logits(logits)

    def scaled_logits(self, logits: Tensor) -> Tensor:
        """Products [R, N] with rows of the output matrix as the family scales and caps them."""
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        return softcapped(logits, self.config.logit_softcap) if self.config.logit_softcap else logits

    @property
    def embeds_rows(self) -> bool:
        """Whether `embed` gives the rows of its table as they are."""
        return self.shard.world == 1 and self.config.embedding_multiplier == 1.0

    @property
    def logits_are_products(self) -> bool:
        """Whether `output_logits` gives the products with its matrix as they are."""
        config = self.config
        return self.shard.world == 1 and config.logit_multiplier == 1.0 and not config.logit_softcap

    @property
    def layer_shape(self) -> ModelConfig:
        """See `layer_pass.LayerStack`."""
        return self.local

    def layer_parts(self) -> list[LayerParts]:
        """See `layer_pass.LayerStack`."""
        layers = zip(self.decoder_layers(), self._rope_numbers, strict=True)
        return [layer.parts(rope) for layer, rope in layers]

    def output_parts(self) -> tuple[Norm, Linear]:
        """See `layer_pass.LayerStack`."""
        return self.norm, self.lm_head

    def weight_marks(self) -> tuple[object, ...]:
        """See `layer_pass.LayerStack`: those of the layers are replaced all at once."""
        layers = self.decoder_layers()
        last = layers[-1].mlp
        packed = last.down_proj.packed if isinstance(last, MLP) else last.weight_marks()[1]
        return layers[0].qkv_proj.packed, packed, self.norm.weight, self.lm_head.packed

    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers`, with their type."""
        return cast("list[DecoderLayer]", list(self.layers))

    @property
    def rotaries(self) -> Sequence[RotaryTable]:
        """Tables of cos and sin that layers rotate by, in the weights' dtype and device; they grow with use."""
        if self._rotaries is None:
            weight = self.norm.weight
            self._rotaries = [RotaryTable(self.config, weight.device, weight.dtype, rope) for rope in self.config.ropes]
        return self._rotaries

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights of this rank take; what two modules share counts once."""
        return sum(_weights_of(self).values())

    @property
    def step_bytes(self) -> int:
        """Weights that a step of one token reads: all but the experts that it does not go to, and but the table of
        embeddings, unless that is the head's matrix too.
        """
        table, head = (module.packed or module.weight for module in (self.embedding, self.lm_head))
        resting = round(self.expert_bytes * (1 - self.expert_share))
        return self.weight_bytes - resting - (0 if table is head else _weights_of(self)[id(table)])

    @property
    def expert_bytes(self) -> int:
        """Memory of all experts that a router chooses among; 0 where there are none."""
        mixtures = (layer.mlp for layer in self.decoder_layers() if isinstance(layer.mlp, Experts))
        return sum(nbytes for mixture in mixtures for nbytes in _weights_of(mixture.experts).values())

    @property
    def expert_share(self) -> float:
        """Share of them that a step of one token reads."""
        experts = self.config.experts
        return 1.0 if experts is None else experts.num_active / experts.num_experts

    @property
    def weight_format(self) -> str:
        """See `interface.QuantisedModel`."""
        return usual_format(self.layers)

    def pack(self) -> None:
        """Pack every matrix for the CPU's kernels (see `Linear.pack`); the embedding table stays as it is."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights for training: normal(0.02), output matrices scaled down by depth (GPT-2)."""
        generator = torch.Generator().manual_seed(seed)
        scale = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 * (scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


def _weights_of(module: nn.Module) -> dict[int, int]:
    """Bytes of every parameter and packed matrix, by identity."""
    packed = (part.packed for part in module.modules() if isinstance(part, Linear | Embedding))
    return {id(weight): weight.nbytes for weight in (*module.parameters(), *packed) if weight is not None}
