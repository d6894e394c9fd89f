"""A user's path from nothing: own prompts, answers of the target, a head, its directory, run again in the engine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from foretoken.cli.app import app as main_app
from foretoken.cli.train import app
from foretoken.config import SamplingParams, SpecConfig
from foretoken.draft.ngram_table import load_table
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError, InputError, MismatchError, StorageError, UnsupportedModelError
from foretoken.heads.checkpoint import load_head
from foretoken.heads.kind import head_kind
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.saving import save_checkpoint
from foretoken.train import head_run
from foretoken.train.answers import answered_data, folder_fingerprint, placed_prompts, read_answers
from foretoken.train.frozen_target import fast_precision
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer

SMALL = (
    "--set", "train.length=16", "--set", "train.batch_windows=2", "--set", "train.validate_windows=2",
    "--set", "train.validate_every_steps=4", "--tokens", "256", "--device", "cpu", "--json",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of seven layers with a tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("path")
    tiny_checkpoint(folder / "target", "llama", num_hidden_layers=7, vocab_size=300)
    tiny_tokenizer(folder / "target")
    rows = [{"prompt": f"def f{number}(" * (1 + number % 2)} for number in range(8)] + [{"prompt_ids": [1, 2, 3]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(*words: object) -> dict[str, object]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found


def answers(folder: Path, out: Path, *words: object) -> dict[str, object]:
    return run(
        "answers", "--target", folder / "target", "--prompts", folder / "prompts.jsonl", "--out", out,
        "--max-tokens", 12, "--batch-size", 4, "--json", *words,
    )  # fmt: skip


@pytest.fixture(scope="module")
def answered(folder: Path) -> Path:
    count = answers(folder, folder / "answers.jsonl")
    assert count["num_answers"] == 9
    return folder / "answers.jsonl"


def test_answers_go_on_where_a_killed_run_ended(folder: Path, answered: Path, tmp_path: Path) -> None:
    whole = answered.read_text().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(whole[:4]) + whole[4][:20])
    answers(folder, part)
    assert read_answers(part).pairs == read_answers(answered).pairs
    with pytest.raises(ConfigError, match="temperature"):
        answers(folder, part, "--temperature", 0.1)


def test_answers_of_another_target_are_refused(folder: Path, answered: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", "llama", num_hidden_layers=7, vocab_size=300, seed=4)
    tiny_tokenizer(other)
    data = answered_data(answered, folder / "target", 300, 0.2)
    assert data.train.num_wanted < len(data.train.ids)
    with pytest.raises(MismatchError, match="another target"):
        answered_data(answered, other, 300, 0.2)
    with pytest.raises(InputError, match="no file of answers"):
        answered_data(folder / "prompts.jsonl", folder / "target", 300, 0.2)


def test_a_prompt_beyond_the_context_is_named_by_its_line(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "good"}\n\n' + json.dumps({"prompt_ids": [1] * 999}) + "\n")
    words = ("answers", "--target", folder / "target", "--prompts", prompts, "--out", tmp_path / "answers.jsonl")
    with pytest.raises(InputError, match=r"prompts\.jsonl:3.*has 999 tokens; the context holds 256"):
        run(*words)


def test_lines_that_are_no_prompts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for line in ('{"text": "a"}', "[1]", '{"prompt_ids": [true]}', '{"prompt": ""}'):
        path.write_text('{"prompt": "good"}\n' + line + "\n")
        with pytest.raises(InputError, match=r"prompts\.jsonl:2"):
            placed_prompts(path)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block", "adapter"])
def test_a_head_is_trained_from_answers_and_read_again(kind: str, folder: Path, answered: Path, tmp_path: Path) -> None:
    words = (kind, "--target", folder / "target", "--answers", answered, "--out", tmp_path, *SMALL)
    plan = run(*words, "--dry-run")
    result = run(*words)
    assert plan["num_steps"] == result["steps"] == 8
    assert plan["memory_bytes"] > 0  # type: ignore[operator]
    head_folder = tmp_path / "head"
    drafter = "early_exit" if kind == "adapter" else kind
    assert head_kind(head_folder) == drafter
    head = load_head(head_folder, read_config(folder / "target"), target_folder=folder / "target")
    assert sum(p.numel() for p in head.parameters()) == plan["num_parameters"]
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert manifest["kind"] == drafter
    assert ("without_adapter" in manifest) == (kind == "adapter")
    assert manifest["result"]["steps"] == 8
    assert manifest["text"]["wanted_tokens"] > 0
    assert run(*words)["steps"] == 8  # finished: nothing is trained again


@pytest.mark.parametrize("kind", ["eagle", "block", "adapter"])
def test_a_head_is_trained_on_from_another(kind: str, folder: Path, answered: Path, tmp_path: Path) -> None:
    """Such rates leave it as it was, so that what a run starts from can be seen; the shape is that of the first."""
    words = (kind, "--target", folder / "target", "--answers", answered, *SMALL)
    shape = "head.intermediate_size=40"
    run(*words, "--out", tmp_path / "first", "--set", shape)
    rest = ("--set", "train.optimizer.matrix_rate=1e-12", "--set", "train.optimizer.vector_rate=1e-12")
    again = (*words, *rest, "--init", tmp_path / "first" / "head", "--out", tmp_path / "second")
    with pytest.raises(ConfigError, match=r"leave head\.\* out"):
        run(*again, "--set", shape)
    run(*again)
    config = read_config(folder / "target")
    first, second = (load_head(tmp_path / name / "head", config).state_dict() for name in ("first", "second"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    manifest = json.loads((tmp_path / "second" / "run.json").read_text())
    assert manifest["init"] == str(tmp_path / "first" / "head")
    assert "without_adapter" not in manifest
    with pytest.raises(ConfigError, match="not 'medusa'"):
        run("medusa", *again[1:])


@pytest.mark.parametrize(
    ("kind", "shape", "places"),
    [
        ("medusa", ("head.num_heads=6",), 6),
        ("block", ("head.block_size=3",), 3),
        ("block", ("head.block_size=3", "head.predicts_at_anchor=false"), 2),
    ],
)
def test_as_many_places_are_learnt_as_the_head_drafts(
    kind: str, shape: tuple[str, ...], places: int, folder: Path, answered: Path, tmp_path: Path
) -> None:
    """Those of the head that is asked for, or of the one that a run starts from."""
    words = (kind, "--target", folder / "target", "--answers", answered, *SMALL)
    first = run(*words, *(word for one in shape for word in ("--set", one)), "--out", tmp_path / "first")
    again = run(*words, "--init", tmp_path / "first" / "head", "--out", tmp_path / "second")
    few = run(*words, "--set", "train.num_places=1", "--init", tmp_path / "first" / "head", "--out", tmp_path / "few")
    for result, expected in ((first, places), (again, places), (few, 1)):
        assert len(result["acceptance"]["sampled"]) == expected  # type: ignore[index]


def test_a_run_goes_on_for_its_own_target_and_from_its_own_beginning(
    folder: Path, answered: Path, tmp_path: Path
) -> None:
    """Another target may have written the same text, and another head have the same shape."""
    words = ("medusa", "--target", folder / "target", "--answers", answered, *SMALL)
    run(*words, "--out", tmp_path / "first")
    with pytest.raises(ConfigError, match=r"init=.*was started with None"):
        run(*words, "--out", tmp_path / "first", "--init", tmp_path / "first" / "head")
    with pytest.raises(ConfigError, match=r"held_out_share=0\.2.*was started with 0\.05"):
        run(*words, "--out", tmp_path / "first", "--set", "held_out_share=0.2")
    other = tmp_path / "other"
    shutil.copytree(folder / "target", other)
    decoder = load_decoder(other, dtype="float32", pack=False)
    decoder.norm.weight.data += 1
    save_checkpoint(decoder, decoder.config, other)
    own, theirs = (folder_fingerprint(one) for one in (folder / "target", other))
    same = tmp_path / "same.jsonl"
    same.write_text(answered.read_text().replace(own, theirs))
    with pytest.raises(ConfigError, match=r"target=.*was started for another target"):
        run("medusa", "--target", other, "--answers", same, *SMALL, "--out", tmp_path / "first")
    for manifest in ("[]", '{"target": 3}', '{"target": ["x"]}'):
        (tmp_path / "first" / "run.json").write_text(manifest)
        with pytest.raises(StorageError, match=r"run\.json is no manifest of a run; remove it"):
            run(*words, "--out", tmp_path / "first")


def test_a_run_without_answers_is_refused_before_the_library_is_read(folder: Path, tmp_path: Path) -> None:
    """Its text is only for targets with its tokenizer: others were told so after it had been read and written."""
    with pytest.raises(MismatchError, match="--answers"):
        run("eagle", "--target", folder / "target", "--out", tmp_path / "run", *SMALL)
    assert not (tmp_path / "run" / "corpus.npz").exists()


def test_a_draft_model_is_distilled_from_answers(folder: Path, answered: Path, tmp_path: Path) -> None:
    common = ("draft", "--target", folder / "target", *SMALL, "--set", "train.num_places=2")
    result = run(*common, "--answers", answered, "--out", tmp_path / "off", "--set", "model.hidden_size=32")
    assert result["steps"] == 8
    draft = load_decoder(tmp_path / "off" / "model", dtype="float32")
    assert draft.config.hidden_size == 32
    manifest = json.loads((tmp_path / "off" / "run.json").read_text())
    assert (manifest["kind"], manifest["model"]["hidden_size"], manifest["result"]["steps"]) == ("draft_model", 32, 8)
    assert manifest["precision"] == fast_precision("cpu")
    own = tmp_path / "own.jsonl"
    run(
        "answers", "--target", tmp_path / "off" / "model", "--prompts", folder / "prompts.jsonl", "--out", own,
        "--max-tokens", 12, "--json",
    )  # fmt: skip
    again = ("--init", tmp_path / "off" / "model", "--answers", own, "--out", tmp_path / "on")
    with pytest.raises(MismatchError, match="another target"):
        run(*common, *again)
    run(*common, *again, "--on-policy")
    tuned = load_decoder(tmp_path / "on" / "model", dtype="float32")
    before, after = (dict(model.named_parameters())["embedding.weight"] for model in (draft, tuned))
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("family", "context", "error", "named"),
    [("llama", 8, ConfigError, "length=16"), ("gemma2", 256, UnsupportedModelError, "'gemma2' is not written")],
)
def test_a_draft_model_that_cannot_be_trained_or_written_is_refused_at_once(
    family: str, context: int, error: type[Exception], named: str, folder: Path, answered: Path, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path / "draft", family, vocab_size=300, max_position_embeddings=context)
    common = ("draft", "--target", folder / "target", *SMALL, "--answers", answered, "--out", tmp_path / "out")
    with pytest.raises(error, match=named):
        run(*common, "--init", tmp_path / "draft")
    assert not (tmp_path / "out" / "run.json").exists()  # training had not begun


def test_the_best_draft_model_is_there_whenever_a_run_is_killed(
    folder: Path, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed before its successor took its name, and a kill in between left none, or a part of one."""
    words = ("draft", "--target", folder / "target", "--answers", answered, "--out", tmp_path, *SMALL)
    words = (*words, "--set", "train.num_places=2", "--set", "model.hidden_size=32")
    run(*words)
    model, seen = tmp_path / "model", []
    files = {path.name for path in model.iterdir()}

    def watched(name: str) -> None:
        change = getattr(os, name)

        def changed(*given: Any, **more: Any) -> Any:
            result = change(*given, **more)
            seen.append(files - set(os.listdir(model) if model.is_dir() else ()))
            return result

        monkeypatch.setattr(os, name, changed)

    for name in ("rename", "replace", "unlink", "rmdir"):
        watched(name)
    head_run._save(load_decoder(model, dtype="float32", pack=False), model, folder / "target")
    monkeypatch.undo()
    assert seen
    assert not any(seen)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(("model", "."))} == {"model"}
    assert {path.name for path in model.iterdir()} == files


