"""Attention of training-time test (EAGLE-3, Li et al. 2503.01840): later steps read what inference would have cached.

At inference the row of step j stands behind rows computed from the target's states, and behind the head's own rows of
steps 1..j. In training every row t of a window is such a place at once: in step j it sees the keys of step 0 up to row
t, and its own row's keys of steps 1..j.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.model.architecture import ModelConfig


class UnrolledAttention:
    """See `layers.PlainAttention`; each `attend` of a layer is one step over the same B windows, flattened.

    The first step has all S rows of each window, later ones those of `go_on_from`.
    """

    def __init__(self, shape: ModelConfig, num_windows: int, num_rows: int) -> None:
        self.shape, self.num_windows, self.num_rows = shape, num_windows, num_rows
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: keys and values [B, G, 1, rows, K]
        self._later: Tensor | None = None  # [B, 1, 1, Q, S]: rows of the first step that lie behind a later one's

    def go_on_from(self, rows: Tensor) -> None:
        """Later steps have the `rows` [B, Q] alone."""
        columns = torch.arange(self.num_rows, device=rows.device)
        self._later = (columns > rows[..., None])[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` [B * Q, H, K], `key` and `value` [B * Q, G, K] -> [B * Q, H, K]."""
        query, key, value = (self._grouped(part) for part in (query, key, value))
        steps = self._steps.setdefault(layer, [])
        steps.append((key, value))
        if len(steps) == 1:
            read = _first_step(query, key, value)
        else:
            assert self._later is not None, "later steps begin with go_on_from"
            read = _later_step(query, steps, self._later)  # [B, G, H/G, Q, K]
        return read.permute(0, 3, 1, 2, 4).reshape(-1, self.shape.num_heads, self.shape.head_dim)

    def _grouped(self, part: Tensor) -> Tensor:
        groups = self.shape.num_kv_heads
        split = part.view(self.num_windows, -1, groups, part.shape[1] // groups, self.shape.head_dim)
        return split.permute(0, 2, 3, 1, 4)


def _first_step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention within each window."""
    shape = query.shape
    queries, keys, values = query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2)
    read = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)  # [B, H, S, K]
    return read.view(shape)


def _later_step(query: Tensor, steps: list[tuple[Tensor, Tensor]], later: Tensor) -> Tensor:
    """Rows of the first step up to the own one, and the own row of every later step."""
    key, value = steps[0]
    num_rows, scale = key.shape[-2], query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(later, float("-inf"))  # [B, G, H/G, Q, S]
    own = torch.stack([(query * later_key).sum(-1) * scale for later_key, _ in steps[1:]], dim=-1)  # [B, G, H/G, Q, j]
    weights = torch.cat((scores, own.to(scores.dtype)), dim=-1).softmax(dim=-1)
    read = weights[..., :num_rows] @ value
    for step, (_, later_value) in enumerate(steps[1:]):
        read = read + weights[..., num_rows + step, None] * later_value
    return read
