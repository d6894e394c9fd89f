"""`foretoken export`: a drafter for another engine, with the line that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models, print_json
from foretoken.errors import ConfigError
from foretoken.export.engines import engine_of
from foretoken.printing.console import Console


def export(
    to: Annotated[str, typer.Option(help="Engine: vllm, sglang, trtllm, llamacpp, tgi or transformers.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist, or be empty.")],
    target: Annotated[
        str, typer.Option(help="The target: a folder, a hub id, or smollm2, as the launch line should name it.")
    ] = DEFAULT_MODEL,
    head: Annotated[str | None, typer.Option(help="The trained head: a folder or a hub id.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="Instead of a head: draft_model, ngram or suffix; only the launch line is written."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The draft model of --drafter draft_model.")] = None,
    num_draft: Annotated[int, typer.Option(help="Tokens to draft per step.", min=1)] = 3,
    engine_version: Annotated[
        str | None, typer.Option(help="Version of the engine; without it, the newest known version.")
    ] = None,
    speculators: Annotated[bool, typer.Option(help="Write the exchange format of vLLM's speculators.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a drafter in another engine's format, with the command that starts it; refuse pairs that cannot work.

    The folder holds the head in the engine's variant, launch.json for programs and LAUNCH.md for people.
    """
    from foretoken.export.write import export_head, export_plain, launch_json
    from foretoken.model.names import model_folder

    engine = engine_of(to, engine_version)
    if (head is None) == (drafter is None):
        raise ConfigError("head", head, "give either --head or --drafter")
    if head is not None:
        fetch_models(target)
        folder = model_folder(target)
        launch = export_head(model_folder(head), folder, _name_elsewhere(target), engine, out, num_draft, speculators)
    else:
        assert drafter is not None
        own_draft = None if draft is None else _name_elsewhere(draft)
        launch = export_plain(drafter, _name_elsewhere(target), own_draft, engine, out, num_draft)
    if as_json:
        print_json({"folder": str(out), **launch_json(engine, launch)})
        return
    console = Console()
    console.line(f"{out}: for {engine}; see LAUNCH.md")
    console.line(launch.command())


def _name_elsewhere(name: str) -> str:
    """A model's name as other engines take it in any folder: a path is absolute, a name that only we know is one."""
    from foretoken.model.names import is_own_name, model_folder

    if is_own_name(name):
        return str(model_folder(name))
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name
