"""What transformers would run wrongly, or not at all, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.hf import TransformersModel
from tests.helpers.checkpoints import randomise, tiny_checkpoint
from tests.model.test_hf import edit_config, folders, opened, written

__all__ = ["folders"]  # fixtures


def test_encoders_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "bert")
    with pytest.raises(UnsupportedModelError, match="'bert' is encoder-only"):
        TransformersModel(folder)


def test_an_encoder_in_decoders_clothing_is_found_out(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    encoder = BertLMHeadModel(BertConfig(**shape, is_decoder=False))
    randomise(encoder)
    encoder.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="reads later tokens"):
        TransformersModel(tmp_path)


@pytest.mark.parametrize("model_type", ["clip", "vits", "wav2vec2"])
def test_models_without_a_causal_head_are_refused_by_name(
    tmp_path: Path, folders: dict[str, Path], model_type: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=model_type):
        TransformersModel(tmp_path)


def test_code_from_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "modeling_x.py").write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    )
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


def test_a_decoder_of_an_encoder_family_is_tried_out(tmp_path: Path) -> None:
    """BERT trained as a decoder is one; its classes are not called so."""
    model = opened(written(tmp_path, "bert"))
    assert model.max_context_tokens == 48


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("xlm", "gives a text other logits when more text follows it"),
        ("big_bird", "turns from attention_type='block_sparse' to 'original_full'"),
        ("reformer", "hashes at random which tokens attend to each other"),
        ("xlnet", "reads later tokens too"),
    ],
)
def test_e4_families_without_one_law_for_a_text_are_refused_by_name(tmp_path: Path, family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model_type='{family}' {reason}"):
        opened(written(tmp_path, family))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folders["gpt2"] / "model.safetensors").read_bytes())
    edit_config(tmp_path, n_positions=64)
    with pytest.raises(
        CheckpointError, match=r"tensor .*wpe.weight .* has shape \[128, 32\]; config.json asks for \[64, 32\]"
    ):
        TransformersModel(tmp_path)


def test_a_tensor_that_a_layer_has_no_place_for_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    tensors = load_file(folders["gpt2"] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    for name in (
        "transformer.h.1.attn.q_norm.weight",
        "transformer.h.0.mlp.c_fc.weight_scale",
        "h.1.attn.q_norm.weight",
    ):
        save_file({**tensors, name: torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"tensor {name} .* belongs to .* no place for it"):
            TransformersModel(tmp_path)
    for name in (
        "transformer.h.0.attn.bias",
        "transformer.h.2.attn.q_norm.weight",
        "vision.encoder.layers.0.weight",
        "score.weight",
    ):
        save_file({**tensors, name: torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        TransformersModel(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 10_000.0}}, "rope_type='foo' has no native"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quant_method='hqq'\): gptq, awq, .* are read here"),
    ],
)
def test_what_sent_a_native_family_to_transformers_is_named(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    """Their own error for the first is `'foo'`."""
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_config(folder, **change)
    with pytest.raises(CheckpointError, match=f"transformers cannot load the 'llama' model .*own decoder.*{reason}"):
        opened(folder)


def test_a_missing_tensor_is_named_not_made_up(tmp_path: Path, folders: dict[str, Path]) -> None:
    tensors = load_file(folders["gpt2"] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"tensor .*h\.1\.mlp\.c_fc\.weight is missing"):
        TransformersModel(tmp_path)
