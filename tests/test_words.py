"""The words of the project: the glossary is used, retired words are not, class names are unique."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    r"who (?:guesses|drafts|looks on|pays)": "which drafter, observers, attribution",
    r"guess(?:es)? (?:stand|stands|stood)": "is accepted",
    r"what it is worth": "measured gain",
    r"authors?": "provenance",
    r"hand(?:s|ed|ing)? over": "return",
    r"(?:is|are|was|were) told": "receives, is reported",
    r"fortunes?": "wealth",
    r"intake": "admission",
}
_RETIRED = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
_PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "foretoken/reference/README.md")

# Files and class names that the redesign has not reached yet; to be emptied.
TEMPORARY_FILES: frozenset[str] = frozenset(
    {
        "foretoken/bench/batch_settings.py",
        "foretoken/bench/drafting.py",
        "foretoken/bench/layouts.py",
        "foretoken/bench/measure.py",
        "foretoken/bench/padded_draft.py",
        "foretoken/bench/peers.py",
        "foretoken/bench/recovery.py",
        "foretoken/bench/replay.py",
        "foretoken/bench/report.py",
        "foretoken/bench/rival_policies.py",
        "foretoken/bench/validate.py",
        "foretoken/cli/answer.py",
        "foretoken/cli/common.py",
        "foretoken/cli/generate.py",
        "foretoken/cli/simulate.py",
        "foretoken/cli/simulate_requests.py",
        "foretoken/config.py",
        "foretoken/control/__init__.py",
        "foretoken/control/acceptance_shift.py",
        "foretoken/control/budget.py",
        "foretoken/control/candidates.py",
        "foretoken/control/cost.py",
        "foretoken/control/policy.py",
        "foretoken/control/previews.py",
        "foretoken/draft/__init__.py",
        "foretoken/draft/branches.py",
        "foretoken/draft/cascade.py",
        "foretoken/draft/chain.py",
        "foretoken/draft/early_exit.py",
        "foretoken/draft/group.py",
        "foretoken/draft/layer_choice.py",
        "foretoken/draft/matches.py",
        "foretoken/draft/merge.py",
        "foretoken/draft/mix.py",
        "foretoken/draft/other_vocabulary.py",
        "foretoken/draft/predicted.py",
        "foretoken/draft/tree.py",
        "foretoken/draft/worth.py",
        "foretoken/engine/admission.py",
        "foretoken/engine/controller.py",
        "foretoken/engine/engine.py",
        "foretoken/engine/llm.py",
        "foretoken/engine/request.py",
        "foretoken/engine/runner.py",
        "foretoken/engine/startup/profiling.py",
        "foretoken/engine/ticket.py",
        "foretoken/model/chat_template.py",
        "foretoken/model/early.py",
        "foretoken/model/grammar.py",
        "foretoken/model/logprobs.py",
        "foretoken/model/processors.py",
        "foretoken/model/quant.py",
        "foretoken/model/sampling.py",
        "foretoken/model/support.py",
        "foretoken/params.py",
        "foretoken/simulate/arrivals.py",
        "foretoken/simulate/chooser.py",
        "foretoken/simulate/setting.py",
        "foretoken/simulate/sim_request.py",
        "docs/adding-a-drafter.md",
        "docs/drafters.md",
    }
)
TEMPORARY_CLASSES: frozenset[str] = frozenset(
    {
        "Agreement",
        "Answer",
        "Clock",
        "Job",
        "Phase",
        "Plan",
        "Record",
        "Row",
        "Shape",
        "Structure",
        "Trial",
    }
)


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


@pytest.mark.parametrize("path", [*modules(), *pages()], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_retired_word_is_used(path: Path) -> None:
    if str(path.relative_to(ROOT)) in TEMPORARY_FILES:
        return
    found = [
        f"{path.name}:{start + text[: match.start()].count(chr(10))}: {match.group()!r}"
        for start, text in (prose_of if path.suffix == ".py" else text_of)(path)
        for match in _RETIRED.finditer(text)
    ]
    assert not found, found


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


@pytest.mark.parametrize("term", [word for term in glossary() if term != "---" for word in term.split(", ")])
def test_every_term_of_the_glossary_is_used(term: str) -> None:
    ending = r"(?:s|es|ed)?" if term[-1].isalpha() else ""
    assert re.search(rf"(?<!\w){re.escape(term)}{ending}(?!\w)", all_prose()), term


def test_class_names_are_unique() -> None:
    """Public ones: a name that two modules define differently says too little in one of them."""
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    repeated = {name: where for name, where in places.items() if len(where) > 1 and name not in TEMPORARY_CLASSES}
    assert not repeated
