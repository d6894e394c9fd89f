"""Checkpoints are read with little memory, written whole, and every broken one is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.errors import CheckpointError, InputError, ModelError, StorageError, UnsupportedModelError
from foretoken.heads.kind import head_kind
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.config_json import check_causal, config_from_hf, config_to_hf
from foretoken.model.decoder import Decoder
from foretoken.model.families import NATIVE_MODEL_TYPES
from foretoken.model.footprint import shape_of
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from foretoken.model.rope_json import context_tokens, rope_context_cap
from foretoken.model.saving import hf_state, save_checkpoint
from foretoken.model.weights import Weights
from tests.helpers.checkpoints import VARIANTS, tiny_checkpoint, tiny_tokenizer, token_ids, transformers_logits, variant


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def llama(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    shutil.copytree(made, tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits_of(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return decoder.logits(
            decoder(torch.tensor(ids), torch.arange(len(ids)), PackedAttention(decoder.config, 1, len(ids))).last
        )


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    whole = load_decoder(tiny_checkpoint(tmp_path / "one", "qwen3"))
    folder = tiny_checkpoint(tmp_path / "many", "qwen3", shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    for (name, one), (other_name, other) in zip(hf_state(whole), hf_state(load_decoder(folder)), strict=True):
        assert name == other_name
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_dtype_is_the_checkpoints_or_the_one_asked_for(
    tmp_path: Path, stored: torch.dtype, asked: str | torch.dtype, expected: torch.dtype
) -> None:
    decoder = load_decoder(tiny_checkpoint(tmp_path, "llama", dtype=stored), dtype=asked, pack=False)
    assert {parameter.dtype for parameter in decoder.parameters()} == {expected}
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_dtype_of_a_config_without_one_is_the_stored_one(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    edit_config(folder, dtype=None, torch_dtype=None)
    assert load_decoder(folder, pack=False).norm.weight.dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused(llama: Path) -> None:
    with pytest.raises(InputError, match="choose one of auto, float32"):
        load_decoder(llama, dtype="int8")


@pytest.mark.parametrize("name", VARIANTS)
def test_config_survives_writing_and_reading(tmp_path: Path, name: str) -> None:
    config = read_config(variant(tmp_path, name))
    assert Decoder(config).config.num_parameters == sum(p.numel() for p in Decoder(config).parameters())
    if VARIANTS[name][0] in ("llama", "mistral", "qwen2", "qwen3"):
        assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    else:
        with pytest.raises(UnsupportedModelError, match=f"model_type='{VARIANTS[name][0]}' is not written here"):
            config_to_hf(config)


@pytest.mark.parametrize(
    "name",
    ["llama-biases", "llama-yarn-options", "mistral", "mistral-sliding", "qwen2-layer-types", "qwen3-tied-biases"],
)
def test_a_saved_checkpoint_means_the_same_to_transformers(tmp_path: Path, name: str) -> None:
    folder, ids = variant(tmp_path / "in", name), token_ids(100)
    tiny_tokenizer(folder)
    save_checkpoint(
        load_decoder(folder), read_config(folder), tmp_path / "out", tokenizer_folder=folder, dtype="float32"
    )
    torch.testing.assert_close(
        transformers_logits(tmp_path / "out", ids), transformers_logits(folder, ids), atol=1e-5, rtol=0
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_saving_defaults_to_bfloat16_and_replaces_an_older_sharded_one(tmp_path: Path, llama: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "old", "llama", shard_size="30KB", seed=5)
    save_checkpoint(dict(hf_state(load_decoder(llama))), read_config(llama), folder)
    again = load_decoder(folder, pack=False)
    assert again.norm.weight.dtype == torch.bfloat16
    assert torch.equal(again.embedding.weight, load_decoder(llama).embedding.weight.bfloat16())


def test_saving_where_nothing_can_be_written_is_a_storage_error(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the checkpoint"):
        save_checkpoint(load_decoder(llama), read_config(llama), tmp_path / "file" / "out")


def test_a_packed_decoder_is_not_written(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    decoder = load_decoder(folder, pack=True)
    if decoder.layers[0].qkv_proj.weight is not None:
        pytest.skip("this machine does not pack")
    with pytest.raises(ModelError, match="pack=False"):
        save_checkpoint(decoder, decoder.config, tmp_path / "out")


_PEAK = """
import sys, torch
from pathlib import Path
from foretoken.model.loader import load_decoder

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_num_threads(1)
load_decoder(Path(sys.argv[1]))  # libraries and kernels are in memory now
before = peak()
load_decoder(Path(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_is_about_one_copy(tmp_path: Path) -> None:
    small = tiny_checkpoint(tmp_path / "small", "llama", dtype=torch.bfloat16)
    sizes = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "head_dim": 64}
    large = tiny_checkpoint(tmp_path / "large", "llama", dtype=torch.bfloat16, **sizes)
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(small), str(large)], capture_output=True, text=True, check=True
    )
    weights = (large / "model.safetensors").stat().st_size
    assert weights > 150e6
    assert 0.5 * weights < int(run.stdout.split()[-1]) < 1.3 * weights


