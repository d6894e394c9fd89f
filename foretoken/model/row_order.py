"""The order of a head's channels: rows of query and key matrices as the decoder's one rotation wants them.

A checkpoint may rotate pairs of neighbours, or only the first channels of a head. With the rows in another order the
products of queries and keys stay what they are (`rope.channel_order`), as llama.cpp's converter uses it too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.model.architecture import ModelConfig
from foretoken.model.families import FAMILIES
from foretoken.model.rope import channel_order


class RowOrders:
    """Which row of a checkpoint's tensor each row of ours is, for the tensors of queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        self._orders: dict[str, Tensor] = {}  # by the part of a layer
        order = channel_order(config.rope, config.head_dim)
        if order is None:
            return
        names, size = FAMILIES[config.model_type].names, config.head_dim
        heads, groups = config.num_heads, config.num_kv_heads

        def of_heads(count: int) -> Tensor:
            return (torch.arange(count)[:, None] * size + order).flatten()

        if len(names.qkv) == 1:
            values = torch.arange((heads + groups) * size, (heads + 2 * groups) * size)
            self._orders[names.qkv[0]] = torch.cat((of_heads(heads + groups), values))
        else:
            self._orders |= {names.qkv[0]: of_heads(heads), names.qkv[1]: of_heads(groups)}
        shared = config.qk_norm_over == "head"  # by all heads
        self._orders[names.q_norm] = order if shared else of_heads(heads)
        self._orders[names.k_norm] = order if shared else of_heads(groups)

    def of(self, name: str) -> Tensor | None:
        """The order of the rows of the tensor `name` (as in a Hugging Face checkpoint); None: as they are."""
        parts = name.split(".")
        return self._orders.get(".".join(parts[3:-1])) if parts[:2] == ["model", "layers"] else None


def in_order(tensor: Tensor, order: Tensor) -> Tensor:
    """`tensor` [N, ...], or [H, N / H], with its N rows in this order."""
    return tensor.reshape(len(order), -1)[order].reshape(tensor.shape)
