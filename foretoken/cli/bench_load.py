"""`foretoken bench load`: settings under load, at fixed batch sizes or on a load that changes."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer

from foretoken.bench.load_options import DEFAULT_SETTINGS, LoadOptions, slice_names
from foretoken.bench.prompts import ALL
from foretoken.cli.bench_options import check_common, command_line, finish
from foretoken.cli.common import DEFAULT_MODEL, JsonOption, is_set, was_given
from foretoken.cli.flags import config_from, takes
from foretoken.errors import ConfigError
from foretoken.field_text import words

_OF_BATCHES = (
    "batches",
    "slices",
    "prompts_per_slice",
    "warmup",
)  # options without effect on a changing load
_OF_LOAD = ("phase_s",)


@takes(LoadOptions)
def load(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    load: str | None = None,
    name: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput of whole batches, or of a load that changes; settings take turns in one run.

    With --url ADDRESS: requests to a server at random times, see `foretoken bench url --help`.
    """
    from foretoken.bench.batches import run_batches
    from foretoken.bench.changing_load import run_changing_load

    check_common(context.params)
    if load is None:
        _refuse(context, _OF_LOAD, "applies to --load only; leave it out")
        run = run_batches
    else:
        _refuse(context, _OF_BATCHES, "does not apply to --load, whose phases say it; leave it out")
        run = run_changing_load
    finish(run(_options(context), command_line()), as_json)


def _options(context: typer.Context) -> LoadOptions:
    """`LoadOptions` from the options by name; without a draft, the default settings are those that need none."""
    given = context.params
    derived: dict[str, Any] = {}
    if given["draft"] is None and not is_set(context, "settings"):
        derived["settings"] = tuple(name for name in DEFAULT_SETTINGS if not name.startswith("draft_model"))
    chosen = words("slices", given["slices"]) if is_set(context, "slices") or given["prompts"] is None else (ALL,)
    derived["slices"] = slice_names(chosen, given["prompts"])
    if given["name"] is None:
        derived["name"] = "batches" if given["load"] is None else "load"
    return config_from(LoadOptions, given, **derived)


def _refuse(context: typer.Context, names: Collection[str], remedy: str) -> None:
    """Refuse options on the command line that would have no effect.

    Raises:
        ConfigError: names the first of them.
    """
    for name in names:
        if was_given(context, name):
            raise ConfigError(name, context.params[name], remedy)
