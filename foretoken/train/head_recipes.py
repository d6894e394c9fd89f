"""The kinds of heads for a target: shapes that follow the target's unless they are given, and how an EAGLE head begins.

From random weights a head first has to learn what a layer of this target does; an EAGLE head's own layer begins as the
target's last one instead, run once more over what the target ends with, and `fc` hands the last tap on as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import make_head
from foretoken.heads.config import BlockConfig, EagleConfig, ExitAdapterConfig, HeadConfig, MedusaConfig, default_taps
from foretoken.heads.eagle import EagleHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.layers import MLP, RMSNorm
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.head_train_config import HeadTrainConfig
from foretoken.train.optimizer import OptimizerConfig
from foretoken.train.students import most_frequent


def _check_counts(shape: object, **least: int) -> None:
    """Refuse fields of a shape that are smaller than `least`; None is the target's own value."""
    for name, minimum in least.items():
        value = getattr(shape, name)
        if value is not None and value < minimum:
            raise ConfigError(name, value, f"must be at least {minimum}")


@dataclass(frozen=True)
class EagleShape:
    """An EAGLE head; None is the target's own value, and for `taps` its low, middle and high layer."""

    version: int = 3
    num_layers: int = 1
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ConfigError("version", self.version, "use 1 (EAGLE-1 and 2) or 3 (EAGLE-3)")
        if self.version == 1 and self.taps is not None:
            remedy = "EAGLE-1 reads the last state alone; leave them out, or take version 3"
            raise ConfigError("taps", self.taps, remedy)
        _check_counts(self, num_layers=1, intermediate_size=1)


@dataclass(frozen=True)
class MedusaShape:
    """Medusa heads; `is_sequential` are Hydra's. Without an output matrix of their own they use the target's."""

    num_heads: int = 4
    num_blocks: int = 1
    is_sequential: bool = False
    has_own_output: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, num_heads=1, num_blocks=1)


@dataclass(frozen=True)
class BlockShape:
    """A block drafter; None is the target's own value, and for `taps` its low, middle and high layer."""

    num_layers: int = 2
    block_size: int = 8
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    markov_rank: int = 64
    is_causal: bool = True
    has_confidence: bool = False
    predicts_at_anchor: bool = True
    taps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        least = 1 if self.predicts_at_anchor else 2
        _check_counts(self, num_layers=1, block_size=least, intermediate_size=1, markov_rank=0)


@dataclass(frozen=True)
class AdapterShape:
    """An early-exit adapter; None is a quarter of the target's layers, and as many neurons as the target is wide: about
    a third of a layer.
    """

    exit_layer: int | None = None
    intermediate_size: int | None = None

    @property
    def draft_vocab_size(self) -> None:
        """It drafts with the target's output matrix, whose vocabulary is whole."""
        return None


HeadShape = EagleShape | MedusaShape | BlockShape | AdapterShape
_Shape = TypeVar("_Shape", bound=HeadShape)


def usual_training(shape: HeadShape) -> HeadTrainConfig:
    """The training of each kind unless set: as many places as it drafts. Steps are small because an hour holds few of
    them. An output matrix of its own begins as the target's and learns slowly with the other vectors; the correction of
    a block drafter begins at nothing and learns fast.
    """
    recipe = recipe_of(shape)
    return HeadTrainConfig(
        batch_windows=1,
        warmup_steps=50,
        num_places=recipe.num_places(shape),
        optimizer=OptimizerConfig(vector_rate=recipe.vector_rate),
    )


def new_head(shape: HeadShape, target: FrozenTarget, counts: Tensor, always: Iterable[int], seed: int) -> Head:
    """A head of `shape` for `target`: an EAGLE head begins as the target's last layer where that fits, others random.
    The head's vocabulary is counted from `counts` [V], with `always` in it.

    Raises:
        ConfigError: a shape that the target cannot have.
    """
    vocabulary, own = most_frequent(counts, shape.draft_vocab_size, always), target.decoder.config
    head = make_head(recipe_of(shape).config(shape, own, len(vocabulary.ids)), vocabulary.to(target.device))
    head.initialise(seed)
    head.to(target.device)
    dtype = target.decoder.norm.weight.dtype
    head.begin_from(lambda rows: target.decoder.output_logits(rows.to(dtype)))
    if isinstance(head, EagleHead):
        begin_as_last_layer(head, target.decoder)
    return head


def _eagle_config(shape: EagleShape, target: ModelConfig, draft_vocab_size: int) -> EagleConfig:
    is_first = shape.version == 1
    return EagleConfig(
        version=1 if is_first else 3,
        layer=_layer(target, shape.num_layers, shape.intermediate_size),
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        taps=(target.num_layers,) if is_first else shape.taps or default_taps(target.num_layers),
        draft_vocab_size=draft_vocab_size,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        has_own_output=not is_first,  # the portable directory holds one
    )


