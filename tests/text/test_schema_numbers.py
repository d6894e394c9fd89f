"""Numbers of a schema are written as they are, or refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foretoken.errors import InputError
from foretoken.server.api.errors import ApiError
from foretoken.server.api.forms import json_rule
from foretoken.text.json_schema import check_numbers
from tests.text.structures import Model, reference_tokenizer


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(reference_tokenizer(), "reference")


def written(model: Model, schema: dict[str, Any]) -> Any:
    """The answer that a schema with one answer forces."""
    held, answer = model.make(json_schema=schema), list[int]()
    while not held.finished:
        allowed = held.mask([()])[0].nonzero().flatten().tolist()
        answer.append(next(token for token in allowed if len(model.bytes.get(token, b"")) == 1))
        held.commit(answer[-1:])
    return json.loads(model.text(answer).decode())


def refused(schema: object) -> bool:
    try:
        check_numbers("json_schema", schema)
    except InputError:
        return True
    return False


@pytest.mark.parametrize("number", [1234567890123456789, 2**53 + 1, -(2**53) - 1, 2**63, -(2**63), 10**30, 1e-320])
def test_a_value_that_would_be_another_is_refused(model: Model, number: float) -> None:
    for schema in ({"const": number}, {"properties": {"a": {"enum": [1, {"b": [number]}]}}}):
        with pytest.raises(InputError, match=r"json_schema='(const|enum): .*no 64-bit float is this number"):
            model.make(json_schema=schema)


def test_values_that_are_taken_are_written_as_they_are(model: Model) -> None:
    rng = random.Random(2)
    whole = [2**53, -(2**53), 10**18, 2**62, *(rng.randrange(10**15, 10**17) for _ in range(4))]
    broken = [0.1, 1e-7, 1e22, -0.5, *(rng.uniform(-1, 1) * 10 ** rng.randrange(-5, 15) for _ in range(8))]
    taken = [number for number in (*whole, *broken) if not refused({"const": number})]
    assert len(taken) > 12
    for number in taken:
        assert written(model, {"const": number}) == number


@pytest.mark.parametrize(
    ("bound", "is_refused"),
    [
        ({"minimum": 2**60 + 1}, True),
        ({"exclusiveMaximum": -(2**53) - 1}, True),
        ({"minimum": 1e20}, True),
        ({"maximum": -(2**64)}, True),
        ({"minimum": 10**4000}, True),  # beyond all floats: was an OverflowError, and 500 for its client
        ({"minimum": -(10**4000)}, True),
        ({"minimum": 2**60, "maximum": 2**60 + 256}, False),
        ({"minimum": 0, "maximum": 2**63 - 1}, False),
        ({"maximum": 2**64 - 1}, False),
        ({"minimum": 0.1, "exclusiveMaximum": 2**53 - 1}, False),
    ],
)
def test_bounds(model: Model, bound: dict[str, float], is_refused: bool) -> None:
    schema = {"type": "array", "items": {"anyOf": [{"type": "integer", **bound}]}}
    assert refused(schema) == is_refused
    if not is_refused:
        model.make(json_schema=schema)


def test_names_and_remarks_are_no_keywords() -> None:
    big = 2**60 + 1
    assert not refused({"properties": {"const": {"type": "string"}, "minimum": {}}, "default": {"const": big}})
    assert refused({"properties": {"const": {"const": big}}})
    assert not refused({"const": True, "enum": [None, "2", False], "exclusiveMinimum": True})


def test_schemas_inside_of_grammars_are_checked() -> None:
    with pytest.raises(ApiError, match=r"enum: 1152921504606846977: no 64-bit float"):
        json_rule("tools", {"enum": [2**60 + 1]})


def test_the_whole_range_of_64_bits_is_called_unsupported(model: Model) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    with pytest.raises(InputError, match=r"uses what is not supported .*integer range.*leave that out"):
        model.make(json_schema=schema)
