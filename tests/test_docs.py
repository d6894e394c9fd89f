"""The README and `docs/`: links lead somewhere, the index names every page, the README stays short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAX_README_WORDS = 500


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    """Targets of relative links that are not there."""
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield f"{page.relative_to(ROOT)}: {target}"


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 30
    broken = [link for page in PAGES for link in broken_links(page)]
    assert not broken, "\n".join(broken)


def test_the_modules_that_a_page_names_are_there() -> None:
    """By their path below the project or below the package."""
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8"))
        missing = [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]
        assert not missing, f"{page.relative_to(ROOT)} names {missing}"


def test_the_index_names_every_page() -> None:
    docs = ROOT / "docs"
    named = LINK.findall((docs / "README.md").read_text(encoding="utf-8"))
    assert {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - set(named) == {"README.md"}


def test_the_readme_is_short_and_begins_with_code() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = text[: text.index("\n## Read next")]
    assert len(first.split()) <= MAX_README_WORDS
    assert first.count("![") == 1
    assert "pip install ." in "\n".join(text.splitlines()[:10])
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")
    assert len(text.split(code)[0].splitlines()) + len(code.splitlines()) < 25


def test_both_lists_of_studies_are_whole() -> None:
    studies = {
        path.stem for path in (ROOT / "studies").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    for page in ("studies/README.md", "docs/studies.md"):
        rows = re.findall(r"^\|(.+?)\|", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert studies - {"__init__", "command"} <= named, page
