"""Early-exit adapters against the formula in float64, and the engine that drafts with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.draft.base import variants_of
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.open_head import _other_configs
from foretoken.errors import CheckpointError, MismatchError
from foretoken.heads.adapter import ExitAdapter
from foretoken.heads.base import DraftVocabulary, HeadBatch
from foretoken.heads.checkpoint import load_head, save_head
from foretoken.heads.config import ExitAdapterConfig
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.interface import EarlySegment
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.paged import PagedModel
from foretoken.transfer import to_host
from tests.helpers.checkpoints import randomise, tiny_checkpoint, token_ids

NUM_LAYERS, EXIT = 4, 2
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=NUM_LAYERS)


def adapter_for(folder: Path, exit_layer: int = EXIT, is_random: bool = True) -> ExitAdapter:
    target = read_config(folder)
    config = ExitAdapterConfig(target.hidden_size, target.vocab_size, NUM_LAYERS, exit_layer, 12, target.norm_eps)
    adapter = ExitAdapter(config, DraftVocabulary.whole(target.vocab_size))
    adapter.initialise(0)
    if is_random:
        randomise(adapter, seed=3)
    return adapter.requires_grad_(False)


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter's directory."""
    made = tmp_path_factory.mktemp("adapter")
    save_head(adapter_for(folder), made, read_config(folder), folder)
    return made


def formula(adapter: ExitAdapter, x: Tensor) -> Tensor:
    """One row, from the tensors of the file."""
    state, wide = {name: value.double() for name, value in adapter.state_dict().items()}, 12
    normed = x / (x.pow(2).mean() + adapter.config.norm_eps).sqrt() * state["norm.weight"]
    gate, up = state["mlp.gate_up_proj.weight"] @ normed, state["mlp.gate_up_proj.weight"] @ normed
    return x + state["mlp.down_proj.weight"] @ (F.silu(gate[:wide]) * up[wide:])


@torch.no_grad()
def test_drafted_logits_are_the_formulas(folder: Path) -> None:
    """A chain through the paged model, row by row, against a whole pass over the text in float64."""
    decoder, adapter = load_decoder(folder, dtype="float64"), adapter_for(folder).double()
    model, text = PagedModel(decoder, 256, 16), token_ids(9, seed=1)
    model.open(0)
    model.reserve(0, len(text))
    found = [
        model.forward_early(torch.tensor([token]), [EarlySegment(0, place, 1)], range(EXIT), adapter)
        for place, token in enumerate(text)
    ]
    attention = PackedAttention(decoder.config, 1, len(text))
    hidden = decoder(torch.tensor(text), torch.arange(len(text)), attention, num_layers=EXIT).last
    for row, logits in zip(hidden, found, strict=True):
        torch.testing.assert_close(logits[0], decoder.logits(formula(adapter, row)[None])[0], atol=1e-10, rtol=0)
    plain = model.forward_early(torch.tensor(text[:1]), [EarlySegment(0, 0, 1)], range(EXIT))
    assert not torch.allclose(plain, found[0])
    untrained = adapter_for(folder, is_random=False).double()
    again = model.forward_early(torch.tensor(text[:1]), [EarlySegment(0, 0, 1)], range(EXIT), untrained)
    assert torch.equal(again, plain), "a new adapter changes nothing"


@torch.no_grad()
def test_places_are_rows_of_the_text(folder: Path) -> None:
    """Place k of a draft that begins at row t is the prediction at row t + k; tokens that nobody wants are left out."""
    decoder, adapter = load_decoder(folder, dtype="float64"), adapter_for(folder).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoder.config.vocab_size, (2, 7), generator=generator)
    wanted = torch.rand(2, 7, generator=generator) < 0.7
    states = torch.randn(2, 6, decoder.config.hidden_size, generator=generator, dtype=torch.float64)
    batch = HeadBatch(tokens, wanted, {EXIT: states}, states)
    assert len(list(adapter.train().places(batch, decoder, 3, 0))) == 1
    places = list(adapter.eval().places(batch, decoder, 3, 0))
    for place in places:
        expected = [b * 6 + t for b in range(2) for t in range(place.number, 6) if wanted[b, t + 1]]
        assert to_host(place.rows)[0] == expected
        for row, logits in zip(expected, place.logits, strict=True):
            twin = decoder.logits(formula(adapter, states.flatten(0, 1)[row])[None])[0]
            torch.testing.assert_close(logits, twin, atol=1e-10, rtol=0)
    assert [place.number for place in places] == [0, 1, 2]


