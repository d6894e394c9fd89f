"""Our decoder over a padded batch: the weights, layers and kernels of `model/paged.py`, only laid out as a
rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.model.decoder import Decoder
from studies.layouts.padded_cache import PaddedCache

# Tokens of a prompt pass, pads included: what the engine takes of prompts in a step unless told otherwise.
_PROMPT_TOKENS = 512


class PaddedAttention:
    """Attention of B rows with n new columns each, through one call per layer: no query sees a pad, or what comes after
    it.

    Columns and positions of a row differ by its pads alone, so a window of positions is one of columns.
    """

    def __init__(self, cache: PaddedCache, num_new: int, dtype: torch.dtype) -> None:
        self.cache, self.num_new, self.dtype = cache, num_new, dtype
        self._masks: dict[int | None, Tensor | None] = {}  # by window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `decoder.Attention`; the rows of the batch follow one another, T = B * n."""
        assert sinks is None, "the families of this study have none"
        config, num_new = self.cache.config, self.num_new
        groups, heads, head_dim = config.num_kv_heads, config.num_heads, config.head_dim
        self.cache.write(layer, key.view(-1, num_new, groups, head_dim), value.view(-1, num_new, groups, head_dim))
        keys, values = self.cache.read(layer, self.cache.width + num_new)  # [B, G, C, K]
        # Query heads of one group become rows, as in `attention/paged.py`: no key is copied.
        rows = query.view(-1, num_new, groups, heads // groups, head_dim).permute(0, 2, 3, 1, 4)
        mask = self._mask(config.window(layer))
        read = F.scaled_dot_product_attention(
            rows.reshape(-1, groups, heads // groups * num_new, head_dim), keys, values, attn_mask=mask
        )
        return (
            read.view(-1, groups, heads // groups, num_new, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(-1, heads, head_dim)
        )

    def _mask(self, window: int | None) -> Tensor | None:
        """Additive mask `[B, 1, H/G * n, C]`; None when every query sees everything."""
        width = self.cache.width + self.num_new
        if window is not None and window >= width:
            window = None
        if window not in self._masks:
            needed = self.num_new > 1 or window is not None or any(self.cache.pads)
            self._masks[window] = self._made(window, width) if needed else None
        return self._masks[window]

    def _made(self, window: int | None, width: int) -> Tensor:
        config, device = self.cache.config, self.cache.device
        column = torch.arange(width, device=device)  # [C]
        own = column[self.cache.width :, None]  # [n, 1]
        pads = torch.tensor(self.cache.pads, device=device)[:, None, None]  # [B, 1, 1]
        visible = (column <= own) & (column >= pads)  # [B, n, C]
        if window is not None:
            visible &= own - column < window
        visible |= column == own  # a pad sees itself: nobody reads it, and a softmax over nothing would be NaN
        additive = torch.zeros(visible.shape, dtype=self.dtype, device=device).masked_fill_(~visible, float("-inf"))
        return additive.repeat(1, config.num_heads // config.num_kv_heads, 1)[:, None]


class PaddedModel:
    """A decoder with a padded cache."""

    def __init__(self, decoder: Decoder, cache: PaddedCache) -> None:
        self.decoder, self.cache = decoder, cache

    @torch.inference_mode()
    def forward(self, tokens: Tensor, num_logits: int) -> Tensor:
        """Run `tokens` [B, n] behind what is kept; logits `[B, num_logits, V]` of the last columns."""
        cache, config = self.cache, self.cache.config
        num_rows, num_new = tokens.shape
        cache.before_forward(num_new)
        pads = torch.tensor(cache.pads, device=cache.device)[:, None]  # [B, 1]
        positions = cache.width + torch.arange(num_new, device=cache.device) - pads  # [B, n]: real tokens alone count
        # Pads stand before the text, columns that fill up a short draft may stand behind the context: nobody reads
        # either.
        positions = positions.clamp_(0, config.max_context_tokens - 1)
        attention = PaddedAttention(cache, num_new, cache.dtype)
        last: Tensor = self.decoder(tokens.flatten(), positions.flatten(), attention).last.view(num_rows, num_new, -1)
        if not num_logits:
            return last.new_empty(num_rows, 0, config.vocab_size)
        return self.decoder.logits(last[:, num_new - num_logits :].flatten(0, 1)).view(num_rows, num_logits, -1)

    def keep(self, num_columns: int) -> None:
        """Keep the next `num_columns` columns of every row, which a forward has just written."""
        self.cache.width += num_columns

    @torch.inference_mode()
    def align(self, sequences: Sequence[int], lengths: Sequence[int]) -> int:
        """See `PaddedCache.align`."""
        return self.cache.align(sequences, lengths)

    @torch.inference_mode()
    def read_prompts(self, sequences: Sequence[int], prompts: Sequence[Sequence[int]], num_logits: int) -> Tensor:
        """Begin a batch with `prompts`, padded on the left; logits `[B, num_logits, V]` of their last tokens,
        `num_logits` 0 or 1.
        """
        lengths = [len(prompt) for prompt in prompts]
        self.cache.begin(sequences, lengths)
        rows = [[*[0] * pad, *prompt] for pad, prompt in zip(self.cache.pads, prompts, strict=True)]
        tokens = torch.tensor(rows, device=self.cache.device)  # [B, L]
        pieces = torch.split(tokens, max(1, _PROMPT_TOKENS // len(prompts)), dim=1)
        for piece in pieces[:-1]:
            self.forward(piece, 0)
            self.keep(piece.shape[1])
        logits = self.forward(pieces[-1], num_logits)
        self.keep(pieces[-1].shape[1])
        return logits
