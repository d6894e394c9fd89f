"""`response_format` and `structured_outputs`: what a request says of the form of its answer, as sampling parameters.

Nothing is compiled here: the engine compiles in its preparing threads, within the limits of `foretoken.text.grammar`,
and keeps what it compiled in a cache bounded by bytes. Schemas are passed on as JSON text, so that their nesting ends
here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from foretoken.errors import InputError
from foretoken.server.api.body import ClosedPart, ListOf, RequestPart
from foretoken.server.api.errors import invalid
from foretoken.text.json_schema import WHITESPACE, prepared_schema

MAX_SCHEMA_CHARS = 512 * 1024  # as `grammar.MAX_TEXT_BYTES`
MAX_CHOICES = 1024  # texts of `structured_outputs.choice`; the limit on their bytes is the grammar's


class JsonSchemaFormat(RequestPart):
    """The schema of `response_format`. `strict` is accepted and always in force."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestPart):
    """`response_format` of a chat request."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # of a json_object: llama.cpp's


class StructuredOutputs(ClosedPart):
    """`structured_outputs`: exactly one of its fields. `grammar` is in Lark syntax."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[str, StringConstraints(min_length=1)] | None = None
    choice: (
        Annotated[ListOf[Annotated[str, StringConstraints(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
        | None
    ) = None
    grammar: Annotated[str, StringConstraints(min_length=1)] | None = None


def structure_fields(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> dict[str, str]:
    """The one field of `SamplingParams` that holds the answer to its form; {} for free text.

    Raises:
        ApiError: two forms, none in `structured_outputs`, or a schema that cannot be written as JSON.
    """
    asked = {} if response_format is None else _of_format(response_format)
    if outputs is None:
        return asked
    given = [name for name in StructuredOutputs.model_fields if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise invalid("structured_outputs", "give exactly one of json, json_object, regex, choice, grammar")
    if asked:
        raise invalid("structured_outputs", "response_format holds the answer to a form already; give one of the two")
    return _of_outputs(outputs, given[0])


def json_form(schema: dict[str, Any] | None, name: str = "answer") -> ResponseFormat:
    """The `response_format` that holds an answer to a JSON schema, which was checked already."""
    form = JsonSchemaFormat.model_construct(name=name, schema_=schema)
    return ResponseFormat.model_construct(type="json_schema", json_schema=form)


def json_text(field: str, value: object) -> str:
    """A value of a request as JSON text.

    Raises:
        ApiError: too long, or nested too deeply.
    """
    check_size(field, value)
    try:
        return json.dumps(value)
    except RecursionError:
        raise invalid(field, "is nested too deeply; use $ref for what repeats") from None


def check_size(field: str, value: object) -> None:
    """Refuse (`ApiError`) what is too long for a grammar before it is written out, which holds up the event loop."""
    num_chars, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        num_chars += len(one) if isinstance(one, str) else 1
        if isinstance(one, dict):
            num_chars += sum(map(len, one))
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        if num_chars + len(waiting) > MAX_SCHEMA_CHARS:
            raise invalid(field, f"is longer than {MAX_SCHEMA_CHARS // 1024} kB; make it smaller")


def json_rule(field: str, schema: dict[str, Any], whitespace: str = WHITESPACE) -> str:
    """A Lark expression for JSON text that fits `schema`, with `whitespace` (a regular expression) between its parts.

    Raises:
        ApiError: too long, nested too deeply, or one that an answer cannot be held to.
    """
    check_size(field, schema)
    try:
        prepared = prepared_schema(field, schema, whitespace)
    except InputError as error:
        raise invalid(field, f"{error.value}: {error.remedy}") from None
    return f"%json {json_text(field, prepared)}"


def lark_text(text: str) -> str:
    """A Lark expression for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def _of_format(asked: ResponseFormat) -> dict[str, str]:
    if asked.type == "text":
        return {}
    if asked.type == "json_object":
        schema = {"type": "object"} if asked.schema_ is None else asked.schema_
        return {"json_schema": json_text("response_format.schema", schema)}
    if asked.json_schema is None:
        raise invalid("response_format.json_schema", "type json_schema needs it, with a name and a schema")
    schema = {"type": "object"} if asked.json_schema.schema_ is None else asked.json_schema.schema_
    return {"json_schema": json_text("response_format.json_schema", schema)}


def _of_outputs(outputs: StructuredOutputs, name: str) -> dict[str, str]:
    if name == "json_":
        schema = outputs.json_
        return {"json_schema": schema if isinstance(schema, str) else json_text("structured_outputs.json", schema)}
    if name == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if outputs.choice is not None:
        return {"grammar": "start: " + " | ".join(lark_text(text) for text in outputs.choice)}
    return {name: getattr(outputs, name)}
