"""Which tokens of a GGUF file are read whole, are not shown, or end an answer.

The file gives each token a type and names a few by their role. llama.cpp (`llama-vocab.cpp`) also goes by the text of
some tokens, because many files have the wrong type or name too few ends; the same tables are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from foretoken.errors import CheckpointError
from foretoken.model.gguf.header import Header

PREFIX = "tokenizer.ggml."
NO_TOKEN = 2**32 - 1  # how some files write that there is none


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end an answer whatever the file says about them, by family.
_ENDS = frozenset(
    {
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",
        "<|im_end|>",  # ChatML: Qwen, SmolLM
        "<|endoftext|>",
        "<|end|>",  # Phi-3
        "<|end_of_text|>",  # Llama 3, Granite
        "<end_of_turn>",  # Gemma 2 and 3
        "<eos>",
        "<turn|>",  # Gemma 4
        "<|tool_response>",
        "</s>",
        "<|return|>",  # gpt-oss
        "<|call|>",
        "<|flush|>",  # Solar
        "<|calls|>",
        "<EOT>",  # CodeLlama
        "_<EOT>",
        "[EOT]",  # Kimi K2
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
        "<end_of_utterance>",  # SmolDocling
        "[e~[",  # MiniMax
    }
)
# Marks between files and repositories in the training text of code models, at which llama.cpp stops as well. The first
# of each role that the vocabulary has counts, unless the metadata names the token.
_CODE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Where both of a pair are there, the other token is part of an answer.
_NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


@dataclass(frozen=True)
class SpecialToken:
    """A token that is found in the text before anything else; a hidden one is not shown in an answer, and `rstrip`
    takes the white space behind it.
    """

    token_id: int
    text: str
    hidden: bool
    rstrip: bool


def read_tokens(header: Header) -> list[str]:
    """The vocabulary; a token without text gets a name of its own, as in llama.cpp."""
    tokens = header.texts(f"{PREFIX}tokens")
    return [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]


def token_types(header: Header, tokens: list[str]) -> list[int]:
    """The type of each token, a `TokenType` in a sound file; all normal if the file has none.

    Raises:
        CheckpointError: not one for each token.
    """
    types = header.numbers(f"{PREFIX}token_type")
    if types is None:
        return [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{header.path}: {PREFIX}token_type has {len(types):,} entries for {len(tokens):,} tokens"
        )
    return [int(number) for number in types.tolist()]


def special_tokens(header: Header, tokens: list[str]) -> list[SpecialToken]:
    """The tokens that are read whole: control and unknown ones and ends of text, which are hidden, and user-defined
    ones, which are shown.
    """
    types, ends = token_types(header, tokens), set(end_texts(tokens))
    phi3 = any(name in (header.fields.text("general.name") or "").lower() for name in ("phi-3", "phi3"))
    found = []
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        hidden = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token in ends
        if hidden or kind == TokenType.USER_DEFINED:
            rstrip = phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            found.append(SpecialToken(token_id, token, hidden, rstrip))
    return found


def end_texts(tokens: list[str]) -> list[str]:
    """The tokens of a vocabulary that end an answer by their text."""
    known = set(tokens)
    ends = [token for token in tokens if token in _ENDS]
    has = set(ends)
    shown = {token for others, token in _NO_ENDS if others <= has}
    code = [next((text for text in texts if text in known), None) for texts in _CODE_ENDS.values()]
    return [token for token in ends if token not in shown] + [text for text in code if text is not None]


def end_tokens(header: Header, vocab_size: int) -> list[int]:
    """Ids of the tokens that end an answer: those that the metadata names, the usual one first, and those known by
    their text.

    Raises:
        CheckpointError: an id that is no number.
    """
    fields, tokens = header.fields, header.texts(f"{PREFIX}tokens")
    keys = [f"{PREFIX}{name}_token_id" for name in ("eos", "eot", "eom", *_CODE_ENDS)]
    named = [fields.whole(key, least=0, most=NO_TOKEN) for key in keys if fields.has(key)]
    texts = set(end_texts(tokens))
    ids = named + [token_id for token_id, token in enumerate(tokens) if token in texts]
    return [token_id for token_id in dict.fromkeys(ids) if token_id < vocab_size]  # NO_TOKEN is larger
