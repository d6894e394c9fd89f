"""From what a user wrote (schema, regular expression, Lark) to a grammar that llguidance follows, within limits.

Three choices hold for every grammar:

- `no_forcing`: by default llguidance's mask leaves only its own tokenisation of a text that is forced. Here every token
  is allowed from which the structure can still be completed, so that the distribution is the target's own, conditioned.
- The end of the answer is a column of our own behind the model's; llguidance never sees the model's end tokens.
- Limits are given in full, and a grammar is first compiled in a process that can be ended (`grammar_trial`).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foretoken.config import SamplingParams
from foretoken.errors import InputError, install
from foretoken.text import grammar_trial
from foretoken.text.json_schema import WHITESPACE, prepared_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from foretoken.text.tokenizer import Tokenizer

Field = Literal["json_schema", "regex", "grammar"]

# Measured on a 2-core machine with 32k tokens. Honest schemas (every format, enums of 5,000 values, 100 optional
# properties) needed at most half of each; the slowest step that a hostile grammar got out of these took 0.2 s.
LIMITS: dict[str, int | bool] = {
    "max_items_in_row": 1_000,  # open alternatives at one place: about 250 optional properties of one object
    "step_max_items": 10_000,  # parser items in one step; the library's 50,000 allowed steps of 3.5 s
    "step_lexer_fuel": 100_000,  # regex work in one step, about 10 ms
    "initial_lexer_fuel": 1_000_000,  # regex work when compiling, about 100 ms
    "max_lexer_states": 50_000,  # 1 kB each, kept as long as the compiled grammar: 50 MB
    "max_grammar_size": 500_000,  # symbols
    "verbose_errors": False,  # the grammar would stand in the message again
}
_MAX_GBNF_CHARS = 16 * 1024
MAX_TEXT_BYTES = 512 * 1024  # a long alternation takes 400 times its own size when compiled
TRIAL_DEADLINE_S = 5  # of a processor; the largest honest schema seen took 1.2 s
# Until a trial is given up, whatever other processes leave it of the machine. Only Linux tells their time apart.
_TRIAL_WAIT_S = 30.0 if sys.platform == "linux" else float(TRIAL_DEADLINE_S)
_TRIAL_MEMORY_BYTES = 2 << 30

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_HEAVY = re.compile(
    r"fuel|too (many|large|big|slow|deeply)|recursion limit|current row has|exceed|unable to determine|panic", re.I
)
_UNSUPPORTED = re.compile(
    r"unimplemented|not supported|only supported|unsupported|unknown format|not present in a registry|"
    r"failed to generate",  # a regular expression for the whole range of 64-bit numbers
    re.I,
)
_IMPOSSIBLE = re.compile(r"unsatisfiable|NoExtension", re.I)
_TEMPERATURE = re.compile(r"^\s*[?!]?[a-z_][\w-]*\s*\[[^\]\n]*\btemperature\s*=", re.M)
DEAD_END = "NoExtensionBias"  # llguidance's word for a place from which no token leads on


def given_field(params: SamplingParams) -> Field:
    """Which of the three fields holds the structure of a structured request."""
    fields: tuple[Field, ...] = ("json_schema", "regex", "grammar")
    return next(field for field in fields if getattr(params, field) is not None)


def grammar_text(field: Field, value: Mapping[str, Any] | str) -> str:
    """llguidance's own form of what the user wrote.

    Raises:
        InputError: no JSON, no JSON schema, numbers that it cannot be held to, or too long.
    """
    size = len(value.encode()) if isinstance(value, str) else 0
    if field == "json_schema":
        schema = prepared_schema(field, value, WHITESPACE)
        grammars = [{"lark_grammar": f"start: @answer{_OPTIONS}"}, {"name": "answer", "json_schema": schema}]
    elif field == "regex":
        from llguidance import LLMatcher

        (grammar,) = json.loads(LLMatcher.grammar_from_regex(str(value)))["grammars"]
        grammars = [{"lark_grammar": grammar["lark_grammar"] + _OPTIONS}]
    else:
        if _TEMPERATURE.search(str(value)):
            raise InputError(
                field, value, "the temperature of a rule is not supported; set the request's own `temperature`"
            )
        grammars = [{"lark_grammar": f"{value}{_OPTIONS}"}]
    text = json.dumps({"grammars": grammars})
    if max(size, len(text)) > MAX_TEXT_BYTES:
        raise InputError(field, value, f"is longer than {MAX_TEXT_BYTES // 1024} kB; make it smaller")
    return text


def lark_of_gbnf(text: str) -> str:
    """A grammar in llama.cpp's notation (GBNF) in that of Lark.

    Raises:
        InputError: it is none.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > _MAX_GBNF_CHARS:
        raise InputError("grammar", None, f"must have at most {_MAX_GBNF_CHARS} characters")
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:
        raise InputError("grammar", None, "is no grammar in GBNF") from error


