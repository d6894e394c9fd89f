"""`foretoken report`: what runs found, on one page for somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.errors import ConfigError
from foretoken.printing.console import Console


def report(
    runs: Annotated[list[Path], typer.Argument(help="Files of runs: what --out FILE.json or FILE.html wrote.")],
    out: Annotated[Path, typer.Option(help="The page to write, a file with the suffix .html.")],
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "Speculative decoding: what was measured",
) -> None:
    """Put the reports of runs on one self-contained page: verdicts first, plots, tables and raw values."""
    from foretoken.measure.pages import write_pages
    from foretoken.measure.write import check_out

    if out.suffix.lower() != ".html":
        raise ConfigError("out", str(out), "give a file with the suffix .html")
    check_out(out)
    console = Console()
    for one in write_pages(runs, title, out):
        console.line(one.heading, style=("bold green" if one.passed else "bold red") if one.verdict else None)
    console.line(f"written: {out}")
