"""The checks of another engine: what can be asked from outside, and which checks cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.audit.backend_session import BackendSession, not_asked
from foretoken.audit.distribution import judged
from foretoken.audit.report import Check, Result
from foretoken.backend.answering import Answer, Drafting
from foretoken.config import SamplingParams
from foretoken.engine.shadow.sequential_test import Evidence, GreedyEvidence, weigh, weigh_greedy
from foretoken.measure.asked import drafting_name
from foretoken.text.randomness import Purpose, uniforms

_PLAIN = Drafting(None)
_NUM_AGAIN = 4  # answers that are asked a second time
_FIRST_TEMPERATURE = 1.0
_NUM_FIRST_TOKENS = 4  # with token ids a first token may write nothing, but an answer should not
_SAME_AS_PLAIN = "the same answers as plain decoding"
_CHOICE = "every token is the target's choice"
_AGAIN = "the same answer again"
_SEEDS = "equal seeds, equal answers"
_FIRST = "distribution of first tokens"
_NO_TARGET = "no target to judge by; give --target"
_NO_IDS = "the answers carry no token ids, and another spelling of a text is no error"


def check_greedy(session: BackendSession, drafting: Drafting) -> list[Check]:
    """Temperature 0: the answer is that of plain decoding and comes again, and every token is the target's choice."""
    where = f"temperature 0, {drafting_name(drafting)}"
    answers = session.answers(session.questions, drafting)
    return [
        _against_plain(session, where, answers),
        _choice(session, where, answers),
        *_again(session, drafting, where, answers),
    ]


def _against_plain(session: BackendSession, where: str, answers: Sequence[Answer]) -> Check:
    """The comparison with the other backend, or with the same one's plain answers."""
    other, name = session.against or session.backend, session.backend.name
    if session.against is None:
        if not session.backend.capabilities.plain:
            why = f"{name} cannot be asked to answer without drafting; give --against-backend"
            return not_asked(_SAME_AS_PLAIN, where, why)
        base = session.answers(session.questions, _PLAIN)
        return session.compared(_SAME_AS_PLAIN, where, base, answers)
    way = _PLAIN if other.capabilities.plain else other.draftings((session.options.num_draft,))[0]
    base = session.answers(session.questions, way, backend=other)
    return session.compared(f"the same answers as {other.name}", where, base, answers)


def _again(session: BackendSession, drafting: Drafting, where: str, answers: Sequence[Answer]) -> list[Check]:
    """The same answer to the same question, alone and among others."""
    first, questions = answers[:_NUM_AGAIN], session.questions[:_NUM_AGAIN]
    checks = [session.compared(_AGAIN, f"{where}, alone", first, session.answers(questions, drafting))]
    if not session.options.source.is_address:
        return [*checks, not_asked(_AGAIN, f"{where}, among others", f"{session.backend.name} takes one at a time")]
    together = session.answers(session.questions, drafting, together=True)
    return [*checks, session.compared(_AGAIN, f"{where}, among others", answers, together)]


def _choice(session: BackendSession, where: str, answers: Sequence[Answer]) -> Check:
    """Every token against the target's logits."""
    if session.judge is None:
        return not_asked(_CHOICE, where, _NO_TARGET)
    ids = session.ids(answers)
    if ids is None:
        return not_asked(_CHOICE, where, "the target's tokenizer does not write an answer as the backend did")
    chosen = GreedyEvidence()
    for prompt, tokens in zip(session.prompt_ids, ids, strict=True):
        for rows in session.judge.rows(prompt, tokens, SamplingParams(temperature=0.0)):
            chosen += weigh_greedy(rows.logits, rows.tokens, rows.rounding)
    found = f"{chosen.num_other} others, largest gap {chosen.max_gap:.2g}"
    result: Result = "fail" if chosen.num_beyond else "pass"
    return Check(_CHOICE, where, result, chosen.num_tokens, found, "0 beyond rounding")


