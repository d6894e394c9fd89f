"""Block drafters: one pass drafts all tokens behind the anchor (DFlash, DSpark); what the slots attend to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.heads.base import FEATURE_WEIGHT, DraftVocabulary, HeadBatch, Place, random_rows
from foretoken.heads.config import BlockConfig
from foretoken.heads.layers import (
    HeadAttention,
    HeadLayer,
    HeadMLP,
    LayeredHead,
    PlainAttention,
    initialise_weights,
    layer_parts,
)
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.interface import Segment, SharedWeights
from foretoken.model.layer_pass import LayerParts, LayerPass, layer_pass
from foretoken.model.layers import Embedding, Linear, RMSNorm
from foretoken.model.paged_cache import ForwardInputs, PagedCache
from foretoken.transfer import to_device


class BlockLayer(HeadLayer):
    """Pre-norm attention and gated MLP over the slots; context rows are read as they are, without the layer's norm."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = HeadMLP(shape)

    def forward(
        self, context: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], attention: PlainAttention, layer: int
    ) -> Tensor:
        """The residual stream of the slots `x` [T, D] behind this layer."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, attention, layer, context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def parts(self) -> LayerParts:
        """See `HeadLayer`: the pass runs over slots."""
        return layer_parts(self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm)


class WindowAttention:
    """Training: A blocks of W slots in each of B windows of S context rows, no cache.

    `anchors` [B, A] are their anchors' positions; a slot sees the context rows before its anchor.
    """

    def __init__(self, shape: ModelConfig, anchors: Tensor, num_rows: int, num_slots: int, is_causal: bool) -> None:
        self.shape, self.num_slots = shape, num_slots
        self.num_windows, self.num_blocks = anchors.shape
        self.num_rows = num_rows
        ones = torch.ones(num_slots, num_slots, dtype=torch.bool, device=anchors.device)
        own = ones.tril() if is_causal else ones
        before = torch.arange(num_rows, device=anchors.device) < anchors[:, :, None, None]  # [B, A, 1, S]
        self._visible = torch.cat((before.expand(-1, -1, num_slots, -1), own.expand(*anchors.shape, -1, -1)), dim=-1)[
            :, None, None
        ]  # [B, 1, 1, A, W, S + W]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        """See `PlainAttention`."""
        heads, groups, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        windows, blocks, slots, rows = self.num_windows, self.num_blocks, self.num_slots, self.num_rows
        past = windows * rows
        q = query.view(windows, blocks, slots, groups, heads // groups, head_dim).permute(0, 3, 4, 1, 2, 5)
        q = q * head_dim**-0.5  # [B, G, H/G, A, W, K]
        flat = q.reshape(windows, groups, -1, head_dim)  # [B, G, H/G * A * W, K]
        context_key, context_value = (
            one[:past].view(windows, rows, groups, head_dim).transpose(1, 2) for one in (key, value)
        )  # [B, G, S, K]
        own_key, own_value = (
            one[past:].view(windows, blocks, slots, groups, head_dim).permute(0, 3, 1, 2, 4)[:, :, None]
            for one in (key, value)
        )  # [B, G, 1, A, W, K]
        scores = torch.cat(
            ((flat @ context_key.transpose(2, 3)).view(*q.shape[:-1], rows), q @ own_key.transpose(-1, -2)), dim=-1
        )  # [B, G, H/G, A, W, S + W]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores.masked_fill(~self._visible, float("-inf")).softmax(-1).to(value.dtype)
        read = weights[..., rows:] @ own_value
        read = read + (weights[..., :rows].reshape(*flat.shape[:-1], rows) @ context_value).view(q.shape)
        return read.permute(0, 3, 4, 1, 2, 5).reshape(-1, heads, head_dim)


class BlockRows(NamedTuple):
    """Rows of a pass that a cache admitted: new context rows of some sequences, and a block of slots behind each."""

    context: ForwardInputs
    slots: ForwardInputs
    is_causal: bool

    def commit(self, cache: PagedCache) -> None:
        """After the pass: keep the context rows in the cache that admitted them; the next pass overwrites the slots."""
        for reader in self.context.readers:
            cache.commit(reader.segment.sequence, reader.segment.num_pending)


def admit_blocks(
    cache: PagedCache, sequences: Sequence[int], num_new: Sequence[int], num_slots: Sequence[int], is_causal: bool
) -> BlockRows:
    """Make room for `num_new` context rows of each sequence, and `num_slots` behind them.

    Raises:
        CapacityError: no room for them.
    """
    new = cache.admit([Segment(one, rows, (), 0) for one, rows in zip(sequences, num_new, strict=True) if rows])
    slots = cache.admit([Segment(one, rows) for one, rows in zip(sequences, num_slots, strict=True)], num_new)
    for reader in slots.readers:
        reader.sees_all = not is_causal
    return BlockRows(new, slots, is_causal)


class CachedAttention:
    """Inference: blocks behind the context of some sequences, as `cache` admitted them; keys and values are there."""

    def __init__(self, cache: PagedCache, rows: BlockRows) -> None:
        new, slots = rows.context, rows.slots
        self._cache, self._num_new = cache, len(new.positions)
        device = cache.device
        self.positions = to_device([*new.positions, *slots.positions], device)  # [C + T]
        self._new_slots, own = to_device(new.slots, device), to_device(slots.slots, device)
        kind = cache.attention
        if not rows.is_causal and not issubclass(kind, FusedAttention):
            kind = PagedAttention  # whose mask can be left out
        self._attention = kind(cache.local, cache.pool, own, slots.readers)
        # What a compiled pass over the slots attends with, once the context of its layers is kept.
        self.of_slots = self._attention if rows.is_causal else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PlainAttention`."""
        first = self._num_new
        self.keep_context(layer, key[:first], value[:first])
        return self._attention.attend(layer, query, key[first:], value[first:])

    def keep_context(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key and value [C, G, K] of the new context rows."""
        if self._num_new:
            self._cache.pool.write(layer, self._new_slots, key, value)


# In training every so many rows of text have an anchor: blocks of 8 are then about twice as many rows as the text.
_ROWS_PER_ANCHOR = 4


class MarkovHead(nn.Module):
    """W2 W1[token before]: what the token before a slot adds to its logits."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = Embedding(config.layer.vocab_size, config.markov_rank)
        self.markov_w2 = Linear(config.markov_rank, config.draft_vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` [R] of the target's vocabulary -> [R, V_d]."""
        out: Tensor = self.markov_w2(self.markov_w1(tokens))
        return out


class ConfidenceHead(nn.Module):
    """The chance that the token drafted at a slot will be accepted, as a logit."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.proj = Linear(hidden_size, 1, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, D] -> [R]."""
        out: Tensor = self.proj(hidden).squeeze(-1)
        return out


class BlockHead(LayeredHead):
    """See the module.

    Raises:
        ConfigError: a configuration that no such head has.
    """

    name = "block"
    config: BlockConfig
    decoder_layers: tuple[BlockLayer, ...]

    def __init__(self, config: BlockConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        _check(config)
        hidden, eps = config.layer.hidden_size, config.layer.norm_eps
        self.fc = Linear(len(config.taps) * config.target_hidden_size, hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.decoder_layers = tuple(BlockLayer(config.layer) for _ in range(config.layer.num_layers))
        self.layers = nn.ModuleList(self.decoder_layers)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = None if vocabulary.is_whole else Linear(hidden, config.draft_vocab_size)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(hidden) if config.has_confidence else None

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """See `Head`; the correction begins at nothing."""
        initialise_weights(self, self.config.layer.num_layers, seed)
        if self.markov_head is not None and self.markov_head.markov_w2.weight is not None:
            self.markov_head.markov_w2.weight.zero_()

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """What the layers read of the target's `states`, by layer [n, Dt]: [n, D]. Row i depends on rows i alone."""
        taps = torch.cat([states[layer] for layer in self.config.taps], dim=-1)
        out: Tensor = self.hidden_norm(self.fc(taps.to(self.norm.weight.dtype)))
        return out

    def run(
        self, tokens: Tensor, context: Tensor, positions: Tensor, attention: PlainAttention, target: SharedWeights
    ) -> Tensor:
        """The slots' states behind the last norm, [T, D]: blocks of `tokens` [T], anchor and masks.

        `context` [C, D] are features of new context rows; `positions` [C + T] are theirs and the slots'.
        """
        x = target.embed(tokens)
        rotary = self.rotary.at(positions)
        compiled = self._compiled(context, x, rotary, attention)
        if compiled is not None:
            x = compiled.run(x, range(len(self.decoder_layers))).last
        else:
            for number, layer in enumerate(self.decoder_layers):
                x = layer(context, x, rotary, attention, number)
        out: Tensor = self.norm(x)
        return out

    def _compiled(
        self, context: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], attention: PlainAttention
    ) -> LayerPass | None:
        """The compiled pass over the slots `x` [T, D], if there is one; the context's keys and values are then kept."""
        if not isinstance(attention, CachedAttention):
            return None
        (cos, sin), first = rotary, len(context)
        compiled = layer_pass(self, x, attention.of_slots, [(cos[first:], sin[first:])])
        if compiled is not None and first:
            for number, layer in enumerate(self.decoder_layers):
                attention.keep_context(number, *layer.self_attn.keys_and_values(context, (cos[:first], sin[:first])))
        return compiled

    def correct(self, logits: Tensor, before: Tensor) -> Tensor:
        """`logits` [R, V_d], corrected by the tokens `before` [R] the drafted ones."""
        return logits if self.markov_head is None else logits + self.markov_head(before)

    def places(self, batch: HeadBatch, target: SharedWeights, num_places: int, seed: int) -> Iterator[Place]:
        """See `Head`: blocks at random anchors, in one pass; each place is corrected by the text's token before it."""
        config, tokens = self.config, batch.tokens
        num_windows, num_rows = tokens.shape[0], tokens.shape[1] - 1
        num_places = min(num_places, config.num_places)
        first = config.block_size - config.num_places  # the first slot that drafts
        num_slots = num_places + first if config.is_causal else config.block_size
        anchors, is_anchor = random_rows(batch.wanted[:, 1:], _ROWS_PER_ANCHOR, seed)
        hidden = self._slots(batch, target, anchors, num_slots)  # [B, A, W, D]
        whole = torch.arange(num_windows, device=tokens.device)[:, None].expand_as(anchors)
        for number in range(num_places):
            row = anchors + number  # this place predicts what the target's row gives
            inside = is_anchor & (row < num_rows)
            inside &= batch.wanted[whole, (row + 1).clamp(max=num_rows)]
            window, row = whole[inside], row[inside]  # [R] each
            own = hidden[:, :, first + number][inside]  # [R, D]
            logits = self.correct(self.logits(own, target), tokens[window, row])
            rows = window * num_rows + row
            yield Place(number, logits, rows, self._extra_loss(own, logits, batch, rows, target))

    def _slots(self, batch: HeadBatch, target: SharedWeights, anchors: Tensor, num_slots: int) -> Tensor:
        """States behind the last norm of the blocks at `anchors` [B, A]: [B, A, W, D]."""
        num_windows, num_rows = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        slots = torch.arange(num_slots, device=anchors.device)
        # Slots behind the end of the context only fill up blocks.
        places = (anchors[:, :, None] + slots).clamp(max=self.config.layer.max_context_tokens - 1)  # [B, A, W]
        inputs = torch.full_like(places, self.config.mask_token)
        inputs[:, :, 0] = batch.tokens.gather(1, anchors)
        rows = torch.arange(num_rows, device=anchors.device).repeat(num_windows)
        context = self.features({layer: state.flatten(0, 1) for layer, state in batch.states.items()})
        attention = WindowAttention(self.config.layer, anchors, num_rows, num_slots, self.config.is_causal)
        hidden = self.run(inputs.flatten(), context, torch.cat((rows, places.flatten())), attention, target)
        return hidden.view(*places.shape, -1)

    def _extra_loss(
        self, hidden: Tensor, logits: Tensor, batch: HeadBatch, rows: Tensor, target: SharedWeights
    ) -> Tensor | None:
        """What is learnt beside the logits of slots `hidden` [R, D]: the target's own state at `rows` [R], where its
        output matrix reads both, and the confidence.
        """
        if not len(rows):
            return None
        losses = []
        if self.lm_head is None:
            losses.append(FEATURE_WEIGHT * F.smooth_l1_loss(hidden, batch.normed.flatten(0, 1)[rows]))
        if self.confidence_head is not None:
            losses.append(self._confidence_loss(self.confidence_head(hidden.detach()), logits, batch, rows, target))
        return torch.stack(losses).sum() if losses else None

    def _confidence_loss(
        self, confidence: Tensor, logits: Tensor, batch: HeadBatch, rows: Tensor, target: SharedWeights
    ) -> Tensor:
        """Cross entropy of `confidence` [R] and the chance sum min(p, q) of acceptance; it trains nothing else."""
        with torch.no_grad():
            p = target.output_logits(batch.normed.flatten(0, 1)[rows]).float().softmax(-1)
            accepted = self.vocabulary.restrict(p).minimum(logits.float().softmax(-1)).sum(-1)  # [R]
        return F.binary_cross_entropy_with_logits(confidence.float(), accepted.clamp(0, 1))


def _check(config: BlockConfig) -> None:
    hidden, target_hidden = config.layer.hidden_size, config.target_hidden_size
    if hidden != target_hidden:
        raise ConfigError(
            "hidden_size", hidden, f"must be the target's, {target_hidden}: the slots begin as the target's embeddings"
        )
    if not 0 <= config.mask_token < config.layer.vocab_size:
        raise ConfigError(
            "mask_token", config.mask_token, f"must be a token of the target, below {config.layer.vocab_size}"
        )
