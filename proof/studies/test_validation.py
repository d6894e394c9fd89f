"""Replays on a clock that is scripted, and on tiny checkpoints: what is written down adds up, and agrees with the
simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.control.chooser import Policy
from foretoken.core import StepOutput
from foretoken.engine.adviser import Adviser
from foretoken.engine.request import RequestState
from foretoken.errors import EngineError, InputError
from foretoken.measure.workload import slices
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.simulate.inputs import Job, Limits, SimSetting, parse_trace
from foretoken.simulate.metrics import outcome
from foretoken.simulate.simulate import Step, simulate
from studies.validation.calibrate import (
    CALIBRATION,
    MEASURED,
    Prompts,
    calibrate,
    real_steps,
    records_from,
    sample_jobs,
)
from studies.validation.pace import pace_s
from studies.validation.replay import Replayed, WallClock, replay
from studies.validation.validate import ValidationPlan, causes, predict
from tests.helpers.checkpoints import token_ids
from tests.helpers.faults import Fault
from tests.simulate.test_simulate import CURVED, UNIT, DrawnDrafter, Real, mixed_jobs


class Scripted:
    """The engine of `tests.simulate.test_simulate` as an `LLM`, and the clock that its steps move on."""

    def __init__(self, real: Real) -> None:
        self.real, self.engine, self.time = real, real.engine, 7.0

    def submit(self, prompt: list[int], params: SamplingParams, spec: SpecConfig) -> RequestState:
        return self.engine.submit(prompt, params, spec)

    def reset_controller(self, policy: Policy | None = None) -> Policy:
        return self.engine.chooser.reset(policy)

    def step(self) -> list[StepOutput]:
        outputs = self.engine.step()
        self.time += self.real.draft_s + self.real.target_s
        return outputs

    def now(self) -> float:
        return self.time

    def wait_until(self, time_s: float) -> None:
        self.time = max(self.time, time_s)


def replayed(
    profile: Profile, jobs: Sequence[Job], setting: SimSetting, limits: Limits
) -> tuple[Replayed, list[Step], object]:
    steps: list[Step] = []
    ended = simulate(profile, jobs, setting, limits, seed=3, watch=steps.append)
    scripted = Scripted(Real(profile, setting, limits, jobs, DrawnDrafter(ended.requests)))
    specs = [scripted.real.spec] * len(jobs)
    return (
        replay(scripted, jobs, [[1] * job.prompt_tokens for job in jobs], specs, setting.name, scripted),
        steps,
        ended,
    )


@pytest.mark.parametrize(
    "setting", [SimSetting(), SimSetting(("ngram",), 3), SimSetting(("ngram",), None)], ids=lambda s: s.name
)
@pytest.mark.parametrize("limits", [Limits(), Limits(max_batch_size=3, max_prompt_tokens=16)], ids=["wide", "narrow"])
def test_on_a_scripted_clock_a_replay_is_the_simulation(setting: SimSetting, limits: Limits) -> None:
    """Every step and every figure; and each batch, put to the cost model again, costs what the script said."""
    jobs = mixed_jobs(14, 2)
    done, steps, ended = replayed(CURVED, jobs, setting, limits)
    assert len(done.steps) == len(steps)
    for ours, one in zip(steps, done.steps, strict=True):
        assert (one.step.num_rows, one.step.num_prompt_tokens, one.step.emitted) == (
            ours.num_rows,
            ours.num_prompt_tokens,
            ours.emitted,
        )
        assert (one.step.start_s, one.step.seconds) == pytest.approx((ours.start_s, ours.seconds))
        draft_s = (
            CURVED.drafters["ngram"].seconds(one.longest_draft, one.num_drafting, one.num_unread)
            if one.num_drafting
            else 0.0
        )
        assert draft_s + CURVED.step_s(one.step.num_rows, one.contexts, one.step.num_prompt_tokens) == pytest.approx(
            one.step.seconds
        )
    expected = outcome(ended)
    for name in (
        "tokens_per_s",
        "latency_s_p50",
        "latency_s_p95",
        "ttft_s_p95",
        "inter_token_s_p50",
        "utilisation",
        "emitted_per_step",
    ):
        assert getattr(done.outcome, name) == pytest.approx(getattr(expected, name)), name
    assert (done.outcome.num_drafted, done.outcome.num_accepted) == (expected.num_drafted, expected.num_accepted)
    found = causes(
        CURVED, setting, expected, steps, replace(done, steps=tuple(scripted_cost(one) for one in done.steps)), 0.25
    )
    assert (found.step, found.emitted, found.rows, found.batch, found.outside_share) == pytest.approx(
        (0, 0, 0, 0, 0), abs=1e-9
    )
    assert found.pace == 0.25


def scripted_cost(one: object) -> object:
    """What the drafter took on the scripted clock, instead of what it really took."""
    draft_s = (
        CURVED.drafters["ngram"].seconds(one.longest_draft, one.num_drafting, one.num_unread)
        if one.num_drafting
        else 0.0
    )
    return replace(one, step=replace(one.step, draft_s=draft_s))


def test_priorities_and_deadlines_of_a_trace_are_the_requests(pair: SimpleNamespace) -> None:
    """One at a time, all there at once: the engine serves them in the order in which the simulator does."""
    lines = [
        '{"prompt_tokens": 4, "output_tokens": 3}',
        '{"prompt_tokens": 4, "output_tokens": 3, "deadline_s": 500}',
        '{"prompt_tokens": 4, "output_tokens": 3, "deadline_s": 100}',
        '{"prompt_tokens": 4, "output_tokens": 3, "priority": 2, "deadline_s": 1}',
        '{"prompt_tokens": 4, "output_tokens": 3, "priority": -5}',
    ]
    jobs, limits = parse_trace(lines, (0.0,)), Limits(max_batch_size=1)
    prompts = [token_ids(4, seed=i) for i in range(len(jobs))]
    with LLM(pair.target, dtype="float32", max_batch_size=1) as llm:
        llm.engine.scheduler.config = replace(
            llm.engine.scheduler.config, aging_s=1e9
        )  # no period ends while they come
        done = replay(llm, jobs, prompts, [SpecConfig()] * len(jobs), "plain")
    told = simulate(UNIT, jobs, SimSetting(), limits).requests
    assert order(one.finish_s for one in done.served) == order(request.finish_s for request in told) == [4, 2, 1, 0, 3]


def order(times: Iterable[float]) -> list[int]:
    """Numbers of the requests, the earliest first."""
    listed = list(times)
    return sorted(range(len(listed)), key=listed.__getitem__)


@pytest.mark.filterwarnings("ignore:the draft has")
def test_what_is_written_down_adds_up(pair: SimpleNamespace) -> None:
    """Tokens, drafts and rows of a real run by its requests and by its steps; answers are those of plain decoding."""
    jobs = [Job(0.001 * i, 5 + 7 * i, 6 + 3 * i) for i in range(6)]
    prompts = [token_ids(job.prompt_tokens, seed=i) for i, job in enumerate(jobs)]
    with LLM(pair.target, dtype="float32", max_batch_size=4, max_prompt_tokens=16) as llm:
        plain = replay(llm, jobs, prompts, [SpecConfig()] * 6, "plain", tenant="plain")
        heard: list[int] = []
        done = replay(
            llm,
            jobs,
            prompts,
            [SpecConfig("draft_model", str(pair.draft), num_draft=3)] * 6,
            "drafting",
            tell=heard.append,
        )
        assert not llm.engine.has_work
        assert [type(watcher) for watcher in llm.engine.watchers] == [Adviser]
    assert done.token_ids == plain.token_ids
    assert (
        [one.num_tokens for one in done.served]
        == [job.output_tokens for job in jobs]
        == [len(ids) for ids in done.token_ids]
    )
    assert heard == [1, 2, 3, 4, 5, 6]
    emitted = [0] * 6
    for one in done.steps:
        for index, count in one.step.emitted:
            emitted[index] += count
        assert one.num_drafting == len(one.seen)
        anchors = len(one.step.emitted) - (one.step.num_rows == 0)
        assert one.step.num_rows <= anchors + sum(len(seen.parents) for _, _, _, seen in one.seen)
        assert 0 <= one.step.draft_s <= one.step.seconds
    assert emitted == [job.output_tokens for job in jobs]
    read = sum(one.step.num_prompt_tokens for one in done.steps)
    assert (
        sum(map(len, prompts)) - 6 <= read <= sum(map(len, prompts))
    )  # the last token of a prompt may stand alone, as a row
    rounds = done.rounds()
    assert sum(len(seen.parents) for own in rounds for _, seen in own.values()) == done.outcome.num_drafted > 0
    assert all(min(own) == 0 for own in rounds)  # the second token is the first that is drafted
    assert [sum(len(seen.path) for _, seen in own.values()) for own in rounds] == [
        one.num_accepted for one in done.served
    ]
    assert all(one.arrival_s <= one.first_s <= one.finish_s for one in done.served)
    starts = [one.step.start_s for one in done.steps]
    assert starts == sorted(starts)
    assert plain.outcome.num_drafted == 0
    assert plain.rounds() == [{}] * 6
    assert len(real_steps(done)) == len(done.steps)


@pytest.mark.filterwarnings("ignore:the draft has")
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_a_record_gives_back_the_run_it_is_of(pair: SimpleNamespace, drafter: str) -> None:
    """One request, looked at and then simulated from what was seen: the same rows and the same tokens in every step."""
    job = Job(0.0, 24, 60, "code")
    spec = (
        SpecConfig("ngram", num_draft=4)
        if drafter == "ngram"
        else SpecConfig("draft_model", str(pair.draft), num_draft=4)
    )
    with LLM(pair.target, dtype="float32") as llm:
        found = calibrate(llm, [job], [token_ids(24, seed=5)], spec)
        known = {drafter: records_from(llm, spec, found, found.answers)}
    profile = replace(UNIT, drafters={drafter: DrafterCost(Curve())})
    steps: list[Step] = []
    ended = simulate(profile, [job], SimSetting((drafter,), 4), Limits(), known=known, watch=steps.append)
    assert [(s.num_rows, s.emitted) for s in steps] == [(s.step.num_rows, s.step.emitted) for s in found.run.steps]
    assert ended.requests[0].num_accepted == found.run.outcome.num_accepted > 0
    predicted, _ = predict(profile, [job], SimSetting((drafter,), 4), known, ValidationPlan((), {}, Limits()))
    assert predicted.emitted_per_step == found.run.outcome.emitted_per_step


def test_the_pace_is_the_median_of_steps(pair: SimpleNamespace) -> None:
    """The prompt's step and pauses do not count; the engine is idle before and after."""
    with LLM(pair.target, dtype="float32") as llm:
        took = iter([9.0] * 4 + [2.0, 8.0, 2.0] * 13 + [2.0])
        real, clock = llm.engine.step, SimpleNamespace(time=0.0)
        clock.now = lambda: clock.time

        def step() -> list[StepOutput]:
            clock.time += next(took)
            return real()

        llm.engine.step = step  # type: ignore[method-assign]
        assert pace_s(llm, clock) == 2.0
        assert next(took, None) is None
        assert not llm.engine.has_work


