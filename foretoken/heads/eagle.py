"""EAGLE heads: decoder layers that continue the target's hidden states by one position at a time.

Row t pairs the target's state of position t with the token at t + 1, has rotary position t and predicts the token at
t + 2. Behind the last row of the text the head goes on from its own output.

- Version 1 (EAGLE-1 and -2, Li et al. 2401.15077 and 2406.16858): the state behind the target's final norm and the
  token's embedding are joined into the layer's input; the output is the next such state, and the target's output matrix
  reads it.
- Version 3 (EAGLE-3, Li et al. 2503.01840, and 3.1): states of several layers are fused into one feature; the attention
  of the first layer reads it beside the embedding, and the residual stream carries it. A head of another width than its
  target has an embedding and an output matrix of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.heads.base import FEATURE_WEIGHT, DraftVocabulary, HeadBatch, Place, random_rows
from foretoken.heads.config import EagleConfig
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
from foretoken.model.interface import SharedWeights
from foretoken.model.layer_pass import LayerParts, layer_pass
from foretoken.model.layers import Embedding, Linear, RMSNorm
from foretoken.transfer import to_device

# In training one in so many rows goes on to the steps after the first, which then cost less than it does.
_ROWS_PER_UNROLLED = 4


class EagleRows(NamedTuple):
    """What a pass computes, each [T, D]: `output` is what logits are read from, `feedback` the next step's feature."""

    output: Tensor
    feedback: Tensor


class EagleLayer(HeadLayer):
    """One decoder layer. The first of version 3 has the embedding beside the residual stream; the first of version 1
    has no norm before its attention.
    """

    def __init__(self, config: EagleConfig, is_first: bool) -> None:
        super().__init__()
        shape = config.layer
        self.reads_embedding = is_first and config.version == 3
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = HeadAttention(shape, shape.hidden_size * (2 if self.reads_embedding else 1))
        self.mlp = HeadMLP(shape)
        has_input_norm = self.reads_embedding or not is_first
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps) if has_input_norm else None
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps) if self.reads_embedding else None
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, x: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], attention: PlainAttention, layer: int
    ) -> Tensor:
        """One layer over the residual stream `x` [T, D] and the embeddings of its tokens, same shape."""
        seen = x if self.input_layernorm is None or self.hidden_norm is not None else self.input_layernorm(x)
        if self.input_layernorm is not None and self.hidden_norm is not None:
            normed = self.hidden_norm(x)
            seen = torch.cat((self.input_layernorm(embedded), normed), dim=-1)  # [T, 2D]
            x = normed if self.norm_before_residual else x
        x = x + self.self_attn(seen, rotary, attention, layer)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def parts(self) -> LayerParts:
        """See `HeadLayer`."""
        if not self.reads_embedding:
            return layer_parts(self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm)
        norms = (self.hidden_norm, self.post_attention_layernorm, self.input_layernorm)
        return layer_parts(self.self_attn, self.mlp, *norms, self.norm_before_residual)


