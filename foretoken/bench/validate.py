"""`foretoken simulate --measure`: what the simulator says of a trace, and what the engine then does with it.

Every setting is calibrated on requests of their own (other prompts, other arrivals), then the traces are simulated, and only then
run in real time. Beside the figures stands where an error comes from: each batch that really ran is put to the cost model again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from foretoken.bench.calibrate import CALIBRATION, MEASURED, Calibration, calibrate, cut_prompts, real_steps, sample_jobs
from foretoken.bench.replay import Clock, Replayed, Serving, WallClock, replay
from foretoken.config import SpecConfig
from foretoken.plan.arrivals import Job
from foretoken.plan.outcome import Outcome, Served, outcome
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.plan.refine import refine
from foretoken.plan.replica import Step
from foretoken.plan.setting import Limits, Setting
from foretoken.plan.simulate import simulate
from foretoken.plan.traces import capacity

FIGURES = ("tokens_per_s", "latency_s_p50", "latency_s_p95", "ttft_s_p50", "ttft_s_p95")
JUDGED = ("tokens_per_s", "latency_s_p95")  # what a prediction is judged by
TOLERANCE = 0.15
_AUTO_NUM_DRAFT = 8  # guesses per round of a calibration where the controller will choose
_SEEDS = 7  # simulations of a trace; the median of each figure counts
_CALIBRATION_REQUESTS = 96


@dataclass(frozen=True)
class Causes:
    """Where an error may come from: predicted against measured, each pair as a ratio less one.

    `step` and `draft`: seconds that the cost model gives the very batches that ran. `emitted`: tokens per pass of a request.
    `rows`: rows of a decoding request. `batch`: requests per step. `outside_share` is the measured share of the time between steps.
    """

    step: float
    draft: float | None
    emitted: float
    rows: float
    batch: float
    outside_share: float


@dataclass(frozen=True)
class Comparison:
    """One setting on one trace; `requests` are those that really ran, in order of arrival."""

    trace: str
    predicted: Outcome
    measured: Outcome
    causes: Causes
    requests: tuple[Served, ...]

    def error(self, name: str) -> float:
        """Predicted over measured, less one; 0 where nothing was measured."""
        measured = float(getattr(self.measured, name))
        return float(getattr(self.predicted, name)) / measured - 1 if measured else 0.0

    @property
    def holds(self) -> bool:
        """Whether what is judged lies within the tolerance."""
        return all(abs(self.error(name)) <= TOLERANCE for name in JUDGED)


@dataclass(frozen=True)
class Trial:
    """What is done in turn: each setting is calibrated on about `calibration_requests`, then runs all traces."""

    settings: tuple[Setting, ...]
    traces: Mapping[str, Sequence[Job]]
    limits: Limits
    seed: int = 0
    calibration_requests: int = _CALIBRATION_REQUESTS
    clock: Callable[[], Clock] = WallClock


Tell = Callable[[str, int], None]  # what is being done, and requests that finished since the last call


def compare(
    llm: Serving,
    encode: Callable[[str], list[int]],
    profile: Profile,
    specs: Mapping[str, SpecConfig],
    trial: Trial,
    tell: Tell = lambda _words, _finished: None,
) -> list[Comparison]:
    """Calibrate, simulate and run each setting on each trace; `specs` by drafter.

    Raises:
        InputError: a request that names no slice of texts.
        ForetokenError: what the engine or the simulator raises.
    """
    every = [job for jobs in trial.traces.values() for job in jobs]
    others = sample_jobs(every, trial.calibration_requests, capacity(profile, every, trial.limits), trial.seed)
    other_prompts = cut_prompts(encode, others, CALIBRATION)
    prompts = {name: cut_prompts(encode, jobs, MEASURED) for name, jobs in trial.traces.items()}
    found = []
    for setting in trial.settings:
        spec = spec_of(setting, specs)
        known = calibrate(llm, others, other_prompts, _fixed(spec), trial.clock(), _counter(tell, f"{setting.name}: calibration"))
        steps = known.steps
        if spec.num_draft == "auto" and spec.drafter is not None:  # what steps cost where the controller chooses: drafts of other sizes
            steps = calibrate(llm, others, other_prompts, spec, trial.clock(), _counter(tell, f"{setting.name}: calibration, free")).steps
        refined = refine(profile, steps, setting.drafter)
        for name, jobs in trial.traces.items():
            tell(f"{setting.name}: {name}, simulated", 0)
            predicted, simulated = predict(refined, jobs, setting, known, trial)
            own = [replace(spec, tenant=f"{name} {setting.name} {index}") for index in range(len(jobs))]
            done = replay(llm, jobs, prompts[name], own, setting.name, trial.clock(), _counter(tell, f"{setting.name}: {name}"))
            found.append(Comparison(name, predicted, done.outcome, causes(refined, setting, predicted, simulated, done), done.served))
    return found


def spec_of(setting: Setting, specs: Mapping[str, SpecConfig]) -> SpecConfig:
    """What requests of a setting ask for."""
    if setting.drafter is None:
        return SpecConfig()
    return replace(specs[setting.drafter], num_draft="auto" if setting.num_draft is None else setting.num_draft)


def predict(profile: Profile, jobs: Sequence[Job], setting: Setting, known: Calibration, trial: Trial) -> tuple[Outcome, list[Step]]:
    """The median of each figure over simulations that differ by their luck, and the steps of the first."""
    acceptance = {} if setting.drafter is None else {setting.drafter: known.records}
    steps: list[Step] = []
    outcomes = []
    for turn in range(_SEEDS):
        watch = None if turn else steps.append
        outcomes.append(outcome(simulate(profile, jobs, setting, trial.limits, trial.seed + turn, known=acceptance, watch=watch)))
    numbers = [part.name for part in fields(Outcome) if isinstance(getattr(outcomes[0], part.name), int | float)]
    return replace(outcomes[0], **{name: median(getattr(one, name) for one in outcomes) for name in numbers}), steps


def causes(profile: Profile, setting: Setting, predicted: Outcome, steps: Sequence[Step], done: Replayed) -> Causes:
    """The decomposition of one comparison."""
    real = real_steps(done)
    said_s = sum(profile.step_s(one.decode_rows, one.contexts, one.prompt_tokens) for one in real)
    draft_s = sum(one.draft_s for one in real)
    said_draft_s = 0.0
    if setting.drafter is not None:
        cost = profile.drafters[setting.drafter]
        said_draft_s = sum(cost.seconds(one.longest_draft, one.num_drafting, one.num_unread) for one in real)
    measured = done.outcome
    theirs = [one.step for one in done.steps]
    return Causes(
        step=_less_one(said_s, sum(one.target_s for one in real)),
        draft=_less_one(said_draft_s, draft_s) if draft_s else None,
        emitted=_less_one(predicted.emitted_per_step, measured.emitted_per_step),
        rows=_less_one(_rows_per_request(steps), _rows_per_request(theirs)),
        batch=_less_one(_requests_per_step(steps), _requests_per_step(theirs)),
        outside_share=done.outside_s / measured.makespan_s if measured.makespan_s else 0.0,
    )


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """Several passes of one measurement as one: the median of every point that all of them have."""
    first = profiles[0]
    drafters = {name: _median_cost([one.drafters[name] for one in profiles]) for name in first.drafters}
    curves = {name: _median_curve([getattr(one, name) for one in profiles]) for name in ("rows", "batch", "context", "chunk")}
    caveats = tuple(dict.fromkeys(text for one in profiles for text in one.caveats))
    return replace(first, **curves, drafters=drafters, caveats=caveats)  # type: ignore[arg-type]  # mypy takes the curves for any field


def _median_cost(costs: Sequence[DrafterCost]) -> DrafterCost:
    curves = {name: _median_curve([getattr(cost, name) for cost in costs]) for name in ("guesses", "batch", "prompt")}
    return replace(costs[0], **curves)  # type: ignore[arg-type]  # as above


def _median_curve(curves: Sequence[Curve]) -> Curve:
    told = [dict(curve.points) for curve in curves]
    return Curve(tuple((count, median(points[count] for points in told)) for count in told[0] if all(count in points for points in told)))


def _fixed(spec: SpecConfig) -> SpecConfig:
    return replace(spec, num_draft=_AUTO_NUM_DRAFT) if spec.drafter is not None and spec.num_draft == "auto" else spec


def _counter(tell: Tell, words: str) -> Callable[[int], None]:
    tell(words, 0)
    return lambda _finished: tell(words, 1)


def _rows_per_request(steps: Sequence[Step]) -> float:
    """Rows of decoding requests by rounds that emitted; a prompt's last step counts as a round of one row."""
    rounds = sum(len(step.emitted) for step in steps)
    return sum(step.num_rows for step in steps) / rounds if rounds else 0.0


def _requests_per_step(steps: Sequence[Step]) -> float:
    return sum(len(step.emitted) for step in steps) / len(steps) if steps else 0.0


def _less_one(predicted: float, measured: float) -> float:
    return predicted / measured - 1 if measured else 0.0
