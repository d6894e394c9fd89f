"""Which tensors of a checkpoint belong to layers that predict further tokens (MTP), not to the decoder.

Two namings are in use. DeepSeek-V3's and GLM's: whole layers behind the last one, as many as `num_nextn_predict_layers`
says, `model.layers.{N + i}.{enorm, hnorm, eh_proj, shared_head.norm, ...}`. Qwen3-Next's: `mtp.{pre_fc_norm_embedding,
pre_fc_norm_hidden, fc, layers.0..., norm}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.model.fields import Fields

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_QWEN_PREFIX = "mtp."
_MAX_LAYERS = 64


@dataclass(frozen=True)
class MtpTensors:
    """The tensors of all MTP layers of a checkpoint, and those of the first one by the names that its network has."""

    names: frozenset[str]  # in the checkpoint
    first: Mapping[str, str]  # name in the checkpoint by the network's: fc, enorm, hnorm, norm, layers.0.*, lm_head
    num_layers: int


# Names of the parts of one layer, by the network's own; what is left is its decoder layer.
_DEEPSEEK = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
_QWEN = {
    "fc.weight": "fc.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}


def mtp_tensors(names: Iterable[str], raw: Mapping[str, Any], num_layers: int, where: str) -> MtpTensors:
    """The MTP tensors among `names` of a checkpoint whose decoder has `num_layers` layers; `raw` is its `config.json`.

    Raises:
        CheckpointError: `num_nextn_predict_layers` is no number of layers.
    """
    count = Fields(raw, where).whole_or("num_nextn_predict_layers", 0, least=0, most=_MAX_LAYERS)
    found: set[str] = set()
    layers: set[int] = set()
    first: dict[str, str] = {}
    for name in names:
        if name.startswith(_QWEN_PREFIX):
            part = name.removeprefix(_QWEN_PREFIX)
            own, number = _QWEN.get(part, part), _layer_number(part)
        else:
            match = _LAYER.match(name)
            if match is None or not 0 <= (number := int(match[1]) - num_layers) < count:
                continue
            part = name[match.end() :]
            own = _DEEPSEEK.get(part, f"layers.0.{part}")
        found.add(name)
        layers.add(number)
        if number == 0:
            first[own] = name
    return MtpTensors(frozenset(found), first, len(layers))


def _layer_number(part: str) -> int:
    """The layer of a Qwen tensor behind its prefix; what all layers share counts as the first one's."""
    match = re.match(r"layers\.(\d+)\.", part)
    return 0 if match is None else int(match[1])
