"""Parameters of a request that no other test asks for: texts that are none, numbers of other libraries, the ends of
every range.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import LLM, EngineConfig, InputError, SamplingParams, SpecConfig

HALF = "\ud83d"  # of an emoji


@pytest.fixture(scope="module")
def reference() -> Iterator[LLM]:
    with LLM("reference:target", dtype="float32", cache_tokens=2048) as llm:
        yield llm


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"stop": HALF}, "stop"),
        ({"stop": ["fine", f"a{HALF}b"]}, "stop"),
        ({"bad_words": [[1], HALF]}, "bad_words"),
        ({"regex": f"[a-z]{HALF}"}, "regex"),
        ({"grammar": f'start: "{HALF}"'}, "grammar"),
        ({"json_schema": f'{{"const": "{HALF}"}}'}, "json_schema"),
    ],
)
def test_half_a_character_is_no_text(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=rf"{field}=.*character \d+ is half of a surrogate pair \(U\+D83D\)"):
        SamplingParams(**values)


@pytest.mark.parametrize("schema", [{"const": HALF}, {"properties": {HALF: {}}}, '{"const": "\\ud83d"}'], ids=ascii)
def test_half_a_character_inside_a_schema(reference: LLM, schema: Any) -> None:
    with pytest.raises(InputError, match=r"json_schema=.*half of a surrogate pair"):
        reference.generate(["x"], SamplingParams(json_schema=schema))
    assert not reference.engine.has_work


def test_a_schema_stays_as_it_was_given(reference: LLM) -> None:
    """Its owner may make the next one of it: a coroutine prepares its request later, and shadow checks after that."""
    schema = {"enum": ["yes"]}
    params = SamplingParams(json_schema=MappingProxyType(schema))
    schema["enum"][0] = "no"
    assert copy.deepcopy(params).json_schema == {"enum": ["yes"]}
    assert reference.generate(["x"], params)[0].text == '"yes"'


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": np.int64(3)}, r"max_tokens=.*: must be a whole number of Python's; int\(x\) makes one"),
        (
            {"temperature": np.float32(0.5)},
            r"temperature=.*: must be a finite number of Python's; float\(x\) makes one",
        ),
        ({"ignore_eos": np.bool_(True)}, "ignore_eos=.*: must be True or False"),
        ({"temperature": 10**400}, r"temperature=.*: must lie in \[0, 100\]"),
        ({"top_p": -0.0}, r"top_p=-0.0: must lie in \(0, 1\]"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias=nan: must be a finite number"),
        ({"logit_bias": {True: 1.0}}, "logit_bias=True: must be a whole number"),
        ({"stop": ["a", b"b"]}, "stop=b'b': each stop string must be a text"),
        ({"max_tokens": 10**5000}, "max_tokens=<int>: must have at most 4000 digits"),
        ({"top_k": 10**4000}, "top_k=.*: must have at most 4000 digits"),
        ({"seed": 2**64}, "seed=.*: must be at least 0 and at most 18446744073709551615"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_that_are_none(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**values)


def test_a_float_of_numpy_is_one_of_pythons() -> None:
    assert SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.9)).temperature == 0.5


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1e-8},
        {"temperature": 1e-300},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 100.0, "top_p": 1e-9, "min_p": 1.0, "top_k": 1},
    ],
    ids=str,
)
def test_where_the_law_is_a_point_the_answer_is_greedy(reference: LLM, values: dict[str, float]) -> None:
    """With drafts and without, for the least and the largest seed."""
    greedy = reference.generate(["def f(self):"], SamplingParams(max_tokens=12))[0]
    for seed in (0, 2**64 - 1):
        for spec in (SpecConfig(), SpecConfig("draft_model", "reference:draft", num_draft=3, rule="block")):
            out = reference.generate(["def f(self):"], SamplingParams(max_tokens=12, seed=seed, **values), spec)[0]  # type: ignore[arg-type]
            assert out.token_ids == greedy.token_ids


def test_the_largest_numbers_mean_no_limit(reference: LLM) -> None:
    free = reference.generate(["def f(self):"], SamplingParams(max_tokens=12, temperature=1.0, seed=1))[0]
    params = SamplingParams(max_tokens=10**30, temperature=1.0, seed=1, top_k=10**30, stop=free.text[-1], min_tokens=12)
    out = reference.generate(["def f(self):"], params)[0]
    assert out.token_ids[:12] == free.token_ids


@pytest.mark.parametrize(
    "value", [np.array([1, 2]), np.zeros((0,)), torch.tensor([1.0, 2.0])], ids=["two", "none", "torch"]
)
def test_an_array_is_named_like_any_other_wrong_value(value: object) -> None:
    """It compares with nothing, so that each check would raise an error of its library."""
    for kind, field, more in (
        (SamplingParams, "logprobs_of", {}),
        (SpecConfig, "num_draft", {"drafter": "ngram"}),
        (SpecConfig, "parts", {"drafter": "mix"}),
        (EngineConfig, "weights", {"model": "a"}),
    ):
        with pytest.raises(InputError, match=rf"^{field}=.*: must not be an array"):
            kind(**more | {field: value})
