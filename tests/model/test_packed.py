"""Packed matrices of safetensors checkpoints: the numbers of each format's own package, by codes wherever they fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.cli.app import run
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields
from foretoken.model.layers import Linear
from foretoken.model.loader import DequantisedWarning, load_decoder, open_weights, read_config
from foretoken.model.matrices import grouped_kernel
from foretoken.model.matrices.grouped_kernel import GroupedWeight, MergedWeight
from foretoken.model.open import native_config, open_model
from foretoken.model.packed.weights import PackedWeights, packed_format
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.packed_files import (
    FORMS,
    PackedForm,
    compressed_int,
    fp8,
    gptq,
    packed_words,
    parts_of,
    spread_words,
    write_packed,
)
from tests.model.test_grouped_quant import by_token, extend

BY_CODES = [name for name, form in FORMS.items() if form.as_codes]
AS_NUMBERS = [name for name, form in FORMS.items() if not form.as_codes]
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 104}
GATE = "model.layers.0.mlp.gate_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("packed") / "plain", "llama", **SHAPE)


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_those_of_the_format_s_own_package(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit in the dtype of the scales, in which the packages compute; in parts of some rows too."""
    folder, form = write_packed(tmp_path / "packed", source, FORMS[name]), FORMS[name]
    weights = open_weights(folder)
    assert isinstance(weights, PackedWeights)
    weights.check(read_config(folder))
    for base in (GATE, DOWN, "model.layers.0.self_attn.k_proj"):
        parts = parts_of(folder, base)
        expected = form.unpack(parts)
        found = weights.read(f"{base}.weight", tuple(expected.shape))
        assert torch.equal(found.to(expected.dtype), expected)
        assert (found - load_file(source / "model.safetensors")[f"{base}.weight"]).abs().max() < 0.2
        rows = weights.grouped_rows(f"{base}.weight")
        assert (rows is None) == (weights.why_numbers(f"{base}.weight") is not None)
        assert rows is None or torch.equal(torch.cat([part.dequantised() for part in rows]), found)
    monkeypatch.setattr("foretoken.model.packed.weights._CHUNK_NUMBERS", 64 * 48)
    parts = parts_of(folder, GATE)
    exact = form.unpack({key: part.double() if "scale" in key else part for key, part in parts.items()})
    assert torch.equal(weights.read(f"{GATE}.weight", (96, 64)), exact.to(torch.float32))


