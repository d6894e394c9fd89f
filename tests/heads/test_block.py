"""The block drafter's network: training and inference against an eager twin in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import FEATURE_WEIGHT, DraftVocabulary, HeadBatch
from foretoken.heads.block import BlockHead, CachedAttention, admit_blocks
from foretoken.heads.config import BlockConfig
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.interface import SharedWeights
from foretoken.model.paged_cache import PagedCache
from foretoken.model.rope import rotate

VOCAB, HIDDEN, TAPS, LAYERS = 61, 16, (1, 2, 4), 4
SHAPE = ModelConfig("qwen3", VOCAB, HIDDEN, 24, 2, 4, 2, 8, 128, qk_norm=True)


def make_target() -> Decoder:
    decoder = Decoder(replace(SHAPE, model_type="llama", num_layers=LAYERS, qk_norm=False)).double()
    decoder.initialise(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8)
    return decoder.requires_grad_(False)


def make_head(seed: int = 0, vocabulary: DraftVocabulary | None = None, **changes: object) -> BlockHead:
    vocabulary = vocabulary or DraftVocabulary.whole(VOCAB)
    given = {"block_size": 5, "markov_rank": 4, "mask_token": 7} | changes
    config = BlockConfig(SHAPE, HIDDEN, LAYERS, TAPS, len(vocabulary.ids), **given)  # type: ignore[arg-type]
    head = BlockHead(config, vocabulary).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.3, 0.3, generator=generator)
    return head


def make_batch(num_windows: int = 2, num_rows: int = 13, seed: int = 0, wanted: float = 0.8) -> HeadBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (num_windows, num_rows + 1), generator=generator)
    states = {
        layer: torch.randn(num_windows, num_rows, HIDDEN, generator=generator, dtype=torch.float64)
        for layer in (*TAPS, LAYERS)
    }
    normed = torch.randn(num_windows, num_rows, HIDDEN, generator=generator, dtype=torch.float64)
    return HeadBatch(tokens, torch.rand(tokens.shape, generator=generator) < wanted, states, normed)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * weight


def twin(head: BlockHead, target: SharedWeights, states: dict[int, Tensor], inputs: Sequence[int]) -> Tensor:
    """The slots' states behind the last norm [W, D], spelt out: `states` [n, D] before the anchor, row by row."""
    weights, shape, start = dict(head.state_dict()), SHAPE, len(states[TAPS[0]])
    fused = torch.cat([states[layer] for layer in TAPS], -1) @ weights["fc.weight"].T
    context = norm(fused, weights["hidden_norm.weight"])
    x = target.embed(torch.tensor(inputs))
    for number in range(shape.num_layers):
        own = {k.removeprefix(f"layers.{number}."): v for k, v in weights.items() if k.startswith(f"layers.{number}.")}
        slots = norm(x, own["input_layernorm.weight"])
        rows = [*context, *slots]
        keys, values = [], []
        for position, row in enumerate(rows):
            cos, sin = head.rotary.at(torch.tensor([position]))
            key = norm((own["self_attn.k_proj.weight"] @ row).view(2, 8), own["self_attn.k_norm.weight"])
            keys.append(rotate(key[None], cos, sin)[0])
            values.append((own["self_attn.v_proj.weight"] @ row).view(2, 8))
        read = []
        for slot, row in enumerate(slots):
            cos, sin = head.rotary.at(torch.tensor([start + slot]))
            query = norm((own["self_attn.q_proj.weight"] @ row).view(4, 8), own["self_attn.q_norm.weight"])
            query = rotate(query[None], cos, sin)[0]
            last = start + slot + 1 if head.config.is_causal else len(rows)
            parts = []
            for h in range(4):
                scores = torch.stack([keys[j][h // 2] @ query[h] for j in range(last)]) / 8**0.5
                parts.append(sum(w * values[j][h // 2] for j, w in enumerate(scores.softmax(0))))
            read.append(own["self_attn.o_proj.weight"] @ torch.cat(parts))
        x = x + torch.stack(read)
        inner = norm(x, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(inner @ own["mlp.gate_proj.weight"].T)
        x = x + (gate * (inner @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"])


def twin_logits(head: BlockHead, target: SharedWeights, hidden: Tensor, before: int) -> Tensor:
    weights = dict(head.state_dict())
    logits = hidden @ weights["lm_head.weight"].T if "lm_head.weight" in weights else target.output_logits(hidden)
    if "markov_head.markov_w1.weight" in weights:
        logits = logits + weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][before]
    return logits


CUT = DraftVocabulary(torch.arange(0, VOCAB, 3), VOCAB)
KINDS = (
    {},
    {"is_causal": False},
    {"markov_rank": 0, "predicts_at_anchor": False, "is_causal": False},
    {"predicts_at_anchor": False},
    {"vocabulary": CUT},
)


@pytest.mark.parametrize("kind", KINDS)
def test_training_places_are_those_of_the_twin(kind: dict[str, object]) -> None:
    head, target, batch = make_head(**kind), make_target(), make_batch()
    first = 0 if head.config.predicts_at_anchor else 1
    num_places, found = 3, 0
    for place in head.places(batch, target, num_places, seed=5):
        for logits, flat in zip(place.logits, place.rows.tolist(), strict=True):
            window, row = divmod(flat, 13)
            anchor = row - place.number
            assert batch.wanted[window, row + 1]
            assert anchor >= 0
            num_slots = num_places + first if head.config.is_causal else 5
            inputs = [int(batch.tokens[window, anchor]), *[7] * (num_slots - 1)]
            states = {layer: state[window, :anchor] for layer, state in batch.states.items()}
            hidden = twin(head, target, states, inputs)[place.number + first]
            expected = twin_logits(head, target, hidden, int(batch.tokens[window, row]))
            torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9)
            found += 1
    assert found > 15


def test_anchors_are_chosen_by_the_seed_among_wanted_tokens() -> None:
    head, target, batch = make_head(), make_target(), make_batch(num_rows=40, wanted=0.5)

    def rows(seed: int) -> list[int]:
        return next(head.places(batch, target, 1, seed)).rows.tolist()

    assert rows(1) == rows(1) != rows(2)
    assert len(rows(1)) == 2 * 10
    unwanted = replace(batch, wanted=torch.zeros_like(batch.wanted))
    assert all(not len(place.rows) for place in head.places(unwanted, target, 3, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_over_the_cache_is_the_twin(kind: dict[str, object]) -> None:
    """Contexts that grow by different steps, blocks of different lengths, one new sequence, one without new rows."""
    head, target = make_head(**kind), make_target()
    cache = PagedCache(SHAPE, torch.float64, torch.device("cpu"), 64, block_size=4)
    batch = make_batch(num_windows=3, num_rows=20)
    texts = [{layer: state[b] for layer, state in batch.states.items()} for b in range(3)]
    held = [0, 0, 0]
    rounds = [(0, 9, 3), (1, 2, 5)], [(0, 12, 5), (2, 0, 2)], [(0, 12, 2), (1, 7, 4), (2, 5, 5)]
    for round_ in rounds:
        for sequence, _, _ in round_:
            if sequence not in cache.tables:
                cache.open(sequence)
        new = [length - held[s] for s, length, _ in round_]
        blocks = [5 if not head.config.is_causal else size for _, _, size in round_]
        inputs = [[11 + s, *[7] * (size - 1)] for (s, _, _), size in zip(round_, blocks, strict=True)]
        context = torch.cat([head.features({la: st[held[s] : n] for la, st in texts[s].items()}) for s, n, _ in round_])
        admitted = admit_blocks(cache, [s for s, _, _ in round_], new, blocks, head.config.is_causal)
        attention = CachedAttention(cache, admitted)
        flat = torch.tensor([token for own in inputs for token in own])
        hidden = head.run(flat, context, attention.positions, attention, target)
        admitted.commit(cache)
        expected = [
            twin(head, target, {la: st[:n] for la, st in texts[s].items()}, own)
            for (s, n, _), own in zip(round_, inputs, strict=True)
        ]
        torch.testing.assert_close(hidden, torch.cat(expected), atol=1e-9, rtol=1e-9)
        for sequence, length, _ in round_:
            held[sequence] = length
            assert cache.length(sequence) == length


def test_confidence_learns_the_chance_of_acceptance() -> None:
    head, target, batch = make_head(vocabulary=CUT, has_confidence=True), make_target(), make_batch()
    place = next(head.places(batch, target, 1, 0))
    assert place.extra_loss is not None
    place.extra_loss.backward()
    touched = {name for name, parameter in head.named_parameters() if parameter.grad is not None}
    assert touched == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_states_that_the_targets_matrix_reads_learn_to_be_the_targets() -> None:
    head, target, batch = make_head(), make_target(), make_batch()
    place = next(head.places(batch, target, 1, 0))
    assert place.extra_loss is not None
    own = place.logits.detach() - head.correct(torch.zeros(()), batch.tokens[:, :-1].flatten()[place.rows])
    states = torch.linalg.lstsq(target.output_logits(torch.eye(HIDDEN).double()).T, own.T).solution.T
    goal = batch.normed.flatten(0, 1)[place.rows]
    torch.testing.assert_close(place.extra_loss.detach(), FEATURE_WEIGHT * F.smooth_l1_loss(states, goal))
    assert next(make_head(vocabulary=CUT).places(batch, target, 1, 0)).extra_loss is None


def test_an_output_matrix_of_its_own_begins_as_the_targets() -> None:
    head, target = make_head(vocabulary=CUT), make_target()
    head.initialise(0)
    head.begin_from(target.output_logits)
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(head.logits(x, target), target.output_logits(x)[:, CUT.ids])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_hidden_size": 32}, "hidden_size"),
        ({"draft_vocab_size": 9}, "draft_vocab_size"),
        ({"mask_token": VOCAB}, "mask_token"),
        ({"block_size": 1, "predicts_at_anchor": False}, "block_size"),
        ({"layer": replace(SHAPE, sliding_window=(4, 4))}, "sliding_window"),
    ],
)
def test_what_no_block_drafter_has_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BlockHead(replace(make_head().config, **changes), DraftVocabulary.whole(VOCAB))  # type: ignore[arg-type]
