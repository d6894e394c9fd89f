"""The forms of other engines: layers counted in two ways, speculators' keys, which drafter runs what."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.errors import CheckpointError, ConfigError, MismatchError, UnsupportedModelError
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import load_head, save_head, save_speculators
from foretoken.heads.config import BlockConfig, EagleConfig
from foretoken.heads.formats.layers import are_default_taps, outputs_to_taps, taps_to_outputs
from foretoken.heads.kind import head_kind
from tests.helpers.stored_heads import HEADS, TARGET, block_config, eagle_config, stored_head


def test_outputs_are_one_below_taps() -> None:
    """Tap 3 is what layer 3 gets, which is what layer 2 gave."""
    assert taps_to_outputs((1, 3, 6)) == [0, 2, 5]
    assert outputs_to_taps((0, 2, 5)) == (1, 3, 6)
    assert taps_to_outputs((0, 2)) == [-1, 1]  # the embedding is no layer's output


def test_a_head_that_reads_the_embedding_is_kept(tmp_path: Path) -> None:
    """Other engines cannot name it; `foretoken export` refuses it."""
    raw = written(tmp_path / "eagle", eagle_config(taps=(0, 3, 8)))
    assert "eagle_config" not in raw
    for name, config in (("eagle", eagle_config(taps=(0, 3, 8))), ("block", block_config(taps=(0, 3)))):
        written(tmp_path / name, config)
        assert load_head(tmp_path / name, TARGET).config == config


def test_default_taps() -> None:
    assert are_default_taps((2, 4, 5), 8)
    assert are_default_taps((2, 16, 29), 32)
    assert not are_default_taps((1, 15, 28), 32)  # the same layers, counted as outputs
    assert not are_default_taps((2, 2, 2), 5)


def written(folder: Path, config: EagleConfig | BlockConfig) -> dict[str, Any]:
    save_head(stored_head(config), folder, TARGET)
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def rewrite(folder: Path, raw: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_head(folder, TARGET).config


def test_default_layers_are_not_named(tmp_path: Path) -> None:
    """Only the default means the same to every engine."""
    raw = written(tmp_path, eagle_config())
    assert "eagle_config" not in raw
    assert "eagle_aux_hidden_state_layer_ids" not in raw


def test_other_layers_are_named_in_both_ways(tmp_path: Path) -> None:
    """vLLM and llama.cpp read the top level (enter), SGLang `eagle_config` (output)."""
    raw = written(tmp_path, eagle_config(taps=(1, 3, 6)))
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert raw["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    alone = {key: value for key, value in raw.items() if key != "eagle_aux_hidden_state_layer_ids"}
    assert rewrite(tmp_path, alone).taps == (1, 3, 6)
    top = {key: value for key, value in raw.items() if key != "eagle_config"}
    assert rewrite(tmp_path, top).taps == (1, 3, 6)
    assert rewrite(tmp_path, raw | {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}).taps == (2, 3, 6)


def test_eagle_heads_of_deepspec_name_outputs(tmp_path: Path) -> None:
    """`target_layer_ids` at the top level, with layers as in Qwen3 and no vocabulary of their own."""
    layer = replace(eagle_config().layer, model_type="qwen3", qk_norm=True)
    config = eagle_config(layer=layer, taps=(2, 3, 5, 6, 7), has_own_output=True)
    raw = written(tmp_path, config) | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 2, 4, 5, 6]}
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"):
        del raw[key]
    assert rewrite(tmp_path, raw) == config


def test_layers_of_a_block_drafter_are_outputs(tmp_path: Path) -> None:
    raw = written(tmp_path, block_config(taps=(1, 4, 7)))
    assert raw["dflash_config"]["target_layer_ids"] == [0, 3, 6]


def test_a_norm_before_fc_is_named_twice(tmp_path: Path) -> None:
    """llama.cpp reads the top level alone, TensorRT-LLM `eagle_config` alone."""
    raw = written(tmp_path, eagle_config(norm_before_fc=True))
    assert raw["norm_before_fc"] is raw["eagle_config"]["norm_before_fc"] is True
    del raw["norm_before_fc"]
    assert rewrite(tmp_path, raw).norm_before_fc


def test_dflash_and_dspark_differ_in_what_a_missing_key_means(tmp_path: Path) -> None:
    for name, config in (
        ("dspark", block_config()),
        ("dflash", block_config(markov_rank=0, is_causal=False, predicts_at_anchor=False)),
    ):
        raw = written(tmp_path / name, config)
        del raw["dflash_config"]["sample_from_anchor"]
        assert rewrite(tmp_path / name, raw).predicts_at_anchor == (name == "dspark")


def test_keys_of_dspark_may_stand_in_dflash_config(tmp_path: Path) -> None:
    """So do SpecForge's files."""
    raw = written(tmp_path, block_config())
    for key in ("markov_rank", "markov_head_type", "block_size"):
        raw["dflash_config"][key] = raw.pop(key)
    assert rewrite(tmp_path, raw) == block_config()


