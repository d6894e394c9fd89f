"""Shapes and options of the kinds of trained heads. Layers are counted as taps are: `l` is the residual stream
after `l` layers of the target (transformers' `hidden_states[l]`, the "enter" convention of vLLM and llama.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from foretoken.errors import ConfigError
from foretoken.model.architecture import ModelConfig


class _AnyConfig:
    """What the configurations of all kinds answer."""

    kind: ClassVar[str]  # its row of `heads.kinds.KINDS`

    @property
    def max_num_draft(self) -> int | None:
        """The most tokens that it drafts in one round; None: it continues from its own draft."""
        return None


@dataclass(frozen=True)
class EagleConfig(_AnyConfig):
    """EAGLE-1/2 (`version=1`) or EAGLE-3 / 3.1 (`version=3`): decoder layers over the target's hidden states.

    `layer` is the shape of the head's own layers (`num_layers` of them; `vocab_size` is the target's). Version 1 reads
    the state behind the target's final norm, version 3 the three of `taps` (low, mid, high), fused.
    """

    kind = "eagle"
    version: Literal[1, 3]
    layer: ModelConfig
    target_hidden_size: int
    target_num_layers: int
    taps: tuple[int, ...]  # (target_num_layers,) for version 1
    draft_vocab_size: int  # the target's for a head without a vocabulary of its own
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False  # EAGLE-3.1: a norm for each tap
    norm_output: bool = False  # EAGLE-3.1: feedback behind the norm
    has_own_output: bool = False  # an `lm_head` also for the whole vocabulary; a cut one always has it
    keeps_embedding: bool = False  # an embedding of the target's shape with other numbers

    @property
    def has_own_embedding(self) -> bool:
        """A head of another width than its target cannot read the target's embedding."""
        return self.keeps_embedding or self.has_own_width

    @property
    def has_own_width(self) -> bool:
        """Whether its layers are narrower or wider than the target's."""
        return self.layer.hidden_size != self.target_hidden_size

    @property
    def method(self) -> str:
        """What the literature calls it."""
        return "eagle3" if self.version == 3 else "eagle"

    def __post_init__(self) -> None:
        _check_taps(self.taps, self.target_num_layers)
        if self.version == 1 and self.taps != (self.target_num_layers,):
            raise ConfigError("taps", self.taps, f"EAGLE-1 reads the last state, {(self.target_num_layers,)}")


@dataclass(frozen=True)
class MedusaConfig(_AnyConfig):
    """Medusa heads, each `num_blocks` residual blocks and an output matrix over the last hidden state.

    With `is_sequential` (Hydra, Ankner et al. 2402.05109) head k, counted from 0, also sees the embeddings of the
    anchor and of the k draft tokens before its own. Without `has_own_output` the target's output matrix is used.
    """

    kind = "medusa"
    hidden_size: int
    vocab_size: int
    target_num_layers: int
    num_heads: int = 4
    num_blocks: int = 1
    is_sequential: bool = False
    has_own_output: bool = True

    @property
    def method(self) -> str:
        """See `EagleConfig.method`."""
        return "hydra" if self.is_sequential else "medusa"

    @property
    def max_num_draft(self) -> int | None:
        """See `EagleConfig`."""
        return self.num_heads


@dataclass(frozen=True)
class BlockConfig(_AnyConfig):
    """A block drafter (DFlash, DSpark): layers that see the target's states as more keys and values and draft
    `block_size` tokens in one pass.

    Slot k sees the target's states before the anchor, the anchor and (if `is_causal`) the slots before it, else all
    slots; slot k predicts the token behind it, the anchor's slot included (if `predicts_at_anchor`). A correction of
    rank `markov_rank` (0: none) adds W2 W1[token before] to each slot's logits.
    """

    kind = "block"
    layer: ModelConfig
    target_hidden_size: int
    target_num_layers: int
    taps: tuple[int, ...]
    draft_vocab_size: int
    block_size: int = 8
    markov_rank: int = 64
    is_causal: bool = True
    has_confidence: bool = False
    mask_token: int = 0  # its embedding in the target stands at the slots behind the anchor
    predicts_at_anchor: bool = True  # False (DFlash): slot k predicts its own token, the anchor's slot nothing

    def __post_init__(self) -> None:
        _check_taps(self.taps, self.target_num_layers)
        if self.num_places < 1:
            raise ConfigError("block_size", self.block_size, f"must be at least {1 + (not self.predicts_at_anchor)}")

    @property
    def num_places(self) -> int:
        """Tokens that one pass drafts."""
        return self.block_size - (not self.predicts_at_anchor)

    @property
    def method(self) -> str:
        """See `EagleConfig.method`."""
        return "dspark" if self.markov_rank or self.has_confidence else "dflash"

    @property
    def max_num_draft(self) -> int | None:
        """See `EagleConfig`."""
        return self.num_places


@dataclass(frozen=True)
class ExitAdapterConfig(_AnyConfig):
    """An early-exit adapter: a gated MLP of `intermediate_size` over the residual stream after `exit_layer` layers."""

    kind = "early_exit"
    hidden_size: int
    vocab_size: int
    target_num_layers: int
    exit_layer: int
    intermediate_size: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 1 <= self.exit_layer < self.target_num_layers:
            most = self.target_num_layers - 1
            raise ConfigError("exit_layer", self.exit_layer, f"must be a layer of the target from 1 to {most}")
        if self.intermediate_size < 1:
            raise ConfigError("intermediate_size", self.intermediate_size, "must be at least 1")

    @property
    def method(self) -> str:
        """See `EagleConfig.method`."""
        return "adapter"


HeadConfig = EagleConfig | MedusaConfig | BlockConfig | ExitAdapterConfig


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 reads unless told otherwise: low, mid, high.

    Raises:
        ConfigError: the target is too shallow for three different ones.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if len(set(taps)) < 3 or list(taps) != sorted(taps):
        raise ConfigError("taps", None, f"a target of {num_layers} layers needs taps of its own: name three of them")
    return taps


def _check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    if not taps or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= num_layers:
        raise ConfigError("taps", taps, f"must be ascending layers between 0 and {num_layers}, each once")