def _block_config(shape: BlockShape, target: ModelConfig, draft_vocab_size: int) -> BlockConfig:
    layer = _layer(target, shape.num_layers, shape.intermediate_size)
    layer = dataclasses.replace(layer, model_type="qwen3", qk_norm=True)  # as DFlash and DSpark have it
    return BlockConfig(
        layer=layer,
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        taps=shape.taps or default_taps(target.num_layers),
        draft_vocab_size=draft_vocab_size,
        block_size=shape.block_size,
        markov_rank=shape.markov_rank,
        is_causal=shape.is_causal,
        has_confidence=shape.has_confidence,
        predicts_at_anchor=shape.predicts_at_anchor,
    )


def _medusa_config(shape: MedusaShape, target: ModelConfig, draft_vocab_size: int) -> MedusaConfig:  # noqa: ARG001
    options = {name: getattr(shape, name) for name in ("num_heads", "num_blocks", "is_sequential", "has_own_output")}
    return MedusaConfig(target.hidden_size, target.vocab_size, target.num_layers, **options)


def _adapter_config(shape: AdapterShape, target: ModelConfig, draft_vocab_size: int) -> ExitAdapterConfig:  # noqa: ARG001
    return ExitAdapterConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target_num_layers=target.num_layers,
        exit_layer=max(1, target.num_layers // 4) if shape.exit_layer is None else shape.exit_layer,
        intermediate_size=target.hidden_size if shape.intermediate_size is None else shape.intermediate_size,
        norm_eps=target.norm_eps,
    )


def _layer(target: ModelConfig, num_layers: int, intermediate_size: int | None) -> ModelConfig:
    """Layers of the target's shape, as Llama has them."""
    layer = target.llama_layers(num_layers)
    return dataclasses.replace(layer, intermediate_size=intermediate_size or target.intermediate_size)


@dataclass(frozen=True)
class Recipe(Generic[_Shape]):
    """How a kind of head (`heads.kinds`) is made and trained.

    `config` is the head's shape for a target and a vocabulary size; `num_places` predictions are learnt at each
    position. `begins_as_exit`: a new head changes nothing, so it is measured before it is trained.
    """

    kind: str
    shape: type[_Shape]
    config: Callable[[_Shape, ModelConfig, int], HeadConfig]
    num_places: Callable[[_Shape], int] = lambda _shape: 4
    vector_rate: float = 4e-4
    begins_as_exit: bool = False


_EAGLE = Recipe("eagle", EagleShape, _eagle_config)
_MEDUSA = Recipe("medusa", MedusaShape, _medusa_config, num_places=lambda shape: shape.num_heads)
_BLOCK = Recipe(
    "block",
    BlockShape,
    _block_config,
    num_places=lambda shape: shape.block_size - (not shape.predicts_at_anchor),
    vector_rate=2e-3,
)
_EXIT_ADAPTER = Recipe("early_exit", AdapterShape, _adapter_config, begins_as_exit=True)
RECIPES: Mapping[type[HeadShape], Recipe[Any]] = {
    recipe.shape: recipe for recipe in (_EAGLE, _MEDUSA, _BLOCK, _EXIT_ADAPTER)
}


def recipe_of(shape: HeadShape) -> Recipe[Any]:
    """The recipe of the kind of head that has this shape."""
    return RECIPES[type(shape)]


@torch.no_grad()
def begin_as_last_layer(head: EagleHead, target: Decoder) -> bool:
    """Copy the target's last layer into the head's first one; False, and nothing is changed, where their shapes or
    what they compute differ.
    """
    own, config = head.config, target.config
    last, layer = target.decoder_layers()[-1], head.decoder_layers[0]
    norms = (last.attention_norm, last.mlp_norm, target.norm)
    fits = (
        config.has_llama_layers
        and own.layer.hidden_size == own.target_hidden_size == config.hidden_size
        and own.layer.intermediate_size == config.intermediate_size
        and isinstance(last.mlp, MLP)
        and last.q_norm is None
        and all(isinstance(norm, RMSNorm) for norm in norms)
        and not (own.norm_before_fc or own.fc_norm or own.norm_before_residual)
    )
    if not fits:
        return False
    assert isinstance(last.mlp, MLP)
    rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    query, key, value = _weight(last.qkv_proj).split_with_sizes((rows, kv_rows, kv_rows))
    attention, mlp = layer.self_attn, layer.mlp
    for projection, part in ((attention.q_proj, query), (attention.k_proj, key), (attention.v_proj, value)):
        _weight(projection)[:, -config.hidden_size :] = part  # version 3 reads the embedding in front of the stream
    gate, up = _weight(last.mlp.gate_up_proj).chunk(2)
    for to, part in ((mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, _weight(last.mlp.down_proj))):
        _weight(to).copy_(part)
    _weight(attention.o_proj).copy_(_weight(last.o_proj))
    stream_norm = layer.hidden_norm or layer.input_layernorm
    for to_norm, norm in ((stream_norm, norms[0]), (layer.post_attention_layernorm, norms[1]), (head.norm, norms[2])):
        if to_norm is not None and norm is not None:
            _weight(to_norm).copy_(_weight(norm))
    fc = _weight(head.fc)
    fc.zero_()
    fc[:, -config.hidden_size :].fill_diagonal_(1.0)
    return True


def _weight(module: nn.Module) -> Tensor:
    """The numbers of a module that holds them plainly."""
    weight = module.weight
    assert isinstance(weight, Tensor), "training begins before matrices are packed"
    return weight
