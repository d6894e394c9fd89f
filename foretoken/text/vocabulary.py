"""What two vocabularies have in common: which ids are padding, which tokens write the same bytes, which special tokens
mean the same; and whether a draft model's tokens are the target's, or how to translate between them.

A spelling is the bytes that a token writes inside a text, so that the space of a byte-level token and the mark of a
SentencePiece one are the same space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from foretoken.errors import MismatchError, warn
from foretoken.model.interface import LanguageModel
from foretoken.text.token_bytes import BYTE_TOKEN
from foretoken.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Side:
    """One model's vocabulary: its tokenizer, number of logits, and tokens that end a text, the usual one first."""

    tokenizer: Tokenizer
    num_columns: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Twins:
    """Special tokens that mean the same on both sides, target id -> draft id and back.

    Several ends of text on one side all mean the other side's usual one.
    """

    to_draft: Mapping[int, int]
    to_target: Mapping[int, int]


def differs_in_padding_only(target: Side, draft: Side) -> bool:
    """Whether both tokenizers are the same and the columns that one model has more belong to no token."""
    return target.tokenizer.same_vocabulary(draft.tokenizer) is None and (
        target.num_columns == draft.num_columns
        or max(target.tokenizer.vocabulary.values(), default=-1) < min(target.num_columns, draft.num_columns)
    )


def special_twins(target: Side, draft: Side) -> Twins:
    """Special tokens of equal spelling, beginnings of text, ends of text; ids beyond a model's columns have no twin."""
    theirs = {draft.tokenizer.token(token): token for token in _inside(draft, draft.tokenizer.special_ids)}
    same = {
        token: theirs[name]
        for token in _inside(target, target.tokenizer.special_ids)
        if (name := target.tokenizer.token(token)) in theirs
    }
    ends, their_ends = _inside(target, target.eos_token_ids), _inside(draft, draft.eos_token_ids)
    begins, their_begins = (_inside(side, [side.tokenizer.bos_token_id]) for side in (target, draft))
    to_draft, to_target = dict(same), {token: twin for twin, token in same.items()}
    # An end comes before a beginning: some models use one token for both.
    for ours, other in ((ends, their_ends), (begins, their_begins)):
        if ours and other:
            to_draft = dict.fromkeys(ours, other[0]) | to_draft
            to_target = dict.fromkeys(other, ours[0]) | to_target
    return Twins(to_draft, to_target)


def spellings(side: Side) -> dict[bytes, int] | None:
    """The id that writes each byte string, special and empty tokens left out; None if the decoder does more than join
    its tokens.

    Of several ids with one spelling the one that the tokenizer itself would choose: no byte token where there is a real
    one, then the lowest.
    """
    writes = side.tokenizer.token_bytes
    if writes is None:
        return None
    special = side.tokenizer.special_ids | set(side.eos_token_ids)
    found: dict[bytes, tuple[bool, int]] = {}
    for token in _inside(side, sorted(writes.keys() - special)):
        rank = (BYTE_TOKEN.fullmatch(side.tokenizer.token(token) or "") is not None, token)
        if writes[token] and rank < found.get(writes[token], (True, side.num_columns)):
            found[writes[token]] = rank
    return {spelling: token for spelling, (_, token) in found.items()}


def shared_tokens(target: Side, draft: Side) -> dict[int, int] | None:
    """Target id -> draft id, one to one, of the tokens with the same spelling on both sides; special tokens through
    their twins.

    The shared vocabulary of Timor et al. (arXiv 2502.05202, "TLI"). None if a tokenizer's tokens have no spelling;
    empty if no text is shared.
    """
    ours, theirs = spellings(target), spellings(draft)
    if ours is None or theirs is None:
        return None
    shared = {token: theirs[spelling] for spelling, token in ours.items() if spelling in theirs}
    if not shared:
        return {}
    twins = special_twins(target, draft)
    specials = {token: twin for twin, token in twins.to_target.items() if twins.to_draft[token] == twin}
    return dict(sorted((shared | specials).items()))


