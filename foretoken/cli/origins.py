"""Where a setting comes from: flags, then `FORETOKEN_*`, then `foretoken.toml`, then defaults."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.files import parse_json, read_text
from foretoken.params import check_text

SETTINGS_FILE = "foretoken.toml"
SECRETS = ("api_key", "admin_key")  # settings whose values are not shown
_PREFIX = "FORETOKEN_"
# Read by other parts than the command line.
_OTHER_VARIABLES = frozenset(
    {"FORETOKEN_LLAMA_CPP", "FORETOKEN_LLAMA_CPP_CONVERT", "FORETOKEN_COMPLETE", "FORETOKEN_TOML", "FORETOKEN_CACHE"}
    | {"FORETOKEN_MODELS", "FORETOKEN_VOCABULARIES", "FORETOKEN_API_KEY", "FORETOKEN_TEST"}
    | {"FORETOKEN_PROBE", "FORETOKEN_ATTENTION", "FORETOKEN_GRAPHS", "FORETOKEN_COMMIT"}
)
# In words what an option takes, and the types of TOML that say it. A number may stand where a text is expected:
# num_draft = 5.
WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
_TYPES: Mapping[type, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    bool: (bool,),
    str: (str, int, float),
    Path: (str,),
}
_TRUTHS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n"})


def default_map(root: TyperGroup) -> dict[str, Any]:
    """Environment and `foretoken.toml` as click's map of defaults, the environment winning.

    Raises:
        ConfigError: an unknown verb or setting in the file, or a value of the wrong type; StorageError: the file is not
            readable TOML.
    """
    found: dict[str, Any] = {}
    for verb, name, value, source in resolved(root, _mentioned(root)):
        if source != "default":
            place = found
            for part in _command_path(root, verb):
                place = place.setdefault(part, {})
            place[name] = value
    return found


def _command_path(root: TyperGroup, verb: str) -> list[str]:
    """The names of the commands that lead to a verb; a group with a default command stands for that."""
    path, command = verb.split(), root
    for name in path:
        child = command.commands[name]
        if not isinstance(child, TyperGroup):
            return path
        command = child
    default = default_command(command)
    return path if default is None else [*path, default]


def default_command(group: object) -> str | None:
    """The command of a group that runs where none is named: its settings are those of the group."""
    return getattr(group, "default_command", None)


def check_environment(root: TyperGroup) -> None:
    """Refuse (`ConfigError`) a `FORETOKEN_*` variable that no setting reads; the nearest known one is named."""
    for variable in _OTHER_VARIABLES & os.environ.keys():
        check_text(variable, os.environ[variable])
    known = _OTHER_VARIABLES
    known |= {_variable(verb, name) for verb, name, *_ in _options(root, only=_mentioned(root))}
    for variable, value in os.environ.items():
        if variable.startswith(_PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            raise ConfigError(
                variable,
                value,
                f"no setting of this name; did you mean {near[0]}?" if near else "no setting of this name; unset it",
            )


def _mentioned(root: TyperGroup) -> frozenset[str] | None:
    """The verbs of which the environment or the file sets something: the others need not be imported. None, which is
    all of them, where a variable is of no verb: one of them may be meant.
    """
    names = {name.upper(): name for name in root.commands}
    read = [name for name in os.environ if name.startswith(_PREFIX) and name not in _OTHER_VARIABLES]
    named = {variable.removeprefix(_PREFIX).partition("__")[0] for variable in read}
    if not named <= names.keys():
        return None
    return frozenset(names[name] for name in named) | (frozenset(_read_file()) & frozenset(root.commands))


@dataclass(frozen=True)
class _Kind:
    """What an option takes: a value of a type, or a list of them."""

    item: type
    is_list: bool

    @property
    def words(self) -> str:
        return f"a list, each {WORDS[self.item]}" if self.is_list else WORDS[self.item]


def resolved(root: TyperGroup, only: frozenset[str] | None = None) -> Iterator[tuple[str, str, Any, str]]:
    """(verb, setting, value, origin) of every option of every verb, or of those in `only`."""
    file = _read_file()
    _check_table(file, root, "")
    for verb, name, option, kind in _options(root, only=only):
        place: Any = file
        for part in verb.split():
            place = place.get(part, {})
        variable = _variable(verb, name)
        if variable in os.environ:
            yield verb, name, _from_text(kind, variable, os.environ[variable]), variable
        elif name in place:
            yield verb, name, place[name], str(_path())
        else:
            yield verb, name, option.default, "default"


def origin(verb: str, name: str) -> str:
    """The variable or the part of the file that sets an option which no flag sets."""
    variable = _variable(verb, name)
    return variable if variable in os.environ else f"[{verb.replace(' ', '.')}] in {_path()}"


def _from_text(kind: _Kind, variable: str, value: str) -> str | list[str]:
    """A variable's value, checked as a flag's would be: a list is written with commas, or as a JSON list of texts where
    they hold commas.
    """
    check_text(variable, value)
    if kind.is_list:
        return _texts(variable, value) if value.lstrip().startswith("[") else value.split(",")
    if not _reads(kind.item, value):
        raise ConfigError(variable, value, f"must be {WORDS[kind.item]}")
    return value


def _reads(item: type, value: str) -> bool:
    """Whether a text says a value of the type."""
    if item is bool:
        return value.lower() in _TRUTHS
    try:
        return not isinstance(found := item(value), float) or math.isfinite(found)
    except ValueError:
        return False


def _texts(variable: str, value: str) -> list[str]:
    try:
        found = parse_json(variable, value, value)
    except InputError as error:
        remedy = f'begins with a bracket and is no JSON list of texts, such as ["a, b", "c"]: {error.remedy}'
        raise ConfigError(variable, value, remedy) from error
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ConfigError(variable, value, 'must be a list of texts, with commas or as JSON: ["a, b", "c"]')
    return found


def _variable(verb: str, name: str) -> str:
    return _PREFIX + "__".join([*verb.upper().split(), name.upper()])


def _options(
    command: TyperGroup | TyperCommand, verb: str = "", only: frozenset[str] | None = None
) -> Iterator[tuple[str, str, TyperOption, _Kind]]:
    if isinstance(command, TyperGroup):
        for name in command.commands:
            if only is not None and name not in only:
                continue  # without importing it
            child = command.commands[name]
            assert isinstance(child, TyperGroup | TyperCommand)
            yield from _options(child, verb if name == default_command(command) else f"{verb} {name}".strip())
        return
    assert command.callback is not None
    hints = _hints(inspect.unwrap(command.callback))
    for parameter in command.params:
        if isinstance(parameter, TyperOption) and parameter.name not in (None, "help", "as_json"):
            yield verb, str(parameter.name), parameter, _kind(hints[str(parameter.name)])


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _kind(hint: Any) -> _Kind:  # noqa: ANN401 - an annotation
    """`int | None` takes an int, `list[str] | None` a list of texts."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    is_list = typing.get_origin(hint) is list
    return _Kind(typing.get_args(hint)[0] if is_list else hint, is_list)


