"""Options that the measurements of `foretoken bench` share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.config import DRAFTERS
from foretoken.model.open import model_folder
from foretoken.params import check_whole

DraftersOption = Annotated[
    str,
    typer.Option(
        help=(
            f"Drafters, separated by commas: {', '.join(DRAFTERS)}; or all; or sweep: each at 2, 3, 5 and 8 draft "
            "tokens, a draft model also with trees. NAME:field=value;field=value sets options of one."
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
OutOption = Annotated[Path | None, typer.Option(help="Folder for a dated result.")]
NameOption = Annotated[str, typer.Option(help="End of the result's file name.")]
SeedOption = Annotated[int, typer.Option(help="Seed of sampled answers.")]


def check_common(given: Mapping[str, Any]) -> None:
    """Check the seed and the draft, before any file is read.

    Raises:
        InputError: a seed out of range.
        ModelError: no such draft.
    """
    check_whole("seed", given["seed"], low=0, high=2**63)  # each answer adds its number
    if given["draft"] is not None:
        model_folder(given["draft"])


def default_draft(given: Mapping[str, Any]) -> str | None:
    """The draft that was given; for the reference target without one, its own draft."""
    if given["draft"] is None and given["target"] == "reference:target":
        return "reference:draft"
    return None if given["draft"] is None else str(given["draft"])


def command_line() -> str:
    """The command of this process, for the report."""
    return shlex.join(["foretoken", *sys.argv[1:]])
