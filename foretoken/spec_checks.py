"""Which values of a `SpecConfig` go together, and what the parts of a composite drafter may be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from foretoken.errors import ConfigError
from foretoken.params import check_number, check_text, check_whole
from foretoken.registry import DRAFTERS, HEAD_KINDS, HEADS, PLAIN, known_drafters, traits_of

if TYPE_CHECKING:
    from foretoken.config import SpecConfig

A_DRAFT = "the folder or hub id of a draft model"
A_HEAD = "the folder or hub id of a trained head"
PACKAGED_TABLE, NO_TABLE = "packaged", "none"  # of `SpecConfig.ngram_table`


def is_lookup(spec: SpecConfig) -> bool:
    """Whether the drafter is a lookup: its draft tokens are deterministic and its own."""
    return spec.drafter is not None and traits_of(spec.drafter).is_lookup


def leaves_of(spec: SpecConfig, parts: Sequence[SpecConfig]) -> frozenset[str]:
    """Names of the simple drafters that `parts` come down to; without parts the drafter itself."""
    if not parts:
        return frozenset() if spec.drafter is None else frozenset({spec.drafter})
    return frozenset(name for part in parts for name in leaves_of(part, part.declared))


def check_read(spec: SpecConfig, name: str) -> None:
    """Refuse a field that none of the drafters at work reads."""
    if any(name in traits_of(leaf).fields for leaf in leaves_of(spec, spec.declared)):
        return
    takers = [one for one, traits in DRAFTERS.items() if name in traits.fields and not traits.composite]
    raise only_for(spec, name, getattr(spec, name), takers)


def only_for(spec: SpecConfig, field: str, value: object, takers: Sequence[str]) -> ConfigError:
    """The error for an option that only the drafters `takers` read, none of which is at work here."""
    others = ", ".join("head" if spec.needs_head_kind and one.head else str(one.drafter) for one in spec.declared)
    named = takers[0] if len(takers) == 1 else "one of them"
    remedy = f" (parts: {others}): name {named} among the parts" if others else f": name {named} as the drafter"
    either = " or ".join(filter(None, (", ".join(map(repr, takers[:-1])), repr(takers[-1]))))
    return ConfigError(
        field, value, f"only drafter={either} takes it, not drafter={spec.drafter!r}{remedy}, or leave it out"
    )


def check_names(spec: SpecConfig) -> None:
    """Whether the drafter is known, and models have names."""
    if spec.drafter is not None and spec.drafter not in known_drafters():
        asked = spec.drafter.lower() if isinstance(spec.drafter, str) else ""
        near = difflib.get_close_matches(asked, (*known_drafters(), PLAIN), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        remedy = f"{hint}choose one of {', '.join(known_drafters())}, or {PLAIN} for plain decoding"
        raise ConfigError("drafter", spec.drafter, remedy)
    if spec.draft is not None and (not isinstance(spec.draft, str) or not spec.draft):
        raise ConfigError("draft", spec.draft, f"must be {A_DRAFT}")
    if spec.head is not None and (not isinstance(spec.head, str) or not spec.head):
        raise ConfigError("head", spec.head, f"must be {A_HEAD}")


def check_texts(spec: SpecConfig) -> None:
    """Whether names and the corpus are texts that somebody reads."""
    for name in ("draft", "corpus", "head"):
        value = getattr(spec, name)
        if isinstance(value, str):
            check_text(name, value)
    if spec.corpus is not None and (not isinstance(spec.corpus, str) or not spec.corpus):
        raise ConfigError("corpus", spec.corpus, "must be the name of a text file")
    if spec.corpus:
        check_read(spec, "corpus")


def check_table(spec: SpecConfig) -> None:
    """Whether somebody reads the n-gram table that is named, or left out."""
    if not isinstance(spec.ngram_table, str) or not spec.ngram_table:
        remedy = f"must be the name of a file, {PACKAGED_TABLE!r} or {NO_TABLE!r}"
        raise ConfigError("ngram_table", spec.ngram_table, remedy)
    check_text("ngram_table", spec.ngram_table)
    if spec.ngram_table != PACKAGED_TABLE:
        check_read(spec, "ngram_table")


def check_draft(spec: SpecConfig) -> None:
    """Whether a drafter at work reads what is said of a draft model or head."""
    for name in ("draft", "head"):
        if getattr(spec, name) is not None:
            check_read(spec, name)
    if spec.draft_dtype != "auto":
        check_read(spec, "draft_dtype")
    if spec.draft_vocabulary != "auto":
        check_read(spec, "draft_vocabulary")


def check_lookahead(spec: SpecConfig) -> None:
    """Whether the n-grams of lookahead have sizes it can use."""
    if spec.lookahead_window != "auto":
        check_whole("lookahead_window", spec.lookahead_window, low=0, high=64)
        check_read(spec, "lookahead_window")
    check_whole("lookahead_ngram", spec.lookahead_ngram, low=2, high=16)
    if spec.lookahead_ngram != type(spec).lookahead_ngram:
        check_read(spec, "lookahead_ngram")


def check_drafting_less(spec: SpecConfig) -> None:
    """Whether the ways to draft less are in range, beside a drafter that samples."""
    if spec.draft_probability != "auto":
        check_number("draft_probability", spec.draft_probability, low=0.0, high=1.0, open_low=True)
    check_number("min_confidence", spec.min_confidence, low=0.0, high=1.0)
    check_whole("draft_top_k", spec.draft_top_k, low=0)
    for name, neutral in (("draft_probability", 1.0), ("min_confidence", 0.0), ("draft_top_k", 0)):
        value = getattr(spec, name)
        if value != neutral and not spec.samples:
            samplers = ", ".join(other for other, traits in DRAFTERS.items() if traits.samples)
            without = (
                "" if spec.drafter is None else f", and drafter={spec.drafter!r} has none; choose one, or leave it out"
            )
            raise ConfigError(name, value, f"needs a drafter that samples from a distribution ({samplers}){without}")


def _check_head_kind(spec: SpecConfig) -> None:
    """Whether `head_kind` is a kind of head, and says something."""
    if spec.head_kind == "auto":
        return
    if spec.head_kind not in HEAD_KINDS:
        raise ConfigError("head_kind", spec.head_kind, f"choose one of auto, {', '.join(HEAD_KINDS)}")
    if not spec.has_part_for_head:
        remedy = "says which drafter of auto or mix runs a `head`; name the drafter itself, or leave it out"
        raise ConfigError("head_kind", spec.head_kind, remedy)


def check_nesting(spec: SpecConfig) -> None:
    """Only a cascade may be a part, and a head's kind must be one."""
    _check_head_kind(spec)
    for part in spec.declared:
        if part.drafter in (spec.drafter, "mix", "auto"):
            nests = spec.drafter == "cascade" and part.drafter != "cascade"
            remedy = f"put the cascade into the {part.drafter}" if nests else "name its parts here"
            raise ConfigError("parts", part.drafter, f"cannot be a part of drafter={spec.drafter!r}; {remedy} instead")