class EagleHead(LayeredHead):
    """See the module.

    Raises:
        ConfigError: a configuration that no such head has.
    """

    name = "eagle"
    config: EagleConfig
    decoder_layers: tuple[EagleLayer, ...]

    def __init__(self, config: EagleConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        _check(config, vocabulary)
        hidden, target_hidden, num_taps = config.layer.hidden_size, config.target_hidden_size, len(config.taps)
        wide = num_taps * target_hidden if config.version == 3 else hidden + target_hidden
        self.fc = Linear(wide, hidden, config.fc_bias)
        eps = config.layer.norm_eps
        self.input_norm = RMSNorm(wide, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(target_hidden, eps) for _ in range(num_taps)) if config.fc_norm else None
        layers = [EagleLayer(config, number == 0) for number in range(config.layer.num_layers)]
        if config.version == 3 and len(layers) == 1:
            self.midlayer = layers[0]
        else:
            self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hidden, eps) if config.version == 3 else None
        self.embed_tokens = Embedding(config.layer.vocab_size, hidden) if config.has_own_embedding else None
        has_output = config.has_own_output or not vocabulary.is_whole
        self.lm_head = Linear(hidden, config.draft_vocab_size) if has_output else None
        self.decoder_layers = tuple(layers)

    @property
    def feeds_normed(self) -> bool:
        """Whether `feedback` is `output`, or what the norm before it reads."""
        return self.norm is not None and self.config.norm_output

    @property
    def join_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """The norms of what `joined` reads: of embeddings, and of features."""
        return None, None

    def initialise(self, seed: int) -> None:
        """See `Head`."""
        initialise_weights(self, self.config.layer.num_layers, seed)

    def features(self, states: Mapping[int, Tensor], target: SharedWeights) -> Tensor:
        """What the head keeps of the target's `states`, by layer [n, Dt]: [n, D]. Row i depends on rows i alone."""
        if self.config.version == 1:
            return target.final_norm(states[self.config.taps[0]])
        dtype = self.norm_dtype
        taps = [states[layer].to(dtype) for layer in self.config.taps]
        if self.fc_norm is not None:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        wide = torch.cat(taps, dim=-1)
        fused: Tensor = self.fc(wide if self.input_norm is None else self.input_norm(wide))
        return fused

    def joined(self, embedded: Tensor, features: Tensor) -> Tensor:
        """What the layers read of the embeddings and features, each [T, D]: [T, D]."""
        if self.config.version == 3:
            return features  # the first layer reads the embedding
        out: Tensor = self.fc(torch.cat((embedded, features), dim=-1))
        return out

    def run(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attention: PlainAttention, target: SharedWeights
    ) -> EagleRows:
        """One pass over `tokens` [T] with the features [T, D] of the positions before them, `positions` [T]."""
        embedded: Tensor = target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)  # [T, D]
        x = self.joined(embedded, features)
        rotary = self.rotary.at(positions)
        compiled = layer_pass(self, x, attention, [rotary], embedded)
        if compiled is not None:
            x = compiled.run(x, range(len(self.decoder_layers))).last
        else:
            for number, layer in enumerate(self.decoder_layers):
                x = layer(x, embedded, rotary, attention, number)
        if self.norm is None:
            return EagleRows(x, x)
        output = self.norm(x)
        return EagleRows(output, output if self.feeds_normed else x)

    def places(self, batch: HeadBatch, target: SharedWeights, num_places: int, seed: int) -> Iterator[Place]:
        """See `Head`: training-time test, the first step over every row, later ones over a share of them (version 1
        was trained with one step).
        """
        num_windows, num_rows = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        attention = UnrolledAttention(self.config.layer, num_windows, num_rows)
        device, wanted = batch.tokens.device, batch.wanted_on_host()
        own = batch.normed.flatten(0, 1) if self.config.version == 1 else None
        flat = {layer: state.flatten(0, 1) for layer, state in batch.states.items()}
        features = self.features(flat, target) if own is None else own
        # Which rows are learnt is decided on the host, from its own mask: a device that is asked is waited for.
        window = torch.arange(num_windows)[:, None]
        start = torch.arange(num_rows).expand(num_windows, -1)  # [B, Q] rows that a step goes on from
        for step in range(num_places):
            if step + 1 >= num_rows:
                return
            if step == 1:
                first = F.pad(wanted[:, 2:], (0, 1))  # whether the token that row t predicts first is wanted, [B, S]
                start = random_rows(first, _ROWS_PER_UNROLLED, seed).rows.sort(dim=1).values
                features = features[to_device((window * num_rows + start).flatten(), device)]
                attention.go_on_from(to_device(start, device))
            # Rows whose token lies behind the window read its last one: no row that is used sees them.
            read = (window * (num_rows + 1) + (start + 1 + step).clamp(max=num_rows)).flatten()  # [B * Q]
            tokens, positions = batch.tokens.flatten()[to_device(read, device)], to_device(start + step, device)
            rows = self.run(tokens, features, positions.flatten(), attention, target)
            predicted = start + 1 + step  # the target's row that each should equal
            learnt = (predicted < num_rows) & wanted[window, (predicted + 1).clamp(max=num_rows)]
            chosen = to_device((window * num_rows + predicted)[learnt], device)  # [R]
            output = rows.output[to_device(learnt.flatten().nonzero().squeeze(1), device)]  # [R, D]
            extra = None
            if own is not None and len(chosen):  # the mean over no row is no number
                extra = FEATURE_WEIGHT * F.smooth_l1_loss(output, own[chosen])
            yield Place(step, self.logits(output, target), chosen, extra)
            features = rows.feedback


def _check(config: EagleConfig, vocabulary: DraftVocabulary) -> None:
    hidden, target_hidden = config.layer.hidden_size, config.target_hidden_size
    if config.has_own_width and config.version == 1:
        remedy = f"must be the target's, {target_hidden}: an EAGLE-1 head predicts the target's states"
        raise ConfigError("hidden_size", hidden, remedy)
    if config.has_own_width and not config.has_own_output and vocabulary.is_whole:
        remedy = f"is not the target's, {target_hidden}: such a head needs an output matrix of its own"
        raise ConfigError("hidden_size", hidden, remedy)
    if config.version == 1 and not vocabulary.is_whole:
        raise ConfigError("draft_vocab_size", config.draft_vocab_size, "an EAGLE-1 head has the target's vocabulary")
    only_3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "has_own_output")
    if type(config) is EagleConfig and config.version == 1:  # an MTP layer has some of them
        for name in only_3:
            if getattr(config, name):
                raise ConfigError(name, True, "EAGLE-1 heads have neither norms around fc nor an output matrix")


class UnrolledAttention:
    """Attention of training-time test (EAGLE-3): later steps read what inference would have cached.

    At inference the row of step j stands behind rows computed from the target's states, and behind the head's own rows
    of steps 1..j. In training every row t of a window is such a place at once: in step j it sees the keys of step 0 up
    to row t, and its own row's keys of steps 1..j.

    See `layers.PlainAttention`; each `attend` of a layer is one step over the same B windows, flattened. The first step
    has all S rows of each window, later ones those of `go_on_from`.
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
