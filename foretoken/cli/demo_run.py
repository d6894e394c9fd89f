"""The measuring of `foretoken demo`: each prompt answered with each setting, and what that took from end to end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from foretoken.config import PLAIN, SamplingParams, SpecConfig

if TYPE_CHECKING:
    from foretoken.engine.driver import OnStep
    from foretoken.engine.llm import LLM
    from foretoken.engine.request import GenerateOutput


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
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class DemoAnswer:
    """One answer; `seconds` from the request to the last token, the prompt included."""

    prompt: DemoPrompt
    setting: str
    text: str
    token_ids: tuple[int, ...]
    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class DemoTotal:
    """Several answers of one setting together."""

    seconds: float
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answers by the seconds from end to end."""
        return self.num_tokens / self.seconds

    @property
    def emitted_per_step(self) -> float:
        """Tokens that a step of the target brought."""
        return self.num_tokens / self.num_steps

    def as_dict(self) -> dict[str, float]:
        """Plain values, for JSON."""
        return {"tokens_per_s": self.tokens_per_s, **asdict(self)}


def total_of(answers: Sequence[DemoAnswer], setting: str, kind: str | None = None) -> DemoTotal:
    """The answers of a setting together, those of one kind of prompt or of all."""
    own = [one for one in answers if one.setting == setting and kind in (None, one.prompt.kind)]
    return DemoTotal(
        num_tokens=sum(len(one.token_ids) for one in own),
        seconds=sum(one.seconds for one in own),
        num_steps=sum(one.num_steps for one in own),
        num_drafted=sum(one.num_drafted for one in own),
        num_accepted=sum(one.num_accepted for one in own),
    )


def kinds_of(answers: Sequence[DemoAnswer]) -> list[str]:
    """The kinds of prompts, each once, in their order."""
    return list(dict.fromkeys(one.prompt.kind for one in answers))


def num_identical(answers: Sequence[DemoAnswer], setting: str) -> int:
    """How many answers of a setting are the tokens of plain decoding."""
    plain = {one.prompt: one.token_ids for one in answers if one.setting == PLAIN}
    return sum(one.token_ids == plain[one.prompt] for one in answers if one.setting == setting)


class DemoRun:
    """Answers prompts with several settings in one engine, in which nothing is remembered: each answer has its own
    tenant, so no prompt's cache is shared, and drafters are reset.

    `on_step` is called with the setting and what each step brought.
    """

    def __init__(self, llm: LLM, specs: Mapping[str, SpecConfig], max_tokens: int) -> None:
        self._llm, self._specs = llm, specs
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._tenants = map(str, itertools.count())

    def warm_up(self) -> None:
        """A short answer of every setting, which is not counted."""
        for setting in self._specs:
            self._answer(DemoPrompt("", "", WARM_UP), setting, _WARM_UP_TOKENS, None)

    def answers(
        self, prompts: Sequence[DemoPrompt], begin: Callable[[DemoPrompt, str], OnStep | None]
    ) -> Iterator[DemoAnswer]:
        """Every prompt with every setting; in every other prompt the last setting goes first, so that a machine that
        becomes faster or slower favours none. `begin` gets what comes, and may return a function for its steps.

        Raises:
            ForetokenError: an answer failed.
        """
        settings = list(self._specs)
        for number, prompt in enumerate(prompts):
            for setting in settings if number % 2 == 0 else reversed(settings):
                yield self._answer(prompt, setting, self._params.max_tokens, begin(prompt, setting))

    def _answer(self, prompt: DemoPrompt, setting: str, max_tokens: int, on_step: OnStep | None) -> DemoAnswer:
        llm, spec = self._llm, self._specs[setting]
        llm.reset_drafters(spec)
        params = replace(self._params, max_tokens=max_tokens, tenant=next(self._tenants))
        began_s = time.perf_counter()
        output = _ask(llm, prompt.text, params, spec, on_step)
        seconds = time.perf_counter() - began_s
        if output.error is not None:
            raise output.error
        stats = output.stats
        return DemoAnswer(
            prompt,
            setting,
            output.text,
            tuple(output.token_ids),
            seconds,
            stats.num_steps,
            stats.num_drafted,
            stats.num_accepted,
        )


def _ask(llm: LLM, text: str, params: SamplingParams, spec: SpecConfig, on_step: OnStep | None) -> GenerateOutput:
    """The answer in the target's chat template; without one, the continuation of the text."""
    if llm.tokenizer is not None and llm.tokenizer.chat_template is not None:
        return llm.chat([{"role": "user", "content": text}], params, spec, on_step)[0]
    return llm.generate([text], params, spec, on_step)[0]