def check_seeds(session: BackendSession, drafting: Drafting) -> list[Check]:
    """A given seed gives its answer again."""
    options, name = session.options, session.backend.name
    temperature = max(options.sampled)
    where = f"temperature {temperature:g}, {drafting_name(drafting)}"
    if not session.backend.capabilities.sampling:
        return [not_asked(_SEEDS, where, f"{name} does not repeat a sampled answer")]
    count = min(_NUM_AGAIN, options.num_prompts)
    questions = session.sampled(count, temperature, options.seed, options.max_tokens)
    runs = [session.answers(questions, drafting) for _ in range(2)]
    return [session.compared_exactly(_SEEDS, where, *runs)]


def check_distribution(session: BackendSession, drafting: Drafting, alpha: float) -> list[Check]:
    """Sampled answers and sampled first tokens follow the target's distribution; a correct engine fails with
    probability `alpha` at most.
    """
    options, name = session.options, drafting_name(drafting)
    places = {f"temperature {temperature:g}, {name}": temperature for temperature in options.sampled}
    first = f"temperature {_FIRST_TEMPERATURE:g}, {name}"
    why = ""
    if session.judge is None:
        why = _NO_TARGET
    elif not session.backend.capabilities.sampling:
        why = f"{session.backend.name} is asked nothing above temperature 0"
    if why:
        return [*(not_asked("distribution", where, why) for where in places), not_asked(_FIRST, first, why)]
    alpha /= len(places) + 1
    checks: list[Check] = []
    for number, (where, temperature) in enumerate(places.items()):
        seed = options.seed + number * options.num_prompts
        checks += _whole_answers(session, drafting, where, temperature, seed, alpha)
    seed = options.seed + len(places) * options.num_prompts
    return checks + judged(_first_tokens(session, drafting, seed), first, alpha, name=_FIRST)


def _whole_answers(
    session: BackendSession, drafting: Drafting, where: str, temperature: float, seed: int, alpha: float
) -> list[Check]:
    """The tokens of sampled answers, each given all before it."""
    assert session.judge is not None
    if not session.reports_ids:
        return [not_asked("distribution", where, _NO_IDS)]
    questions = session.sampled(session.options.num_prompts, temperature, seed, session.options.max_tokens)
    params, total = SamplingParams(temperature=temperature, ignore_eos=True), Evidence()
    for i, answer in enumerate(session.answers(questions, drafting)):
        for rows in session.judge.rows(session.prompt_ids[i % len(session.prompt_ids)], answer.token_ids, params):
            places = range(rows.first, rows.first + len(rows.tokens))
            distributions, edges = rows.certain()
            total += weigh(distributions, rows.tokens, _noise([seed + i] * len(places), places), (), edges)
    return judged(total, where, alpha)


def _first_tokens(session: BackendSession, drafting: Drafting, seed: int) -> Evidence:
    """First tokens of many seeds: by their ids, or by the texts that they write."""
    judge, count, by_id = session.judge, session.options.num_seeds, session.reports_ids
    assert judge is not None
    questions = session.sampled(count, _FIRST_TEMPERATURE, seed, _NUM_FIRST_TOKENS if by_id else 1)
    answers = session.answers(questions, drafting, together=session.options.source.is_address)
    params, total = SamplingParams(temperature=_FIRST_TEMPERATURE), Evidence()
    for place, prompt in enumerate(session.prompt_ids):
        seeds = range(seed + place, seed + count, len(session.prompt_ids))
        own = answers[place :: len(session.prompt_ids)]
        distribution = judge.first_distribution(prompt, params)  # [V]
        if by_id:
            tokens = torch.tensor([answer.token_ids[0] for answer in own], device=distribution.device)
        else:
            distribution, tokens = judge.by_text(prompt, distribution, [answer.text for answer in own])
        noise = _noise(list(seeds), [0] * len(own))
        total += weigh(distribution.expand(len(own), -1), tokens, noise)
    return total


def _noise(seeds: Sequence[int], places: Sequence[int]) -> NDArray[np.float64]:
    """Uniforms [n] of a purpose of their own: independent of those that sampled the tokens, also in our engine."""
    return np.asarray(uniforms(list(seeds), Purpose.SHADOW, places, [1] * len(places)))


def unasked() -> list[Check]:
    """The checks of our engine that need its inside."""
    return [
        not_asked("distribution: no bias by the draft", "", "a backend does not show what it drafted"),
        not_asked("logits do not depend on the batch", "", "a backend does not show its logits"),
        not_asked("all cache is released", "", "a backend does not show its cache"),
    ]