def check_parts(spec: SpecConfig) -> None:
    """What parts may be, and that nothing set here or there is left without effect."""
    for part in spec.declared:
        if part.rule != "auto":
            remedy = f"one rule decides for all parts; set it beside drafter={spec.drafter!r}"
            raise ConfigError("rule", part.rule, remedy)
        if part.drafter == "draft_model" and part.draft is None:
            raise ConfigError("draft", None, f"part 'draft_model' of drafter={spec.drafter!r} needs {A_DRAFT}")
        if part.drafter in HEADS and part.head is None:
            raise ConfigError("head", None, f"part {part.drafter!r} of drafter={spec.drafter!r} needs {A_HEAD}")
        if part.draft_probability != spec.draft_probability and part.samples:
            remedy = f"must be the same beside drafter={spec.drafter!r} and in its parts"
            raise ConfigError("draft_probability", part.draft_probability, remedy)
    taken = {name for traits in DRAFTERS.values() for name in traits.fields}
    for one in fields(spec):
        value = getattr(spec, one.name)
        if one.name in taken and value != one.default and all(getattr(p, one.name) != value for p in spec.declared):
            remedy = "no part takes it over, because each that could is a configuration of its own; set it there"
            raise ConfigError(one.name, value, remedy)
    if spec.drafter == "cascade":
        _check_levels(spec)
    probing = next((part for part in spec.declared if part.num_probe), None)
    if probing is not None:
        remedy = "its probes run beside its own draft tokens only: use drafter='lookahead' alone, or lookahead_window=0"
        raise ConfigError("parts", str(probing.drafter), remedy)
    if spec.drafter == "mix":
        _check_merged(spec)


def _check_merged(spec: SpecConfig) -> None:
    """Only one part may ask a model: tokens drawn from two distributions at one place cannot be merged exactly."""
    others = [part for part in spec.declared if not is_lookup(part)]
    if len(others) > 1:
        names = ", ".join(str(part.drafter) for part in others)
        remedy = "one part of a mix at most may ask a model; choose among several with drafter='auto'"
        raise ConfigError("parts", names, remedy)
    if any(part.tree != "chain" for part in others):
        remedy = "a mix merges other drafts with chains only; use it alone, or drafter='auto'"
        raise ConfigError("tree", others[0].tree, remedy)


def _check_levels(spec: SpecConfig) -> None:
    names = [part.drafter for part in spec.declared]
    if len(names) < 2:
        remedy = "a cascade has two levels at least, cheapest first, such as ('ngram', 'draft_model')"
        raise ConfigError("parts", names, remedy)
    for name in names[1:]:
        if name != "draft_model":
            remedy = "every level of a cascade above the first verifies, so it must be a draft_model"
            raise ConfigError("parts", name, remedy)
    if names[0] != "draft_model" and not is_lookup(spec.declared[0]):
        lookups = ", ".join(name for name, traits in DRAFTERS.items() if traits.is_lookup)
        raise ConfigError("parts", names[0], f"the first level of a cascade must be one of draft_model, {lookups}")
    for part in spec.declared:
        if part.tree != "chain":
            raise ConfigError("tree", part.tree, "a cascade drafts chains; leave it at 'chain'")
        if part.draft_vocabulary not in ("auto", "same"):
            remedy = "all levels of a cascade share the target's tokens; leave it at 'auto'"
            raise ConfigError("draft_vocabulary", part.draft_vocabulary, remedy)
    if spec.draft_probability != 1:
        raise ConfigError("draft_probability", spec.draft_probability, "a cascade drafts every position; leave it at 1")
