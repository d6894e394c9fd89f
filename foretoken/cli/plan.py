"""`foretoken plan`: what fits into memory, before anything is loaded; with --fleet, how many replicas a day needs."""

# ruff: noqa: ARG001 - options are read from the context, by name

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models, print_json, was_given
from foretoken.cli.flags import takes
from foretoken.cli.simulate import AcceptanceOption, BenchOption, SettingsOption
from foretoken.config import SpecConfig
from foretoken.control.config import PolicyConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import CapacityError, ConfigError, InputError
from foretoken.machine.memory import available_bytes, parse_bytes
from foretoken.params import check_whole, is_count
from foretoken.plan.memory import Budget, Load, ModelShape, account, contexts_to_show, fitting, largest_batch
from foretoken.printing.console import Console
from foretoken.simulate.fleet.options import FleetOptions
from foretoken.simulate.inputs import Limits

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_DEFAULT_CONTEXT_TOKENS = 4096
# Options that mean nothing without --fleet, beside those of `FleetOptions`; and that mean nothing with it.
_OF_FLEET = (
    *("settings", "acceptance", "bench", "prompt_tokens", "output_tokens", "max_batch_size", "price_per_hour", "seed"),
    *(one.name for one in fields(FleetOptions)),
)
_OF_MEMORY = (
    *("target", "draft", "head", "memory", "reserve", "batch", "context", "num_draft"),
    *("weights", "dtype", "draft_dtype", "device"),
)
_PARTS = {
    "target's weights": "weight_bytes",
    "draft's weights": "draft_weight_bytes",
    "target's cache": "kv_bytes",
    "draft's cache": "draft_kv_bytes",
    "a step": "workspace_bytes",
    "together": "total_bytes",
}
_DraftsOption = Annotated[
    list[str] | None, typer.Option(help="A draft model; give it several times to see which ones fit.")
]
_HeadsOption = Annotated[
    list[str] | None, typer.Option(help="A trained head; give it several times to see which ones fit.")
]
_MemoryOption = Annotated[
    str | None,
    typer.Option(help="Memory to plan with, such as 24GiB; without it, the memory that is free on this machine now."),
]
_FleetOption = Annotated[
    Path | None,
    typer.Option(help="Plan the replicas of a day instead of memory, from this file of `foretoken bench profile`."),
]


