"""Text in and out: what is streamed is what `decode` says, character by character; templates can do no harm."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from foretoken.errors import CheckpointError, InputError
from foretoken.text.detokenizer import Detokenizer
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import END_OF_TEXT, tiny_tokenizer

TEXTS = [
    "def f(self):\n    return 1",
    "naïve für 猫が好き 😀👩‍👩‍👧 ü",
    "  two  spaces ",
    "\t\ttabs\r\n",
    "a",
    "é" * 9,
    "🇩🇪🏴‍☠️",
]


def save(raw: Raw, folder: Path, **options: Any) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


def byte_level(folder: Path) -> Tokenizer:
    loaded = load_tokenizer(tiny_tokenizer(folder))
    assert loaded is not None
    return loaded


def byte_fallback(folder: Path, has_line_ends: bool = False) -> Tokenizer:
    """As in Llama 2: words with a leading mark, single bytes for the rest; `has_line_ends`: tokens of one and two."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        *"abcdefgü",
        "▁de",
        "▁f",
        "ab",
        "猫",
        "\ufffd",
        *(("\n", "\n\n") if has_line_ends else ()),
    ]
    raw = Raw(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[("▁", "▁"), ("▁", "f"), ("a", "b"), *([("\n", "\n")] if has_line_ends else [])],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(raw, folder, bos_token="<s>", eos_token={"content": "</s>"})


def metaspace(folder: Path) -> Tokenizer:
    words = ["<unk>", "▁", "▁▁", "▁the", "▁cat", "s", "猫", "ü", "a", "b"]
    raw = Raw(models.Unigram([(word, -float(index)) for index, word in enumerate(words)], unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return save(raw, folder)


def word_piece(folder: Path) -> Tokenizer:
    words = ["[UNK]", "do", "##n", "not", ".", ",", "n't", "'", "s", "##s", "cat"]
    raw = Raw(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    return save(raw, folder)


def byte_level_in_sequence(folder: Path) -> Tokenizer:
    raw = Raw.from_file(str(tiny_tokenizer(folder) / "tokenizer.json"))
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return save(raw, folder)


def words_only(folder: Path) -> Tokenizer:
    return save(Raw(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one")), folder)


KINDS = {f.__name__: f for f in (byte_level, byte_fallback, metaspace, word_piece, byte_level_in_sequence, words_only)}


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in KINDS.items()}


def stream(tokenizer: Tokenizer, ids: list[int], has_specials: bool = False) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, has_specials=has_specials)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_specials", [False, True])
def test_streamed_text_is_the_decoded_text(by_kind: dict[str, Tokenizer], kind: str, has_specials: bool) -> None:
    """Random ids: broken UTF-8, special tokens and ids beyond the vocabulary among them."""
    tokenizer, generator = by_kind[kind], random.Random(0)
    for _ in range(1500):
        ids = [generator.randrange(tokenizer.vocab_size + 2) for _ in range(generator.randrange(14))]
        pieces, rest = stream(tokenizer, ids, has_specials)
        assert "".join(pieces) + rest == tokenizer.decode(ids, has_specials)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "word_piece"])
def test_a_continued_text_grows_by_what_is_streamed(by_kind: dict[str, Tokenizer], kind: str) -> None:
    """SentencePiece drops the space in front of a text, which the answer to a prompt is not."""
    tokenizer, generator = by_kind[kind], random.Random(1)
    for _ in range(1500):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randrange(2, 9))]
        whole, place = tokenizer.decode(ids), generator.randrange(1, len(ids))
        before = tokenizer.decode(ids[:place])
        if ids[place - 1] in tokenizer.special_ids or "\ufffd" in whole + before:
            continue  # what comes behind a special token begins a text of its own
        detokenizer = Detokenizer(tokenizer, ids[:place])
        assert before + "".join(map(detokenizer.push, ids[place:])) + detokenizer.flush() == whole


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=30))
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_any_text_survives_the_round_trip_and_the_stream(by_kind: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = by_kind[kind]
    if any(special in text for special in (END_OF_TEXT, "<s>", "</s>", "<unk>")):
        return
    ids = tokenizer.encode(text)
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    if kind == "byte_level" or ("▁" not in text and "<0x" not in text):
        assert tokenizer.decode(ids) == text
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(raw=st.binary(max_size=24))
def test_any_bytes_stream_like_pythons_own_decoder(by_kind: dict[str, Tokenizer], raw: bytes) -> None:
    tokenizer = by_kind["byte_level"]
    alphabet = {token: index for token, index in tokenizer.vocabulary.items() if len(token) == 1}
    byte_ids = [alphabet[token] for token in _byte_tokens(raw)]
    pieces, rest = stream(tokenizer, byte_ids)
    assert "".join(pieces) + rest == tokenizer.decode(byte_ids) == raw.decode("utf-8", "replace")


def _byte_tokens(raw: bytes) -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in raw]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_level_in_sequence"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_is_half_a_character(by_kind: dict[str, Tokenizer], kind: str, text: str) -> None:
    pieces, rest = stream(by_kind[kind], by_kind[kind].encode(text))
    assert "".join(pieces) + rest == text
    assert not any("\ufffd" in piece for piece in [*pieces, rest])


