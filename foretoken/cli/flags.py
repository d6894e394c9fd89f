"""Flags made from the fields of configurations, and the configurations that given flags mean.

A verb says which configurations it takes, or which groups or fields of them:

    @takes(SamplingParams, SAMPLING)
    @takes(EngineConfig, MODEL, fields=("trace",))
    def chat(context: typer.Context, target: str = DEFAULT_MODEL, max_tokens: int = 512, ...)

A parameter of the verb that is called as one of these settings stands for it: the verb gets its value, the flag has its
place and its default. The others are read from the context, by `values_of` and `config_from`. A `SpecConfig` comes from
more than its own flags: `--draft`, `--head` or `--corpus` alone say what the drafter is (`spec_from`).
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from foretoken.config import PLAIN, SpecConfig
from foretoken.errors import ConfigError
from foretoken.field_text import parse_field, union_members
from foretoken.files import check_readable
from foretoken.option import Option, options_of, setting_name
from foretoken.registry import known_drafters, options_class
from foretoken.spec_checks import NO_TABLE, PACKAGED_TABLE

Verb = Callable[..., None]
_Config = TypeVar("_Config")
_Maker = Callable[..., inspect.Parameter]
_PLAIN = (int, float, bool, str, Path)  # types that a flag has; every other field is a text


def takes(kind: type, *groups: str, fields: tuple[str, ...] = ()) -> Callable[[Verb], Verb]:
    """A decorator that gives a verb the flags of the configuration `kind`: of its fields in `groups` and of `fields`,
    of all where neither is said.

    Raises:
        TypeError: no such group or field, or a flag that the verb has already.
    """
    chosen = [
        (field, one)
        for field, one in options_of(kind)
        if not (groups or fields) or one.group in groups or field.name in fields
    ]
    missing = {*groups, *fields} - {name for field, one in chosen for name in (field.name, one.group)}
    if missing:
        raise TypeError(f"{kind.__name__} has no option or group of options {', '.join(sorted(missing))}")
    hints = typing.get_type_hints(kind)
    made = {setting_name(field): partial(_flag, field, one, hints[field.name]) for field, one in chosen}
    origins = {setting_name(field): (kind, field.name) for field, _ in chosen}

    def decorated(verb: Verb) -> Verb:
        if twice := flags_taken(verb).keys() & made.keys():
            raise TypeError(f"{verb.__name__} has --{', --'.join(sorted(twice))} already")
        return _with_flags(verb, made, origins)

    return decorated


def flags_taken(verb: object) -> Mapping[str, tuple[type, str]]:
    """The settings of a verb that are fields of configurations: by the setting's name the configuration and field."""
    return getattr(verb, "flags_taken", {})


def values_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields of `kind` that flags by setting's name give, other flags among them; texts are read as the
    fields have it, and what is None is left out.

    Raises:
        InputError: a text that is no value of its field; names the flag.
    """
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for field, one in options_of(kind):
        name = setting_name(field)
        value = given.get(name)
        if value is None:
            continue
        if one.read is not None and isinstance(value, str | list | tuple):
            value = one.read(name, value)
        elif one.repeats:
            value = tuple(value)
        elif isinstance(value, str) and _type_of_flag(one, hints[field.name]) is str:
            value = parse_field(kind, field.name, value)
        found[field.name] = value
    return found


def config_from(kind: type[_Config], given: Mapping[str, Any], **derived: object) -> _Config:
    """The configuration that flags by name mean, other flags among them; `derived` are values of fields that come from
    elsewhere.

    Raises:
        InputError: an invalid value; names the flag.
    """
    return kind(**values_of(kind, given) | derived)


def _flag(field: Field[Any], one: Option, hint: object, default: Any = inspect.Parameter.empty) -> inspect.Parameter:  # noqa: ANN401
    """A flag with the default that a verb has for it, or else its field."""
    kind = _type_of_flag(one, hint)
    if default is inspect.Parameter.empty and (one.repeats or field.default is not MISSING):
        default = None if one.repeats else field.default
        if kind is str and default is not None and not isinstance(default, str):
            default = _text_of(default)
    held = kind | None if default is None else kind
    annotation = Annotated[held, _typer_option(field, one, kind, default)]  # type: ignore[valid-type]
    name = setting_name(field)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typer_option(field: Field[Any], one: Option, kind: object, default: object) -> Any:  # noqa: ANN401 - typer's own
    name = setting_name(field)
    flags = one.flags or ("--" + name.replace("_", "-"),)
    if kind is bool and default is True:
        flags = (f"{flags[0]}/--no-{flags[0][2:]}",)

    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the flag holds
        if value is not None:
            one.check(name, value)
        return value

    checked = {"callback": check} if one.choices or one.valid else {}
    return typer.Option(*flags, help=one.help_text, rich_help_panel=one.group or None, **checked)  # type: ignore[arg-type]


def _type_of_flag(one: Option, hint: object) -> Any:  # noqa: ANN401 - a type
    """A plain type if the field holds nothing else that a text could say, otherwise a text, or a list of them."""
    if one.repeats:
        return list[str]
    members = [member for member in union_members(hint) if member is not types.NoneType]
    said = [member for member in members if not hasattr(member, "__dataclass_fields__")]
    return said[0] if all(member in _PLAIN for member in said) else str


def _text_of(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _with_flags(verb: Verb, made: Mapping[str, _Maker], origins: Mapping[str, tuple[type, str]]) -> Verb:
    """`verb` with these flags: in place of its own parameters of the same names, and behind the others."""
    hints = typing.get_type_hints(verb, include_extras=True)
    own = inspect.signature(verb).parameters
    parameters = [
        made[name](parameter.default)
        if name in made
        else parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.items()
    ]
    parameters += [make() for name, make in made.items() if name not in own]

    def called(**given: Any) -> None:  # noqa: ANN401 - flags of all types
        verb(**{name: value for name, value in given.items() if name in own})

    called.__name__, called.__doc__, called.__module__ = verb.__name__, verb.__doc__, verb.__module__
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.flags_taken = {**flags_taken(verb), **origins}  # type: ignore[attr-defined]
    return called


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
        remedy = "needs a drafter: name a --drafter or a --draft, or leave it out"
        raise ConfigError("num_draft", given["num_draft"], remedy)
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
        ModelError: no such draft or head; StorageError: the corpus or the n-gram table cannot be opened.
    """
    if spec is None:
        return
    if spec.draft is not None:
        from foretoken.model.names import model_folder  # imports torch, which `serve` does without

        model_folder(spec.draft)
    if spec.head is not None:
        from foretoken.heads.kind import kind_of_head

        kind_of_head(spec.head)
    check_drafting_files(spec)


def check_drafting_files(spec: SpecConfig) -> None:
    """Whether the corpus and the n-gram table that `spec` names can be read.

    Raises:
        StorageError: one cannot.
    """
    if spec.corpus is not None:
        check_readable("corpus", Path(spec.corpus))
    if spec.ngram_table not in (PACKAGED_TABLE, NO_TABLE):
        check_readable("ngram_table", Path(spec.ngram_table))
