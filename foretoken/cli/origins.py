"""Where a setting comes from: flags, then `FORETOKEN_*`, then `foretoken.toml`, then defaults."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.files import parse_json, read_text
from foretoken.params import check_text

SETTINGS_FILE = "foretoken.toml"
_PREFIX = "FORETOKEN_"
# Read by other parts than the command line.
_OTHER_VARIABLES = frozenset({"FORETOKEN_LLAMA_CPP", "FORETOKEN_LLAMA_CPP_CONVERT", "FORETOKEN_COMPLETE", "FORETOKEN_TOML", "FORETOKEN_CACHE"})
# What an option of a type of click takes, in words, and as types of TOML. A number may stand where a text is expected: num_draft = 5.
_WORDS = {"integer": "a whole number", "float": "a finite number", "boolean": "true or false"}
_TYPES: Mapping[str, tuple[type, ...]] = {"integer": (int,), "float": (int, float), "boolean": (bool,), "path": (str,)}
_TEXT_TYPES = (str, int, float)


def default_map(root: TyperGroup) -> dict[str, Any]:
    """Environment and `foretoken.toml` as click's map of defaults, the environment winning.

    Raises:
        ConfigError: an unknown verb or setting in the file, or a value of the wrong type.
        StorageError: the file is not readable TOML.
    """
    found: dict[str, Any] = {}
    for verb, name, value, source in resolved(root):
        if source != "default":
            place = found
            for part in verb.split():
                place = place.setdefault(part, {})
            place[name] = value
    return found


def check_environment(root: TyperGroup) -> None:
    """Refuse a `FORETOKEN_*` variable that no setting reads.

    Raises:
        ConfigError: names the variable and the nearest known one.
    """
    known = _OTHER_VARIABLES | {_variable(verb, name) for verb, name, _ in _options(root)}
    for variable, value in os.environ.items():
        if variable.startswith(_PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            raise ConfigError(variable, value, f"no setting of this name; did you mean {near[0]}?" if near else "no setting of this name; unset it")
        if variable in _OTHER_VARIABLES:
            check_text(variable, value)


def resolved(root: TyperGroup) -> Iterator[tuple[str, str, Any, str]]:
    """(verb, setting, value, origin) of every option."""
    file = _read_file()
    _check_table(file, root, "")
    for verb, name, option in _options(root):
        place: Any = file
        for part in verb.split():
            place = place.get(part, {})
        variable = _variable(verb, name)
        if variable in os.environ:
            yield verb, name, _from_text(option, variable, os.environ[variable]), variable
        elif name in place:
            yield verb, name, place[name], str(_path())
        else:
            yield verb, name, option.default, "default"


def origin(verb: str, name: str) -> str:
    """The variable or the part of the file that sets an option which no flag sets."""
    variable = _variable(verb, name)
    return variable if variable in os.environ else f"[{verb.replace(' ', '.')}] in {_path()}"


def _from_text(option: TyperOption, variable: str, value: str) -> str | list[str]:
    """A variable's value, checked as a flag's would be: a list is written with commas, or as a JSON list of texts where they hold commas.

    Raises:
        InputError: names the variable.
    """
    check_text(variable, value)
    if option.multiple:
        return _texts(variable, value) if value.lstrip().startswith("[") else value.split(",")
    try:
        found = option.type.convert(value, option, None)
    except typer.BadParameter:
        found = None
    if found is None or (isinstance(found, float) and not math.isfinite(found)):
        raise ConfigError(variable, value, f"must be {_WORDS.get(option.type.name, 'a text')}")
    return value


def _texts(variable: str, value: str) -> list[str]:
    try:
        found = parse_json(variable, value, value)
    except InputError as error:
        raise ConfigError(variable, value, f'begins with a bracket and is no JSON list of texts, such as ["a, b", "c"]: {error.remedy}') from error
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ConfigError(variable, value, 'must be a list of texts, with commas or as JSON: ["a, b", "c"]')
    return found


def _variable(verb: str, name: str) -> str:
    return _PREFIX + "__".join([*verb.upper().split(), name.upper()])


def _options(command: TyperGroup | TyperCommand, verb: str = "") -> Iterator[tuple[str, str, TyperOption]]:
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            assert isinstance(child, TyperGroup | TyperCommand)
            yield from _options(child, f"{verb} {name}".strip())
        return
    for parameter in command.params:
        if isinstance(parameter, TyperOption) and parameter.name not in (None, "help", "as_json"):
            yield verb, str(parameter.name), parameter


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
    """Refuse what no verb has, and values that an option cannot take.

    Raises:
        ConfigError: names the file, the key, the value and what it must be.
    """
    where = f"[{verb.replace(' ', '.')}] in {_path()}" if verb else str(_path())
    verbs = command.commands if isinstance(command, TyperGroup) else {}
    options = {name: option for place, name, option in _options(command, verb) if place == verb}
    for key, value in table.items():
        if key in verbs:
            child = verbs[key]
            assert isinstance(child, TyperGroup | TyperCommand)
            if not isinstance(value, dict):
                raise ConfigError(key, value, f"must be a table of settings, [{f'{verb} {key}'.strip().replace(' ', '.')}], in {_path()}")
            _check_table(value, child, f"{verb} {key}".strip())
        elif key in options:
            _check_type(options[key], key, value, where)
        else:
            near = difflib.get_close_matches(key, [*verbs, *options], n=1)
            kind = "verb" if isinstance(value, dict) and verbs else "setting"
            raise ConfigError(key, value, f"unknown {kind} of {where}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _check_type(option: TyperOption, key: str, value: object, where: str) -> None:
    kinds = _TYPES.get(option.type.name, _TEXT_TYPES)
    words = _WORDS.get(option.type.name, "a text")
    values = value if option.multiple and isinstance(value, list) else [value]
    if option.multiple and not isinstance(value, list):
        raise ConfigError(key, value, f"must be a list, each {words} ({where})")
    for item in values:
        fits = isinstance(item, kinds) and isinstance(item, bool) == (bool in kinds) and (not isinstance(item, float) or math.isfinite(item))
        if not fits:
            raise ConfigError(key, item, f"must be {'a list, each ' if option.multiple else ''}{words} ({where})")
