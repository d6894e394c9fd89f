"""Prompts from the bench, from folders, and which drafters `all` means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.measure.eval.options import EvalOptions
from foretoken.measure.eval.prompts import EvalPrompt, in_turns, own_prompts, prompts_of
from foretoken.measure.options import ALL


def test_prompts_of_the_bench() -> None:
    found = own_prompts(["code", "edit"], 2)
    assert [prompt.slice for prompt in found] == ["code", "code", "edit", "edit"]
    assert [prompt.slice for prompt in in_turns(found)] == ["code", "edit", "code", "edit"]
    assert all(prompt.prediction for prompt in found if prompt.slice == "edit")
    assert len({prompt.key for prompt in own_prompts([ALL], 1)}) == 5
    with pytest.raises(InputError, match="slices='odd'"):
        own_prompts(["odd"], 1)


def test_a_folder_of_files_of_several_kinds(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no \.json or \.jsonl file below"):
        prompts_of(tmp_path, [ALL], 9)
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "one"}, {"prompt": "two"}]))
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "three"}]}\n{"prompt": "four"}\n')
    (tmp_path / "notes.txt").write_text("no prompt")
    found = prompts_of(tmp_path, [ALL], 9)
    assert [(prompt.slice, prompt.name) for prompt in found] == [("a", "a:1"), ("a", "a:2"), ("b", "b:1"), ("b", "b:2")]
    assert found[2].content == ({"role": "user", "content": "three"},)
    assert [prompt.content for prompt in prompts_of(tmp_path, ["a"], 1)] == ["one"]


def test_the_key_is_that_of_the_content() -> None:
    key = EvalPrompt("name", "s", "text").key
    assert key == EvalPrompt("other name", "s", "text").key
    others = [EvalPrompt("n", "t", "text"), EvalPrompt("n", "s", (1, 2)), EvalPrompt("n", "s", "text", "p")]
    assert len({key, *(one.key for one in others)}) == 4


def test_all_leaves_out_what_cannot_be_evaluated() -> None:
    names = [one.name for one in EvalOptions("t", drafters=["all", "ngram:num_draft=2"]).settings]
    assert {"ngram-5", "ngram-2", "suffix-5", "predicted-5"} <= set(names)
    assert not any(name.startswith(("auto", "draft_model")) for name in names)
    assert "draft_model-5" in [one.name for one in EvalOptions("t", "d", drafters=["all"]).settings]
    with pytest.raises(ConfigError, match="needs a draft model"):
        EvalOptions("t")
    with pytest.raises(InputError, match="temperatures"):
        EvalOptions("t", drafters=["ngram"], temperatures=())
    with pytest.raises(InputError, match="max_tokens=1"):
        EvalOptions("t", drafters=["ngram"], max_tokens=1)


def test_a_rule_of_its_own_is_in_the_name() -> None:
    names = [one.name for one in EvalOptions("t", "d", drafters=["draft_model:rule=block", "draft_model"]).settings]
    assert names == ["draft_model-5 block", "draft_model-5"]


def test_texts_may_stand_before_conversations_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt_ids": [1, 2]}\n')
    assert [prompt.content for prompt in prompts_of(path, [ALL], 5)] == ["a", (1, 2)]


ASKED = {"role": "user", "content": "Hello"}
RECORDED = {
    "a batch file of OpenAI": {"custom_id": "r", "body": {"messages": [ASKED], "max_tokens": 9, "temperature": 0.5}},
    "a session of aiperf": {"session_id": "r", "turns": [{"text": "Hello", "output_length": 9}, {"text": "More"}]},
    "a log with answers": {"messages": [ASKED, {"role": "assistant", "content": "Hi"}], "max_tokens": 9},
    "contents in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "name": "r"},
}


@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_conversations_are_asked_up_to_their_last_answer(kind: str, tmp_path: Path) -> None:
    """Their texts are in the messages alone: read as texts, they would be empty."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(RECORDED[kind]))
    (found,) = prompts_of(path, [ALL], 5)
    assert found.content == (ASKED,)
    assert found.max_tokens == (None if kind == "contents in parts" else 9)
    assert found.key == EvalPrompt("other", "r", (ASKED,)).key  # lengths are set by the measurement


def test_a_conversation_may_bring_what_is_expected_and_says_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": [ASKED], "prediction": "Hi"}))
    assert prompts_of(path, [ALL], 5)[0].prediction == "Hi"
    for wrong, named in (
        ({"prediction": 3}, "prediction"),
        ({"max_tokens": 0}, "max_tokens there"),
        ({"tools": [{}]}, "tools and tool calls are not replayed"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "an answer alone"),
    ):
        path.write_text(json.dumps({"messages": [ASKED], **wrong}))
        with pytest.raises(InputError, match=rf"r\.jsonl:1.*{named}"):
            prompts_of(path, [ALL], 5)
