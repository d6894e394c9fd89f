"""EAGLE heads against an eager float64 twin that runs the text of one draft at a time, written from the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, HeadBatch
from foretoken.heads.config import EagleConfig
from foretoken.heads.eagle import EagleHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.rope import inverse_frequencies
from tests.helpers.checkpoints import randomise

SHAPE = ModelConfig("llama", 61, 32, 48, 1, 4, 2, 8, 64)
IDS = torch.arange(0, 61, 3)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
VERSION_3 = EagleConfig(3, SHAPE, 32, 4, (1, 2, 3), len(IDS))
VERSION_1 = EagleConfig(1, SHAPE, 32, 4, (4,), 61)
NUM_STEPS = 4
CONFIGS: dict[str, EagleConfig] = {
    "3": VERSION_3,
    "1": VERSION_1,
    "1-bias": replace(VERSION_1, fc_bias=True),
    "1-two-layers": replace(VERSION_1, layer=replace(SHAPE, num_layers=2)),
    "3-whole": replace(VERSION_3, draft_vocab_size=61),
    "3-whole-own": replace(VERSION_3, draft_vocab_size=61, has_own_output=True),
    "3-two-layers": replace(VERSION_3, layer=replace(SHAPE, num_layers=2)),
    "3-biases": replace(VERSION_3, layer=replace(SHAPE, qkv_bias=True, o_bias=True, mlp_bias=True)),
    "3-qk-norm": replace(VERSION_3, layer=replace(SHAPE, qk_norm=True)),
    "3-five-taps": replace(VERSION_3, taps=(0, 1, 2, 3, 4)),
    **{f"3-{flag}": replace(VERSION_3, **{flag: True}) for flag in FLAGS},
    "3-narrow": replace(VERSION_3, layer=replace(SHAPE, hidden_size=24)),
    "3-wide": replace(VERSION_3, layer=replace(SHAPE, hidden_size=40), draft_vocab_size=61, has_own_output=True),
    "3.1-narrow": replace(VERSION_3, layer=replace(SHAPE, hidden_size=24), fc_norm=True, norm_output=True),
    "3.1": replace(VERSION_3, fc_norm=True, norm_output=True),
}


def target() -> Decoder:
    decoder = Decoder(replace(SHAPE, num_layers=4)).double()
    randomise(decoder, seed=7)
    return decoder


def head_of(config: EagleConfig) -> EagleHead:
    ids = torch.arange(61) if config.draft_vocab_size == 61 else IDS
    head = EagleHead(config, DraftVocabulary(ids, 61)).double()
    randomise(head, seed=3)
    return head


@torch.no_grad()
def batch_of(decoder: Decoder, num_windows: int = 2, num_rows: int = 9) -> HeadBatch:
    generator = torch.Generator().manual_seed(0)
    states = {layer: torch.randn(num_windows, num_rows, 32, generator=generator).double() for layer in range(5)}
    tokens = torch.randint(61, (num_windows, num_rows + 1), generator=generator)
    wanted = torch.rand(num_windows, num_rows + 1, generator=generator) < 0.7
    return HeadBatch(tokens, wanted, states, decoder.final_norm(states[4]))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * weight


class Twin:
    """One row after the other, keys kept in lists; `state` are the tensors of the checkpoint."""

    def __init__(self, head: EagleHead, decoder: Decoder) -> None:
        self.state, self.config, self.decoder = head.state_dict(), head.config, decoder
        self.keys: list[list[Tensor]] = [[] for _ in range(head.config.layer.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(head.config.layer.num_layers)]

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.state[f"{name}.weight"] @ x
        return y + self.state[f"{name}.bias"] if f"{name}.bias" in self.state else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.state[f"{name}.weight"])

    def feature(self, states: dict[int, Tensor]) -> Tensor:
        """`states` by layer [D]."""
        if self.config.version == 1:
            return self.decoder.final_norm(states[4])
        taps = [states[layer] for layer in self.config.taps]
        if self.config.fc_norm:
            taps = [self.norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)]
        wide = torch.cat(taps)
        return self.linear("fc", self.norm("input_norm", wide) if self.config.norm_before_fc else wide)

    def step(self, token: int, feature: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Logits over the head's vocabulary, and what the next step is fed."""
        own, x = self.state.get("embed_tokens.weight"), feature
        embedded = self.decoder.embed(torch.tensor([token]))[0] if own is None else own[token]
        if self.config.version == 1:
            x = self.linear("fc", torch.cat((embedded, x)))
        one = self.config.version == 3 and self.config.layer.num_layers == 1
        for number in range(self.config.layer.num_layers):
            name = "midlayer" if one else f"layers.{number}"
            seen = x
            if number > 0:
                seen = self.norm(f"{name}.input_layernorm", x)
            elif self.config.version == 3:
                normed = self.norm(f"{name}.hidden_norm", x)
                seen = torch.cat((self.norm(f"{name}.input_layernorm", embedded), normed))
                x = normed if self.config.norm_before_residual else x
            x = x + self.attend(number, f"{name}.self_attn", seen, position)
            y = self.norm(f"{name}.post_attention_layernorm", x)
            gated = F.silu(self.linear(f"{name}.mlp.gate_proj", y)) * self.linear(f"{name}.mlp.up_proj", y)
            x = x + self.linear(f"{name}.mlp.down_proj", gated)
        if self.config.version == 1:
            return self.decoder.output_logits(x), x
        normed = self.norm("norm", x)
        logits = (
            self.linear("lm_head", normed) if "lm_head.weight" in self.state else self.decoder.output_logits(normed)
        )
        return logits, normed if self.config.norm_output else x

    def attend(self, number: int, name: str, x: Tensor, position: int) -> Tensor:
        shape = self.config.layer
        query, key, value = (self.linear(f"{name}.{part}_proj", x).view(-1, shape.head_dim) for part in "qkv")
        if shape.qk_norm:
            query, key = self.norm(f"{name}.q_norm", query), self.norm(f"{name}.k_norm", key)
        query, key = self.turn(query, position), self.turn(key, position)
        self.keys[number].append(key)
        self.values[number].append(value)
        read = []
        for i in range(shape.num_heads):
            group = i // (shape.num_heads // shape.num_kv_heads)
            keys = torch.stack([one[group] for one in self.keys[number]])
            weights = (keys @ query[i] * shape.head_dim**-0.5).softmax(0)
            read.append(weights @ torch.stack([one[group] for one in self.values[number]]))
        return self.linear(f"{name}.o_proj", torch.cat(read))

    def turn(self, x: Tensor, position: int) -> Tensor:
        frequency, _ = inverse_frequencies(self.config.layer.rope, self.config.layer.head_dim)
        angle = (position * frequency).double()
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)


