"""How to choose tokens: `SamplingParams`, and the checks of plain values that every configuration shares."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.errors import ConfigError, InputError
from foretoken.option import Settings

TEMPERATURES = (0.0, 100.0)
PRIORITIES = (-100, 100)
DEADLINES_S = (0.0, 1e9)  # the first excluded
_TOO_LONG = 10**4000  # whole numbers without another bound
# What the makers of a model may advise, see `model.advised`.
ADVISED_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Groups of these options: how tokens are chosen, and what else an answer is to have.
SAMPLING = "Sampling"
ANSWER = "Answer"


def parse_biases(name: str, entries: Sequence[str]) -> dict[int, float]:
    """The biases that texts ID=VALUE give; a token that is named twice would have two.

    Raises:
        InputError: no such text, or a token with two biases; names `name`.
    """
    found: dict[int, float] = {}
    for entry in entries:
        token, value = _parse_bias(name, entry)
        if token in found:
            remedy = f"token {token} has the bias {found[token]:g} already; give one of the two"
            raise InputError(name, f"{token}={value:g}", remedy)
        found[token] = value
    return found


def _parse_bias(name: str, entry: str) -> tuple[int, float]:
    token, _, value = entry.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(name, entry, "must be a token id, an equals sign and a number, such as 42=-100") from None


_sampling, _answer = Settings(SAMPLING), Settings(ANSWER)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, under the OpenAI names.

    Temperature 0 takes the most likely token (lowest id on ties). Everything applies at every position, drafted or not,
    in the order of transformers: logit_bias, repetition_penalty, presence and frequency penalty, bad_words, min_tokens,
    structure; then temperature, top_k, top_p, min_p. `seed=None` draws a fresh seed for each request.

    - `repetition_penalty` looks at prompt and output, `presence_penalty` and `frequency_penalty` at the output alone.
    - `bad_words`: a text never appears in the answer, inside longer words neither, whatever tokens would spell it (a
      space bans every token with a space in it). A list of token ids bans that sequence, begun in the prompt or not, as
      transformers' `bad_words_ids` does. With a tokenizer that does not define the text of each token (WordPiece),
      a text stands for its own token sequences, with and without a space before it.
    - `stop_token_ids` end the answer as the model's end tokens do, under `ignore_eos`, too. Before `min_tokens` no end
      token is drawn and no stop string ends the answer. `include_stop_str_in_output` leaves in the text what ended it.
    - `allowed_token_ids`: no other token is drawn, so an end token only if it is among them.
    - `skip_special_tokens=False` writes special tokens into the text as they are spelt.
    - `n` answers are drawn for one prompt; answer i > 0 has a seed of its own, derived from `seed`.
    - `logprobs=k` reports the log-probability of every emitted token and of the k likeliest (0: of the token alone).
      `logprobs_of="distribution"` means the distribution the token was drawn from (at temperature 0 that distribution
      before the argmax, at temperature 1), `"model"` the model's own softmax before anything above. `prompt_logprobs=k`
      is always the model's own. With `logprob_token_ids` these tokens and the emitted one are reported in place of the
      likeliest.
    - At most one of `json_schema`, `regex`, `grammar` (Lark syntax) constrains the answer.
    - A smaller `priority` is served earlier. `deadline_s` seconds after its arrival the answer is wanted: among
      requests of equal priority and age the earliest deadline goes first; a late request is still served. Neither
      changes an answer.
    - `prediction` (OpenAI) is the text, or the token ids, that the answer is expected to resemble; drafter `predicted`
      drafts it (`SpecConfig`).
    - Requests share cached keys and values, and answers that drafter `suffix` learns from, only within one `tenant`.
      The empty name is a tenant too.
    - `slice` names the kind of text ("code", "chat"). Estimates of acceptance for a new request begin with those of
      earlier requests of the same name.
    """

    max_tokens: int = _sampling(64, "Longest answer, in tokens.")
    temperature: float = _sampling(0.0, "0 takes the most likely token; 1 samples the model's own distribution.")
    top_p: float = _sampling(1.0, "Sample from the smallest set of tokens that holds this probability.")
    top_k: int = _sampling(0, "Sample from the k most likely tokens; 0 = all.")
    min_p: float = _sampling(0.0, "Drop tokens less likely than this share of the most likely token's probability.")
    seed: int | None = _sampling(None, "Repeat the same random choices.")
    stop: str | Sequence[str] | None = _sampling((), "Stop before this text; may be given several times.", repeats=True)
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = _sampling(False, "Continue after an end-of-text token.")
    presence_penalty: float = _sampling(0.0, "Subtracted from the logit of every token that is already in the answer.")
    frequency_penalty: float = _sampling(0.0, "Subtracted from a token's logit once for each time it is in the answer.")
    repetition_penalty: float = _sampling(1.0, "Divides the logits of tokens in prompt and answer; 1 = off.")
    logit_bias: Mapping[int, float] | None = _sampling(
        None, "ID=VALUE added to a token's logit; may be given several times.", repeats=True, read=parse_biases
    )
    bad_words: Sequence[str | Sequence[int]] = _sampling(
        (),
        "A text that must not appear in the answer, not even inside a word; may be given several times.",
        name="bad_word",
        repeats=True,
    )
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = _sampling(0, "Shortest answer, in tokens.")
    n: int = _answer(1, "Answers to draw.")
    logprobs: int | None = _answer(
        None, "Report log-probabilities of each token and of this many most likely alternatives."
    )
    logprobs_of: Literal["distribution", "model"] = "distribution"
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = _answer(None, "The same for the prompt's tokens, under the model's own distribution.")
    json_schema: Mapping[str, Any] | str | None = _answer(
        None, "Constrain the answer to this JSON schema: the text, @FILE, or -."
    )
    regex: str | None = _answer(None, "Constrain the answer to this regular expression.")
    grammar: str | None = _answer(None, "Constrain the answer to this Lark grammar: the text, @FILE, or -.")
    priority: int = _answer(0, "Smaller is served earlier.")
    deadline_s: float | None = _answer(
        None, "Seconds within which the answer is wanted; requests are ordered by it.", flags=("--deadline",)
    )
    prediction: str | Sequence[int] | None = _answer(
        None, "The answer you expect, for --drafter predicted: the text, @FILE, or -."
    )
    tenant: str = ""
    slice: str = ""

    def __post_init__(self) -> None:
        check_no_arrays(self)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif self.stop is None or isinstance(self.stop, list | tuple):
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        else:
            raise InputError("stop", self.stop, "must be a text or a list of texts")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InputError("stop", text, "each stop string must be a text of at least one character")
            check_text("stop", text)
        self._check_distribution()
        self._check_output()
        self._check_structure()
        self._check_service()
        self._check_prediction()

    def _check_distribution(self) -> None:
        check_number("temperature", self.temperature, *TEMPERATURES)
        check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        check_number("min_p", self.min_p, low=0.0, high=1.0)
        check_whole("top_k", self.top_k, low=0)
        check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        check_number("repetition_penalty", self.repetition_penalty, low=1e-3, high=100.0)
        bias = self.logit_bias
        if bias is not None:
            if not isinstance(bias, Mapping):
                raise InputError("logit_bias", bias, "must map token ids to numbers")
            for token, value in bias.items():
                check_whole("logit_bias", token, low=0)
                check_number("logit_bias", value, low=-100.0, high=100.0)
            object.__setattr__(self, "logit_bias", dict(bias))
        if isinstance(self.bad_words, str) or not isinstance(self.bad_words, list | tuple):
            raise InputError("bad_words", self.bad_words, "must be a list of texts or of lists of token ids")
        for word in self.bad_words:
            if not isinstance(word, str | list | tuple) or not word:
                raise InputError("bad_words", word, "each must be a text or a list of token ids, and not empty")
            if isinstance(word, str):
                check_text("bad_words", word)
        object.__setattr__(self, "bad_words", tuple(w if isinstance(w, str) else tuple(w) for w in self.bad_words))

    def _check_output(self) -> None:
        check_whole("max_tokens", self.max_tokens, low=1)
        check_whole("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise InputError("min_tokens", self.min_tokens, f"must be at most max_tokens, {self.max_tokens}")
        check_whole("n", self.n, low=1, high=1024)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_flag(name, getattr(self, name))
        if self.seed is not None:
            check_whole("seed", self.seed, low=0, high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low=0, high=1024)
        if self.logprobs_of not in ("distribution", "model"):
            raise InputError("logprobs_of", self.logprobs_of, "must be 'distribution' or 'model'")
        self._check_listed()

    def _check_listed(self) -> None:
        for name in ("logprob_token_ids", "stop_token_ids", "allowed_token_ids"):
            listed = getattr(self, name)
            if listed is None and name == "allowed_token_ids":
                continue
            if not isinstance(listed, list | tuple):
                raise InputError(name, listed, "must be a list of token ids")
            for token in listed:
                check_whole(name, token, low=0)
            object.__setattr__(self, name, tuple(dict.fromkeys(listed)))
        if self.logprob_token_ids and self.logprobs is None:
            raise InputError("logprob_token_ids", self.logprob_token_ids, "needs logprobs, such as logprobs=0")
        if self.allowed_token_ids == ():
            raise InputError("allowed_token_ids", [], "allows no token at all; leave it out or list tokens")

    def _check_structure(self) -> None:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            remedy = f"the answer has a structure already ({given[0]}); give one of the two"
            raise InputError(given[1], getattr(self, given[1]), remedy)
        if self.json_schema is not None and not isinstance(self.json_schema, str | Mapping):
            raise InputError("json_schema", self.json_schema, "must be a schema as a dictionary or as JSON text")
        if isinstance(self.json_schema, str):
            check_text("json_schema", self.json_schema)
        elif self.json_schema is not None:  # a copy: requests are prepared, and looked at again, when it has changed
            object.__setattr__(self, "json_schema", plain_schema(self.json_schema))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InputError(name, value, "must be a text of at least one character")
        for name in given:
            if isinstance(getattr(self, name), str):
                check_text(name, getattr(self, name))

    def _check_service(self) -> None:
        check_whole("priority", self.priority, *PRIORITIES)
        if self.deadline_s is not None:
            check_number("deadline_s", self.deadline_s, *DEADLINES_S, open_low=True)
        for name in ("tenant", "slice"):
            if not isinstance(getattr(self, name), str):
                raise InputError(name, getattr(self, name), "must be a text")
            check_text(name, getattr(self, name))

    def _check_prediction(self) -> None:
        if self.prediction is None:
            return
        if not isinstance(self.prediction, str | list | tuple) or not self.prediction:
            raise InputError("prediction", self.prediction, "must be a text or a list of token ids, and not empty")
        if isinstance(self.prediction, str):
            check_text("prediction", self.prediction)
        else:
            object.__setattr__(self, "prediction", tuple(self.prediction))

    @property
    def greedy(self) -> bool:
        """Whether the target's distribution is a point: the argmax."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p or min_p take tokens away."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def structured(self) -> bool:
        """Whether the answer must follow a schema, a regular expression or a grammar."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop


def plain_schema(value: Mapping[str, Any] | str) -> Any:  # noqa: ANN401 - whatever JSON may be
    """A JSON schema, a mapping or JSON text, in Python's own types: a copy.

    Raises:
        InputError: no JSON.
    """
    try:
        return json.loads(json.dumps(json.loads(value) if isinstance(value, str) else dict(value), allow_nan=False))
    except RecursionError as error:  # nor can it be shown
        raise InputError("json_schema", "...", "is nested too deeply; use $ref for what repeats") from error
    except (TypeError, ValueError) as error:
        remedy = f"is not JSON ({error}); give a JSON schema as a dictionary or as JSON text"
        raise InputError("json_schema", value, remedy) from error


def check_no_arrays(config: object) -> None:
    """No field is an array or a tensor, which cannot be compared.

    Raises:
        InputError: names the field.
    """
    for name, value in vars(config).items():
        if getattr(value, "shape", None):
            raise InputError(name, value, "must not be an array; x.tolist() makes a list of it")


def check_number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    """A finite number from `low`, itself only unless `open_low`, to `high`.

    Raises:
        InputError: names the field.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise InputError(name, value, "must be a finite number" + _of_a_library(value, "float"))
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InputError(name, value, f"must lie in {bracket}{low:g}, {high:g}]")


def check_temperatures(name: str, values: Sequence[object]) -> None:
    """Temperatures to measure at, one or more; 0 is greedy.

    Raises:
        InputError: names the field.
    """
    if not values:
        raise InputError(name, values, "give at least one; 0 is greedy")
    for value in values:
        check_number(name, value, *TEMPERATURES)


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """A whole number from `low` to `high`; without `high` one that Python writes: it refuses more than 4,300 digits.

    Raises:
        InputError: names the field.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(name, value, "must be a whole number" + _of_a_library(value, "int"))
    if value < low or (high is not None and value > high):
        raise InputError(name, value, f"must be at least {low}" + ("" if high is None else f" and at most {high}"))
    if value >= _TOO_LONG:
        raise InputError(name, value, "must have at most 4000 digits")


def check_threads(name: str, value: object) -> None:
    """A number of threads: a pool of too many would be made, until memory ends.

    Raises:
        InputError: names the field.
    """
    check_whole(name, value, low=1, high=1024)


def check_text(name: str, value: str) -> None:
    """A text that can be written as UTF-8, which no tokenizer does without.

    Raises:
        InputError: names the field.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start + 1} is half of a surrogate pair (U+{ord(value[error.start]):04X})"
        remedy = f"{place}, which is no text; was it read from bytes that are not UTF-8?"
        raise InputError(name, value, remedy) from None


def check_flag(name: str, value: object) -> None:
    """True or False.

    Raises:
        InputError: names the field.
    """
    if not isinstance(value, bool):
        raise InputError(name, value, "must be True or False")


def check_limits(**limits: int | None) -> None:
    """Whole numbers of at least 1, or None where that is allowed.

    Raises:
        ConfigError: names the limit.
    """
    for name, value in limits.items():
        if value is None and name in ("cache_tokens", "max_step_tokens"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(name, value, "must be a whole number of at least 1")


def check_share(name: str, value: object) -> None:
    """A share is a number from 0 to 1.

    Raises:
        ConfigError: names the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(name, value, "must be a number from 0 to 1")


def _of_a_library(value: object, kind: str) -> str:
    """What to do with a number of numpy or torch."""
    return f" of Python's; {kind}(x) makes one" if hasattr(value, "item") else ""


def is_count(text: str) -> bool:
    """Whether a text is a whole number from 0 that fits into 64 bits, in digits that `int` reads."""
    return text.isdecimal() and len(text) <= 18
