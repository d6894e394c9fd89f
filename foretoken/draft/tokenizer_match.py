"""Whether a draft model's tokens are the target's, and how to translate between them where they are not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, cast

from foretoken.errors import MismatchError
from foretoken.model.interface import LanguageModel
from foretoken.text.tokenizer import Tokenizer
from foretoken.text.vocabulary import Side, differs_in_padding_only

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
        warnings.warn(
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
        warnings.warn(
            f"the draft has {draft.step_bytes / 1e6:,.1f} MB of weights to read per step, the target "
            f"{target.step_bytes / 1e6:,.1f} MB: "
            "drafting costs as much as decoding",
            stacklevel=4,
        )