@pytest.mark.parametrize("name", BY_CODES)
def test_codes_are_multiplied_as_they_are(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every packed matrix stands for the file's own numbers; strict logits are single rows', and the twin's."""
    folder, text = write_packed(tmp_path / "packed", source, FORMS[name]), token_ids(10)
    monkeypatch.setattr("foretoken.model.packed.weights._CHUNK_NUMBERS", 64 * 16)
    model, weights = open_model(folder, cache_tokens=128, numerics="strict"), open_weights(folder)
    layer = model.decoder.layers[0]  # type: ignore[attr-defined]
    merged = {"self_attn": (layer.qkv_proj, "qkv"), "mlp": (layer.mlp.gate_up_proj, ("gate", "up"))}
    for block, (module, shorts) in merged.items():
        assert isinstance(module.packed, MergedWeight)
        for part, short in zip(module.packed.parts, shorts, strict=True):
            full = f"model.layers.0.{block}.{short}_proj.weight"
            assert torch.equal(part.rows(torch.arange(part.num_rows)).float(), weights.read(full, weights.shape(full)))
    assert isinstance(layer.mlp.down_proj.packed, GroupedWeight)
    assert model.decoder.lm_head.packed is None  # type: ignore[attr-defined]
    expected = by_token(model, text)
    model.open(1)
    extend(model, 1, text[:4])
    model.commit(1, 4)
    assert torch.equal(extend(model, 1, text[4:], num_draft=len(text) - 5), expected[4:])
    monkeypatch.setattr(grouped_kernel, "kernel", lambda: None)
    assert torch.equal(by_token(model, text), expected)


@pytest.mark.parametrize("name", AS_NUMBERS)
def test_what_the_kernel_cannot_take_is_dequantised_and_said_so(source: Path, tmp_path: Path, name: str) -> None:
    """The model is that of a plain checkpoint of the same numbers, bit for bit."""
    folder = write_packed(tmp_path / "packed", source, FORMS[name])
    with pytest.warns(DequantisedWarning, match="dequantised to float32 when loaded") as heard:
        found = open_model(folder, cache_tokens=64)
    assert len(heard) == 1
    assert "weights='int8'" in str(heard[0].message)
    weights, plain = open_weights(folder), tmp_path / "plain"
    shutil.copytree(source, plain)
    save_file(
        {one: weights.read(one, weights.shape(one)).clone() for one in weights.own_names}, plain / "model.safetensors"
    )
    assert torch.equal(by_token(found, token_ids(6)), by_token(open_model(plain, cache_tokens=64), token_ids(6)))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_borrows_from_the_next_in_a_gptq_file(source: Path, tmp_path: Path, bits: int) -> None:
    """GPTQModel takes the ones of the older format from whole int32, and so the next zero point is stored less two."""
    form = gptq(bits=bits, symmetric=False)
    folder, held = write_packed(tmp_path / "packed", source, form), 32 // bits
    edit_state(
        folder, set_part(f"{GATE}.qzeros", lambda t: torch.full_like(t, 5 << bits) - (2**32 - 1) // (2**bits - 1))
    )
    parts = parts_of(folder, GATE)
    found = open_weights(folder).read(f"{GATE}.weight", (96, 64))
    assert torch.equal(found.half(), form.unpack(parts))
    codes = spread_words(parts["qweight"].t(), bits)
    zeros = torch.tensor([0, 5] + [0] * (held - 2)).repeat(96 // held)[:, None]
    scales = parts["scales"].t().float().repeat_interleave(32, 1)
    assert torch.equal(found, (codes - zeros) * scales)


def test_the_newer_key_names_gptq_s_format_too(source: Path, tmp_path: Path) -> None:
    folder, tensor = write_packed(tmp_path / "packed", source, FORMS["gptq-v2"]), f"{GATE}.weight"
    expected = open_weights(folder).read(tensor, (96, 64))
    edit_config(folder, checkpoint_format=None, format="gptq_v2")
    assert torch.equal(open_weights(folder).read(tensor, (96, 64)), expected)


def as_autogptq_wrote(folder: Path, **changes: Any) -> None:
    """The settings beside config.json and without a method; the file of weights named after them."""
    raw = json.loads((folder / "config.json").read_text())
    own = raw.pop("quantization_config")
    del own["quant_method"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "quantize_config.json").write_text(json.dumps(own | changes))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")


def test_settings_and_weights_where_autogptq_kept_them_are_read(source: Path, tmp_path: Path) -> None:
    folder, older = (write_packed(tmp_path / name, source, FORMS["gptq"]) for name in ("packed", "older"))
    as_autogptq_wrote(older)
    assert native_config(older) == native_config(folder)
    weights, same = open_weights(older), open_weights(folder)
    assert isinstance(weights, PackedWeights)
    assert torch.equal(weights.read(f"{GATE}.weight", (96, 64)), same.read(f"{GATE}.weight", (96, 64)))
    with LLM(older, SpecConfig()) as llm:
        assert llm.generate([token_ids(9)], SamplingParams(max_tokens=2, ignore_eos=True))
    (older / "gptq_model-other.safetensors").write_bytes((older / "gptq_model-4bit-32g.safetensors").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"neither model\.safetensors nor .*, but gptq_model-4bit-32g\.safetensors"
    ):
        open_weights(older)


def test_older_settings_are_refused_by_their_file(source: Path, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "packed", source, FORMS["gptq"])
    as_autogptq_wrote(folder, bits=3)
    with pytest.raises(UnsupportedModelError, match=r"quantize_config\.json: .*bits=3 of GPTQ"):
        read_config(folder)


def test_older_settings_beside_plain_weights_mean_nothing(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "plain")
    (tmp_path / "plain" / "quantize_config.json").write_text("{}")
    assert read_config(tmp_path / "plain") == read_config(source)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_plain_weights_under_settings_of_packed_ones_are_refused(source: Path, tmp_path: Path, name: str) -> None:
    """A folder of two checkpoints: which of them was meant is not known."""
    folder = write_packed(tmp_path / "packed", source, FORMS[name])
    shutil.copy(source / "model.safetensors", folder)
    for read in (load_decoder, native_config):
        with pytest.raises(CheckpointError, match=r"no tensor is packed .*\.qweight\).* take the key out"):
            read(folder)


def test_weights_to_train_or_to_write_are_numbers(source: Path, tmp_path: Path) -> None:
    decoder = load_decoder(write_packed(tmp_path / "packed", source, FORMS["gptq"]), pack=False)
    assert all(module.packed is None for module in decoder.modules() if isinstance(module, Linear))


def test_int8_quantises_anew_only_when_asked(source: Path, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "packed", source, FORMS["gptq-act-order"])
    packed = open_model(folder, cache_tokens=64, weights="int8").decoder.layers[0].mlp.down_proj.packed  # type: ignore[attr-defined]
    assert isinstance(packed, GroupedWeight)
    assert packed.bits == 8


def test_greedy_answers_are_plain_s(source: Path, tmp_path: Path) -> None:
    prompts, params = [token_ids(9, seed=i) * 2 for i in range(3)], SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(write_packed(tmp_path / "packed", source, FORMS["awq"]), SpecConfig(), numerics="strict") as llm:
        plain = [out.token_ids for out in llm.generate(prompts, params)]
        spec = SpecConfig("ngram", num_draft=4)
        assert [out.token_ids for out in llm.generate(prompts, params, spec=spec)] == plain


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert run(["models", "inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(kind["bytes"] for kind in found["types"]) == found["bytes"]
    return {kind["type"]: kind for kind in found["types"]}


def test_inspect_says_what_becomes_of_each(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = inspected(write_packed(tmp_path / "gptq", source, FORMS["gptq"]), capsys)
    assert kinds["GPTQ, 4 bits, groups of 32"]["read"].startswith("multiplied by its codes")
    assert kinds["GPTQ, 4 bits, groups of 32"]["tensors"] == 4 * 7
    assert kinds["F32"]["read"] == "as stored"
    kinds = inspected(write_packed(tmp_path / "order", source, FORMS["gptq-act-order"]), capsys)
    (name,) = (name for name in kinds if "act-order" in name)
    assert kinds[name]["read"] == "dequantised when loaded"
    kinds = inspected(write_packed(tmp_path / "fp8", source, FORMS["fp8-per-matrix"]), capsys)
    assert kinds["scales of activations"]["read"].startswith("not used")


def test_each_matrix_finds_its_scheme(source: Path, tmp_path: Path) -> None:
    """Two schemes in one file: each matrix has the one that its tensors have the form of."""
    folder = write_packed(tmp_path / "packed", source, FORMS["int4"])
    raw = json.loads((folder / "config.json").read_text())
    groups = raw["quantization_config"]["config_groups"]
    groups["a_first"] = {"weights": groups["group_0"]["weights"] | {"group_size": 16}}
    raw["quantization_config"]["config_groups"] = dict(sorted(groups.items()))
    (folder / "config.json").write_text(json.dumps(raw))
    assert open_weights(folder).why_numbers(f"{GATE}.weight") is None


def compressed_words(bits: int, group: int | None) -> PackedForm:
    """Codes of 4 or 8 bits in int32, as `compressed-tensors` packs both."""
    form = compressed_int(bits, group, True)
    if bits == 4:
        return form

    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = form.pack(weight)
        codes = parts.pop("weight").to(torch.int64) + 128
        return parts | {"weight_packed": packed_words(codes, 8), "weight_shape": torch.tensor(codes.shape)}

    def unpack(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return form.unpack(parts | {"weight": spread_words(parts["weight_packed"], 8) - 128})

    return replace(form, config={**form.config, "format": "pack-quantized"}, pack=pack, unpack=unpack)


_MIXED = {
    "int4 and int8 per output": (compressed_words(4, None), compressed_words(8, None)),
    "int8 and int4 per output": (compressed_words(8, None), compressed_words(4, None)),
    "int4 and int8 with as many groups in a word": (compressed_words(4, 64), compressed_words(8, 32)),
    "fp8 in blocks and per output": (fp8("block", "compressed"), fp8("channel", "compressed")),
    "fp8 per output and in blocks": (fp8("channel", "compressed"), fp8("block", "compressed")),
}


@pytest.mark.parametrize("name", _MIXED)
def test_schemes_of_one_type_are_told_apart(source: Path, tmp_path: Path, name: str) -> None:
    """Whichever comes first: the attention has one of the schemes, the MLP the other."""
    first, second = _MIXED[name]
    whole = write_packed(tmp_path / "first", source, replace(first, skipped=(*first.skipped, "mlp")))
    folder = write_packed(tmp_path / "both", whole, replace(second, skipped=(*second.skipped, "self_attn")))
    groups = {key: form.config["config_groups"]["group_0"] for key, form in zip("ab", (first, second), strict=True)}
    edit_config(folder, config_groups=groups)
    weights = open_weights(folder)
    weights.check(read_config(folder))
    for base, form in (("model.layers.0.self_attn.q_proj", first), (GATE, second)):
        expected = form.unpack(parts_of(folder, base))
        found = weights.read(f"{base}.weight", tuple(expected.shape))
        assert torch.equal(found.to(expected.dtype), expected)


_INT = {"type": "int", "symmetric": True, "dynamic": False}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_BY_GROUP = {"strategy": "group", "group_size": 128}
_PRESETS: dict[str, dict[str, Any] | None] = {
    "W4A16": {"num_bits": 4, **_INT, **_BY_GROUP},
    "w4a16_asym": {"num_bits": 4, **_INT, **_BY_GROUP, "symmetric": False},
    "W4A8": {"num_bits": 4, **_INT, **_BY_GROUP},
    "W4A4": {"num_bits": 4, **_INT, **_BY_GROUP},
    "W4AFP8": {"num_bits": 4, **_INT, **_BY_GROUP},
    "W8A16": {"num_bits": 8, **_INT, **_BY_GROUP},
    "W8A8": {"num_bits": 8, **_INT, "strategy": "channel"},
    "INT8": {"num_bits": 8, **_INT, "strategy": "channel"},
    "FP8": {**_FLOAT, "strategy": "tensor"},
    "FP8_DYNAMIC": {**_FLOAT, "strategy": "channel"},
    "FP8_BLOCK": {**_FLOAT, "strategy": "block", "block_structure": [128, 128]},
    "UNQUANTIZED": None,
}


@pytest.mark.parametrize("preset", _PRESETS)
def test_a_preset_stands_for_its_description(preset: str) -> None:
    """`compressed_tensors.quantization.preset_name_to_scheme` says these of its weights."""

    def format_of(groups: dict[str, Any]) -> object:
        settings = {"quant_method": "compressed-tensors", "config_groups": groups}
        return packed_format(Fields({"quantization_config": settings}, "config.json"))

    described = {"group_0": {"targets": ["Linear"], "weights": _PRESETS[preset]}}
    assert format_of({preset: ["Linear"]}) == format_of(described)


def test_a_group_named_by_a_preset_is_read(tmp_path: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", "llama", **SHAPE | {"hidden_size": 256})
    form = compressed_int(4, 128, True)
    folder = write_packed(tmp_path / "packed", plain, form)
    edit_config(folder, config_groups={"W4A16": ["Linear"]})
    weights = open_weights(folder)
    weights.check(read_config(folder))
    expected = form.unpack(parts_of(folder, GATE))
    assert torch.equal(weights.read(f"{GATE}.weight", (96, 256)).to(expected.dtype), expected)


def test_zero_points_that_old_releases_did_not_pack_are_read(source: Path, tmp_path: Path) -> None:
    """compressed-tensors wrote them as int8 until 0.9.1, and still does where a matrix has one."""
    packed = write_packed(tmp_path / "packed", source, FORMS["int4-asymmetric"])
    folder = Path(shutil.copytree(packed, tmp_path / "whole"))

    def unpacked(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if name.endswith("weight_zero_point")]:
            rows = len(state[name.replace("zero_point", "scale")])
            state[name] = (spread_words(state[name].t(), 4).t()[:rows] - 8).to(torch.int8)

    edit_state(folder, unpacked)
    for base, shape in ((GATE, (96, 64)), ("model.layers.0.self_attn.k_proj", (32, 64))):
        expected = open_weights(packed).read(f"{base}.weight", shape)
        assert torch.equal(open_weights(folder).read(f"{base}.weight", shape), expected)


_ACTIVATIONS: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    "groups",
    [{}, {"group_0": {"targets": ["LlamaAttention"], "weights": None, "input_activations": _ACTIVATIONS}}],
    ids=["cache", "attention"],
)
def test_only_activations_may_be_quantised(source: Path, tmp_path: Path, groups: dict[str, Any]) -> None:
    """They keep their format here, and the weights are plain."""
    settings = {"quant_method": "compressed-tensors", "format": "naive-quantized", "kv_cache_scheme": _ACTIVATIONS}
    form = PackedForm(
        settings | {"config_groups": groups}, lambda weight: {"weight": weight}, lambda parts: parts["weight"]
    )
    folder = write_packed(tmp_path / "packed", source, form)
    scales = {f"model.layers.0.self_attn.{one}_scale": torch.ones(1) for one in "kv"}
    edit_state(folder, lambda state: state.update(scales))
    weights, plain = open_weights(folder), open_weights(source)
    weights.check(read_config(folder))
    assert sorted(weights.own_names) == sorted(plain.own_names)
    assert all(
        torch.equal(weights.read(name, plain.shape(name)), plain.read(name, plain.shape(name))) for name in plain.names
    )
    load_decoder(folder)


# --- malformed files ---


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))


def edit_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def set_part(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda state: state.__setitem__(name, value(state[name]))


_BROKEN: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    ("gptq", lambda state: state.pop(f"{GATE}.scales"), rf"tensor {GATE}\.scales is missing"),
    ("gptq", lambda state: state.pop(f"{GATE}.qzeros"), rf"tensor {GATE}\.qzeros is missing"),
    ("gptq", lambda state: state.pop(f"{GATE}.qweight"), rf"tensor {GATE}\.weight is missing"),
    ("gptq-act-order", lambda state: state.pop(f"{GATE}.g_idx"), rf"tensor {GATE}\.g_idx is missing"),
    ("gptq", set_part(f"{GATE}.scales", lambda t: t[:, :-8]), rf"{GATE}\.scales .* F16 \[2, 88\]; .*\[2, 96\]"),
    ("gptq", set_part(f"{GATE}.qweight", lambda t: t[:-1]), rf"{GATE}\.weight .* \[96, 56\]; config.json .*\[96, 64\]"),
    ("gptq", set_part(f"{GATE}.qweight", lambda t: t[0]), rf"{GATE}\.qweight .* must be a matrix"),
    ("gptq", set_part(f"{GATE}.qweight", lambda t: t.float()), rf"{GATE}\.qweight .* is F32"),
    ("gptq", set_part(f"{GATE}.g_idx", lambda t: t + 1), rf"{GATE}\.g_idx: input 32 is of group 2, .* 2 groups"),
    ("gptq", set_part(f"{GATE}.g_idx", lambda t: -t - 1), rf"{GATE}\.g_idx: input 0 is of group -1"),
    ("gptq", lambda state: state.update({f"{GATE}.bias": torch.ones(96)}), rf"{GATE}\.bias .* has no place"),
    ("gptq", lambda state: state.update({f"{GATE}.extra": torch.ones(96)}), rf"{GATE}\.extra .* has no place"),
    (
        "gptq",
        lambda state: state.update({"x.qweight": torch.ones(8, 8, dtype=torch.int32)}),
        "x.qzeros is missing|x.weight",
    ),
    ("awq", set_part(f"{GATE}.qzeros", lambda t: t[:, 1:]), rf"{GATE}\.qzeros .* \[2, 11\]; .*\[2, 12\]"),
    ("awq", set_part(f"{GATE}.qweight", lambda t: t[:, 1:]), rf"{GATE}\.weight .* \[88, 64\]"),
    ("int4", set_part(f"{GATE}.weight_shape", lambda t: t + 1), rf"{GATE}\.weight_shape says \[97, 65\]"),
    ("int4", lambda state: state.pop(f"{GATE}.weight_shape"), rf"{GATE}\.weight_shape is missing"),
    ("int4", lambda state: state.pop(f"{GATE}.weight_scale"), rf"{GATE}\.weight_scale is missing"),
    (
        "int8",
        set_part(f"{GATE}.weight", lambda t: t[:, :32]),
        rf"{GATE}\.weight .* \[96, 32\]; config.json .*\[96, 64\]",
    ),
    ("int8", set_part(f"{GATE}.weight_scale", lambda t: t[1:]), rf"{GATE}\.weight_scale .* \[95, 1\]"),
    (
        "int8",
        set_part(f"{GATE}.weight", lambda t: t.to(torch.float8_e4m3fn)),
        rf"{GATE}\.weight .* F8_E4M3, .* no scheme",
    ),
    ("fp8-blocks", set_part(f"{GATE}.weight_scale_inv", lambda t: t[:1]), rf"{GATE}\.weight_scale_inv .* \[2, 2\]"),
    ("fp8-blocks", lambda state: state.pop(f"{GATE}.weight_scale_inv"), rf"{GATE}\.weight_scale_inv is missing"),
    (
        "fp8-blocks",
        set_part(f"{GATE}.weight", lambda t: t.float().to(torch.float8_e5m2)),
        rf"{GATE}\.weight .* F8_E5M2",
    ),
    (
        "fp8-blocks",
        lambda state: state.update(
            {f"x.{part}": state[f"{GATE}.{part}"].clone() for part in ("weight", "weight_scale_inv")}
        ),
        r"x\.weight .* has no place",
    ),
]


@pytest.mark.parametrize(("form", "change", "message"), _BROKEN)
def test_broken_tensors_are_refused_by_name(
    source: Path,
    tmp_path: Path,
    form: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_packed(tmp_path / "packed", source, FORMS[form])
    edit_state(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(folder)
    assert run(["generate", "--target", str(folder), "--prompt-ids", "1,2", "--max-tokens", "2"]) == 3


@pytest.mark.parametrize(
    ("form", "changes", "kind", "message"),
    [
        ("gptq", {"group_size": 0}, CheckpointError, "group_size=0 must be a number of inputs, or -1"),
        ("gptq", {"group_size": -2}, CheckpointError, "group_size=-2"),
        ("gptq", {"group_size": "32"}, CheckpointError, "group_size='32'"),
        ("gptq", {"group_size": 16}, CheckpointError, r"qzeros .* \[2, "),
        ("gptq", {"bits": 3}, UnsupportedModelError, "bits=3 of GPTQ"),
        ("gptq", {"bits": None}, CheckpointError, "bits=None"),
        ("gptq", {"bits": 8}, CheckpointError, r"qzeros|is packed from shape"),
        ("gptq", {"desc_act": "yes"}, CheckpointError, "desc_act='yes'"),
        ("gptq", {"checkpoint_format": "marlin"}, UnsupportedModelError, "checkpoint_format='marlin'"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, UnsupportedModelError, "dynamic"),
        ("gptq", {"pack_dtype": "int16"}, UnsupportedModelError, "pack_dtype='int16'"),
        ("gptq", {"format": "gptq_p"}, UnsupportedModelError, "format='gptq_p'"),
        ("gptq", {"rotation": "hadamard"}, UnsupportedModelError, "rotation='hadamard'"),
        ("awq", {"rotation": "random"}, UnsupportedModelError, "rotation='random'"),
        ("gptq", {"quant_method": "bitsandbytes"}, UnsupportedModelError, "bitsandbytes.*gptq, awq"),
        ("awq", {"bits": 8}, UnsupportedModelError, "bits=8 of AWQ"),
        ("awq", {"version": "gemv"}, UnsupportedModelError, "version='gemv'"),
        ("int4", {"config_groups": {}}, CheckpointError, "config_groups={} must be an object that describes"),
        ("int4", {"config_groups": {"a": None}}, CheckpointError, "a=None must be an object that describes"),
        ("int4", {"config_groups": {"NVFP4": ["Linear"]}}, UnsupportedModelError, "preset 'NVFP4' .*W4A16"),
        ("int4", {"config_groups": {"W4A16": [1]}}, CheckpointError, "a list of strings"),
        ("int4", {"config_groups": {"a": {"weights": None}}}, CheckpointError, r"weight_packed .* no scheme"),
        ("int4", {"config_groups": {}, "kv_cache_scheme": {}}, CheckpointError, r"weight_packed .* no scheme"),
        ("int4", {"format": "nvfp4-pack-quantized"}, UnsupportedModelError, "nvfp4"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedModelError, "sparsity_config"),
        ("int4", {"transform_config": {"config_groups": {"R1": {}}}}, UnsupportedModelError, "transform_config"),
        ("int4", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, UnsupportedModelError, "3 bits"),
        (
            "int4",
            {"config_groups": {"a": {"weights": {"strategy": "token"}}}},
            UnsupportedModelError,
            "strategy='token'",
        ),
        ("int4", {"config_groups": {"a": {"weights": {"group_size": 0}}}}, CheckpointError, "group_size=0"),
        ("fp8-blocks", {"weight_block_size": [128]}, CheckpointError, "two positive numbers"),
        ("fp8-blocks", {"weight_block_size": [0, 128]}, CheckpointError, "two positive numbers"),
        ("fp8-blocks", {"fmt": "e5m2"}, UnsupportedModelError, "fmt='e5m2'"),
    ],
)
def test_broken_settings_are_refused(
    source: Path, tmp_path: Path, form: str, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    folder = write_packed(tmp_path / "packed", source, FORMS[form])
    edit_config(folder, **changes)
    with pytest.raises(kind, match=message):
        load_decoder(folder)
    if kind is CheckpointError:
        with pytest.raises(CheckpointError, match=message):
            native_config(folder)


def test_biases_of_zeros_that_old_writers_added_change_nothing(source: Path, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "packed", source, gptq())
    edit_state(folder, lambda state: state.update({f"{GATE}.bias": torch.zeros(96)}))
    assert read_config(folder).mlp_bias is False
