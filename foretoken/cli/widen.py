"""`foretoken widen`: the same answers at the cost of a bigger model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models, print_json
from foretoken.errors import ConfigError
from foretoken.model.names import model_folder
from foretoken.printing.console import Console


def widen(
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist, or be empty.")],
    to: Annotated[
        str,
        typer.Option(
            help=(
                "Approximate number of parameters: 25m, 50m, 150m, 500m, 1b, 3b, 8b; or "
                "hidden=..,intermediate=..,layers=..,heads=..,kv_heads=.."
            )
        ),
    ],
    source: Annotated[
        str, typer.Option(help="The checkpoint to enlarge: a folder, a hub id, or smollm2.")
    ] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Number format of the result.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the added weights.")] = 0,
    head: Annotated[
        str | None,
        typer.Option(help="A trained head of the source, to be widened with it: a folder or a hub id."),
    ] = None,
    head_out: Annotated[Path | None, typer.Option(help="Folder to write the widened head to.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Enlarge a small checkpoint without changing its function, to measure real acceptance at a realistic cost.

    The result is an ordinary Hugging Face folder. Say that it is widened beside every number that uses it.
    """
    from foretoken.bench.widen import widen as widen_checkpoint
    from foretoken.bench.widen_head import widen_head

    if (head is None) != (head_out is None):
        raise ConfigError("head", head, "give --head and --head-out together")
    fetch_models(source)
    with Console(stderr=True).bar("writing parameters", None) as bar:
        result = widen_checkpoint(
            model_folder(source), out, to, seed, lambda done, total: bar.update(completed=done, total=total), dtype
        )
    if head is not None and head_out is not None:
        widen_head(model_folder(head), head_out, model_folder(source), to)
    if as_json:
        print_json(
            {
                "folder": str(out),
                "num_parameters": result.num_parameters,
                "dead_share": result.dead_share,
                "nonzero_share": result.nonzero_share,
            }
        )
        return
    Console().line(
        f"{out}: {result.num_parameters / 1e6:,.0f} M parameters, {result.dead_share:.1%} of them dead, "
        f"{result.nonzero_share:.1%} not zero"
    )
