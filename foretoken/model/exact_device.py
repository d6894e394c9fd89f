"""Strict numerics on a GPU: Triton kernels multiply, norm and attend in an order that does not depend on the batch."""

from __future__ import annotations

import torch

from foretoken.kernels.launches import PRODUCT_DTYPES, has_triton
from foretoken.model.attention.choice import chosen
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.layers import LayerNorm, Linear, RMSNorm
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import DEFAULT_BLOCK_SIZE


class ExactDeviceModel(PagedModel):
    """`PagedModel` whose products are the kernels' for any number of rows, also those of prompts; steps are captured as
    usual.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_slots: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        kept: torch.dtype | None = None,
    ) -> None:
        for module in decoder.modules():
            if isinstance(module, Linear):
                module.keeps_rows_exact = True
        super().__init__(decoder, num_slots, block_size, kept)

    @property
    def numerics(self) -> str:
        """See `interface.LanguageModel`."""
        return "strict"


def has_exact_launches(decoder: Decoder) -> bool:
    """Whether kernels of `product_triton`, `row_triton` and `paged_triton` run all of `decoder` where it is."""
    weight = decoder.norm.weight
    if weight.device.type != "cuda" or weight.dtype not in PRODUCT_DTYPES or not has_triton():
        return False
    if decoder.shard.world > 1 or decoder.config.experts is not None:
        return False
    return chosen(weight.device, weight.dtype) is FusedAttention and all(map(_is_exact, decoder.modules()))


def _is_exact(module: torch.nn.Module) -> bool:
    if isinstance(module, Linear):
        return module.weight is not None
    return module.weight.dim() == 1 if isinstance(module, RMSNorm) else not isinstance(module, LayerNorm)
