"""Answers that are held to a form: JSON under a schema, and calls of functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretoken.backend.requesting import ApiChoice, ApiRequest
from foretoken.measure.certify.asking import CertifySession, attempt, own_rules, streamed
from foretoken.measure.certify.greedy import compared, first
from foretoken.measure.checks import Check

# Every value is one of a few, some of characters with several bytes, so that answers of any model are short.
_VALUES: Mapping[str, list[Any]] = {"place": ["Köln – Süd", "東京", "café 🙂"], "sure": [True, False]}
_SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": values} for name, values in _VALUES.items()},
    "required": list(_VALUES),
    "additionalProperties": False,
}
_TASK = "Where is it, and are you sure? Answer as JSON."
_MAX_TOKENS = 256
_NUM_SEEDS = 4
_FUNCTION = "look_up"
_TOOLS = [
    {"type": "function", "function": {"name": _FUNCTION, "description": "Looks a place up.", "parameters": _SCHEMA}}
]
_JSON, _CALLS = "JSON fits its schema", "tool calls fit their function"


def form_requests(session: CertifySession) -> list[ApiRequest]:
    """Requests held to the schema, the first greedy, the others sampled."""
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": _SCHEMA, "strict": True}}
    return _requests(session, {"response_format": form})


def _requests(session: CertifySession, more: Mapping[str, object]) -> list[ApiRequest]:
    text, messages = (_TASK, ()) if not session.conversations else ("", (("user", _TASK),))
    draws: list[dict[str, object]] = [{"temperature": 0.0}]
    draws += [{"temperature": 1.0, "seed": session.options.seed + number} for number in range(_NUM_SEEDS)]
    fields = [{"max_tokens": _MAX_TOKENS, **draw, **more} for draw in draws]
    return [ApiRequest(text, messages, one, session.num_logprobs) for one in fields]


def check_forms(session: CertifySession) -> Iterator[Check]:
    """JSON and calls are whole and valid, greedy and sampled, at once and in chunks; greedy ones are A's."""
    yield attempt(_JSON, "whole", lambda: _valid(session, _JSON, "whole", form_requests(session)))
    yield attempt(_JSON, "streamed", lambda: _valid(session, _JSON, "streamed", streamed(form_requests(session))))
    yield attempt("the same JSON", "temperature 0", lambda: _same(session, "the same JSON"))
    if not session.conversations:
        yield Check(_CALLS, "", "not asked", found="a side is asked no conversations")
        return
    requests = _requests(session, {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    yield attempt(_CALLS, "whole", lambda: _valid(session, _CALLS, "whole", requests))
    yield attempt(_CALLS, "streamed", lambda: _valid(session, _CALLS, "streamed", streamed(requests)))


def _same(session: CertifySession, name: str) -> Check:
    a, b = map(first, session.both(form_requests(session)[:1]))
    return compared(name, "temperature 0", a, b, session.options.tolerance)


def _valid(session: CertifySession, name: str, where: str, requests: Sequence[ApiRequest]) -> Check:
    problem = _json_problem if name == _JSON else _call_problem
    a, b = map(first, session.both(requests))
    known = [pair for pair in zip(a, b, strict=True) if "length" not in (one.finish_reason for one in pair)]
    problems = [problem(one) for one, _ in known], [problem(other) for _, other in known]
    check = own_rules(name, where, problems, sum(len(one.pieces) for one in b), "whole, and allowed by the schema")
    return check if known else Check(name, where, "undecided", found="no answer came to its end")


def _json_problem(answer: ApiChoice) -> str:
    return _value_problem(answer.text.removeprefix(answer.thinking))


def _call_problem(answer: ApiChoice) -> str:
    if not answer.calls:
        return "no call"
    for name, arguments in answer.calls:
        if name != _FUNCTION:
            return f"calls {name!r}"
        if problem := _value_problem(arguments):
            return problem
    return ""


def _value_problem(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError as error:
        return f"{text[:60]!r} is no JSON: {error}"
    if not isinstance(found, dict) or set(found) != set(_VALUES):
        return f"{text[:60]!r} has other keys"
    wrong = [name for name, values in _VALUES.items() if found[name] not in values]
    return f"{wrong[0]} is {found[wrong[0]]!r}" if wrong else ""
