"""Settings of a load measurement by name, and the open model that runs them in turn.

plain             no drafting
DRAFTER-5         always five draft tokens; DRAFTER may carry options, as in `--drafters`
DRAFTER-auto      the engine's policy chooses the number of draft tokens
DRAFTER-POLICY    a policy that the caller passes by name chooses it
POLICY            the same with the draft model where there is one, otherwise with ngram
auto              the engine's policy also chooses the drafter
sweep             every drafter with every fixed number of draft tokens (`backend.drafting.swept_drafters`)
auto-slices       the same, and requests name their slice (`SamplingParams.slice`), so that a new request
                  starts with the acceptance measured on earlier requests of its slice
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foretoken.backend.drafting import SWEEP, DrafterChoice, parse_drafters, swept_drafters
from foretoken.config import SamplingParams, SpecConfig, known_drafters
from foretoken.control.chooser import Policy
from foretoken.core import StepOutput
from foretoken.errors import ConfigError
from foretoken.machine.neighbours import OtherLoad, is_contended
from foretoken.measure.load.prompts import Ask
from foretoken.measure.options import PLAIN
from foretoken.params import is_count

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM
    from foretoken.engine.stats import RequestStats


AUTO = "auto"
AUTO_SLICES = "auto-slices"
Policies = Mapping[str, Callable[[], Policy]]  # makes the policy of a name; settings of that name run under it
NO_POLICIES: Policies = {}


@dataclass(frozen=True)
class BatchSetting:
    """One way to decode: the drafter (None: plain), the number of draft tokens, and the name of the policy that chooses
    it (None: a fixed number, or the engine's own policy).
    """

    name: str
    choice: DrafterChoice | None = None
    num_draft: int | Literal["auto"] = 0
    policy: str | None = None
    names_slice: bool = False

    @property
    def adapts(self) -> bool:
        """Whether a policy chooses the number of draft tokens in every step."""
        return self.num_draft == "auto"

    def spec(self, draft: str | None) -> SpecConfig:
        """The configuration of its requests."""
        if self.choice is None:
            return SpecConfig()
        given = {"draft": draft} if "draft" in self.choice.takes else {}
        return self.choice.spec(num_draft=self.num_draft, **given)


def parse_batch_settings(
    names: Sequence[str], draft: str | None, policies: Policies = NO_POLICIES
) -> tuple[tuple[BatchSetting, ...], list[str]]:
    """The settings of these names, plain always first; notes on settings that this version does not have.

    Raises:
        ConfigError: an unknown name, or a drafter that needs what a batch does not give it.
    """
    found = {PLAIN: BatchSetting(PLAIN)}
    notes: list[str] = []
    for name in names:
        if name == SWEEP:
            found |= {setting.name: setting for setting in _swept(draft) if setting.name not in found}
        elif name in (AUTO, AUTO_SLICES) and AUTO not in known_drafters():
            notes.append("auto was not measured: this version does not choose the drafter by itself.")
        else:
            setting = _parse(name, draft, policies)
            found.setdefault(setting.name, setting)
    return tuple(found.values()), notes


def _swept(draft: str | None) -> list[BatchSetting]:
    """Those of the fixed settings that a batch can run."""
    found = []
    for choice in swept_drafters():
        if "prediction" in choice.needs or ("draft" in choice.needs and draft is None):
            continue
        fields = tuple(pair for pair in choice.fields if pair[0] != "num_draft")
        bare, number = DrafterChoice(choice.name, fields), int(choice.own("num_draft") or 0)
        found.append(BatchSetting(f"{bare.label}-{number}", bare, number))
    return found


def _parse(name: str, draft: str | None, policies: Policies) -> BatchSetting:
    if name == PLAIN:
        return BatchSetting(PLAIN)
    if name == AUTO:
        return BatchSetting(name, DrafterChoice(AUTO), "auto")
    if name == AUTO_SLICES:
        return BatchSetting(name, DrafterChoice(AUTO), "auto", names_slice=True)
    drafter, _, how = name.rpartition("-")
    if how not in policies and (not drafter or (how != AUTO and not is_count(how))):
        remedy = "must be plain, auto, auto-slices, sweep, DRAFTER-5 or DRAFTER-auto"
        if policies:
            remedy += f", or POLICY or DRAFTER-POLICY with one of the policies {', '.join(policies)}"
        raise ConfigError("settings", name, remedy)
    (choice,) = parse_drafters((drafter or ("ngram" if draft is None else "draft_model"),))
    if "draft" in choice.needs and draft is None:
        remedy = f"setting {name} needs a draft model; give its folder, or leave the setting out"
        raise ConfigError("draft", None, remedy)
    if "prediction" in choice.needs:
        raise ConfigError("settings", name, "the prompts of a batch carry no prediction; leave it out")
    if choice.own("num_draft") is not None:
        raise ConfigError("settings", name, "the number of draft tokens is behind the hyphen; leave num_draft out")
    return BatchSetting(
        f"{choice.label}-{how}", choice, int(how) if is_count(how) else "auto", how if how in policies else None
    )


@dataclass(frozen=True)
class Answered:
    """One request's tokens; `num_near_ties` counts greedy choices within the rounding error of the logits."""

    token_ids: tuple[int, ...]
    greedy: bool
    num_near_ties: int


@dataclass(frozen=True)
class Turn:
    """One setting's answers to requests that ran together.

    `seconds` is the time from before the first step to after the last. `decode_s` begins when every request has its
    first token; `decode_tokens` are those emitted from then on. `num_steps` counts rounds over all requests.
    `request_speeds` are the tokens per second of each request after its first token. `contended`: whether other
    processes took the cores meanwhile, None where that is not known.
    """

    answers: tuple[Answered, ...]
    seconds: float
    decode_s: float
    decode_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    request_speeds: tuple[float, ...]
    contended: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""
        return sum(len(answer.token_ids) for answer in self.answers)


class Stage:
    """An open model on which settings take turns; a setting's policy keeps its state from one of its turns to the next.

    `policies` makes the policies that settings name.
    """

    def __init__(self, llm: LLM, draft: str | None, policies: Policies, seed: int) -> None:
        self.llm, self.draft, self.policies, self.seed = llm, draft, policies, seed
        self._policies: dict[str, Policy] = {}
        self.others = OtherLoad()
        self._tenants = itertools.count()

    def forget(self) -> None:
        """Discard the state of every setting's policy."""
        self._policies.clear()

    def enter(self, setting: BatchSetting) -> None:
        """Install this setting's policy in the engine, and reset its drafters."""
        policy = self._policies.get(setting.name)
        if policy is None and setting.policy is not None:
            policy = self.policies[setting.policy]()
        self._policies[setting.name] = self.llm.reset_controller(policy)
        self.llm.reset_drafters(setting.spec(self.draft))

    def spec(self, setting: BatchSetting) -> SpecConfig:
        """The configuration of a setting's requests."""
        return setting.spec(self.draft)

    def params(self, setting: BatchSetting, ask: Ask, place: int, max_tokens: int) -> SamplingParams:
        """Sampling of the request at `place`, the same for every setting: with a seed, sampled answers must be equal
        too. Each request has a tenant of its own, so that none drafts or reads from earlier answers.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=ask.temperature,
            seed=self.seed + place,
            ignore_eos=True,
            tenant=f"{setting.name} {next(self._tenants)}",
            slice=ask.slice if setting.names_slice else "",
        )

    def answer(self, setting: BatchSetting, asks: Sequence[Ask], max_tokens: int, first_place: int = 0) -> Turn:
        """Answer `asks` as one batch.

        Raises:
            ForetokenError: an answer failed.
        """
        self.enter(setting)
        started: set[int] = set()
        all_started_at: float | None = None
        early_tokens = 0

        def watch(outputs: list[StepOutput]) -> None:
            nonlocal all_started_at, early_tokens
            if all_started_at is None:
                started.update(output.request_id for output in outputs if output.token_ids)
                early_tokens += sum(len(output.token_ids) for output in outputs)
                if len(started) == len(asks):
                    all_started_at = time.perf_counter()

        prompts = [list(ask.prompt_ids) for ask in asks]
        params = [self.params(setting, ask, first_place + place, max_tokens) for place, ask in enumerate(asks)]
        self.others.start()
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, self.spec(setting), on_step=watch)
        ended = time.perf_counter()
        share = self.others.share()
        for output in outputs:
            if output.error is not None:
                raise output.error
        stats: list[RequestStats] = [output.stats for output in outputs]
        pairs = zip(params, outputs, strict=True)
        answers = tuple(Answered(output.token_ids, one.greedy, output.stats.num_near_ties) for one, output in pairs)
        return Turn(
            answers,
            ended - began,
            ended - (began if all_started_at is None else all_started_at),
            sum(len(answer.token_ids) for answer in answers) - early_tokens,
            sum(one.num_steps for one in stats),
            sum(one.num_drafted for one in stats),
            sum(one.num_accepted for one in stats),
            tuple(one.tokens_per_s for one in stats),
            None if share is None else is_contended(share),
        )


def together(turns: Sequence[Turn]) -> Turn:
    """Several turns in sequence as one."""
    return Turn(
        tuple(answer for turn in turns for answer in turn.answers),
        sum(turn.seconds for turn in turns),
        sum(turn.decode_s for turn in turns),
        sum(turn.decode_tokens for turn in turns),
        sum(turn.num_steps for turn in turns),
        sum(turn.num_drafted for turn in turns),
        sum(turn.num_accepted for turn in turns),
        tuple(speed for turn in turns for speed in turn.request_speeds),
        None if any(turn.contended is None for turn in turns) else any(turn.contended for turn in turns),
    )