def test_text_comes_out_as_soon_as_it_is_certain(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte_level"]
    euro = [tokenizer.vocabulary[token] for token in _byte_tokens("€".encode())]
    pieces, rest = stream(tokenizer, [*euro, *tokenizer.encode("x")])
    assert pieces == ["", "", "€", "x"]
    assert rest == ""
    pieces, rest = stream(tokenizer, [*euro[:2], *tokenizer.encode("x"), *euro[:1]])
    assert pieces == ["", "", "\ufffdx", ""]
    assert rest == "\ufffd"


def test_the_cost_of_a_token_does_not_grow(by_kind: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("byte_fallback", "metaspace", "byte_level_in_sequence"):
        tokenizer, sizes = by_kind[kind], []
        decode = tokenizer.decode
        monkeypatch.setattr(
            tokenizer,
            "decode",
            lambda ids, sizes=sizes, decode=decode, **how: (sizes.append(len(ids)), decode(ids, **how))[1],
        )
        broken = 255 if kind == "byte_level_in_sequence" else tokenizer.encode("a", add_special_tokens=False)[-1]
        stream(tokenizer, [broken] * 500)
        assert max(sizes) < 40
        assert sum(sizes) < 500 * 20
        monkeypatch.undo()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_level_in_sequence", "metaspace"])
def test_a_text_is_made_of_its_tokens_bytes(by_kind: dict[str, Tokenizer], kind: str) -> None:
    """Inside a text; at its beginning SentencePiece drops a space."""
    tokenizer, generator = by_kind[kind], random.Random(1)
    assert tokenizer.token_bytes is not None
    assert tokenizer.token_bytes.keys() == set(tokenizer.vocabulary.values())
    head = tokenizer.encode("a", add_special_tokens=False)
    plain = [token_id for token_id in tokenizer.token_bytes if token_id not in tokenizer.special_ids]
    for text in [*TEXTS, *(None,) * 200]:
        ids = tokenizer.encode(text) if text else generator.choices(plain, k=5)
        raw = b"".join(
            tokenizer.token_bytes[token_id] for token_id in head + ids if token_id not in tokenizer.special_ids
        )
        if text or _is_utf8(raw):
            assert tokenizer.decode(head + ids).lstrip(" ") == raw.decode().lstrip(" ")
    assert all(
        tokenizer.token_bytes[token_id].decode() == tokenizer.token(token_id) for token_id in tokenizer.special_ids
    )


def test_a_special_token_is_spelt_as_it_is(tmp_path: Path) -> None:
    byte_fallback(tmp_path)
    raw = Raw.from_file(str(tmp_path / "tokenizer.json"))
    raw.add_special_tokens(["<|end▁of▁turn|>"])
    tokenizer = save(raw, tmp_path)
    assert tokenizer.token_bytes is not None
    assert tokenizer.token_bytes[tokenizer.vocabulary["<|end▁of▁turn|>"]].decode() == "<|end▁of▁turn|>"


def test_an_added_token_is_written_as_it_is_spelt(tmp_path: Path) -> None:
    """DeepSeek's vocabularies read "ö" whole, and the alphabet of their bytes has a letter of that form."""
    raw = Raw.from_file(str(tiny_tokenizer(tmp_path / "base") / "tokenizer.json"))
    raw.add_tokens(["ö", "ÿõ", "plain"])
    tokenizer = save(raw, tmp_path / "added")
    text = "schön, ÿõ für plain 猫 ö"
    ids = tokenizer.encode(text)
    added = tokenizer.vocabulary["ö"]
    assert added in ids
    assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)[0]) == text
    assert tokenizer.token_bytes is not None
    assert b"".join(tokenizer.token_bytes[token_id] for token_id in ids) == text.encode()
    half = tokenizer.encode("猫")[:1]
    for broken in ([*half, added], [added, *half], [added, added], [added, 10**6, added]):
        found = tokenizer.decode(broken)
        pieces, rest = stream(tokenizer, broken)
        assert found == "".join(pieces) + rest
        assert found.count("ö") == broken.count(added)


