"""Where answers end, what is counted of them, and whether streaming changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from foretoken.backend.requesting import ApiChoice, ApiRequest, Reply
from foretoken.measure.certify.asking import Asker, CertifySession, attempt, own_rules, streamed
from foretoken.measure.certify.forms import form_requests
from foretoken.measure.certify.greedy import first, follows, part_at_tie_of
from foretoken.measure.checks import Check

_STOPS = ((0.3, 2), (0.5, 4), (0.7, 3))  # where in an answer, as a share of it, and how many characters
_LENGTHS = (1, 2, 3, 5, 8, 13)
_STOPPED = "an answer ends before its stop string"
_LIMITED = "max_tokens is the length"
_COUNTED = "usage counts the tokens"
_REASON = "finish_reason says why"
_STREAMED = "streamed text = whole text"
_STOPPING = "stop strings"

_RequestsOf = Callable[[CertifySession, Asker], Sequence[ApiRequest]]
_Problem = Callable[[ApiRequest, Reply, Reply | None], str]  # what is wrong with a reply; the last is A's, or None


def check_limits(session: CertifySession) -> Iterator[Check]:
    """Stop strings, `max_tokens`, `usage` and `finish_reason`."""
    yield attempt(_STOPPED, "temperature 0", lambda: _stops(session))
    yield attempt(_LIMITED, "temperature 0", lambda: _lengths(session))
    yield attempt(_COUNTED, "temperature 0", lambda: _usage(session))
    yield attempt(_REASON, "temperature 0", lambda: _reasons(session))


def _stop_cases(session: CertifySession, side: Asker) -> list[tuple[ApiChoice, str, ApiRequest]]:
    """(whole answer, stop string, request) of a side: parts of its own greedy answers become stop strings."""
    found = []
    for prompt, whole in zip(session.prompts, first(session.answers(side, session.requests())), strict=True):
        for share, length in _STOPS:
            place = int(share * len(whole.text))
            stop = whole.text[place : place + length]
            if len(stop) == length and stop.strip() and "\ufffd" not in stop:
                found.append((whole, stop, session.request(prompt, stop=[stop])))
    return found


def _stops(session: CertifySession) -> Check:
    problems, num_tokens = [], 0
    for side in (session.a, session.b):
        cases = _stop_cases(session, side)
        answers = first(session.answers(side, [request for _, _, request in cases]))
        found = {}
        for (whole, stop, request), answer in zip(cases, answers, strict=True):
            found[id_of(request), stop] = _stop_problem(session, whole, stop, answer)
        problems.append(found)
        num_tokens = sum(len(answer.pieces) for answer in answers)
    a, b = problems
    pairs = [a.get(key, "") for key in b], list(b.values())
    return own_rules(_STOPPED, "temperature 0", pairs, num_tokens, "the text up to it, finish_reason stop")


def id_of(request: ApiRequest) -> tuple[str, object]:
    """What tells two requests apart, their fields aside."""
    return request.text, request.messages


def _stop_problem(session: CertifySession, whole: ApiChoice, stop: str, answer: ApiChoice) -> str:
    wanted = whole.text[: whole.text.index(stop)]
    if follows(whole, answer, session.options.tolerance) is None:
        return ""  # a near tie before the stop string
    if answer.text != wanted:
        return f"stop {stop!r}: the answer ends {answer.text[-12:]!r}, not {wanted[-12:]!r}"
    return "" if answer.finish_reason in ("stop", "") else f"stop {stop!r}: finish_reason {answer.finish_reason!r}"


def _length_requests(session: CertifySession) -> list[ApiRequest]:
    lengths = [length for length in _LENGTHS if length <= session.options.max_tokens]
    return [session.request(prompt, max_tokens=length) for prompt in session.prompts for length in lengths]


def _lengths(session: CertifySession) -> Check:
    requests = _length_requests(session)
    demanded = "no token more, no text more than A's"
    return _by_reply(_LIMITED, requests, *session.both(requests), _length_problem, demanded)


def _by_reply(
    name: str, requests: Sequence[ApiRequest], a: Sequence[Reply], b: Sequence[Reply], problem: _Problem, demanded: str
) -> Check:
    """A check of each reply, of B's beside A's to the same request."""
    problems = (
        [problem(request, one, None) for request, one in zip(requests, a, strict=True)],
        [problem(request, one, other) for request, one, other in zip(requests, b, a, strict=True)],
    )
    return own_rules(name, "temperature 0", problems, sum(reply.num_tokens or 0 for reply in b), demanded)


def _length_problem(request: ApiRequest, reply: Reply, other: Reply | None) -> str:
    """What is too long; `other` is A's answer, which a longer text of the same beginning exceeds."""
    most, answer = int(request.fields["max_tokens"]), reply.choices[0]
    counts = [len(answer.pieces), len(answer.token_ids), reply.num_tokens or 0]
    if max(counts) > most:
        return f"max_tokens {most}: {max(counts)} tokens"
    if other is not None and len(answer.text) > len(other.choices[0].text):
        before = other.choices[0].text.rstrip("\ufffd")
        if before and answer.text.startswith(before):
            return f"max_tokens {most}: the text goes on with {answer.text[len(before) :][:12]!r}"
    return ""


def _usage(session: CertifySession) -> Check:
    requests = [*session.requests(), *_length_requests(session)]
    a, b = session.both(requests)
    if all(reply.num_tokens is None for reply in b):
        return Check(_COUNTED, "temperature 0", "not asked", found="B reports no usage")
    return _by_reply(_COUNTED, requests, a, b, _usage_problem, "the tokens listed, and A's for the same text")


