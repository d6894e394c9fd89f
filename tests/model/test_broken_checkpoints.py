"""Files written by somebody else: whatever is in them, they are refused by name before anything is allocated, or they
run.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretoken.model.loader
from foretoken import LLM, SamplingParams
from foretoken.cli.app import run
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, check_links, checkpoint_file, read_json
from foretoken.model.footprint import shape_of
from foretoken.model.loader import load_decoder, read_config, read_raw_config
from foretoken.model.open import native_config, open_model
from foretoken.model.rope import TABLE_BLOCK, RotaryTable
from foretoken.model.weights import INDEX
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.broken_checkpoints import GOOD, make_bases, try_case
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("made") / "llama", "llama", vocab_size=300)
    return tiny_tokenizer(folder)


@pytest.fixture
def llama(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- C9: values ---

_BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (-48, 0, True, "48", 48.0, None, 2**40, [48], float("nan")),
    "num_attention_heads": (0, -1, "4"),
    "num_key_value_heads": (0, -2, False, 2.0),
    "num_hidden_layers": (0, -1, 10**9, "3"),
    "head_dim": (0, -12, 11, "12"),
    "intermediate_size": (0, None, 64.5),
    "vocab_size": (0, -1, "300"),
    "max_position_embeddings": (0, -1, 10**9, 1e9, None, "256"),
    "rms_norm_eps": (-1e-6, float("nan"), float("inf"), "1e-6", True),
    "tie_word_embeddings": ("yes", 1, []),
    "attention_bias": (1, "false"),
    "mlp_bias": (0,),
    "eos_token_id": ("x", -1, 300, [[0]], [0, "x"], 1.0, True, {"id": 0}),
    "bos_token_id": ("x", -1, 300),
    "quantization_config": ("x", 5, ["gptq"]),
    "rope_theta": (0, -1.0, 1, float("nan"), "10000", 1e300),
    "rope_scaling": ("linear", [1], 5),
    "hidden_act": (5, ["silu"], None),
    "architectures": (5, "LlamaForCausalLM", [5]),
    "model_type": (None, 5, ["llama"]),
    "dtype": (5, "float8", "int8", ["float32"]),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in _BAD_VALUES.items() for value in values])
def test_c9_a_value_of_the_wrong_type_or_size_is_named(llama: Path, key: str, value: object) -> None:
    raw = json.loads((llama / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (llama / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(CheckpointError) as caught:
        load_decoder(llama)
    assert "config.json" in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": -2.0}, "factor"),
        ({"rope_type": "dynamic", "factor": float("nan")}, "factor"),
        ({"rope_type": "yarn", "factor": float("inf")}, "factor"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "64"},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": "x"}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": 5}, "rope_type"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_c9_rope_values_are_checked(llama: Path, scaling: dict[str, Any], key: str) -> None:
    edit(llama / "config.json", rope_parameters=scaling)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{key}"):
        native_config(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=3"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' must be a list of strings"),
        ({"layer_types": ["full_attention", 5, None]}, "layer_types=.* must be a list of strings"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types has sliding_attention, but sliding_window is null or use_sliding_window is false",
        ),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0 must be a whole number"),
        ({"use_sliding_window": "yes"}, "use_sliding_window='yes' must be true or false"),
        ({"use_sliding_window": True, "max_window_layers": -1, "layer_types": None}, "max_window_layers=-1 must be"),
    ],
)
def test_c9_windows_that_contradict_each_other_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen2")
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


_BAD_FILES = {
    "deep": b'{"x":' * 3000 + b"0" + b"}" * 3000,
    "not so deep": b'{"x":' * 100 + b"0" + b"}" * 100,
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "a mark in front": b"\xef\xbb\xbf{}",
    "not UTF-8": b'{"x": "\xff\xfe"}',
    "a list": b"[]",
    "a key twice": b'{"x": 1, "x": 2}',
    "a number of 10,000 digits": b'{"x": ' + b"9" * 10_000 + b"}",
    "empty": b"",
    "NUL": b"\0" * 100,
}


@pytest.mark.parametrize("kind", _BAD_FILES)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX]
)
def test_c9_a_broken_file_is_named(llama: Path, name: str, kind: str) -> None:
    (llama / name).write_bytes(_BAD_FILES[kind])
    if name == INDEX:
        (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        LLM(llama, cache_tokens=64)


def test_c9_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 29)  # no space on the disk, half a gigabyte in memory
    with pytest.raises(CheckpointError, match=r"config\.json has 536,870,912 bytes"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "index",
    [{"weight_map": ["a"]}, {"weight_map": {"x": 5}}, {"weight_map": {"x": None}}, {"weight_map": 5}, {"map": {}}],
)
def test_c9_a_weight_map_of_the_wrong_type_is_named(llama: Path, index: dict[str, Any]) -> None:
    (llama / "model.safetensors").unlink()
    (llama / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json.*weight_map"):
        native_config(llama)


def test_c9_end_tokens_of_any_family_are_checked(tmp_path: Path) -> None:
    """The file that takes precedence is named; families that run through transformers are read by the same reader."""
    folder = tiny_checkpoint(tmp_path, "gpt2")
    edit(folder / "generation_config.json", eos_token_id=97)
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: eos_token_id=97 must be a token id below the vocabulary's 97"
    ):
        open_model(folder)
    edit(folder / "generation_config.json", eos_token_id=[5, 96])
    assert open_model(folder).eos_token_ids == (5, 96)


def test_c9_every_way_in_reads_alike(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`LLM`, `plan` and `models` refuse the same folder for the same reason."""
    edit(llama / "config.json", num_hidden_layers=4)
    reason = r"tensor model\.layers\.3\.self_attn\.q_proj\.weight is missing"
    for read in (LLM, native_config, lambda folder: shape_of(folder, "m"), load_decoder):
        with pytest.raises(CheckpointError, match=reason):
            read(llama)
    assert run(["models", str(llama), "--json"]) == 0
    assert (
        "not runnable: tensor model.layers.3"
        in json.loads(capsys.readouterr().out.splitlines()[-1])["models"][0]["runs_on"]
    )
    assert run(["plan", "--target", str(llama), "--memory", "1GiB"]) == 3


