"""The run on a GPU: parts fail by themselves, are not repeated once done, and measure something on a CPU too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.train.answers import answered_data
from studies.gpu import __main__ as command
from studies.gpu import answers, batches, checkpoint, copy_bandwidth, here
from studies.gpu.heads import FULL_HEAD, REHEARSED_HEAD, head_parts
from studies.gpu.parts import FULL, REHEARSAL, Part, parts_of
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer, token_ids

ABOUT = {"device": "cpu", "commit": "abc", "machine": {"cpu": "toy"}}


def part(code: str, **more: object) -> Part:
    return Part("one", (sys.executable, "-S", "-c", code), 30.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "left_s", "outcome", "reason"),
    [
        (part("open('made', 'w').close()", out="made"), 99.0, "done", ""),
        (part("pass", out="made"), 99.0, "failed", "it wrote no result"),
        (part("import torch_of_tomorrow"), 99.0, "failed", "No module named 'torch_of_tomorrow'"),
        (part("raise SystemExit(5)"), 99.0, "failed", "exit code 5"),
        (part("print('SKIPPED: no GPU')", means_nothing_ran="no GPU"), 99.0, "failed", "no GPU"),
        (part("import time; time.sleep(60)"), 5.1, "out of time", "5 s were not enough"),
        (part("pass"), 1.0, "not reached", "run the same command again"),
    ],
)
def test_outcomes(made: Part, left_s: float, outcome: str, reason: str, tmp_path: Path) -> None:
    found = command.run_part(made, tmp_path, ABOUT, left_s)
    assert (found["outcome"], reason in found["reason"]) == (outcome, True), found
    assert json.loads((tmp_path / "one.json").read_text()) == found
    assert str(tmp_path) not in json.dumps(found)


def test_a_done_part_is_not_repeated(tmp_path: Path) -> None:
    """Unless its result is gone, or the device or the commit is another."""
    made = part("open('made', 'a').write('x')", out="made")
    for about, times in ((ABOUT, 1), (ABOUT, 1), (ABOUT | {"commit": "def"}, 2), (ABOUT | {"device": "cuda"}, 3)):
        assert command.run_part(made, tmp_path, about, 99.0)["outcome"] == "done"
        assert (tmp_path / "made").read_text() == "x" * times
    (tmp_path / "made").unlink()
    command.run_part(made, tmp_path, ABOUT | {"device": "cuda"}, 99.0)
    assert (tmp_path / "made").read_text() == "x"


def test_the_log_of_a_part_that_is_ended_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command.run_part(part("print('halfway'); import time; time.sleep(60)"), tmp_path, ABOUT, 5.1)
    assert (tmp_path / "one.log").read_text() == "halfway\n"


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cuda:1", None, "1"), ("cuda:1", "4,7", "7"), ("cuda", "4,7", "4,7"), ("cuda", None, None), ("cpu", None, None)],
)
def test_tests_see_the_device_that_was_named(
    device: str, visible: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask for `cuda`, which is the first one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tests,) = [one for one in parts_of("smollm2", device, FULL) if one.name == "tests"]
    assert command._environment(tests).get("CUDA_VISIBLE_DEVICES") == expected


def test_other_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _main(command.main, monkeypatch, "--out", str(tmp_path / "out"), "--device", "mps") == 2
    assert not (tmp_path / "out").exists()


def test_a_changed_checkout_is_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETOKEN_COMMIT", raising=False)
    monkeypatch.setattr(command, "_CHECKOUT", tmp_path)
    assert command.commit() == "unknown"
    who = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "nobody")
    file = tmp_path / "code.py"
    file.write_text("1\n")
    for words in (("init", "-q"), ("add", "code.py"), ("commit", "-qm", "one")):
        subprocess.run(["git", *words], cwd=tmp_path, env={**os.environ, **who}, check=True)
    found = [command.commit()]
    for text in ("2\n", "3\n", "1\n"):
        file.write_text(text)
        found.append(command.commit())
    assert re.fullmatch("[0-9a-f]{40}", found[0])
    assert found[3] == found[0]
    assert len({*found}) == 3
    assert all(one.startswith(f"{found[0]}+") for one in found[1:3])


def test_what_every_part_imports_is_looked_for() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split("[<>=]", one)[0] for one in project["dependencies"]}
    assert needed <= {name for names in here._PACKAGES.values() for name in names}


def test_the_plan() -> None:
    """Correctness before speed, names that differ, no folder of a machine in a command."""
    for device, scale in (("cuda", FULL), ("cpu", REHEARSAL)):
        parts = parts_of("smollm2", device, scale)
        names = [one.name for one in parts]
        assert len(set(names)) == len(names)
        own = [name.split(".")[1] for name in names if name.startswith("as-is.")]
        assert own == ["checkpoint", "audit", "audit", "rounds", "drafters", "batches"]
        assert [f"{size}.rounds" in names for size in FULL.sizes] == [device == "cuda"] * len(FULL.sizes)
        assert all(not Path(word).is_absolute() for one in parts for word in one.command[1:])
    settings = [one.name for one in parts_of("smollm2", "cuda", FULL) if "batched,triton,graphs" in one.command]
    assert settings == [*(f"{size}.rounds" for size in FULL.sizes), "as-is.rounds"]
    assert [row in FULL.rows.split(",") for row in ("1", "128")] == [True, True]


def test_every_test_for_a_gpu_is_run_there() -> None:
    marked = {str(path) for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")}
    (tests,) = [one for one in parts_of("smollm2", "cuda", FULL) if one.name == "tests"]
    assert {word for word in tests.command if word.startswith("tests/")} == marked


def test_a_part_reads_what_an_earlier_one_wrote() -> None:
    """Of those that train a head."""
    for device, scale, head in (("cuda", FULL, FULL_HEAD), ("cpu", REHEARSAL, REHEARSED_HEAD)):
        written = {"models/as-is"}
        for one in head_parts(device, scale, head):
            read = [word.split("=")[-1] for word in one.command if "heads." in word or word.startswith("models/")]
            assert {word.removesuffix("/head") for word in read if word != one.out} <= written
            written.add(one.out)


@pytest.mark.release
def test_a_head_is_trained_on_what_the_model_says(tmp_path: Path) -> None:
    """Every part on a CPU, on a random model that chats."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    folder = tiny_checkpoint(
        tmp_path / "models" / "as-is", "llama", vocab_size=600, num_hidden_layers=8, max_position_embeddings=4096
    )
    tiny_tokenizer(folder, 600, chat_template=template)
    for one in head_parts("cpu", REHEARSAL, REHEARSED_HEAD):
        found = command.run_part(one, tmp_path, ABOUT, 120.0)
        assert found["outcome"] == "done", found


