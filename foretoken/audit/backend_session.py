"""The engine under audit from outside: it is asked questions, and its answers are put into words or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from foretoken.audit.backend_plan import BackendAuditOptions
from foretoken.audit.checks import equality
from foretoken.audit.judge import Judge
from foretoken.audit.plan import ChatPrompt, Prompt
from foretoken.audit.report import Check
from foretoken.backend.answering import Answer, AnsweringBackend, Drafting, Question
from foretoken.errors import InputError

_NUM_TOGETHER = 8
_TIES = "give --target: its logits tell near ties from errors"
_NOT_READ = "the target's tokenizer does not write these answers, so near ties are not told from errors"


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
        chosen = [self.questions[i % len(self.questions)] for i in range(count)]
        return [
            replace(one, temperature=temperature, seed=seed + i, max_tokens=max_tokens) for i, one in enumerate(chosen)
        ]

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
            return asked.answer(question, drafting)

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
        judge, both = self.judge, (self.ids(base), self.ids(again))
        if judge is not None and both[0] is not None and both[1] is not None:
            return self._compared_ids(judge, name, where, both[0], both[1])
        check = self.compared_exactly(name, where, base, again)
        why = _TIES if judge is None else _NOT_READ
        return replace(check, detail=f"{check.detail}; {why}") if check.result == "fail" else check

    def compared_exactly(self, name: str, where: str, base: Sequence[Answer], again: Sequence[Answer]) -> Check:
        """Compare answers by their token ids, or by their texts where those are all that is known."""
        if all(one.token_ids for one in (*base, *again)):
            ids = [one.token_ids for one in base], [one.token_ids for one in again]
            return equality(name, where, *ids, exact=True)
        texts = [one.text for one in base], [one.text for one in again]
        return equality(name, where, *texts, exact=True, unit="character")

    def _compared_ids(
        self, judge: Judge, name: str, where: str, base: Sequence[Sequence[int]], again: Sequence[Sequence[int]]
    ) -> Check:
        def gap(i: int, place: int) -> tuple[float, float]:
            logits, rounding = judge.row(self.prompt_ids[i % len(self.prompt_ids)], again[i], place)
            return abs(float(logits[base[i][place]] - logits[again[i][place]])), rounding

        return equality(name, where, base, again, exact=False, gap=gap)


def not_asked(name: str, where: str, why: str) -> Check:
    """A check that cannot be asked of this backend, with the reason."""
    return Check(name, where, "not asked", found=why)


def questions_of(prompts: Sequence[Prompt], options: BackendAuditOptions, backend: AnsweringBackend) -> list[Question]:
    """The audit's prompts as questions.

    Raises:
        InputError: token ids, a message that is no plain text, or a conversation where the backend renders none.
    """
    return [_question(prompt, options, backend) for prompt in prompts[: options.num_prompts]]


def _question(prompt: Prompt, options: BackendAuditOptions, backend: AnsweringBackend) -> Question:
    ignore_eos = backend.capabilities.token_ids  # what comes behind an end-of-text token cannot be read in a text
    if isinstance(prompt, str):
        return Question(prompt, max_tokens=options.max_tokens, ignore_eos=ignore_eos)
    if not isinstance(prompt, ChatPrompt):
        raise InputError("prompts", prompt, "another engine takes no token ids; give texts or messages")
    pairs = [(one.get("role"), one.get("content")) for one in prompt.messages]
    messages = tuple((role, text) for role, text in pairs if isinstance(role, str) and isinstance(text, str))
    if len(messages) < len(pairs):
        raise InputError("prompts", prompt.messages, "another engine is asked messages whose content is a text")
    if not backend.capabilities.conversations:
        raise InputError("prompts", prompt.messages, f"{backend.name} renders no conversations; give texts")
    return Question(messages=messages, max_tokens=options.max_tokens, ignore_eos=ignore_eos)
