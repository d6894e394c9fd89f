"""Tools and forms of answers: what a request is held to, and what is read from the answer's text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foretoken.backend.local import fim_tokens, template_roles, tool_style
from foretoken.server.api.errors import ApiError
from foretoken.server.api.forms import ResponseFormat, StructuredOutputs, structure_fields
from foretoken.server.api.tool_reader import ToolReader, ToolStyle
from foretoken.server.api.tools import (
    Callables,
    FunctionTool,
    NamedToolChoice,
    Tool,
    arguments_of,
    callables,
    held_form,
    template_message,
)

NAMES = ("f", "g")
# What is no call, though it looks like one.
NAMED_BY_AN_OBJECT = '<tool_call>{"name": {"type": "string"}, "arguments": {"a": "x"}}</tool_call>'
NAMED_BY_A_LIST = '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'
HALF_A_PAIR = '<tool_call>{"name": "f", "arguments": "\\ud83d"}</tool_call>'
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<tool", "_call>", " ", "\n", "hi", '"', "\\", "{", "}", "]", ", ", "é"),
    *(
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name":"g","arguments":',
        '{"x":"}"}',
        '{"name": "h", "arguments": {}}',
    ),
    *('{"arguments": {"a": 2}, "name": "f"}', '[{"name": "f", "parameters": {}}', '{"name": "f", "arguments": "text"}'),
    *('{"name": "f"}', '{"name": ["f"]}', '{"name": {}, "arguments": {}}'),
)


def read(style: ToolStyle, text: str, width: int, end: str = "stop") -> tuple[str, list[list[str]], str]:
    """Content, calls and finish reason, from deltas of `width` characters each; the whole message says the same."""
    reader = ToolReader(style, NAMES)
    deltas = [delta for place in range(0, len(text), width) for delta in reader.push(text[place : place + width])]
    last, reason = reader.finish(end)
    content, calls = "", list[list[str]]()
    for delta in [*deltas, *last]:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
    message = reader.message()
    assert (message["content"] or "") == content
    assert [
        [call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())
    ] == calls
    return content, calls, reason


@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("tags", "Hello <b> world  \n", "Hello <b> world  \n", []),
        (
            "tags",
            'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>", "b": [1, {"c": "\\""}]}}\n'
            "</tool_call>\n"
            '<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
            "Hi",
            [["f", '{"a": "}</tool_call>", "b": [1, {"c": "\\""}]}'], ["g", "{}"]],
        ),
        (
            "tags",
            'a <tool_call>{"name": "unknown", "arguments": {}}</tool_call> b',
            'a <tool_call>{"name": "unknown", "arguments": {}}</tool_call> b',
            [],
        ),
        ("tags", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [["f", '{"a": 1}']]),
        ("tags", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [["f", '{"a": 1']]),
        ("tags", "a < b <tool_c", "a < b <tool_c", []),
        ("tags", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        (
            "tags",
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "",
            [["f", '{"a": 1}'], ["g", "{}"]],
        ),
        (
            "tags",
            '<tool_call>{"name": "f", "arguments": {}}\n&\n<tool_call>{"name": "g", "arguments": {}}}\n\nDone. </tool',
            "&Done. </tool",
            [["f", "{}"], ["g", "{}"]],
        ),
        ("tags", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', "", [["f", "{}"]]),
        ("tags", '<tool_call>{"name": "f", "arguments": {}, "id": 1}', "", [["f", "{}"]]),
        ("tags", '<tool_call>{"name": "f", "arguments": {}, "m": {"a": "}"}}}</tool_call>', "", [["f", "{}"]]),
        ("tags", '<tool_call>{"name": "f", "arguments": {} Done {1}.', "Done {1}.", [["f", "{}"]]),
        ("tags", '<tool_call>{"name": "f", "arguments": {}} Done.</tool_call> Bye', "Done. Bye", [["f", "{}"]]),
        ("tags", NAMED_BY_AN_OBJECT, NAMED_BY_AN_OBJECT, []),
        ("tags", NAMED_BY_A_LIST, NAMED_BY_A_LIST, []),
        ("tags", HALF_A_PAIR, HALF_A_PAIR, []),
        ("json_parameters", '{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
        (
            "json_arguments",
            '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]\n',
            "",
            [["f", '{"a": 1}'], ["g", "{}"]],
        ),
        ("json_arguments", '{"name": "f", "arguments": {} Done {1}.', "Done {1}.", [["f", "{}"]]),
        ("json_arguments", '{"name": "f", "arguments": {}, "m": {"a": "}"}}\nDone.', "Done.", [["f", "{}"]]),
        ("json_arguments", '{"name": "f", "arguments": {}, "m": "Done.', '"m": "Done.', [["f", "{}"]]),
        ("json_arguments", '{"other": 1}', '{"other": 1}', []),
        ("json_arguments", '{"name": "f"', '{"name": "f"', []),
        ("json_arguments", ' see {"name": "f", "arguments": {}}', ' see {"name": "f", "arguments": {}}', []),
    ],
)
def test_calls_are_read_however_the_text_is_cut(
    style: ToolStyle, text: str, content: str, calls: list[list[str]], width: int
) -> None:
    assert read(style, text, width) == (content, calls, "tool_calls" if calls else "stop")


@pytest.mark.parametrize("style", ["tags", "json_arguments"])
def test_any_text_is_read_alike_whole_and_in_parts(style: ToolStyle) -> None:
    rng = random.Random(5)
    for _ in range(400):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 8)))
        end, width = rng.choice(("stop", "length")), rng.choice((1, 2, 3, 5, 9))
        assert read(style, text, width, end) == read(style, text, len(text), end), (text, width, end)


def test_a_call_that_is_cut_off_keeps_the_reason() -> None:
    reader = ToolReader("tags", NAMES)
    reader.push('<tool_call>{"name": "f", "arguments": {"a')
    assert reader.finish("length")[1] == "length"
    assert reader.message()["tool_calls"][0]["function"]["arguments"] == '{"a'
    reader = ToolReader("tags", NAMES)
    reader.push('Now\n<tool_call>\n{"name": "f", "argu')
    assert reader.finish("length") == ([], "length")
    assert reader.message() == {"content": "Now"}


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("tags", '<tool_call>\n{"name": "f", "argum'),
        ("tags", "<tool_c"),
        ("json_arguments", '{"name": "f", "arguments": '),
        ("json_parameters", '[{"na'),
    ],
)
@pytest.mark.parametrize("end", ["length", "stop"])  # a stop string cuts, too
def test_the_beginning_of_a_forced_call_is_no_text(style: ToolStyle, text: str, end: str) -> None:
    for width in (1, 3, len(text)):
        reader = ToolReader(style, NAMES, only_calls=True)
        parts = [reader.push(text[place : place + width]) for place in range(0, len(text), width)]
        assert (*filter(None, parts), reader.finish(end)) == (([], end),)
        assert reader.message() == {"content": ""}


@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_second_call_without_tags_that_is_cut_off_in_its_beginning_is_dropped(end: str) -> None:
    second = '{"name": "g", "argu'
    reader = ToolReader("json_arguments", NAMES)
    reader.push('[{"name": "f", "arguments": {}}, ' + second)
    reader.finish(end)
    message = reader.message()
    assert message["content"] == (None if end == "length" else second)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}"]


def tool(name: str, strict: bool | None = None) -> Tool:
    return Tool(type="function", function=FunctionTool(name=name, strict=strict))


def test_tool_choice_decides_what_is_held() -> None:
    tools, named = (
        [tool("f"), tool("g")],
        NamedToolChoice.model_validate({"type": "function", "function": {"name": "g"}}),
    )
    assert callables(tools, "none", "tags") == Callables()
    assert held_form(callables(tools, "auto", "tags"), "tags", True, {}) == {}
    assert held_form(callables(tools, "auto", "tags"), "tags", False, {})
    assert held_form(callables([tool("f", strict=True)], None, "tags"), "tags", True, {})
    forced = callables(tools, named, "tags")
    assert [function.name for function in forced.functions] == ["g"]
    assert '\\"g\\"' in held_form(forced, "tags", True, {})["grammar"]
    for wrong, choice in ((None, "required"), ([tool("f")], named), ([tool("f"), tool("f")], "auto")):
        with pytest.raises(ApiError):
            callables(wrong, choice, "tags")  # type: ignore[arg-type]
    with pytest.raises(ApiError) as refused:
        callables(tools, "auto", None)
    assert refused.value.code == "unsupported_feature"


def test_forms_of_answers() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert json.loads(structure_fields(form, None)["json_schema"]) == schema
    assert structure_fields(ResponseFormat(type="text"), None) == {}
    assert structure_fields(ResponseFormat(type="json_object"), None) == {"json_schema": '{"type": "object"}'}
    assert structure_fields(None, StructuredOutputs(regex="a+")) == {"regex": "a+"}
    assert structure_fields(None, StructuredOutputs(choice=["a", 'b"'])) == {"grammar": 'start: "a" | "b\\""'}
    for wrong in (
        (form, StructuredOutputs(regex="a+")),
        (None, StructuredOutputs()),
        (None, StructuredOutputs(regex="a", grammar="b")),
        (ResponseFormat(type="json_schema"), None),
    ):
        with pytest.raises(ApiError):
            structure_fields(*wrong)


def test_earlier_calls_reach_the_template_as_objects() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = template_message("messages.0", {"role": "assistant", "content": "", "tool_calls": [call]})
    assert found["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for nothing in (None, "", "{}", "null"):
        assert template_message("m", calling(nothing))["tool_calls"][0]["function"]["arguments"] == {}
    deep, long = "[" * 10_000, f'{{"a": {2**64}}}'
    for text in ("[1]", "no JSON", '{"a": "cut o', '{"a": "\\ud83d"}', deep, long):  # as models write them
        found = template_message("m", calling(text))["tool_calls"][0]["function"]["arguments"]
        assert found == {"INVALID_JSON": text}
    for wrong in (calling(5), calling({"a": 1}), {"tool_calls": [{"function": {"arguments": "{}"}}]}):
        with pytest.raises(ApiError):
            template_message("m", wrong)


def calling(arguments: Any) -> dict[str, Any]:
    """A message with one call."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_arguments_that_were_cut_off_are_as_far_as_they_came() -> None:
    for text, found in (
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": 1, "b": "x\\ud83d', {"a": 1}),
        ('{"a": "\\ud83d", "b', {"INVALID_JSON": '{"a": "\\ud83d", "b'}),
        ("", {}),
    ):
        assert arguments_of(text, is_cut=True) == found


