"""`foretoken bench load`: settings under load, at fixed batch sizes."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from typing import Any

import typer

from foretoken.cli.bench_options import check_common, command_line, finish
from foretoken.cli.common import DEFAULT_MODEL, JsonOption, is_set
from foretoken.cli.flags import config_from, takes
from foretoken.field_text import words
from foretoken.measure.load.options import DEFAULT_SETTINGS, LoadOptions, slice_names
from foretoken.measure.options import ALL


@takes(LoadOptions)
def load(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput of whole batches; settings take turns in one run.

    With --url ADDRESS: requests to a server at random times, see `foretoken bench url --help`.
    """
    from foretoken.measure.load.run import run_batches

    check_common(context.params)
    finish(run_batches(_options(context), command_line()), as_json)


def _options(context: typer.Context) -> LoadOptions:
    """`LoadOptions` from the options by name; without a draft, the default settings are those that need none."""
    given = context.params
    derived: dict[str, Any] = {}
    if given["draft"] is None and not is_set(context, "settings"):
        derived["settings"] = tuple(name for name in DEFAULT_SETTINGS if not name.startswith("draft_model"))
    chosen = words("slices", given["slices"]) if is_set(context, "slices") or given["prompts"] is None else (ALL,)
    derived["slices"] = slice_names(chosen, given["prompts"])
    return config_from(LoadOptions, given, **derived)
