"""`foretoken models`: what can be run without a download."""

from __future__ import annotations

from typing import Annotated

import typer
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from rich.console import Console
from rich.table import Table

from foretoken.cli.common import JsonOption, print_json
from foretoken.errors import ModelError
from foretoken.model.architecture import NATIVE_MODEL_TYPES, check_causal, config_from_hf
from foretoken.model.loader import read_raw_config
from foretoken.model.open import model_folder, reference_names


def models(
    folder: Annotated[list[str] | None, typer.Argument(help="Folders or hub ids to describe; without any, all that is on this machine.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models on this machine: the reference family, the hub's cache, or the folders given."""
    names = list(folder or [*reference_names(), *_cached()])
    rows = [_describe(name) for name in names]
    if as_json:
        print_json({"models": rows})
        return
    table = Table("model", "family", "parameters", "layers", "context", "runs on")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("model", "family", "parameters", "layers", "context", "runs_on")))
    Console().print(table)


def _cached() -> list[str]:
    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except CacheNotFound:
        return []


def _describe(name: str) -> dict[str, object]:
    row: dict[str, object] = {"model": name, "family": "", "parameters": "", "layers": "", "context": ""}
    try:
        raw = read_raw_config(model_folder(name))
        family = check_causal(raw)
        row["family"] = family
        if family not in NATIVE_MODEL_TYPES:
            return row | {"runs_on": "transformers (exact, slower)"}
        config = config_from_hf(raw)
    except ModelError as error:
        return row | {"runs_on": f"not runnable: {error}"}
    millions = f"{config.num_parameters / 1e6:,.1f} M"
    return row | {"parameters": millions, "layers": config.num_layers, "context": config.max_context_tokens, "runs_on": "native decoder"}