def _main(study: Callable[[], int], monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["study", *words])
    return study()


def test_what_the_parts_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Path("tests/reference/target").resolve()
    monkeypatch.chdir(tmp_path)
    assert _main(here.main, monkeypatch, "--device", "cpu", "--out", "here.json") == 0
    words = ("--device", "cpu", "--mebibytes", "1", "--repeats", "2", "--out", "copy.json")
    assert _main(copy_bandwidth.main, monkeypatch, *words) == 0
    found = json.loads(Path("copy.json").read_text())
    assert (found["moved_bytes"], len(found["seconds"])) == (2 << 20, 2)
    words = ("--target", str(target), "--device", "cpu", "--dtype", "float32", "--drafters", "ngram")
    words += ("--batches", "1,2", "--max-tokens", "3", "--out", "batches.json")
    assert _main(batches.main, monkeypatch, *words) == 0
    rows = json.loads(Path("batches.json").read_text())["rows"]
    assert [(row["setting"], row["batch"]) for row in rows] == [
        (name, n) for name in ("plain", "ngram") for n in (1, 2)
    ]
    assert all(row["differing"] == 0 < row["request_p95_s"] for row in rows)


def test_answers_of_a_static_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the engine, in more turns than one; ends of text end them, prompts that are too long are left out."""
    target = str(Path("tests/reference/target").resolve())
    asked = [token_ids(count, seed=count) for count in (1, 9, 4, 30, 2, 17, 5)]
    with LLM(target, device="cpu", dtype="float32", profile="off") as llm:
        outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=20))
    expected = [list(one.token_ids) for one in outputs if len(one.prompt_ids) < 30]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": one}) + "\n" for one in asked))
    words = ("--target", target, "--prompts", str(prompts), "--out", str(out), "--device", "cpu", "--dtype", "float32")
    words += ("--rows", "3", "--columns", "40", "--max-tokens", "20", "--temperature", "0")
    assert _main(answers.main, monkeypatch, *words) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert [row["answer_ids"] for row in sorted(rows, key=lambda row: row["place"])] == expected
    read = answered_data(out, Path(target), 4096, 0.2)
    assert read.train.num_wanted + read.held_out.num_wanted == sum(map(len, expected))


def test_the_source_as_it_is(pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sizes, and the same weights up to bf16."""
    from foretoken.model.loader import load_decoder

    out = tmp_path / "as-is"
    assert _main(checkpoint.main, monkeypatch, "--source", str(pair.target), "--to", "as-is", "--out", str(out)) == 0
    ours, theirs = (load_decoder(place, dtype=torch.bfloat16, device="cpu") for place in (out, Path(pair.target)))
    assert ours.config.num_parameters == theirs.config.num_parameters


def test_without_the_device_every_part_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ("--out", str(tmp_path), "--only", "copy", "--source", "smollm2")
    assert _main(command.main, monkeypatch, *words) == 1
    found = json.loads((tmp_path / "copy.json").read_text())
    assert found["outcome"] == "failed"
    assert "no CUDA device" in found["reason"]
    assert json.loads((tmp_path / "summary.json").read_text())["parts"] == {"copy": "failed"}
