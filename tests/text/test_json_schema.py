"""What becomes of a JSON schema before the grammar engine sees it: nothing in it is followed otherwise than it says."""

from __future__ import annotations

import datetime
import json
import re
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


def test_a_word_of_older_drafts_does_not_take_out_prefix_items(model: Model) -> None:
    """The grammar engine read such a schema by the older draft, which knows no prefixItems: any array was taken."""
    both = {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False}
    old = {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}
    for schema, longer in ((both, True), (both | {"items": False}, False), (old, False)):
        held = model.make(json_schema=schema)
        assert [takes(model, held, text) for text in ("[1]", '["x"]', '[1,"x"]')] == [True, False, longer]


@pytest.mark.parametrize("asks", [{"unevaluatedProperties": False}, {"propertyNames": {"pattern": "a"}}, {"if": {}}])
def test_words_that_ask_for_something_are_refused(model: Model, asks: dict[str, Any]) -> None:
    (word,) = asks
    with pytest.raises(InputError, match=f"{word}.*leave that out"):
        model.make(json_schema={"type": "object", **asks})


def is_day(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def test_dates_are_days_of_the_calendar_and_times_have_no_leap_seconds(model: Model) -> None:
    """29 February came in every year, and a 60th second in every minute: no reader of dates takes them."""
    date, time, both = (model.make(json_schema={"format": name}) for name in ("date", "time", "date-time"))
    years = [4, 100, 400, 1900, 1996, 2000, 2020, 2021, 2023, 2024, 2100, 2400, 9999]
    days = ("02-28", "02-29", "02-30", "01-31", "04-31", "12-31", "13-01", "10-10")
    texts = [f"{year:04}-{day}" for year in years for day in days]
    assert sum(map(is_day, texts)) > len(years) * 4
    for text in texts:
        assert takes(model, date, f'"{text}"') == is_day(text), text
        assert takes(model, both, f'"{text}T10:59:00.5Z"') == is_day(text), text
    for clock in ("00:00:00Z", "23:59:59.25+01:00", "23:59:60Z", "24:00:00Z", "23:59:59"):
        is_time = clock in ("00:00:00Z", "23:59:59.25+01:00")
        assert takes(model, time, f'"{clock}"') == is_time
        assert takes(model, both, f'"2024-02-29T{clock}"') == is_time
    nullable = {
        "type": ["string", "null"],
        "format": "date",
        "minLength": 10,
        "pattern": "^2",
        "allOf": [{"pattern": "9$"}],
    }
    held = model.make(json_schema={"items": nullable, "enum": [["2024-02-29"], ["2023-02-29"], [None], ["1999-09-09"]]})
    answers = ('["2024-02-29"]', '["2023-02-29"]', "[null]", '["1999-09-09"]')
    assert [takes(model, held, text) for text in answers] == [True, False, True, False]


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"minProperties": 2}, True),
        ({"minProperties": 3, "required": ["a"]}, True),
        ({"minProperties": 2, "patternProperties": {"^a": {}}, "additionalProperties": False}, True),
        ({"minProperties": 1}, False),
        ({"minProperties": 2, "required": ["a"]}, False),
        (
            {
                "minProperties": 2,
                "required": ["a", "b"],
                "properties": {"a": {}, "b": {}},
                "additionalProperties": False,
            },
            False,
        ),
    ],
)
def test_a_property_written_twice_is_not_counted_as_two(model: Model, schema: dict[str, Any], is_refused: bool) -> None:
    """`{"a": 1, "a": 1}` has one property for every reader."""
    one = {"items": {"type": "object", **schema}}
    if is_refused:
        with pytest.raises(InputError, match=r"minProperties: \d.*repeat a property"):
            model.make(json_schema=one)
    else:
        held = model.make(json_schema=one)
        assert not takes(model, held, '[{"a":1,"a":1}]') or schema["minProperties"] == 1
        assert takes(model, held, '[{"a":1,"b":1}]')


@pytest.mark.parametrize(
    ("bounds", "excluded"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum: 0"),
        ({"exclusiveMinimum": 30.0, "exclusiveMaximum": 30.2}, "exclusiveMinimum: 30.0"),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "exclusiveMinimum: 1"),
        ({"minimum": -30.2, "exclusiveMaximum": -30}, "exclusiveMaximum: -30"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, None),
        ({"exclusiveMinimum": 0, "maximum": 1.5}, None),
        ({"exclusiveMinimum": 0.001, "maximum": 0.5}, None),
        ({"minimum": 0, "exclusiveMaximum": 0.5}, None),
    ],
)
def test_an_open_bound_is_not_written_itself(model: Model, bounds: dict[str, Any], excluded: str | None) -> None:
    """0 was an answer of {"exclusiveMinimum": 0, "maximum": 0.5}."""
    schema = {"items": {"type": "number", **bounds}}
    if excluded is not None:
        with pytest.raises(InputError, match=excluded):
            model.make(json_schema=schema)
        return
    held = model.make(json_schema=schema)
    for text in ("0", "0.0", "0.001", "0.25", "0.5", "1", "1.5", "-1"):
        if takes(model, held, f"[{text}]"):
            low, high = bounds.get("minimum", -9), bounds.get("maximum", 9)
            assert low <= float(text) <= high
            assert bounds.get("exclusiveMinimum", -9) < float(text) < bounds.get("exclusiveMaximum", 9)
    assert takes(model, held, "[0.25]")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("^[[:alpha:]]$", "["), ("[a[b]]", "["), ("[a&&b]", "&&"), ("[+--]", "--"), (r"\[[^\]a~~]", "~~")],
)
def test_classes_that_would_be_read_otherwise_are_refused(model: Model, pattern: str, found: str) -> None:
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: True}}):
        with pytest.raises(InputError, match=f"pattern: .*`{re.escape(found)}` inside .* is ambiguous; escape it"):
            model.make(json_schema=schema)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [(r"^[\[a]+$", "[a"), (r"^\[[a]\[$", "[a["), (r"^[a\-\-b&]$", "&"), ("^--&&~~$", "--&&~~"), (r"^\\[a]$", "\\a")],
)
def test_classes_that_are_read_alike_are_followed(model: Model, pattern: str, fits: str) -> None:
    assert re.search(pattern, fits)
    assert takes(model, model.make(json_schema={"pattern": pattern}), json.dumps(fits))
