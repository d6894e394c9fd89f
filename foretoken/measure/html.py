"""A report as one HTML file that needs nothing else: styles and plots are inside, and there is no script.

It follows the reader's light or dark scheme, and beside each plot stands a table of its values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from foretoken.files import to_json
from foretoken.measure.plots import NUM_COLOURS, Plot, markup, svg
from foretoken.measure.report import Report, Table, provenance

# Okabe and Ito's colours, which the colour-blind can tell apart, darkened or lightened to 3:1 against the ground.
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1e21; --soft: #5c6370; --rule: #d5d8dd; --bar: #7aa6d8;
  --c0: #0072b2; --c1: #c04a00; --c2: #00785a; --c3: #a8487f; --c4: #8a6a00; --c5: #3f4bb5; --good: #1a7f37;
  --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; --ink: #e6e8eb; --soft: #9aa2ae; --rule: #3a3f47;
  --bar: #3f6fa8; --c0: #56b4e9; --c1: #f0894a; --c2: #2fc29a; --c3: #dd9bc2; --c4: #e0c341; --c5: #a0a9ff;
  --good: #57c26f; --bad: #ff8a80; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.passed { color: var(--good); } .failed { color: var(--bad); }
a { color: inherit; } section { border-top: 2px solid var(--rule); margin-top: 3rem; }
pre, dd { overflow-wrap: anywhere; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--rule); white-space: nowrap; text-align: left; }
.r { text-align: right; }
tr.fail td { color: var(--bad); font-weight: 600; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; } summary { color: var(--soft); cursor: pointer; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .heading { font-weight: 600; } svg .tick { fill: var(--soft); } svg .bar { fill: var(--bar); }
svg .grid { stroke: var(--rule); } svg .baseline { stroke: var(--ink); stroke-dasharray: 4 3; }
svg .whisker { stroke: var(--ink); stroke-width: 1.4; } svg .line { fill: none; stroke-width: 2; }
"""
_COLOURS = "".join(
    f"svg .line.c{n} {{ stroke: var(--c{n}); }} svg .mark.c{n} {{ fill: var(--c{n}); }}\n" for n in range(NUM_COLOURS)
)
PAGE_KEY = "page"  # of raw values: what a page shows beside them


def raw_values(report: Report) -> dict[str, Any]:
    """All values of a report: with them the page can be made again (`read_reports`)."""
    return report.as_dict() | {PAGE_KEY: report.page_values()}


def html_page(report: Report) -> str:
    """The report as a page: command, provenance, caveats, plots with their values, tables, raw values."""
    return _page(report.heading, _parts(report, "h1", "plot"))


def html_pages(title: str, reports: Sequence[Report]) -> str:
    """Several reports as one page that begins with what each of them says."""
    said = (f'<li><a href="#run-{number}">{markup(one.heading)}</a></li>' for number, one in enumerate(reports, 1))
    parts = [f"<h1>{markup(title)}</h1>", f"<ol>{''.join(said)}</ol>"]
    for number, report in enumerate(reports, 1):
        parts += [f'<section id="run-{number}">', *_parts(report, "h2", f"plot-{number}"), "</section>"]
    return _page(title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{markup(title)}</title>\n<style>{_STYLE}{_COLOURS}</style>\n</head>\n"
    )
    return f"{head}<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"


def _parts(report: Report, level: str, plot_name: str) -> list[str]:
    state = f' class="{"passed" if report.passed else "failed"}"' if report.verdict else ""
    raw = escape(to_json(raw_values(report)), quote=False)
    return [
        f"<{level}{state}>{markup(report.heading)}</{level}>",
        f"<pre>{markup(report.command)}</pre>",
        f"<dl>{''.join(f'<dt>{name}</dt><dd>{markup(text)}</dd>' for name, text in provenance(report).items())}</dl>",
        *([f"<p>{_prose(report.explained)}</p>"] if report.explained else []),
        *([f"<ul>{''.join(f'<li>{_prose(line)}</li>' for line in report.caveats)}</ul>"] if report.caveats else []),
        *(_figure(plot, f"{plot_name}-{number}") for number, plot in enumerate(report.plots, 1) if plot.places),
        *(_section(table) for table in report.tables),
        *(f"<p>{markup(line)}</p>" for line in report.conclusions),
        f'<details><summary>Raw values</summary><pre class="raw">{raw}</pre></details>',
    ]


def _figure(plot: Plot, name: str) -> str:
    values = _table(Table(plot.title, ("setting", *plot.places), tuple(plot.rows)))
    return (
        f"<figure>\n<figcaption>{markup(plot.title)}</figcaption>\n{svg(plot, name)}\n"
        f'<details><summary>Values</summary><div class="wide" tabindex="0">{values}</div></details>\n</figure>'
    )


def _section(table: Table) -> str:
    title = f"<h2>{markup(table.title)}</h2>\n" if table.title else ""
    notes = "".join(f"\n<p>{markup(note)}</p>" for note in table.notes)
    return f'{title}<div class="wide" tabindex="0">{_table(table)}</div>{notes}'


def _table(table: Table) -> str:
    sides = [table.justify[min(place, len(table.justify) - 1)] for place in range(len(table.headings))]
    named = zip(sides, table.headings, strict=True)
    head = "".join(f'<th scope="col" class="{side}">{markup(text)}</th>' for side, text in named)
    rows = []
    for line, style in itertools.zip_longest(table.lines, table.styles[: len(table.lines)]):
        kind = ' class="fail"' if style is not None and "red" in style else ""
        cells = "".join(f'<td class="{side}">{markup(text)}</td>' for side, text in zip(sides, line, strict=True))
        rows.append(f"<tr{kind}>{cells}</tr>")
    name = f' aria-label="{markup(table.title)}"' if table.title else ""
    return f"<table{name}><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _prose(text: str) -> str:
    """Text whose words in backticks are code, as in Markdown."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", markup(text))