def teacher_forced(head: EagleHead, decoder: Decoder, batch: HeadBatch) -> dict[tuple[int, int], Tensor]:
    """Logits by step and row of the batch, computed for one draft at a time."""
    found: dict[tuple[int, int], Tensor] = {}
    num_rows = batch.tokens.shape[1] - 1
    for window, text in enumerate(batch.tokens.tolist()):
        for row in range(num_rows):
            twin, feature = Twin(head, decoder), torch.empty(0)
            for place in range(min(row + NUM_STEPS, num_rows)):
                if place <= row:
                    feature = twin.feature({layer: state[window, place] for layer, state in batch.states.items()})
                logits, feedback = twin.step(text[place + 1], feature, place)
                if place >= row:
                    found[place - row, window * num_rows + row] = logits
                    feature = feedback
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_places_are_drafts_behind_every_row(name: str) -> None:
    head, decoder = head_of(CONFIGS[name]), target()
    batch = batch_of(decoder)
    expected, wanted, num_rows = teacher_forced(head, decoder, batch), batch.wanted, 9
    seen: dict[int, set[int]] = {}
    for seed in range(24):
        for place in head.places(batch, decoder, NUM_STEPS, seed):
            rows = place.rows.tolist()
            seen.setdefault(place.number, set()).update(rows)
            if rows:
                twins = torch.stack([expected[place.number, row - 1 - place.number] for row in rows])
                torch.testing.assert_close(place.logits, twins, rtol=1e-9, atol=1e-9)
            assert len(rows) == len(set(rows))
            assert len(rows) <= 2 * 3 or place.number == 0  # a quarter of 9 rows of 2 windows goes on
            assert (place.extra_loss is not None) == (head.config.version == 1)
    for number, found in seen.items():  # only rows whose first draft token is wanted go on
        expected_rows = [(b, r) for b in range(2) for r in range(1 + number, num_rows) if wanted[b, r + 1]]
        assert found == {b * 9 + r for b, r in expected_rows if number == 0 or wanted[b, r + 1 - number]}


@torch.no_grad()
@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_the_drafts(flag: str) -> None:
    """Of a head whose tensors of the same name are the same."""
    decoder = target()
    batch = batch_of(decoder)
    plain, flagged = head_of(VERSION_3), head_of(replace(VERSION_3, **{flag: True}))
    flagged.load_state_dict(plain.state_dict(), strict=False)
    one, other = (list(head.places(batch, decoder, 2, seed=0)) for head in (plain, flagged))
    assert not torch.allclose(one[1].logits, other[1].logits)
    assert torch.allclose(one[0].logits, other[0].logits) == (flag == "norm_output")  # which acts from the second on


def test_training_lowers_the_loss_and_reaches_every_weight() -> None:
    decoder = target().float().requires_grad_(False)
    batch = batch_of(target())
    batch = replace(
        batch, states={layer: state.float() for layer, state in batch.states.items()}, normed=batch.normed.float()
    )
    for config in (CONFIGS["3"], CONFIGS["1"]):
        head = EagleHead(config, DraftVocabulary(IDS if config.draft_vocab_size < 61 else torch.arange(61), 61))
        head.initialise(seed=0)
        optimizer, losses = torch.optim.Adam(head.parameters(), lr=3e-3), []
        for _ in range(20):
            loss = torch.zeros(())
            for place in head.places(batch, decoder, 2, seed=0):
                goal = place.rows % place.logits.shape[-1]
                loss = (
                    loss + F.cross_entropy(place.logits, goal) + (0 if place.extra_loss is None else place.extra_loss)
                )
            loss.backward()  # type: ignore[no-untyped-call]
            assert all(p.grad is not None and bool((p.grad != 0).any()) for p in head.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]


def test_output_matrix_begins_as_the_targets() -> None:
    decoder, head = target(), head_of(VERSION_3)
    head.begin_from(decoder.output_logits)
    assert head.lm_head is not None
    assert head.lm_head.weight is not None
    torch.testing.assert_close(head.lm_head.weight.data, decoder.lm_head.weight.data[IDS])


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(VERSION_3, target_hidden_size=40, draft_vocab_size=61), "hidden_size"),
        (replace(VERSION_1, target_hidden_size=40), "hidden_size"),
        (replace(VERSION_3, draft_vocab_size=20), "draft_vocab_size"),
        (replace(VERSION_3, layer=replace(SHAPE, sliding_window=(8,))), "sliding_window"),
        (replace(VERSION_1, draft_vocab_size=len(IDS)), "draft_vocab_size"),
        *((replace(VERSION_1, **{flag: True}), flag) for flag in (*FLAGS, "has_own_output")),
    ],
)
def test_what_no_such_head_has_is_refused(config: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}="):
        head_of(config)
