"""Where reports are written: one file in the format of its suffix, or a dated pair of JSON and Markdown in a folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from foretoken.errors import InputError, StorageError
from foretoken.files import check_file, check_folder, replace_text, to_json
from foretoken.measure.html import html_page, raw_values
from foretoken.measure.report import Report, markdown

SUFFIXES = (".html", ".md", ".json")


def is_page(out: Path) -> bool:
    """Whether `out` names one file, by its suffix, and no folder of dated results."""
    return out.suffix.lower() in SUFFIXES and not out.is_dir()


def check_out(out: Path | None) -> None:
    """Check that a report can be written to a file or folder, before minutes of work; the folder is made. None: nothing
    is to be written.

    Raises:
        StorageError: it cannot be made or written.
    """
    if out is None:
        return
    check_folder(out.parent if is_page(out) else out)
    if is_page(out):
        check_file("out", out)


def rendered(report: Report, suffix: str, raw: str | None = None) -> str:
    """The report as the text of a file with one of `SUFFIXES`; `raw` names the JSON beside a Markdown page."""
    if suffix.lower() == ".json":
        return to_json(raw_values(report), indent=1) + "\n"
    return html_page(report) if suffix.lower() == ".html" else markdown(report, raw)


def write_report(report: Report, out: Path | None, name: str) -> Report:
    """Write the file `out`, or where `out` has none of `SUFFIXES` `out/YYYY-MM-DD-name.json` and `.md`, numbered where
    a result of the day has that name. None: nothing is to be written.

    Returns the report with the files named.

    Raises:
        StorageError: the file or folder cannot be written; holds the report.
    """
    if out is None:
        return report
    try:
        return _written(report, out, name)
    except StorageError as error:
        error.report = report
        raise


def _written(report: Report, out: Path, name: str) -> Report:
    if is_page(out):
        report = dataclasses.replace(report, files=(*report.files, str(out)))
        replace_text("out", out, rendered(report, out.suffix))
        return report
    raw = free_path(out, report.date, name)
    page = raw.with_suffix(".md")
    report = dataclasses.replace(report, files=(*report.files, str(raw), str(page)))
    try:
        out.mkdir(parents=True, exist_ok=True)
        raw.write_text(rendered(report, ".json"), encoding="utf-8")
        page.write_text(rendered(report, ".md", raw.name), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the result to {out}: {error}") from error
    return report


def free_path(folder: Path, date: str, name: str, suffixes: Sequence[str] = (".json",)) -> Path:
    """`folder/YYYY-MM-DD-name.json`, with a number behind the name where a file with one of `suffixes` exists."""
    stem = first = f"{date[:10]}-{name}"
    taken = 1
    while any((folder / f"{stem}{suffix}").exists() for suffix in suffixes):
        taken += 1
        stem = f"{first}-{taken}"
    return folder / f"{stem}.json"


def check_result(out: Path | None, name: str) -> None:
    """`check_name` and `check_out`: what options say of where a result goes."""
    check_name(name)
    check_out(out)


def check_name(name: str) -> None:
    """Refuse a name that is no plain file name.

    Raises:
        InputError: other than letters, digits, `.`, `_` and `-`.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError("name", name, "use letters, digits, '.', '_' and '-' only; the date is added")