class Vocabulary:
    """The model's columns for llguidance: the bytes of each, special tokens, and how a text is tokenised."""

    eos_token_id = None  # llguidance adds a column of its own behind the last one
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, token_bytes: Mapping[int, bytes], size: int) -> None:
        self._tokenizer = tokenizer
        self.special = {own: token_bytes[own].decode() for own in tokenizer.special_ids if own < size}
        self.tokens = [token_bytes.get(own, b"") for own in range(size)]  # a column without text is never allowed
        self.special_token_ids = sorted(self.special)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text inside another one: no BOS, and no space in front as at the beginning of a text."""
        if not isinstance(text, str):
            raise TypeError(f"text, not {type(text).__name__}")  # llguidance asks whether bytes would do
        encode = self._tokenizer.encode
        head, ids = encode("\x02", False), encode(f"\x02{text}", False)
        return ids[len(head) :] if ids[: len(head)] == head else encode(text, False)


def build_vocabulary(
    tokenizer: Tokenizer | None, size: int, field: Field, value: object
) -> tuple[Vocabulary, LLTokenizer]:
    """The columns of a model with `size` of them, for us and for llguidance.

    Raises:
        InputError: no llguidance, no tokenizer, or one that does not say what its tokens stand for.
    """
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise InputError(field, value, f"needs llguidance: {install('structured')}") from error
    if tokenizer is None:
        remedy = "needs a tokenizer, and this model folder has none; add its tokenizer.json, or leave the field out"
        raise InputError(field, value, remedy)
    token_bytes = tokenizer.token_bytes
    if token_bytes is None:
        reason = f"the tokenizer in {tokenizer.folder} does not say which bytes its tokens stand for"
        raise InputError(field, value, f"{reason}; only byte-level and SentencePiece ones do")
    vocabulary = Vocabulary(tokenizer, token_bytes, size)
    return vocabulary, LLTokenizer(TokenizerWrapper(vocabulary))


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of the answer, with a lexer of its own; its error state tells what is wrong."""
    from llguidance import LLMatcher, LLParserLimits

    limits: Any = LIMITS
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))


def try_grammar(vocabulary: Vocabulary, grammar: str) -> str:
    """llguidance's complaint about a grammar, empty if it has none, from a process that cannot outlive its deadline.

    The deadline is in seconds of a processor: a grammar is no slower because the machine is busy.
    """
    import llguidance

    job = {
        "library": str(Path(llguidance.__file__).parents[1]),
        "grammar": grammar,
        "limits": LIMITS,
        "memory_bytes": _TRIAL_MEMORY_BYTES,
        "processor_s": TRIAL_DEADLINE_S,
        "size": len(vocabulary.tokens),
        "special": vocabulary.special,
    }
    command = [sys.executable, "-I", "-S", str(Path(grammar_trial.__file__))]
    try:
        done = subprocess.run(
            command, input=json.dumps(job).encode(), capture_output=True, timeout=_TRIAL_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"too slow: not compiled after {_TRIAL_WAIT_S:g} s"
    if sys.platform == "linux" and done.returncode == -signal.SIGXCPU:
        return f"too slow: not compiled in {TRIAL_DEADLINE_S} s of a processor"
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"too large: the compiler ended with status {done.returncode} {last}"
    complaint: str = json.loads(done.stdout)
    return complaint


def refusal(field: Field, value: object, complaint: str) -> InputError:
    """The error for a structure that llguidance will not compile."""
    reason = _reason(complaint)
    if _IMPOSSIBLE.search(complaint):
        why = "it contradicts itself, or this model's vocabulary cannot write it" if DEAD_END in complaint else reason
        return InputError(field, value, f"no answer fits it ({why}); loosen it")
    if _UNSUPPORTED.search(complaint):
        return InputError(field, value, f"uses what is not supported ({reason}); leave that out")
    if _HEAVY.search(complaint):
        return InputError(field, value, f"is too large or too slow to follow ({reason}); {_LIGHTER}")
    return InputError(field, value, f"is not valid ({reason}); correct it")


def breakdown(field: Field, value: object, complaint: str) -> InputError:
    """The error for a structure that cannot be followed any further while the answer is being written."""
    if DEAD_END in complaint:
        remedy = "asks at this point of the answer for text that this model's vocabulary cannot write; loosen it"
    elif _HEAVY.search(complaint):
        remedy = f"became too slow to follow in the middle of the answer ({_reason(complaint)}); {_LIGHTER}"
    else:
        remedy = f"could not be followed to the end of the answer ({_reason(complaint)}); simplify it, and report this"
    return InputError(field, value, remedy)


_MAX_REASON_CHARS = 160
_LIGHTER = "use fewer and shorter repetitions, alternatives and nested parts"


def _reason(complaint: str) -> str:
    """The one line of a complaint that says what is wrong."""
    said = complaint.split("<backtrace>")[0].replace("<non-verbose/>", "")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (named or lines or ["no reason given"])[0]
    return line if len(line) <= _MAX_REASON_CHARS else line[: _MAX_REASON_CHARS - 3] + "..."
