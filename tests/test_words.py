"""The words of the project: the glossary is used, retired words are not, class names are unique."""

from __future__ import annotations

import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Words of an earlier vocabulary, with the field's term for each. Decisions, the changelog and the log are history.
RETIRED = {
    r"laws?": "distribution, probs",
    r"(?:the|a|an|of|these|such|free) looks?": "preview",
    r"wishes": "candidates, request options",
    r"arms?": "drafter option",
    r"moods?": "speed factor",
    r"doubts?": "variance",
    r"trust(?:ed|s)?": "weight",
    r"crowds?": "batch bucket",
    r"dear(?:er|est|ness)?": "expensive",
    r"thrift": "policy overhead",
    r"followers?": "Kalman filter",
    r"luck": "random numbers",
    r"who (?:draft tokens|drafts|looks on|pays)": "which drafter, observers, attribution",
    r"draft token(?:es)? (?:stand|stands|stood)": "is accepted",
    r"what it is worth": "measured gain",
    r"authors?": "provenance",
    r"hand(?:s|ed|ing)? over": "return",
    r"(?:is|are|was|were) told": "receives, is reported",
    r"fortunes?": "wealth",
    r"intake": "admission",
    r"guess(?:es|ed|ing)?": "draft token, drafts",
}
# Parts of names, with the part that stands for them. `guesses` is a key of saved profiles.
RETIRED_PARTS = {
    "guess": "draft",
    "most": "max",
    "least": "min",
    "law": "distribution, log_probs",
    "fortunes": "wealth",
    "mourn": "on_exit",
    "pupil": "trainee",
}
_ALLOWED_NAMES = {
    *("guesses", "most", "least", "at_most", "at_least"),
    *("most_common", "most_frequent", "most_adoptable", "at_least_one", "least_loaded"),
}
_RETIRED = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
_PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/serving/*.md", "tests/reference/README.md")


def pages() -> list[Path]:
    return sorted(path for pattern in _PAGES for path in ROOT.glob(pattern))


def modules() -> list[Path]:
    return sorted((ROOT / "foretoken").rglob("*.py"))


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment, docstring and message of a module, without names in backticks."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        text = token.string
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in text):
            yield token.start[0], re.sub(r"`[^`]*`|\{[^{}]*\}", "", text)


def text_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of a page, without code."""
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        in_code ^= line.startswith("```")
        if not in_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)


def retired_words(path: Path) -> list[str]:
    """Place and word of each retired word that a module or a page uses."""
    return [
        f"{path.relative_to(ROOT)}:{start + text[: match.start()].count(chr(10))}: {match.group()!r}"
        for start, text in (prose_of if path.suffix == ".py" else text_of)(path)
        for match in _RETIRED.finditer(text)
    ]


def test_no_retired_word_is_used() -> None:
    offences = [word for path in (*modules(), *pages()) for word in retired_words(path)]
    assert not offences, "\n".join(["retired words are used:", *offences])


def test_no_retired_word_is_a_part_of_a_name() -> None:
    """Identifiers of the package, split at underscores; what a library calls its own is allowed."""
    offences = set()
    for path in modules():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            name = token.string.strip("_").lower()
            if (
                token.type == tokenize.NAME
                and name not in _ALLOWED_NAMES
                and RETIRED_PARTS.keys() & set(name.split("_"))
            ):
                offences.add(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    assert not offences, "\n".join(["retired parts of names:", *sorted(offences)])


def glossary() -> list[str]:
    """The terms of docs/glossary.md in their order."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    return re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", text, flags=re.MULTILINE)[1:]


@functools.cache
def all_prose() -> str:
    """Everything that is written in the package and its pages, the glossary excepted, on one line in lower case."""
    texts = [path.read_text() for path in pages() if path.name != "glossary.md"]
    texts += [text for path in modules() for _, text in prose_of(path)]
    return " ".join(" ".join(texts).replace("`", "").lower().split())


def test_the_glossary_is_alphabetical() -> None:
    terms = [term for term in glossary() if term != "---"]
    assert len(terms) > 40
    assert terms == sorted(set(terms))


def is_used(term: str) -> bool:
    """Whether the package or its pages use a term, also in the plural or the past."""
    ending = r"(?:s|es|ed)?" if term[-1].isalpha() else ""
    return re.search(rf"(?<!\w){re.escape(term)}{ending}(?!\w)", all_prose()) is not None


def test_every_term_of_the_glossary_is_used() -> None:
    terms = [word for term in glossary() if term != "---" for word in term.split(", ")]
    unused = [term for term in terms if not is_used(term)]
    assert not unused, f"terms of docs/glossary.md that nothing uses: {unused}"
