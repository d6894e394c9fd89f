"""What a caller has set for torch in its thread or process changes no answer, nor what is left when it is over."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import foretoken
from foretoken import LLM, GenerateOutput, SamplingParams, SpecConfig
from tests.helpers.checkpoints import token_ids
from tests.helpers.specs import predicting, spec_of
from tests.helpers.usual import some_of

PROMPT = token_ids(5, seed=3) * 3
ASKED = (
    SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(
        max_tokens=8,
        logprobs=2,
        temperature=0.8,
        top_p=0.9,
        min_p=0.01,
        seed=5,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        logit_bias={7: 2.0},
        bad_words=[[9]],
        min_tokens=8,
    ),
)
CASES = (
    None,
    "draft_model",
    "draft_model/best_first",
    "ngram",
    "suffix",
    "recycling",
    "early_exit",
    "eagle",
    "eagle/best_first",
    "medusa",
    "block",
    "mtp",
    "lookahead",
    "mix",
)
FACTORIES = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye"})


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module")
def pair(mtp_pair: SimpleNamespace) -> SimpleNamespace:
    return mtp_pair


def answers(llm: LLM, draft: Path) -> list[GenerateOutput]:
    found = []
    for name in CASES:
        spec = SpecConfig() if name is None else spec_of(name, draft, num_draft=3)
        for params in ASKED:
            found += llm.generate([PROMPT], predicting(spec, params), spec)
    return found


def figures(found: list[GenerateOutput]) -> list[object]:
    """All of the answers that a seed decides."""
    return [(one.token_ids, one.logprobs, one.prompt_logprobs, one.error, one.stats.draft_failures) for one in found]


def opened(pair: SimpleNamespace) -> LLM:
    return LLM(pair.target, dtype="float32", cache_tokens=4096, profile="off")


@pytest.fixture(scope="module")
def usual(pair: SimpleNamespace) -> list[object]:
    """The answers to a caller who has set nothing."""
    with opened(pair) as llm:
        return figures(answers(llm, pair.draft))


@pytest.mark.filterwarnings("ignore:the draft has")
@pytest.mark.parametrize("mode", some_of(MODES, {"float16", "inference mode"}))
def test_answers_do_not_depend_on_modes_of_the_caller(mode: str, pair: SimpleNamespace, usual: list[object]) -> None:
    """An engine that was opened in a mode answers inside of it and outside as one that was opened without."""
    with MODES[mode]():
        llm = opened(pair)
        assert figures(answers(llm, pair.draft)) == usual
    with llm:
        llm.reset_drafters()
        assert figures(answers(llm, pair.draft)) == usual


def unnamed_formats(source: str) -> list[int]:
    """Lines on which torch makes numbers in the format that the process has set as default."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and "dtype" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_new_tensor_of_numbers_names_its_format() -> None:
    """The default is the process's, any thread may change it, and a compiled kernel writes 32 bits whatever it is.

    Parameters of modules follow it, as torch's own do; a checkpoint's tensors take their place.
    """
    package = Path(foretoken.__path__[0])
    paths = set(package.rglob("*.py")) - {package / "model" / "layers.py", package / "model" / "decoder.py"}
    found = {str(path): unnamed_formats(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert unnamed_formats("torch.zeros(3)\ntorch.zeros(3, dtype=torch.bool)") == [1]
