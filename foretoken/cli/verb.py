"""A verb of the command line: checks its values before it runs, and adds the origin of a setting to errors."""

from __future__ import annotations

import importlib
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.cli import origins
from foretoken.cli.exits import ENDING, quit_at_once, terminate
from foretoken.cli.flags import flags_taken
from foretoken.cli.usage import Command
from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.params import check_text

_HANDLERS = (signal.default_int_handler, terminate)


def import_engine() -> None:
    """Import torch and the engine, once the options are known to be right."""
    with signals_end():
        importlib.import_module("foretoken.engine.llm")


@contextmanager
def signals_end() -> Iterator[None]:
    """During an import Ctrl-C, SIGTERM and SIGHUP end the process at once: an exception inside of torch's import would
    show in many ways.

    Signals that are ignored, or handled by somebody else, are left alone.
    """
    ours = {number: handler for number in ENDING if (handler := signal.getsignal(number)) in _HANDLERS}
    if threading.current_thread() is not threading.main_thread():
        ours = {}
    for number in ours:
        signal.signal(number, quit_at_once)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


_ANY_DEVICE = "auto"
_MOST = 1 << 64  # exclusive upper limit of seeds, counts and sizes


class Verb(Command):
    """Refuses invalid numbers and texts that cannot be encoded, by name and by the variable or file that set them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401, D102 - click's own context, which typer hides
        with _blame(ctx):
            rest = super().parse_args(ctx, args)
            for name, value in ctx.params.items():
                check_value(name, value)
        return rest

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401, D102
        with _blame(ctx):
            try:
                return super().invoke(ctx)
            except StorageError as error:
                if error.report is not None:
                    from foretoken.cli.measuring import show

                    show(error.report, ctx.params["as_json"])
                raise


class EngineVerb(Verb):
    """A verb that runs models. They are imported here, so that its help, and what is wrong with its options, take no
    seconds; then the device is looked for.
    """

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401, D102
        import_engine()
        device = ctx.params.get("device", _ANY_DEVICE)
        if device != _ANY_DEVICE:
            with _blame(ctx):
                _open_device(device)
        return super().invoke(ctx)


def _open_device(name: str) -> None:
    from foretoken.model.open import open_device  # imports torch

    open_device(name)


def check_value(name: str, value: object) -> None:
    """Refuse (`InputError`) NaN, infinite and too large numbers, and texts with lone surrogates."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(name, value, "must be a finite number")
    if isinstance(value, int) and not -_MOST < value < _MOST:
        raise ConfigError(name, value, "is too large for a number here; it must fit into 64 bits")
    if isinstance(value, str | Path):
        check_text(name, str(value))
    if isinstance(value, list | tuple):
        for item in value:
            check_value(name, item)


@contextmanager
def _blame(ctx: Any) -> Iterator[None]:  # noqa: ANN401
    """Add the origin of a value to an error about an option, if it is not the command line."""
    try:
        yield
    except InputError as error:
        known = {parameter.name for parameter in ctx.command.params}
        of_field = {field: name for name, (_, field) in flags_taken(ctx.command.callback).items()}
        name = next((name for name in (error.field, of_field.get(error.field)) if name in known), None)
        source = None if name is None else ctx.get_parameter_source(name)
        if name is not None and source is not None and source.name == "DEFAULT_MAP":
            error.add_note(f"set by {origins.origin(_path_of(ctx), name)}")
        raise


def _path_of(ctx: Any) -> str:  # noqa: ANN401
    """The verb whose settings a context reads: `train lm`, and `bench` for the group's default command."""
    if ctx.parent is not None and origins.default_command(ctx.parent.command) == ctx.info_name:
        ctx = ctx.parent
    return str(ctx.command_path).partition(" ")[2]
