"""One evaluation from options to result, and what is left of it when it is interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from foretoken.config import SpecConfig
from foretoken.engine.startup.machine import machine, versions
from foretoken.evaluate.identity import identity_of
from foretoken.evaluate.measure import measure, open_llm, plan
from foretoken.evaluate.options import EvalOptions
from foretoken.evaluate.prompts import EvalPrompt
from foretoken.evaluate.result import EvalResult, EvalSample
from foretoken.measure.report import now
from foretoken.model.names import model_folder

FEW_PROMPTS = 10


@dataclass
class EvalRun:
    """A running evaluation: `samples` are the answers so far, so that `result` can be taken at any time."""

    options: EvalOptions
    prompts: Sequence[EvalPrompt]
    command: str
    samples: list[EvalSample] = field(default_factory=list)
    identity: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = plan(self.options, self.prompts)

    def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Open the target, read the identities, measure; `tell` receives a drafter's name before each answer.

        Raises:
            ForetokenError: a model that cannot be used, a prompt that cannot be run, or an answer that failed.
        """
        with open_llm(self.options) as llm:
            self.identity = identities(self.options)
            for sample in measure(llm, self.options, self.jobs, tell):
                self.samples.append(sample)

    def result(self) -> EvalResult:
        """What was measured so far."""
        return EvalResult(
            samples=tuple(self.samples),
            identity=self.identity,
            settings=settings_of(self.options),
            options=asdict(self.options),
            command=self.command,
            machine=machine(),
            versions=versions(),
            date=now(),
            complete=len(self.samples) == len(self.jobs),
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        per_slice = Counter(prompt.slice for prompt in self.prompts)
        few = [f"{name} ({count})" for name, count in per_slice.items() if count < FEW_PROMPTS]
        return [f"fewer than {FEW_PROMPTS} prompts, so the intervals are rough: {', '.join(few)}"] if few else []


def settings_of(options: EvalOptions) -> dict[str, object]:
    """The settings that two results must share to be comparable."""
    return {name: getattr(options, name) for name in ("rule", "max_tokens", "stop_at_eos", "chat", "allow_lossy")}


def identities(options: EvalOptions) -> dict[str, object]:
    """The hashes of the target and of each drafter's draft models.

    Raises:
        ModelError, StorageError: a checkpoint that cannot be read.
    """
    known: dict[str, dict[str, str | None]] = {}

    def of(name: str) -> dict[str, str | None]:
        if name not in known:
            known[name] = identity_of(name, model_folder(name))
        return known[name]

    target = of(options.target)
    drafts = {one.name: [of(name) for name in dict.fromkeys(_drafts(one.spec))] for one in options.settings}
    return {"target": target, "drafts": {name: found for name, found in drafts.items() if found}}


def _drafts(spec: SpecConfig) -> Iterator[str]:
    """The draft models of a configuration and its parts."""
    if spec.draft is not None:
        yield spec.draft
    for part in spec.declared:
        yield from _drafts(part)
