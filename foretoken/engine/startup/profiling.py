"""The core of every measurement of costs: real engine steps, timed, with stand-ins for requests.

Whole engine steps are timed, scheduling and bookkeeping included, with random prompts, and a drafter that drafts a
given number of tokens at no cost. Drafters are timed at their real work on the same engine. Medians count.
`bench.profile` measures all curves with it, `start_profile` a few points before the first request.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Drafter, Feedback
from foretoken.draft.chain import points
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.engine import Engine
from foretoken.errors import InputError
from foretoken.files import check_folder, read_json, replace_text
from foretoken.model.interface import LanguageModel
from foretoken.plan.profile import Curve, Profile, profile_from_mapping

SHORT_TOKENS = 32  # of the past where the past is not what is measured
BATCH_NUM_DRAFT = 4  # draft tokens of each request where several draft together
_MAX_CHUNK = 512
_PERIOD = 16
_tenants = itertools.count()  # of this process
_FEWEST_STEPS, _MAX_STEPS, _POINT_S = 3, 9, 1.0  # timed steps of a point: as many as fit into a second

Tell = Callable[[str, float], None]  # what is being measured, and the share of the time that is used up


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        StorageError: the file cannot be read, or is not JSON.
        InputError: it is no profile, or a malformed one; names the part and the file.
    """
    raw = read_json("profile", path)
    try:
        return profile_from_mapping(raw)
    except InputError as error:
        raise InputError(error.field, error.value, f"{error.remedy} (in {path})") from error


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile so that a concurrent reader of `path` finds the old file or the new one, never half of it.

    Raises:
        StorageError: the folder cannot be made or written.
    """
    check_folder(path.parent)
    replace_text("profile", path, json.dumps(profile.as_dict(), indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Work:
    """Steps to time: `batch` requests with a past of about `context_tokens`, `num_draft` draft tokens each."""

    batch: int
    context_tokens: int
    num_draft: int


@dataclass(frozen=True)
class Times:
    """Seconds of a kind of step: the prompts' own, then of each decode step all but the drafter, and the drafter."""

    prompt_s: tuple[float, ...]
    step_s: tuple[float, ...]
    draft_s: tuple[float, ...]


