"""The comparison of layouts on a terminal and on disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from studies.layouts.layouts import LayoutReport, LayoutRow
from foretoken.bench.report import print_notes
from foretoken.errors import StorageError
from foretoken.files import to_json
from foretoken.printing import markdown as pages
from foretoken.printing.console import Console

_COLUMNS = (
    *(
        "way",
        "tok/s",
        "min-max",
        "whole run",
        "rounds",
        "tok/round",
        "accepted",
        "ms/round",
        "forward",
        "realign",
        "draft",
        "rest",
    ),
    *("realign share", "rows moved", "grouped", "prompts s", "same"),
)
_NOTE = (
    "tok/s, ms/round and its parts are of rounds in which no prompt was read, medians over repeats; "
    "`whole run` is tokens per second with the "
    "prompts. `realign share` is the part of the decoding time that moving keys and values takes, `rows "
    "moved` how many rows a round copied, "
    "`grouped` the part of EXSPEC's rounds with a batch of equal lengths, `same` how many answers equal "
    "the engine's plain ones."
)


def print_layouts(report: LayoutReport, files: tuple[Path, ...] = (), console: Console | None = None) -> None:
    """A table per batch size, the ratios, and what to be careful about."""
    console = console or Console()
    for size, found in report.ratios.items():
        console.table(_COLUMNS, [_cells(row) for row in report.rows if row.batch_size == size], title=f"batch {size}")
        console.line(", ".join(f"{name} {ratio:.2f}x" for name, ratio in found.items()))
        console.line()
    print_notes(console, report.caveats, files)


def write_layouts(report: LayoutReport, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `folder/YYYY-MM-DD-name.json` and `.md`; an earlier result of the day is kept, and this one numbered.

    Raises:
        StorageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stem, taken = f"{report.date[:10]}-{name}", 1
        while (folder / f"{stem}.json").exists():
            taken += 1
            stem = f"{report.date[:10]}-{name}-{taken}"
        raw, page = folder / f"{stem}.json", folder / f"{stem}.md"
        raw.write_text(to_json(asdict(report), indent=1) + "\n", encoding="utf-8")
        page.write_text(markdown(report, raw.name), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the result to {folder}: {error}") from error
    return raw, page


def markdown(report: LayoutReport, raw: str) -> str:
    """The report as a page: command, machine, versions, caveats, then a table per batch size; `raw` names the JSON
    beside it.
    """
    lines = [
        f"# Layouts, measured on {report.date[:10]}",
        "",
        f"    {report.command}",
        "",
        f"- machine: {', '.join(f'{key} {value}' for key, value in report.machine.items())}",
        f"- versions: {', '.join(f'{key} {value}' for key, value in report.versions.items())}",
        f"- options: {', '.join(f'{key} {value}' for key, value in report.options.items() if key != 'prompt_tokens')}",
        f"- raw numbers: [{raw}]({raw})",
        "",
        _NOTE,
        "",
        *(f"- {caveat}" for caveat in report.caveats),
    ]
    for size, found in report.ratios.items():
        lengths = report.options["prompt_tokens"][size]
        lines += ["", f"## Batch {size}: {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens", ""]
        lines += pages.table(_COLUMNS, [_cells(row) for row in report.rows if row.batch_size == size])
        lines += ["", "Ratios: " + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in found.items()) + "."]
    return pages.page(lines)


def _cells(row: LayoutRow) -> tuple[str, ...]:
    return (
        row.mode,
        f"{row.tokens_per_s:.1f}",
        f"{row.tokens_per_s_min:.1f}-{row.tokens_per_s_max:.1f}",
        f"{row.whole_tokens_per_s:.1f}",
        str(row.num_rounds),
        f"{row.emitted_per_round:.1f}",
        _percent(row.acceptance_rate),
        f"{row.round_ms:.2f}",
        f"{row.forward_ms:.2f}",
        f"{row.realign_ms:.2f}",
        f"{row.draft_ms:.2f}",
        f"{row.rest_ms:.2f}",
        "" if row.moved_per_round is None else _percent(row.realign_share),
        "" if row.moved_per_round is None else f"{row.moved_per_round:.1f}",
        _percent(row.grouped_share),
        f"{row.prompt_s:.2f}",
        f"{row.num_identical} of {row.num_answers}",
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