def test_a_replay_begins_with_a_policy_that_knows_nothing(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="float32", profile="off") as llm:
        replay(llm, [Job(0.0, 4, 9)], [[1, 2, 3, 4]], [SpecConfig("ngram")], "before")
        learnt = llm.engine.chooser.policy
        assert not learnt.target_cost.is_empty
        done = replay(llm, [Job(0.0, 1, 1)], [[1]], [SpecConfig()], "after")
        assert llm.engine.chooser.policy is not learnt
        assert len(done.steps) == 1


def test_a_failing_request_fails_the_replay(pair: SimpleNamespace) -> None:
    """The others are dropped, and nothing stays behind in the engine."""
    with LLM(pair.target, dtype="float32") as llm:
        llm.target.forward = Fault(llm.target.forward, nth=3, once=False)  # type: ignore[method-assign]
        with (
            pytest.warns(UserWarning, match="Injected: injected"),
            pytest.raises(EngineError, match=r"of the replay failed: .*: injected"),
        ):
            replay(llm, [Job(0.0, 4, 9)] * 2, [[1, 2, 3, 4]] * 2, [SpecConfig()] * 2, "plain")
        assert not llm.engine.has_work
        assert [type(watcher) for watcher in llm.engine.watchers] == [Adviser]


def test_prompts_are_cut_to_the_wanted_lengths() -> None:
    """Calibration and measurement share no text and are cut alike; what is used again ends elsewhere; short texts get
    others before them.
    """

    def encode(text: str) -> list[int]:
        return [ord(char) for char in text]

    jobs = [Job(0.0, length, 4, name) for name in ("code", "json") for length in (1, 30, 4000)]
    mine, others = Prompts(encode, MEASURED).cut(jobs), Prompts(encode, CALIBRATION).cut(jobs)
    assert [len(ids) for ids in mine] == [len(ids) for ids in others] == [job.prompt_tokens for job in jobs]
    assert mine[1] != others[1]
    prompts = Prompts(encode, MEASURED)
    many = [*prompts.cut([Job(0.0, 60, 4, "json")] * 40), *prompts.cut([Job(0.0, 60, 4, "json")] * 40)]
    assert len({tuple(ids) for ids in many}) == 80
    prompts.begin_anew()
    assert prompts.cut([Job(0.0, 60, 4, "json")] * 80) == many
    texts = [prompt.text for prompt in slices(["json"], 400)]
    assert (
        sum(any(text.endswith("".join(map(chr, ids))) for text in texts) for ids in many) < 8
    )  # cut anywhere, not where texts end
    for value in ((0.5,), "poems"):
        with pytest.raises(InputError, match="a real run needs texts: name one of the slices code"):
            Prompts(encode, MEASURED).cut([Job(0.0, 3, 3, value)])


def test_calibration_requests_are_like_those_to_come() -> None:
    jobs = [Job(i, 10 + i, 5 + i % 7, "code" if i % 4 else "text") for i in range(40)]
    sample = sample_jobs(jobs, 40, rate=2.0, seed=0)
    assert {job.output_tokens for job in sample} == {11}
    assert [job.arrival_s for job in sample] == sorted(job.arrival_s for job in sample)
    assert sum(job.acceptance == "code" for job in sample) == 30
    assert sorted(job.prompt_tokens for job in sample) == sorted(job.prompt_tokens for job in jobs)
    assert sample == sample_jobs(jobs, 40, rate=2.0, seed=0) != sample_jobs(jobs, 40, rate=2.0, seed=1)
    # At first at 0.1 of the rate, at last at 3 times: the second half comes much faster.
    assert sample[-1].arrival_s - sample[20].arrival_s < sample[20].arrival_s


def test_real_time_is_waited_for() -> None:
    clock = WallClock()
    clock.wait_until(0.003)
    assert clock.now() >= 0.003
    clock.wait_until(0.0)
