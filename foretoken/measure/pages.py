"""Reports read back from the files that runs wrote, and several of them as one page."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from foretoken.errors import InputError
from foretoken.files import read_text, replace_text, to_json
from foretoken.measure.html import PAGE_KEY, html_pages
from foretoken.measure.report import ABOUT, Report

_RAW = re.compile(r'<pre class="raw">(.*?)</pre>', re.DOTALL)
_DEFAULTS: Mapping[str, Any] = {"options": {}, "caveats": [], "files": []}
_LARGEST = 1e300  # of a number in a plot, whose axis is a little longer


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
    """The report in a JSON file, or those of a page that was written here; raises as `write_pages` does."""
    text = read_text("run", run)
    found = [unescape(raw) for raw in _RAW.findall(text)] if run.suffix.lower() == ".html" else [text]
    try:
        reports = [_report(json.loads(raw)) for raw in found]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _refused(run) from error
    if not reports:
        raise _refused(run)
    return reports


def _refused(run: Path) -> InputError:
    remedy = "is no report; give a file that --out FILE.json or --out FILE.html wrote (older ones: run the verb again)"
    return InputError("run", str(run), remedy)


def _report(raw: Mapping[str, Any]) -> Report:
    results = {name: value for name, value in raw.items() if name not in (*ABOUT, PAGE_KEY)}
    values = _DEFAULTS | raw[PAGE_KEY] | {name: raw[name] for name in ABOUT if name in raw} | {"results": results}
    report: Report = _made(Report, values)
    for table in report.tables:
        widths = {len(table.headings), *map(len, table.lines)}
        if len(widths) > 1 or not table.justify or set(table.justify) - {"l", "r"}:
            raise ValueError(f"a table with lines of {sorted(widths)} cells, justified by {table.justify!r}")
    to_json(raw)  # what is nested too deeply for a page is found here
    return report


def _made(kind: Any, raw: Any) -> Any:  # noqa: ANN401 - any type of a report's fields, from any JSON value
    """`raw` as `kind`; raises TypeError, ValueError or KeyError where it is something else."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(raw, Mapping):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(**{name: _made(hint, raw[name]) for name, hint in hints.items()})
    if origin is tuple and isinstance(raw, list):
        return tuple(_made(parts[0], one) for one in raw)
    if origin is types.UnionType:  # with None
        return None if raw is None else _made(parts[0], raw)
    if kind is float:
        fits = isinstance(raw, int | float) and not isinstance(raw, bool) and abs(raw) <= _LARGEST
    elif origin is typing.Literal:
        fits = raw in parts
    else:
        fits = isinstance(raw, origin or kind)
    if not fits:
        raise TypeError(f"{kind} expected")
    return raw