def test_fields_name_what_is_missing() -> None:
    fields = Fields({"a": None}, "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json has no 'b'; it must be a whole number from 1 to"):
        fields.whole("b")
    assert fields.whole_or("a", 7) == 7
    assert fields.token_ids("a", 5) == ()


# --- no allocation beyond what the files hold ---


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 99_999},
        {"vocab_size": 10**9},
        {"hidden_size": 2**30, "head_dim": 12},
        {"intermediate_size": 2**31 - 1},
        {"num_attention_heads": 2**30, "head_dim": 12},
    ],
)
def test_c8_sizes_are_compared_with_the_files_before_anything_is_built(
    llama: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a decoder is built")

    monkeypatch.setattr(foretoken.model.loader, "Decoder", build)
    edit(llama / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"has shape|is missing"):
        load_decoder(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 10**9}, "n_layer=1000000000 is more than"),
        ({"vocab_size": 10**9}, r"wte\.weight in .* has shape \[97, 32\]; config\.json asks for \[1000000000, 32\]"),
        ({"n_positions": 10**6}, r"wpe\.weight in .* has shape"),
        ({"n_inner": 10**8}, r"has shape"),
        ({"n_embd": 0}, "transformers cannot load the 'gpt2' model"),
    ],
)
def test_c8_the_same_through_transformers(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    folder = tiny_checkpoint(tmp_path, "gpt2")
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_model(folder)


def test_c8_a_long_context_takes_memory_only_where_it_is_used(llama: Path) -> None:
    edit(llama / "config.json", max_position_embeddings=2**24)
    decoder = load_decoder(llama)
    assert decoder.rotaries[0].cos.shape == (TABLE_BLOCK, 12)
    decoder.rotaries[0].at(torch.tensor([3, 2 * TABLE_BLOCK]))
    assert len(decoder.rotaries[0].cos) == 3 * TABLE_BLOCK


def test_c8_a_position_has_one_value_whenever_its_block_is_made(made: Path) -> None:
    config = read_config(made)
    long = replace(config, max_context_tokens=3 * TABLE_BLOCK + 5)
    at_once, grown = (RotaryTable(long, torch.device("cpu"), torch.float32) for _ in range(2))
    at_once.cover(long.max_context_tokens)
    for count in (1, TABLE_BLOCK + 1, long.max_context_tokens):
        grown.cover(count)
    assert len(grown.cos) == long.max_context_tokens
    assert torch.equal(at_once.cos, grown.cos)
    assert torch.equal(at_once.sin, grown.sin)
    angle = torch.arange(long.max_context_tokens, dtype=torch.float32) * 10_000 ** -(2 / 12)
    torch.testing.assert_close(
        grown.cos[:, 1], angle.cos(), atol=2e-3, rtol=0
    )  # one ulp of the frequency, times the position


def test_c8_an_answer_beyond_the_first_block_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=2 * TABLE_BLOCK)
    ids = random.Random(0).choices(range(97), k=TABLE_BLOCK + 4)
    with LLM(folder, dtype="float32", cache_tokens=TABLE_BLOCK + 64, max_prompt_tokens=2048, profile="off") as llm:
        out = llm.generate([ids], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(
            torch.tensor([[*ids, *out.token_ids]]), logits_to_keep=5
        ).logits[0]
    assert logits[:-1].argmax(-1).tolist() == list(out.token_ids)


# --- L5: nothing outside the folder is opened ---


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/../../x.safetensors", "", "x\0y", "..", "a" * 5000]
)
def test_l5_an_index_that_leads_out_of_the_folder_is_refused(llama: Path, name: str) -> None:
    (llama / "model.safetensors").rename(llama.parent / "other.safetensors")
    (llama / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(
        CheckpointError, match=r"leads out of the folder|is not the name of a file|cannot be opened|is missing"
    ):
        load_decoder(llama)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_l5_a_link_out_of_the_folder_is_refused(llama: Path, name: str) -> None:
    (llama / name).rename(llama.parent / "elsewhere")
    (llama / name).symlink_to(llama.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=f"'{name}' in .* leads out of the folder, to .*elsewhere"):
        LLM(llama)
    (llama / name).unlink()
    (llama / "inside").write_bytes((llama.parent / "elsewhere").read_bytes())
    (llama / name).symlink_to("inside")
    check_links(llama)


def test_l5_other_files_that_are_read_may_not_be_links_either(llama: Path) -> None:
    (llama.parent / "secret").write_text("{{ messages }}")
    (llama / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load_tokenizer(llama)
    (llama / "chat_template.jinja").unlink()
    (llama / "chat_template.jinja").symlink_to("chat_template.jinja")  # a ring
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        read_raw_config(llama)


def test_l5_the_hubs_snapshots_work(made: Path, tmp_path: Path) -> None:
    """models--x/snapshots/<revision>/file links to ../../blobs/<hash>; the folder itself may be a link, too."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(made.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        with LLM(folder, cache_tokens=64, profile="off") as llm:
            assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids
    (snapshot / "config.json").unlink()
    (tmp_path / "models--x" / "other").write_text("{}")
    (snapshot / "config.json").symlink_to("../../other")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        read_raw_config(snapshot)


def test_l5_shards_in_a_folder_below_are_read(llama: Path) -> None:
    (llama / "weights").mkdir()
    tensors = load_file(llama / "model.safetensors")
    save_file(tensors, llama / "weights" / "a.safetensors")
    (llama / "model.safetensors").unlink()
    (llama / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "weights/a.safetensors")}))
    load_decoder(llama)
    assert checkpoint_file(llama, "weights/a.safetensors").exists()


def test_l5_weights_that_the_config_names_are_not_read(llama: Path) -> None:
    edit(llama / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"transformers_weights='other\.safetensors' names weights of its own"
    ):
        LLM(llama)


def test_the_single_file_wins_over_an_index_as_it_does_in_transformers(llama: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", "llama", seed=9, vocab_size=300)
    shutil.copyfile(other / "model.safetensors", llama / "a.safetensors")
    (llama / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(llama / "a.safetensors"), "a.safetensors")})
    )
    weight = load_decoder(llama).embedding.weight
    assert weight is not None
    assert torch.equal(weight, load_file(llama / "model.safetensors")["model.embed_tokens.weight"])


def test_a_tensor_in_two_shards_is_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    save_file(tensors, llama / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(48)}, llama / "b.safetensors")
    (llama / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in a\.safetensors and in b\.safetensors"):
        load_decoder(llama)


# --- everything at once ---


def test_c9_a_sample_of_broken_checkpoints(tmp_path: Path) -> None:
    """The proof tries thousands of these."""
    make_bases(tmp_path / "bases")
    outcomes = [try_case(tmp_path / "bases", tmp_path / "work", seed) for seed in range(60)]
    counts = Counter(outcome for outcome, _ in outcomes)
    assert counts["refused"] > 20
    assert counts["exact"] > 10
    assert [what for outcome, what in outcomes if outcome not in GOOD] == []
