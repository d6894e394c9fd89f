"""In how many bits matrices are held: the names of `LLM(weights=...)` for what a file or a quantiser gave them."""

from __future__ import annotations

from collections import Counter

from torch import nn

from foretoken.model.grouped_kernel import GroupedWeight, MergedWeight
from foretoken.model.layers import Linear


def format_of(weight: GroupedWeight) -> str:
    """ "int4" for at most 4 bits, otherwise "int8"."""
    return "int4" if weight.bits <= 4 else "int8"


def usual_format(layers: nn.Module) -> str:
    """The format of most weights in the matrices of `layers`; "auto" is none of the quantised ones."""
    num_weights: Counter[str] = Counter()
    for module in layers.modules():
        if not isinstance(module, Linear):
            continue
        if isinstance(module.packed, GroupedWeight | MergedWeight):
            parts = module.packed.parts if isinstance(module.packed, MergedWeight) else (module.packed,)
            for part in parts:
                num_weights[format_of(part)] += part.num_rows * part.width
        else:
            num_weights["auto"] += module.in_features * module.out_features
    return num_weights.most_common(1)[0][0]
