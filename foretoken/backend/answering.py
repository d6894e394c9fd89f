"""`AnsweringBackend`: an engine as measurements see it, ours or another: one question at a time, and what it took.

`backend.call` is the streaming side, for a server. Here a call blocks until its answer is complete, and times are read
as close to the engine as it allows, so that what is timed is the engine and not the thread that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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


@dataclass(frozen=True)
class Drafting:
    """One way of an engine to draft: `kind` is its own name for the method (None: plain decoding), `num_draft` the
    number of draft tokens (None: the engine's default; "auto": it chooses), `options` further ones as it writes them.
    """

    kind: str | None = None
    num_draft: int | str | None = None
    options: str = ""


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one question; None for what it does not report.

    `decode_tokens` left the engine during the last `decode_s` seconds, in `decode_steps` target forwards: what was out
    after the prompt's own pass is not counted. `draft_s` and `verify_s` lie within `decode_s`, `rule_s` within
    `verify_s`, `wasted_s` (rejected draft tokens) within both together. `positions[i]` counts (drafted, accepted)
    at the i-th place of a draft. `token_ids` is empty when only the text is known.
    """

    token_ids: tuple[int, ...]
    text: str
    num_emitted: int
    decode_tokens: int
    decode_s: float
    ttft_s: float | None = None
    num_steps: int | None = None
    decode_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    rule_s: float | None = None
    wasted_s: float | None = None
    positions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """Which questions a backend can answer.

    `plain`: without drafting, beside any other way, so that answers can be compared. `drafting`: the kind of drafting
    can be chosen for a question. `sampling`: above temperature 0, the same answer again for the same seed.
    `token_ids`: answers carry them. `draft_counts`: what it reports of drafted and accepted tokens. `conversations`:
    it renders a conversation with the model's own chat template.
    """

    plain: bool
    drafting: bool
    sampling: bool
    token_ids: bool
    draft_counts: DraftCounts
    conversations: bool


class AnsweringBackend(Protocol):
    """An engine that answers. Add one: a file with this interface, and a line in `backend.registry`."""

    @property
    def name(self) -> str:
        """As the registry has it."""

    @property
    def capabilities(self) -> Capabilities:
        """Which questions it can answer; known once it is open."""

    def version(self) -> str:
        """Of the engine, for reports."""

    def draftings(self, num_drafts: Sequence[int]) -> Sequence[Drafting]:
        """Its ways to draft, those with a number of draft tokens at each of `num_drafts`; without plain decoding."""

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer one question; times are wall-clock seconds.

        Raises:
            InputError: a question that it cannot answer; names the field.
            UnavailableError: the engine does not run, or stopped.
            ForetokenError: it gave no answer.
        """

    def counters(self) -> Mapping[str, float] | None:
        """Drafted and accepted tokens since it started (`drafted`, `accepted`); None where it does not count."""

    def reset(self) -> None:
        """Forget what was drafted from earlier answers, as far as the engine can."""

    def close(self) -> None:
        """Free what it holds."""
