"""Prompts from files: one's own lines and the shapes of public evaluation sets (with texts made up here)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.errors import InputError, StorageError
from foretoken.measure.load.prompts import asks
from foretoken.measure.prompts import choose, fit, read_prompts
from foretoken.measure.workload import Prompt

PUBLIC = {
    "spec/question.jsonl": [
        {"question_id": 7, "category": "writing", "turns": ["Write a line about rain.\n", "Now a longer one."]},
        {"question_id": 8, "category": "summarization", "turns": ["Summarize: it rained."], "reference": ["Rain."]},
        {"question_id": 9, "category": "math_reasoning", "turns": ["2 + 2?"]},
        {"question_id": 10, "category": "rag", "turns": ["Rain falls.\nWhat falls?"]},
        {"question_id": 11, "category": "translation", "turns": ["Translate: Regen"]},
        {"question_id": 12, "category": "poetry", "turns": ["Rhyme."]},
    ],
    "HumanEval.jsonl": [
        {
            "task_id": "HumanEval/0",
            "prompt": "def one():\n    ",
            "entry_point": "one",
            "canonical_solution": "return 1\n",
            "test": "assert one() == 1",
        }
    ],
    "mbpp.jsonl": [
        {"text": "Write two.", "code": "def two():\r\n    return 2", "task_id": 3, "test_list": ["assert two() == 2"]}
    ],
    "edit.jsonl": [
        {
            "task_id": "EditEval/4",
            "instruction": "Return 4.",
            "context": "",
            "input": "def four():\n    return 5",
            "output": "def four():\n    return 4",
        },
        {"instruction": "Name a colour.", "input": "", "output": "Red"},
    ],
    "gsm8k.jsonl": [{"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}],
    "rag.jsonl": [
        {"id": 5, "question": "who", "answers": ["she"], "prompt": "Document [1] She did.\n\nQuestion: who\nAnswer:"}
    ],
    "tools.json": [
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}], "tools": "[]"},
        {
            "conversations": [
                {"from": "human", "value": "Rain?"},
                {"from": "function_call", "value": '{"name": "rain"}'},
                {"from": "observation", "value": "{}"},
            ],
            "tools": '[{"name": "rain"}]',
        },
    ],
}


def write(path: Path, items: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        json.dumps(items, indent=1)
        if path.suffix == ".json"
        else "\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    )
    path.write_text(text + "\n", encoding="utf-8")
    return path


@pytest.fixture
def public(tmp_path) -> Path:
    for name, items in PUBLIC.items():
        write(tmp_path / name, items)
    (tmp_path / "README.md").write_text("not read", encoding="utf-8")
    return tmp_path


def test_every_public_format(public):
    found = {prompt.name: prompt for prompt in read_prompts(public)}
    assert {name: prompt.slice for name, prompt in found.items()} == {
        "HumanEval:0": "code",
        "edit:4": "edit",
        "edit:2": "chat",
        "gsm8k:1": "math",
        "mbpp:3": "code",
        "rag:5": "retrieval",
        "question/writing:7": "chat",
        "question/summarization:8": "summarisation",
        "question/math_reasoning:9": "math",
        "question/rag:10": "retrieval",
        "question/translation:11": "translation",
        "question/poetry:12": "poetry",
        "tools:2": "json",
    }
    assert found["HumanEval:0"] == Prompt("HumanEval:0", "code", "def one():", "\n    return 1\n")
    assert found["mbpp:3"] == Prompt(
        "mbpp:3", "code", '"""\nWrite two.\nassert two() == 2\n"""', "\ndef two():\n    return 2"
    )
    before = "def four():\n    return 5"
    assert found["edit:4"].text == f"# Return 4.\n# Before:\n{before}\n# After:"
    assert found["edit:4"].prediction == f"\n{before}\n"
    assert found["edit:4"].continuation == "\ndef four():\n    return 4"
    assert found["edit:2"] == Prompt("edit:2", "chat", "Name a colour.", "\nRed")
    assert found["gsm8k:1"] == Prompt("gsm8k:1", "math", "Question: What is 2 + 3?\nAnswer:", " 2 + 3 = 5\n#### 5")
    assert found["question/writing:7"].text == "Write a line about rain."
    assert found["tools:2"].text == 'Functions: [{"name": "rain"}]\nUser: Rain?\nCall:'
    assert found["tools:2"].continuation == ' {"name": "rain"}'
    assert [name for name, prompt in found.items() if prompt.prediction] == ["edit:4"]


def test_own_lines(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "one"}\n\n{"prompt": "two ", "slice": "chat", "name": "second", "prediction": "p"}\n',
        encoding="utf-8",
    )
    assert read_prompts(path) == (Prompt("mine:1", "mine", "one"), Prompt("second", "chat", "two ", prediction="p"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("not json", ":1"),
        ('{"prompt": "a"}\n{"prompt": ""}', ":2"),
        ('{"prompt": "a", "prediction": ""}', "prediction"),
        ("[1]", ":1"),
        ("3", ":1"),
        ("", "holds no prompt"),
        ('{"question": "who"}', "known formats: .*question [+] answer"),
        ('{"category": "qa", "turns": []}', "turns"),
        ('{"category": "qa", "turns": [" "]}', "turns"),
        ('{"conversations": [{"from": "human"}]}', "conversations"),
        ('{"conversations": [{"from": "human", "value": "a"}]}', "holds no prompt"),
        ('{"text": "a", "code": 3}', '"code" must be a text'),
    ],
)
def test_what_is_not_recognised_says_where_and_what_would_be(tmp_path, content, named):
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=named):
        read_prompts(path)


def test_missing_files(tmp_path):
    with pytest.raises(StorageError, match="none"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"no \.json"):
        read_prompts(tmp_path / "empty")


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    """U+2028 stands in real data; `str.splitlines` would cut there."""
    path = write(tmp_path / "a.jsonl", [{"prompt": "a\u2028b"}])
    assert read_prompts(path)[0].text == "a\u2028b"


def test_slices_filter_and_files_take_turns(public):
    prompts = read_prompts(public)
    chosen, notes = choose(prompts, ["math", "code"], 1)
    assert [prompt.name for prompt in chosen] == ["gsm8k:1", "HumanEval:0"]
    assert notes == ["Prompts measured (prompts_per_slice=1): math 1 of 2, code 1 of 2."]
    assert choose(prompts, ["all"], 9) == (
        tuple(choose(prompts, list(dict.fromkeys(p.slice for p in prompts)), 9)[0]),
        [],
    )
    assert len(choose(prompts, ["all"], 9)[0]) == len(prompts)
    many = [Prompt(f"{source}:{i}", "code", "x") for source in "ab" for i in range(3)]
    assert [prompt.name for prompt in choose(many, ["code"], 4)[0]] == ["a:0", "b:0", "a:1", "b:1"]
    with pytest.raises(InputError, match=r"poems.*chat"):
        choose(prompts, ["poems"], 1)


def test_long_prompts_lose_their_middle():
    text = "task " + "x" * 500 + " question"
    (short, cut), notes = fit([Prompt("s", "a", "short"), Prompt("l", "a", text, prediction="p")], len, 100)
    assert short.text == "short"
    assert len(cut.text) == 100
    assert cut.text.startswith("task xxx")
    assert cut.text.endswith("xxx question")
    assert cut.prediction == "p"
    assert notes == ["Cut in the middle to 100 tokens, to fit the target's context with the answer: l."]
    assert fit([short], len, 100) == ((short,), [])


@pytest.mark.parametrize(
    "tokens", [lambda text: len(text) // 3 + 5, lambda text: sum(3 if letter == "x" else 1 for letter in text)]
)
def test_the_cut_fits_whatever_the_tokenizer(tokens):
    (cut,), _ = fit([Prompt("l", "a", "ab" * 50 + "x" * 300 + "cd" * 50)], tokens, 60)
    assert tokens(cut.text) <= 60
    assert len(cut.text) > 10


def test_a_context_without_room_is_an_error():
    with pytest.raises(InputError, match="max_tokens"):
        fit([Prompt("l", "a", "text")], len, 0)
    with pytest.raises(InputError, match="cannot be cut"):
        fit([Prompt("l", "a", "text")], lambda text: 100, 50)


def test_messages_are_a_conversation_whose_last_answer_is_known(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    lines = [{"messages": [user, assistant, user, assistant], "slice": "chat"}, {"messages": [user], "name": "n"}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    first, second = read_prompts(path)
    assert (first.slice, first.continuation, first.text) == ("chat", "hello", "")
    assert first.messages == (("user", "hi"), ("assistant", "hello"), ("user", "hi"))
    assert (second.name, second.slice, second.continuation) == ("n", "talk", None)
    for wrong in ([], "hi", [{"role": "user"}], [{"content": "x"}]):
        path.write_text(json.dumps({"messages": wrong}), encoding="utf-8")
        with pytest.raises(InputError, match="messages"):
            read_prompts(path)


def test_requests_of_a_load_take_conversations_whole(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "long " * 9}]}), encoding="utf-8")

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    found = asks(("talk",), 1, encode, 4, 0, path, lambda messages: encode(messages[0]["content"]))
    assert len(found["talk"][0].prompt_ids) == 45
    with pytest.raises(InputError, match="has messages"):
        asks(("talk",), 1, encode, 4, 0, path)


RECORDED = [
    # OpenAI's batch files
    (
        {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "m", "max_completion_tokens": 9, "temperature": 0.5,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}},
        Prompt("r1", "mine", "", messages=(("user", "ab"),), max_tokens=9, temperature=0.5),
    ),
    (
        {"custom_id": "r2", "body": {"prompt": "p", "max_tokens": 3}},
        Prompt("r2", "mine", "p", max_tokens=3),
    ),
    # guidellm
    ({"prompt": "p", "prompt_tokens_count": 4, "output_tokens_count": 5}, Prompt("mine:1", "mine", "p", max_tokens=5)),
    # aiperf: single turn, several turns, a trace with texts
    ({"text": "t", "output_length": 6}, Prompt("mine:1", "mine", "t", max_tokens=6)),
    (
        {"session_id": "s", "turns": [{"role": "system", "text": "be brief"}, {"text": "one", "output_length": 7},
                                      {"text": "two"}]},
        Prompt("mine:s", "mine", "", messages=(("system", "be brief"), ("user", "one")), max_tokens=7),
    ),
    ({"timestamp": 0, "text_input": "t", "output_length": 8}, Prompt("mine:1", "mine", "t", max_tokens=8)),
    (
        {"messages": [{"role": "user", "content": "q"}], "output_length": 9, "slice": "x"},
        Prompt("mine:1", "x", "", messages=(("user", "q"),), max_tokens=9),
    ),
]  # fmt: skip


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_an_answer_of_no_tokens_is_refused_in_a_batch_file(tmp_path, key):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"custom_id": "r", "body": {"prompt": "p", key: 0}}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="max_tokens there"):
        read_prompts(path)


@pytest.mark.parametrize(("line", "prompt"), RECORDED)
def test_requests_recorded_for_other_tools_are_read(tmp_path, line, prompt):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert read_prompts(path) == (prompt,)


USER = {"role": "user", "content": "w?"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}
WITH_TOOLS = [
    {"messages": [USER], "tools": TOOLS},
    {"messages": [USER], "functions": [{"name": "f"}]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": CALL}, RESULT]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": CALL}, RESULT]},
    {"messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
    {"messages": [USER, {"role": "tool", "content": "42"}]},
    {"custom_id": "r", "body": {"messages": [USER], "tools": TOOLS}},
    {"custom_id": "r", "body": {"messages": [USER, RESULT]}},
    {"custom_id": "r", "body": {"input": "w?", "tools": TOOLS}},
]


@pytest.mark.parametrize("line", WITH_TOOLS)
def test_requests_with_tools_are_refused_rather_than_sent_without(tmp_path: Path, line: object) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "p"}\n' + json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"mine\.jsonl:2.*tools and tool calls are not replayed; leave these"):
        read_prompts(path)


def test_requests_whose_tools_are_empty_are_read(tmp_path: Path) -> None:
    message: dict[str, object] = USER | {"tool_calls": [], "function_call": None}
    lines: list[object] = [
        {"messages": [message], "tools": []},
        {"custom_id": "r", "body": {"messages": [message], "tools": None}},
    ]
    found = read_prompts(write(tmp_path / "mine.jsonl", lines))
    assert [prompt.messages for prompt in found] == [(("user", "w?"),)] * 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"messages": [{"role": "assistant", "content": "a"}]}, r"mine\.jsonl:1.*an answer alone"),
        ({"custom_id": "r", "body": []}, '"body" must be the object'),
        ({"custom_id": "r", "body": {"input": [1]}}, '"messages", or a text'),
        ({"custom_id": "r", "body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}, "role"),
        ({"session_id": "s", "turns": ["x"]}, '"turns" must be a list of objects'),
        ({"timestamp": 0, "input_length": 3, "output_length": 4, "hash_ids": [1]}, "lengths without texts"),
        ({"prompt": "p", "max_tokens": 0}, "max_tokens there"),
        ({"prompt": "p", "temperature": "hot"}, "temperature there"),
    ],
)
def test_recorded_requests_that_cannot_be_replayed_say_why(tmp_path, line, named):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=named):
        read_prompts(path)
