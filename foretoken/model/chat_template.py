"""Chat templates: Jinja from a model folder, rendered where it can do no harm and must come to an end."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foretoken.errors import CheckpointError, InputError

# A chat of thousands of messages stays far below; a template that loops without end is stopped within a second.
_MAX_ITERATIONS = 1_000_000
_MAX_REPEAT = 1_000_000


_Value: TypeAlias = Any  # whatever a template computes with


class _Refusal(TemplateError):
    """The template itself called `raise_exception`."""


class _Meter:
    """Counts loop iterations of one rendering."""

    def __init__(self) -> None:
        self._left = _MAX_ITERATIONS

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._left -= 1
            if self._left < 0:
                raise SecurityError(f"more than {_MAX_ITERATIONS:,} loop iterations")
            yield item


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the name and form are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the block as it stands."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with every loop metered and repetition bounded."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.Name("_metered", "load"), [loop.iter], [], None, None)
        return tree

    def call_binop(self, context: Context, operator: str, left: _Value, right: _Value) -> _Value:
        """Refuse powers, and products that would fill the memory."""
        sized = (str, bytes, list, tuple)
        for value, count in ((left, right), (right, left)):
            if isinstance(value, sized) and isinstance(count, int) and len(value) * count > _MAX_REPEAT:
                raise SecurityError(f"repetition beyond {_MAX_REPEAT:,} elements")
        if operator == "**":
            raise SecurityError("powers are not available in chat templates")
        return super().call_binop(context, operator, left, right)


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, str],
    where: str,
) -> str:
    """Return the text that `source` makes of a chat; `where` names the folder in errors.

    Raises:
        InputError: the template refuses the messages.
        CheckpointError: the template is broken, or does not come to an end.
    """
    try:
        template = _compiled(source)
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            _metered=_Meter(),
            **special_tokens,
        )
    except _Refusal as error:
        raise InputError("messages", list(messages), f"the chat template refuses them: {error.message}") from error
    except TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template in {where} is broken: line {error.lineno}: {error.message}") from error
    except (TemplateError, OverflowError, RecursionError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the chat template in {where} failed: {error}") from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def _to_json(
    value: _Value, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> None:
    raise _Refusal(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