def tied_with_head(
    folder: Path, family: str, equal: bool, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A tied checkpoint whose file has a head too, the embedding's or another."""
    tiny_checkpoint(folder, family, tie_word_embeddings=True, dtype=dtype, **overrides)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.clone() if equal else table.flip(0).contiguous()

    edit_tensors(folder, add)
    return folder


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_e1_a_head_of_its_own_beside_tied_embeddings_is_used(tmp_path: Path, family: str) -> None:
    folder, ids = tied_with_head(tmp_path / "in", family, equal=False), token_ids(30)
    expected = transformers_logits(folder, ids)
    decoder = load_decoder(folder)
    torch.testing.assert_close(logits_of(decoder, ids), expected, atol=1e-4, rtol=0)
    assert not decoder.config.tie_embeddings
    assert not read_config(folder).tie_embeddings
    assert decoder.config.num_parameters == sum(parameter.numel() for parameter in decoder.parameters())
    save_checkpoint(decoder, decoder.config, tmp_path / "out", dtype="float32")
    torch.testing.assert_close(transformers_logits(tmp_path / "out", ids), expected, atol=1e-5, rtol=0)


def test_e1_a_head_that_equals_the_embedding_takes_no_memory(tmp_path: Path) -> None:
    folder = tied_with_head(tmp_path, "llama", equal=True)
    decoder = load_decoder(folder)
    assert decoder.lm_head.weight is decoder.embedding.weight
    assert decoder.config.tie_embeddings
    assert decoder.config.num_parameters == sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize("name", ["qwen2-tied", "gemma2", "qwen3-moe"])
def test_a_tied_pair_may_go_by_the_name_of_the_head(tmp_path: Path, name: str) -> None:
    """safetensors' `save_model` keeps one of the names of a shared tensor, and transformers reads it."""
    folder, ids = variant(tmp_path, name, tie_word_embeddings=True), token_ids(20)
    expected = transformers_logits(folder, ids)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    decoder = load_decoder(folder)
    assert decoder.lm_head.weight is decoder.embedding.weight
    assert decoder.embedding.weight is not None
    assert torch.equal(decoder.embedding.weight, state["lm_head.weight"])
    with torch.no_grad():
        found = decoder(torch.tensor(ids), torch.arange(20), PackedAttention(decoder.config, 1, 20)).last
        torch.testing.assert_close(decoder.logits(found), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2-options", "qwen3-moe"])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_a_base_model_saved_alone_is_read(tmp_path: Path, name: str, shard_size: str) -> None:
    """transformers' `AutoModel` writes names without "model.", and its AutoModelForCausalLM reads them."""
    from transformers import AutoModel

    folder = variant(tmp_path / "whole", name, tie_word_embeddings=True)
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "base", max_shard_size=shard_size)
    names = {name for file in (tmp_path / "base").glob("*.safetensors") for name in load_file(file)}
    assert not any(name.startswith("model.") for name in names)
    text = token_ids(9)
    expected = transformers_logits(tmp_path / "base", text)
    assert torch.equal(expected, transformers_logits(folder, text))
    assert torch.equal(logits_of(load_decoder(tmp_path / "base"), text), logits_of(load_decoder(folder), text))


def test_a_base_model_without_an_output_matrix_is_refused_with_a_remedy(tmp_path: Path, llama: Path) -> None:
    from transformers import AutoModel

    AutoModel.from_pretrained(llama).save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing .* base model .* AutoModelForCausalLM"):
        load_decoder(tmp_path / "base")


def test_e1_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = tied_with_head(tmp_path, "llama", equal=True)
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(98, 48)}))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight .* has shape \[98, 48\]; config.json asks for \[97, 48\]"
    ):
        load_decoder(folder)


@pytest.mark.parametrize("options", [{"numerics": "strict"}, {"weights": "int8"}, {"weights": "int4"}, {}])
def test_e1_the_same_head_in_every_form_of_the_model(tmp_path: Path, options: dict[str, str]) -> None:
    """Strict, quantised, early exits and the plan: as for a checkpoint that says in config.json that its head is its
    own.
    """
    named = tied_with_head(tmp_path / "named", "llama", equal=False, hidden_size=64)
    shutil.copytree(named, tmp_path / "plain")
    edit_config(tmp_path / "plain", tie_word_embeddings=False)
    answers = []
    spec = SpecConfig("early_exit", exit_layer=1, num_draft=3) if options.get("weights") is None else SpecConfig()
    for folder in (named, tmp_path / "plain"):
        model = open_model(folder, "float32", cache_tokens=64, **options)
        shape = shape_of(folder, "m", "float32", weights=options.get("weights", "auto"))
        assert isinstance(model, PagedModel)
        answers.append(
            (
                logits_of(model.decoder, token_ids(20)).tolist(),
                model.weight_bytes,
                model.num_parameters,
                replace(shape, name=""),
            )
        )
        if not options:
            with LLM(folder, spec, dtype="float32", cache_tokens=256, profile="off") as llm:
                drafted, plain = llm.generate([token_ids(8)] * 2, SamplingParams(max_tokens=8), [spec, SpecConfig()])
                assert drafted.token_ids == plain.token_ids
    assert answers[0] == answers[1]


