"""The simulator's predictions against runs of the engine.

Every setting is calibrated on other requests (other prompts, other arrivals), then the arrivals are simulated, and only
then run in real time. The comparison also shows where an error comes from: the cost model predicts the batches that
really ran, and a probe measures whether the speed of the machine changed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from foretoken.config import SpecConfig
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.simulate.inputs import Job, Limits, SimSetting
from foretoken.simulate.loads import Server, built_in, sample
from foretoken.simulate.metrics import Served, SimMetrics, outcome
from foretoken.simulate.sim_request import Known
from foretoken.simulate.simulate import Step, simulate
from studies.validation.answers import FROM_TEXT, Answer
from studies.validation.calibrate import (
    CALIBRATION,
    MEASURED,
    Calibration,
    Prompts,
    calibrate,
    real_steps,
    records_from,
    sample_jobs,
)
from studies.validation.pace import pace_s
from studies.validation.refine import refine
from studies.validation.replay import Clock, Replayed, Serving, WallClock, replay

FIGURES = ("tokens_per_s", "latency_s_p50", "latency_s_p95", "ttft_s_p50", "ttft_s_p95")
JUDGED = ("tokens_per_s", "latency_s_p95")  # the figures that decide whether a prediction holds
TOLERANCE = 0.15
_AUTO_NUM_DRAFT = 8  # draft tokens per round of a calibration for a setting with an adaptive number
_SEEDS = 7  # simulations with different seeds; the median of each figure is reported
_CALIBRATION_REQUESTS = 192
_SAMPLED = 256  # requests that represent built-in arrivals before their rate is known


@dataclass(frozen=True)
class Causes:
    """Sources of an error: predicted over measured, less one.

    `step` and `draft`: seconds that the cost model predicts for the batches that ran. `emitted`: tokens per round of a
    request. `rows`: rows of a decoding request. `batch`: requests per step. `pace`: seconds of a fixed probe at the
    calibration against those at the run, which is `step` if nothing else changed. `outside_share` is the measured share
    of the time between steps.
    """

    step: float
    draft: float | None
    emitted: float
    rows: float
    batch: float
    pace: float
    outside_share: float


@dataclass(frozen=True)
class Comparison:
    """One setting on one set of arrivals: its `jobs`, and the result of each in `requests`, in order of arrival."""

    trace: str
    jobs: tuple[Job, ...]
    predicted: SimMetrics
    measured: SimMetrics
    causes: Causes
    requests: tuple[Served, ...]

    def error(self, name: str) -> float:
        """Predicted over measured, less one; 0 where nothing was measured."""
        measured = float(getattr(self.measured, name))
        return float(getattr(self.predicted, name)) / measured - 1 if measured else 0.0

    @property
    def holds(self) -> bool:
        """Whether the judged figures are within the tolerance."""
        return all(abs(self.error(name)) <= TOLERANCE for name in JUDGED)


@dataclass(frozen=True)
class ValidationPlan:
    """What to compare: each setting is calibrated on about `calibration_requests`, then runs all arrivals.

    A trace is its requests, or None for the built-in arrivals of that name, which last `seconds` and have rates
    relative to the capacity of the setting.
    """

    settings: tuple[SimSetting, ...]
    traces: Mapping[str, Sequence[Job] | None]
    limits: Limits
    seed: int = 0
    seconds: float | None = None
    calibration_requests: int = _CALIBRATION_REQUESTS
    clock: Callable[[], Clock] = WallClock


Tell = Callable[[str, int], None]  # called with the current work, and the requests finished since the last call


def compare(
    llm: Serving,
    encode: Callable[[str], list[int]],
    profile: Profile,
    specs: Mapping[str, SpecConfig],
    trial: ValidationPlan,
    tell: Tell = lambda _words, _finished: None,
) -> list[Comparison]:
    """Calibrate, simulate and run each setting on each trace; `specs` by drafter.

    Raises:
        InputError: a request that names no slice of texts.
        ForetokenError: what the engine or the simulator raises.
    """
    comparer = _Comparer(llm, encode, profile, specs, trial, tell)
    return [found for setting in trial.settings for found in comparer.compare(setting)]


class _Comparer:
    """Runs and predicts. Answers of all calibrations are kept: each shows what a lookup would have drafted."""

    def __init__(
        self,
        llm: Serving,
        encode: Callable[[str], list[int]],
        profile: Profile,
        specs: Mapping[str, SpecConfig],
        trial: ValidationPlan,
        tell: Tell,
    ) -> None:
        self._llm, self._profile, self._specs, self._trial, self._tell = llm, profile, specs, trial, tell
        every = [
            job
            for name, jobs in trial.traces.items()
            for job in (sample(name, _SAMPLED, trial.seed) if jobs is None else jobs)
        ]
        rate = Server(profile, trial.limits).capacity(every)
        self._others = sample_jobs(every, trial.calibration_requests, rate, trial.seed)
        self._prompts, self._other_prompts = Prompts(encode, MEASURED), Prompts(encode, CALIBRATION)
        self._answers: list[Answer] = []

    def compare(self, setting: SimSetting) -> list[Comparison]:
        """One setting on all arrivals, each right after its own calibration, since the speed of the machine drifts."""
        trial, spec, found = self._trial, spec_of(setting, self._specs), []
        for name, given in trial.traces.items():
            refined, known, calibration_s = self._calibrated(setting, spec)
            before_s = self._pace_s()
            jobs = (
                built_in(name, Server(refined, trial.limits, (setting,), known), trial.seed, trial.seconds)
                if given is None
                else given
            )
            self._tell(f"{setting.name}: {name}, simulated", 0)
            predicted, simulated = predict(refined, jobs, setting, known, trial)
            self._prompts.begin_anew()
            done = replay(
                self._llm,
                jobs,
                self._prompts.cut(jobs),
                [spec] * len(jobs),
                setting.name,
                trial.clock(),
                self._counter(f"{setting.name}: {name}"),
                tenant=f"{name} {setting.name}",
            )
            pace = calibration_s / ((before_s + self._pace_s()) / 2) - 1
            found.append(
                Comparison(
                    name,
                    tuple(jobs),
                    predicted,
                    done.outcome,
                    causes(refined, setting, predicted, simulated, done, pace),
                    done.served,
                )
            )
        return found

    def _calibrated(self, setting: SimSetting, spec: SpecConfig) -> tuple[Profile, Known, float]:
        """The corrected profile, the records of draft tokens, and the seconds of the probe.

        With an adaptive number of draft tokens, a run with the controller's choices gives the cost of steps with drafts
        of all sizes. Drafters that need more than the text get another run with a fixed number, for their acceptance.
        """
        before_s = self._pace_s()
        free = spec.num_draft == "auto" and spec.drafter is not None
        runs = []
        if free and spec.drafter not in FROM_TEXT:
            runs.append(self._calibrate(f"{setting.name}: calibration", replace(spec, num_draft=_AUTO_NUM_DRAFT)))
        runs.append(self._calibrate(f"{setting.name}: calibration" + (", free" if runs else ""), spec))
        refined = refine(self._profile, runs[-1].steps, _drafter(setting))
        calibration_s = (before_s + self._pace_s()) / 2
        known: Known = (
            {} if not setting.drafters else {setting.drafters[0]: records_from(self._llm, spec, runs[0], self._answers)}
        )
        return refined, known, calibration_s

    def _calibrate(self, words: str, spec: SpecConfig) -> Calibration:
        found = calibrate(
            self._llm,
            self._others,
            self._other_prompts.cut(self._others),
            spec,
            self._trial.clock(),
            self._counter(words),
        )
        self._answers += found.answers
        return found

    def _pace_s(self) -> float:
        return pace_s(self._llm, self._trial.clock())

    def _counter(self, words: str) -> Callable[[int], None]:
        self._tell(words, 0)
        return lambda _finished: self._tell(words, 1)


def spec_of(setting: SimSetting, specs: Mapping[str, SpecConfig]) -> SpecConfig:
    """The configuration of requests of a setting."""
    if not setting.drafters:
        return SpecConfig()
    return replace(specs[setting.drafters[0]], num_draft="auto" if setting.num_draft is None else setting.num_draft)


def _drafter(setting: SimSetting) -> str | None:
    """The drafter of a setting: only single ones are validated."""
    return setting.drafters[0] if setting.drafters else None


def predict(
    profile: Profile, jobs: Sequence[Job], setting: SimSetting, known: Known, trial: ValidationPlan
) -> tuple[SimMetrics, list[Step]]:
    """The median of each figure over simulations with different seeds, and the steps of the first."""
    steps: list[Step] = []
    outcomes = []
    for turn in range(_SEEDS):
        watch = None if turn else steps.append
        outcomes.append(
            outcome(simulate(profile, jobs, setting, trial.limits, trial.seed + turn, known=known, watch=watch))
        )
    numbers = [part.name for part in fields(SimMetrics) if isinstance(getattr(outcomes[0], part.name), int | float)]
    return replace(outcomes[0], **{name: median(getattr(one, name) for one in outcomes) for name in numbers}), steps


def causes(
    profile: Profile, setting: SimSetting, predicted: SimMetrics, steps: Sequence[Step], done: Replayed, pace: float
) -> Causes:
    """The sources of error of one comparison; `pace` as in `Causes`."""
    real = real_steps(done)
    said_s = sum(profile.step_s(one.decode_rows, one.contexts, one.prompt_tokens) for one in real)
    draft_s = sum(one.draft_s for one in real)
    said_draft_s = 0.0
    if setting.drafters:
        cost = profile.drafters[setting.drafters[0]]
        said_draft_s = sum(cost.seconds(one.longest_draft, one.num_drafting, one.num_unread) for one in real)
    measured = done.outcome
    theirs = [one.step for one in done.steps]
    return Causes(
        step=_less_one(said_s, sum(one.target_s for one in real)),
        draft=_less_one(said_draft_s, draft_s) if draft_s else None,
        emitted=_less_one(predicted.emitted_per_step, measured.emitted_per_step),
        rows=_less_one(_rows_per_request(steps), _rows_per_request(theirs)),
        batch=_less_one(_requests_per_step(steps), _requests_per_step(theirs)),
        pace=pace,
        outside_share=done.outside_s / measured.makespan_s if measured.makespan_s else 0.0,
    )


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """The median of several profiles, at every point that all of them have."""
    first = profiles[0]
    drafters = {name: _median_cost([one.drafters[name] for one in profiles]) for name in first.drafters}
    curves = {
        name: _median_curve([getattr(one, name) for one in profiles]) for name in ("rows", "batch", "context", "chunk")
    }
    caveats = tuple(dict.fromkeys(text for one in profiles for text in one.caveats))
    return replace(first, **curves, drafters=drafters, caveats=caveats)  # type: ignore[arg-type]  # mypy takes the curves for any field


def _median_cost(costs: Sequence[DrafterCost]) -> DrafterCost:
    curves = {name: _median_curve([getattr(cost, name) for cost in costs]) for name in ("guesses", "batch", "prompt")}
    return replace(costs[0], **curves)  # type: ignore[arg-type]  # as above


def _median_curve(curves: Sequence[Curve]) -> Curve:
    told = [dict(curve.points) for curve in curves]
    return Curve(
        tuple(
            (count, median(points[count] for points in told))
            for count in told[0]
            if all(count in points for points in told)
        )
    )


def _rows_per_request(steps: Sequence[Step]) -> float:
    """Rows of decoding requests per round; the last step of a prompt counts as a round of one row."""
    rounds = sum(len(step.emitted) for step in steps)
    return sum(step.num_rows for step in steps) / rounds if rounds else 0.0


def _requests_per_step(steps: Sequence[Step]) -> float:
    return sum(len(step.emitted) for step in steps) / len(steps) if steps else 0.0


def _less_one(predicted: float, measured: float) -> float:
    return predicted / measured - 1 if measured else 0.0
