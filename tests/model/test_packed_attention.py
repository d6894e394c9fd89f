"""Attention of sequences of one length without a cache: one launch on a device says what its definition says."""

from __future__ import annotations

import torch

from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import PackedAttention


def test_one_launch_is_the_attention_of_chunks() -> None:
    config = ModelConfig("llama", 10, 24, 8, 1, 6, 2, 4, 512, attention_scale=0.3)
    attention = PackedAttention(config, 3, 150)  # longer than a chunk of queries
    torch.manual_seed(0)
    query, key, value = (torch.randn(3 * 150, heads, 4, dtype=torch.float64) for heads in (6, 2, 2))
    expected = attention.attend(0, query, key, value)
    torch.testing.assert_close(attention._in_one_launch(query, key, value), expected, atol=1e-6, rtol=0)
