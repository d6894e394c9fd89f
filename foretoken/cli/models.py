"""`foretoken models`: which models are on this machine, how one is stored, getting one and removing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models, print_json
from foretoken.cli.usage import DefaultGroup
from foretoken.cli.verb import EngineVerb, Verb
from foretoken.errors import InputError, ModelError, StorageError
from foretoken.heads.kind import kind_of
from foretoken.model.config_json import check_causal
from foretoken.model.fields import Fields
from foretoken.model.packaged import PACKAGED, PackagedModel
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

    from foretoken.model.architecture import ModelConfig


class _ModelsGroup(DefaultGroup):
    """Lists models where no command is named, so that folders can be given at once."""

    default_command = "list"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of the click inside typer
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self.default_command, *args])


app = typer.Typer(
    cls=_ModelsGroup, help="Get, list and remove models: packaged ones, the hub's cache, or the folders given."
)


@app.command("list", cls=EngineVerb)
def models(
    folder: Annotated[
        list[str] | None,
        typer.Argument(help="Folders, GGUF files or hub ids to describe; without any, all that is on this machine."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List models with their sizes and folders: packaged ones, the hub's cache, or the folders given."""
    from foretoken.model.names import model_folder

    if folder:
        rows = [_describe(name, model_folder(name)) for name in folder]
    else:
        rows = [_describe_packaged(model) for model in PACKAGED.values()]
        rows += [_describe(name, model_folder(name)) for name in _own_names()]
        rows += [_describe(name, path) for name, path in _cached()]
    if as_json:
        print_json({"models": rows})
        return
    keys = ("model", "family", "parameters", "layers", "context", "size", "runs_on", "path")
    cells = [[str(row[key]) for key in keys] for row in rows]
    headings = ("model", "family", "parameters", "layers", "context", "size", "runs on", "lies in")
    Console().table(headings, cells, justify="llrrrrll")


@app.command("get", cls=Verb)
def get(
    model: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(PACKAGED)}, or hub ids; without any, {DEFAULT_MODEL}.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Download models unless they are on this machine, and print their folders."""
    from foretoken.model.names import model_folder

    rows: list[dict[str, object]] = []
    for name in model or [DEFAULT_MODEL]:
        fetch_models(name)
        path = model_folder(name)
        rows.append({"model": name, "bytes": bytes_of(path), "path": str(path)})
    _print_files(rows, "{model}: {size} in {path}", as_json)


@app.command("remove", cls=Verb)
def remove(
    model: Annotated[list[str], typer.Argument(help=f"{', '.join(PACKAGED)}, or hub ids.")], as_json: JsonOption = False
) -> None:
    """Delete downloaded models: packaged ones, and those in the hub's cache. Folders of your own are left alone."""
    from foretoken.model.packaged import remove_packaged

    rows: list[dict[str, object]] = []
    for name in dict.fromkeys(model):
        if name in PACKAGED:
            path = PACKAGED[name].path
            size = bytes_of(path)
            if remove_packaged(PACKAGED[name]) is None:
                raise InputError("model", name, f"is not on this machine: there is no {path}")
        else:
            path, size = _remove_cached(name)
        rows.append({"model": name, "bytes": size, "path": str(path)})
    _print_files(rows, "removed {model}: {size} in {path}", as_json)


def _remove_cached(hub_id: str) -> tuple[Path, int]:
    """Delete a model from the hub's cache; where it lay, and its bytes."""
    from huggingface_hub import scan_cache_dir

    found = [repo for repo in _hub_repos() if repo.repo_id == hub_id]
    if not found:
        own = " A folder of your own is yours to delete." if Path(hub_id).exists() else ""
        raise InputError("model", hub_id, f"is no downloaded model: `foretoken models` lists them.{own}")
    path, size = Path(found[0].repo_path), int(found[0].size_on_disk)
    scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in found[0].revisions)).execute()
    if any(path.glob("snapshots/*")):
        raise StorageError(f"cannot remove {path}")
    return path, size


def _print_files(rows: Sequence[Mapping[str, object]], line: str, as_json: bool) -> None:
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        Console().line(line.format(**row, size=_megabytes(row["bytes"])))


@app.command("inspect", cls=EngineVerb)
def inspect(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file or hub id.")], as_json: JsonOption = False
) -> None:
    """Print the number types of a checkpoint, how many bytes each takes, and how each is read."""
    from foretoken.model.loader import open_weights
    from foretoken.model.names import model_folder

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
    # What does not run has no count of parameters, and a file of an unknown architecture no family.
    known = ", ".join(str(row[key]) for key in ("family", "parameters", "runs_on") if row[key])
    console.line(f"{row['model']}: {known}; {total:,} bytes of tensors")
    cells = [[str(kind["type"]), f"{kind['tensors']:,}", f"{kind['bytes']:,}", str(kind["read"])] for kind in kinds]
    console.table(("type", "tensors", "bytes", "read"), cells, justify="lrrl")


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder; 0 where there is nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _megabytes(count: object) -> str:
    return f"{int(str(count)) / 1e6:,.1f} MB"


def _own_names() -> list[str]:
    from foretoken.model.names import reference_heads, reference_models

    return [*reference_models(), *reference_heads()]


def _describe_packaged(model: PackagedModel) -> dict[str, object]:
    """A row for a packaged model, fetched or not."""
    from foretoken.model.packaged import find_packaged

    row = dict.fromkeys(("family", "parameters", "layers", "context", "size", "bytes", "path"), "")
    try:
        path = find_packaged(model)
    except ModelError as error:
        return {"model": model.name, **row, "path": str(model.path), "runs_on": f"not runnable: {error}"}
    if path is not None:
        return _describe(model.name, path)
    row["size"] = f"{model.wheel_bytes / 1e6:,.0f} MB to fetch"
    return {"model": model.name, **row, "runs_on": f"after `foretoken models get {model.name}`"}


def _hub_repos() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _cached() -> list[tuple[str, Path]]:
    """Models in the hub's cache, each with its newest snapshot; nothing is downloaded."""
    repos = [repo for repo in _hub_repos() if repo.revisions]
    return sorted((repo.repo_id, max(repo.revisions, key=lambda r: r.last_modified).snapshot_path) for repo in repos)


def _describe(name: str, folder: Path) -> dict[str, object]:
    from foretoken.model.loader import read_raw_config
    from foretoken.model.open import native_config

    size = bytes_of(folder)
    row: dict[str, object] = {"model": name, "family": "", "parameters": "", "layers": "", "context": ""}
    row |= {"bytes": size, "size": _megabytes(size), "path": str(folder)}
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
        "runs_on": "native decoder" + _experts_note(config) + _mtp_note(folder, config),
    }


def _experts_note(config: ModelConfig) -> str:
    experts = config.experts
    if experts is None:
        return ""
    layers = len(experts.layers)
    where = "" if layers == config.num_layers else f" in {layers} of {config.num_layers} layers"
    shared = " and a shared one" if experts.shared_size else ""
    return f", {experts.num_experts} experts{where} ({experts.num_active}{shared} for a token)"


def _mtp_note(folder: Path, config: ModelConfig) -> str:
    from foretoken.heads.mtp import num_mtp_layers

    count = num_mtp_layers(folder, config)
    return f", {count} MTP layer{'s' if count > 1 else ''} (--drafter mtp)" if count else ""