def _path() -> Path:
    return Path(os.environ.get("FORETOKEN_TOML", SETTINGS_FILE))


def _read_file() -> dict[str, Any]:
    path = _path()
    if not path.exists() and "FORETOKEN_TOML" not in os.environ:
        return {}
    try:
        return tomllib.loads(read_text("settings", path))
    except RecursionError:
        raise StorageError(f"cannot read {path}: it is nested too deeply") from None
    except ValueError as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _check_table(table: Mapping[str, Any], command: TyperGroup | TyperCommand, verb: str) -> None:
    """Refuse what no verb has, and values that an option cannot take."""
    where = f"[{verb.replace(' ', '.')}] in {_path()}" if verb else str(_path())
    default = default_command(command)
    commands = command.commands if isinstance(command, TyperGroup) else {}
    verbs = [name for name in commands if name != default]
    kinds = {name: kind for place, name, _, kind in _options(command, verb) if place == verb} if verb else {}
    for key, value in table.items():
        if key in verbs:
            child = commands[key]
            assert isinstance(child, TyperGroup | TyperCommand)
            if not isinstance(value, dict):
                remedy = f"must be a table of settings, [{f'{verb} {key}'.strip().replace(' ', '.')}], in {_path()}"
                raise ConfigError(key, value, remedy)
            _check_table(value, child, f"{verb} {key}".strip())
        elif key in kinds:
            _check_type(kinds[key], key, value, where)
        else:
            near = difflib.get_close_matches(key, [*verbs, *kinds], n=1)
            kind = "verb" if isinstance(value, dict) and verbs else "setting"
            raise ConfigError(
                key, value, f"unknown {kind} of {where}" + (f"; did you mean {near[0]!r}?" if near else "")
            )


def _check_type(kind: _Kind, key: str, value: object, where: str) -> None:
    types_of_toml = _TYPES[kind.item]
    for item in value if kind.is_list and isinstance(value, list) else [value]:
        is_type = isinstance(item, types_of_toml) and isinstance(item, bool) == (kind.item is bool)
        if (
            not is_type
            or (isinstance(item, float) and not math.isfinite(item))
            or kind.is_list != isinstance(value, list)
        ):
            raise ConfigError(key, value, f"must be {kind.words} ({where})")
        if kind.item is Path and "\0" in str(item):
            raise ConfigError(key, value, f"a path cannot hold the character NUL ({where})")
