"""The two sides under questions: every answer is asked once, kept, and in the raw rows of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any

from foretoken.backend.requesting import ApiChoice, ApiRequest, Reply, Requester
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.measure.certify.options import CertifyOptions
from foretoken.measure.checks import Check, Result
from foretoken.measure.kept import KeptFile, digest
from foretoken.measure.workload import Prompt


class NotAskedError(Exception):
    """A side refuses a request, and says why."""


class SideFailedError(Exception):
    """A side gave no whole answer."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(f"{label} failed: {why}")
        self.label = label


@dataclass
class Asker:
    """One side. The same request in the same `turn` is asked once; `rows` are all answers so far, of which
    `num_restored` are an earlier run's. A side that stopped is asked nothing more: `lost` says how it did.
    """

    label: str
    requester: Requester
    kept: KeptFile = field(default_factory=lambda: KeptFile(None, "certify", {}))
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_restored: int = 0
    lost: str = ""
    _known: dict[tuple[str, int], Reply] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def restore(self, row: dict[str, Any]) -> None:
        """Take in an answer of an earlier run."""
        self._known[digest(row["request"]), row["turn"]] = reply_from(row["reply"])
        self.rows.append(row)
        self.num_restored += 1

    def ask(self, requests: Sequence[ApiRequest], turn: int = 0) -> list[Reply]:
        """Answers to requests, several at once where the side takes them.

        Raises:
            SideFailedError: an answer failed, or the side stopped.
            NotAskedError: the side stopped before.
        """
        wanted = {digest(asdict(request)): request for request in requests}
        missing = [request for key, request in wanted.items() if (key, turn) not in self._known]
        if missing and self.lost:
            raise NotAskedError(f"{self.label} stopped before: {self.lost}")
        if self.requester.num_together == 1 or len(missing) < 2:
            for request in missing:
                self._ask(request, turn)
        else:
            with ThreadPoolExecutor(self.requester.num_together) as pool:
                list(pool.map(lambda request: self._ask(request, turn), missing))
        return [self._known[digest(asdict(request)), turn] for request in requests]

    def _ask(self, request: ApiRequest, turn: int) -> None:
        try:
            reply = self.requester.ask(request)
        except ForetokenError as error:
            if isinstance(error, UnavailableError):
                self.lost = str(error)
            raise SideFailedError(self.label, str(error)) from error
        row = {"side": self.label, "turn": turn, "request": asdict(request), "reply": asdict(reply)}
        with self._lock:
            self._known[digest(row["request"]), turn] = reply
            self.rows.append(row)
            self.kept.append(row)


def reply_from(values: dict[str, Any]) -> Reply:
    """What `dataclasses.asdict` made of a `Reply`, out of a file."""
    plain = [{name: _tuples(value) for name, value in choice.items()} for choice in values["choices"]]
    return Reply(**{**values, "choices": tuple(ApiChoice(**choice) for choice in plain)})


def _tuples(value: Any) -> Any:  # noqa: ANN401 - any field of a choice, for which JSON has lists alone
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def request_of(
    options: CertifyOptions, prompt: Prompt, num_logprobs: int | None = None, **fields: object
) -> ApiRequest:
    """A greedy request for a prompt, with further fields."""
    messages = prompt.messages or ((("user", prompt.text),) if options.chat else ())
    usual = {"max_tokens": options.max_tokens, "temperature": 0.0}
    return ApiRequest("" if messages else prompt.text, messages, usual | fields, num_logprobs)


@dataclass(frozen=True)
class CertifySession:
    """Both sides with the prompts. `num_logprobs` likeliest tokens are asked for, None where a side reports none."""

    options: CertifyOptions
    a: Asker
    b: Asker
    prompts: Sequence[Prompt]
    num_logprobs: int | None = None
    conversations: bool = False

    def requests(self, **fields: object) -> list[ApiRequest]:
        """A greedy request for every prompt, with further fields."""
        return [self.request(prompt, **fields) for prompt in self.prompts]

    def request(self, prompt: Prompt, **fields: object) -> ApiRequest:
        """A greedy request for one prompt, with further fields."""
        return request_of(self.options, prompt, self.num_logprobs, **fields)

    def both(self, requests: Sequence[ApiRequest]) -> tuple[list[Reply], list[Reply]]:
        """The answers of A and of B.

        Raises:
            NotAskedError: a side refuses one, or stopped before.
            SideFailedError: see `Asker.ask`.
        """
        return self.answers(self.a, requests), self.answers(self.b, requests)

    def answers(self, side: Asker, requests: Sequence[ApiRequest], turn: int = 0) -> list[Reply]:
        """The answers of one side; raises as `both` does."""
        replies = side.ask(requests, turn)
        for request, reply in zip(requests, replies, strict=True):
            if reply.refused or not reply.choices:
                where = f" (prompt {name})" if (name := self._name_of(request)) else ""
                raise NotAskedError(f"{side.label} refuses: {reply.refused or 'no answer in the reply'}{where}")
        return replies

    def _name_of(self, asked: ApiRequest) -> str:
        """The name of the prompt of a request; "" where a check asks a text of its own."""
        texts = ((prompt.name, self.request(prompt)) for prompt in self.prompts)
        return next((name for name, own in texts if (own.text, own.messages) == (asked.text, asked.messages)), "")


def streamed(requests: Sequence[ApiRequest]) -> list[ApiRequest]:
    """The same requests, answered in chunks."""
    return [replace(request, stream=True) for request in requests]


def attempt(name: str, where: str, make: Callable[[], Check]) -> Check:
    """A check, or what became of it where a side refused or failed."""
    try:
        return make()
    except (NotAskedError, SideFailedError) as error:
        return unmade(name, where, error)


def unmade(name: str, where: str, error: NotAskedError | SideFailedError) -> Check:
    """What becomes of a check that could not be made: B fails where its answer failed."""
    if isinstance(error, NotAskedError):
        return Check(name, where, "not asked", found=str(error))
    return Check(name, where, "fail" if error.label == "B" else "undecided", found=str(error))


def own_rules(
    name: str, where: str, problems: tuple[Sequence[str], Sequence[str]], num_tokens: int, demanded: str
) -> Check:
    """A check that each side's answers can pass by themselves: "" for an answer that does, else what is wrong.

    B fails where A does not have the same trouble; what both do is no matter of speculation.
    """
    pairs = list(zip(*problems, strict=True))
    alone = [b for a, b in pairs if b and not a]
    shared = sum(bool(a and b) for a, b in pairs)
    right = sum(not b for _, b in pairs)
    found = f"{right} of {len(pairs)} right" + (f", {shared} as wrong on A" if shared else "")
    result: Result = "fail" if alone else "undecided" if shared or not pairs else "pass"
    return Check(name, where, result, num_tokens, found, demanded, detail="; ".join(dict.fromkeys(alone[:5])))
