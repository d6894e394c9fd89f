"""The `SpecConfig` that flags mean: what the drafter is where another flag names it, and its own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from foretoken.cli.flags import values_of
from foretoken.config import PLAIN, SpecConfig
from foretoken.errors import ConfigError
from foretoken.field_text import parse_field
from foretoken.files import check_readable
from foretoken.registry import known_drafters, options_class

# A flag that names its drafter where no other flag does.
_TAKERS = {
    "parts": "mix",
    "draft": "draft_model",
    "prediction": "predicted",
    "corpus": "suffix",
    "exit_layer": "early_exit",
    "skip_layers": "early_exit",
}


def spec_from(given: Mapping[str, Any]) -> SpecConfig:
    """`SpecConfig` from flags by name, other flags among them; texts are read as their fields have it.

    A draft, a head, a prediction, a corpus, layers or parts without a drafter name the drafter that takes them.

    Raises:
        ConfigError: a value that no drafter or rule takes.
    """
    values = values_of(SpecConfig, given)
    drafter = values["drafter"] = named_drafter(given)
    if drafter in (None, PLAIN) and values.get("num_draft", "auto") != "auto":
        raise ConfigError(
            "num_draft", given["num_draft"], "needs a drafter: name a --drafter or a --draft, or leave it out"
        )
    values["options"] = options_from(drafter, given.get("drafter_option") or ())
    return SpecConfig(**values)


def answering_spec(given: Mapping[str, Any]) -> SpecConfig | None:
    """`spec_from` for a verb that answers: without a drafter the flags are those of `auto`. None where nothing is said
    about drafting, which leaves it to the engine.

    Raises:
        ConfigError: see `spec_from`.
    """
    if named_drafter(given) is not None:
        return spec_from(given)
    spec = spec_from({**given, "drafter": "auto"})
    return None if spec == SpecConfig("auto") else spec


def named_drafter(given: Mapping[str, Any]) -> str | None:
    """The drafter that flags name: --drafter, or the first one that takes another flag which was given."""
    if given.get("drafter") is not None:
        return str(given["drafter"])
    unset: dict[str, object] = {"parts": "", "exit_layer": "auto"}  # what these flags hold where they were not given
    named = [name for name in _TAKERS if given.get(name) not in (None, unset.get(name))]
    if named:
        return _TAKERS[named[0]]
    if given.get("head") is None:
        return None
    from foretoken.heads.kind import kind_of_head

    return kind_of_head(str(given["head"]))


def options_from(drafter: str | None, texts: Sequence[str]) -> dict[str, Any]:
    """A drafter's own options, each written NAME=VALUE.

    Raises:
        ConfigError: no such form, or a value of another type; unknown names are left to `SpecConfig`.
    """
    found: dict[str, Any] = {}
    kind = options_class(drafter) if texts and drafter in known_drafters() else None
    known = [] if kind is None else [field.name for field in fields(kind)]
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError("drafter_option", text, "must be NAME=VALUE, such as width=3")
        found[name] = parse_field(kind, name, value) if kind is not None and name in known else value
    return found


def check_sources(spec: SpecConfig | None) -> None:
    """Whether the draft, the head and the text that `spec` names are there, before the target is loaded.

    Raises:
        ModelError: no such draft or head.
        StorageError: the corpus cannot be opened.
    """
    if spec is None:
        return
    if spec.draft is not None:
        from foretoken.model.names import model_folder  # imports torch, which `serve` does without

        model_folder(spec.draft)
    if spec.head is not None:
        from foretoken.heads.kind import kind_of_head

        kind_of_head(spec.head)
    if spec.corpus is not None:
        check_readable("corpus", Path(spec.corpus))
