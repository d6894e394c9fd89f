"""HTML reports: self-contained, escaped, with each plot's values as a table; and which files are written."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from foretoken.errors import InputError, StorageError
from foretoken.measure.html import html_page
from foretoken.measure.pages import read_reports, write_pages
from foretoken.measure.plots import Plot, Point, Series, svg
from foretoken.measure.report import Report, Table
from foretoken.measure.write import check_out, write_report

HOSTILE = '<b onclick="x()">&\x1b'
BARS = Plot(
    f"Speedup {HOSTILE}",
    "times plain decoding",
    (
        Series(HOSTILE, (Point("code", 2.0, 1.5, 2.25), Point("chat", 0.5))),
        Series("x", (Point("code", 1.0, 0.5, None),)),
    ),
    baseline=1.0,
)
LINES = Plot(
    "By position",
    "chance",
    tuple(Series(f"drafter {n}", (Point("1", 0.5 + n / 20, 0.4, 0.9), Point("2", 0.25))) for n in range(8)),
    "lines",
    "position",
)
REPORT = Report(
    title="Speed",
    command=f"foretoken bench {HOSTILE}",
    options={},
    results={"rows": ()},
    tables=(Table("code", ("setting", HOSTILE), ((HOSTILE, "1"), ("bad", "2")), styles=(None, "bold red")),),
    explained="What `it` means.",
    caveats=(HOSTILE,),
    plots=(BARS, LINES, Plot("empty", "nothing", ())),
    machine={"cpu": "abacus"},
    versions={"torch": "2"},
    date="2026-01-02T03:04:05",
)


class Page(HTMLParser):
    """Tags with their attributes; void elements need no end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_needs_nothing_else_and_runs_nothing() -> None:
    text = html_page(REPORT)
    page = Page(text)
    assert not {tag for tag, _ in page.found} & {"script", "link", "img", "iframe", "b"}
    names = {name for _, attrs in page.found for name in attrs}
    assert not names & {"src", "href", "style", "onclick"}
    assert "url(" not in text
    assert "@import" not in text
    assert "\x1b" not in text
    assert "<p>What <code>it</code> means.</p>" in text
    assert "default-src 'none'" in text
    assert "color-scheme: light dark" in text
    assert "prefers-color-scheme: dark" in text
    colours = set(re.findall(r"var\((--\w+)\)", text))
    light, dark = text.split("@media")[0], text.split("@media")[1]
    assert all(f"{name}:" in light for name in colours)
    assert all(f"{name}:" in dark for name in colours)


def test_beside_each_plot_stand_its_values() -> None:
    text = html_page(REPORT)
    figures = text.split("<figure>")[1:]
    assert len(figures) == 2  # none for a plot without values
    assert '<td class="r">2.00 [1.50, 2.25]</td>' in figures[0]
    assert '<td class="r">1.00 [0.500, -]</td>' in figures[0]
    assert '<td class="r">0.850 [0.400, 0.900]</td>' in figures[1]
    assert '<tr class="fail"><td class="l">bad</td>' in text


@pytest.mark.parametrize("plot", [BARS, LINES], ids=["bars", "lines"])
def test_a_plot_is_well_formed_and_inside_its_frame(plot: Plot) -> None:
    root = ElementTree.fromstring(svg(plot, "p"))
    assert root.attrib["aria-labelledby"] == "p-title p-about"
    assert {root[0].attrib["id"], root[1].attrib["id"]} == {"p-title", "p-about"}
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root:
        for name, most in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(one.attrib.get(name, 0)) <= most
    bars = [one for one in root if one.tag == "rect"]
    if plot is BARS:
        widths = [float(bar.attrib["width"]) for bar in bars]
        assert widths[0] == pytest.approx(2 * widths[1], rel=0.01) == pytest.approx(4 * widths[2], rel=0.01)
    else:
        lines = [one.attrib for one in root if one.tag == "polyline"]
        assert len({(line["class"], line.get("stroke-dasharray")) for line in lines}) == 8


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    for name, begin in (("r.html", "<!DOCTYPE html>"), ("r.md", "# Speed, measured on 2026-01-02"), ("r.json", "{")):
        check_out(tmp_path / "new" / name)
        assert write_report(REPORT, tmp_path / "new" / name, "run").files == (str(tmp_path / "new" / name),)
        assert (tmp_path / "new" / name).read_text().startswith(begin)
    assert len(list((tmp_path / "new").iterdir())) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        check_out(tmp_path / "file" / "r.html")


def test_a_report_is_read_back_as_it_was(tmp_path: Path) -> None:
    report = dataclasses.replace(REPORT, verdict=HOSTILE, passed=False, conclusions=("Last.",), results={"rows": [1.5]})
    for suffix in (".json", ".html"):
        found = write_report(report, tmp_path / f"one{suffix}", "one")
        (again,) = read_reports(tmp_path / f"one{suffix}")
        assert html_page(again) == html_page(dataclasses.replace(found, options={}))


def test_several_reports_are_one_page(tmp_path: Path) -> None:
    failed = dataclasses.replace(REPORT, verdict="No: it is slower", passed=False)
    paths = [tmp_path / "one.json", tmp_path / "two.html"]
    for report, path in zip((REPORT, failed), paths, strict=True):
        write_report(report, path, "name")
    out = tmp_path / "all.html"
    assert [one.passed for one in write_pages(paths, HOSTILE, out)] == [True, False]
    text = out.read_text("utf-8")
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert '<a href="#run-2">No: it is slower</a>' in text
    assert [one.verdict for one in read_reports(out)] == ["", "No: it is slower"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"page": {}}', "<p>hello</p>", '<pre class="raw">{</pre>'])
@pytest.mark.parametrize("suffix", [".json", ".html"])
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, text: str, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=rf"{path.name}': is no report"):
        read_reports(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("page", "tables", 0, "justify"), ['"><b onclick="x()">']),
        (("page", "tables", 0, "justify"), '"<'),
        (("page", "tables", 0, "justify"), ""),
        (("page", "tables", 0, "lines", 0), ["one"]),
        (("page", "tables", 0, "lines", 0, 0), 1),
        (("page", "tables", 0, "styles", 0), 1),
        (("page", "plots", 0, "kind"), "pie"),
        (("page", "plots", 0, "series", 0, "points", 0, "value"), "2"),
        (("page", "plots", 0, "series", 0, "points", 0, "value"), float("inf")),
        (("page", "plots", 0, "series", 0, "points", 0, "high"), 10**400),
        (("page", "plots", 0, "baseline"), float("nan")),
        (("page", "conclusions"), "text"),
        (("machine",), ["abacus"]),
        (("command",), 3),
    ],
)
def test_a_report_with_a_value_of_another_kind_is_refused_by_name(
    tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    path = tmp_path / "x.json"
    write_report(dataclasses.replace(REPORT, conclusions=("Last.",)), path, "x")
    raw: Any = json.loads(path.read_text("utf-8"))
    inner = raw
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(InputError, match=r"x.json': is no report"):
        write_pages([path], "t", tmp_path / "all.html")
    assert not (tmp_path / "all.html").exists()


@pytest.mark.parametrize("depth", [3_000, 200_000])
def test_a_report_nested_too_deeply_is_refused_by_name(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "x.json"
    write_report(REPORT, path, "x")
    deep = "[" * depth + "]" * depth
    path.write_text(path.read_text("utf-8").replace('"rows": []', f'"rows": {deep}'), encoding="utf-8")
    assert deep in path.read_text("utf-8")
    with pytest.raises(InputError, match=r"x.json': is no report"):
        write_pages([path], "t", tmp_path / "all.html")