def test_what_model_files_say() -> None:
    assert tool_style(None) is None
    assert tool_style("{{ messages }}") is None
    assert tool_style("{% if tools %}<tool_call>{% endif %}") == "tags"
    assert tool_style('{{ tools }} {"name": name, "parameters": object}') == "json_parameters"
    assert tool_style('{{ tools }} {\\"name\\": name, \\"parameters\\": object}') == "json_parameters"
    assert tool_style("{{ tools }} [TOOL_CALLS]") == "json_arguments"
    assert fim_tokens({"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}, [9]) == ((9, 1), 2, 3)
    assert fim_tokens({"<fim_prefix>": 1}, []) is None


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (None, ()),
        ("{% for m in messages %}<|im_start|>{{ m['role'] }}{% endfor %}", ()),
        ("{% if messages[0]['role'] != 'system' %}", ("system",)),
        ("{%- if message.role == 'tool' or message.role == \"ipython\" %}", ("tool", "ipython")),
        (
            "{% if m['role'] in ['user', \"observation\"] %}{% if (m.role) not in ('a', 'b-c') %}",
            ("user", "observation", "a", "b-c"),
        ),
        ("{% if m.role=='user' %}{% if m.content == 'wizard' %}{% set roles = 'x' %}", ("user",)),
        ("{% if m[\"role\"] == \"user\" and x == 'y' %}{% if m.role == 'user' %}", ("user",)),
    ],
)
def test_c2_roles_that_a_template_names(template: str | None, roles: tuple[str, ...]) -> None:
    assert template_roles(template) == roles
