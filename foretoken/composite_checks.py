"""What the parts of a composite drafter may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from foretoken.errors import ConfigError
from foretoken.registry import DRAFTERS, HEAD_KINDS, HEADS, traits_of

if TYPE_CHECKING:
    from foretoken.config import SpecConfig

A_DRAFT = "the folder or hub id of a draft model"
A_HEAD = "the folder or hub id of a trained head"


def is_lookup(spec: SpecConfig) -> bool:
    """Whether the drafter is a lookup: its draft tokens are deterministic and its own."""
    return spec.drafter is not None and traits_of(spec.drafter).is_lookup


def leaves_of(spec: SpecConfig, parts: Sequence[SpecConfig]) -> frozenset[str]:
    """Names of the simple drafters that `parts` come down to; without parts the drafter itself."""
    if not parts:
        return frozenset() if spec.drafter is None else frozenset({spec.drafter})
    return frozenset(name for part in parts for name in leaves_of(part, part.declared))


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
            raise ConfigError(
                "rule", part.rule, f"one rule decides for all parts; set it beside drafter={spec.drafter!r}"
            )
        if part.drafter == "draft_model" and part.draft is None:
            raise ConfigError("draft", None, f"part 'draft_model' of drafter={spec.drafter!r} needs {A_DRAFT}")
        if part.drafter in HEADS and part.head is None:
            raise ConfigError("head", None, f"part {part.drafter!r} of drafter={spec.drafter!r} needs {A_HEAD}")
        if part.draft_probability != spec.draft_probability and part.samples:
            raise ConfigError(
                "draft_probability",
                part.draft_probability,
                f"must be the same beside drafter={spec.drafter!r} and in its parts",
            )
    taken = {name for traits in DRAFTERS.values() for name in traits.fields}
    for one in fields(spec):
        value = getattr(spec, one.name)
        if one.name in taken and value != one.default and all(getattr(p, one.name) != value for p in spec.declared):
            raise ConfigError(
                one.name,
                value,
                "no part takes it over, because each that could is a configuration of its own; set it there",
            )
    if spec.drafter == "cascade":
        _check_levels(spec)
    probing = next((part for part in spec.declared if part.num_probe), None)
    if probing is not None:
        raise ConfigError(
            "parts",
            str(probing.drafter),
            "its probes run beside its own draft tokens only: use drafter='lookahead' alone, or lookahead_window=0",
        )
    if spec.drafter == "mix":
        _check_merged(spec)


def _check_merged(spec: SpecConfig) -> None:
    """Only one part may ask a model: tokens drawn from two distributions at one place cannot be merged exactly."""
    others = [part for part in spec.declared if not is_lookup(part)]
    if len(others) > 1:
        names = ", ".join(str(part.drafter) for part in others)
        raise ConfigError(
            "parts", names, "one part of a mix at most may ask a model; choose among several with drafter='auto'"
        )
    if any(part.tree != "chain" for part in others):
        raise ConfigError(
            "tree",
            others[0].tree,
            "a mix merges other drafts with chains only; use it alone, or drafter='auto'",
        )


def _check_levels(spec: SpecConfig) -> None:
    names = [part.drafter for part in spec.declared]
    if len(names) < 2:
        raise ConfigError(
            "parts", names, "a cascade has two levels at least, cheapest first, such as ('ngram', 'draft_model')"
        )
    for name in names[1:]:
        if name != "draft_model":
            raise ConfigError(
                "parts", name, "every level of a cascade above the first verifies, so it must be a draft_model"
            )
    if names[0] != "draft_model" and not is_lookup(spec.declared[0]):
        lookups = ", ".join(name for name, traits in DRAFTERS.items() if traits.is_lookup)
        raise ConfigError("parts", names[0], f"the first level of a cascade must be one of draft_model, {lookups}")
    for part in spec.declared:
        if part.tree != "chain":
            raise ConfigError("tree", part.tree, "a cascade drafts chains; leave it at 'chain'")
        if part.draft_vocabulary not in ("auto", "same"):
            raise ConfigError(
                "draft_vocabulary",
                part.draft_vocabulary,
                "all levels of a cascade share the target's tokens; leave it at 'auto'",
            )
    if spec.draft_probability != 1:
        raise ConfigError("draft_probability", spec.draft_probability, "a cascade drafts every position; leave it at 1")
