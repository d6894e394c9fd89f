"""A conversation with a model: its messages, its settings, and the commands that change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foretoken.cli.answer import style_of
from foretoken.config import SamplingParams
from foretoken.core import StepOutput
from foretoken.engine.llm import LLM
from foretoken.engine.prompts import Message
from foretoken.engine.request import GenerateOutput
from foretoken.engine.stats import RequestStats
from foretoken.errors import ConfigError
from foretoken.field_text import parse_field
from foretoken.printing.console import Console
from foretoken.text.detokenizer import Detokenizer

# What /set changes: the numbers of `SamplingParams` that make sense for one answer at a time.
SETTINGS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
)
_OFF = "none"  # no seed
COMMANDS = {
    "/help": "this list",
    "/set NAME VALUE": "change how tokens are chosen; without a value, show the settings",
    "/colour": "show where each token came from by its colour, or no longer",
    "/stats": "what the conversation has cost so far",
    "/reset": "begin a new conversation; the system message stays",
    "/exit": "end, as the end of input does; Ctrl-C stops an answer",
}
_NAMES = frozenset({"/clear", "/color", *(usage.split()[0] for usage in COMMANDS)})


@dataclass
class ChatTotals:
    """Sums over the answers that came to their end, resets or not."""

    num_answers: int = 0
    num_emitted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    decode_s: float = 0.0
    plain_s: float = 0.0
    compared_s: float = 0.0

    def add(self, stats: RequestStats) -> None:
        """Count one answer."""
        self.num_answers += 1
        for one in fields(self)[1:]:
            setattr(self, one.name, getattr(self, one.name) + getattr(stats, one.name))

    def lines(self) -> list[str]:
        """For a reader, a fact on each line: they fit into 40 columns."""
        speed = self.num_emitted / self.decode_s if self.decode_s > 0 else 0.0
        found = [
            f"{self.num_answers} answers, {self.num_emitted} tokens",
            f"{speed:.1f} tokens/s",
            f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens cached",
        ]
        if self.num_drafted:
            rate = self.num_accepted / self.num_drafted
            found.append(f"{self.num_accepted} of {self.num_drafted} draft tokens accepted ({rate:.0%})")
        if self.compared_s > 0:
            found.append(f"{self.plain_s / self.compared_s:.2f}x plain decoding (estimated)")
        return found


@dataclass
class Talk:
    """What is kept between two answers. `opening` stands before every conversation."""

    llm: LLM
    params: SamplingParams
    opening: list[Message] = field(default_factory=list)
    is_coloured: bool = False
    messages: list[Message] = field(init=False)
    totals: ChatTotals = field(default_factory=ChatTotals)

    def __post_init__(self) -> None:
        self.messages = list(self.opening)

    def answer(self, text: str, on_piece: Callable[[str, str | None], None]) -> GenerateOutput:
        """Answer a message; `on_piece` gets each piece of the answer, with its style if tokens are coloured.

        Message and answer are kept, also where this is interrupted half-way; a message that is refused is not.

        Raises:
            ForetokenError: the message cannot be answered, or the answer failed.
        """
        asked, said = [*self.messages, {"role": "user", "content": text}], list[str]()
        styled = StyledPieces(Detokenizer(self.llm.tokenizer)) if self.is_coloured and self.llm.tokenizer else None

        def on_step(outputs: list[StepOutput]) -> None:
            for output in outputs:
                said.append(output.text)
                for piece, style in [(output.text, None)] if styled is None else styled.of(output):
                    on_piece(piece, style)

        try:
            (output,) = self._outputs(asked, on_step)
            if output.error is not None:
                raise output.error
            self.totals.add(output.stats)
        except KeyboardInterrupt:
            self._keep(asked, said)
            raise
        self._keep(asked, said)
        return output

    def reset(self) -> None:
        """Begin again."""
        self.messages = list(self.opening)

    def set(self, name: str, text: str) -> None:
        """Change a setting to the value that `text` means.

        Raises:
            ConfigError: no such setting, or a wrong value.
        """
        if name not in SETTINGS:
            raise ConfigError("set", name, f"choose one of {', '.join(SETTINGS)}")
        value: Any = None if name == "seed" and text == _OFF else parse_field(SamplingParams, name, text)
        self.params = replace(self.params, **{name: value})

    def settings(self) -> list[str]:
        """The settings, a line each."""
        values = {name: getattr(self.params, name) for name in SETTINGS}
        return [f"{name} {_OFF if value is None else format(value, 'g')}" for name, value in values.items()]

    def command(self, line: str, console: Console, is_typed: bool) -> bool:
        """Do what a line asks for; False if it is no command. In a file any other line that begins with / is a message.

        Raises:
            ConfigError: a command that does not exist, or that lacks something.
        """
        name, *rest = line.split() or [""]
        if not name.startswith("/") or not (is_typed or name in _NAMES):
            return False
        if name in ("/reset", "/clear") and not rest:
            self.reset()
            _print(console, ["a new conversation"])
        elif name == "/set" and len(rest) in (0, 2):
            if rest:
                self.set(*rest)
            _print(console, [line for line in self.settings() if not rest or line.startswith(f"{rest[0]} ")])
        elif name == "/stats" and not rest:
            _print(console, self.totals.lines())
        elif name in ("/colour", "/color") and not rest:
            self.is_coloured = not self.is_coloured
            _print(console, ["colours: on" if self.is_coloured else "colours: off"])
        elif name == "/help" and not rest:
            _print(console, [f"{usage}: {words}" for usage, words in COMMANDS.items()])
        else:
            raise ConfigError("command", line, f"choose one of {', '.join(COMMANDS)}; a message cannot begin with /")
        return True

    def _outputs(self, asked: list[Message], on_step: Callable[[list[StepOutput]], None]) -> list[GenerateOutput]:
        """The answer in the target's chat template; without one, the continuation of the text."""
        if self.llm.tokenizer is not None and self.llm.tokenizer.chat_template is None:
            return self.llm.generate([continued_text(asked)], self.params, on_step=on_step)
        return self.llm.chat(asked, self.params, on_step=on_step)

    def _keep(self, asked: list[Message], said: list[str]) -> None:
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def continued_text(messages: Sequence[Message]) -> str:
    """A conversation as plain text, for a model without a chat template: an answer goes on where its message ends, and
    every other message begins on a line of its own.
    """
    text = ""
    for message in messages:
        is_new_line = message["role"] != "assistant" and text != "" and not text.endswith("\n")
        text += ("\n" if is_new_line else "") + str(message["content"])
    return text


class StyledPieces:
    """Splits an answer's text into its tokens' parts; what a stop string withholds is not shown."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._parts: list[tuple[str, str]] = []  # texts that were not shown yet, each with its style

    def of(self, output: StepOutput) -> list[tuple[str, str | None]]:
        """The text of a step's output, in the styles of the tokens that wrote it."""
        for token, origin in zip(output.token_ids, output.provenance, strict=True):
            self._parts.append((self._detokenizer.push(token), style_of(origin)))
        if output.finish_reason is not None and self._parts:
            self._parts.append((self._detokenizer.flush(), self._parts[-1][1]))
        shown: list[tuple[str, str | None]] = []
        left = len(output.text)
        while left > 0 and self._parts:
            text, style = self._parts.pop(0)
            if len(text) > left:
                self._parts.insert(0, (text[left:], style))
            shown.append((text[:left], style))
            left -= len(shown[-1][0])
        return shown


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.line(line, style="dim")
