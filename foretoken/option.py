"""How a field of a configuration is set from outside: its flag, its variable and its key in `foretoken.toml`.

A field says it once, in its metadata. The command line makes the flags from it (`cli.flags`), and configurations check
their choices by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ParamSpec, TypeVar

from foretoken.errors import ConfigError

_KEY = "option"
_P = ParamSpec("_P")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Option:
    """How a field is set from outside.

    - `help`: one or more sentences, or a function that returns them; "{choices}" in it stands for the choices.
    - `group`: the title over it in --help ("": "Options"). Verbs take the groups of a configuration by it.
    - `name`: of the setting (""): the field's own. Its flag is --NAME unless `flags` says otherwise.
    - `choices`: the values that the field may have; (): any. `valid`: refuses others of (name, value); None: nothing
      beside the configuration does. Both also when the flag is read, before anything is loaded.
    - `repeats`: the flag is given once for each item of a list.
    - `read`: makes the field's value of (name, text), with `repeats` of (name, texts); None: by the field's type.
    """

    help: str | Callable[[], str]
    group: str = ""
    name: str = ""
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    valid: Callable[[str, Any], object] | None = None
    repeats: bool = False
    read: Callable[[str, Any], Any] | None = None

    @property
    def help_text(self) -> str:
        """The text for --help."""
        text = self.help if isinstance(self.help, str) else self.help()
        return text.replace("{choices}", ", ".join(self.choices))

    def check(self, name: str, value: object) -> None:
        """Refuse what is none of the choices, or not valid.

        Raises:
            InputError: names the field or flag `name`.
        """
        if self.choices and value not in self.choices:
            raise ConfigError(name, value, f"choose one of {', '.join(self.choices)}")
        if self.valid is not None:
            self.valid(name, value)


def _as_metadata(make: Callable[_P, Option]) -> Callable[_P, Mapping[str, Option]]:
    def made(*values: _P.args, **named: _P.kwargs) -> Mapping[str, Option]:
        return {_KEY: make(*values, **named)}

    return made


option = _as_metadata(Option)  # the metadata of a field: field(default=..., metadata=option("Help."))


class Settings:
    """Makes fields that are set from outside, all of one `group`: `name: type = settings(default, "Help.")`."""

    def __init__(self, group: str = "") -> None:
        self.group = group

    def __call__(
        self,
        default: _Value,
        help_: str | Callable[[], str],
        *,
        repr: bool = True,
        **more: Any,  # noqa: ANN401 - further fields of `Option`
    ) -> _Value:
        """A field of a dataclass with this default; `repr` as `dataclasses.field` has it."""
        return field(default=default, repr=repr, metadata=option(help_, group=self.group, **more))


def same_option(kind: type, name: str) -> Mapping[str, Option]:
    """Metadata of a field that is set as the field `name` of the configuration `kind` is."""
    (found,) = (one for one in fields(kind) if one.name == name)
    return {_KEY: found.metadata[_KEY]}


def options_of(kind: type) -> Iterator[tuple[Field[Any], Option]]:
    """The fields of a configuration that are set from outside, in their order."""
    for one in fields(kind):
        if _KEY in one.metadata:
            yield one, one.metadata[_KEY]


def setting_name(field: Field[Any]) -> str:
    """What a field is called outside."""
    found: Option = field.metadata[_KEY]
    return found.name or field.name


def check_fields(config: object) -> None:
    """Refuse a value that is none of its field's choices, or not valid.

    Raises:
        InputError: names the field.
    """
    for own, one in options_of(type(config)):
        value = getattr(config, own.name)
        if value is not None or own.default is not None:
            one.check(own.name, value)
