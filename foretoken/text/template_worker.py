"""Renders chat templates in a process of its own, because a template may ask for any amount of time and memory.

Run as a script with the folders of the Jinja package as arguments. The first line of stdin sets the limits, every
further line is a job; each gets a line on stdout. Lines are JSON. A template that takes too much processor time ends
the process, and so does one that takes too much memory. Imports nothing of foretoken, so that it starts in a tenth of a
second.
"""

from __future__ import annotations

import codecs
import datetime
import json
import signal
import sys
import textwrap  # noqa: F401 - a filter imports it later, when no file can be opened any more
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

if __name__ == "__main__":
    sys.path += sys.argv[1:]

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2 import nodes, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pformat

TOO_LARGE = "too_large"
_CODECS = ("unicode_escape", "ascii", "latin-1", "utf-8", "utf-16", "utf-32", "idna", "punycode")
_FAILURES = (
    TemplateError,
    RuntimeError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OSError,
    ImportError,
)

_Value: TypeAlias = Any  # whatever a template computes with


class _RefusalError(TemplateError):
    """The template itself called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is a block with a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - the name and form are Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body of the block as a call that gives it back."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _body(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:  # noqa: ARG002 - Jinja's form
        return caller()


class _TemplateDict:
    """What templates know as `dict`: it makes dictionaries and has nothing else."""

    def __call__(self, *args: _Value, **kwargs: _Value) -> dict[_Value, _Value]:
        return dict(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: _Value, **kwargs: _Value) -> None:  # a template may set `self`, so no argument has a name
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: _Value) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r} cannot be set in a namespace")


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """As transformers compiles it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment.from_string(source)


def _to_json(
    value: _Value,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> None:
    raise _RefusalError(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """The text of a job, or what went wrong: `refused`, `broken` or `failed` with a message, `too_large`."""
    try:
        text = _compiled(job["source"]).render(**job["values"])
    except _RefusalError as error:
        return {"refused": error.message or ""}
    except TemplateSyntaxError as error:
        return {"broken": f"line {error.lineno}: {error.message}"[:2000]}
    except MemoryError:
        return {TOO_LARGE: ""}
    except _FAILURES as error:
        return {"failed": str(error)[:2000] or type(error).__name__}
    return {TOO_LARGE: ""} if len(text) > job["max_chars"] else {"text": text}


def limit(memory_bytes: int) -> None:
    """Take no more memory than that, open no file, ignore Ctrl-C, which is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.localtime()  # reads the time zone
    pformat([])
    for codec in _CODECS:
        codecs.lookup(codec)
    if sys.platform == "linux":
        import resource

        for kind, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_CORE, 0)):
            _, hard = resource.getrlimit(kind)
            most = most if hard < 0 else min(most, hard)
            resource.setrlimit(kind, (most, most))


def main() -> None:
    """Answer one job after another until stdin ends."""
    settings = json.loads(sys.stdin.readline())
    limit(settings["memory_bytes"])
    for line in sys.stdin:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])  # its signal ends the process, whatever it is doing
        try:
            reply = json.dumps(answer(json.loads(line)))
        except MemoryError:
            reply = json.dumps({TOO_LARGE: ""})
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
