"""`AnsweringBackend`: an engine as measurements see it, ours or another: one question at a time, and what it took.

`backend.call` is the streaming side, for a server. Here a call blocks until its answer is complete, and times are read
as close to the engine as it allows, so that what is timed is the engine and not the thread that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from foretoken.errors import InputError

DraftCounts = Literal["none", "total", "positions"]

SERVED = "served"  # the kind of drafting of an engine that chooses it itself, such as a server that runs already


@dataclass(frozen=True)
class Question:
    """What is asked: a text, or a conversation of (role, content) pairs that the engine renders itself.

    `prediction` is the text that the answer is expected to resemble, for drafting that takes one.
    """

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    prediction: str | None = None


def as_messages(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """The (role, content) pairs of a conversation as chat templates and OpenAI's API take them."""
    return [{"role": role, "content": content} for role, content in pairs]


@dataclass(frozen=True)
class Drafting:
    """One way of an engine to draft: `kind` is its own name for the method (None: plain decoding), `num_draft` the
    number of draft tokens (None: the engine's default; "auto": it chooses), `options` further ones as it writes them.

    What reports say about it is no part of its identity: `counterpart` is the drafter of ours that it is like,
    `is_free` whether it needs nothing but the target and the text.
    """

    kind: str | None = None
    num_draft: int | str | None = None
    options: str = ""
    counterpart: str | None = field(default=None, compare=False)
    is_free: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one question; None for what it does not report.

    `decode_tokens` left the engine during the last `decode_s` seconds, in `decode_steps` target forwards: what was out
    after the prompt's own pass is not counted. `ttft_s` and `e2e_s` count from the question to the first and to the
    last token. `draft_s` and `verify_s` lie within `decode_s`, `rule_s` within `verify_s`, `wasted_s`
    (rejected draft tokens) within both together. `positions[i]` counts (drafted, accepted) at the i-th place of a
    draft. `token_ids` is empty when only the text is known. `num_prompt_tokens` is what a server counted of the prompt.
    Without `is_counted` a server did not say how many tokens it emitted, and each piece of text counts as one.
    """

    token_ids: tuple[int, ...]
    text: str
    num_emitted: int
    decode_tokens: int
    decode_s: float
    ttft_s: float | None = None
    e2e_s: float | None = None
    num_steps: int | None = None
    decode_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    rule_s: float | None = None
    wasted_s: float | None = None
    positions: tuple[tuple[int, int], ...] = ()
    num_prompt_tokens: int | None = None
    is_counted: bool = True


def answer_from(values: Mapping[str, Any]) -> Answer:
    """What `dataclasses.asdict` made of an answer, out of a file.

    Raises:
        KeyError, TypeError, ValueError: it is not.
    """
    positions = tuple((int(drafted), int(accepted)) for drafted, accepted in values["positions"])
    return Answer(**{**values, "token_ids": tuple(values["token_ids"]), "positions": positions})


def answer_in_pieces(
    token_ids: Sequence[int],
    text: str,
    pieces: Sequence[tuple[float, int]],
    start_s: float,
    stop_s: float,
    drafted: tuple[int | None, int] | None = None,
) -> Answer:
    """The answer that came in `pieces`, at least one: the time and the tokens of each target forward.

    `drafted` are the (drafted, accepted) tokens that the engine counted; without it every token beside the first of a
    piece was accepted.
    """
    (first_s, num_first), num_tokens = pieces[0], len(token_ids)
    num_drafted, num_accepted = drafted or (None, num_tokens - len(pieces))
    return Answer(
        token_ids=tuple(token_ids),
        text=text,
        num_emitted=num_tokens,
        decode_tokens=num_tokens - num_first,
        decode_s=stop_s - first_s,
        ttft_s=first_s - start_s,
        e2e_s=stop_s - start_s,
        num_steps=len(pieces),
        decode_steps=len(pieces) - 1,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )


@dataclass(frozen=True)
class Capabilities:
    """Which questions a backend can answer.

    `plain`: without drafting, beside any other way, so that answers can be compared. `drafting`: the kind of drafting
    can be chosen for a question. `sampling`: above temperature 0, the same answer again for the same seed.
    `token_ids`: answers carry them. `draft_counts`: what it reports of drafted and accepted tokens. `conversations`:
    it renders a conversation with the model's own chat template. `plain_texts`: an answer without drafting has a text,
    and not its times alone.
    """

    plain: bool
    drafting: bool
    sampling: bool
    token_ids: bool
    draft_counts: DraftCounts
    conversations: bool
    plain_texts: bool = True


def check_question(name: str, question: Question, drafting: Drafting, capabilities: Capabilities) -> None:
    """Refuse what the backend called `name` cannot answer.

    Raises:
        InputError: names the field.
    """
    if bool(question.text) == bool(question.messages):
        raise InputError("text", question.text, "give a text, or messages in its place")
    if question.messages and not capabilities.conversations:
        raise InputError("messages", len(question.messages), f"{name} renders no conversations; give the text")
    if question.temperature > 0 and not capabilities.sampling:
        raise InputError("temperature", question.temperature, f"{name} does not repeat a sampled answer; give 0")
    if drafting.kind is None and not capabilities.plain:
        raise InputError("drafting", None, f"{name} cannot be asked to answer without drafting")


class AnsweringBackend(Protocol):
    """An engine that answers. Add one: a file with this interface, and a line in `backend.registry`.

    What a class that inherits it leaves out of the last five is nothing to it.
    """

    @property
    def name(self) -> str:
        """As the registry has it."""

    @property
    def capabilities(self) -> Capabilities:
        """Which questions it can answer; known once it is open."""

    def version(self) -> str:
        """Of the engine, for reports."""

    def draftings(
        self, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int] | None = None
    ) -> Sequence[Drafting]:
        """Its ways to draft here, those with a number of draft tokens at each of `num_drafts`; without plain decoding.

        Lookups, whose draft tokens cost nothing, are given at each of `lookup_num_drafts` (None: the same).
        """

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer one question; times are wall-clock seconds.

        Raises:
            InputError: a question that it cannot answer; names the field.
            UnavailableError: the engine does not run, or stopped.
            ForetokenError: it gave no answer.
        """

    def room(self, question: Question) -> tuple[int, int] | None:  # noqa: ARG002
        """Tokens of the question, and the most that one may have; None where that is not known before it is asked."""
        return None

    def notes(self) -> Sequence[str]:
        """What a reader of its figures has to know, a sentence each."""
        return ()

    def counters(self) -> Mapping[str, float] | None:
        """Drafted and accepted tokens since it started (`drafted`, `accepted`); None where it does not count."""
        return None

    def reset(self) -> None:
        """Forget what was drafted from earlier answers, as far as the engine can."""
        return

    def close(self) -> None:
        """Free what it holds."""
        return
