"""`foretoken models`: models that run without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.common import JsonOption, print_json
from foretoken.errors import ModelError
from foretoken.model.architecture import check_causal
from foretoken.printing.console import Console


def models(
    folder: Annotated[
        list[str] | None,
        typer.Argument(help="Folders or hub ids to describe; without any, all that is on this machine."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models on this machine: the reference family, the hub's cache, or the folders given."""
    from foretoken.model.open import model_folder, reference_names

    named = [(name, model_folder(name)) for name in folder or reference_names()]
    rows = [_describe(name, path) for name, path in [*named, *([] if folder else _cached())]]
    if as_json:
        print_json({"models": rows})
        return
    cells = [
        [str(row[key]) for key in ("model", "family", "parameters", "layers", "context", "runs_on")] for row in rows
    ]
    Console().table(("model", "family", "parameters", "layers", "context", "runs on"), cells, justify="llrrrl")


def _cached() -> list[tuple[str, Path]]:
    """Models in the hub's cache, each with its newest snapshot; nothing is downloaded."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions]
    except CacheNotFound:
        return []
    return sorted((repo.repo_id, max(repo.revisions, key=lambda r: r.last_modified).snapshot_path) for repo in repos)


def _describe(name: str, folder: Path) -> dict[str, object]:
    from foretoken.model.loader import read_raw_config
    from foretoken.model.open import native_config

    row: dict[str, object] = {"model": name, "family": "", "parameters": "", "layers": "", "context": ""}
    try:
        row["family"] = check_causal(read_raw_config(folder))
        config = native_config(folder)
    except ModelError as error:
        return row | {"runs_on": f"not runnable: {error}"}
    if config is None:
        return row | {"runs_on": "transformers (exact, slower)"}
    millions = f"{config.num_parameters / 1e6:,.1f} M"
    return row | {
        "parameters": millions,
        "layers": config.num_layers,
        "context": config.max_context_tokens,
        "runs_on": "native decoder",
    }
