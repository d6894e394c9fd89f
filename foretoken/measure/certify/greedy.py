"""Greedy answers of A and B, with and without parameters, and the log-probabilities of their tokens."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from foretoken.backend.requesting import ApiChoice, Reply
from foretoken.kv.prefix import shared_length
from foretoken.measure.certify.asking import CertifySession, attempt
from foretoken.measure.checks import Check, equality

SAME = "the same greedy answers"
_UNTOLD = "without log-probabilities near ties are not told from errors"
_LOGPROBS = "log-probabilities"
_NUM_BIASED = 3


def first(replies: Sequence[Reply]) -> list[ApiChoice]:
    """The first answer of each."""
    return [reply.choices[0] for reply in replies]


def compared(
    name: str,
    where: str,
    a: Sequence[ApiChoice],
    b: Sequence[ApiChoice],
    tolerance: float,
    penalties: Sequence[float] = (),
) -> Check:
    """B's answers against A's: the same tokens up to near ties by A's log-probabilities, and the same text. Servers
    report those before penalties: one of `penalties` may have made two tokens nearly equally likely.
    """
    if not all(one.pieces for one in (*a, *b)):
        texts = [one.text for one in a], [one.text for one in b]
        check = equality(name, where, *texts, exact=True, unit="character", num_tokens=0)  # which nobody listed
        return replace(check, detail=f"{check.detail}; {_UNTOLD}") if check.result == "fail" else check

    def gap(i: int, place: int) -> tuple[float, float]:
        found = apart(a[i], b[i], place, bool(penalties))
        return min(abs(found - penalty) for penalty in (0.0, *penalties)), tolerance

    units = [[(*one.pieces, ("text", one.text)) for one in side] for side in (a, b)]
    num_tokens = sum(len(one.pieces) for one in b)
    return equality(name, where, units[0], units[1], exact=False, gap=gap, num_tokens=num_tokens)


def apart(a: ApiChoice, b: ApiChoice, place: int, has_penalties: bool = False) -> float:
    """How far A's log-probabilities of the two tokens at a place are apart; infinite where A names B's not. Behind
    penalties the token taken need not be among the likeliest before them: there B's own log-probability of it stands
    for A's, as the same text is before both and the check of log-probabilities compares the two sides'.
    """
    if place >= min(len(a.pieces), len(b.pieces)):
        return math.inf
    other = a.tops[place].get(b.pieces[place]) if a.tops else None
    if other is None and has_penalties and a.tops and place < len(b.logprobs):
        other = b.logprobs[place]
    return math.inf if other is None else abs(a.logprobs[place] - other)


def follows(base: ApiChoice, other: ApiChoice, tolerance: float) -> bool | None:
    """Whether an answer takes the same tokens as another of the same side, as far as both go; None where they part at a
    near tie, by the log-probabilities of either.
    """
    if not base.pieces or not other.pieces:
        shorter = min(len(base.text), len(other.text))
        return base.text[:shorter] == other.text[:shorter]
    place = shared_length(base.pieces, other.pieces)
    if place == min(len(base.pieces), len(other.pieces)):
        return True
    pairs = ((base, other), (other, base))
    is_tie = any(apart(*pair, place) <= tolerance or parts_at_tie(*pair, tolerance) for pair in pairs)
    return None if is_tie else False


def parts_at_tie(base: ApiChoice, other: ApiChoice, tolerance: float) -> bool:
    """Whether another text parts from that of `base` with a token that was nearly as likely. It needs not name its own
    tokens: llama.cpp leaves those that were drafted out of a stream's.
    """
    if not base.tops or not "".join(base.pieces).startswith(base.text):
        return False
    shared, start = shared_length(base.text, other.text), 0
    for piece, logprob, top in zip(base.pieces, base.logprobs, base.tops, strict=True):
        if start + len(piece) > shared:
            rest = other.text[start:]
            near = (name for name, own in top.items() if name not in ("", piece) and abs(logprob - own) <= tolerance)
            return any(map(rest.startswith, near))
        start += len(piece)
    return False


def part_at_tie_of(of_a: ApiChoice | None, one: ApiChoice, other: ApiChoice, tolerance: float) -> bool:
    """Whether two answers of B part where A's, which goes on as one of them does, gives both tokens nearly the same
    probability. B itself need not tell: llama.cpp reports nothing of accepted draft tokens.
    """
    shared = shared_length(one.text, other.text)
    if of_a is None:
        return False
    parted = [x for x in (one, other) if shared_length(of_a.text, x.text) == shared]
    return any(parts_at_tie(of_a, x, tolerance) for x in parted)


def check_greedy(session: CertifySession) -> Iterator[Check]:
    """Temperature 0: the same answers, and the same log-probabilities. Prompts to which A gives another answer the
    second time are left out.
    """
    options, where = session.options, "temperature 0"

    def equal() -> Check:
        a, b = _repeated(session)
        if not a:
            return Check(SAME, where, "undecided", found="A never gives the same answer twice")
        check = compared(SAME, where, a, b, options.tolerance)
        left_out = len(session.prompts) - len(a)
        return replace(check, found=f"{check.found}; A differs from itself in {left_out}") if left_out else check

    yield attempt(SAME, where, equal)
    yield attempt(_LOGPROBS, where, lambda: _logprobs(session, where))


def _repeated(session: CertifySession) -> tuple[list[ApiChoice], list[ApiChoice]]:
    """The answers of both to the prompts to which A gives its answer again."""
    requests = session.requests()
    a, b = map(first, session.both(requests))
    again = first(session.answers(session.a, requests, turn=1))
    stable = [one.text == other.text for one, other in zip(a, again, strict=True)]
    return list(itertools.compress(a, stable)), list(itertools.compress(b, stable))


def _logprobs(session: CertifySession, where: str) -> Check:
    """The log-probabilities of the tokens that both chose, up to the first that differs. A place without likeliest
    tokens is none that a side reports, whatever number stands there: llama.cpp writes 0 for every accepted draft token.
    """
    a, b = map(first, session.both(session.requests()))
    gaps: list[float] = []
    untold = 0
    for one, other in zip(a, b, strict=True):
        shared = shared_length(one.pieces, other.pieces)
        told = [bool(x) and bool(y) for x, y in zip(one.tops[:shared], other.tops[:shared], strict=True)]
        pairs = zip(one.logprobs[:shared], other.logprobs[:shared], told, strict=True)
        gaps += [abs(x - y) for x, y, is_told in pairs if is_told]
        untold += told.count(False)
    if not gaps:
        why = "no log-probabilities are reported" if session.num_logprobs is None else "no token is the same"
        return Check(_LOGPROBS, where, "not asked" if session.num_logprobs is None else "undecided", found=why)
    tolerance, largest = session.options.tolerance, max(gaps)
    wrong = sum(gap > tolerance for gap in gaps)
    found = f"{wrong} of {len(gaps)} further apart, largest {largest:.2g}" + (f"; {untold} not told" if untold else "")
    return Check(_LOGPROBS, where, "fail" if wrong else "pass", len(gaps), found, f"all within {tolerance:g}")


def check_parameters(session: CertifySession) -> Iterator[Check]:
    """Each parameter changes B's answers as it changes A's. Where it changes none of A's, nothing can be said."""
    sampled: dict[str, object] = {"temperature": 1.0, "seed": session.options.seed}
    by_count = tuple(2.0 * count for count in range(1, 9))
    # What is kept of a distribution when one token is left of it: then even a sampled answer is certain.
    cases: dict[str, tuple[dict[str, object], dict[str, object], Sequence[float]]] = {
        "presence_penalty 2": ({}, {"presence_penalty": 2.0}, (2.0,)),
        "frequency_penalty 2": ({}, {"frequency_penalty": 2.0}, by_count),
        "repetition_penalty 1.8": ({}, {"repetition_penalty": 1.8}, ()),
        "top_k 1": (sampled, {"top_k": 1}, ()),
        "top_p 0.000001": (sampled, {"top_p": 1e-6}, ()),
        "min_p 1": (sampled, {"min_p": 1.0}, ()),
    }
    for name, case in cases.items():
        yield attempt(name, "is obeyed", partial(_obeyed, session, name, *case))
    yield attempt("logit_bias -100", "is obeyed", lambda: _bias(session))


def _bias(session: CertifySession) -> Check:
    """The tokens that A likes best are forbidden."""
    a = first(session.answers(session.a, session.requests()))
    commonest = Counter(token for one in a for token in one.token_ids).most_common(_NUM_BIASED)
    if not commonest:
        return Check("logit_bias -100", "is obeyed", "not asked", found="A's answers carry no token ids")
    bias = {str(token): -100.0 for token, _ in commonest}
    return _obeyed(session, "logit_bias -100", {}, {"logit_bias": bias})


def _obeyed(
    session: CertifySession,
    name: str,
    base: dict[str, object],
    more: dict[str, object],
    penalties: Sequence[float] = (),
) -> Check:
    where = "is obeyed"
    without = first(session.answers(session.a, session.requests(**base)))
    a, b = map(first, session.both(session.requests(**base, **more)))
    changed = sum(one.text != other.text for one, other in zip(a, without, strict=True))
    if not changed:
        return Check(name, where, "undecided", found="changes no answer of A")
    check = compared(name, where, a, b, session.options.tolerance, penalties)
    return replace(check, sees=f"B without it, where it changes A: {changed} answers")
