"""Heads for a widened target: the same drafts at the cost of a head of that size.

`widen` makes a residual stream of c copies of the small one. A widened head keeps every vector of its own as c copies
too: what reads a vector reads its first copy (the other columns are 0), what writes one writes all copies, and norms,
whose mean square is that of one copy, repeat their weights. Vectors that meet the target's output matrix hold the first
copy alone, as behind the target's final norm. Heads and neurons that are added read nothing. A dense product costs the
same whatever its numbers are.

EAGLE-1 has no norm before the target's output matrix: its stream is the first copy alone, the mean square of a norm is
c times smaller, so weights are divided by sqrt(c) and epsilon by c (exact where c is a power of 4).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import head_state, load_head, make_head, save_head
from foretoken.heads.config import BlockConfig, EagleConfig, ExitAdapterConfig, HeadConfig, MedusaConfig
from foretoken.model.architecture import ModelConfig
from foretoken.model.loader import read_config
from studies.widen.plan import WidenPlan, plan

_MEDUSA_BLOCK = re.compile(r"\d+\.\d+\.linear\.(weight|bias)")
_MEDUSA_OUTPUT = re.compile(r"\d+\.\d+\.weight")


def widen_head(source: Path, out: Path, target_folder: Path, to: str) -> Head:
    """Write into `out` the head in `source`, made for the target in `target_folder`, for that target widened to `to`.

    Raises:
        InputError: see `widen`.
        ConfigError: EAGLE-3.1's feedback behind the norm together with the target's output matrix; a head of another
            width than its target.
        CheckpointError, MismatchError, StorageError: the head cannot be read or written.
    """
    small = read_config(target_folder)
    layout = plan(small, to)
    head = widened_head(load_head(source, small), layout)
    save_head(head, out, layout.config, target_folder)
    return head


@torch.no_grad()
def widened_head(head: Head, layout: WidenPlan) -> Head:
    """`head` for the target that `layout` describes.

    Raises:
        ConfigError: see `widen_head`.
    """
    config = _wide_config(head.config, layout)
    state, maker = head_state(head), _HeadMaker(head.config, config, layout)
    with torch.device("meta"):
        wide = make_head(config, head.vocabulary)
    made = {name: maker.make(name, tensor) for name, tensor in state.items()}
    wide.load_state_dict(made, assign=True)
    return wide


def _wide_config(config: HeadConfig, layout: WidenPlan) -> HeadConfig:
    big = layout.config
    if isinstance(config, MedusaConfig):
        return replace(config, hidden_size=big.hidden_size, target_num_layers=big.num_layers)
    copies = big.hidden_size // layout.source.hidden_size
    if isinstance(config, ExitAdapterConfig):
        return replace(
            config,
            hidden_size=big.hidden_size,
            target_num_layers=big.num_layers,
            exit_layer=_wide_tap(config.exit_layer, layout),
            intermediate_size=config.intermediate_size * copies,
        )
    layer = _wide_layer(config.layer, layout, copies)
    taps = tuple(_wide_tap(tap, layout) for tap in config.taps)
    if isinstance(config, EagleConfig):
        if config.has_own_embedding:
            raise ConfigError("head", config.layer.hidden_size, "a head with an embedding of its own is not widened")
        if config.version == 1:
            layer = replace(layer, norm_eps=config.layer.norm_eps / copies)
            taps = (big.num_layers,)
        elif config.norm_output and not (config.has_own_output or config.draft_vocab_size < config.layer.vocab_size):
            raise ConfigError("norm_output", True, "a head that also uses the target's output matrix is not widened")
    return replace(config, layer=layer, taps=taps, target_hidden_size=big.hidden_size, target_num_layers=big.num_layers)


def _wide_layer(layer: ModelConfig, layout: WidenPlan, copies: int) -> ModelConfig:
    """The head's layers as much wider as the target's; groups of heads stay as large as they are."""
    ratio = layout.config.intermediate_size / layout.source.intermediate_size
    return replace(
        layer,
        hidden_size=layer.hidden_size * copies,
        intermediate_size=max(layer.intermediate_size, round(layer.intermediate_size * ratio)),
        num_heads=layer.num_heads * copies,
        num_kv_heads=layer.num_kv_heads * copies,
    )


def _wide_tap(tap: int, layout: WidenPlan) -> int:
    """The layer of the large target behind which its stream is the small one's behind `tap` layers."""
    return 0 if tap == 0 else layout.layers.index(tap - 1) + 1


