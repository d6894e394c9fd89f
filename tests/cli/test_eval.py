"""`foretoken eval`: the file, the comparison, prompts of every kind, interrupts, wrong input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.cli import eval as module
from foretoken.measure.eval import run as run_module
from foretoken.measure.eval.result import SCHEMA
from tests.cli.conftest import Run
from tests.helpers.checkpoints import tiny_tokenizer, token_ids

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
SHORT = ["--max-tokens", 12, "--num-draft", 3, "--dtype", "float32"]


def written(path: Path, num_prompts: int) -> Path:
    lines = [{"prompt_ids": token_ids(4 + i, seed=i) * 2, "slice": "ab"[i % 2]} for i in range(num_prompts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "ids.jsonl", 10)


def test_the_file_holds_what_a_later_run_compares(foretoken: Run, pair: SimpleNamespace, prompts: Path) -> None:
    common = ["eval", "-t", pair.target, "--prompts", prompts, *SHORT]
    drafters = ["--draft", pair.draft, "--drafters", "draft_model,ngram,recycling"]
    done = foretoken(*common, *drafters, "--out", "first.json")
    assert (done.code, "Traceback" in done.err) == (0, False), done.err
    assert done.lines[-1] == "written: first.json"
    assert done.err.startswith("evaluating: answer 1 of 60 (draft_model-3)\n")
    assert "evaluating: answer 60 of 60" in done.err
    found = json.loads(Path("first.json").read_text())
    assert (found["schema"], found["complete"], len(found["answers"])) == (SCHEMA, True, 60)
    assert set(found["emitted_per_step"]) == {"draft_model-3", "ngram-3", "recycling-3"}
    assert {len(found["identity"]["target"][part]) for part in ("weights", "config")} == {64}
    assert list(found["identity"]["drafts"]) == ["draft_model-3"]
    row = found["rows"][0]
    assert (row["drafter"], row["slice"], row["rules"], row["num_prompts"]) == ("draft_model-3", "a", ["greedy"], 5)
    assert row["acceptance_interval"][0] <= row["acceptance_rate"] <= row["acceptance_interval"][1]
    assert row["num_emitted"] == row["num_accepted"] + row["num_rounds"]
    assert [one["position"] for one in row["positions"]] == [1, 2, 3]
    again = foretoken(*common, "--drafters", "recycling,ngram", "--slices", "b", "--against", "first.json", "--json")
    assert again.code == 0, again.err
    compared = json.loads(again.lines[-1])["comparison"]
    assert len(compared["cells"]) == 4
    assert {one["loss"] for one in compared["cells"]} <= {0.0, None}  # the same answers, whatever else is run
    assert compared["changed"] == []


def test_a_price_is_one_of_plain_decoding_too(foretoken: Run, pair: SimpleNamespace, prompts: Path) -> None:
    common = ["eval", "-t", pair.target, "--drafters", "ngram", "--prompts", prompts, *SHORT, "--temperatures", "0"]
    done = foretoken(*common, "--price-per-hour", 2, "--out", "priced.json", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.lines[-1])
    places = [(one["place"], one["setting"], one["change"] is None) for one in found["prices"]]
    assert places == [
        ("a, 0", "plain", True),
        ("b, 0", "plain", True),
        ("a, 0", "ngram-3", False),
        ("b, 0", "ngram-3", False),
    ]
    assert all(
        one["price_per_million_tokens"] == pytest.approx(2 / 3600 / one["tokens_per_s"] * 1e6)
        for one in found["prices"]
    )
    assert ({one["drafter"] for one in found["answers"]}, found["complete"]) == ({"ngram-3"}, True)
    again = foretoken(*common, "--against", "priced.json")  # without a price, nothing else differs
    assert again.code == 0, again.err
    assert "per 1M tokens" not in again.out
    assert foretoken(*common, "--price-per-hour", 0).code == 2


def test_a_worse_draft_is_exit_code_5_and_named(foretoken: Run, pair: SimpleNamespace, tmp_path: Path) -> None:
    prompts = written(tmp_path / "ids.jsonl", 20)
    worse = shutil.copytree(pair.draft, tmp_path / "worse")
    weights = load_file(worse / "model.safetensors")
    torch.manual_seed(0)
    for tensor in weights.values():
        tensor += torch.randn_like(tensor) * tensor.std() if tensor.dim() == 2 else 0
    save_file(weights, worse / "model.safetensors", {"format": "pt"})
    common = ["eval", "-t", pair.target, "--prompts", prompts, *SHORT, "--temperatures", "0"]
    assert foretoken(*common, "--draft", pair.draft, "--out", "first.json").code == 0
    done = foretoken(*common, "--draft", worse, "--against", "first.json", "--out", "second.json")
    assert done.code == 5, done.out
    assert "error: acceptance fell: draft_model-3 on a at temperature 0: " in done.err
    assert "(changed: draft of draft_model-3: weights (" in done.err
    assert "ngram" not in done.err.split("error: ")[1]
    assert "2 of 6 lost more than 0.05 of acceptance rate" in done.out
    assert json.loads(Path("second.json").read_text())["comparison"]["cells"][0]["outcome"] == "lost"
    assert foretoken(*common, "--draft", worse, "--against", "first.json", "--max-lost", 1).code == 0


def test_chat_prompts_and_texts(foretoken: Run, text_pair: SimpleNamespace, tmp_path: Path) -> None:
    target = shutil.copytree(text_pair.target, tmp_path / "target")
    tiny_tokenizer(target, 300, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "the list of a class"}]
    lines = [{"messages": messages, "slice": "talk"}, {"prompt": "def the return", "slice": "code"}]
    Path("p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["eval", "-t", target, "--draft", text_pair.draft, "--prompts", "p.jsonl", *SHORT]
    common += ["--drafters", "draft_model", "--temperatures", "0.7"]
    done = foretoken(*common, "--json", "--out", "a.json")
    assert done.code == 0, done.err
    found = json.loads(done.lines[-1])
    kept = json.loads(Path("a.json").read_text())
    assert kept.pop("page")["title"]
    assert found == kept
    assert [(row["slice"], row["rules"]) for row in found["rows"]] == [("talk", ["coupled"]), ("code", ["coupled"])]
    refused = foretoken(*common, "--chat", "--against", "a.json")
    assert (refused.code, refused.out) == (2, "")
    assert "acceptance depends on chat, which is True here" in refused.err
    assert foretoken(*common, "--chat").code == 0
    tiny_tokenizer(target, 300, chat_template=TEMPLATE.replace("<", "["))
    other = foretoken(*common, "--against", "a.json")
    assert other.code == 0  # one prompt a slice decides nothing
    assert "changed: target: template (" in other.out
    assert "undecided" in other.out
    plain = foretoken("eval", "-t", text_pair.target, "--drafters", "ngram", "--prompts", "p.jsonl", *SHORT)
    assert (plain.code, "has no chat template" in plain.err) == (2, True)


def interrupted_at(patched: pytest.MonkeyPatch, count: int) -> Callable[[], int]:
    """Ctrl-C comes before answer number `count`, counted from 0; returns the number of answers so far."""
    measure, calls = run_module.measure, 0

    def counted(*given: Any) -> Any:
        nonlocal calls
        if calls == count:
            raise KeyboardInterrupt
        calls += 1
        return measure(*given)

    patched.setattr(run_module, "measure", counted)
    return lambda: calls


def test_an_interrupt_writes_what_is_there(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["eval", "-t", pair.target, "--drafters", "ngram", "--prompts", prompts, *SHORT]
    with monkeypatch.context() as patched:
        interrupted_at(patched, 3)
        done = foretoken(*common, "--out", "part.json")
    assert (done.code, done.lines[-1]) == (130, "written: part.json (incomplete)")
    assert "note: incomplete, the run was interrupted" in done.out
    found = json.loads(Path("part.json").read_text())
    assert (found["complete"], len(found["answers"])) == (False, 3)
    again = foretoken(*common, "--against", "part.json")
    assert "note: the earlier file is incomplete" in again.out


def test_an_interrupted_evaluation_goes_on(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Path(shutil.copytree(pair.draft, "draft"))
    prompts.write_text(prompts.read_text() + prompts.read_text().splitlines()[0] + "\n")  # the same prompt twice
    common = ["eval", "-t", pair.target, "--draft", draft, "--drafters", "draft_model,ngram,recycling"]
    common += ["--prompts", prompts, "--prompts-per-slice", 6, *SHORT, "--price-per-hour", 2, "--json"]
    whole = json.loads(foretoken(*common).lines[-1])
    kept = ["--resume", "kept.jsonl"]
    with monkeypatch.context() as patched:
        interrupted_at(patched, 31)
        done = foretoken(*common, *kept, "--out", "part.md")
    assert (done.code, json.loads(done.lines[-1])["complete"]) == (130, False)
    assert "interrupted; go on with the same options and --resume kept.jsonl" in Path("part.md").read_text()
    calls = interrupted_at(monkeypatch, 999)
    done = foretoken(*common, *kept)
    resumed = json.loads(done.lines[-1])
    assert (done.code, calls()) == (0, 11 * 4 * 2 - 31)
    assert f"answer {11 * 4 * 2} of {11 * 4 * 2}" in done.err
    for name in ("complete", "answers", "rows", "emitted_per_step", "identity", "notes"):
        assert resumed[name] == whole[name]
    again = json.loads(foretoken(*common, *kept).lines[-1])
    assert (calls(), again["prices"]) == (11 * 4 * 2 - 31, resumed["prices"])
    other = foretoken(*common, *kept, "--seed", 1)
    assert (other.code, "was measured with seed=0, this run has 1" in other.err) == (2, True)
    (draft / "config.json").write_text((draft / "config.json").read_text() + " ")
    other = foretoken(*common, *kept)
    assert (other.code, "was measured with files of draft=" in other.err) == (2, True)


def test_progress_lines_come_from_time_to_time(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 1000, 4))  # between two answers
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    arguments = ["--drafters", "ngram", "--temperatures", "0", "--prompts-per-slice", 4]
    done = foretoken("eval", "-t", pair.target, "--prompts", prompts, *SHORT, *arguments)
    numbers = [line.split()[2] for line in done.err.splitlines() if line.startswith("evaluating")]
    assert numbers == ["1", "4", "7", "8"]


def test_wrong_input_is_refused_before_anything_is_loaded(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = ["eval", "-t", pair.target, "--drafters", "ngram", "--prompts", prompts]
    assert foretoken(*ready, *SHORT, "--temperatures", "0", "--slices", "a", "--out", "a.json").code == 0
    Path("other.json").write_text('{"schema": "foretoken.acceptance/9"}')
    Path("foreign.json").write_text('{"rows": []}')
    monkeypatch.setattr(run_module, "open_llm", None)
    cases = [
        (4, ["--against", "nowhere.json"], "against: cannot read nowhere.json"),
        (4, ["--against", prompts], "against: cannot read"),
        (2, ["--against", "other.json"], "has schema 'foretoken.acceptance/9'"),
        (2, ["--against", "foreign.json"], "is no result of foretoken eval"),
        (2, [*SHORT, "--against", "a.json", "--drafters", "suffix"], "no drafter in common with this run (suffix-3)"),
        (2, [*SHORT, "--against", "a.json", "--slices", "b"], "no slice in common with this run (b)"),
        (2, ["--against", "a.json"], "acceptance depends on max_tokens, which is 64 here"),
        (4, ["--out", "no/folder/a.json"], "out: cannot write"),
        (2, ["--against", "a.json", "--out", "./a.json"], "is the earlier result itself; name another file"),
        (2, ["--max-lost", 2], "max_lost=2.0: must lie in [0, 1]"),
        (2, ["--drafters", "auto"], "evaluate drafters by name"),
        (2, ["--drafters", "ngram:num_draft=auto"], "evaluate drafters by name"),
        (2, ["--drafters", "draft_model"], "needs a draft model: give --draft"),
        (2, ["--draft", "reference:draft", "--drafters", "ngram"], "none of the drafters takes one; leave"),
        (2, ["--drafters", "predicted"], "no prompt has a prediction"),
        (2, ["--num-draft", 0], "num_draft=0: must be at least 1"),
        (2, ["--slices", "c"], "slices='c': the prompts have a, b; or take all"),
        (3, ["--draft", "nowhere", "--drafters", "draft_model"], "nowhere"),
    ]
    for code, arguments, message in cases:
        done = foretoken(*ready, *arguments)
        assert (done.code, done.out) == (code, ""), (arguments, done.err)
        assert message in done.err, (arguments, done.err)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": []}', '"messages": give a list of messages'),
        ('{"messages": [{"content": "a"}]}', "each must be a mapping"),
        ('{"prompt_ids": [1, "a"]}', "must hold messages"),
        ('{"prompt_ids": [1], "slice": 3}', '"slice" must be a text'),
        ('{"prompt_ids": [1]}\n[]', "every line must be an object"),
        ('{"odd": 1}', "known formats"),
        ("", "holds no prompt"),
    ],
)
def test_broken_prompts(foretoken: Run, pair: SimpleNamespace, line: str, message: str) -> None:
    Path("p.jsonl").write_text(line)
    done = foretoken("eval", "-t", pair.target, "--drafters", "ngram", "--prompts", "p.jsonl")
    assert done.code == 2
    assert message in done.err


def test_a_prompt_that_does_not_fit_is_named_before_the_first_answer(foretoken: Run, pair: SimpleNamespace) -> None:
    lines = [{"prompt_ids": [5, 6, 7]}, {"prompt_ids": [5] * 5000}]
    Path("long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = foretoken("eval", "-t", pair.target, "--drafters", "ngram", "--prompts", "long.jsonl", *SHORT)
    assert (done.code, done.out) == (2, "")
    assert "error: prompts='long:2': has 5000 tokens; the context has room for " in done.err
    assert "evaluating" not in done.err
