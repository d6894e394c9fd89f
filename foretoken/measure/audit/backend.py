"""Another engine under audit: what can be asked from outside, the checks of its answers, and which checks cannot."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from foretoken.backend.answering import Answer, AnsweringBackend, Drafting, Question
from foretoken.config import SamplingParams
from foretoken.engine.prompts import check_no_tool_calls
from foretoken.engine.shadow.sequential_test import Evidence, GreedyEvidence, weigh, weigh_greedy
from foretoken.errors import InputError
from foretoken.measure.asked import drafting_name
from foretoken.measure.audit.checks import AS_PLAIN, CHOICE, EQUAL_SEEDS, choice_check
from foretoken.measure.audit.distribution import judged, shadow_noise
from foretoken.measure.audit.judge import Judge
from foretoken.measure.audit.options import BackendAuditOptions, ChatPrompt, Prompt
from foretoken.measure.checks import Check, equality
from foretoken.measure.prompts import text_pairs

_NUM_TOGETHER = 8
_TIES = "give --target: its logits tell near ties from errors"
_NOT_READ = "the target's tokenizer does not write these answers, so near ties are not told from errors"
_PLAIN = Drafting(None)
_NUM_AGAIN = 4  # answers that are asked a second time
_FIRST_TEMPERATURE = 1.0
_NUM_FIRST_TOKENS = 4  # with token ids a first token may write nothing, but an answer should not
_AGAIN = "the same answer again"
_FIRST = "distribution of first tokens"
_NO_TARGET = "no target to judge by; give --target"
_NO_IDS = "the answers carry no token ids, and another spelling of a text is no error"


@dataclass(frozen=True)
class BackendSession:
    """An open backend with the audit's questions, and what judges its answers: another backend, the target, or none.

    `prompt_ids` are the questions as the judge reads them; empty without one.
    """

    options: BackendAuditOptions
    backend: AnsweringBackend
    questions: Sequence[Question]
    judge: Judge | None = None
    against: AnsweringBackend | None = None
    prompt_ids: Sequence[Sequence[int]] = ()

    @property
    def reports_ids(self) -> bool:
        """Whether answers carry token ids; then they need not end where the model ends them."""
        return self.backend.capabilities.token_ids

    def sampled(self, count: int, temperature: float, seed: int, max_tokens: int) -> list[Question]:
        """`count` questions, repeated if there are fewer, each with the next seed."""
        chosen = enumerate(self.questions[i % len(self.questions)] for i in range(count))
        return [replace(one, temperature=temperature, seed=seed + i, max_tokens=max_tokens) for i, one in chosen]

    def answers(
        self,
        questions: Sequence[Question],
        drafting: Drafting,
        together: bool = False,
        backend: AnsweringBackend | None = None,
    ) -> list[Answer]:
        """Answers to questions, one by one or several at once.

        Raises:
            ForetokenError: an answer failed.
        """
        asked = backend or self.backend

        def answer(question: Question) -> Answer:
            found = asked.answer(question, drafting)
            return found if self.judge is None else self.judge.check(found)

        if not together:
            return list(map(answer, questions))
        with ThreadPoolExecutor(_NUM_TOGETHER) as pool:
            return list(pool.map(answer, questions))

    def ids(self, answers: Sequence[Answer]) -> list[tuple[int, ...]] | None:
        """Token ids of answers to the questions in turn; None where one cannot be read as tokens."""
        found = []
        for i, answer in enumerate(answers):
            if self.judge is not None:
                own = self.judge.answer_ids(self.prompt_ids[i % len(self.prompt_ids)], answer)
            else:
                own = answer.token_ids or None
            if own is None:
                return None
            found.append(own)
        return found

    def compared(self, name: str, where: str, base: Sequence[Answer], again: Sequence[Answer]) -> Check:
        """Compare greedy answers to the questions in turn: with a judge up to near ties, otherwise wholly."""
        judge, (base_ids, ids) = self.judge, (self.ids(base), self.ids(again))
        if judge is None or base_ids is None or ids is None:
            check = self.compared_exactly(name, where, base, again)
            why = _TIES if judge is None else _NOT_READ
            return replace(check, detail=f"{check.detail}; {why}") if check.result == "fail" else check

        def gap(i: int, place: int) -> tuple[float, float]:
            logits, rounding = judge.row(self.prompt_ids[i % len(self.prompt_ids)], ids[i], place)
            return abs(float(logits[base_ids[i][place]] - logits[ids[i][place]])), rounding

        return equality(name, where, base_ids, ids, exact=False, gap=gap)

    def compared_exactly(self, name: str, where: str, base: Sequence[Answer], again: Sequence[Answer]) -> Check:
        """Compare answers by their token ids, or by their texts where those are all that is known."""
        if all(one.token_ids for one in (*base, *again)):
            ids = [one.token_ids for one in base], [one.token_ids for one in again]
            return equality(name, where, *ids, exact=True)
        texts = [one.text for one in base], [one.text for one in again]
        num_tokens = sum(one.num_emitted for one in again)
        return equality(name, where, *texts, exact=True, unit="character", num_tokens=num_tokens)


def not_asked(name: str, where: str, why: str) -> Check:
    """A check that cannot be asked of this backend, with the reason."""
    return Check(name, where, "not asked", found=why)


def questions_of(prompts: Sequence[Prompt], options: BackendAuditOptions, backend: AnsweringBackend) -> list[Question]:
    """The audit's prompts as questions.

    Raises:
        InputError: token ids, a message that is no plain text or calls tools, or a conversation where the backend
            renders none.
    """
    return [_question(prompt, options, backend) for prompt in prompts[: options.num_prompts]]


def _question(prompt: Prompt, options: BackendAuditOptions, backend: AnsweringBackend) -> Question:
    ignore_eos = backend.capabilities.token_ids  # what comes behind an end-of-text token cannot be read in a text
    if isinstance(prompt, str):
        return Question(prompt, max_tokens=options.max_tokens, ignore_eos=ignore_eos)
    if not isinstance(prompt, ChatPrompt):
        raise InputError("prompts", prompt, "another engine takes no token ids; give texts or messages")
    check_no_tool_calls(prompt.place, prompt.messages)
    messages = text_pairs(prompt.messages)
    if messages is None:
        raise InputError("prompts", prompt.messages, "another engine is asked messages whose content is a text")
    if not backend.capabilities.conversations:
        raise InputError("prompts", prompt.messages, f"{backend.name} renders no conversations; give texts")
    return Question(messages=messages, max_tokens=options.max_tokens, ignore_eos=ignore_eos)


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
    can = other.capabilities
    if session.against is None and not (can.plain and can.plain_texts):
        what = "shows no text of an answer" if can.plain else "cannot be asked to answer"
        return not_asked(AS_PLAIN, where, f"{name} {what} without drafting; give --against-backend")
    way = _PLAIN if can.plain and can.plain_texts else other.draftings((session.options.num_draft,))[0]
    base = session.answers(session.questions, way, backend=other)
    asked = AS_PLAIN if session.against is None else f"the same answers as {other.name}"
    return session.compared(asked, where, base, answers)


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
        return not_asked(CHOICE, where, _NO_TARGET)
    ids = session.ids(answers)
    if ids is None:
        return not_asked(CHOICE, where, "the target's tokenizer does not write an answer as the backend did")
    chosen = GreedyEvidence()
    for prompt, tokens in zip(session.prompt_ids, ids, strict=True):
        for rows in session.judge.rows(prompt, tokens, SamplingParams(temperature=0.0)):
            chosen += weigh_greedy(rows.logits, rows.tokens, rows.rounding)
    return choice_check(where, chosen)


def check_seeds(session: BackendSession, drafting: Drafting) -> list[Check]:
    """A given seed gives its answer again."""
    options, name = session.options, session.backend.name
    temperature = max(options.sampled)
    where = f"temperature {temperature:g}, {drafting_name(drafting)}"
    if not session.backend.capabilities.sampling:
        return [not_asked(EQUAL_SEEDS, where, f"{name} does not repeat a sampled answer")]
    count = min(_NUM_AGAIN, options.num_prompts)
    questions = session.sampled(count, temperature, options.seed, options.max_tokens)
    runs = [session.answers(questions, drafting) for _ in range(2)]
    return [session.compared_exactly(EQUAL_SEEDS, where, *runs)]


def check_distribution(session: BackendSession, drafting: Drafting, alpha: float) -> list[Check]:
    """Sampled answers and first tokens follow the target's distribution; correct engines fail at a rate of `alpha`."""
    options, name = session.options, drafting_name(drafting)
    places = {f"temperature {temperature:g}, {name}": temperature for temperature in options.sampled}
    first = f"temperature {_FIRST_TEMPERATURE:g}, {name}"
    if session.judge is None or not session.backend.capabilities.sampling:
        why = _NO_TARGET if session.judge is None else f"{session.backend.name} is asked nothing above temperature 0"
        return [*(not_asked("distribution", where, why) for where in places), not_asked(_FIRST, first, why)]
    alpha /= len(places) + 1
    checks: list[Check] = []
    for number, (where, temperature) in enumerate(places.items()):
        seed = options.seed + number * options.num_prompts
        checks += _whole_answers(session, drafting, where, temperature, seed, alpha)
    seed = options.seed + len(places) * options.num_prompts
    found = _first_tokens(session, drafting, seed)
    return checks + ([not_asked(_FIRST, first, _NO_IDS)] if found is None else judged(found, first, alpha, name=_FIRST))


