"""GGUF files beside the safetensors folders they were made of: tokens, logits, answers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.measure.eval.identity import identity_of
from foretoken.model.config_json import config_to_hf
from foretoken.model.decoder import Decoder
from foretoken.model.footprint import shape_of
from foretoken.model.gguf.weights import GgufWeights
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.matrices.codes import GroupedCodes
from foretoken.model.names import model_folder
from foretoken.model.open import native_config, open_model
from foretoken.model.paged import PagedModel
from foretoken.model.weights import AS_CODES
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.answers import folder_fingerprint
from foretoken.train.head_run import DraftJob, DraftSettings, train_draft
from tests.helpers.checkpoints import token_ids, variant
from tests.helpers.gguf_files import QUANTISED, write_gguf

VARIANTS = (
    *("llama", "llama-tied", "llama-mha", "llama-biases", "llama-head-dim", "llama-linear", "llama-yarn"),
    *("mistral", "qwen2", "qwen2-tied", "qwen3", "phi3", "phi3-options", "olmo2", "smollm3", "granite"),
    *("granite-biases", "glm4", "glm4-options", "starcoder2", "cohere", "cohere-qk-norm", "cohere2"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"),
)


def logits_of(path: Path, ids: list[int], dtype: str = "float32") -> torch.Tensor:
    model = open_model(path, dtype, "cpu", 512)
    model.open(0)
    assert model.reserve(0, len(ids))
    with torch.inference_mode():
        return model.forward(torch.tensor(ids), [Segment(0, len(ids), num_logits=len(ids))]).logits


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_logits_as_the_folder(tmp_path: Path, name: str) -> None:
    """Bit for bit: the same numbers in the same order."""
    tied = {"tie_word_embeddings": True} if name.startswith("cohere") else {}  # the files have no other output
    folder = variant(tmp_path / "hf", name, **tied)
    ids = token_ids(70)
    found = logits_of(write_gguf(tmp_path / "model.gguf", folder), ids)
    assert torch.equal(found, logits_of(folder, ids))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_weights_of_norms_that_the_converter_shifts(tmp_path: Path, name: str) -> None:
    """Gemma's are stored plus 1, which rounds them where they are not bfloat16 numbers."""
    folder, ids = variant(tmp_path / "hf", name, tie_word_embeddings=True), token_ids(70)
    path = write_gguf(tmp_path / "model.gguf", folder)
    torch.testing.assert_close(logits_of(path, ids), logits_of(folder, ids), atol=2e-5, rtol=0)
    rounded = variant(tmp_path / "bf16", name, tie_word_embeddings=True, dtype=torch.bfloat16)
    path = write_gguf(tmp_path / "model.gguf", rounded)
    assert torch.equal(logits_of(path, ids), logits_of(rounded, ids))


def test_gemma_3_without_windows(tmp_path: Path) -> None:
    """The converter then names neither a window nor a second base (Rnj-1)."""
    yarn = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = variant(
        tmp_path / "hf",
        "gemma3",
        tie_word_embeddings=True,
        layer_types=["full_attention"] * 3,
        rope_parameters={"full_attention": yarn, "sliding_attention": None},
        dtype=torch.bfloat16,
    )
    path, ids = write_gguf(tmp_path / "model.gguf", folder), token_ids(70)
    assert read_config(path).sliding_window == ()
    assert torch.equal(logits_of(path, ids), logits_of(folder, ids, "float32"))


def test_sections_of_positions_put_pairs_into_halves(tmp_path: Path) -> None:
    """GLM-4V's text model: the converter takes even rows of q and k first, then odd ones, of what is rotated."""
    folder, ids = variant(tmp_path / "hf", "glm4"), token_ids(70)
    plain = logits_of(folder, ids)
    state = load_file(folder / "model.safetensors")
    for name, tensor in state.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = tensor.view(-1, 16, *tensor.shape[1:])  # half of the 16 channels are rotated
            state[name] = torch.cat((heads[:, :8:2], heads[:, 1:8:2], heads[:, 8:]), dim=1).reshape(tensor.shape)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for sections, expected in (([2, 2, 0, 0], plain), ([0, 0, 0, 0], logits_of(folder, ids))):
        path = write_gguf(tmp_path / "model.gguf", folder, rope__dimension_sections=sections)
        torch.testing.assert_close(logits_of(path, ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "cohere2"])
