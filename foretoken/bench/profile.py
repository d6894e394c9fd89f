"""`foretoken bench --profile`: what a step of the target takes by rows, context, batch and prompt, and what drafters take.

Whole engine steps are timed, scheduling and bookkeeping included, with stand-ins for requests: random prompts, and a drafter that
guesses a given number of tokens at no cost. Drafters are timed at their real work on the same engine. Medians count.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from foretoken.bench.drafting import DrafterChoice
from foretoken.bench.report import machine, source_caveats, versions
from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Drafter, Feedback
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.engine import Engine
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.errors import ConfigError, StorageError
from foretoken.model.interface import LanguageModel
from foretoken.model.open import model_folder, open_model
from foretoken.model.tokenizer import load_tokenizer
from foretoken.plan.profile import Curve, DrafterCost, Profile, profile_from_mapping

_SHORT = 32  # tokens of the past where the past is not what is measured
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_BATCHES = (1, 2, 4, 8, 16)
_GUESSES = (1, 2, 4, 8)
_DRAFT_BATCHES = (1, 4, 8, 16)
_BATCH_NUM_DRAFT = 4
_PROMPTS = (32, 256)
_CONTEXTS = (32, 128, 512, 2048, 8192)
_MOST_CHUNK = 512
_PERIOD = 16
_FEWEST_STEPS, _MOST_STEPS, _POINT_S = 3, 9, 1.0  # timed steps of a point: as many as fit into a second


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        StorageError: the file cannot be read, or is not JSON.
        InputError: it is no profile, or a malformed one; names the part.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"profile: cannot read {path}: {error}; make one with `foretoken bench --profile --out DIR`") from error
    return profile_from_mapping(raw)


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure. `budget_s` bounds the measuring: points that would not fit any more are left out, and a caveat says so.

    `threads=None` leaves torch's own number.
    """

    target: str
    draft: str | None = None
    drafters: tuple[DrafterChoice, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    budget_s: float = 45.0
    seed: int = 0


Tell = Callable[[str, float], None]  # what is being measured, and the share of the time that is used up


def run_profile(options: ProfileOptions, command: str = "foretoken bench --profile", tell: Tell = lambda _words, _share: None) -> Profile:
    """Open the target, measure, and return the profile.

    Raises:
        ForetokenError: a model that cannot be used, or a drafter that cannot be made.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = model_folder(options.target)
    target, tokenizer = open_model(folder, options.dtype, options.device), load_tokenizer(folder)
    factory = DrafterFactory(folder, target, tokenizer, ModelOptions(options.dtype, options.device))
    specs = {choice.label: _spec(choice, options) for choice in options.drafters if choice.required or options.draft or "draft" not in choice.needs}
    drafters = {name: (spec, factory.make(spec)) for name, spec in specs.items()}
    caveats = source_caveats(folder, None if options.draft is None else model_folder(options.draft), os.getloadavg()[0])
    about = {"name": options.target, "dtype": options.dtype, "device": str(target.device), "threads": torch.get_num_threads()}
    return measure_profile(target, drafters, options.budget_s, options.seed, about, command, caveats, tell)


def measure_profile(
    target: LanguageModel,
    drafters: Mapping[str, tuple[SpecConfig, Drafter]],
    budget_s: float,
    seed: int,
    about: Mapping[str, Any],
    command: str,
    caveats: Sequence[str] = (),
    tell: Tell = lambda _words, _share: None,
) -> Profile:
    """The profile of an open target: first what matters most, the rest while `budget_s` lasts."""
    bench = _Bench(target, seed, time.perf_counter() + budget_s, budget_s, tell)
    bench.step_times("warm-up", Work(1, _SHORT, 3))
    rows = bench.curve("rows", _ROWS, lambda rows: Work(1, _SHORT, rows - 1))
    guesses = {name: bench.drafter_curve(name, made, _GUESSES, lambda count: Work(1, _SHORT, count)) for name, made in drafters.items()}
    batch = bench.curve("batch", _BATCHES, lambda count: Work(count, _SHORT, 0))
    together = {name: bench.drafter_curve(f"{name} batch", made, _DRAFT_BATCHES, _drafting_batch) for name, made in drafters.items()}
    chunk, context = bench.long_texts()
    prompts = {name: bench.prompt_curve(name, made) for name, made in drafters.items()}
    return Profile(
        target={
            **about,
            "num_parameters": target.num_parameters,
            "vocab_size": target.vocab_size,
            "max_context_tokens": target.max_context_tokens,
            "block_tokens": target.footprint_tokens(1),
        },
        machine=machine(),
        versions=versions(),
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        rows=rows,
        batch=batch,
        context=context,
        chunk=chunk,
        drafters={name: DrafterCost(guesses[name], together[name], _BATCH_NUM_DRAFT, prompts[name]) for name in drafters},
        caveats=(*caveats, *bench.left_out()),
    )


def write_profile(profile: Profile, folder: Path, name: str) -> Path:
    """Write `folder/YYYY-MM-DD-name.json`; an earlier file of the day is kept, and this one numbered.

    Raises:
        StorageError: the folder cannot be written.
    """
    stem, taken = f"{profile.date[:10]}-{name}", 1
    while (folder / f"{stem}.json").exists():
        taken += 1
        stem = f"{profile.date[:10]}-{name}-{taken}"
    path = folder / f"{stem}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as file:
            file.write(json.dumps(profile.as_dict(), indent=1, allow_nan=False) + "\n")
        Path(file.name).chmod(0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise StorageError(f"cannot write the profile to {folder}: {error}") from error
    return path


def print_profile(profile: Profile, file: Path | None, console: Console | None = None) -> None:
    """Every curve on a line: counts with milliseconds."""
    console = console or Console()
    curves = {"rows": profile.rows, "requests": profile.batch, "prompt tokens": profile.chunk, "past tokens": profile.context}
    for name, cost in profile.drafters.items():
        curves |= {f"{name}: guesses": cost.guesses, f"{name}: requests": cost.batch, f"{name}: first, text of": cost.prompt}
    table = Table("step by", "milliseconds", box=box.SIMPLE_HEAD)
    for name, curve in curves.items():
        if curve.points:
            table.add_row(name, "  ".join(f"{count}: {1e3 * seconds:.3g}" for count, seconds in curve.points))
    console.print(table)
    for caveat in profile.caveats:
        console.print(f"note: {caveat}", highlight=False, markup=False)
    if file is not None:
        console.print(f"written: {file}", highlight=False, markup=False)


def _spec(choice: DrafterChoice, options: ProfileOptions) -> SpecConfig:
    if "draft" in choice.needs and options.draft is None:
        raise ConfigError("draft", None, f"drafter {choice.label} needs a draft; give its folder, or leave {choice.name} out of the drafters")
    given = {"draft": options.draft, "prediction": [0]}
    return choice.spec(**{field: given[field] for field in choice.needs})


@dataclass(frozen=True)
class Work:
    """Steps to time: `batch` requests with a past of about `context_tokens`, `num_draft` guesses each."""

    batch: int
    context_tokens: int
    num_draft: int


@dataclass(frozen=True)
class Times:
    """Seconds of a kind of step: the prompts' own steps, then for each decode step the whole but the drafter, and the drafter."""

    prompt_s: tuple[float, ...]
    step_s: tuple[float, ...]
    draft_s: tuple[float, ...]


class _Filler:
    """Guesses the number of tokens it is asked for; which ones does not matter."""

    name = "filler"

    def start(self, request: Request) -> None:
        """Keeps nothing."""

    def propose(self, batch: Batch) -> Draft:
        """A chain of token 0 for every request."""
        counts = [entry.num_draft for entry in batch.decoding]
        offsets = (0, *itertools.accumulate(counts))
        parents = tuple(place - 1 for count in counts for place in range(count))
        return Draft(torch.zeros(offsets[-1], dtype=torch.int64), parents, offsets, tuple(self.name if count else None for count in counts))

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Learns nothing."""

    def finish(self, request_id: int) -> None:
        """Keeps nothing."""


@dataclass
class _Bench:
    """Times steps of one target until its time is used up."""

    target: LanguageModel
    seed: int
    deadline: float
    budget_s: float
    tell: Tell
    skipped: list[str] = field(default_factory=list)

    def curve(self, name: str, counts: Sequence[int], work: Callable[[int], Work]) -> Curve:
        """Median seconds of a step by count."""
        return self._points(name, counts, work, lambda work, words: median(self.step_times(words, work).step_s))

    def drafter_curve(self, name: str, made: tuple[SpecConfig, Drafter], counts: Sequence[int], work: Callable[[int], Work]) -> Curve:
        """Median seconds of a drafter by count."""
        return self._points(name, counts, work, lambda work, words: median(self.step_times(words, work, made).draft_s))

    def prompt_curve(self, name: str, made: tuple[SpecConfig, Drafter]) -> Curve:
        """What a drafter's first round takes beyond a later one, by tokens of the text."""

        def extra_s(work: Work, words: str) -> float:
            draft_s = self.step_times(words, work, made).draft_s
            return max(0.0, draft_s[0] - median(draft_s[1:]))

        return self._points(f"{name} prompt", _PROMPTS, lambda count: Work(1, count, _BATCH_NUM_DRAFT), extra_s)

    def long_texts(self) -> tuple[Curve, Curve]:
        """Seconds of a prompt's chunk by tokens, and of a decode step by tokens of the past; one request serves both."""
        chunks: dict[int, float] = {}
        steps: dict[int, float] = {}
        before, last_s = _SHORT, 0.0
        for count in _CONTEXTS:
            if not self._fits(Work(1, count, 0)) or not self._affords(f"context {count}", last_s * count / before):
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
        group, spec = DrafterGroup(self.target.device), SpecConfig()
        if work.num_draft:
            base, drafter = made or (SpecConfig(drafter="ngram"), _Filler())
            spec = replace(base, num_draft=work.num_draft)
            key = drafter_key(spec)
            assert key is not None
            group.drafters[key] = drafter
        engine = Engine(self.target, group, limits=SchedulerConfig(work.batch, _MOST_CHUNK), eos_token_ids=())
        rng = random.Random(self.seed)
        params = SamplingParams(max_tokens=_room(work), seed=self.seed, ignore_eos=True)
        phrase = [rng.randrange(self.target.vocab_size) for _ in range(_PERIOD)]  # said again and again, so that lookups find something
        prompt = [phrase[place % _PERIOD] for place in range(work.context_tokens)]
        states = [engine.submit(prompt, params, spec) for _ in range(work.batch)]
        prompt_s: list[float] = []
        step_s: list[float] = []
        draft_s: list[float] = []
        try:
            while not all(state.origins for state in states):
                prompt_s.append(_timed(engine)[0])
            began = time.perf_counter()
            while len(step_s) < _FEWEST_STEPS or (len(step_s) < _MOST_STEPS and time.perf_counter() - began < _POINT_S):
                whole_s, spent_s = _timed(engine)
                step_s.append(whole_s - spent_s)
                draft_s.append(spent_s)
            return Times(tuple(prompt_s), tuple(step_s), tuple(draft_s))
        finally:
            engine.close()

    def _points(self, name: str, counts: Sequence[int], work: Callable[[int], Work], measure: Callable[[Work, str], float]) -> Curve:
        """One point after the other while they fit and can be afforded; the first one always."""
        points: list[tuple[int, float]] = []
        last_s = 0.0
        for count in counts:
            words = f"{name} {count}"
            if not self._fits(work(count)) or (points and not self._affords(words, last_s)):
                continue
            began = time.perf_counter()
            points.append((count, measure(work(count), words)))
            last_s = time.perf_counter() - began
        return Curve(tuple(points))

    def _fits(self, work: Work) -> bool:
        """Whether context and cache hold the work; what does not fit into the context is no point of this model's at all."""
        tokens = work.context_tokens + _room(work)
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


def _drafting_batch(batch: int) -> Work:
    return Work(batch, _SHORT, _BATCH_NUM_DRAFT)


def _room(work: Work) -> int:
    """Tokens of an answer that no number of timed steps can come to the end of, however many guesses stand."""
    return (_MOST_STEPS + 2) * (1 + work.num_draft)


def _timed(engine: Engine) -> tuple[float, float]:
    """Seconds of one step, and of the drafters in it."""
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began, sum(engine.drafters.spent_s.values())
