"""Families that only transformers knows, behind our interface: every row equals a plain pass over its own text."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.errors import CapacityError, CheckpointError, UnsupportedModelError
from foretoken.model.hf import TransformersModel
from foretoken.model.interface import LanguageModel, Segment
from tests.helpers.checkpoints import randomise, tiny_checkpoint, token_ids

FAMILIES = {"gpt2": True, "opt": True, "gpt_neox": True, "phi": True, "gemma2": True, "gemma3_text": True, "mistral": True, "mamba": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: tiny_checkpoint(root / name, name, **({"sliding_window": 6} if name == "mistral" else {})) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> TransformersModel:
    return TransformersModel(folders[request.param])


def plain(model: TransformersModel, ids: list[int]) -> Tensor:
    """The oracle: one pass without any cache."""
    with torch.no_grad():
        logits: Tensor = model._model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_it_is_a_language_model(model: TransformersModel) -> None:
    typed: LanguageModel = model
    assert typed.vocab_size == 97
    assert typed.eos_token_ids == (0,)
    assert typed.num_layers >= 2
    assert typed.num_parameters > 10_000
    assert model.can_crop == FAMILIES[model._model.config.model_type]


def test_chains_chunks_and_ragged_batches(model: TransformersModel) -> None:
    first, second = token_ids(30), token_ids(25, seed=2)
    model.open(1)
    model.open(2)
    out = model.forward(torch.tensor(first[:10] + second[:4]), [Segment(1, 10, num_logits=0), Segment(2, 4, num_logits=1)])
    assert out.logits.shape == (1, 97)
    close(out.logits, plain(model, second[:4])[-1:])
    model.commit(1, 10)
    model.commit(2, 4)
    rows = first[10:15] + second[4:6]
    out = model.forward(torch.tensor(rows), [Segment(1, 2, (-1, 0, 1), num_logits=4), Segment(2, 1, (-1,), num_logits=2)])
    close(out.logits[:4], plain(model, first[:15])[-4:])
    close(out.logits[4:], plain(model, second[:6])[-2:])
    model.commit(1, 2, (0, 1))
    model.commit(2, 1, (0,))
    assert (model.length(1), model.length(2)) == (14, 6)
    out = model.forward(torch.tensor(first[20:21]), [Segment(1, 1)])
    close(out.logits, plain(model, first[:14] + first[20:21])[-1:])


def test_rejected_tokens_leave_no_trace(model: TransformersModel) -> None:
    """A random walk of commits and rollbacks, past the sliding windows, against the text itself."""
    generator, text = random.Random(3), []
    model.open(7)
    for _ in range(25):
        pending = [generator.randrange(97) for _ in range(generator.randrange(1, 4))]
        nodes = [generator.randrange(97) for _ in range(generator.randrange(5))]
        out = model.forward(torch.tensor(pending + nodes), [Segment(7, len(pending), tuple(range(-1, len(nodes) - 1)), num_logits=1 + len(nodes))])
        close(out.logits, plain(model, text + pending + nodes)[-1 - len(nodes) :])
        kept = generator.randrange(len(nodes) + 1)
        model.commit(7, len(pending), tuple(range(kept)))
        text += pending + nodes[:kept]
        if generator.random() < 0.3:
            text = text[: generator.randrange(len(text) + 1)]
            model.rollback(7, len(text))
        assert model.length(7) == len(text)
        if len(text) > 60:
            text = text[:20]
            model.rollback(7, 20)


def test_every_path_of_a_tree_is_its_own_text(model: TransformersModel) -> None:
    prompt, nodes = token_ids(12), [5, 6, 7, 8, 9, 10]
    parents = (-1, -1, 0, 0, 2, 1)
    model.open(1)
    out = model.forward(torch.tensor(prompt + nodes), [Segment(1, 12, parents, num_logits=7)])
    close(out.logits[0], plain(model, prompt)[-1])
    paths = [[0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5]]
    for row, path in enumerate(paths, start=1):
        close(out.logits[row], plain(model, prompt + [nodes[node] for node in path])[-1])
    model.commit(1, 12, (0, 3))
    assert model.length(1) == 14
    out = model.forward(torch.tensor([11, 12]), [Segment(1, 1, (-1,), num_logits=2)])
    close(out.logits, plain(model, [*prompt, 5, 8, 11, 12])[-2:])


def test_a_tree_that_grows_level_by_level(model: TransformersModel) -> None:
    prompt, nodes, parents = token_ids(12), [5, 6, 7, 8, 9, 10], (-1, -1, 0, 0, 2, 1)
    paths = [[0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5]]
    for levels in ((0, 2, 4, 6), (0, 1, 6)):
        model.open(1)
        model.forward(torch.tensor(prompt), [Segment(1, 12)])
        model.commit(1, 12)
        for held, stop in pairwise(levels):
            out = model.forward(torch.tensor(nodes[held:stop]), [Segment(1, 0, parents[:stop], stop - held, held)]).logits
            for row, path in zip(out, paths[held:stop], strict=True):
                close(row, plain(model, prompt + [nodes[node] for node in path])[-1])
        model.commit(1, 0, (0, 2, 4))
        close(model.forward(torch.tensor([11]), [Segment(1, 1)]).logits, plain(model, [*prompt, 5, 7, 9, 11])[-1:])
        model.close(1)


def test_taps_are_the_hidden_states_of_the_same_rows(model: TransformersModel) -> None:
    ids = token_ids(9)
    model.open(1)
    out = model.forward(torch.tensor(ids), [Segment(1, 7, (-1, 0), num_logits=3)], taps=(0, 1))
    with torch.no_grad():
        hidden = model._model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    for layer in (0, 1):
        close(out.taps[layer], hidden[layer][0, -3:])


def test_memory_is_counted(folders: dict[str, Path]) -> None:
    model = TransformersModel(folders["gpt2"], capacity_tokens=20)
    assert model.num_free_tokens() == model.capacity_tokens == 20
    model.open(1)
    model.open(2)
    assert model.reserve(1, 15)
    assert model.num_free_tokens() == 5
    assert not model.reserve(2, 6)
    assert model.num_free_tokens() == 5
    with pytest.raises(CapacityError):
        model.forward(torch.tensor(token_ids(6)), [Segment(2, 6)])
    model.forward(torch.tensor(token_ids(12)), [Segment(1, 10, (-1, 0), num_logits=3)])
    model.commit(1, 10, (0,))
    assert (model.length(1), model.num_free_tokens()) == (11, 9)
    model.rollback(1, 4)
    assert model.num_free_tokens() == 16
    model.close(1)
    model.close(2)
    assert model.num_free_tokens() == 20


def test_dtype_is_honoured(folders: dict[str, Path]) -> None:
    model = TransformersModel(folders["gpt2"], dtype="bfloat16")
    model.open(1)
    assert model.forward(torch.tensor([1]), [Segment(1, 1)]).logits.dtype == torch.bfloat16


# --- refusals ---


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def test_encoders_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "bert")
    with pytest.raises(UnsupportedModelError, match="'bert' is encoder-only"):
        TransformersModel(folder)


def test_an_encoder_in_decoders_clothing_is_found_out(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = BertLMHeadModel(BertConfig(**shape, is_decoder=False))
    randomise(encoder)
    encoder.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="reads later tokens"):
        TransformersModel(tmp_path)


@pytest.mark.parametrize("model_type", ["clip", "vits", "wav2vec2"])
def test_models_without_a_causal_head_are_refused_by_name(tmp_path: Path, folders: dict[str, Path], model_type: str) -> None:
    (tmp_path / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=model_type):
        TransformersModel(tmp_path)


def test_code_from_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "modeling_x.py").write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}))
    with pytest.raises(UnsupportedModelError, match=r"'novel' is unknown .*auto_map.* never run"):
        TransformersModel(tmp_path)
    assert not ran.exists()


def test_pickles_and_broken_files_are_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only as pickle"):
        TransformersModel(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        TransformersModel(tmp_path)


def test_a_missing_tensor_is_named_not_made_up(tmp_path: Path, folders: dict[str, Path]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folders["gpt2"] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"tensor .*h\.1\.mlp\.c_fc\.weight is missing"):
        TransformersModel(tmp_path)
