"""The tokenizer of a GGUF file beside the `tokenizer.json` it was made of, and beside what transformers builds from the
same metadata.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.gguf.names import config_fields
from foretoken.model.gguf.parts import read_header
from foretoken.model.gguf.special_tokens import end_tokens
from foretoken.text.detokenizer import Detokenizer
from foretoken.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from foretoken.text.gguf_tokenizer import read_tokenizer
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import tiny_tokenizer, variant
from tests.helpers.foreign_tokenizers import PROSE, foreign_tokenizer
from tests.helpers.gguf_files import add_bpe, add_sentencepiece, finish, write_gguf
from tests.helpers.slow_tokenizers import merge_by_score

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


@pytest.fixture(scope="module")
def byte_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("vocabulary") / "hf")


def test_byte_level(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "hf", chat_template=TEMPLATE)

    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, folder)
        writer.add_eos_token_id(0)
        writer.add_string("tokenizer.chat_template.tool_use", "tools")

    found, expected = opened(made(tmp_path / "model.gguf", add)), opened(folder)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.vocabulary == expected.vocabulary
    assert found.token_bytes == expected.token_bytes
    assert found.chat_template == TEMPLATE
    messages = [{"role": "user", "content": "x"}]
    assert found.apply_chat_template(messages) == expected.apply_chat_template(messages)
    assert found.apply_chat_template(messages, tools=[{"type": "function"}]) == found.tool_template == "tools"


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

    assert {pre: PRE_TOKENIZERS[pre].splits for pre in GGUF_PRE_TOKENIZER_SPLITS} == {
        pre: (split,) for pre, split in GGUF_PRE_TOKENIZER_SPLITS.items()
    }


@pytest.mark.parametrize("pre", [name for name, pre in PRE_TOKENIZERS.items() if pre.byte_level])
def test_every_way_of_splitting_gives_the_text_back(byte_vocabulary: Path, tmp_path: Path, pre: str) -> None:
    tokenizer = opened(made(tmp_path / "model.gguf", lambda writer: add_bpe(writer, byte_vocabulary, pre)))
    for text in TEXTS:
        ids = tokenizer.encode_plain(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes is not None
        assert b"".join(tokenizer.token_bytes[token_id] for token_id in ids) == text.encode()


def test_sentencepiece_joins_by_score(tmp_path: Path) -> None:
    """Beside the plain rule: of all neighbours the pair of the highest score, the leftmost first."""
    rng = random.Random(0)
    letters = "ab\u2581\u00e9"
    words = {"".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(60)}
    tokens = ["<unk>", "<s>", "</s>", *letters, *sorted(words)]
    ranks = rng.sample(range(1, 1000), len(tokens))
    scores = dict(zip(tokens, map(float, ranks), strict=True)) | {"\u2581\u2581": 1000.0, "\u2581" * 3: 1000.0}
    tokens = list(scores)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(list(scores.values()))
        writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
        writer.add_add_space_prefix(False)

    tokenizer = opened(made(tmp_path / "model.gguf", add))
    for _ in range(200):
        text = "".join(rng.choices("ab \u00e9", k=rng.randint(1, 30)))
        expected = merge_by_score(text.replace(" ", "\u2581"), scores)
        assert [tokens[token_id] for token_id in tokenizer.encode_plain(text)] == expected
    assert tokenizer.opening_ids == (1,)  # the file names no BOS: SentencePiece's own number


def test_where_all_scores_are_equal_the_ids_have_the_order(tmp_path: Path) -> None:
    """llama.cpp's converter writes -1000 for every token of a model that has a `tokenizer.json` alone."""
    tokens = ["<unk>", "<s>", "</s>", *"abcd", "ab", "cd", "abc", "bcd"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-1000.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
        writer.add_add_space_prefix(False)

    tokenizer = opened(made(tmp_path / "model.gguf", add))
    for text, expected in (("abcd", ["ab", "cd"]), ("abc", ["abc"]), ("bcd", ["bcd"]), ("aabc", ["a", "abc"])):
        assert [tokens[token_id] for token_id in tokenizer.encode_plain(text)] == expected


def test_no_plain_text_is_joined_to_a_control_token(tmp_path: Path) -> None:
    """Whose two halves are tokens, and whose score is the highest."""
    tokens = ["<unk>", "<s>", "</s>", *"</s>a", "</", "s>"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0, 0.0, 0.0, *(-float(place) for place in range(1, len(tokens) - 2))])
        writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
        writer.add_add_space_prefix(False)

    tokenizer = opened(made(tmp_path / "model.gguf", add))
    assert [tokens[token_id] for token_id in tokenizer.encode_plain("a</s>a")] == ["a", "</", "s>", "a"]


