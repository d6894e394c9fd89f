"""The frozen target of a training run: what it computes for windows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import UnsupportedModelError
from foretoken.heads.base import HeadBatch
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.attention.scores import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder
from foretoken.model.open import native_config

Precision = Literal["bfloat16", "float32"]


def fast_precision(device: torch.device | str) -> Precision:
    """bfloat16 where matrices are multiplied faster in it: on GPUs, and on processors with AMX or AVX-512 BF16 (2.5
    times as fast as float32 on Zen 4); else float32.
    """
    if torch.device(device).type != "cpu":
        return "bfloat16"
    is_fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if is_fast else "float32"


class FrozenTarget:
    """A target whose weights stay as they are; `autocast` is the context of its computations and of the head's."""

    def __init__(self, decoder: Decoder, precision: Precision = "float32") -> None:
        self.decoder, self.precision = decoder.requires_grad_(False).eval(), precision

    @staticmethod
    def load(folder: Path, device: str | torch.device = "cpu", precision: Precision = "float32") -> FrozenTarget:
        """The checkpoint in `folder`.

        Raises:
            CheckpointError: it cannot be read.
            UnsupportedModelError: its family does not run in our decoder.
        """
        if native_config(folder) is None:
            raise UnsupportedModelError(
                f"{folder} runs through transformers; heads are trained for the families of our own decoder"
            )
        return FrozenTarget(load_decoder(folder, dtype=precision, device=device, pack=False), precision)

    def autocast(self) -> AbstractContextManager[object]:
        """Multiply matrices in bfloat16, if that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.decoder.norm.weight.device

    def output_over(self, vocabulary: DraftVocabulary) -> Callable[[Tensor], Tensor]:
        """A function from rows behind the final norm [R, D] to logits over a head's `vocabulary` [R, V_d], which
        multiplies by these rows of the output matrix only.
        """
        matrix = self.decoder.lm_head.weight
        if vocabulary.is_whole or matrix is None or self.decoder.lm_head.bias is not None:
            return lambda normed: vocabulary.restrict(self.decoder.output_logits(normed))
        rows = matrix.detach()[vocabulary.ids]  # [V_d, D]
        return lambda normed: self.decoder.scaled_logits(F.linear(normed, rows))

    @torch.no_grad()
    def read(self, tokens: Tensor, wanted: Tensor, layers: Sequence[int]) -> HeadBatch:
        """Run windows `tokens` [B, S + 1] and keep the states of `layers`."""
        tokens, wanted = tokens.to(self.device), wanted.to(self.device)
        num_windows, length = tokens.shape[0], tokens.shape[1] - 1
        positions = torch.arange(length, device=self.device).repeat(num_windows)
        attention = PackedAttention(self.decoder.config, num_windows, length)
        with self.autocast():
            hidden = self.decoder(tokens[:, :-1].reshape(-1), positions, attention, taps=layers)
            normed = self.decoder.final_norm(hidden.last)
        shape = (num_windows, length, -1)
        return HeadBatch(
            tokens, wanted, {layer: state.view(shape) for layer, state in hidden.taps.items()}, normed.view(shape)
        )
