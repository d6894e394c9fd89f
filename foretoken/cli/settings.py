"""`foretoken config show`: what is set, and where it comes from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from foretoken.cli.common import JsonOption, print_json
from foretoken.cli.origins import resolved
from foretoken.cli.verb import Verb

app = typer.Typer(help="Settings: what is in force, and where it comes from.", no_args_is_help=True)


@app.command("show", cls=Verb)
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting of every verb, as it would apply without flags."""
    root = context.find_root().command
    assert isinstance(root, TyperGroup)
    rows = list(resolved(root))
    if as_json:
        print_json({f"{verb}.{name}": {"value": value, "origin": source} for verb, name, value, source in rows})
        return
    table = Table("verb", "setting", "value", *(["origin"] if origin else []))
    for verb, name, value, source in rows:
        table.add_row(verb, name, str(value), *([source] if origin else []))
    Console().print(table)
