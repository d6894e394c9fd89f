"""Directories of heads: written and read bit for bit; everything that is wrong with one is named once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError, MismatchError, ModelError, UnsupportedModelError
from foretoken.heads.checkpoint import load_head, save_head
from foretoken.heads.kind import head_kind
from foretoken.model.weights import EMBEDDING, WEIGHTS
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.stored_heads import CUT, HEADS, TARGET, eagle_config, stored_head


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("name", HEADS)
def test_round_trip_bit_for_bit(tmp_path: Path, name: str) -> None:
    head = stored_head(name)
    save_head(head, tmp_path / "head", TARGET)
    assert head_kind(tmp_path / "head") == head.name
    again = load_head(tmp_path / "head", TARGET)
    assert type(again) is type(head)
    assert again.config == head.config
    assert torch.equal(again.vocabulary.ids, head.vocabulary.ids)
    assert same(again.state_dict(), head.state_dict())
    save_head(again, tmp_path / "again", TARGET)
    for path in (tmp_path / "head").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize("name", HEADS)
def test_json_holds_no_null_and_both_spellings_of_the_rope(tmp_path: Path, name: str) -> None:
    save_head(stored_head(name), tmp_path, TARGET)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "null" not in json.dumps(raw)
    if "hidden_act" in raw:
        assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 500_000.0
        assert raw["rope_parameters"] == raw["rope_scaling"] | {"rope_theta": 500_000.0}
        assert raw["tie_word_embeddings"] is False
        assert raw["target_hidden_size"] == TARGET.hidden_size
        assert (raw["hidden_size"] == TARGET.hidden_size) == (name != "eagle3-another-width")


@pytest.fixture
def portable(tmp_path: Path) -> Path:
    """A portable EAGLE-3 directory."""
    save_head(stored_head("eagle3"), tmp_path / "head", TARGET)
    return tmp_path / "head"


def test_the_portable_directory(portable: Path) -> None:
    """Every key of the portable form, and the tables of the vocabulary."""
    raw = json.loads((portable / "config.json").read_text())
    assert raw == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 48,
        "target_hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 500_000.0,
        "rope_scaling": raw["rope_scaling"],
        "rope_parameters": raw["rope_scaling"] | {"rope_theta": 500_000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "vocab_size": 97,
        "draft_vocab_size": CUT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    tensors = load_file(portable / WEIGHTS)
    ids = torch.arange(CUT) + tensors["d2t"]
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert {name for name in tensors if name.startswith("midlayer.")} == {
        f"midlayer.{part}.weight"
        for part in (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
            *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
        )
    }


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def edit(folder: Path, change: Change) -> None:
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)
    change(raw, tensors)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / WEIGHTS)


def _set(name: str, value: Tensor) -> Change:
    return lambda _raw, tensors: tensors.update({name: value})


def _drop(name: str) -> Change:
    return lambda _raw, tensors: tensors.__delitem__(name)


MUTATIONS: dict[str, tuple[Change, type[ModelError], str]] = {
    "no output matrix": (_drop("lm_head.weight"), CheckpointError, "lm_head.weight is missing"),
    "no d2t": (_drop("d2t"), CheckpointError, "d2t is missing"),
    "no norm": (_drop("midlayer.hidden_norm.weight"), CheckpointError, "midlayer.hidden_norm.weight is missing"),
    "a tensor too many": (_set("lm_head.bias", torch.zeros(CUT)), CheckpointError, "lm_head.bias has no place"),
    "two of three states": (_set("fc.weight", torch.zeros(48, 96)), CheckpointError, r"fc.weight has shape \[48, 96\]"),
    "an attention of plain width": (
        _set("midlayer.self_attn.q_proj.weight", torch.zeros(64, 48)),
        CheckpointError,
        r"config.json asks for \[64, 96\]",
    ),
    "numbers instead of offsets": (
        lambda _raw, tensors: tensors.update(d2t=tensors["d2t"] + 60),
        CheckpointError,
        "d2t holds offsets",
    ),
    "d2t of floats": (lambda _raw, tensors: tensors.update(d2t=tensors["d2t"].float()), CheckpointError, "I64"),
    "one token twice": (
        lambda _raw, tensors: tensors["d2t"][1:2].sub_(tensors["d2t"][1] - tensors["d2t"][0] + 1),
        CheckpointError,
        "each once",
    ),
    "another mask": (
        lambda _raw, tensors: tensors.update(t2d=~tensors["t2d"]),
        CheckpointError,
        "t2d and d2t",
    ),
    "a flag without its tensor": (
        lambda raw, _tensors: raw.update(norm_before_fc=True),
        CheckpointError,
        "input_norm.weight is missing",
    ),
    "one layer more": (
        lambda raw, _tensors: raw.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        CheckpointError,
        "fc.weight has shape",
    ),
    "more layers than tensors": (
        lambda raw, _tensors: raw.update(num_hidden_layers=100_000),
        CheckpointError,
        "100,000 layers, the file holds",
    ),
    "a matrix that no memory holds": (
        lambda raw, _tensors: raw.update(hidden_size=2**31 - 1, intermediate_size=2**31 - 1),
        CheckpointError,
        "no memory holds",
    ),
    "a text as a size": (lambda raw, _tensors: raw.update(hidden_size="48"), CheckpointError, "hidden_size='48'"),
    "another width": (lambda raw, _tensors: raw.update(target_hidden_size=64), MismatchError, "hidden_size=64"),
    "another vocabulary": (lambda raw, _tensors: raw.update(vocab_size=98), MismatchError, "vocab_size=98"),
    "a layer beyond the target": (
        lambda raw, _tensors: raw.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        MismatchError,
        "layer 9",
    ),
    "layers in disorder": (
        lambda raw, _tensors: raw.update(eagle_aux_hidden_state_layer_ids=[4, 2, 6]),
        CheckpointError,
        "ascending",
    ),
    "a parallel variant": (_set("mask_hidden", torch.zeros(1, 144)), UnsupportedModelError, "P-EAGLE"),
    "another architecture": (
        lambda raw, _tensors: raw.update(architectures=["DFlash2DraftModel"]),
        UnsupportedModelError,
        "DFlash2",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_reported_once(portable: Path, name: str) -> None:
    change, kind, words = MUTATIONS[name]
    edit(portable, change)
    with pytest.raises(kind, match=words) as caught:
        load_head(portable, TARGET)
    assert "; tensor" not in str(caught.value), "one mistake, one problem"


def test_several_mistakes_are_all_named(portable: Path) -> None:
    def change(_raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors |= {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}
        del tensors["norm.weight"]

    edit(portable, change)
    with pytest.raises(CheckpointError, match=r"tensor norm.weight is missing; tensor a has .*; and 1 more"):
        load_head(portable, TARGET)


@pytest.mark.parametrize("size", [4, 100, 3000])
def test_a_truncated_file_is_named(portable: Path, size: int) -> None:
    data = (portable / WEIGHTS).read_bytes()
    (portable / WEIGHTS).write_bytes(data[:size])
    with pytest.raises(CheckpointError, match=r"truncated or corrupt"):
        load_head(portable, TARGET)


def test_a_pickle_is_not_read(portable: Path) -> None:
    (portable / WEIGHTS).rename(portable / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load_head(portable, TARGET)


def test_another_target_is_refused(portable: Path, tmp_path: Path) -> None:
    for changes, words in (
        ({"num_layers": 12}, "trained on a target of 8 layers, this one has 12"),
        ({"hidden_size": 64}, "hidden_size=48"),
        ({"vocab_size": 120}, "vocab_size=97"),
    ):
        with pytest.raises(MismatchError, match=words):
            load_head(portable, replace(TARGET, **changes))  # type: ignore[arg-type]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    own, other = tiny_tokenizer(tmp_path / "own"), tiny_tokenizer(tmp_path / "other", texts=("other words " * 30,))
    save_head(stored_head("medusa"), tmp_path / "head", TARGET, target_folder=own)
    load_head(tmp_path / "head", TARGET, target_folder=own)
    load_head(tmp_path / "head", TARGET)
    settings = json.loads((own / "tokenizer.json").read_text())
    (own / "tokenizer.json").write_text(json.dumps(settings | {"truncation": {"max_length": 5}}))
    load_head(tmp_path / "head", TARGET, target_folder=own)  # a setting of length is no other tokenizer
    with pytest.raises(MismatchError, match="another tokenizer"):
        load_head(tmp_path / "head", TARGET, target_folder=other)


def test_a_context_that_was_not_trained_is_covered(portable: Path) -> None:
    """Published heads name the length of their training; positions beyond it have a rotation all the same."""
    edit(portable, lambda raw, _tensors: raw.update(max_position_embeddings=64))
    config = load_head(portable, TARGET).config
    assert config.layer.max_context_tokens == TARGET.max_context_tokens  # type: ignore[union-attr]


def test_the_context_of_a_head_is_not_the_length_its_rope_was_trained_for(portable: Path) -> None:
    """Llama 3's scaling keeps the length that its own keys name."""
    edit(portable, lambda raw, _tensors: raw.update(max_position_embeddings=64))
    assert load_head(portable, TARGET).config.layer.rope == TARGET.rope  # type: ignore[union-attr]