def test_a_pattern_of_windows_for_too_many_layers_is_refused(tmp_path: Path, name: str) -> None:
    """Before a list of that length is made."""
    folder = variant(tmp_path / "hf", name, tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    layers = config.pop("num_hidden_layers")
    config.pop("layer_types")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    path = write_gguf(tmp_path / "model.gguf", folder, attention__sliding_window_pattern=3)
    raw = path.read_bytes()
    key = b"block_count" + (4).to_bytes(4, "little")
    path.write_bytes(raw.replace(key + layers.to_bytes(4, "little"), key + (200_000).to_bytes(4, "little")))
    refused(path, CheckpointError, "block_count=200000", "100,000")


@pytest.mark.parametrize("name", ["glm4", "cohere"])
def test_codes_of_rows_in_another_order(tmp_path: Path, name: str) -> None:
    """Multiplied by codes and dequantised alike, where the decoder's heads have their channels in an order of their
    own.
    """
    folder = variant(tmp_path / "hf", name, hidden_size=64, tie_word_embeddings=True)
    path, ids = write_gguf(tmp_path / "model.gguf", folder, "Q8_0"), token_ids(40)
    codes, numbers = load_decoder(path), load_decoder(path, pack=False)
    assert all(layer.qkv_proj.packed is not None for layer in codes.decoder_layers())
    found = logits_of(path, ids)
    model = PagedModel(numbers, 512)
    model.open(0)
    expected = model.forward(torch.tensor(ids), [Segment(0, len(ids), num_logits=len(ids))]).logits
    assert (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q8_0"), ("qwen2", "F32"), ("qwen3-moe", "Q4_0")])
def test_joined_queries_keys_and_values_are_parted(tmp_path: Path, name: str, kind: str) -> None:
    """The converter joins them with `--fuse-qkv`."""
    folder, ids = variant(tmp_path / "hf", name, hidden_size=64, moe_intermediate_size=32), token_ids(40)
    apart, joined = (
        logits_of(write_gguf(tmp_path / f"{fuses}.gguf", folder, kind, fuse_qkv=fuses), ids) for fuses in (False, True)
    )
    assert torch.equal(joined, apart)


@pytest.mark.parametrize(
    ("extra", "kind", "factor"),
    [
        ({"rope__scaling__factor": 4.0}, "linear", 4.0),  # llama.cpp's type where none is named
        ({"rope__scale_linear": 4.0}, "linear", 4.0),
        ({"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}, "linear", 4.0),
        ({"rope__scaling__factor": 4.0, "rope__scaling__type": "none"}, "default", 1.0),
        ({"rope__scaling__type": "linear"}, "default", 1.0),
    ],
)
def test_a_factor_without_a_type_is_linear_scaling(
    tmp_path: Path, extra: dict[str, object], kind: str, factor: float
) -> None:
    rope = read_config(write_gguf(tmp_path / "model.gguf", variant(tmp_path / "hf", "llama"), **extra)).rope
    assert (rope.kind, rope.factor) == (kind, factor)


def test_llama3_scaling_comes_as_factors(tmp_path: Path) -> None:
    """The file holds its effect on each channel, rounded to float32."""
    folder = variant(tmp_path / "hf", "llama-llama3")
    path, ids = write_gguf(tmp_path / "model.gguf", folder), token_ids(70)
    config = read_config(path)
    assert config.rope.kind == "factors"
    assert max(config.rope.factors) == 8.0
    assert min(config.rope.factors) == 1.0
    assert torch.allclose(logits_of(path, ids), logits_of(folder, ids), atol=2e-4)
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        config_to_hf(config)
    assert config_to_hf(config.llama_layers(1))["rope_scaling"] is None  # a trained head's can be


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_matrices_are_what_the_package_makes_of_them(tmp_path: Path, kind: str) -> None:
    folder = variant(tmp_path / "hf", "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    path = write_gguf(tmp_path / "model.gguf", folder, kind)
    weights, stored = GgufWeights(path), {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert weights.kinds()[0].name == kind
    assert {stored.read for stored in weights.kinds()} == {AS_CODES, "as stored"}
    assert sum(stored.num_tensors for stored in weights.kinds()) == len(weights.names)
    for name in weights.names:
        tensor = stored[weights.info(name).name]
        numbers = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type)))
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads is not None:  # row 2 i + j of a head stood at j * 32 + i (head_dim 64)
            numbers = numbers.view(heads, -1, 2, numbers.shape[-1]).transpose(1, 2).reshape(numbers.shape)
        assert torch.equal(weights.read(name, tuple(numbers.shape)), numbers)
        found = weights.grouped_rows(name)
        codes = None if found is None else GroupedCodes.joined(list(found))
        assert (codes is None) == (tensor.tensor_type == GGMLQuantizationType.F32)
        assert codes is None or torch.equal(codes.dequantised(), numbers)


def test_quantised_numbers_stay_near_the_original(tmp_path: Path) -> None:
    """What `write_gguf` rounded is near what it was given: names and orders are right in both directions."""
    folder = variant(tmp_path / "hf", "llama", hidden_size=256, intermediate_size=512)
    ids = token_ids(40)
    expected = logits_of(folder, ids)
    for kind, most in (("Q8_0", 0.05), ("Q6_K", 0.1), ("Q5_K", 0.2), ("Q4_K", 0.4)):
        found = logits_of(write_gguf(tmp_path / f"{kind}.gguf", folder, kind), ids)
        assert (found - expected).norm() < most * expected.norm(), kind


def test_large_matrices_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = variant(tmp_path / "hf", "qwen2", hidden_size=64)
    path = write_gguf(tmp_path / "model.gguf", folder, "Q4_0")
    whole = load_decoder(path, pack=False)
    monkeypatch.setattr("foretoken.model.gguf.weights._CHUNK_NUMBERS", 640)
    for name, tensor in load_decoder(path, pack=False).state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference target as a BF16 file with its tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "reference.gguf"
    return write_gguf(path, model_folder("reference:target"), "BF16", tokenizer=True)


TEXT = "def merge(left, right):\n    # naïve 猫 😀 <|endoftext|>\n    return   left + right\r\n\t1234567"


def test_the_same_tokens(reference: Path) -> None:
    found, expected = load_tokenizer(reference), load_tokenizer(model_folder("reference:target"))
    assert found is not None
    assert expected is not None
    assert found.vocabulary == expected.vocabulary
    for text in (TEXT, "", " ", "a  b"):
        assert found.encode(text) == expected.encode(text)
        assert found.encode_plain(text) == expected.encode_plain(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert (found.eos_token_id, found.special_ids) == (expected.eos_token_id, expected.special_ids)


def test_the_same_answers(reference: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    prompts = ["def mean(values):\n", "import os\n"]
    answers = []
    for model in (str(reference), "reference:target"):
        with LLM(model) as llm:
            assert llm.folder.name in ("reference.gguf", "target")
            answers.append([(out.token_ids, out.text) for out in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_what_it_takes_in_memory(reference: Path) -> None:
    found, expected = (shape_of(path, "x", "bfloat16") for path in (reference, model_folder("reference:target")))
    assert found == expected


def test_the_dtype_of_a_quantised_file_is_float32(tmp_path: Path) -> None:
    """Scales times codes have more digits than bfloat16 holds."""
    path = write_gguf(tmp_path / "model.gguf", variant(tmp_path / "hf", "qwen2", hidden_size=64), "Q4_0")
    decoder = load_decoder(path, pack=False)
    assert isinstance(decoder, Decoder)
    assert decoder.norm.weight.dtype == torch.float32


def refused(path: Path, error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as caught:
        native_config(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("extra", "error", "word"),
    [
        ({"expert_count": 8}, CheckpointError, "expert_used_count"),
        ({"attention__causal": False}, UnsupportedModelError, "attention.causal"),
        ({"attention__sliding_window": 8}, UnsupportedModelError, "attention.sliding_window"),
        ({"rope__scaling__type": "longrope"}, UnsupportedModelError, "longrope"),
        ({"rope__scaling__attn_factor": 2.0}, UnsupportedModelError, "rope.scaling.attn_factor"),
        ({"logit_scale": 2.0}, UnsupportedModelError, "logit_scale"),
    ],
)
def test_options_that_are_not_there(
    tmp_path: Path, extra: dict[str, object], error: type[Exception], word: str
) -> None:
    refused(write_gguf(tmp_path / "model.gguf", variant(tmp_path / "hf", "llama"), **extra), error, word)


@pytest.mark.parametrize("name", ["cohere2", "gpt-oss", "gemma2"])
def test_another_rotation_of_layers_with_windows_is_refused(tmp_path: Path, name: str) -> None:
    """llama.cpp rotates them so in these families, too; Gemma 3's are read."""
    folder = variant(tmp_path / "hf", name, **({} if name == "gpt-oss" else {"tie_word_embeddings": True}))
    theta = read_config(folder).rope.theta
    path = write_gguf(tmp_path / "same.gguf", folder, rope__freq_base_swa=theta)
    assert read_config(path).rope.theta == theta
    path = write_gguf(tmp_path / "other.gguf", folder, rope__freq_base_swa=2 * theta)
    refused(path, UnsupportedModelError, "rope.freq_base_swa")


def test_other_types_are_named(tmp_path: Path) -> None:
    folder = variant(tmp_path / "hf", "qwen2")
    path = write_gguf(tmp_path / "model.gguf", folder)
    raw = bytearray(path.read_bytes())
    place = raw.index(b"blk.1.ffn_gate.weight") + len(b"blk.1.ffn_gate.weight") + 4 + 16
    raw[place : place + 4] = (24).to_bytes(4, "little")  # I8
    path.write_bytes(raw)
    refused(path, CheckpointError, "blk.1.ffn_gate.weight", "I8", "Q4_K_M")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"\.gguf"):
        model_folder(str(tmp_path / "notes.txt"))
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "other.gguf", UnsupportedModelError, "mamba", "llama, qwen2, qwen3")


def test_files_are_told_apart(reference: Path, tmp_path: Path) -> None:
    """What a result or a file of answers remembers of its target."""
    other = tmp_path / "other.gguf"
    other.write_bytes(reference.read_bytes().replace(b"<|endoftext|>", b"<|endofbook|>"))
    assert folder_fingerprint(reference) != folder_fingerprint(other)
    found, changed = identity_of("x", reference), identity_of("x", other)
    assert found["weights"] is not None
    assert found["weights"] != changed["weights"]


def test_a_draft_model_is_not_trained_from_a_file(reference: Path, tmp_path: Path) -> None:
    """It would have no tokenizer."""
    with pytest.raises(UnsupportedModelError, match="GGUF file, whose tokenizer"):
        train_draft(DraftJob(target=str(reference), out=tmp_path / "out", settings=DraftSettings()))


def test_metadata_is_a_configuration(reference: Path) -> None:
    found, expected = read_config(reference), read_config(model_folder("reference:target"))
    raw, other = config_to_hf(found), config_to_hf(expected)
    assert raw.pop("rms_norm_eps") == pytest.approx(other.pop("rms_norm_eps"), rel=1e-6)  # a float32 in the file
    assert raw.pop("torch_dtype") == "float32"
    assert other.pop("torch_dtype") == "bfloat16"
    assert json.dumps(raw, sort_keys=True) == json.dumps(other, sort_keys=True)
