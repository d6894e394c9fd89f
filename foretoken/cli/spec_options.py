"""The flags of `SpecConfig`, made from its fields, and the configuration that given flags mean."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.common import spec_flag
from foretoken.cli.flags import flag, with_flags
from foretoken.config import PLAIN, SpecConfig
from foretoken.errors import ConfigError
from foretoken.field_text import parse_field, union_members
from foretoken.files import check_readable
from foretoken.registry import known_drafters, options_class

_PLAIN = (int, float, bool, str)  # types that a flag has; every other field is a text
# A flag that names its drafter where no other flag does.
_TAKERS = {
    "parts": "mix",
    "draft": "draft_model",
    "prediction": "predicted",
    "corpus": "suffix",
    "exit_layer": "early_exit",
    "skip_layers": "early_exit",
}


def with_spec_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with a flag for every field of `SpecConfig` that has a help text, and --drafter-option; it reads them from
    its context.
    """
    spec_hints = typing.get_type_hints(SpecConfig)
    flags = [_flag(field, spec_hints[field.name]) for field in fields(SpecConfig) if "help" in field.metadata]
    return with_flags(verb, [*flags, _options_flag()], after="target")


def spec_from(given: Mapping[str, Any]) -> SpecConfig:
    """`SpecConfig` from flags by name, other flags among them; texts are read as their fields have it.

    A draft, a head, a prediction, a corpus, layers or parts without a drafter name the drafter that takes them.

    Raises:
        ConfigError: a value that no drafter or rule takes.
    """
    values: dict[str, Any] = {}
    for field in fields(SpecConfig):
        value = given.get(field.name)
        if value is not None:
            is_text = isinstance(value, str)
            values[field.name] = parse_field(SpecConfig, field.name, value) if is_text else value
    drafter = values["drafter"] = named_drafter(given)
    if drafter in (None, PLAIN) and values.get("num_draft", "auto") != "auto":
        raise ConfigError(
            "num_draft", given["num_draft"], "nobody guesses: name a --drafter or a --draft, or leave it out"
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


def _flag(field: Field[Any], hint: Any) -> inspect.Parameter:  # noqa: ANN401 - an annotation
    """The flag of a field: a number, truth or text if that is its type, otherwise a text."""
    members = [one for one in union_members(hint) if one is not types.NoneType]
    kind: Any = members[0] if len(members) == 1 and members[0] in _PLAIN else str
    default = field.default
    if default is None:
        kind = kind | None
    elif kind is str and not isinstance(default, str):
        default = f"{default:g}" if isinstance(default, float) else ",".join(map(str, default))  # type: ignore[arg-type]
    option = spec_flag(field.name)
    if field.name == "drafter":
        option.help += f" {', '.join(known_drafters())}, {PLAIN}."
    return flag(field.name, default, Annotated[kind, option])


def _options_flag() -> inspect.Parameter:
    words = "An option of the drafter's own, as NAME=VALUE; may be given several times."
    option = typer.Option("--drafter-option", help=words)
    return flag("drafter_option", None, Annotated[list[str] | None, option])