def test_e2_mistral_with_layer_types_is_written_and_read_again(tmp_path: Path) -> None:
    """transformers runs it as Ministral, which has windows in some layers only."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    folder, ids = tiny_checkpoint(tmp_path / "in", "mistral", head_dim=12, sliding_window=6), token_ids(30)
    edit_config(folder, layer_types=kinds)
    config = read_config(folder)
    assert config.sliding_window == (None, 6, None)
    expected = transformers_logits(folder, ids)
    torch.testing.assert_close(logits_of(load_decoder(folder), ids), expected, atol=1e-4, rtol=0)
    save_checkpoint(load_decoder(folder), config, tmp_path / "out", dtype="float32")
    assert read_config(tmp_path / "out") == config
    torch.testing.assert_close(transformers_logits(tmp_path / "out", ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "phi3-options", "glm4-options", "starcoder2", "cohere-qk-norm", "olmo2"]
)
def test_a_decoder_gives_back_the_tensors_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    folder = variant(tmp_path, name)
    stored = load_file(folder / "model.safetensors")
    found = dict(hf_state(load_decoder(folder, pack=False)))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[key], stored[key]) for key in stored)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_never_read(llama: Path, name: str) -> None:
    (llama / "model.safetensors").rename(llama / name)
    with pytest.raises(CheckpointError, match=f"only as pickle \\({name}\\).*convert it to safetensors"):
        load_decoder(llama)


def test_a_folder_without_weights_is_named(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        Weights(llama)


@pytest.mark.parametrize("others", ["model", "config", "nothing"])
def test_an_adapter_is_refused_by_name_beside_whatever_it_lies(tmp_path: Path, others: str) -> None:
    """transformers applies one that lies beside the weights: without it the answers are another model's."""
    folder = tiny_checkpoint(tmp_path, "llama") if others == "model" else tmp_path
    if others == "config":
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    note = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "use_dora": True,
        "modules_to_save": ["lm_head"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(note))
    for read in (open_model, head_kind):
        with pytest.raises(UnsupportedModelError, match=r"adapter .*'LORA'.* 'org/base'.*merge it.*remove adapter_"):
            read(folder)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "'bert' is encoder-only"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is encoder-decoder"),
        ({"model_type": "whisper"}, "speech"),
        ({"model_type": "novel", "is_encoder_decoder": True}, "'novel' is encoder-decoder"),
    ],
)
def test_what_cannot_continue_text_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_causal(raw)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act='relu'"),
        ({"quantization_config": {"quant_method": "quip"}}, UnsupportedModelError, "'quip'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModelError, "longrope"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        ({"hidden_size": "wide"}, CheckpointError, "hidden_size='wide' must be a whole number"),
        ({"num_key_value_heads": 3}, CheckpointError, "not a multiple"),
        ({"model_type": None}, CheckpointError, "model_type"),
    ],
)
def test_a_config_beyond_the_native_decoder_is_refused_by_name(
    llama: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    edit_config(llama, **changes)
    with pytest.raises(kind, match=message):
        read_config(llama)


def test_end_tokens_of_the_generation_config_win(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_config(llama).eos_token_ids == (5, 6)


def test_families_defaults_are_transformers_own() -> None:
    from transformers import AutoConfig

    for family in NATIVE_MODEL_TYPES:
        shape = {
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
        }
        full = AutoConfig.for_model(family, **shape).to_dict() | {"eos_token_id": None, "bos_token_id": None}
        short = config_from_hf(shape | {"model_type": family, "dtype": full["dtype"]})
        long = config_from_hf(full)
        assert short == long, family


@pytest.mark.parametrize(
    ("raw", "cap"),
    [
        ({"max_position_embeddings": 128}, None),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32},
            },
            None,
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 32},
            },
            None,
        ),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 128),
        (
            {
                "max_position_embeddings": 128,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 32},
            },
            32,
        ),
        ({"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_scaling": {"type": "su"}}, 32),
        ({"model_type": "phi3", "max_position_embeddings": 8192, "rope_scaling": {"type": "yarn"}}, 4096),
        ({"max_position_embeddings": 128, "rope_parameters": {"rope_type": "longrope"}}, 128),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}},
            },
            128,
        ),
        ({"max_position_embeddings": 128, "rope_parameters": 5}, None),
    ],
)
def test_e3_scalings_that_switch_cap_the_context(raw: dict[str, Any], cap: int | None) -> None:
    assert rope_context_cap(raw) == cap
    assert context_tokens(raw, 128) == min(cap or 128, 128)


@pytest.mark.parametrize(
    ("scaling", "found"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"full_attention": {"rope_type": "yarn", "factor": 2}, "sliding_attention": {"rope_type": "default"}}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 1e300}, 2**24),
        ({"rope_type": "yarn", "factor": None}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 128),
    ],
)
def test_yarn_stretches_the_context_that_a_file_states(scaling: dict[str, Any], found: int) -> None:
    assert context_tokens({"max_position_embeddings": 128, "rope_scaling": scaling}, 128) == found
