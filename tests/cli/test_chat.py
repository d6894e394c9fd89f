"""Conversations on the command line and through `LLM.chat`: the checkpoint's own template, one answer for each line."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, AsyncEngine, CheckpointError, InputError, SamplingParams, SpecConfig
from foretoken.cli import chat
from foretoken.cli.conversation import ChatTotals, StyledPieces, Talk
from foretoken.core import StepOutput, TokenOrigin
from foretoken.engine.stats import RequestStats
from foretoken.errors import StorageError
from foretoken.printing.console import Console
from foretoken.text.detokenizer import Detokenizer
from tests.cli.conftest import Run
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | length }}\n{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = SamplingParams(max_tokens=8)
HELLO = [{"role": "user", "content": "ab cd"}]
LONGER = [{"role": "system", "content": "be brief"}, *HELLO]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tiny_checkpoint(folder, "llama", num_hidden_layers=1, hidden_size=16, vocab_size=300)
    tiny_tokenizer(folder, 300, chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, cache_tokens=2048, profile="off") as llm:
        yield llm


# ---- LLM


def test_a_chat_is_the_rendered_text_without_another_begin_token(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "<system>be brief\n<user>ab cd\n<assistant>"
    assert llm.render_chat(LONGER) == text
    assert llm.render_chat(HELLO, tools=[{"name": "f"}]) == "<user>ab cd\n<tools>1\n<assistant>"
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert llm.encode_chat(LONGER) == ids
    (out,) = llm.chat(LONGER, GREEDY)
    assert out.prompt_ids == tuple(ids)
    assert out.token_ids == llm.generate([ids], GREEDY)[0].token_ids


@pytest.mark.parametrize("tools", ["now", {"name": "f"}, ["f"], 3, torch.tensor([1, 2])])
def test_tools_that_are_no_list_of_mappings(llm: LLM, tools: Any) -> None:
    with pytest.raises(InputError, match=r"tools=.*give a list of mappings"):
        llm.chat(HELLO, GREEDY, tools=tools)


@pytest.mark.parametrize("options", ["x", 3, ["thinking"], torch.tensor([1, 2])])
def test_variables_of_a_template_that_are_no_mapping(llm: LLM, options: Any) -> None:
    with pytest.raises(InputError, match=r"options=.*give a mapping"):
        llm.render_chat(HELLO, options=options)


def test_a_template_without_tools_refuses_them(target: Path, tmp_path: Path) -> None:
    """Left out without a word they would be, and the answer could call none of them."""
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with LLM(target, SpecConfig(), cache_tokens=256, profile="off", chat_template=plain) as llm:
        with pytest.raises(InputError, match=r"tools=.*takes no tools; leave them out, or name a file"):
            llm.chat(HELLO, GREEDY, tools=[{"name": "f"}])
        assert llm.render_chat(HELLO, tools=[]) == llm.render_chat(HELLO) == "ab cd"


def test_an_async_engine_chats_as_well(llm: LLM) -> None:
    expected = llm.chat(LONGER, GREEDY)[0].token_ids
    with AsyncEngine(llm) as engine:
        assert asyncio.run(engine.chat(LONGER, GREEDY)).token_ids == expected
        with pytest.raises(InputError, match="messages='hello': give a list of messages"):
            asyncio.run(engine.chat("hello", GREEDY))  # type: ignore[arg-type]


def test_a_second_turn_does_not_read_the_first_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is in the cache: only what was added, and the rest of the last block, goes through the model."""
    rows: list[int] = []
    forward = llm.target.forward
    monkeypatch.setattr(llm.target, "forward", lambda tokens, *more: rows.append(len(tokens)) or forward(tokens, *more))
    talk = Talk(llm, replace(GREEDY, tenant="turns", ignore_eos=True))
    first = talk.answer("ab cd " * 15, lambda *_: None)
    assert rows[0] == len(first.prompt_ids)
    rows.clear()
    second = talk.answer("and on", lambda *_: None)
    block = llm.target.footprint_tokens(1)
    assert second.stats.num_cached_tokens >= len(first.prompt_ids) // block * block > 0
    assert rows[0] == len(second.prompt_ids) - second.stats.num_cached_tokens < len(first.prompt_ids)


