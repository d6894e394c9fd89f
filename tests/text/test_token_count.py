"""A long text has at least as many tokens as `min_num_tokens` says, and not all of it is encoded to find out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from foretoken.engine.prompt_encoder import PromptEncoder
from foretoken.errors import ContextLengthError
from foretoken.text import encoders
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.foreign_tokenizers import foreign_tokenizer

CONTEXT = 64
LONG = 100_000
SEED = 20
# As Llama 3 and Qwen split, and with digits in groups counted from the end of their run.
LLAMA = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = (
    "the ",
    "naïve",
    "e\u0301",
    "猫",
    "😀",
    " ",
    "\n",
    "   \n",
    "\x00",
    "123",
    "1,",
    "a",
    "</s>",
    "<|endoftext|>",
    "!",
)
ONE_WORD = {"letters": "a", "digits": "7", "spaces": " ", "marks": "!", "accents": "e\u0301", "bytes": "\x01"}


def made(folder: Path, kind: str) -> Path:
    """The folder of a tokenizer of some kind."""
    if kind in ("sentencepiece", "unigram", "wordpiece"):
        return foreign_tokenizer(folder, kind)
    file = str(tiny_tokenizer(folder, 400) / "tokenizer.json")
    changed = Tokenizer.from_file(file)
    if kind == "nfc":
        changed.normalizer = normalizers.NFC()
    elif kind == "groups":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(LLAMA), "isolated")
        changed.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind == "greedy":
        changed.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    elif kind == "removing":
        changed.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), changed.pre_tokenizer])
    changed.save(file)
    return folder


KINDS = ("plain", "nfc", "groups", "greedy", "removing", "sentencepiece", "unigram", "wordpiece")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_at_least_so_many_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(made(tmp_path, kind))
    assert tokenizer is not None
    draw, found = random.Random(SEED), 0
    texts = ["".join(draw.choices(draw.sample(PIECES, 5), k=1500)) for _ in range(40)]
    texts += [letter * 3000 for letter in ONE_WORD.values()] + ["<|end|>" + " " * 3000, "a" + " " * 3000 + "b"]
    for text in texts:
        for enough in (2, 20, 60):
            for is_plain in (False, True):
                least = tokenizer.min_num_tokens(text, enough, is_plain)
                ids = tokenizer.encode_plain(text) if is_plain else tokenizer.encode(text, add_special_tokens=False)
                assert least <= len(ids), (SEED, text[:200], enough)
                found += least > enough
    assert found > 20  # a number that says something


@pytest.mark.parametrize("text", [*(letter * LONG for letter in ONE_WORD.values()), "the list is empty\n" * LONG])
def test_a_text_far_beyond_the_context_is_not_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Nothing stops the library once it has begun with a text of minutes."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path, 400, chat_template=template))
    assert tokenizer is not None
    encoder = PromptEncoder(tokenizer, tmp_path, 400)
    read = encoders._Fast._ids

    def checked(self: Any, inner: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        assert len(text) < LONG
        return read(self, inner, text, add_special_tokens)

    monkeypatch.setattr(encoders._Fast, "_ids", checked)
    for ask in (
        lambda: encoder.encode(text, CONTEXT),
        lambda: encoder.encode_chat([{"role": "user", "content": text}], context=CONTEXT),
        lambda: encoder.encode_plain("prediction", text, CONTEXT),
    ):
        with pytest.raises(ContextLengthError, match=r"\d+ tokens or more': the context holds 64 tokens") as refused:
            ask()
        assert int(str(refused.value.value).split()[0]) >= CONTEXT


def test_many_special_tokens_are_not_all_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that a message spells is encoded for itself."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoder = PromptEncoder(load_tokenizer(tiny_tokenizer(tmp_path, 400, chat_template=template)), tmp_path, 400)
    asked, read = list[str](), encoders._Fast._ids
    monkeypatch.setattr(encoders._Fast, "_ids", lambda *given: (asked.append(given[2]), read(*given))[1])
    with pytest.raises(ContextLengthError, match="tokens or more"):
        encoder.encode_chat([{"role": "user", "content": "<|endoftext|>x" * 5000}], context=CONTEXT)
    assert len(asked) < 6 * CONTEXT


def test_a_prompt_that_is_a_little_too_long_is_counted(tmp_path: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(tiny_tokenizer(tmp_path, 400)), tmp_path, 400)
    text = "the list " * 40
    ids = encoder.encode(text)
    with pytest.raises(ContextLengthError, match=f"{len(ids)} tokens': "):
        encoder.encode(text, CONTEXT)
    assert encoder.encode(text, len(ids) + 1) == ids
    assert len(encoder.encode("the list " * LONG)) > LONG  # no context: all of it is wanted
