"""MTP layers in a target's checkpoint: against the formula in float64, read in two namings, drafting exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.cli.models import app
from foretoken.core import Batch, BatchEntry, Request
from foretoken.draft.base import HiddenRows
from foretoken.draft.eagle import MtpDrafter
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.mtp import MtpHead, load_mtp
from foretoken.heads.weights import plain_copy
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.paged import PagedModel
from foretoken.model.rope import inverse_frequencies
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.mtp_checkpoints import add_mtp, mtp_state, random_mtp, set_key

CPU = torch.device("cpu")
FAMILIES = {"llama": "llama", "qwen3": "qwen3", "tied": "llama"}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


def checkpoint(folder: Path, kind: str = "llama", **options: object) -> Path:
    return tiny_checkpoint(folder, FAMILIES[kind], num_hidden_layers=2, tie_word_embeddings=kind == "tied", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = checkpoint(tmp_path_factory.mktemp("target"))
    add_mtp(made)
    return made


class Twin:
    """The layer one row after the other, from its tensors by the names of DeepSeek's checkpoints."""

    def __init__(self, state: dict[str, Tensor], decoder: Decoder) -> None:
        self.config, self.decoder = decoder.config, decoder
        prefix = f"model.layers.{decoder.config.num_layers}."
        self.state = {name.removeprefix(prefix): value.double() for name, value in state.items()}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self.state[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.state[f"{name}.weight"] @ x

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """`x` [H, K], halves turned against each other."""
        angle = position * inverse_frequencies(self.config.rope, self.config.head_dim)[0].double()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)

    def step(self, token: int, feature: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Logits, and what the next step is fed, of the row that pairs `feature` with the token behind it."""
        config, embedded = self.config, self.decoder.embed(torch.tensor([token]))[0]
        x = self.linear("eh_proj", torch.cat((self.norm("enorm", embedded), self.norm("hnorm", feature))))
        y, shape = self.norm("input_layernorm", x), (-1, config.head_dim)
        query, key, value = (self.linear(f"self_attn.{one}_proj", y).view(shape) for one in "qkv")
        if config.qk_norm:
            query, key = self.norm("self_attn.q_norm", query), self.norm("self_attn.k_norm", key)
        self.keys.append(self.rotated(key, position))
        self.values.append(value)
        repeat = config.num_heads // config.num_kv_heads
        keys, values = (torch.stack(one, 1).repeat_interleave(repeat, 0) for one in (self.keys, self.values))
        scores = (self.rotated(query, position)[:, None] * keys).sum(-1) * config.head_dim**-0.5  # [H, S]
        read = (scores.softmax(-1)[..., None] * values).sum(1)
        x = x + self.linear("self_attn.o_proj", read.flatten())
        y = self.norm("post_attention_layernorm", x)
        gated = F.silu(self.linear("mlp.gate_proj", y)) * self.linear("mlp.up_proj", y)
        out = self.norm("shared_head.norm", x + self.linear("mlp.down_proj", gated))
        return self.decoder.output_logits(out), out

    def drafts(self, text: Sequence[int], normed: Tensor, count: int) -> list[int]:
        """The greedy chain behind `text`; `normed` [len(text) - 1, D] are the target's states before its last token."""
        for position, state in enumerate(normed):
            logits, feedback = self.step(text[position + 1], state, position)
        found = [int(logits.argmax())]
        for place in range(count - 1):
            logits, feedback = self.step(found[-1], feedback, len(normed) + place)
            found.append(int(logits.argmax()))
        return found


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_drafts_are_those_of_the_formula(kind: str, tmp_path: Path) -> None:
    """Two requests in one call, greedy, in the cache of blocks."""
    checkpoint(tmp_path, kind)
    added = add_mtp(tmp_path)
    decoder, target = load_decoder(tmp_path, dtype="float64"), read_config(tmp_path)
    head = load_mtp(tmp_path, target, torch.float64, CPU).requires_grad_(False)
    drafter = MtpDrafter(CachedEagle(head, PagedModel(decoder, 512, 4)))
    entries, expected = [], []
    for number, text in enumerate((token_ids(11, seed=1), token_ids(18, seed=2))):
        request = Request(number, tuple(text), GREEDY, SpecConfig("mtp", num_draft=4), seed=0)
        attention = PackedAttention(target, 1, len(text) - 1)
        hidden = decoder(torch.tensor(text[:-1]), torch.arange(len(text) - 1), attention).last
        drafter.start(request)
        drafter.read_hidden([HiddenRows(number, 0, tuple(text[:-1]), text[-1], {target.num_layers: hidden})])
        entries.append(BatchEntry(request, len(text) - 1, (text[-1],), True, 4))
        expected += Twin(added, decoder).drafts(text, decoder.final_norm(hidden), 4)
    assert drafter.propose(Batch(tuple(entries))).tokens.tolist() == expected
    for number in range(2):
        drafter.finish(number)


@pytest.mark.parametrize("naming", ["deepseek", "qwen"])
@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_both_namings_are_read_and_the_target_stays_what_it_was(kind: str, naming: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, kind)
    before = load_decoder(tmp_path, dtype="float32").state_dict()
    add_mtp(tmp_path, naming)
    after = load_decoder(tmp_path, dtype="float32").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    target = read_config(tmp_path)
    head, random = load_mtp(tmp_path, target, torch.float32, CPU), random_mtp(target)
    assert all(torch.equal(value, random.state_dict()[name]) for name, value in head.state_dict().items())
    assert head.lm_head is None
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "1 MTP layer (--drafter mtp)" in " ".join(shown.split())


def test_copies_of_the_targets_matrices_are_shared_others_are_not(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    decoder, target = load_decoder(tmp_path, dtype="float32"), read_config(tmp_path)
    embedding, output = decoder.embedding.weight, decoder.lm_head.weight
    assert embedding is not None
    assert output is not None
    names = [f"model.layers.2.{part}.weight" for part in ("embed_tokens", "shared_head.head")]
    add_mtp(tmp_path, **dict(zip(names, (embedding.detach(), output.detach()), strict=True)))
    assert load_mtp(tmp_path, target, torch.float32, CPU).lm_head is None
    add_mtp(tmp_path, **{names[1]: output.detach() * 2})
    own = load_mtp(tmp_path, target, torch.float32, CPU)
    assert own.lm_head is not None
    assert torch.equal(own.lm_head.weight, output * 2)  # type: ignore[arg-type]
    assert torch.equal(plain_copy(own).state_dict()["lm_head.weight"], output * 2)
    add_mtp(tmp_path, **{names[0]: embedding.detach() * 2})
    with pytest.raises(UnsupportedModelError, match="an embedding of its own"):
        load_mtp(tmp_path, target, torch.float32, CPU)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("mlp.experts.0.gate_proj", "a mixture of experts .*experts.0.gate_proj"),
        ("mlp.gate", "a mixture of experts"),
        ("self_attn.kv_a_proj_with_mqa", "latent attention"),
    ],
)
def test_other_layers_are_refused_by_name_and_the_target_runs(part: str, words: str, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    add_mtp(tmp_path, **{f"model.layers.2.{part}.weight": torch.ones(2, 3)})
    with LLM(tmp_path, dtype="float32", cache_tokens=512) as llm:
        with pytest.raises(UnsupportedModelError, match=words):
            llm.prepare(SpecConfig("mtp"))
        assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 20


def test_what_is_not_there_or_too_much_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path / "plain")
    target = read_config(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"drafter='mtp': .* holds no MTP layer .* choose another drafter"):
        LLM(tmp_path / "plain", SpecConfig("mtp"), dtype="float32")
    checkpoint(tmp_path / "more")
    add_mtp(tmp_path / "more", **{"model.layers.2.mlp.other.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"mlp\.other\.weight .* has no place in the MTP layer"):
        load_mtp(tmp_path / "more", target, torch.float32, CPU)
    set_key(tmp_path / "more", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"has no place in the model that config\.json describes"):
        read_config(tmp_path / "more")
    set_key(tmp_path / "more", num_nextn_predict_layers="one")
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers='one' must be a whole number"):
        read_config(tmp_path / "more")
    checkpoint(tmp_path / "less")
    add_mtp(tmp_path / "less", "qwen", **{"mtp.fc.weight": torch.ones(3, 3)})
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight .* has shape \[3, 3\]"):
        load_mtp(tmp_path / "less", target, torch.float32, CPU)
    state = mtp_state(target, "qwen")
    assert {name for name in state if ".layers." not in name} == {
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
    }


def test_a_second_layer_is_left_unread(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    add_mtp(tmp_path, **{"model.layers.3.mlp.experts.0.gate_proj.weight": torch.ones(2, 3)})
    with pytest.raises(CheckpointError, match="no place"):
        read_config(tmp_path)
    set_key(tmp_path, num_nextn_predict_layers=2)
    assert isinstance(load_mtp(tmp_path, read_config(tmp_path), torch.float32, CPU), MtpHead)


@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_greedy_answers_are_plain(folder: Path, numerics: str) -> None:
    specs = [
        SpecConfig("mtp", num_draft=3),
        SpecConfig("mtp", num_draft=6, tree="best_first"),
        SpecConfig(),
        SpecConfig("auto", parts=("suffix", "mtp")),
        SpecConfig("mix", parts=("ngram", "mtp"), num_draft=4),
    ]
    prompts = [token_ids(3 + 4 * i, seed=i) for i in range(len(specs))]
    with LLM(folder, dtype="float32", cache_tokens=4096, numerics=numerics) as llm:
        plain = [out.token_ids for out in llm.generate(prompts, GREEDY)]
        outputs = llm.generate(prompts, GREEDY, specs)
    assert [out.token_ids for out in outputs] == plain
    assert outputs[0].stats.num_drafted > 10
    assert outputs[1].stats.num_drafted > 10
