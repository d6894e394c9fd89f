"""Calls that raise when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_raised: list[str] = []  # since the last `were_raised`


def expect(what: str) -> None:
    """This test makes something raise inside an engine in a way of its own."""
    _raised.append(what)


def were_raised() -> bool:
    """Whether a test has injected or expected faults since this was last asked."""
    found = bool(_raised)
    _raised.clear()
    return found


class Injected(RuntimeError):
    """The fault of a test."""


class Interrupt(BaseException):
    """What is no `Exception`, as a KeyboardInterrupt is none."""


class Fault:
    """Stands in for a method: raises at its `nth` call from now on, before or after the work was done, once or for
    ever.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        nth: int = 1,
        after: bool = False,
        kind: type[BaseException] = Injected,
        once: bool = True,
    ) -> None:
        self.call, self.nth, self.after, self.kind, self.once = call, nth, after, kind, once
        self.num_calls = self.num_raised = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.num_calls += 1
        is_due = self.num_calls == self.nth or (not self.once and self.num_calls > self.nth)
        result = None if is_due and not self.after else self.call(*arguments, **options)
        if is_due:
            self.num_raised += 1
            _raised.append(str(self.call))
            raise self.kind("injected")
        return result


class Broken:
    """A watcher that raises in the calls that are `named`."""

    def __init__(self, *named: str, kind: type[BaseException] = Injected) -> None:
        self.named, self.kind, self.is_closed = named, kind, False

    def _call(self, name: str) -> None:
        if name in self.named:
            _raised.append(name)
            raise self.kind(f"injected into {name}")

    def begin(self, state: object) -> None:
        self._call("begin")

    def round(self, view: object) -> None:
        self._call("round")

    def end(self, state: object) -> None:
        self._call("end")

    def between_steps(self) -> None:
        self._call("between_steps")

    def close(self) -> None:
        self.is_closed = True
        self._call("close")
