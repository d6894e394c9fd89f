"""One evaluation of another engine: the same prompts, acceptance as it reports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from foretoken.backend.answering import AnsweringBackend, Drafting, Question
from foretoken.errors import InputError
from foretoken.evaluate.backend_options import BackendEvalOptions
from foretoken.evaluate.counts import reported_counts
from foretoken.evaluate.prompts import EvalPrompt, in_turns
from foretoken.evaluate.result import EvalResult, EvalSample
from foretoken.evaluate.run import answer_seed, few_prompts
from foretoken.machine.identity import machine, versions
from foretoken.measure.asked import chosen_draftings, drafting_name
from foretoken.measure.report import now

_SERVER_SETTINGS = "name a server that reports them with its answers, or counts them under /metrics"


@dataclass
class BackendEvalRun:
    """A running evaluation of an open backend: `samples` are the answers so far, so that `result` can be taken at any
    time.
    """

    options: BackendEvalOptions
    prompts: Sequence[EvalPrompt]
    command: str
    backend: AnsweringBackend
    samples: list[EvalSample] = field(default_factory=list)
    num_silent: int = 0  # answers without a word on drafts

    def __post_init__(self) -> None:
        """Plan what to ask.

        Raises:
            InputError: what the backend cannot be asked, or does not report; names the field.
        """
        options, backend = self.options, self.backend
        self.has_promised = backend.capabilities.draft_counts != "none"
        self.counts_itself = self.has_promised or backend.counters() is None
        self.draftings = chosen_draftings(backend, "drafters", options.drafters, options.num_draft)
        temperatures = options.temperatures_for(backend)
        asked = [(self._question(prompt), prompt) for prompt in in_turns(self.prompts)]
        self.jobs = [
            (question, prompt, drafting, temperature)
            for question, prompt in asked
            for drafting in self.draftings
            for temperature in temperatures
        ]
        if not self.counts_itself:  # one slice after the other: what its counters miss of an answer is the next one's
            places = {drafting: place for place, drafting in enumerate(self.draftings)}
            self.jobs.sort(key=lambda job: (places[job[2]], job[3], job[1].slice))

    def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Ask; `tell` receives the name of a way to draft before each answer.

        Raises:
            InputError: the backend reported nothing of its drafts.
            ForetokenError: it gave no answer.
        """
        for question, prompt, drafting, temperature in self.jobs:
            tell(drafting_name(drafting))
            self.samples.append(self._measured(question, prompt, drafting, temperature))
            if self.num_silent and not self.has_promised:
                break
        if self.num_silent == len(self.samples):
            self.samples.clear()
            remedy = f"reports no drafted and accepted tokens; {_SERVER_SETTINGS}"
            raise InputError("backend", self.backend.name, remedy)

    def _measured(self, question: Question, prompt: EvalPrompt, drafting: Drafting, temperature: float) -> EvalSample:
        seed = answer_seed(self.options.seed, prompt) if temperature > 0 else None
        asked = Question(**{**vars(question), "temperature": temperature, "seed": seed})
        self.backend.reset()
        before = None if self.counts_itself else self.backend.counters()
        answer = self.backend.answer(asked, drafting)
        after = None if before is None else self.backend.counters()
        drafted, accepted = answer.num_drafted, answer.num_accepted
        if before is not None and after is not None:
            drafted, accepted = (round(after[name] - before[name]) for name in ("drafted", "accepted"))
        self.num_silent += drafted is None or accepted is None
        counts = reported_counts(answer, drafted or 0, accepted or 0)
        return EvalSample(drafting_name(drafting), prompt.slice, temperature, prompt.key, "", counts)

    def _question(self, prompt: EvalPrompt) -> Question:
        """A prompt as the backend is asked it.

        Raises:
            InputError: token ids, messages that are not texts, or a conversation where the backend renders none.
        """
        options, text = self.options, prompt.content if isinstance(prompt.content, str) else ""
        messages = (("user", text),) if text and options.chat else () if text else _pairs(prompt)
        if messages and not self.backend.capabilities.conversations:
            field_name = "chat" if options.chat else "prompts"
            raise InputError(field_name, prompt.name, f"{self.backend.name} renders no conversations; give texts")
        return Question(
            text="" if messages else text,
            messages=messages,
            max_tokens=options.max_tokens,
            ignore_eos=not options.stop_at_eos,
            prediction=prompt.prediction,
        )

    def drafters(self) -> list[str]:
        """The names of its ways to draft, as in the result."""
        return [drafting_name(one) for one in self.draftings]

    def result(self) -> EvalResult:
        """What was measured so far."""
        return EvalResult(
            samples=tuple(self.samples),
            identity={"backend": self.options.source.identity_of(self.backend)},
            settings=self.options.settings,
            options=asdict(self.options),
            command=self.command,
            machine=machine(),
            versions=versions(),
            date=now(),
            complete=len(self.samples) == len(self.jobs),
            notes=[*few_prompts(self.prompts), *self._notes()],
        )

    def _notes(self) -> list[str]:
        notes = list(self.backend.notes())
        if not self.counts_itself:
            notes.append("drafted and accepted tokens are differences of the engine's counters around each answer")
        if self.num_silent:
            notes.append(f"{self.num_silent} answers came without counts of drafts: taken as if nothing was drafted")
        return notes


def _pairs(prompt: EvalPrompt) -> tuple[tuple[str, str], ...]:
    """The (role, content) pairs of a conversation.

    Raises:
        InputError: token ids, or a message that is no plain text.
    """
    pairs = [one if isinstance(one, int) else (one.get("role"), one.get("content")) for one in prompt.content]  # type: ignore[union-attr]
    found = tuple(
        (role, content)
        for role, content in (pair for pair in pairs if not isinstance(pair, int))
        if isinstance(role, str) and isinstance(content, str)
    )
    if len(found) != len(pairs):
        remedy = "another engine is asked texts, and messages whose content is a text; it takes no token ids"
        raise InputError("prompts", prompt.name, remedy)
    return found