def marked_bpe(writer: gguf.GGUFWriter, kind: str = "gemma4") -> None:
    """A vocabulary like Gemma 4's: text with a mark for the space, bytes for what is left."""
    letters = ["a", "b", "\u2581", "\n", "\u00e9", "ab", "\u2581ab", "\n\n"]
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_tokenizer_model(kind)
    writer.add_token_list([*specials, *byte_tokens, *letters, "<turn|>", "<think>"])
    writer.add_token_types([*[3] * 4, *[6] * 256, *[1] * len(letters), 1, 4])
    writer.add_token_merges(["a b", "\u2581 ab", "\n \n"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(False)


def test_bpe_with_a_mark_for_the_space(tmp_path: Path) -> None:
    tokenizer = opened(made(tmp_path / "model.gguf", marked_bpe))
    text = " ab  a\n\n\u732b\U0001f600<think>b<turn|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token(token_id) for token_id in ids] == [
        *("\u2581ab", "\u2581", "\u2581", "a", "\n\n"),
        *(f"<0x{byte:02X}>" for byte in "\u732b\U0001f600".encode()),
        *("<think>", "b", "<turn|>"),
    ]
    assert tokenizer.decode(ids) == text.removesuffix("<turn|>")  # an end of text whatever its type
    assert tokenizer.token_bytes is not None
    assert b"".join(tokenizer.token_bytes[token_id] for token_id in ids) == text.encode()
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push(token_id) for token_id in ids) + stream.flush() == tokenizer.decode(ids)
    assert tokenizer.opening_ids == (2,)  # Gemma 4 needs a BOS, and its files deny it


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """Those that the metadata names, and those that llama.cpp knows by their text."""

    def ends(*tokens: str, **named: int) -> list[str]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_token_list(list(tokens))
            for role, token_id in named.items():
                writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)

        header = read_header(made(tmp_path / "model.gguf", add))
        return [tokens[token_id] for token_id in end_tokens(header, len(tokens))]

    assert ends("a", "<|eot_id|>", "<|end_of_text|>", eos=2) == ["<|end_of_text|>", "<|eot_id|>"]
    assert ends("<end_of_turn>", "<eos>", "x", eos=1, eot=0) == ["<eos>", "<end_of_turn>"]
    assert ends("<|endoftext|>", "<|im_end|>", "x", eos=1) == ["<|im_end|>", "<|endoftext|>"]
    assert ends("x", "<|end|>", "<|assistant|>", eos=0, eom=2**32 - 1) == ["x", "<|end|>"]
    assert ends("<|end|>", "<|return|>", "<|call|>", "<|channel|>", eos=1) == ["<|return|>", "<|call|>"]
    assert ends("</s>", "<|tool_response>", "<eos>", eos=2) == ["<eos>", "<|tool_response>"]
    assert ends("<fim_pad>", "[PAD]", "<reponame>", "<|file_sep|>", "q", fim_sep=4) == [
        *("q", "<fim_pad>", "<reponame>", "<|file_sep|>")
    ]


def test_phi3_takes_the_white_space_behind_a_special_token(tmp_path: Path) -> None:
    def tokens_of(name: str) -> list[str | None]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model("llama")
            writer.add_name(name)
            writer.add_token_list(["<unk>", "<s>", "</s>", "\u2581", "a", "\n", "<|user|>", "<|endoftext|>"])
            writer.add_token_scores([0.0] * 8)
            writer.add_token_types([2, 3, 3, 1, 1, 1, 3, 3])
            writer.add_add_space_prefix(False)

        tokenizer = opened(made(tmp_path / f"{name}.gguf", add))
        ids = tokenizer.encode("<|user|>\n a<|endoftext|> a", add_special_tokens=False)
        return [tokenizer.token(token_id) for token_id in ids]

    assert tokens_of("Phi3 mini") == ["<|user|>", "a", "<|endoftext|>", "\u2581", "a"]
    assert tokens_of("other") == ["<|user|>", "\n", "\u2581", "a", "<|endoftext|>", "\u2581", "a"]


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

    def of_an_encoder(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, tiny_tokenizer(tmp_path / "hf"), "roberta-bpe")

    def unigram(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")

    def wordpiece(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")

    def unknown_kind(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("new")

    def twice(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "a"])

    def merges(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["ab"])

    def no_merges(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])

    def spaces(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
        writer.add_remove_extra_whitespaces(True)

    def scores(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([1.0])

    def types(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b"])
        writer.add_token_types([1])

    def end(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_eos_token_id(2)

    for add, word in (
        (unknown_split, "pre='other' is a way of splitting text that is not known here; known: default, llama3"),
        (of_an_encoder, "pre='roberta-bpe' belongs to models that encode text"),
        (unigram, "model='t5' (unigram SentencePiece) is not read"),
        (wordpiece, "model='bert' (WordPiece"),
        (unknown_kind, "model='new' is not read"),
        (twice, "'a' twice"),
        (merges, "'ab', which is no pair"),
        (no_merges, "merges is missing"),
        (spaces, "remove_extra_whitespaces=True"),
        (scores, "scores is 1 numbers for 2"),
        (types, "token_type has 1 entries for 3"),
        (end, "eos_token_id=2 must be"),
    ):
        assert word in refusal(made(tmp_path / f"{add.__name__}.gguf", add))


def test_a_token_that_is_none(tmp_path: Path) -> None:
    """Some files write 2 ** 32 - 1 for a token that they do not have."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(2**32 - 1)

    found = read_tokenizer(read_header(made(tmp_path / "model.gguf", add)))
    assert found is not None
    assert "bos_token" not in found[1]
    folder = variant(tmp_path / "hf", "llama", hidden_size=64)
    whole = write_gguf(tmp_path / "whole.gguf", folder)
    key = b"tokenizer.ggml.bos_token_id" + struct.pack("<I", 4)
    raw = whole.read_bytes()
    assert raw.count(key + bytes(4)) == 1
    whole.write_bytes(raw.replace(key + bytes(4), key + b"\xff" * 4))
    assert config_fields(read_header(whole))["bos_token_id"] is None