def test_a_shallow_target_has_no_default_layers(portable: Path) -> None:
    (portable / "target.json").unlink()
    with pytest.raises(ConfigError, match="taps"):
        load_head(portable, replace(TARGET, num_layers=5))


def test_a_dtype_may_be_chosen(portable: Path) -> None:
    head = load_head(portable, TARGET, dtype="float32")
    assert {value.dtype for value in head.state_dict().values()} == {torch.float32}


def test_the_other_spelling_of_the_layer(portable: Path) -> None:
    before = load_head(portable, TARGET)

    def rename(_raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)

    edit(portable, rename)
    assert same(load_head(portable, TARGET).state_dict(), before.state_dict())


def test_a_head_may_carry_a_copy_of_the_embedding(portable: Path) -> None:
    edit(portable, _set("embed_tokens.weight", torch.zeros(97, 48)))
    load_head(portable, TARGET)
    edit(portable, _set("embed_tokens.weight", torch.zeros(97, 32)))
    with pytest.raises(CheckpointError, match="embedding of its own"):
        load_head(portable, TARGET)


def test_an_embedding_that_is_not_the_targets_is_used(portable: Path, tmp_path: Path) -> None:
    """A copy, in whatever dtype, stays out of memory; without the target's files nothing can be compared."""
    table = torch.randn(97, 48, generator=torch.Generator().manual_seed(3))
    target = tmp_path / "target"
    target.mkdir()
    save_file({EMBEDDING: table}, target / WEIGHTS)
    for copied in (table, table.bfloat16(), table.half()):
        edit(portable, _set("embed_tokens.weight", copied))
        assert "embed_tokens.weight" not in load_head(portable, TARGET, target_folder=target).state_dict()
    other = table.roll(1, 0).bfloat16()
    edit(portable, _set("embed_tokens.weight", other))
    head = load_head(portable, TARGET, target_folder=target)
    assert torch.equal(head.state_dict()["embed_tokens.weight"], other)
    save_head(head, tmp_path / "again", TARGET)
    again = load_head(tmp_path / "again", TARGET, target_folder=target)
    assert again.config == head.config
    assert same(again.state_dict(), head.state_dict())


