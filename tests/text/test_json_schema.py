"""What becomes of a JSON schema before the grammar engine sees it: nothing in it is followed otherwise than it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretoken.errors import InputError
from foretoken.server.api.errors import ApiError
from foretoken.server.api.forms import json_rule
from foretoken.text.structure import Structure
from tests.text.structures import Model, reference_tokenizer


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(reference_tokenizer(), "reference")


def takes(model: Model, held: Structure, text: str) -> bool:
    """Whether the whole text is an answer."""
    ids = [*model.spell(text), model.end_ids[0]]
    return all(held.allowed(ids, range(-1, len(ids) - 1)))


NAMED: list[dict[str, Any]] = [
    {"properties": {"a": {"type": "integer"}}},
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": ["integer", "string"]}},
    {"patternProperties": {"^a": {"type": "integer"}}},
    {"required": ["a"], "allOf": [{"properties": {"a": {"type": "integer"}}}]},
    {"$ref": "#/$defs/one", "$defs": {"one": {"properties": {"a": {"type": "integer"}}}}},
    {"properties": {'\n\t\\/"': {}, "a": {"type": "integer"}}},
]


@pytest.mark.parametrize("schema", NAMED, ids=str)
@pytest.mark.parametrize("as_rule", [False, True])
def test_an_escaped_name_does_not_leave_the_schema_of_its_property(
    model: Model, schema: dict[str, Any], as_rule: bool
) -> None:
    """JSON readers take "\\u0061" for "a": its value was held to nothing."""
    one = {"type": "object", **schema}
    held = model.make(grammar=f"start: {json_rule('x', one)}") if as_rule else model.make(json_schema=one)
    assert takes(model, held, '{"a":1}')
    assert takes(model, held, '{"a":1,"b\\n\\"":"x\\t"}')
    for text in ('{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":"x"}', '{"a":1,"a":"x"}', '{"b":"\\u0001"}'):
        assert not takes(model, held, text), text


def test_control_characters_are_written_where_no_name_can_be_hidden(model: Model) -> None:
    escape = {"const": "\x1b[0m"}
    closed = {"properties": {"a": escape}, "required": ["a"], "additionalProperties": False}
    for schema, text in (
        ({"type": "string"}, '"\\u001b"'),
        ({"type": "object", **closed}, '{"a":"\\u001b[0m"}'),
        ({"type": "object"}, '{"\\u001b":"\\u001b"}'),
        ({"properties": {"a": {}}, "x-guidance": {"json_allowed_escapes": 'u"\\'}}, '{"b":"\\u001b"}'),
        ({"properties": {"\x01": {"type": "integer"}}}, '{"\\u0001":1}'),
    ):
        assert takes(model, model.make(json_schema=schema), text), schema
    with pytest.raises(InputError, match=r"json_schema='\\x1b\[0m': this control character .* additionalProperties"):
        model.make(json_schema={"properties": {"a": {"enum": ["b", {"c": ["\x1b[0m"]}]}}})
    with pytest.raises(ApiError, match="control character"):
        json_rule("x", {"properties": {"a": escape}})


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"unevaluatedItems": True, "unevaluatedProperties": {}},
        {"propertyNames": {"type": "string"}},  # zod writes it for every record
        {"propertyNames": True, "dependentRequired": {}, "dependentSchemas": {}},
    ],
    ids=str,
)
def test_words_that_ask_for_nothing_are_left_out(model: Model, idle: dict[str, Any]) -> None:
    """In the schemas of answers and in those of tools, which were refused for them."""
    plain = {"type": "object", "additionalProperties": {"type": "number"}}
    said = {**plain, "additionalProperties": {"type": "number", **idle}, **idle}
    for held in (model.make(json_schema=said), model.make(grammar=f"start: {json_rule('x', said)}")):
        assert takes(model, held, '{"a":1.5}')
        assert not takes(model, held, '{"a":"x"}')


@pytest.mark.parametrize("asks", [{"unevaluatedProperties": False}, {"propertyNames": {"pattern": "a"}}, {"if": {}}])
def test_words_that_ask_for_something_are_refused(model: Model, asks: dict[str, Any]) -> None:
    (word,) = asks
    with pytest.raises(InputError, match=f"{word}.*leave that out"):
        model.make(json_schema={"type": "object", **asks})
