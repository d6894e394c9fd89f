"""What an audit may be asked, and the prompts it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken import InputError, SpecConfig, StorageError
from foretoken.measure.audit.options import AuditOptions, ChatPrompt, read_prompts
from foretoken.measure.audit.session import Session
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer

TOOLS = '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}'


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_lines_are_prompts(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path / "p.txt", "one\n\n  two words\nthrée\n")) == ["one", "  two words", "thrée"]


def test_json_lines_hold_texts_or_ids(tmp_path: Path) -> None:
    text = '{"prompt": "one"}\n\n{"prompt_ids": [1, 2], "name": "x"}\n'
    assert read_prompts(write(tmp_path / "p.txt", text)) == ["one", [1, 2]]
    assert read_prompts(write(tmp_path / "p.jsonl", text)) == ["one", [1, 2]]


def test_a_conversation_is_laid_out_by_the_targets_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "ab"}]
    file = write(tmp_path / "p.jsonl", json.dumps({"messages": messages}) + '\n{"prompt": "cd"}\n')
    prompts = read_prompts(file)
    assert prompts == [ChatPrompt(messages), "cd"]
    tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1, hidden_size=16, vocab_size=300)
    tiny_tokenizer(tmp_path, 300, chat_template="<{{ messages[0].content }}>")
    session = Session(AuditOptions(str(tmp_path), SpecConfig("ngram"), cache_tokens=512), prompts)
    assert session.prompts == [session.llm.encode_chat(messages), session.llm.encode("cd")]
    session.llm.close()


def test_a_recorded_conversation_is_asked_up_to_its_last_answer(tmp_path: Path) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    file = write(tmp_path / "p.jsonl", json.dumps({"messages": [said, {"role": "assistant", "content": "c"}]}))
    assert read_prompts(file) == [ChatPrompt([{"role": "user", "content": "ab"}])]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"messages": []}\n', r'p\.jsonl:1.*"messages": give a list of messages'),
        ("p.jsonl", TOOLS, r'p\.jsonl:1.*has "tools": tools and tool calls are not replayed'),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "b"}]}', r"p\.jsonl:1.*an answer alone"),
        ("p.txt", "\n \n", "the file is empty"),
        ("p.json", '[{"prompt": "a"}]', "is one JSON text; write one object a line"),
        ("p.jsonl", "plain text\n", r"p\.jsonl:1.*not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n[1]\n', r"p\.jsonl:2.*every line must be an object"),
        ("p.txt", '{"prompt": ""}\n', "must hold messages"),
        ("p.txt", '{"prompt_ids": [1, true]}\n', "must hold messages"),
        ("p.txt", '{"prompt_ids": []}\n', "must hold messages"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_prompts(write(tmp_path / name, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.txt"):
        read_prompts(tmp_path / "nowhere.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(StorageError, match=r"bytes\.txt"):
        read_prompts(tmp_path / "bytes.txt")


@pytest.mark.parametrize(
    ("field", "value"), [("num_prompts", 0), ("max_tokens", 1), ("seed", -1), ("temperatures", ())]
)
def test_options_are_checked(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        AuditOptions("x", SpecConfig(), **{field: value})  # type: ignore[arg-type]


def test_sampled_temperatures() -> None:
    assert AuditOptions("x", SpecConfig(), temperatures=(0.8, 0.0, 1.0, 0.8)).sampled == (0.8, 1.0)
