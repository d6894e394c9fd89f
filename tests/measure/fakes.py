"""An engine of known behaviour and cost, in place of a model: nothing here depends on the clock of the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from foretoken.backend.answering import Answer
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.chooser import Policy
from foretoken.control.policy import BudgetPolicy
from foretoken.core import StepOutput
from foretoken.draft.base import Drafter, DrafterKey
from foretoken.engine.stats import EngineStats, RequestStats, RoundCounts
from foretoken.errors import ForetokenError, MismatchError
from foretoken.measure.speed.plan import SpeedSample, SpeedSetting
from foretoken.measure.speed.rows import SpeedRow, summarise
from foretoken.measure.workload import Prompt

PROMPTS = (Prompt("a", "code", "abc"), Prompt("b", "code", "bcd"), Prompt("c", "edit", "cde"))


@dataclass
class FakeOutput:
    text: str
    token_ids: tuple[int, ...]
    stats: RequestStats
    error: Exception | None = None


@dataclass
class FakeEngine:
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass
class FakeLLM:
    """Emits 0, 1, 2, ... after the length of the prompt; a draft of n has its first n - 1 tokens accepted.

    Each step costs the totals 1 s of draft per drafted token, 10 s of target and 2 s of rule; the first one 100 s more
    of each, for the prompt. `wrong_at` makes speculative answers leave the plain one at that token; `fails` makes them
    fail.
    """

    wrong_at: int | None = None
    fails: bool = False
    unusable: str | None = None  # a drafter that cannot be made
    target: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(max_context_tokens=4096))
    engine: FakeEngine = field(default_factory=FakeEngine)
    calls: list[tuple[str, SamplingParams, SpecConfig]] = field(default_factory=list)

    def reset_drafters(self, spec: SpecConfig) -> None:
        pass

    def take_drafters(self, spec: SpecConfig) -> dict[DrafterKey, Drafter]:
        return {}

    def put_drafters(self, drafters: Mapping[DrafterKey, Drafter]) -> None:
        pass

    def reset_controller(self, policy: Policy | None = None) -> Policy:
        return policy or BudgetPolicy()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return "<s>" + "".join(f"[{one['role']}]{one['content']}" for one in messages) + "[assistant]"

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(self.render_chat(messages).removeprefix("<s>"))  # as if `encode` added it itself

    def generate(
        self,
        prompts: list[str],
        params: SamplingParams,
        *,
        spec: SpecConfig,
        on_step: Callable[[list[StepOutput]], None],
    ) -> Sequence[FakeOutput]:
        (prompt,) = prompts
        self.calls.append((prompt, params, spec))
        if spec.drafter is not None and spec.drafter == self.unusable:
            raise MismatchError("another tokenizer")
        if self.fails:
            return [FakeOutput("", (), RequestStats(), ForetokenError("broken"))]
        num_draft = 0 if spec.drafter is None else int(spec.num_draft)
        ids = [len(prompt) + i for i in range(params.max_tokens)]
        if num_draft and self.wrong_at is not None:
            ids[self.wrong_at] += 1000
        stats, out, totals = RequestStats(), 0, self.engine.stats
        on_step([])  # a chunk of the prompt: nothing comes out
        while out < len(ids):
            extra = 100.0 if out == 0 else 0.0
            totals.draft_s += num_draft + extra
            totals.target_s += 10.0 + extra
            totals.rule_s += 2.0 + extra
            piece = ids[out : out + max(1, num_draft)]
            out += len(piece)
            stats.num_steps += 1
            stats.count_round(
                RoundCounts(range(1, num_draft + 1), [spec.drafter] * num_draft, range(len(piece) - 1), len(piece))
            )
            on_step([StepOutput(0, tuple(piece), "", ())])
        return [FakeOutput("".join(chr(65 + i % 26) for i in ids), tuple(ids), stats)]


@dataclass
class Scripted:
    """A contender that gives prepared answers in turn and notes when it was asked."""

    setting: SpeedSetting
    answers: Sequence[Answer | Exception]
    log: list[tuple[str, str, float]] = field(default_factory=list)
    asked: int = 0

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        self.log.append((self.setting.name, prompt.name, params.temperature))
        answer = self.answers[self.asked % len(self.answers)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(tokens: int = 10, seconds: float = 1.0, ids: Sequence[int] | None = None, **values: object) -> Answer:
    found = tuple(range(tokens)) if ids is None else tuple(ids)
    return Answer(found, "", tokens, tokens, seconds, **values)  # type: ignore[arg-type]


def rows(slo_ms: float | None = None, **seconds: float) -> tuple[SpeedRow, ...]:
    """Rows of settings that answered 10 tokens in so many seconds, once, to each prompt; `plain` is always there."""
    samples = []
    for name, value in ({"plain": 1.0} | seconds).items():
        setting = SpeedSetting(
            name, drafter=None if name == "plain" else "ngram", num_draft=None if name == "plain" else 3
        )
        for index, prompt in enumerate(PROMPTS):
            own = answer(
                seconds=value,
                ttft_s=0.5,
                e2e_s=0.5 + value,
                num_steps=5,
                decode_steps=4,
                num_drafted=8,
                num_accepted=4,
                draft_s=0.1,
                verify_s=0.2,
                positions=((8, 4),),
            )
            samples.append(SpeedSample(setting, index, prompt.slice, 0.0, 0, own))
    return summarise(samples, PROMPTS, slo_ms)
