"""The frozen target of a training run: what it computes for windows of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import UnsupportedModelError
from foretoken.heads.base import HeadBatch
from foretoken.model.attention.packed import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder
from foretoken.model.open import native_config


class FrozenTarget:
    """A target whose weights stay as they are; computes in bf16 where autocast does."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder.requires_grad_(False).eval()

    @staticmethod
    def load(folder: Path, device: str | torch.device = "cpu") -> FrozenTarget:
        """The checkpoint in `folder`, in the format it is stored in.

        Raises:
            CheckpointError: it cannot be read.
            UnsupportedModelError: its family does not run in our decoder.
        """
        if native_config(folder) is None:
            raise UnsupportedModelError(
                f"{folder} runs through transformers; heads are trained for the families of our own decoder"
            )
        return FrozenTarget(load_decoder(folder, device=device, pack=False))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.decoder.norm.weight.device

    @torch.no_grad()
    def read(self, tokens: Tensor, wanted: Tensor, layers: Sequence[int]) -> HeadBatch:
        """Run windows `tokens` [B, S + 1] and keep the states of `layers`."""
        tokens, wanted = tokens.to(self.device), wanted.to(self.device)
        num_windows, length = tokens.shape[0], tokens.shape[1] - 1
        positions = torch.arange(length, device=self.device).repeat(num_windows)
        attention = PackedAttention(self.decoder.config, num_windows, length)
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.decoder(tokens[:, :-1].reshape(-1), positions, attention, taps=layers)
            normed = self.decoder.final_norm(hidden.last)
        shape = (num_windows, length, -1)
        return HeadBatch(
            tokens, wanted, {layer: state.view(shape) for layer, state in hidden.taps.items()}, normed.view(shape)
        )