def _usage_problem(_: ApiRequest, reply: Reply, other: Reply | None) -> str:
    answer = reply.choices[0]
    listed = len(answer.token_ids) or len(answer.pieces)
    if reply.num_tokens is not None and listed and reply.num_tokens != listed:
        return f"completion_tokens {reply.num_tokens}, and {listed} are listed"
    if other is None:
        return ""
    same = other.choices[0].text == answer.text
    for name in ("num_tokens",) * same + ("num_prompt_tokens",):
        own, theirs = getattr(reply, name), getattr(other, name)
        if own is not None and theirs is not None and own != theirs:
            return f"{name.removeprefix('num_')} {own}, A says {theirs}"
    return ""


def _reasons(session: CertifySession) -> Check:
    requests = [*session.requests(), *_length_requests(session)]
    a, b = session.both(requests)
    if not any(reply.choices[0].finish_reason for reply in b):
        return Check(_REASON, "temperature 0", "not asked", found="B says no finish_reason")
    demanded = "length at max_tokens, else stop; A's for the same text"
    return replace(_by_reply(_REASON, requests, a, b, _reason_problem, demanded), num_tokens=0)


def _reason_problem(request: ApiRequest, reply: Reply, other: Reply | None) -> str:
    answer = reply.choices[0]
    listed = len(answer.token_ids) or len(answer.pieces)
    if answer.finish_reason == "length" and listed and listed < request.fields["max_tokens"]:
        return f"length after {listed} of {request.fields['max_tokens']} tokens"
    if other is not None and other.choices[0].text == answer.text:
        theirs = other.choices[0].finish_reason
        if theirs and theirs != answer.finish_reason:
            return f"finish_reason {answer.finish_reason!r}, A says {theirs!r}"
    return ""


def check_stream(session: CertifySession) -> Iterator[Check]:
    """The same answer in chunks as at once: of texts, of answers with stop strings, and of a form whose characters
    have several bytes.
    """
    groups: dict[str, _RequestsOf] = {
        "texts": lambda session, _: session.requests(),
        _STOPPING: lambda session, side: [request for _, _, request in _stop_cases(session, side)],
        "characters of several bytes": lambda session, _: form_requests(session),
    }
    for where, requests_of in groups.items():
        yield attempt(_STREAMED, where, partial(_streams, session, where, requests_of))


def _streams(session: CertifySession, where: str, requests_of: _RequestsOf) -> Check:
    problems: list[dict[str, str]] = []
    num_tokens = num_unsteady = 0
    of_a: dict[tuple[str, object], ApiChoice] = {}  # its whole answers, by whose log-probabilities ties are seen
    for side in (session.a, session.b):
        requests = requests_of(session, side)
        whole, chunks = session.answers(side, requests), session.answers(side, streamed(requests))
        rows = zip(requests, whole, chunks, strict=True)
        own = by_text(requests, whole)
        if where == _STOPPING:  # then those without a stop string
            own = by_text(session.requests(), session.answers(side, session.requests()))
        of_a = of_a or own
        found = {
            str(request): _stream_problem(session, one, other, own.get(id_of(request)), of_a.get(id_of(request)))
            for request, one, other in rows
        }
        unsteady = _unsteady(session, side, requests, whole) if any(found.values()) else set()
        num_unsteady = sum(bool(found[key]) for key in unsteady)
        problems.append(found | dict.fromkeys(unsteady, ""))
        num_tokens = sum(len(reply.choices[0].pieces) for reply in chunks)
    a, b = problems
    pairs = [a.get(key, "") for key in b], list(b.values())
    check = own_rules(_STREAMED, where, pairs, num_tokens, "the same text, finish_reason and usage")
    left_out = f"; {num_unsteady} left out: whole answers differ from each other" if num_unsteady else ""
    return replace(check, found=check.found + left_out)


def _unsteady(session: CertifySession, side: Asker, requests: Sequence[ApiRequest], whole: Sequence[Reply]) -> set[str]:
    """The requests to which a side gives another whole answer when it is asked all of them again: with batches of other
    shapes near ties fall otherwise, and what a stream then differs in is not its own doing.
    """
    again = session.answers(side, requests, turn=1)
    rows = zip(requests, whole, again, strict=True)
    return {str(request) for request, one, other in rows if one.choices[0].text != other.choices[0].text}


def by_text(requests: Sequence[ApiRequest], replies: Sequence[Reply]) -> dict[tuple[str, object], ApiChoice]:
    """The answers by what was asked, fields aside."""
    return {id_of(request): reply.choices[0] for request, reply in zip(requests, replies, strict=True)}


def _stream_problem(
    session: CertifySession, whole: Reply, chunks: Reply, unstopped: ApiChoice | None, of_a: ApiChoice | None
) -> str:
    """What is wrong with a stream: it may part at a near tie from the whole answer, or from what that would be without
    a stop string that the stream then does not meet.
    """
    one, other, tolerance = whole.choices[0], chunks.choices[0], session.options.tolerance
    for base in (one, unstopped or one):
        if follows(base, other, tolerance) is None or part_at_tie_of(of_a, base, other, tolerance):
            return ""
    for name, a, b in (
        ("text", one.text, other.text),
        ("finish_reason", one.finish_reason, other.finish_reason),
        ("calls", one.calls, other.calls),
        ("tokens", whole.num_tokens, chunks.num_tokens),
    ):
        if a != b and a is not None and b is not None:
            if name != "text":
                return f"{name}: {b!r}, not {a!r}"
            place = next((i for i, (x, y) in enumerate(zip(one.text, other.text, strict=False)) if x != y), -8)
            return f"streamed {other.text[place:][:8]!r}, whole {one.text[place:][:8]!r}"
    return ""