class _HeadMaker:
    """Makes the tensors of the wide head; rows and columns are lists of source indices, -1 where there is none."""

    def __init__(self, config: HeadConfig, wide: HeadConfig, layout: WidenPlan) -> None:
        self.config, self.small = config, layout.source.hidden_size
        self.copies = layout.config.hidden_size // self.small
        live = torch.arange(self.small)
        self.written = live.repeat(self.copies)
        self.first = torch.cat((live, torch.full((self.small * (self.copies - 1),), -1)))
        self.is_version_1 = isinstance(config, EagleConfig) and config.version == 1
        self.stream = self.first if self.is_version_1 else self.written
        if isinstance(config, ExitAdapterConfig) and isinstance(wide, ExitAdapterConfig):
            self.neurons = _padded(config.intermediate_size, wide.intermediate_size)
        elif isinstance(config, EagleConfig | BlockConfig) and isinstance(wide, EagleConfig | BlockConfig):
            old, new = config.layer, wide.layer
            self.q = _padded(old.num_heads * old.head_dim, new.num_heads * new.head_dim)
            self.kv = _padded(old.num_kv_heads * old.head_dim, new.num_kv_heads * new.head_dim)
            self.neurons = _padded(old.intermediate_size, new.intermediate_size)

    def make(self, name: str, small: Tensor) -> Tensor:
        """The tensor called `name` from the small head's."""
        if isinstance(self.config, ExitAdapterConfig):
            return self._adapter_part(name, small)
        if _MEDUSA_BLOCK.fullmatch(name):
            return self._copied(small, self.first, self._segments(small))
        if _MEDUSA_OUTPUT.fullmatch(name) or name in ("lm_head.weight", "confidence_head.proj.weight"):
            return self._copied(small, torch.arange(len(small)), self.first)
        if name.startswith(("markov_head.", "confidence_head.")) or name.endswith(("q_norm.weight", "k_norm.weight")):
            return small.clone()
        if name.startswith("fc."):
            return self._copied(small, self.stream, self._segments(small))
        if "norm" in name:
            return self._norm(name, small)
        rows, columns = self._layer_part(name.split(".")[-2], small)
        return self._copied(small, rows, columns)

    def _layer_part(self, kind: str, small: Tensor) -> tuple[Tensor, Tensor | None]:
        if kind in ("o_proj", "down_proj"):
            return self.stream, self.q if kind == "o_proj" else self.neurons
        rows = {"q_proj": self.q, "k_proj": self.kv, "v_proj": self.kv}.get(kind, self.neurons)
        return rows, self._segments(small)

    def _adapter_part(self, name: str, small: Tensor) -> Tensor:
        if name == "norm.weight":
            return small.repeat(self.copies)
        if name == "mlp.down_proj.weight":
            return self._copied(small, self.written, self.neurons)
        return torch.cat([self._copied(half, self.neurons, self.first) for half in small.chunk(2)])  # gate, up

    def _segments(self, small: Tensor) -> Tensor | None:
        """Columns that read the first copy of each of the vectors that are joined."""
        if small.dim() == 1:
            return None
        starts = range(0, small.shape[1], self.small)
        return torch.cat([torch.where(self.first >= 0, self.first + start, -1) for start in starts])

    def _norm(self, name: str, small: Tensor) -> Tensor:
        if self.is_version_1:
            return self._copied(small / self.copies**0.5, self.first, None)
        feeds_back = isinstance(self.config, EagleConfig) and self.config.norm_output
        if name == "norm.weight" and not feeds_back:
            return self._copied(small, self.first, None)
        return torch.cat([part.repeat(self.copies) for part in torch.split(small, self.small)])

    @staticmethod
    def _copied(small: Tensor, rows: Tensor, columns: Tensor | None) -> Tensor:
        """Zeros with the source's entries where row and column have one."""
        shape = (len(rows),) if columns is None else (len(rows), len(columns))
        full, live = small.new_zeros(shape), (rows >= 0).nonzero()[:, 0]
        if columns is None:
            full[live] = small[rows[live]]
            return full
        across = (columns >= 0).nonzero()[:, 0]
        full[live[:, None], across[None, :]] = small[rows[live]][:, columns[across]]
        return full


def _padded(live: int, total: int) -> Tensor:
    """Source indices of `total` channels of which the first `live` exist."""
    index = torch.arange(total)
    return torch.where(index < live, index, -1)
