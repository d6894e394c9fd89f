"""`foretoken bench` with --batches, --trace or --recovery: which options go with which, and the run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import typer

from foretoken.bench.batches import run_batches
from foretoken.bench.load_options import DEFAULT_SETTINGS, LoadOptions, parse_phases, parse_table, slice_names
from foretoken.bench.load_trace import run_trace
from foretoken.bench.prompts import ALL
from foretoken.bench.recovery import run_recovery
from foretoken.bench.sheets import SheetReport, print_sheets
from foretoken.cli.common import was_given
from foretoken.cli.lists import whole, words
from foretoken.errors import ConfigError
from foretoken.printing.console import Console

LOAD = "Batches, changing load, recovery"  # the part of the help in which their options stand
_COMMON = frozenset({"target", "dtype", "device", "threads", "repeats", "table", "out", "name", "seed", "as_json"})
_TEXTS = frozenset({"draft", "settings", "prompts", "prompt_tokens", "max_tokens"})
_ENGINE = frozenset(
    {
        "cache_tokens",
        "cache_reserve",
        "max_batch_size",
        "max_prompt_tokens",
        "max_step_tokens",
        "min_tokens_to_speculate",
        "max_speculating_requests",
    }
)
_TAKES: Mapping[str, frozenset[str]] = {
    "batches": _COMMON | _TEXTS | _ENGINE | {"batches", "slices", "prompts_per_slice", "warmup"},
    "trace": _COMMON | _TEXTS | _ENGINE | {"trace", "phase_s"},
    "recovery": _COMMON | {"recovery", "batches"},
}
_RUNS: Mapping[str, Callable[[LoadOptions, str], SheetReport]] = {
    "batches": run_batches,
    "trace": run_trace,
    "recovery": run_recovery,
}
_RECOVERY_BATCHES = (1, 4)


def load_kind(context: typer.Context) -> str | None:
    """Which of the three was asked for; recovery also takes batches.

    Raises:
        ConfigError: options of the three without any of them.
    """
    kind = next((name for name in ("recovery", "trace", "batches") if context.params[name] not in (None, False)), None)
    if kind is None:
        for name in ("settings", "table", "prompt_tokens", "phase_s", *sorted(_ENGINE)):
            if was_given(context, name):
                raise ConfigError(name, context.params[name], "goes with --batches or --trace only")
    return kind


def measure_load(context: typer.Context, kind: str) -> None:
    """Run it, and print what was found; Ctrl-C does so too, and goes on.

    Raises:
        ConfigError: an option that does not go with `kind`.
        KeyboardInterrupt: the run was interrupted.
    """
    refuse_others(context, kind, _TAKES[kind])
    report = _RUNS[kind](_options(context, kind), shlex.join(["foretoken", *sys.argv[1:]]))
    if context.params["as_json"]:
        Console().json_line(report.json_line())
    else:
        print_sheets(report)
    if report.interrupted:
        raise KeyboardInterrupt


def _options(context: typer.Context, kind: str) -> LoadOptions:
    """What was set, anywhere; the rest is as `LoadOptions` has it, with what the target's default draft allows."""
    given = context.params
    values: dict[str, Any] = {"target": given["target"], "name": kind}
    if kind == "recovery":
        values["batches"] = _RECOVERY_BATCHES
    for name in _TAKES[kind] - {"as_json", "recovery"}:
        if _is_set(context, name):
            field, value = _read(name, given[name])
            values[field] = value
    if kind != "recovery":
        if given["draft"] is None and given["target"] == "reference:target":
            values["draft"] = "reference:draft"
        if values.get("draft") is None and "settings" not in values:
            values["settings"] = tuple(name for name in DEFAULT_SETTINGS if not name.startswith("draft_model"))
    if "slices" in values or values.get("prompts") is not None:
        values["slices"] = slice_names(values.get("slices", (ALL,)), values.get("prompts"))
    return LoadOptions(**values)


def _read(name: str, value: Any) -> tuple[str, Any]:  # noqa: ANN401 - whatever the option holds
    """The field of `LoadOptions` and its value."""
    if name in ("slices", "settings"):
        return name, words(name, value)
    if name == "batches":
        return name, tuple(whole(name, word) for word in words(name, value))
    if name == "table":
        return name, parse_table(value)
    if name == "trace":
        return "phases", parse_phases(value)
    return name, value


def refuse_others(context: typer.Context, kind: str, takes: Collection[str]) -> list[str]:
    """Options on the command line; those that do not go with `kind` are refused.

    Raises:
        ConfigError: names the first of them.
    """
    given = [str(p.name) for p in context.command.params if was_given(context, str(p.name))]
    for other in given:
        if other not in takes:
            raise ConfigError(
                other, context.params[other], f"does not go with --{kind}, which takes {', '.join(sorted(takes))}"
            )
    return given


def _is_set(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
