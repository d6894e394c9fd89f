"""`foretoken models`: models that run without a download, and how one of them is stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.common import JsonOption, print_json
from foretoken.cli.usage import DefaultGroup
from foretoken.cli.verb import EngineVerb
from foretoken.errors import ModelError
from foretoken.heads.kind import kind_of, reference_heads
from foretoken.model.config_json import check_causal
from foretoken.model.fields import Fields
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from foretoken.model.architecture import ModelConfig


class _ModelsGroup(DefaultGroup):
    """Lists models where no command is named, so that folders can be given at once."""

    default_command = "list"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of the click inside typer
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self.default_command, *args])


app = typer.Typer(
    cls=_ModelsGroup,
    help="List the models on this machine: the reference family, the hub's cache, or the folders given.",
)


@app.command("list", cls=EngineVerb)
def models(
    folder: Annotated[
        list[str] | None,
        typer.Argument(help="Folders, GGUF files or hub ids to describe; without any, all that is on this machine."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models on this machine: the reference family, the hub's cache, or the folders given."""
    from foretoken.model.open import model_folder, reference_names

    named = [(name, model_folder(name)) for name in folder or [*reference_names(), *reference_heads()]]
    rows = [_describe(name, path) for name, path in [*named, *([] if folder else _cached())]]
    if as_json:
        print_json({"models": rows})
        return
    cells = [
        [str(row[key]) for key in ("model", "family", "parameters", "layers", "context", "runs_on")] for row in rows
    ]
    Console().table(("model", "family", "parameters", "layers", "context", "runs on"), cells, justify="llrrrl")


@app.command("inspect", cls=EngineVerb)
def inspect(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file or hub id.")],
    as_json: JsonOption = False,
) -> None:
    """Say in which types a checkpoint stores its numbers, how many bytes each takes, and how each is read."""
    from foretoken.model.loader import open_weights
    from foretoken.model.open import model_folder

    path = model_folder(model)
    row = _describe(model, path)
    weights = open_weights(path)
    kinds = [
        {"type": kind.name, "tensors": kind.num_tensors, "bytes": kind.num_bytes, "read": kind.read}
        for kind in weights.kinds()
    ]
    total = sum(kind.num_bytes for kind in weights.kinds())
    if as_json:
        print_json({**row, "bytes": total, "types": kinds})
        return
    console = Console()
    console.line(f"{row['model']}: {row['family']}, {row['parameters']}, {row['runs_on']}; {total:,} bytes of tensors")
    cells = [[str(kind["type"]), f"{kind['tensors']:,}", f"{kind['bytes']:,}", str(kind["read"])] for kind in kinds]
    console.table(("type", "tensors", "bytes", "read"), cells, justify="lrrl")


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
        raw = read_raw_config(folder)
        head = kind_of(Fields(raw, str(folder)))
        if head is not None:
            return row | {"family": f"{head} head", "runs_on": "beside its target (--head)"}
        row["family"] = check_causal(raw)
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
        "runs_on": "native decoder" + _mtp_note(folder, config),
    }


def _mtp_note(folder: Path, config: ModelConfig) -> str:
    from foretoken.heads.mtp import num_mtp_layers

    count = num_mtp_layers(folder, config)
    return f", {count} MTP layer{'s' if count > 1 else ''} (--drafter mtp)" if count else ""
