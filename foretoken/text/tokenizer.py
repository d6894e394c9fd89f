"""Text to token ids and back: the `tokenizers` library on `tokenizer.json`, chat templates in a sandbox.

A folder with another kind of tokenizer file goes through transformers once, which converts it; a GGUF file brings its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from foretoken.errors import CheckpointError, InputError, UnsupportedModelError
from foretoken.files import read_text
from foretoken.model.fields import check_links, read_json
from foretoken.model.gguf.header import is_gguf
from foretoken.model.gguf.parts import read_header
from foretoken.model.quiet import quiet_transformers
from foretoken.params import check_text
from foretoken.text.added_tokens import add_stated_tokens, special_text
from foretoken.text.chat_template import chat_templates, cut_at_mark, marked_last, render
from foretoken.text.encoders import TextEncoder, broken_means, is_panic, rust_encoder, transformers_encoder
from foretoken.text.gguf_tokenizer import read_tokenizer
from foretoken.text.token_bytes import token_writer

_OTHER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
    "tekken.json",
)
_TRIAL = "Tokens: 12 naïve 猫 😀\n\tend\x00."


class Tokenizer:
    """The tokenizer of a checkpoint folder or GGUF file, with `settings` as in `tokenizer_config.json`; `template` is a
    chat template that replaces the checkpoint's.
    """

    def __init__(
        self, backend: TextEncoder, folder: Path, settings: Mapping[str, Any], template: str | None = None
    ) -> None:
        self._backend, self.folder, self._settings, self._template = backend, folder, settings, template
        self.special_ids = backend.special_ids()
        self.literal_ids = backend.literal_ids()  # written as they are spelt, though the decoder reads them as bytes

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; a BOS only if the tokenizer's own post-processor adds one and `add_special_tokens` is
        left on.

        Raises:
            InputError: a lone surrogate, which no tokenizer takes.
        """
        check_text("text", text)
        return self._backend.encode(text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` in which no part of it is read as a special token, and to which none is added."""
        check_text("text", text)
        if not any(special in text for special in self.special_texts):
            return self._backend.encode(text, False)
        return self._backend.encode_plain(text)

    def min_num_tokens(self, text: str, enough: int, is_plain: bool = False) -> int:
        """A number of tokens that a long text has in any case, found in a time that grows with `enough` and not with
        the text: nothing more is looked for. 0 where nothing is certain. `is_plain`: as `encode_plain` reads it.
        """
        check_text("text", text)
        return self._backend.min_num_tokens(text, enough, is_plain)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens as they are spelt."""
        return tuple(text for text in map(self.token, sorted(self.special_ids)) if text)

    def decode(self, ids: Sequence[int], has_specials: bool = False) -> str:
        """Text of `ids`, special tokens left out or, with `has_specials`, as they are spelt; ids that the tokenizer
        does not know give nothing.
        """
        return self._backend.decode(ids, has_specials)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of one id; None for an id without a token."""
        return self._backend.token(token_id)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added tokens included."""
        return self._backend.vocabulary()

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model may have a few more columns than this."""
        return len(self.vocabulary)

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, as `tokenizer_config.json` says."""
        return self._special("eos_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, as `tokenizer_config.json` says."""
        return self._special("bos_token")

    def _special(self, name: str) -> int | None:
        return self.vocabulary.get(special_text(self._settings.get(name)) or "")

    @cached_property
    def decoder(self) -> Mapping[str, Any]:
        """The tokenizer's decoder as `tokenizer.json` describes it; empty if unknown."""
        return self._backend.decoder()

    @cached_property
    def token_bytes(self) -> dict[int, bytes] | None:
        """The bytes that each id writes, special tokens as they are spelt; None if the decoder does more than join its
        tokens.

        What a decoder does at the ends of a text (SentencePiece drops the space in front) is not in here.
        """
        write = token_writer(self.decoder)
        if write is None:
            return None
        spelt = self.special_ids | self.literal_ids
        return {
            token_id: token.encode() if token_id in spelt else write(token)
            for token, token_id in self.vocabulary.items()
        }

    @cached_property
    def drops_first_space(self) -> bool:
        """Whether the decoder leaves out the space of a text's first token, as SentencePiece does."""
        spaced = next(
            (
                token
                for token, written in (self.token_bytes or {}).items()
                if written[:1] == b" " and written[1:2] not in (b"", b" ")  # of two spaces one would be left
            ),
            None,
        )
        return spaced is not None and not self.decode([spaced]).startswith(" ")

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer itself puts in front of every text: a BOS, or nothing."""
        bare, dressed = (self.encode("a", add_special_tokens=special) for special in (False, True))
        places = range(len(dressed) - len(bare) + 1)
        return next((tuple(dressed[:place]) for place in places if dressed[place : place + len(bare)] == bare), ())

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        return chat_templates(self.folder, self._settings) if self._template is None else {"default": self._template}

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that lays out a chat; None when the folder has none."""
        return self._templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The source that lays out a chat with tools: `tool_use` where the folder names one, else `chat_template`."""
        return self._templates.get("tool_use", self.chat_template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Lay out `messages` (role and content each) as the model was trained to read them.

        Encode the result with `add_special_tokens=False`: the template writes its own BOS. `options` are variables of
        the template, such as `enable_thinking`; with `continue_final_message` the text ends where the last message's
        does, so that an answer continues it.

        Raises:
            InputError: the folder has no chat template, or the template refuses these messages or does not write the
                one that is to be continued.
            CheckpointError: the template itself is broken, or does not come to an end.
        """
        source = self.tool_template if tools else self.chat_template
        if source is None:
            raise InputError(
                "messages",
                list(messages),
                f"{self.folder} has no chat template; give plain text instead, take a checkpoint that was trained to "
                "chat, or name a file with a template (chat_template)",
            )
        specials = {
            name: text
            for name, value in self._settings.items()
            if name.endswith("_token") and (text := special_text(value)) is not None
        }
        variables = dict(options or {})
        if not variables.pop("continue_final_message", False):
            return render(source, messages, add_generation_prompt, tools, specials, str(self.folder), variables)
        variables.pop("add_generation_prompt", None)
        marked = marked_last(messages)
        return cut_at_mark(render(source, marked, False, tools, specials, str(self.folder), variables))

    def with_template(self, template: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        return Tokenizer(self._backend, self.folder, self._settings, template)

    def same_vocabulary(self, other: Tokenizer) -> str | None:
        """Say how `other` differs: the sizes, and the first id that means another token; None when they agree."""
        if self.vocabulary == other.vocabulary:
            return None
        mine = {token_id: token for token, token_id in self.vocabulary.items()}
        theirs = {token_id: token for token, token_id in other.vocabulary.items()}
        first = min(token_id for token_id in mine.keys() | theirs.keys() if mine.get(token_id) != theirs.get(token_id))
        left, right = (repr(side[first]) if first in side else "nothing" for side in (mine, theirs))
        sizes = f"{len(mine)} against {len(theirs)} tokens; " if len(mine) != len(theirs) else ""
        return f"{sizes}token {first} is {left} here and {right} there"


def load_tokenizer(folder: Path, chat_template: Path | str | None = None) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint folder; None when it has none, and token ids go in and out.

    `chat_template` is a file whose template replaces the folder's.

    Raises:
        CheckpointError: a tokenizer file that cannot be read or does not work, or that is a link out of the folder.
        UnsupportedModelError: a GGUF file with a kind of tokenizer that is not known here.
        StorageError: `chat_template` cannot be read.
        InputError: `chat_template` beside a folder without a tokenizer.
    """
    found = _found(folder)
    if chat_template is None:
        return found
    if found is None:
        raise InputError("chat_template", str(chat_template), f"{folder} has no tokenizer; leave the template out")
    return found.with_template(read_text("chat_template", Path(chat_template)))


def _found(folder: Path) -> Tokenizer | None:
    if is_gguf(folder):
        with broken_means(f"the tokenizer in {folder} cannot be read", UnsupportedModelError):
            found = read_tokenizer(read_header(folder))
            return None if found is None else _tried(Tokenizer(rust_encoder(found[0], str(folder)), folder, found[1]))
    check_links(folder)
    file = folder / "tokenizer.json"
    if file.exists():
        settings = _read_settings(folder)
        with broken_means(f"{file} cannot be read"):
            inner = tokenizers.Tokenizer.from_file(str(file))
            add_stated_tokens(inner, folder, settings)
            backend = rust_encoder(inner, str(file))
        return _tried(Tokenizer(backend, folder, settings))
    others = [name for name in _OTHER_FILES if (folder / name).exists()]
    if not others:
        return None
    return _tried(Tokenizer(_from_transformers(folder, others[0]), folder, _read_settings(folder)))


def _tried(tokenizer: Tokenizer) -> Tokenizer:
    """Use every part once: files that are read without complaint may still not work."""
    with broken_means(f"the tokenizer in {tokenizer.folder} does not work"):
        for text in ("", "a", _TRIAL):
            tokenizer.decode(tokenizer.encode(text))
        ids = tokenizer.vocabulary.values()
        tokenizer.decode(sorted(ids)[:: max(1, len(ids) // 256)])
        _ = tokenizer.decoder, tokenizer.opening_ids, tokenizer.eos_token_id
    return tokenizer


def _from_transformers(folder: Path, file: str) -> TextEncoder:
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except BaseException as error:  # whatever a foreign file makes a foreign library raise
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        remedy = "add a tokenizer.json, or install the package that reads it (sentencepiece, tiktoken)"
        raise CheckpointError(f"the tokenizer in {folder} ({file}) cannot be read: {error}; {remedy}") from error
    return transformers_encoder(inner, f"the tokenizer in {folder} ({file})")


def _read_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second one wins
        file = folder / name
        if file.exists():
            settings |= {key: value for key, value in read_json(file).items() if value is not None}
    return settings