def test_many_conversations_with_params_and_spec_each(llm: LLM) -> None:
    params, specs = [GREEDY, SamplingParams(max_tokens=3)], [SpecConfig(), SpecConfig("ngram", num_draft=2)]
    outputs = llm.chat([HELLO, LONGER], params, specs)
    alone = [llm.chat(one, own)[0] for one, own in zip((HELLO, LONGER), params, strict=True)]
    assert [out.token_ids for out in outputs] == [out.token_ids for out in alone]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", r"messages='hello': give a list of messages, such as \[\{"),
        ([], r"messages=\[\]: give a list of messages"),
        (["hello"], "messages='hello': each must be a mapping such as"),
        ([{"content": "x"}], "messages={'content': 'x'}: each must be a mapping such as"),
        ([HELLO, "x"], "messages=.*: each must be a mapping"),
        ([{"role": "user", "content": "a\udcff"}], "messages=.*half of a surrogate pair"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.chat(messages)


def test_a_template_of_ones_own_replaces_that_of_the_checkpoint(
    text_pair: SimpleNamespace, pair: SimpleNamespace, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with LLM(text_pair.target, chat_template=file, cache_tokens=256) as llm:
        assert llm.render_chat(HELLO) == f"[{HELLO[0]['content']}]"
    with pytest.raises(StorageError, match=r"chat_template: cannot read .*missing"):
        LLM(text_pair.target, chat_template=tmp_path / "missing", cache_tokens=256)
    with pytest.raises(InputError, match=r"chat_template=.* has no tokenizer; leave the template out"):
        LLM(pair.target, chat_template=file, cache_tokens=256)
    with pytest.raises(InputError, match="chat_template=3: give the name of a file"):
        LLM(text_pair.target, chat_template=3)  # type: ignore[arg-type]


def test_checkpoints_without_a_template_or_with_a_broken_one(text_pair: SimpleNamespace, pair: SimpleNamespace) -> None:
    with LLM(text_pair.target, cache_tokens=256) as llm:
        with pytest.raises(InputError, match=r"has no chat template; give plain text instead, .*\(chat_template\)"):
            llm.chat(HELLO)
        llm.tokenizer.__dict__["_templates"] = {"default": "{% if %}"}  # type: ignore[union-attr]
        with pytest.raises(CheckpointError, match="is broken"):
            llm.chat(HELLO)
    with LLM(pair.target, cache_tokens=256) as llm, pytest.raises(InputError, match="has no tokenizer"):
        llm.chat(HELLO)


# ---- foretoken generate --chat, --messages


def test_generate_takes_a_message_or_a_conversation(foretoken: Run, target: Path, llm: LLM, tmp_path: Path) -> None:
    common = ["generate", "-t", target, "--max-tokens", 8, "--json"]
    expected = [list(llm.chat(one, GREEDY)[0].token_ids) for one in (HELLO, LONGER)]
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(LONGER))
    for given, wanted in (
        (["--chat", "-p", "ab cd"], expected[0]),
        (["--messages", f"@{file}"], expected[1]),
        (["--chat", "--messages", json.dumps(LONGER)], expected[1]),
    ):
        assert json.loads(foretoken(*common, *given).lines[-1])["token_ids"] == wanted
    for given, message in (
        (["--chat", "--prompt-ids", "1,2"], "a chat template lays out text"),
        (["--messages", "[]", "-p", "x"], "give one of --prompt TEXT, --prompt-ids 1,2,3 and --messages JSON"),
        (["--messages", "{"], "messages"),
        (["--messages", "[3]"], "messages=3: each must be a mapping"),
    ):
        done = foretoken(*common, *given)
        assert (done.code, message in done.err) == (2, True), done.err


# ---- foretoken chat


def pipe(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))


def conversation(llm: LLM, lines: list[str], opening: list[dict[str, str]]) -> list[str]:
    """The answers to `lines`, each with all that was said before it."""
    messages, answers = list(opening), []
    for line in lines:
        messages.append({"role": "user", "content": line})
        answers.append(llm.chat(messages, GREEDY)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_one_line_in_one_answer_out(foretoken: Run, target: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["chat", "-t", target, "--max-tokens", 8, "--system", "be brief", "--drafter", "ngram"]
    expected = conversation(llm, ["ab", "cd"], LONGER[:1])
    again = conversation(llm, ["ab"], LONGER[:1])
    pipe(monkeypatch, b"ab\ncd\n/clear\nab\n/exit\nnever\n")
    done = foretoken(*common, "--json")
    assert done.code == 0, done.err
    assert [json.loads(line)["text"] for line in done.lines] == [*expected, *again]
    pipe(monkeypatch, b"ab\r\ncd")
    assert foretoken(*common).out == "".join(f"{text}\n" for text in expected)
    pipe(monkeypatch, b"\xff\n")
    assert (done := foretoken(*common)).code == 4
    assert "not UTF-8" in done.err


def test_a_terminal_goes_on_after_ctrl_c_and_errors(
    foretoken: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said until Ctrl-C stays in the conversation; a message that is too long is left out of it."""
    asked: list[list[dict[str, str]]] = []
    lines = iter(["ab", "", "x" * 5000, "cd", "/exit"])
    answer = LLM.chat

    def stopped(llm: LLM, messages: Any, params: Any, **options: Any) -> Any:
        asked.append([dict(message) for message in messages])
        outputs = answer(llm, messages, params, **options)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return outputs

    pipe(monkeypatch, b"")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _prompt="": next(lines))
    monkeypatch.setattr(LLM, "chat", stopped)
    done = foretoken("chat", "-t", target, "--max-tokens", 4)
    assert done.code == 0, done.err
    assert "/exit ends" in done.err
    assert "shorten the prompt" in done.err
    assert [len(messages) for messages in asked] == [1, 3, 3]
    assert asked[2][:1] == [{"role": "user", "content": "ab"}]
    assert asked[2][1]["role"] == "assistant"
    assert asked[2][1]["content"] == asked[1][1]["content"] != ""
    assert chat._HELP in done.err


def test_a_chat_without_a_template_continues_the_text(
    foretoken: Run, text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line says so; each line goes on where the text so far ends, a system message before it."""
    pipe(monkeypatch, b"ab\ncd\n")
    done = foretoken("chat", "-t", text_pair.target, "--system", "ef", "--max-tokens", 4, "--ignore-eos")
    assert done.code == 0, done.err
    assert "has no chat template: it continues your text, line by line." in done.err
    with LLM(text_pair.target, profile="off") as llm:
        params, text, answers = SamplingParams(max_tokens=4, ignore_eos=True), "ef", []
        for line in ("ab", "cd"):
            text += f"{'' if text.endswith(chr(10)) else chr(10)}{line}"
            answers.append(llm.generate([text], params)[0].text)
            text += answers[-1]
    assert done.out == "".join(f"{answer}\n" for answer in answers)


def test_a_full_context_names_the_way_out(foretoken: Run, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch, iter(["x" * 5000]))
    assert "/reset begins a new conversation." in foretoken("chat", "-t", target, "--max-tokens", 2).err


def test_a_chat_without_a_tokenizer_says_what_to_do(foretoken: Run, pair: SimpleNamespace) -> None:
    done = foretoken("chat", "-t", pair.target)
    assert done.code == 2
    assert "has no tokenizer; use `foretoken generate --prompt-ids 1,2,3`" in done.err


def terminal(monkeypatch: pytest.MonkeyPatch, typed: Iterator[Any]) -> None:
    """Standard input is a terminal at which these lines are typed; an exception is a key that raises it."""

    def read(_prompt: str = "") -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    pipe(monkeypatch, b"")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)


@pytest.mark.parametrize("columns", [40, 120])
def test_commands_on_a_terminal(foretoken: Run, target: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    asked: list[tuple[int, SamplingParams]] = []
    answer = LLM.chat

    def noted(llm: LLM, messages: Any, params: SamplingParams, **options: Any) -> Any:
        asked.append((len(messages), params))
        return answer(llm, messages, params, **options)

    monkeypatch.setattr(LLM, "chat", noted)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ["/help", "ab", "/set temperature 0.5", "/set seed 7", "/set max_tokens 3", "/set", "cd", "/stats"]
    wrong = ["/set temperature hot", "/set temperature -1", "/set tempo 3", "/set top_p", "/nonsense"]
    terminal(monkeypatch, iter([*lines, *wrong, "/colour", "/set seed none", "/reset", "ef"]))
    done = foretoken("chat", "-t", target, "--max-tokens", 6, "--ignore-eos")
    assert done.code == 0, done.err
    assert [count for count, _ in asked] == [1, 3, 1]
    last = asked[1][1]
    assert (last.temperature, last.seed, last.max_tokens, last.ignore_eos) == (0.5, 7, 3, True)
    assert asked[2][1].seed is None
    assert done.err.count("temperature 0.5\n") == 2  # said when it was set, and by /set
    for words in (
        "/set NAME VALUE: change",
        "colours: on",
        "seed none\n> a new conversation\n",
        "temperature 0.5\n",
        "seed 7\n",
        "2 answers, 9 tokens",
        "prompt tokens cached",
        "temperature='hot': must be a number",
        "temperature=-1.0: must lie in",
        "set='tempo': choose one of max_tokens",
        "command='/set top_p': choose one of /help, /set NAME VALUE",
        "command='/nonsense'",
    ):
        assert words in done.err, words
    assert "\x1b" not in done.out


def test_in_a_pipe_commands_work_and_other_lines_are_messages(
    foretoken: Run, target: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, b"/etc/hosts is what?\n/set max_tokens 8\n/reset\nab\n")
    done = foretoken("chat", "-t", target, "--max-tokens", 2, "--colour")
    assert done.code == 0, done.err
    first = llm.chat([{"role": "user", "content": "/etc/hosts is what?"}], SamplingParams(max_tokens=2))[0].text
    assert done.out == f"{first}\n{conversation(llm, ['ab'], [])[0]}\n"
    pipe(monkeypatch, b"/set tempo 3\n")
    assert foretoken("chat", "-t", target).code == 2


def test_ctrl_c_at_the_prompt_ends_the_second_time(
    foretoken: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(monkeypatch, iter([KeyboardInterrupt, "ab", KeyboardInterrupt, KeyboardInterrupt, "never"]))
    done = foretoken("chat", "-t", target, "--max-tokens", 2)
    assert done.code == 130
    assert done.err.count(chat._AGAIN) == 2


def test_typed_bytes_that_are_no_text_do_not_end_the_conversation(
    foretoken: Run, target: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a terminal with another encoding, or half of a character that was deleted; in some locales they pass."""
    terminal(
        monkeypatch, iter(["ab", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "a\udcff", "cd"])
    )
    done = foretoken("chat", "-t", target, "--max-tokens", 8)
    assert done.code == 0, done.err
    assert done.err.count(chat._NO_TEXT) == 2
    assert done.lines == conversation(llm, ["ab", "cd"], [])


def test_what_is_typed_may_have_its_answers_in_a_file(
    foretoken: Run, target: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`foretoken chat > answers`: prompts and the lines that end them are for the terminal."""
    terminal(monkeypatch, iter(["ab", KeyboardInterrupt, "cd"]))
    done = foretoken("chat", "-t", target, "--max-tokens", 8)
    assert done.out == "".join(f"{text}\n" for text in conversation(llm, ["ab", "cd"], []))
    assert done.err.count(chat._PROMPT) == 4


def test_what_ctrl_c_found_half_written_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that reads slowly is interrupted while a coloured piece is flushed."""

    class Slow(io.StringIO):
        num_flushed = 0

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            self.num_flushed += 1
            if self.num_flushed == 1:
                raise KeyboardInterrupt

    screen = Slow()
    monkeypatch.setattr("sys.stdout", screen)
    talk = SimpleNamespace(answer=lambda _line, on_piece: on_piece("said", "underline"))
    chat._Lines(talk, True, False)._answer("ab")  # type: ignore[arg-type]
    assert screen.getvalue().count("said") == 1
    assert screen.getvalue().endswith("\n")


def test_colours_follow_the_tokens_and_leave_the_text_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal only; a stop string is withheld in colour too."""
    assert llm.tokenizer is not None
    text = llm.chat(HELLO, replace(GREEDY, max_tokens=20, ignore_eos=True))[0].text
    params = replace(GREEDY, max_tokens=20, ignore_eos=True, stop=(text[9:11],))
    plain, coloured, said = Talk(llm, params), Talk(llm, params, is_coloured=True), list[tuple[str, str | None]]()
    expected = plain.answer("ab cd", lambda *_: None)
    assert coloured.answer("ab cd", lambda *piece: said.append(piece)).text == expected.text
    assert "".join(piece for piece, _ in said) == expected.text
    assert {style for _, style in said} <= {"dim", "underline green", "bold red", "italic cyan"}
    origins = (TokenOrigin("d", "accepted", 1), TokenOrigin(None, "residual", 1))
    ids = tuple(llm.tokenizer.encode("ab", add_special_tokens=False))[:2]
    pieces = StyledPieces(Detokenizer(llm.tokenizer))
    output = StepOutput(0, ids, llm.tokenizer.decode(ids)[:-1], origins[: len(ids)])
    assert "".join(piece for piece, _ in pieces.of(output)) == output.text
    stream = io.StringIO()
    Console(file=stream).piece("x\x1b", "bold red")
    assert stream.getvalue() == "x\x1b"  # exact in a pipe
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monitor = io.StringIO()
    monitor.isatty = lambda: True  # type: ignore[method-assign]
    Console(file=monitor, width=40).piece("x\x1b\ny", "underline")
    assert "\\x1b\ny" in monitor.getvalue()
    assert monitor.getvalue().startswith("\x1b[")


def test_totals_fit_a_narrow_terminal() -> None:
    totals = ChatTotals()
    totals.add(
        RequestStats(
            num_emitted=9, num_prompt_tokens=99_999, num_cached_tokens=9_999, num_drafted=99_999, num_accepted=12_345
        )
    )
    assert all(len(line) <= 50 for line in totals.lines())
    assert "12345 of 99999 draft tokens accepted (12%)" in totals.lines()