def _inside(side: Side, tokens: Iterable[int | None]) -> list[int]:
    """The ids among `tokens` that the model has a column for."""
    return [token for token in tokens if token is not None and token < side.num_columns]


TextUse = Literal["auto", "strings", "intersection"]  # `SpecConfig.draft_vocabulary` where the tokenizers differ


@dataclass(frozen=True)
class Translation:
    """The vocabularies of a target and a draft whose tokens differ, and how the draft's tokens are translated.

    `difference` says what differs; None if nothing does and the translation was asked for.
    """

    target: Side
    draft: Side
    how: TextUse
    difference: str | None


def match_tokenizers(
    target: LanguageModel,
    target_text: Tokenizer | None,
    draft: LanguageModel,
    draft_text: Tokenizer | None,
    *,
    name: str,
    vocabulary: str,
) -> Translation | None:
    """How the draft model `name` is used under `SpecConfig.draft_vocabulary`; None: its tokens are the target's.

    Warns if reading the draft's weights takes as long as reading the target's.

    Raises:
        MismatchError: the vocabularies differ and "same" was asked for, or a folder has no tokenizer to translate with.
    """
    _warn_of_cost(target, draft)
    difference = _difference(target, target_text, draft, draft_text, name)
    if difference is None and vocabulary in ("auto", "same"):
        return None
    if vocabulary == "same":
        raise MismatchError(f"{difference}; choose a draft made for this target, or draft_vocabulary='auto'")
    if target_text is None or draft_text is None:
        reason = difference or f"draft {name!r} cannot be used with draft_vocabulary={vocabulary!r}"
        without = "the target" if target_text is None else "the draft"
        raise MismatchError(
            f"{reason}, and the folder of {without} has no tokenizer to translate with; choose a draft "
            "made for this target"
        )
    return Translation(_side(target, target_text), _side(draft, draft_text), cast(TextUse, vocabulary), difference)


def warn_of_text(found: Translation, name: str, num_shared: int) -> None:
    """Check and report how the draft `name` is translated, where `num_shared` tokens are in both vocabularies.

    Raises:
        MismatchError: the intersection was asked for, and is empty.
    """
    if found.how == "intersection" and not num_shared:
        raise MismatchError(
            f"draft {name!r} and the target have no tokens whose text is the same; use draft_vocabulary='strings'"
        )
    if found.how == "auto":
        above = f"from the {num_shared:,} tokens that both have ('intersection')" if num_shared else "so too"
        warn(
            f"{found.difference}. At temperature 0 it drafts text, which is encoded again "
            f"(draft_vocabulary='strings'), and above {above}",
            stacklevel=4,
        )


def _difference(
    target: LanguageModel, target_text: Tokenizer | None, draft: LanguageModel, draft_text: Tokenizer | None, name: str
) -> str | None:
    """The first difference between the tokens of draft and target; None if they only differ in padding at the end."""
    if target_text is not None and draft_text is not None:
        difference = target_text.same_vocabulary(draft_text)
        if difference is not None:
            return f"draft {name!r} has another tokenizer than the target: {difference}"
        if differs_in_padding_only(_side(target, target_text), _side(draft, draft_text)):
            return None
    if target.vocab_size == draft.vocab_size:
        return None
    return (
        f"draft {name!r} has a vocabulary of {draft.vocab_size} tokens, the target one of {target.vocab_size} "
        "(padding included)"
    )


def _side(model: LanguageModel, tokenizer: Tokenizer) -> Side:
    ends = [tokenizer.eos_token_id, *model.eos_token_ids]
    return Side(tokenizer, model.vocab_size, tuple(dict.fromkeys(token for token in ends if token is not None)))


def _warn_of_cost(target: LanguageModel, draft: LanguageModel) -> None:
    if draft.step_bytes >= target.step_bytes:
        warn(
            f"the draft has {draft.step_bytes / 1e6:,.1f} MB of weights to read per step, the target "
            f"{target.step_bytes / 1e6:,.1f} MB: drafting costs as much as decoding",
            stacklevel=4,
        )
