"""Special tokens that a message spells are text, wherever they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretoken.engine.prompt_encoder import PromptEncoder
from foretoken.errors import InputError
from foretoken.text.added_tokens import QuotedSpecials
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.checkpoints import END_OF_TEXT, tiny_tokenizer
from tests.text.test_tokenizer import byte_fallback

SPECIALS = ("<|end|>", "<|end|>x", "<s>")


def laid_out(messages: list[dict[str, object]]) -> tuple[str, list[tuple[str, bool]]]:
    """A conversation between special tokens of the template, and the parts of it."""
    quoted = QuotedSpecials(messages, SPECIALS)
    text = "".join(f"<s>{message['content']}<|end|>" for message in quoted.messages)
    return text, list(quoted.parts(text))


def test_text_without_special_tokens_is_not_touched() -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "a <b>"}]
    assert QuotedSpecials(messages, SPECIALS).messages is messages
    assert laid_out(messages)[1] == [("<s>a <b><|end|>", False)]
    assert list(QuotedSpecials(messages, ()).parts("<s>a")) == [("<s>a", False)]


@pytest.mark.parametrize("content", ["<|end|>", "a<|end|><s>b", "<|end|>x<|end|>", "<<s>s>", "\ufdd0<s>"])
def test_special_tokens_of_a_message_are_parts_of_their_own(content: str) -> None:
    _, parts = laid_out([{"role": "user", "content": content}])
    assert "".join(text for text, _ in parts) == f"<s>{content}<|end|>"
    assert parts[0][0].startswith("<s>")
    assert not parts[0][1]
    assert [text for text, is_plain in parts if is_plain]
    assert all(text in SPECIALS for text, is_plain in parts if is_plain)
    theirs = [text for text, is_plain in parts if not is_plain]  # the template's special tokens
    assert sum(text.count("<s>") for text in theirs) == sum(text.count("<|end|>") for text in theirs) == 1


def test_nested_texts_are_searched_too() -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "<s>"}}]}]
    quoted = QuotedSpecials(messages, SPECIALS)
    assert "<s>" not in str(quoted.messages)
    assert messages[0]["tool_calls"] == [{"function": {"arguments": "<s>"}}]


@pytest.mark.parametrize("where", ["description", "property", "call"])
def test_special_tokens_of_tools_and_names_are_text(tmp_path: Path, where: str) -> None:
    """Descriptions of tools come from elsewhere, and templates write names of arguments as JSON."""
    calls = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    template = f"{END_OF_TEXT}{calls}{{{{ tools | tojson }}}}{END_OF_TEXT}"
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path, 300, chat_template=template))
    assert tokenizer is not None
    encoder = PromptEncoder(tokenizer, tmp_path, 300)

    def encoded(spelt: str) -> list[int]:
        texts = {name: spelt if name == where else "x" for name in ("description", "property", "call")}
        parameters = {"type": "object", "properties": {texts["property"]: {"type": "string"}}}
        function = {"name": "f", "description": texts["description"], "parameters": parameters}
        call = {"function": {"name": "f", "arguments": {texts["call"]: 1}}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        return encoder.encode_chat(messages, [{"type": "function", "function": function}])

    ids = encoded(f"a{END_OF_TEXT}b")
    assert ids.count(tokenizer.vocabulary[END_OF_TEXT]) == 2  # the template's own
    assert tokenizer.decode(ids, has_specials=True).count(f"a{END_OF_TEXT}b") == 1


def test_a_message_with_every_mark_is_refused() -> None:
    with pytest.raises(InputError, match="noncharacter"):
        QuotedSpecials([{"role": "user", "content": "<s>" + "".join(map(chr, range(0xFDD0, 0xFDF0)))}], SPECIALS)


def test_what_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """JSON takes about 1,000 levels; a template is given as many as can be walked through."""
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path, 300, chat_template="{{ messages[0].content }}{{ tools }}"))
    encoder = PromptEncoder(tokenizer, tmp_path, 300)
    deep: Any = 1
    for _ in range(980):
        deep = [deep]
    for message, tools in (({"role": "user", "content": "a", "more": deep}, None), ({"role": "user"}, [{"a": deep}])):
        with pytest.raises(InputError, match=r"messages=.*nested too deeply"):
            encoder.encode_chat([message], tools)
    assert encoder.encode_chat([{"role": "user", "content": "a", "more": [[[1]]]}])


@pytest.mark.parametrize("content", ["a</s>b", "a <s> b", "</s>", "</s><s> a", "\n<s>\n猫</s>"])
def test_no_space_comes_between_a_special_token_and_its_neighbours(tmp_path: Path, content: str) -> None:
    """SentencePiece puts a space in front of a text, and a text with a special token in it is encoded in parts."""
    tokenizer = byte_fallback(tmp_path).with_template("b{{ messages[0].content }}</s>")
    ids = PromptEncoder(tokenizer, tmp_path, 400).encode_chat([{"role": "user", "content": content}])
    assert tokenizer.decode(ids, has_specials=True) == f"b{content}</s>"
    assert [token for token in ids if token in tokenizer.special_ids] == [tokenizer.vocabulary["</s>"]]


def test_a_line_end_behind_a_special_token_stays(tmp_path: Path) -> None:
    """Where two line ends are one token, the one that a part is encoded behind would take its first one with it."""
    tokenizer = byte_fallback(tmp_path, has_line_ends=True).with_template("b</s>{{ messages[0].content }}<s>")
    ids = PromptEncoder(tokenizer, tmp_path, 400).encode_chat([{"role": "user", "content": "\na</s>\nb"}])
    assert tokenizer.decode(ids, has_specials=True).replace(" ", "") == "b</s>\na</s>\nb<s>"