def test_a_manifest_that_cannot_be_written_leaves_the_earlier_one(
    folder: Path, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("draft", "--target", folder / "target", "--answers", answered, "--out", tmp_path, *SMALL)
    words = (*words, "--set", "train.num_places=2", "--set", "model.hidden_size=32")
    run(*words)
    earlier, write = (tmp_path / "run.json").read_text(), Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "run.json" in path.name:
            write(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"cannot write .*run\.json"):
        run(*words)
    assert (tmp_path / "run.json").read_text() == earlier


def test_from_own_prompts_to_generation_and_to_another_engine(folder: Path, answered: Path, tmp_path: Path) -> None:
    target, head = folder / "target", tmp_path / "run" / "head"
    run("eagle", "--target", target, "--answers", answered, "--out", tmp_path / "run", *SMALL)
    words = ["eval", "--target", target, "--drafters", f"eagle:head={head}", "--prompts", folder / "prompts.jsonl"]
    words += ["--prompts-per-slice", 2, "--max-tokens", 6, "--temperatures", 0, "--slices", "all", "--json"]
    result = CliRunner().invoke(main_app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert all(row["drafter"].startswith("eagle(head=") for row in rows)
    assert all(row["num_drafted"] > 0 for row in rows)
    params = SamplingParams(max_tokens=10, temperature=0.0)
    answers_by: list[tuple[int, ...]] = []
    for spec in (SpecConfig(None), SpecConfig("eagle", head=str(head), num_draft=3)):
        llm = LLM(target, spec, profile="off")
        answers_by.append(llm.generate([[5, 6, 7, 8]], params)[0].token_ids)
        llm.close()
    assert answers_by[0] == answers_by[1]
    out = tmp_path / "out"
    words = ["export", "--to", "sglang", "--target", str(target), "--head", str(head), "--out", str(out)]
    result = CliRunner().invoke(main_app, words)
    assert result.exit_code == 0, result.output
    assert (out / "config.json").exists()


def test_an_n_gram_table_is_counted_from_answers(folder: Path, answered: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "table", ("ngrams", "--target", folder / "target", "--out", tmp_path / "table", "--json")
    repeated = run(*words, *("--answers", answered) * 4)
    assert repeated["answers"] == 4 * 9
    assert repeated["entries"] == load_table(out).num_entries > 0
    plain, made = (
        LLM(folder / "target", SpecConfig("suffix", ngram_table=name), dtype="float32", cache_tokens=256).generate(
            [[1, 2, 3]], SamplingParams(max_tokens=8)
        )[0]
        for name in ("none", str(out))
    )
    assert made.token_ids == plain.token_ids
    header, *rows = answered.read_text().splitlines(keepends=True)
    few = tmp_path / "few.jsonl"
    few.write_text(header + json.dumps({"place": 0, "prompt_ids": [1], "answer_ids": [2, 3]}) + "\n")
    with pytest.raises(InputError, match="no token stands 3 times"):
        run(*words, "--answers", few)
    few.write_text(header.replace('"target": "', '"target": "x') + rows[0])
    with pytest.raises(MismatchError, match="another target"):
        run(*words, "--answers", few)
    with pytest.raises(StorageError, match="out: cannot write"):
        run(*words, "--answers", answered, "--out", tmp_path / "none" / "table")