def test_a_block_drafter_of_another_target(tmp_path: Path) -> None:
    raw = written(tmp_path, block_config())
    (tmp_path / "target.json").unlink()
    with pytest.raises(MismatchError, match="36 layers"):
        rewrite(tmp_path, raw | {"num_target_layers": 36})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"markov_head_type": "gated"}, "gated"),
        ({"use_swa": True}, "use_swa"),
    ],
)
def test_variants_of_dspark_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    raw = written(tmp_path, block_config())
    with pytest.raises(UnsupportedModelError, match=words):
        rewrite(tmp_path, raw | keys)


@pytest.mark.parametrize(
    "config",
    [
        eagle_config(draft_vocab_size=30),
        eagle_config(taps=(1, 3, 6), norm_before_residual=True, norm_output=True),
        block_config(),
        block_config(markov_rank=0, is_causal=False, predicts_at_anchor=False),
    ],
    ids=["eagle3", "eagle3-norms", "dspark", "dflash"],
)
def test_speculators_round_trip(tmp_path: Path, config: EagleConfig | BlockConfig) -> None:
    head = stored_head(config)
    save_speculators(head, tmp_path, TARGET, 3, "org/target", "LlamaForCausalLM")
    raw = json.loads((tmp_path / "config.json").read_text())
    # What vLLM does not start without.
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert raw["speculators_model_type"] == raw["speculators_config"]["algorithm"]
    assert isinstance(raw["transformer_layer_config"], dict)
    assert not any(name.startswith("midlayer") for name in load_file(tmp_path / "model.safetensors"))
    again = load_head(tmp_path, TARGET)
    assert head_kind(tmp_path) == head.name
    assert again.config == config
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items())


def test_speculators_writes_every_flag_and_reads_a_missing_one_as_true(tmp_path: Path) -> None:
    save_speculators(stored_head("eagle3"), tmp_path, TARGET, 3, "org/target", "LlamaForCausalLM")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert [raw[flag] for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [False] * 4
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    del raw["norm_before_residual"]
    assert rewrite(tmp_path, raw).norm_before_residual is True


def test_speculators_has_no_words_for_medusa_and_eagle_1(tmp_path: Path) -> None:
    for name in ("medusa", "eagle1"):
        with pytest.raises(ConfigError, match="EAGLE-3 and block"):
            save_speculators(stored_head(name), tmp_path, TARGET, 3, "org/target", "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle"),
        ({"medusa_num_heads": 4}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "block"),
        ({"architectures": ["Qwen3DSparkModel"]}, "block"),
        ({"speculators_model_type": "dspark"}, "block"),
    ],
)
def test_kind_of_a_head(tmp_path: Path, raw: dict[str, Any], expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert head_kind(tmp_path) == expected


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model_type": "mlp_speculator"}, "MLP speculator"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "MLP speculator"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"speculators_model_type": "dflash2"}, "DFlash2"),
        ({"architectures": ["DominoDraftModel"]}, "Domino"),
        ({"speculators_model_type": "other"}, "other"),
        ({"hydra_num_heads": 4, "hydra_num_layers": 1, "hydra_head_arch": "mlp"}, "Hydra"),
    ],
)
def test_kinds_that_are_not_run_are_refused_by_name(tmp_path: Path, raw: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=words):
        head_kind(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_heads_that_are_pickles_are_refused_as_such(tmp_path: Path, file: str) -> None:
    """SafeAILab's EAGLE-1 heads, whose kind their tensors alone tell, and FasterDecoding's Medusa heads."""
    medusa = {"medusa_num_heads": 4, "medusa_num_layers": 1}
    raw = medusa if file.endswith(".pt") else {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"only as pickle \({file}\).*of a head, safetensors\.torch\.save_file"):
        _kind_and_head(tmp_path)


def _kind_and_head(folder: Path) -> Head:
    head_kind(folder)
    return load_head(folder, TARGET)


def test_a_confidence_that_reads_the_token_before_is_left_out(tmp_path: Path) -> None:
    """As DeepSpec, SpecForge and speculators train it unless told otherwise: the head drafts the same without it."""
    head = stored_head("dspark")
    raw = written(tmp_path, block_config(has_confidence=True))
    path = tmp_path / "model.safetensors"
    wide = {"confidence_head.proj.weight": torch.zeros(1, 48 + 8), "confidence_head.proj.bias": torch.zeros(1)}
    save_file(load_file(path) | wide, path)
    assert rewrite(tmp_path, raw | {"confidence_head_with_markov": True}) == block_config()
    own, read = head.state_dict(), load_head(tmp_path, TARGET).state_dict()
    assert read.keys() == own.keys() - wide.keys()
    assert all(torch.equal(own[name], value) for name, value in read.items())


def test_the_bias_of_a_confidence_was_left_out_by_earlier_versions(tmp_path: Path) -> None:
    """Other engines make one in any case, and leave a missing one as memory was."""
    written(tmp_path, block_config(has_confidence=True))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert tensors.pop("confidence_head.proj.bias").shape == (1,)
    save_file(tensors, path)
    assert load_head(tmp_path, TARGET).state_dict()["confidence_head.proj.bias"].tolist() == [0.0]


def test_ends_of_text_are_the_targets(tmp_path: Path) -> None:
    """SpecForge's configurations for DeepSeek-V3 and Ling name tokens of another model, behind the vocabulary."""
    raw = written(tmp_path, eagle_config())
    assert rewrite(tmp_path, raw | {"bos_token_id": 97, "eos_token_id": [151645]}) == eagle_config()


@pytest.mark.parametrize("config", [eagle_config(), block_config()], ids=["eagle3", "dspark"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "num_hidden_layers": 2}, "sliding"),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "num_hidden_layers": 2,
            },
            "sliding",
        ),
    ],
)
def test_layers_that_a_head_does_not_compute_are_refused(
    tmp_path: Path, config: EagleConfig | BlockConfig, keys: dict[str, Any], words: str
) -> None:
    """Llama's readers skip windows, and gates are SiLU's: both were run as something else."""
    raw = written(tmp_path, config)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=words):
        rewrite(tmp_path, raw | keys)