@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_greedy_answers_are_plain_beside_exits_without_one(folder: Path, head: Path, numerics: str) -> None:
    adapted = SpecConfig("early_exit", head=str(head), num_draft=3)
    specs = [adapted, SpecConfig("early_exit", exit_layer=1, num_draft=2), SpecConfig(), adapted]
    specs += [
        SpecConfig("auto", parts=("ngram", replace(adapted, num_draft="auto"))),
        SpecConfig("mix", head=str(head), num_draft=4),
        SpecConfig("auto", head=str(head)),
    ]
    prompts = [token_ids(3 + i, seed=i) * (1 + i % 2) for i in range(len(specs))]
    with LLM(folder, dtype="float32", cache_tokens=4096, numerics=numerics) as llm:
        plain = [out.token_ids for out in llm.generate(prompts, GREEDY)]
        outputs = llm.generate(prompts, GREEDY, specs)
    assert [out.token_ids for out in outputs] == plain
    assert outputs[0].stats.num_drafted > 10


def test_the_adapter_decides_on_the_exit(folder: Path, head: Path) -> None:
    model = PagedModel(load_decoder(folder, dtype="float32"), 256, 16)
    drafter, spec = EarlyExitDrafter(model, adapter_for(folder)), SpecConfig("early_exit", head=str(head))
    assert variants_of(drafter, spec) == (spec,)
    assert tuple(drafter._layers(spec)) == (0, 1)
    for options in ({"exit_layer": 1}, {"skip_layers": "auto"}, {"skip_layers": (1,)}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.* leave it out beside `head`"):
            SpecConfig("early_exit", head=str(head), **options)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="only drafter='early_exit', 'eagle', 'medusa' or 'block' takes it, not drafter='ngram'"
    ):
        SpecConfig("ngram", head=str(head))
    with pytest.raises(ConfigError, match="is a head of drafter='early_exit', not of 'eagle'"):
        LLM(folder, spec=SpecConfig("eagle", head=str(head)))


def test_a_head_of_another_part_is_not_the_exits(folder: Path, head: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    medusa = SpecConfig("auto", head=str(tmp_path), parts=("early_exit", "medusa"))
    assert [part.head for part in medusa.configs] == [None, str(tmp_path)]
    adapted = SpecConfig("auto", head=str(head), parts=("early_exit", "suffix"))
    assert [part.head for part in adapted.configs] == [str(head), None]


def test_what_does_not_fit_is_named(folder: Path, head: Path, tmp_path: Path) -> None:
    target = read_config(folder)
    for changed, error, words in (
        ({"num_layers": 5}, MismatchError, "trained on a target of 4 layers, this one has 5"),
        ({"hidden_size": 64}, MismatchError, "hidden_size=48, this one has 64"),
    ):
        with pytest.raises(error, match=words):
            load_head(head, replace(target, **changed))  # type: ignore[arg-type]
    text = (head / "config.json").read_text()
    for wrong, kind in (('"exit_layer": 4', ConfigError), ('"exit_layer": 0', CheckpointError)):
        (tmp_path / "config.json").write_text(text.replace('"exit_layer": 2', wrong))
        (tmp_path / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes())
        with pytest.raises(kind, match="exit_layer"):
            load_head(tmp_path, target)
    names = [name for name, _ in _other_configs(adapter_for(folder, 1).config)]
    assert names == ["exit_layer=2 in place of 1"]
