"""Tensor parallelism: which part of every weight a rank holds, and the one collective that a forward needs.

Every matrix is divided by its outputs: each rank computes some heads, channels, parts of the residual stream and tokens
of the vocabulary, and what the next matrix reads is gathered from all. So an output is one sum over all inputs, as in
one process, and no sum is divided among ranks: with kernels whose outputs do not depend on each other, ranks compute
the bits of one process. (Megatron-LM, Shoeybi et al. 1909.08053, divides the inputs of o and down instead and adds
partial sums: half the exchanges, in another order of summation for every number of ranks.)

A mixture divides the channels of every expert in the same way; every rank holds the router, and so routes alike.

`Shard.slice` is the only place where weights are cut; the loader passes every tensor through it, before it is packed or
quantised. Matrices that a file has in codes are cut as codes (`Shard.slice_codes`), so that nothing is quantised again.
This module starts no processes and moves no data between them: whoever runs the ranks supplies a `Collective`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.model.architecture import ModelConfig
from foretoken.model.matrices.codes import GroupedCodes


class Split(Enum):
    """How a parameter is divided among ranks."""

    OUTPUTS = "outputs"
    KV = "key/value heads; replicated among ranks when there are fewer heads than ranks"
    VOCAB = "rows of the vocabulary, the last ones filled up with zeros"
    QKV = "query, key and value rows in one tensor, each divided by itself"
    HALVES = "gate and up rows in one tensor, each divided by itself"
    NONE = "every rank holds all of it"


# By the module's name in a Hugging Face checkpoint. A parameter that is missing here is an error, not replicated.
_SPLITS = {
    **dict.fromkeys(("embed_tokens", "lm_head"), Split.VOCAB),
    "qkv_proj": Split.QKV,
    **dict.fromkeys(("q_proj", "o_proj", "sinks"), Split.OUTPUTS),
    **dict.fromkeys(("k_proj", "v_proj"), Split.KV),
    "q_norm": Split.OUTPUTS,  # where each head has its own weights; else every rank holds all of them
    "k_norm": Split.KV,
    "gate_up_proj": Split.HALVES,
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "c_fc", "c_proj", "w1", "w2", "w3"), Split.OUTPUTS),
    **dict.fromkeys(("gate", "router", "shared_expert_gate"), Split.NONE),
    **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), Split.NONE),
    **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), Split.NONE),
    **dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm"), Split.NONE),
}


class Collective(Protocol):
    """Communication between the `world` ranks of one model, all of which call it in the same order."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' `x` [..., n] side by side in the order of the ranks, [..., world * n], on every rank."""
        ...


class SingleRank:
    """The collective of a model on one rank: the identity."""

    world = 1

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Collective`."""
        return x


@dataclass(frozen=True)
class Shard:
    """The part of a model that `rank` of `world` ranks holds; one rank holds everything, and nothing is copied then.

    Raises:
        ConfigError: the model cannot be divided among so many ranks.
    """

    config: ModelConfig  # of the whole model
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        config, world = self.config, self.world
        if not 0 <= self.rank < world:
            raise ConfigError("rank", self.rank, f"must be 0 to {world - 1} for {world} ranks")
        for name, count in self._divided.items():
            if count % world:
                raise ConfigError("tensor_parallel", world, f"must divide the model's {name}, {count}")
        if world > 1 and config.qk_norm and config.qk_norm_over == "projection":
            reason = f"must be 1: {config.model_type} norms the queries of all heads together"
            raise ConfigError("tensor_parallel", world, reason)
        if config.num_kv_heads % world and world % config.num_kv_heads:
            reason = f"must divide the model's num_key_value_heads, {config.num_kv_heads}, or be a multiple of it"
            raise ConfigError("tensor_parallel", world, reason)

    @property
    def _divided(self) -> dict[str, int]:
        """What is divided, by what it is called: heads, the stream, channels of the MLPs that the model has."""
        config, experts = self.config, self.config.experts
        is_dense = any(not config.has_experts(layer) for layer in range(config.num_layers))
        widths = {"num_attention_heads": config.num_heads, "hidden_size": config.hidden_size}
        widths |= {"intermediate_size": config.intermediate_size} if is_dense else {}
        if experts is not None:
            widths |= {"intermediate size of an expert": experts.intermediate_size}
            widths |= {"shared expert's intermediate size": experts.shared_size} if experts.shared_size else {}
        return widths

    @cached_property
    def local(self) -> ModelConfig:
        """The shape of this rank's layers: its own heads, channels and rows of the vocabulary."""
        if self.world == 1:
            return self.config
        config, experts = self.config, self.config.experts
        if experts is not None:
            wide, shared = experts.intermediate_size // self.world, experts.shared_size // self.world
            experts = replace(experts, intermediate_size=wide, shared_size=shared)
        return replace(
            config,
            experts=experts,
            num_heads=config.num_heads // self.world,
            num_kv_heads=max(1, config.num_kv_heads // self.world),
            intermediate_size=config.intermediate_size // self.world,
            vocab_size=-(-config.vocab_size // self.world),
        )

    def slice(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of the parameter `name` (as in a Hugging Face checkpoint), a view where that is possible."""
        if self.world == 1:
            return tensor
        split = self.split(name)
        if split is Split.NONE:
            return tensor
        if split is Split.QKV:
            q, kv = (heads * self.config.head_dim for heads in (self.config.num_heads, self.config.num_kv_heads))
            query, key, value = torch.split(tensor, [q, kv, kv])
            return torch.cat((self._rows(query), self._rows(key, is_kv=True), self._rows(value, is_kv=True)))
        if split is Split.HALVES:
            return torch.cat([self._rows(half) for half in tensor.chunk(2)])
        if split is Split.VOCAB:
            return self._vocabulary(tensor)
        return self._rows(tensor, is_kv=split is Split.KV)

    def slice_codes(self, name: str, codes: GroupedCodes) -> GroupedCodes:
        """This rank's part of a matrix in codes. What fills up a vocabulary has scales of zero."""
        return codes if self.world == 1 else codes.reordered(lambda rows: self.slice(name, rows))

    def split(self, name: str) -> Split:
        """How the parameter `name` is divided."""
        parts = name.split(".")
        module = parts[-1] if parts[-1] in _SPLITS else parts[-2]
        if module in ("q_norm", "k_norm") and self.config.qk_norm_over == "head":
            return Split.NONE
        return _SPLITS[module]

    def _rows(self, tensor: Tensor, is_kv: bool = False) -> Tensor:
        """This rank's rows; those of key/value heads are replicated when there are fewer heads than ranks."""
        parts, part = self.world, self.rank
        if is_kv and self.config.num_kv_heads < self.world:
            parts = self.config.num_kv_heads
            part = self.rank * parts // self.world
        rows = tensor.shape[0] // parts
        return tensor.narrow(0, part * rows, rows)

    def own_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this rank's embedding for `tokens` [T], and which of them are its own, bool [T]."""
        rows = tokens - self.rank * self.local.vocab_size
        own = (rows >= 0) & (rows < self.local.vocab_size)
        return rows.where(own, 0), own

    def _vocabulary(self, tensor: Tensor) -> Tensor:
        rows = self.local.vocab_size
        first = min(self.rank * rows, tensor.shape[0])
        part = tensor[first : first + rows]
        return F.pad(part, (0, 0, 0, rows - part.shape[0])) if part.shape[0] < rows else part
