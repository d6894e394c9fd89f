"""Whether a draft model belongs to a target, and which drafter it makes: in the target's own tokens, or across two
tokenizers.
"""

from __future__ import annotations

import warnings
from typing import cast

from foretoken.draft.base import Drafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.other_vocabulary import How, OtherVocabularyDrafter
from foretoken.errors import MismatchError
from foretoken.model.interface import LanguageModel
from foretoken.model.resized import resized
from foretoken.model.tokenizer import Tokenizer
from foretoken.model.vocabulary import Side, differs_in_padding_only


def pair(
    target: LanguageModel,
    target_text: Tokenizer | None,
    draft: LanguageModel,
    draft_text: Tokenizer | None,
    name: str,
    vocabulary: str,
) -> Drafter:
    """The drafter for `draft` (called `name`) under `SpecConfig.draft_vocabulary`; a warning says which way was taken,
    and if it cannot pay.

    Raises:
        MismatchError: the vocabularies differ and "same" was asked for, a folder has no tokenizer to translate with, or
            there is no intersection.
    """
    _warn_of_cost(target, draft)
    difference = _difference(target, target_text, draft, draft_text, name)
    if difference is None and vocabulary in ("auto", "same"):
        return DraftModelDrafter(resized(draft, target.vocab_size))
    if vocabulary == "same":
        raise MismatchError(f"{difference}; choose a draft made for this target, or draft_vocabulary='auto'")
    if target_text is None or draft_text is None:
        reason = difference or f"draft {name!r} cannot be used with draft_vocabulary={vocabulary!r}"
        without = "the target" if target_text is None else "the draft"
        raise MismatchError(
            f"{reason}, and the folder of {without} has no tokenizer to translate with; choose a draft "
            "made for this target"
        )
    drafter = OtherVocabularyDrafter(draft, _side(target, target_text), _side(draft, draft_text), cast(How, vocabulary))
    if vocabulary == "intersection" and not drafter.shared:
        raise MismatchError(
            f"draft {name!r} and the target have no tokens whose text is the same; use draft_vocabulary='strings'"
        )
    if vocabulary == "auto":
        above = (
            f"from the {len(drafter.shared):,} tokens that both have ('intersection')" if drafter.shared else "so too"
        )
        warnings.warn(
            (
                f"{difference}. At temperature 0 it guesses text, which is encoded again "
                f"(draft_vocabulary='strings'), and above {above}"
            ),
            stacklevel=4,
        )
    return drafter


def _difference(
    target: LanguageModel, target_text: Tokenizer | None, draft: LanguageModel, draft_text: Tokenizer | None, name: str
) -> str | None:
    """Why the draft's tokens are not the target's, the first difference named; None if they are, padding at the end
    apart.
    """
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
