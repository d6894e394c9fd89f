"""Heads for other engines: the variant, the launch line, and the pairs that are refused."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from foretoken.backend.llama_cpp import KINDS
from foretoken.cli.app import run
from foretoken.errors import CheckpointError, ConfigError, StorageError
from foretoken.export.engines import NEWEST, engine_of, refusal_reason
from foretoken.export.launch import COUNTERPARTS, Launch, launch_of, plain_launch
from foretoken.export.write import export_head
from foretoken.heads.base import DraftVocabulary
from foretoken.heads.checkpoint import load_head, make_head, save_head
from foretoken.heads.config import HeadConfig
from foretoken.model.loader import read_config
from foretoken.model.names import model_folder
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.stored_heads import HEADS, adapter_config, block_config, eagle_config, medusa_config, stored_head

OPTIONS = Path(__file__).with_name("options")
DFLASH = block_config(markov_rank=0, is_causal=False, predicts_at_anchor=False)


def options(engine: str) -> set[str]:
    """Names that the engine takes; the removed ones begin with a dash and are left out."""
    lines = (OPTIONS / f"{engine}.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith(("#", "- ")) and not re.match(r"-[a-z]+_", line)}


def names_in(engine: str, launch: Launch) -> set[str]:
    found = {part for part in launch.argv if part.startswith("-") and part != "-m"}
    if engine == "vllm":
        found = set(json.loads(launch.argv[-1]))
    if engine == "trtllm":
        found |= set(re.findall(r"^ *(\w+):", launch.files["spec.yaml"], flags=re.MULTILINE))
    return found


@pytest.mark.parametrize("engine", sorted(NEWEST))
def test_every_option_that_is_written_exists(engine: str) -> None:
    written = 0
    for config in HEADS.values():
        for version in (None, "0.32") if engine == "vllm" else (None,):
            one = engine_of(engine, version)
            if refusal_reason(config, one) is None:
                written += 1
                assert names_in(engine, launch_of(config, one, "org/target", "HEAD", 3)) <= options(engine)
    for drafter, engines in COUNTERPARTS.items():
        if engine in engines and engine != "transformers":
            launch = plain_launch(drafter, engine_of(engine, None), "org/target", "org/draft", 3)
            assert names_in(engine, launch) <= options(engine)
    assert written or engine == "transformers"


@pytest.mark.parametrize("name", ['a "quoted" name', "C:\\new\\target"])
def test_a_program_that_starts_transformers_names_the_folder_as_it_is(name: str) -> None:
    for drafter in ("draft_model", "ngram"):
        program = ast.parse(plain_launch(drafter, engine_of("transformers", None), name, name, 3).files["generate.py"])
        assert name in [node.value for node in ast.walk(program) if isinstance(node, ast.Constant)]


def test_a_file_is_known_by_its_ending_in_any_case() -> None:
    assert plain_launch("ngram", engine_of("llamacpp", None), "m.GGUF", None, 3).argv[:3] == (
        "llama-server",
        "-m",
        "m.GGUF",
    )
    with pytest.raises(ConfigError, match="not a GGUF file"):
        plain_launch("ngram", engine_of("vllm", None), "m.GGUF", None, 3)
    with pytest.raises(ConfigError, match=r"to='vLLM 0.9': the configuration of vLLM before 0.20 is not written here"):
        plain_launch("ngram", engine_of("vllm", "0.9"), "org/target", None, 3)


@pytest.mark.parametrize("version", ["", "-1", "latest", "vLLM 0.33", "0.33 ", "0..3", "0.33.0; rm", "0.", "3,2"])
def test_a_text_that_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"engine_version=.*: give a version such as 0\.33\.0"):
        engine_of("vllm", version)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.33", (0, 33)),
        ("v0.33.0", (0, 33, 0)),
        ("0.33.1rc2.dev14+g1a2b3c4d5", (0, 33, 1)),
        ("0.5.23.post1+cpu", (0, 5, 23)),
        ("1.3.0rc2", (1, 3, 0)),
        ("2026-10-01", (2026, 10, 1)),
        ("b10549", (10549,)),
    ],
)
def test_versions(version: str, numbers: tuple[int, ...]) -> None:
    assert engine_of("vllm", version).numbers[: len(numbers)] == numbers


@pytest.mark.parametrize(
    ("config", "engine", "version", "words"),
    [
        (medusa_config(), "vllm", None, "up to 0.32"),
        (medusa_config(), "sglang", None, "does not run medusa"),
        (medusa_config(is_sequential=True), "tgi", None, "does not run hydra"),
        (adapter_config(), "vllm", None, "does not run adapter"),
        (medusa_config(has_own_output=False, num_blocks=2), "tgi", None, "one block"),
        (eagle_config(1), "trtllm", None, "does not run eagle heads"),
        (eagle_config(1), "llamacpp", None, "does not run eagle heads"),
        (eagle_config(1, fc_bias=True), "vllm", None, "fc.bias"),
        (eagle_config(), "tgi", None, "does not run eagle3"),
        (eagle_config(), "transformers", None, "no trained head|does not run eagle3"),
        (eagle_config(norm_before_residual=True), "sglang", None, "norm_before_residual"),
        (eagle_config(norm_before_residual=True), "trtllm", None, "norm_before_residual"),
        (eagle_config(norm_output=True), "llamacpp", None, "norm_output"),
        (eagle_config(fc_norm=True), "llamacpp", None, "fc_norm"),
        (eagle_config(layers=2), "llamacpp", None, "one layer"),
        (eagle_config(layers=2), "vllm", None, "one layer"),
        (eagle_config(fc_bias=True), "vllm", None, "fc.bias"),
        (HEADS["eagle1-qwen2"], "sglang", None, "qwen2"),
        (HEADS["eagle3-qwen3"], "vllm", None, "qwen3"),
        (eagle_config(taps=(1, 5)), "llamacpp", None, "exactly 3"),
        (replace(eagle_config(taps=(1, 2, 3)), target_num_layers=5), "trtllm", None, "five layers"),
        (block_config(), "sglang", None, "causal"),
        (replace(DFLASH, predicts_at_anchor=True), "sglang", None, "predicts_at_anchor=false"),
        (replace(DFLASH, predicts_at_anchor=True), "llamacpp", None, "predicts its own token in llama.cpp"),
        (eagle_config(), "vllm", "0.9", "0.20"),
    ],
)
def test_impossible_pairs_are_refused(config: HeadConfig, engine: str, version: str | None, words: str) -> None:
    assert re.search(words, str(refusal_reason(config, engine_of(engine, version))))


def test_possible_pairs() -> None:
    for config, engine, version in (
        (medusa_config(), "vllm", "0.32.1"),
        (medusa_config(), "tgi", None),
        *((eagle_config(), engine, None) for engine in ("vllm", "sglang", "trtllm", "llamacpp")),
        (eagle_config(1, fc_bias=True), "sglang", None),
        (DFLASH, "sglang", None),
        (block_config(), "vllm", None),
    ):
        assert refusal_reason(config, engine_of(engine, version)) is None


def test_launch_lines() -> None:
    head = eagle_config(taps=(1, 3, 6))
    line = launch_of(head, engine_of("vllm", None), "org/t", "H", 3).argv
    assert line[:3] == ("vllm", "serve", "org/t")
    assert json.loads(line[-1]) == {
        "method": "eagle3",
        "model": "H",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    }
    line = launch_of(head, engine_of("sglang", None), "org/t", "H", 3).argv
    assert line[-6:] == (
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    )
    launch = launch_of(head, engine_of("trtllm", None), "org/t", "H", 3)
    assert "eagle3_layers_to_capture: [0, 2, 5]" in launch.files["spec.yaml"]  # outputs: one below our taps
    assert "--config" in launch.argv
    assert "--extra_llm_api_options" in launch_of(head, engine_of("trtllm", "1.0"), "org/t", "H", 3).argv
    default = launch_of(eagle_config(), engine_of("trtllm", None), "org/t", "H", 3)
    assert "layers" not in default.files["spec.yaml"]
    line = launch_of(head, engine_of("llamacpp", None), "org/t", "H", 3).argv
    assert line[-4:] == ("--spec-type", "draft-eagle3", "--spec-draft-n-max", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


def stored(folder: Path, config: HeadConfig, tmp_path: Path) -> Path:
    save_head(stored_head(config), tmp_path / "head", read_config(folder))
    return tmp_path / "head"


def test_the_portable_variant_is_the_head_itself(folder: Path, tmp_path: Path) -> None:
    source = stored(folder, eagle_config(target=read_config(folder), draft_vocab_size=30), tmp_path)
    for engine in ("vllm", "sglang", "trtllm", "llamacpp"):
        export_head(source, folder, "org/t", engine_of(engine, None), tmp_path / engine, 3)
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / engine / name).read_bytes() == (source / name).read_bytes()
        found = json.loads((tmp_path / engine / "launch.json").read_text())
        assert found["engine"] == engine
        assert found["engine_version"] == NEWEST[engine]
        assert all((tmp_path / engine / name).exists() for name in found["files"])
        assert found["argv"][0] in (tmp_path / engine / "LAUNCH.md").read_text()


def test_eagle_1_for_sglang_has_a_bias_of_zeros(folder: Path, tmp_path: Path) -> None:
    target = read_config(folder)
    source = stored(folder, eagle_config(1, target=target), tmp_path)
    export_head(source, folder, "org/t", engine_of("sglang", None), tmp_path / "out", 3)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle"]
    assert not load_file(tmp_path / "out" / "model.safetensors")["fc.bias"].any()
    again, before = load_head(tmp_path / "out", target), load_head(source, target)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in before.state_dict().items())
    export_head(source, folder, "org/t", engine_of("vllm", None), tmp_path / "vllm", 3)
    assert "fc.bias" not in load_file(tmp_path / "vllm" / "model.safetensors")
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["architectures"] == ["EagleLlamaForCausalLM"]


def test_a_head_without_an_output_matrix_for_sglang(folder: Path, tmp_path: Path) -> None:
    source = stored(folder, eagle_config(target=read_config(folder)), tmp_path)
    export_head(source, folder, "org/t", engine_of("sglang", None), tmp_path / "out", 3)
    assert "draft_vocab_size" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_speculators_for_vllm(folder: Path, tmp_path: Path) -> None:
    source = stored(folder, eagle_config(target=read_config(folder)), tmp_path)
    launch = export_head(source, folder, "org/t", engine_of("vllm", None), tmp_path / "out", 3, as_speculators=True)
    assert launch.argv == ("vllm", "serve", str((tmp_path / "out").resolve()))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"] == {"name_or_path": "org/t", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ConfigError, match="only vLLM"):
        export_head(source, folder, "org/t", engine_of("sglang", None), tmp_path / "b", 3, as_speculators=True)


def test_what_is_refused_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    source = stored(folder, medusa_config(target=read_config(folder)), tmp_path)
    with pytest.raises(ConfigError, match=r"0\.32"):
        export_head(source, folder, "org/t", engine_of("vllm", "0.33"), tmp_path / "out", 3)
    with pytest.raises(ConfigError, match="at most 4"):
        export_head(source, folder, "org/t", engine_of("tgi", None), tmp_path / "out", 9)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    with pytest.raises(StorageError, match="exists already"):
        export_head(source, folder, "org/t", engine_of("tgi", None), source, 3)


def test_a_disk_that_fills_up_while_a_head_is_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of weights that an engine wants otherwise are written a second time, by safetensors."""

    def full(*_given: object, **_named: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    source = stored(folder, eagle_config(1, target=read_config(folder)), tmp_path)
    monkeypatch.setattr("foretoken.export.write.save_file", full)
    with pytest.raises(StorageError, match=r"cannot write the export .*No space left"):
        export_head(source, folder, "org/t", engine_of("sglang", None), tmp_path / "out", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


def test_the_verb(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = stored(folder, medusa_config(target=read_config(folder)), tmp_path)
    common = ["export", "--to", "tgi", "--target", str(folder), "--num-draft", "2", "--json"]
    assert run([*common, "--head", str(source), "--out", str(tmp_path / "out")]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["argv"][0] == "text-generation-launcher"
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["base_model_name_or_path"] == str(folder)
    assert run([*common, "--drafter", "ngram", "--out", str(tmp_path / "ngram")]) == 0
    assert run([*common, "--drafter", "suffix", "--out", str(tmp_path / "suffix")]) == 2
    assert run([*common, "--out", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("engine", "as_speculators"),
    [("vllm", False), ("vllm", True), ("sglang", False), ("trtllm", False), ("llamacpp", False)],
)
def test_b1_a_whole_vocabulary_has_no_tables(folder: Path, tmp_path: Path, engine: str, as_speculators: bool) -> None:
    target = read_config(folder)
    source = stored(folder, eagle_config(target=target, has_own_output=True), tmp_path)
    export_head(source, folder, "org/t", engine_of(engine, None), tmp_path / "out", 3, as_speculators)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"d2t", "t2d"} & tensors.keys()
    again, before = load_head(tmp_path / "out", target), load_head(source, target)
    assert again.vocabulary.is_whole
    assert all(torch.equal(again.state_dict()[name], value) for name, value in before.state_dict().items())


@pytest.mark.parametrize("is_tied", [False, True])
def test_b2_medusa_for_vllm_holds_the_output_matrix_of_the_target(tmp_path: Path, is_tied: bool) -> None:
    place = tiny_checkpoint(tmp_path / "target", "llama", num_hidden_layers=8, tie_word_embeddings=is_tied)
    target = read_config(place)
    source = stored(place, medusa_config(target=target, num_heads=2, has_own_output=False), tmp_path)
    export_head(source, place, "org/t", engine_of("vllm", "0.32"), tmp_path / "vllm", 2)
    written = load_file(tmp_path / "vllm" / "medusa_lm_head.safetensors")
    own = load_file(place / "model.safetensors")
    matrix = own["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "vllm").iterdir()} == {0o644}  # for whoever runs vLLM
    assert torch.equal(written["lm_head.weight"], matrix.to(written["lm_head.weight"].dtype))
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["original_lm_head"] is True
    again, before = load_head(tmp_path / "vllm", target), load_head(source, target)
    assert again.config == before.config
    assert all(torch.equal(again.state_dict()[name], value) for name, value in before.state_dict().items())
    export_head(source, place, "org/t", engine_of("tgi", None), tmp_path / "tgi", 2)
    assert "lm_head.weight" not in load_file(tmp_path / "tgi" / "medusa_lm_head.safetensors")


def test_b2_the_matrix_beside_medusa_heads_has_the_rows_of_their_vocabulary(folder: Path, tmp_path: Path) -> None:
    target = read_config(folder)
    config = medusa_config(target=target, num_heads=2, has_own_output=False)
    vocabulary = DraftVocabulary(torch.arange(1, target.vocab_size, 3), target.vocab_size)
    head = make_head(config, vocabulary).to(torch.float32)
    save_head(head, tmp_path / "head", target)
    export_head(tmp_path / "head", folder, "org/t", engine_of("vllm", "0.32"), tmp_path / "vllm", 2)
    written = load_file(tmp_path / "vllm" / "medusa_lm_head.safetensors")
    matrix = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(written["lm_head.weight"], matrix[written["token_map"]].float())
    assert torch.equal(load_head(tmp_path / "vllm", target).vocabulary.ids, vocabulary.ids)
    written["lm_head.weight"] = written["lm_head.weight"][1:].contiguous()
    save_file(written, tmp_path / "vllm" / "medusa_lm_head.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_head(tmp_path / "vllm", target)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp", "transformers"])
def test_b3_launch_lines_name_models_as_other_engines_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    words = ["export", "--to", engine, "--target", "reference:target", "--drafter", "draft_model", "--json"]
    assert run([*words, "--draft", "reference:draft", "--out", str(tmp_path / "own")]) == 0
    assert "reference:" not in "".join(path.read_text() for path in (tmp_path / "own").iterdir())
    assert str(model_folder("reference:target")) in (tmp_path / "own" / "LAUNCH.md").read_text()
    assert str(model_folder("reference:draft")) in (tmp_path / "own" / "LAUNCH.md").read_text()
    words[4] = "org/target"
    assert run([*words, "--draft", "org/draft", "--out", str(tmp_path / "given")]) == 0
    text = (tmp_path / "given" / "LAUNCH.md").read_text()
    assert "org/target" in text
    assert "org/draft" in text


def test_paths_of_models_are_absolute_in_launch_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The line runs in the folder of the export, not where the user stood."""
    monkeypatch.chdir(folder.parent)
    words = ["export", "--to", "vllm", "--drafter", "ngram", "--target", folder.name, "--out", str(tmp_path / "out")]
    assert run(words) == 0
    assert str(folder.resolve()) in (tmp_path / "out" / "LAUNCH.md").read_text()


def test_b3_names_that_no_other_engine_knows_are_refused(folder: Path, tmp_path: Path) -> None:
    source = stored(folder, eagle_config(target=read_config(folder)), tmp_path)
    for engine in NEWEST:
        one = engine_of(engine, None)
        if refusal_reason(eagle_config(), one) is None:
            for name in ("reference:target", "m.gguf"):
                with pytest.raises(ConfigError, match=r"^target=.*folder or hub id"):
                    export_head(source, folder, name, one, tmp_path / "out", 3)
    with pytest.raises(ConfigError, match=r"^target="):
        plain_launch("ngram", engine_of("vllm", None), "m.gguf", None, 3)
    with pytest.raises(ConfigError, match=r"^draft="):
        plain_launch("draft_model", engine_of("sglang", None), "org/t", "reference:draft", 3)
    assert not (tmp_path / "out").exists()


def test_llama_cpp_looks_up_without_a_draft_model() -> None:
    launch = plain_launch("ngram", engine_of("llamacpp", None), "org/t", None, 6)
    spec = launch.argv[launch.argv.index("--spec-type") :]
    assert spec == KINDS["ngram-simple"].arguments(6), "the arguments that are measured"
    assert launch.argv[:3] == ("llama-server", "-m", "target.gguf")
    assert [step[2] for step in launch.prepare] == ["org/t"]
    assert plain_launch("ngram", engine_of("llamacpp", None), "a/m.gguf", None, 6).prepare == ()


def test_an_older_tensorrt_llm_is_given_the_name_that_it_has_for_the_file() -> None:
    for version, option in (("1.0", "--extra_llm_api_options"), (None, "--config")):
        assert plain_launch("ngram", engine_of("trtllm", version), "org/t", None, 3).argv[2] == option


def test_b3_a_gguf_file_is_given_to_llama_cpp_as_it_is() -> None:
    launch = plain_launch("draft_model", engine_of("llamacpp", None), "a/m.gguf", "org/draft", 3)
    assert launch.argv[1:5] == ("-m", "a/m.gguf", "-md", "draft.gguf")
    assert [step[2] for step in launch.prepare] == ["org/draft"]


def test_b4_what_block_drafters_need_in_vllm_is_said(folder: Path, tmp_path: Path) -> None:
    source = stored(folder, block_config(target=read_config(folder)), tmp_path)
    launch = export_head(source, folder, "org/t", engine_of("vllm", None), tmp_path / "out", 2)
    assert any("runner V2" in note and "Triton" in note for note in launch.notes)
    assert "Triton" in (tmp_path / "out" / "LAUNCH.md").read_text()
    assert "Not started" in (tmp_path / "out" / "LAUNCH.md").read_text()