class StandInDrafter:
    """Drafts the number of tokens it is asked for, drawn at random: rows of one and the same token would go to the same
    experts of a mixture, and many rows would seem as cheap as one.
    """

    name = "filler"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._random = vocab_size, random.Random(0)

    def start(self, request: Request) -> None:
        """Keeps nothing."""

    def propose(self, batch: Batch) -> Draft:
        """A chain of random tokens for every request."""
        counts = [entry.num_draft for entry in batch.decoding]
        tokens = [self._random.randrange(self._vocab_size) for _ in range(sum(counts))]
        return points(self.name, counts, torch.tensor(tokens, dtype=torch.int64))

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Learns nothing."""

    def finish(self, request_id: int) -> None:
        """Keeps nothing."""


@dataclass
class StepBench:
    """Times steps of one target until its time is used up: `deadline` is when, on the clock `time.perf_counter`."""

    target: LanguageModel
    seed: int
    deadline: float
    budget_s: float
    tell: Tell
    skipped: list[str] = field(default_factory=list)

    def curve(self, name: str, counts: Sequence[int], work: Callable[[int], Work]) -> Curve:
        """Median seconds of a step by count."""
        return self._points(name, counts, work, lambda work, words: median(self.step_times(words, work).step_s))

    def drafter_curve(
        self, name: str, made: tuple[SpecConfig, Drafter], counts: Sequence[int], work: Callable[[int], Work]
    ) -> Curve:
        """Median seconds of a drafter by count."""
        return self._points(name, counts, work, lambda work, words: median(self.step_times(words, work, made).draft_s))

    def prompt_curve(self, name: str, made: tuple[SpecConfig, Drafter], counts: Sequence[int]) -> Curve:
        """What a drafter's first round takes beyond a later one, by tokens of the text."""

        def extra_s(work: Work, words: str) -> float:
            draft_s = self.step_times(words, work, made).draft_s
            return max(0.0, draft_s[0] - median(draft_s[1:]))

        return self._points(f"{name} prompt", counts, lambda count: Work(1, count, BATCH_NUM_DRAFT), extra_s)

    def long_texts(self, counts: Sequence[int]) -> tuple[Curve, Curve]:
        """Seconds of a prompt's chunk by tokens, and of a decode step by tokens of the past, from one request."""
        chunks: dict[int, float] = {}
        steps: dict[int, float] = {}
        before, last_s = SHORT_TOKENS, 0.0
        for count in counts:
            if not self.fits(Work(1, count, 0)) or not self._affords(f"context {count}", last_s * count / before):
                continue
            began = time.perf_counter()
            times = self.step_times(f"context {count}", Work(1, count, 0))
            before, last_s = count, time.perf_counter() - began
            steps[count] = median(times.step_s)
            if len(times.prompt_s) == 1:
                chunks[count] = times.prompt_s[0]
        return Curve(tuple(chunks.items())), Curve(tuple(steps.items()))

    def left_out(self) -> list[str]:
        """A caveat about the points that were not measured."""
        return [f"Not measured for want of time or room: {', '.join(self.skipped)}."] if self.skipped else []

    def step_times(self, words: str, work: Work, made: tuple[SpecConfig, Drafter] | None = None) -> Times:
        """Run the prompts, then some decode steps, and drop everything again."""
        self.tell(words, 1 - max(0.0, self.deadline - time.perf_counter()) / self.budget_s)
        group, spec = DrafterGroup(self.target), SpecConfig()
        if work.num_draft:
            base, drafter = made or (SpecConfig(drafter="ngram"), StandInDrafter(self.target.vocab_size))
            spec = replace(base, num_draft=work.num_draft)
            key = drafter_key(spec)
            assert key is not None
            group.drafters[key] = drafter
        engine = Engine(self.target, group, limits=SchedulerConfig(work.batch, _MAX_CHUNK), eos_token_ids=())
        prediction = [0] if "predicted" in spec.leaves else None
        params = SamplingParams(max_tokens=room(work), seed=self.seed, ignore_eos=True, prediction=prediction)
        prompt = stand_in(self.target, work.context_tokens, self.seed)
        # Each request is a tenant's only one: none finds the prompt of another in the prefix cache.
        own = (replace(params, tenant=f"step bench {next(_tenants)}") for _ in range(work.batch))
        states = [engine.submit(prompt, one, spec) for one in own]
        prompt_s: list[float] = []
        step_s: list[float] = []
        draft_s: list[float] = []
        try:
            while not all(state.provenance for state in states):
                prompt_s.append(timed(engine)[0])
            began = time.perf_counter()
            while len(step_s) < _FEWEST_STEPS or (len(step_s) < _MAX_STEPS and time.perf_counter() - began < _POINT_S):
                whole_s, spent_s = timed(engine)
                step_s.append(whole_s - spent_s)
                draft_s.append(spent_s)
            return Times(tuple(prompt_s), tuple(step_s), tuple(draft_s))
        finally:
            engine.close()

    def _points(
        self, name: str, counts: Sequence[int], work: Callable[[int], Work], measure: Callable[[Work, str], float]
    ) -> Curve:
        """One point after the other while they fit and can be afforded; the first one always."""
        points: list[tuple[int, float]] = []
        last_s = 0.0
        for count in counts:
            words = f"{name} {count}"
            if not self.fits(work(count)) or (points and not self._affords(words, last_s)):
                continue
            began = time.perf_counter()
            points.append((count, measure(work(count), words)))
            last_s = time.perf_counter() - began
        return Curve(tuple(points))

    def fits(self, work: Work) -> bool:
        """Whether context and cache hold the work; what does not fit into the context is no point of this model's."""
        tokens = work.context_tokens + room(work)
        if tokens > self.target.max_context_tokens:
            return False
        if work.batch * self.target.footprint_tokens(tokens) > self.target.num_free_tokens():
            self.skipped.append(f"batch {work.batch} at {work.context_tokens} tokens")
            return False
        return True

    def _affords(self, words: str, seconds: float) -> bool:
        if time.perf_counter() + seconds <= self.deadline:
            return True
        self.skipped.append(words)
        return False


def room(work: Work) -> int:
    """An answer length that the timed steps cannot reach, even if every draft token is accepted."""
    return (_MAX_STEPS + 2) * (1 + work.num_draft)


def timed(engine: Engine) -> tuple[float, float]:
    """Seconds of one step, and of the drafters in it."""
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began, sum(engine.drafters.spent_s.values())


def stand_in(target: LanguageModel, num_tokens: int, seed: int) -> list[int]:
    """A prompt of random tokens, said again and again, so that lookups find something."""
    rng = random.Random(seed)
    phrase = [rng.randrange(target.vocab_size) for _ in range(_PERIOD)]
    return [phrase[place % _PERIOD] for place in range(num_tokens)]
