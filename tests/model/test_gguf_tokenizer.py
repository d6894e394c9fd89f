"""The tokenizer of a GGUF file beside the `tokenizer.json` it was made of, and beside what transformers builds from the
same metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.gguf.header import read_header
from foretoken.model.gguf.tokenizer import SPLITS, read_tokenizer
from foretoken.model.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import PROSE, foreign_tokenizer, tiny_tokenizer
from tests.helpers.gguf_files import add_bpe, add_sentencepiece, finish

TEXTS = (
    *PROSE,
    "",
    " ",
    "  two  spaces",
    "I'm 12345 HE'LL\r\n\n\tx=1;//y",
    "<s> in text </s>",
    "naïve\u0301 \U0001f9ff",
    "\x00",
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ eos_token }}"


def made(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    finish(writer)
    return path


def opened(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def test_byte_level(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "hf", chat_template=TEMPLATE)

    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, folder)
        writer.add_eos_token_id(0)

    found, expected = opened(made(tmp_path / "model.gguf", add)), opened(folder)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.vocabulary == expected.vocabulary
    assert found.token_bytes == expected.token_bytes
    assert found.chat_template == TEMPLATE
    messages = [{"role": "user", "content": "x"}]
    assert found.apply_chat_template(messages) == expected.apply_chat_template(messages)


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges come back from the scores, and the BOS from the kind."""
    folder = foreign_tokenizer(tmp_path / "hf", "sentencepiece")

    def add(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer, folder)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    found, expected = opened(made(tmp_path / "model.gguf", add)), opened(folder)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.vocabulary == expected.vocabulary
    assert (found.opening_ids, found.special_ids, found.eos_token_id) == ((1,), expected.special_ids, 2)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
def test_text_is_split_as_transformers_does(tmp_path: Path, pre: str) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    folder = tiny_tokenizer(tmp_path / "hf")
    path = made(tmp_path / "model.gguf", lambda writer: add_bpe(writer, folder, pre))
    architecture, described, _ = get_gguf_tokenizer(str(path))
    expected, _ = convert_gguf_tokenizer(architecture, described)
    found = opened(path)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text, add_special_tokens=False).ids


def test_the_expressions_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    assert {pre: split for pre, split in SPLITS.items() if split is not None} == {
        pre: split for pre, split in GGUF_PRE_TOKENIZER_SPLITS.items() if pre in SPLITS
    }


def test_a_bos_for_llama3_and_where_the_file_says_so(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "hf")

    def begins(name: str, pre: str, add_bos: bool | None) -> bool:
        def add(writer: gguf.GGUFWriter) -> None:
            add_bpe(writer, folder, pre)
            writer.add_bos_token_id(0)
            if add_bos is not None:
                writer.add_add_bos_token(add_bos)

        return opened(made(tmp_path / name, add)).opening_ids == (0,)

    assert begins("a.gguf", "llama-bpe", None)
    assert not begins("b.gguf", "llama-bpe", False)
    assert not begins("c.gguf", "qwen2", None)
    assert begins("d.gguf", "gpt-2", True)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(made(tmp_path / "model.gguf", lambda _: None)) is None


def refusal(path: Path) -> str:
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    def unknown_split(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, tiny_tokenizer(tmp_path / "hf"), "other")

    def unknown_kind(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")

    def twice(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "a"])

    def merges(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["ab"])

    def scores(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([1.0])

    def types(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_types([1])

    def end(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_eos_token_id(2)

    for add, word in (
        (unknown_split, "pre='other'"),
        (unknown_kind, "model='t5'"),
        (twice, "'a' twice"),
        (merges, "'ab', which is no pair"),
        (scores, "scores is 1 numbers for 2"),
        (types, "token_type has 1 entries for 2"),
        (end, "eos_token_id=2 must be"),
    ):
        assert word in refusal(made(tmp_path / f"{add.__name__}.gguf", add))


def test_a_token_that_is_none(tmp_path: Path) -> None:
    """Some files write 2 ** 32 - 1 for a token that they do not have."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_bos_token_id(2**32 - 1)

    found = read_tokenizer(read_header(made(tmp_path / "model.gguf", add)))
    assert found is not None
    assert "bos_token" not in found[1]