def _whole_answers(
    session: BackendSession, drafting: Drafting, where: str, temperature: float, seed: int, alpha: float
) -> list[Check]:
    """The tokens of sampled answers, each given all before it."""
    assert session.judge is not None
    if not session.reports_ids:
        return [not_asked("distribution", where, _NO_IDS)]
    questions = session.sampled(session.options.num_prompts, temperature, seed, session.options.max_tokens)
    params, total = SamplingParams(temperature=temperature, ignore_eos=True), Evidence()
    answers = session.answers(questions, drafting)
    if not all(answer.token_ids for answer in answers):
        return [not_asked("distribution", where, _NO_IDS)]
    for i, answer in enumerate(answers):
        for rows in session.judge.rows(session.prompt_ids[i % len(session.prompt_ids)], answer.token_ids, params):
            places = range(rows.first, rows.first + len(rows.tokens))
            distributions, edges = rows.certain()
            total += weigh(distributions, rows.tokens, shadow_noise([seed + i] * len(places), places), (), edges)
    return judged(total, where, alpha)


def _first_tokens(session: BackendSession, drafting: Drafting, seed: int) -> Evidence | None:
    """First tokens of many seeds: by their ids, or by the texts that they write; None where ids were to come and did
    not, as from servers of an earlier version.
    """
    judge, count, by_id = session.judge, session.options.num_seeds, session.reports_ids
    assert judge is not None
    questions = session.sampled(count, _FIRST_TEMPERATURE, seed, _NUM_FIRST_TOKENS if by_id else 1)
    answers = session.answers(questions, drafting, together=session.options.source.is_address)
    if by_id and not all(answer.token_ids for answer in answers):
        return None
    params, total = SamplingParams(temperature=_FIRST_TEMPERATURE), Evidence()
    for place, prompt in enumerate(session.prompt_ids):
        seeds = range(seed + place, seed + count, len(session.prompt_ids))
        own = answers[place :: len(session.prompt_ids)]
        distribution = judge.first_distribution(prompt, params)  # [V]
        if by_id:
            tokens = torch.tensor([answer.token_ids[0] for answer in own], device=distribution.device)
        else:
            distribution, tokens = judge.by_text(prompt, distribution, [answer.text for answer in own])
        noise = shadow_noise(seeds, [0] * len(own))
        total += weigh(distribution.expand(len(own), -1), tokens, noise)
    return total


def unasked() -> list[Check]:
    """The checks of our engine that need its inside."""
    return [
        not_asked("distribution: no bias by the draft", "", "a backend does not show what it drafted"),
        not_asked("logits do not depend on the batch", "", "a backend does not show its logits"),
        not_asked("all cache is released", "", "a backend does not show its cache"),
    ]
