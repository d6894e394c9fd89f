"""The kinds of trained heads, one row each: its drafter, its network, how its directory is read and written.

`kind` finds the name of a head's kind in its files. How a kind is trained (`train.head_recipes.RECIPES`) and which
engines run it (`export.engines`) are tables by the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from foretoken.heads.adapter import ExitAdapter
from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.block import BlockHead
from foretoken.heads.config import HeadConfig
from foretoken.heads.eagle import EagleHead
from foretoken.heads.formats.adapter import adapter_from_json, adapter_json
from foretoken.heads.formats.block import block_from_json, block_json
from foretoken.heads.formats.eagle import eagle_from_json, eagle_json
from foretoken.heads.formats.medusa import medusa_from_json, medusa_json, medusa_vocab_size
from foretoken.heads.medusa import MedusaHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import Fields

_Config = TypeVar("_Config", bound=HeadConfig)


@dataclass(frozen=True)
class HeadKind(Generic[_Config]):
    """One kind of trained head.

    - `name`: its drafter in `registry.DRAFTERS`.
    - `network`: what makes the network of a shape for a vocabulary.
    - `from_json`: the shape from `config.json`, the target's shape and the names of the tensors; raises CheckpointError
      (a key that is missing, of the wrong type or out of bounds), MismatchError or UnsupportedModelError (a variant).
    - `to_json`: `config.json` of a shape, number format, vocabulary size and name of the target; raises ConfigError.
    - `draft_vocab_size`: size of the vocabulary that it drafts from, given the shape and `config.json`.
    """

    name: str
    network: Callable[[_Config, DraftVocabulary], Head]
    from_json: Callable[[Fields, ModelConfig, frozenset[str]], _Config]
    to_json: Callable[[_Config, str, int, str | None], dict[str, Any]]
    draft_vocab_size: Callable[[_Config, Fields], int]


_EAGLE = HeadKind(
    "eagle",
    EagleHead,
    from_json=eagle_from_json,
    to_json=lambda config, dtype, _size, _target: eagle_json(config, dtype),
    draft_vocab_size=lambda config, _fields: config.draft_vocab_size,
)
_MEDUSA = HeadKind(
    "medusa", MedusaHead, from_json=medusa_from_json, to_json=medusa_json, draft_vocab_size=medusa_vocab_size
)
_BLOCK = HeadKind(
    "block",
    BlockHead,
    from_json=lambda fields, target, _names: block_from_json(fields, target),
    to_json=lambda config, dtype, _size, _target: block_json(config, dtype),
    draft_vocab_size=lambda config, _fields: config.draft_vocab_size,
)
_EXIT_ADAPTER = HeadKind(
    "early_exit",
    ExitAdapter,
    from_json=lambda fields, target, _names: adapter_from_json(fields, target),
    to_json=lambda config, dtype, _size, _target: adapter_json(config, dtype),
    draft_vocab_size=lambda config, _fields: config.vocab_size,
)
KINDS: Mapping[str, HeadKind[Any]] = {kind.name: kind for kind in (_EAGLE, _MEDUSA, _BLOCK, _EXIT_ADAPTER)}


def kind_of_config(config: HeadConfig) -> HeadKind[Any]:
    """The kind of head that has this shape."""
    return KINDS[config.kind]