@pytest.mark.parametrize("name", ["eagle1-qwen2", "eagle3-qwen3"])
def test_the_family_of_layers_is_told_by_their_tensors(tmp_path: Path, name: str) -> None:
    """SafeAILab's heads of Qwen2 say `qkv_bias` and llama; other files name the family or nothing."""
    config = HEADS[name]
    assert isinstance(config, EagleConfig)
    raw = written(tmp_path, config)
    assert rewrite(tmp_path, raw | {"model_type": "llama", "qkv_bias": True}) == config
    del raw["model_type"]
    assert rewrite(tmp_path, raw) == config


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_block_drafters_that_speculators_saved_hold_copies_of_the_targets_matrices(tmp_path: Path, name: str) -> None:
    head = stored_head(name)
    save_speculators(head, tmp_path, TARGET, 3, "org/target", "LlamaForCausalLM")
    path = tmp_path / "model.safetensors"
    copies = {one: torch.zeros(97, 48) for one in ("embed_tokens.weight", "lm_head.weight")}
    save_file(load_file(path) | copies, path)
    assert load_head(tmp_path, TARGET).config == head.config
    save_file(load_file(path) | {"lm_head.weight": torch.zeros(97, 32)}, path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_head(tmp_path, TARGET)


def test_medusa_heads_that_say_nothing_of_their_target(tmp_path: Path) -> None:
    """FasterDecoding's and TGI's `config.json` have neither a hidden size nor a vocabulary."""
    head = stored_head("medusa")
    save_head(head, tmp_path, TARGET)
    (tmp_path / "config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/target", "medusa_num_heads": 4, "medusa_num_layers": 1})
    )
    assert load_head(tmp_path, TARGET).config == head.config


def test_medusa_heads_as_they_lie_in_a_checkpoint_with_their_target(tmp_path: Path) -> None:
    head = stored_head("medusa")
    save_head(head, tmp_path, TARGET)
    path = tmp_path / "medusa_lm_head.safetensors"
    save_file({f"medusa_head.{name}": value for name, value in load_file(path).items()}, path)
    loaded = load_head(tmp_path, TARGET)
    assert loaded.config == head.config
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_medusa_heads_of_which_config_json_names_too_few(tmp_path: Path) -> None:
    """As FasterDecoding's v1.3 files do."""
    save_head(stored_head("medusa"), tmp_path, TARGET)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    with pytest.raises(CheckpointError, match="medusa_num_heads=2 must be 4, as many heads as the file holds"):
        load_head(tmp_path, TARGET)


def test_the_remedy_for_a_pickled_head_makes_one_that_is_read(tmp_path: Path) -> None:
    head = stored_head("medusa")
    save_head(head, tmp_path, TARGET)
    torch.save(load_file(tmp_path / "medusa_lm_head.safetensors"), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only as pickle") as refused:
        load_head(tmp_path, TARGET)
    remedy = re.search(r"save_file\(torch\.load\('([^']+)', weights_only=True\), '([^']+)'\)", str(refused.value))
    assert remedy is not None
    save_file(torch.load(tmp_path / remedy[1], weights_only=True), tmp_path / remedy[2])
    assert load_head(tmp_path, TARGET).config == head.config


def test_kind_by_the_tensors(tmp_path: Path) -> None:
    """Published EAGLE-1 heads call themselves LlamaForCausalLM."""
    raw = written(tmp_path, eagle_config(1)) | {"architectures": ["LlamaForCausalLM"]}
    rewrite(tmp_path, raw)
    assert head_kind(tmp_path) == "eagle"
    save_file({"speculator.emb.0.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="MLP speculator"):
        head_kind(tmp_path)
    save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no head that is known"):
        head_kind(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        head_kind(tmp_path)
