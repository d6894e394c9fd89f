"""What a new user is told who puts --drafter, --draft, --num-draft, --rule and --parts together wrongly: what, and what
instead.
"""

from __future__ import annotations

import itertools

import pytest

from foretoken.model.names import reference_heads, reference_models
from tests.cli.conftest import Run
from tests.helpers.usual import some_of

GENERATE = ("generate", "--prompt", "def f(x):", "--max-tokens", "4", "--cost-profile", "off", "--dtype", "float32")
DRAFT = ("--draft", "reference:draft")
A_DRAFT = "the folder or hub id of a draft model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafter", "Auto"), "drafter='Auto': did you mean 'auto'? choose one of draft_model, ngram"),
        (("--drafter", "draftmodel", *DRAFT), "drafter='draftmodel': did you mean 'draft_model'?"),
        (("--drafter", "plain"), "mix, auto, or none for plain decoding"),
        (("--drafter", "None"), "drafter='None': did you mean 'none'?"),
        (("--drafter", "none", *DRAFT), "only drafter='draft_model' takes it, not drafter=None"),
        (("--drafter", "draft_model"), f"draft=None: drafter='draft_model' needs {A_DRAFT}"),
        (("--drafter", "cascade"), f"draft=None: part 'draft_model' of drafter='cascade' needs {A_DRAFT}"),
        (
            ("--drafter", "auto", "--parts", "draft_model"),
            f"draft=None: part 'draft_model' of drafter='auto' needs {A_DRAFT}",
        ),
        (("--draft", ""), f"draft='': must be {A_DRAFT}"),
        (("--drafter", "auto", "--draft", ""), f"draft='': must be {A_DRAFT}"),
        (
            ("--drafter", "ngram", *DRAFT),
            "takes it, not drafter='ngram': name draft_model as the drafter, or leave it out",
        ),
        (
            ("--drafter", "auto", "--parts", "ngram,suffix", *DRAFT),
            "takes it, not drafter='auto' (parts: ngram, suffix): name draft_model among the parts, or leave it out",
        ),
        (
            ("--drafter", "auto", "--parts", "mix", *DRAFT),
            "parts='mix': cannot be a part of drafter='auto'; name its parts here instead",
        ),
        (("--drafter", "auto", "--parts", "ngram,foo"), "drafter='foo': choose one of"),
        (
            ("--drafter", "auto", "--exit-layer", "2"),
            "(parts: suffix): name early_exit among the parts, or leave it out",
        ),
        (
            ("--drafter", "auto", "--min-confidence", "0.5"),
            "eagle, medusa, block, mtp), and drafter='auto' has none; choose one, or leave it out",
        ),
        (
            ("--drafter", "none", "--num-draft", "3"),
            "num_draft='3': needs a drafter: name a --drafter or a --draft, or leave it out",
        ),
        (("--drafter", "auto", "--num-draft", "x"), "num_draft='x': must be a whole number or auto"),
        (("--drafter", "auto", "--num-draft", "-1"), "num_draft=-1: must be at least 0"),
        (
            ("--drafter", "auto", *DRAFT, "--rule", "greedy", "--temperature", "1"),
            "rule='greedy': it would change the distribution at temperature > 0",
        ),
        (("--drafter", "auto", "--rule", "typicl"), "rule='typicl': choose one of auto, greedy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_combination_says_what_to_do(foretoken: Run, arguments: tuple[str, ...], message: str) -> None:
    done = foretoken(*GENERATE, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", ""), "no model is named; give smollm2, the folder of a checkpoint, a GGUF file or a hub id"),
        (
            ("--draft", "/nope"),
            "folder /nope does not exist; give the folder of a checkpoint, a GGUF file, a hub id, or smollm2",
        ),
        (
            ("--draft", "reference:drafty"),
            "'reference:drafty' is not part of the reference family; known: "
            + ", ".join((*reference_models(), *reference_heads())),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_model_that_is_not_there_says_so(foretoken: Run, arguments: tuple[str, ...], message: str) -> None:
    done = foretoken(*GENERATE, *arguments)
    assert (done.code, done.out) == (3, "")
    assert message in done.err


PARTS = ("", "--parts ngram,draft_model", "--parts cascade,suffix", "--parts early_exit,draft_model")
MORE = ("", "--num-draft 0", "--num-draft 3", "--rule coupled")


@pytest.mark.parametrize(
    ("parts", "more"),
    some_of(
        itertools.product(PARTS, MORE), {*((one, "") for one in PARTS), *zip(PARTS, (*MORE[1:], MORE[2]), strict=True)}
    ),
)
def test_parts_of_auto(foretoken: Run, parts: str, more: str) -> None:
    """Every sensible combination answers, and as plain decoding does."""
    options = [*parts.split(), *more.split()]
    plain, drafted = foretoken(*GENERATE), foretoken(*GENERATE, "--drafter", "auto", *DRAFT, *options)
    assert (plain.code, drafted.code) == (0, 0), drafted.err
    assert drafted.out == plain.out


def test_the_summary_stays_on_its_line(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a log or a pipe, whatever the width of a terminal would be."""
    monkeypatch.setenv("COLUMNS", "40")
    done = foretoken(*GENERATE, *DRAFT, "--num-draft", "2")
    assert "tokens/s, first token after" in done.err
    assert [
        line for line in done.err.splitlines() if "draft tokens accepted" in line and line.startswith("4 tokens in")
    ]
