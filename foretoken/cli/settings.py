"""Where a setting comes from: flags, then `FORETOKEN_*`, then `foretoken.toml`, then defaults."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from foretoken.cli.usage import Command, Group
from foretoken.errors import ConfigError, StorageError
from foretoken.printing.console import Console

SETTINGS_FILE = "foretoken.toml"
_PREFIX = "FORETOKEN_"
# Read by other parts than the command line.
_OTHER_VARIABLES = frozenset({"FORETOKEN_LLAMA_CPP", "FORETOKEN_LLAMA_CPP_CONVERT", "FORETOKEN_COMPLETE", "FORETOKEN_TOML", "FORETOKEN_CACHE"})

app = typer.Typer(cls=Group, help="Settings: what is in force, and where it comes from.", no_args_is_help=True)


@app.command("show", cls=Command)
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Print every setting of every verb, as it would apply without flags."""
    root = context.find_root().command
    assert isinstance(root, TyperGroup)
    rows = list(_resolved(root))
    if as_json:
        Console().json_line(json.dumps({f"{verb}.{name}": {"value": value, "origin": source} for verb, name, value, source in rows}, default=str))
        return
    count = 4 if origin else 3
    cells = [(verb, name, str(value), source)[:count] for verb, name, value, source in rows]
    Console().table(("verb", "setting", "value", "origin")[:count], cells, justify="l")


def default_map(root: TyperGroup) -> dict[str, Any]:
    """Environment and `foretoken.toml` as click's map of defaults, the environment winning.

    Raises:
        ConfigError: an unknown verb or setting in the file.
        StorageError: the file is not readable TOML.
    """
    found: dict[str, Any] = {}
    for verb, name, value, source in _resolved(root):
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


def _resolved(root: TyperGroup) -> Iterator[tuple[str, str, Any, str]]:
    """(verb, setting, value, origin) of every option."""
    file = _read_file()
    _check_file(root, file)
    for verb, name, option in _options(root):
        place: Any = file
        for part in verb.split():
            place = place.get(part, {})
        variable = _variable(verb, name)
        if variable in os.environ:
            yield verb, name, _split(option, os.environ[variable]), variable
        elif name in place:
            yield verb, name, place[name], str(_path())
        else:
            yield verb, name, option.default, "default"


def _split(option: TyperOption, value: str) -> str | list[str]:
    return value.split(",") if option.multiple else value


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
    if not os.path.exists(path) and "FORETOKEN_TOML" not in os.environ:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # broken TOML and broken UTF-8 are both ValueErrors
        raise StorageError(f"cannot read {path}: {error}") from error


def _check_file(root: TyperGroup, file: dict[str, Any]) -> None:
    known: dict[str, set[str]] = {}
    for verb, name, _ in _options(root):
        known.setdefault(verb, set()).add(name)
    for verb, name, value in _leaves(file):
        if name not in known.get(verb, set()):
            near = difflib.get_close_matches(name, known.get(verb, set()), n=1)
            where = f"[{verb.replace(' ', '.')}] in {_path()}" if verb else str(_path())
            raise ConfigError(name, value, f"unknown setting of {where}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _leaves(tree: dict[str, Any], verb: str = "") -> Iterator[tuple[str, str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{verb} {key}".strip())
        else:
            yield verb, key, value