def test_a_block_drafter_with_another_embedding_is_refused(tmp_path: Path) -> None:
    table = torch.randn(97, 48, generator=torch.Generator().manual_seed(3))
    save_head(stored_head("dflash"), tmp_path / "head", TARGET)
    (tmp_path / "target").mkdir()
    save_file({EMBEDDING: table}, tmp_path / "target" / WEIGHTS)
    edit(tmp_path / "head", _set("embed_tokens.weight", table))
    load_head(tmp_path / "head", TARGET, target_folder=tmp_path / "target")
    edit(tmp_path / "head", _set("embed_tokens.weight", -table))
    with pytest.raises(CheckpointError, match=r"not the embedding of .*the target that the head was trained for"):
        load_head(tmp_path / "head", TARGET, target_folder=tmp_path / "target")


def test_native_names_of_medusa(tmp_path: Path) -> None:
    head = stored_head("medusa-2-blocks")
    save_head(head, tmp_path, TARGET)
    path = tmp_path / "medusa_lm_head.safetensors"
    native = {}
    for name, value in load_file(path).items():
        number, place, *rest = name.split(".")
        native[f"blocks.{number}.layers.{place}.{rest[-1]}" if place != "2" else f"lm_heads.{number}.weight"] = value
    save_file(native, tmp_path / WEIGHTS)
    path.unlink()
    assert same(load_head(tmp_path, TARGET).state_dict(), head.state_dict())


def test_medusa_keys_that_engines_trip_over(tmp_path: Path) -> None:
    save_head(stored_head("medusa"), tmp_path, TARGET, target_name="org/target")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "architectures" not in raw, "TGI would take it for a plain model"
    assert raw["medusa_fc_bias"] is True, "vLLM would drop the biases"
    assert [key for key in raw if "num" in key and "heads" in key] == ["medusa_num_heads"]
    assert raw["base_model_name_or_path"] == "org/target"


def test_a_packed_head_is_not_written(tmp_path: Path) -> None:
    head = stored_head("eagle3")
    head.fc.weight = None  # type: ignore[assignment, union-attr]  # what packing leaves
    with pytest.raises(ModelError, match="without packing"):
        save_head(head, tmp_path, TARGET)


def test_what_was_there_stays_whole_if_writing_fails(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in portable.iterdir()}

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foretoken.heads.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_head(stored_head("eagle3", seed=1), portable, TARGET)
    assert {path.name: path.read_bytes() for path in portable.iterdir()} == before


def test_layers_that_the_form_has_no_words_for(tmp_path: Path) -> None:
    layer = replace(eagle_config().layer, model_type="mistral")
    with pytest.raises(ConfigError, match="llama"):
        save_head(stored_head(eagle_config(layer=layer)), tmp_path, TARGET)
