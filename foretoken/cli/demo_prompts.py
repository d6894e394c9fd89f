"""What `foretoken demo` asks: a few questions, a few functions to write, a few texts to change; written for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoPrompt:
    """One user's message."""

    kind: str
    name: str
    text: str


_MEETING = """Hi all,
the meeting on Monday is moved to room 12, because room 7 is being painted. It begins at ten and ends at twelve.
Please bring your notes from last month. If you cannot come, tell Anna before Friday.
Best regards, Tom"""
_CLASS = '''class Stack:
    """A stack of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()'''
_FUNCTION = '''def lookup(table, name, default=None):
    """Return table[name], or default when name is missing."""
    if name not in table:
        if default is None:
            raise KeyError(name)
        return default
    value = table[name]
    return value'''

PROMPTS = (
    DemoPrompt("chat", "the sky", "Explain to a child in a few sentences why the sky is blue."),
    DemoPrompt("chat", "a trip", "I have one day in Rome. What should I see? Answer with a short list."),
    DemoPrompt("chat", "sleep", "Give me three tips for better sleep."),
    DemoPrompt("code", "is_prime", "Write a Python function `is_prime(n)` with a docstring."),
    DemoPrompt("code", "count words", "Write a Python function that counts how often each word occurs in a file."),
    DemoPrompt("code", "a queue", "Write a Python class `Queue` with the methods push, pop and size."),
    DemoPrompt("edit", "a mail", f"Change the day of the meeting to Tuesday and repeat the whole mail:\n\n{_MEETING}"),
    DemoPrompt("edit", "a class", f"Rename the class to `Pile` and repeat the whole code:\n\n```python\n{_CLASS}\n```"),
    DemoPrompt(
        "edit", "a function", f"Rename `name` to `key` and repeat the whole function:\n\n```python\n{_FUNCTION}\n```"
    ),
)
WARM_UP = "Name three colours."
