"""Reports read back from the files that runs wrote, and several of them as one page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from foretoken.errors import InputError
from foretoken.files import read_text, replace_text
from foretoken.measure.html import PAGE_KEY, html_pages
from foretoken.measure.plots import Plot, Point, Series
from foretoken.measure.report import Report, Table

_RAW = re.compile(r'<pre class="raw">(.*?)</pre>', re.DOTALL)
_OF_REPORT = ("command", "machine", "versions", "options", "caveats", "date", "files")


def write_pages(runs: Sequence[Path], title: str, out: Path) -> list[Report]:
    """Write the reports of `runs`, files with the suffix .json or .html, as one page to `out`; returns them.

    Raises:
        InputError: a file that is no report; names it.
        StorageError: a file that cannot be read or written.
    """
    reports = [report for run in runs for report in read_reports(run)]
    replace_text("out", out, html_pages(title, reports))
    return reports


def read_reports(run: Path) -> list[Report]:
    """The report in a JSON file, or those of a page, as `write_report` and `write_pages` wrote them.

    Raises:
        InputError, StorageError: see `write_pages`.
    """
    text = read_text("run", run)
    found = [unescape(raw) for raw in _RAW.findall(text)] if run.suffix.lower() == ".html" else [text]
    try:
        reports = [_report(json.loads(raw)) for raw in found]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(run) from error
    if not reports:
        raise _refused(run)
    return reports


def _refused(run: Path) -> InputError:
    remedy = "is no report; give a file that --out FILE.json or --out FILE.html wrote (older ones: run the verb again)"
    return InputError("run", str(run), remedy)


def _report(raw: Mapping[str, Any]) -> Report:
    page = raw[PAGE_KEY]
    results = {name: value for name, value in raw.items() if name not in (*_OF_REPORT, PAGE_KEY)}
    return Report(
        title=page["title"],
        command=raw["command"],
        options=raw.get("options", {}),
        results=results,
        tables=tuple(_table(one) for one in page["tables"]),
        explained=page["explained"],
        caveats=tuple(raw.get("caveats", ())),
        conclusions=tuple(page["conclusions"]),
        verdict=page["verdict"],
        passed=page["passed"],
        plots=tuple(_plot(one) for one in page["plots"]),
        machine=raw["machine"],
        versions=raw["versions"],
        date=raw["date"],
        files=tuple(raw.get("files", ())),
    )


def _table(raw: Mapping[str, Any]) -> Table:
    lists = {name: tuple(raw[name]) for name in ("headings", "notes", "styles")}
    return Table(title=raw["title"], lines=tuple(map(tuple, raw["lines"])), justify=raw["justify"], **lists)


def _plot(raw: Mapping[str, Any]) -> Plot:
    series = tuple(Series(one["name"], tuple(Point(**point) for point in one["points"])) for one in raw["series"])
    return Plot(**{**raw, "series": series})