def _is_utf8(raw: bytes) -> bool:
    return "\ufffd" not in raw.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["word_piece", "words_only"])
def test_bytes_that_depend_on_the_neighbours_are_not_made_up(by_kind: dict[str, Tokenizer], kind: str) -> None:
    assert by_kind[kind].token_bytes is None


@pytest.mark.parametrize(
    ("decoder", "known"),
    [
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
        (decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]), True),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
            False,
        ),  # every token loses its space
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁▁", " ")]), False),  # a mark may lie across two tokens
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace("d", "d"), decoders.ByteFallback()]), True),
        (decoders.BPEDecoder(), False),
        (decoders.CTC(), False),
    ],
    ids=str,
)
def test_only_decoders_that_join_tokens_say_what_each_writes(tmp_path: Path, decoder: Any, known: bool) -> None:
    byte_fallback(tmp_path)
    raw = Raw.from_file(str(tmp_path / "tokenizer.json"))
    raw.decoder = decoder
    tokenizer = save(raw, tmp_path)
    assert (tokenizer.token_bytes is not None) == known
    if known:
        assert tokenizer.token_bytes[tokenizer.vocabulary["▁de"]] == b" de"
        assert tokenizer.token_bytes[tokenizer.vocabulary["<0xE7>"]] == b"\xe7"


def test_whether_the_first_space_is_dropped_does_not_depend_on_the_vocabularys_order(tmp_path: Path) -> None:
    """The library gives the vocabulary in any order. Of a token of two spaces one is left where one is dropped."""
    tokenizer = byte_fallback(tmp_path)
    order = [tokenizer.vocabulary[token] for token in ("▁", "▁▁", "▁f")]
    known = tokenizer.token_bytes
    assert known is not None
    tokenizer.__dict__["token_bytes"] = {token: known[token] for token in order}
    assert tokenizer.drops_first_space


def test_begin_token_comes_from_the_post_processor_only(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte_fallback"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("ab")[0] == 1
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != 1
    plain = by_kind["byte_level"]
    assert plain.bos_token_id == plain.eos_token_id == plain.vocabulary[END_OF_TEXT]
    assert plain.encode("ab")[0] != plain.bos_token_id
    assert plain.decode([plain.vocabulary[END_OF_TEXT], *plain.encode("ab")]) == "ab"


def test_truncation_asked_for_by_the_file_is_not_done(tmp_path: Path) -> None:
    raw = Raw.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=50)
    text = "abcdefgh" * 5
    tokenizer = save(raw, tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1


# --- folders ---


def test_a_folder_without_tokenizer_gives_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json holds list, not a JSON object"):
        load_tokenizer(tmp_path)


def test_other_formats_go_through_transformers(tmp_path: Path) -> None:
    fast = byte_level(tmp_path / "fast")
    described = json.loads((tmp_path / "fast" / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(described["vocab"]))
    (old / "merges.txt").write_text("\n".join(" ".join(pair) for pair in described["merges"]))
    (old / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT})
    )
    loaded = load_tokenizer(old)
    assert loaded is not None
    assert loaded.same_vocabulary(fast) is None
    for text in TEXTS:
        assert loaded.encode(text) == fast.encode(text)
        pieces, rest = stream(loaded, loaded.encode(text))
        assert "".join(pieces) + rest == text