@takes(FleetOptions)
@takes(Limits, fields=("max_batch_size",))
@takes(Load)
@takes(EngineConfig, fields=("model", "max_prompt_tokens", "weights", "dtype", "device"))
@takes(SpecConfig, fields=("num_draft", "draft_dtype"))
def plan(
    click_context: typer.Context,
    target: str = DEFAULT_MODEL,
    draft: _DraftsOption = None,
    head: _HeadsOption = None,
    memory: _MemoryOption = None,
    reserve: Annotated[float, typer.Option(help="Share of the memory that is kept free.")] = 0.2,
    batch: int = 1,
    context: int | None = None,
    fleet: _FleetOption = None,
    settings: SettingsOption = None,
    acceptance: AcceptanceOption = None,
    bench: BenchOption = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Prompt lengths with --fleet: N, or LOW-HIGH; 256.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Answer lengths with --fleet: N, or LOW-HIGH; 128.")] = None,
    price_per_hour: Annotated[float, typer.Option(help="Price of a replica per hour, with --fleet.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the failures of replicas, with --fleet.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Print the memory of weights, caches and a step, and which batch and context fit; exit code 1 if the requested
    ones do not.

    Reads config.json and the headers of the files; of quantised matrices the scales too. With --fleet: replicas,
    waiting and price of a day with and without speculation; exit code 1 if no setting keeps the promise.
    """
    _check_given(click_context, fleet is not None)
    if fleet is not None:
        from foretoken.cli.plan_fleet import plan_fleet

        plan_fleet(click_context.params)
        return
    _plan_memory(click_context.params)


def _plan_memory(given: Mapping[str, Any]) -> None:
    from foretoken.heads.footprint import draft_shape_of, head_shape_of
    from foretoken.model.footprint import shape_of
    from foretoken.model.names import model_folder
    from foretoken.model.open import open_device

    target, draft_dtype = given["target"], given["draft_dtype"]
    if draft_dtype != "auto" and not given["draft"] and not given["head"]:
        reason = "there is no draft model and no head: name one with --draft or --head, or leave it out"
        raise ConfigError("draft_dtype", draft_dtype, reason)
    place, memory = open_device(given["device"]), given["memory"]
    budget = Budget(available_bytes(place) if memory is None else parse_bytes(memory), _share(given["reserve"]))
    fetch_models(target)
    shape = shape_of(model_folder(target), target, given["dtype"], place.type, given["weights"])
    drafts: list[ModelShape | None] = [
        *(
            draft_shape_of(name, given["dtype"], shape.weight_format, draft_dtype, place.type)
            for name in given["draft"] or ()
        ),
        *(head_shape_of(name, target, shape, draft_dtype, place.type) for name in given["head"] or ()),
    ]
    for name in ("batch", "max_prompt_tokens"):
        check_whole(name, given[name], low=1)
    load = Load(
        batch=given["batch"],
        context_tokens=_context(given["context"], shape),
        num_draft=_num_draft(given["num_draft"]),
        max_prompt_tokens=given["max_prompt_tokens"],
    )
    candidates = drafts or [None]
    rows = [_row(shape, one, load, budget) for one in candidates]
    best = next((one for one, row in zip(candidates, rows, strict=True) if row["fits"]), candidates[0])
    grid = fitting(shape, best, load, budget, _BATCHES, contexts_to_show(shape, load.context_tokens))
    report = {
        "target": target,
        "weights": given["weights"],
        "device": str(place),
        "memory_bytes": budget.memory_bytes,
        "usable_bytes": budget.usable_bytes,
        "load": asdict(load),
        "cache_tokens": load.batch * shape.cache_tokens(load.context_tokens),
        "rows": rows,
        "table_draft": None if best is None else best.name,
        "missing_bytes_by_context_and_batch": grid,
    }
    if given["as_json"]:
        print_json(report)
    else:
        _print(report, grid, rows)
    _check_fits(target, load, budget, rows)


def _check_given(context: typer.Context, is_fleet: bool) -> None:
    """Refuse options that would have no effect."""
    remedy = (
        "is of memory: leave it out, or --fleet" if is_fleet else "needs --fleet PROFILE: add it, or leave this out"
    )
    for name in _OF_MEMORY if is_fleet else _OF_FLEET:
        if was_given(context, name):
            raise ConfigError(name, str(context.params[name]), remedy)


def _check_fits(target: str, load: Load, budget: Budget, rows: Sequence[Mapping[str, Any]]) -> None:
    if any(row["fits"] for row in rows):
        return
    row = min(rows, key=lambda row: int(str(row["missing_bytes"])))
    with_draft = "" if row["draft"] is None else f" with draft {row['draft']}"
    raise CapacityError(
        f"{load.batch} x {load.context_tokens} tokens of {target}{with_draft} need "
        f"{row['total_bytes']} bytes, and of {budget.memory_bytes} "
        f"{budget.usable_bytes} may be used: {row['missing_bytes']} bytes are missing; at this length "
        f"{row['largest_batch']} requests fit"
    )


def _row(target: ModelShape, draft: ModelShape | None, load: Load, budget: Budget) -> dict[str, object]:
    """The plan for one draft model: its memory, and what still fits."""
    needed = account(target, draft, load)
    missing = budget.missing_bytes(needed)
    return {
        "draft": None if draft is None else draft.name,
        "fits": missing == 0,
        "missing_bytes": missing,
        "total_bytes": needed.total_bytes,
        "largest_batch": largest_batch(target, draft, load, budget),
        **asdict(needed),
    }


def _print(report: dict[str, object], grid: dict[int, dict[int, int]], rows: list[dict[str, object]]) -> None:
    console = Console()
    console.line(
        f"{report['device']}: {_size(report['memory_bytes'])}, of which {_size(report['usable_bytes'])} may be used"
    )
    console.line()
    lines = [(words, *(_size(row[name]) for row in rows)) for words, name in _PARTS.items()]
    lines.append(("fits", *("yes" if row["fits"] else f"no, {_size(row['missing_bytes'])} missing" for row in rows)))
    lines.append(("requests of this length that fit", *(str(row["largest_batch"]) for row in rows)))
    console.table(("", *(f"draft {row['draft'] or 'none'}" for row in rows)), lines)
    console.line()
    cells = [
        (str(context), *("fits" if not missing else _size(missing) for missing in line.values()))
        for context, line in grid.items()
    ]
    title = (
        f"requests at once (across) of so many tokens (down): what is missing; draft {report['table_draft'] or 'none'}"
    )
    console.table(("tokens", *map(str, _BATCHES)), cells, title=title)
    console.line()
    console.line(f"to run it: --cache-tokens {report['cache_tokens']}")


def _size(count: object) -> str:
    value = float(str(count))
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _context(context: int | None, target: ModelShape) -> int:
    if context is None:
        return min(_DEFAULT_CONTEXT_TOKENS, target.max_context_tokens)
    if not 1 <= context <= target.max_context_tokens:
        raise InputError("context", context, f"{target.name} takes 1 to {target.max_context_tokens} tokens")
    return context


def _num_draft(value: str) -> int:
    if value == "auto":
        return PolicyConfig.max_num_draft
    if not is_count(value) or int(value) > 1024:
        raise InputError("num_draft", value, "must be a whole number from 0 to 1024, or auto")
    return int(value)


def _share(value: float) -> float:
    if not 0 <= value < 1:
        raise InputError("reserve", value, "must be a share from 0 to below 1")
    return value
