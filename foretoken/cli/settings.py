"""`foretoken config show`: what is set, and where it comes from."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from foretoken.cli.common import JsonOption, print_json
from foretoken.cli.origins import SECRETS, resolved
from foretoken.cli.usage import Group
from foretoken.cli.verb import Verb
from foretoken.printing.console import Console

_HIDDEN = "(set, not shown)"

app = typer.Typer(cls=Group, help="Show the settings in effect, and where each comes from.", no_args_is_help=True)


@app.command("show", cls=Verb)
def show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting of every verb, as it applies without flags."""
    root = context.find_root().command
    assert isinstance(root, TyperGroup)
    rows = [
        (verb, name, _HIDDEN if name in SECRETS and value is not None else value, source)
        for verb, name, value, source in resolved(root)
    ]
    if as_json:
        print_json({f"{verb}.{name}": {"value": value, "origin": source} for verb, name, value, source in rows})
        return
    count = 4 if origin else 3
    cells = [(verb, name, str(value), source)[:count] for verb, name, value, source in rows]
    Console().table(("verb", "setting", "value", "origin")[:count], cells, justify="l")