def test_tokenizers_written_in_python_work_too(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.eos_token_id == 1
    ids = tokenizer.encode("für 😀", add_special_tokens=False)
    assert len(ids) == len("für 😀".encode())
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == "für 😀"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_foreign_file_nobody_can_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(CheckpointError, match=r"\(tokenizer\.model\) cannot be read"):
        load_tokenizer(tmp_path)


def test_differing_vocabularies_are_told_apart_by_their_first_difference(tmp_path: Path) -> None:
    one = byte_level(tmp_path / "one")
    assert one.same_vocabulary(byte_level(tmp_path / "same")) is None
    described = json.loads((tmp_path / "one" / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    first, second = (token for token, index in sorted(vocab.items(), key=lambda item: item[1]) if index in (10, 11))
    vocab[first], vocab[second] = 11, 10
    shutil.copytree(tmp_path / "one", tmp_path / "swapped")
    (tmp_path / "swapped" / "tokenizer.json").write_text(json.dumps(described))
    swapped = load_tokenizer(tmp_path / "swapped")
    assert swapped is not None
    assert one.same_vocabulary(swapped) == f"token 10 is {first!r} here and {second!r} there"
    larger = load_tokenizer(tiny_tokenizer(tmp_path / "larger", vocab_size=290))
    assert larger is not None
    difference = one.same_vocabulary(larger)
    assert difference is not None
    assert difference.startswith("300 against 290 tokens; token 290 is ")
    assert difference.endswith("nothing there")


# --- chat templates ---

CHATML = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{% generation %}{{ message.content | trim }}{% endgeneration %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": " hi <b> "}, {"role": "assistant", "content": "für"}]


def with_template(folder: Path, template: str | None) -> Tokenizer:
    loaded = load_tokenizer(tiny_tokenizer(folder, chat_template=template))
    assert loaded is not None
    return loaded


def test_a_chat_is_laid_out_by_the_template(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    expected = f"{END_OF_TEXT}<user>hi <b>\n<assistant>für\n"
    assert tokenizer.apply_chat_template(MESSAGES) == expected + "<assistant>"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected
    ids = tokenizer.encode(expected, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id


def test_a_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer.apply_chat_template(MESSAGES) == "file"
    tiny_tokenizer(tmp_path / "named")
    names = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "named" / "tokenizer_config.json").write_text(json.dumps({"chat_template": names}))
    named = load_tokenizer(tmp_path / "named")
    assert named is not None
    assert named.apply_chat_template(MESSAGES) == "plain"
    assert named.apply_chat_template(MESSAGES, tools=[]) == "plain"
    assert named.apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == named.tool_template == "tools"
    assert named.with_template("other").apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == "other"


def test_templates_in_files_replace_those_of_the_settings(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    tokenizer = with_template(tmp_path, CHATML)
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    assert tokenizer.apply_chat_template(MESSAGES) == "file"
    assert tokenizer.apply_chat_template(MESSAGES, tools=tools) == "f"
    expected = AutoTokenizer.from_pretrained(tmp_path)
    assert expected.apply_chat_template(MESSAGES, tools=tools, tokenize=False) == "f"


def test_a_refused_chat_and_a_missing_template_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="refuses them: unknown role robot"):
        with_template(tmp_path / "a", CHATML).apply_chat_template([{"role": "robot", "content": ""}])
    with pytest.raises(InputError, match="has no chat template; give plain text"):
        with_template(tmp_path / "b", None).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_tokens_of_any_other(by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = by_kind[kind]
    text = f"{END_OF_TEXT} ab \U0001f600 c\n\n" * 400
    raw: Raw = tokenizer._backend._inner  # type: ignore[attr-defined]
    assert tokenizer.encode(text) == raw.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=False) == raw.encode(text, add_special_tokens=False).ids
    plain = Raw.from_str(raw.to_str())
    plain.encode_special_tokens = True
    assert tokenizer.encode_plain(text) == plain.encode(text, add_special_tokens=False).ids


def test_others_run_while_a_long_text_is_encoded(by_kind: dict[str, Tokenizer]) -> None:
    """A server streams other answers and says that it lives; with the interpreter held it would do neither."""
    text, begun = "The quick brown fox. " * 40_000, threading.Event()

    def encode() -> None:
        begun.set()
        by_kind["byte_level"].encode(text)

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    num_turns = 0
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 10
