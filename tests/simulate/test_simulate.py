"""The simulator against the real engine, step by step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.control.candidates import DraftBudget, PreviewAsk, Previews, StepOutcome
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Drafter, Feedback
from foretoken.draft.group import DrafterGroup, drafter_key, option_kind
from foretoken.draft.lookup_tree import LookupTree, assemble
from foretoken.engine.engine import Engine
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.simulate.inputs import Job, Limits, SimSetting
from foretoken.simulate.sim_request import SimRequest
from foretoken.simulate.simulate import Ended, Step, simulate
from tests.helpers.audit import KEPT_BY_DRAFTER
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import Script, ScriptedModel

VOCAB = 64
WRONG = 60
CURVED = Profile(
    *({}, {}, {}, "", ""),
    rows=Curve(((1, 1.0), (4, 1.1), (16, 2.0), (64, 7.0))),
    batch=Curve(((1, 1.0), (8, 2.5))),
    context=Curve(((8, 1.0), (64, 1.4))),
    chunk=Curve(((4, 1.0), (64, 5.0))),
    drafters={
        "ngram": DrafterCost(
            Curve(((1, 0.02), (16, 0.3))), Curve(((1, 0.1), (8, 0.2))), 4, Curve(((1, 0.01), (64, 0.2)))
        )
    },
)
UNIT = Profile(
    {}, {}, {}, "", "", rows=Curve(((1, 1.0),)), chunk=Curve(((1, 1.0),)), drafters={"ngram": DrafterCost(Curve())}
)


def says(length: int) -> int:
    """What the scripted target says after a text of `length` tokens."""
    return length % 50 + 1


class DrawnDrafter:
    """Drafts what the simulator drew: a right token where the draw says that it stands, a wrong one elsewhere."""

    name = "ngram"

    def __init__(self, requests: Sequence[SimRequest]) -> None:
        self.requests = requests

    def start(self, request: Request) -> None:
        pass

    def propose(self, batch: Batch) -> Draft:
        trees = []
        for entry in batch.decoding:
            request, emitted = (
                self.requests[entry.request.request_id],
                entry.round_start - len(entry.request.prompt_ids),
            )
            (chances,) = request.recorded
            tokens = []
            for place in range(entry.num_draft):
                stands = request.draws[emitted + place] < chances[min(place, len(chances) - 1)]
                tokens.append(says(entry.round_start + place) if stands else WRONG)
            trees.append(LookupTree(tuple(tokens), tuple(range(-1, len(tokens) - 1))))
        return assemble(self.name, trees)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        pass

    def finish(self, request_id: int) -> None:
        pass


KEPT_BY_DRAFTER[DrawnDrafter] = lambda _: ()


class Real:
    """The engine with a scripted target, on the clock of a profile: what each step did, in the simulator's own
    words.
    """

    def __init__(
        self,
        profile: Profile,
        setting: SimSetting,
        limits: Limits,
        jobs: Sequence[Job],
        drafter: Drafter,
        script: Script = lambda context: says(len(context)),
        prompts: Sequence[Sequence[int]] = (),
        preview_s: float = 0.0,
    ) -> None:
        self.profile, self.setting, self.jobs, self.prompts = (
            profile,
            setting,
            jobs,
            prompts or [[1] * job.prompt_tokens for job in jobs],
        )
        capacity = limits.cache_tokens or 10**6
        target = ScriptedModel(script, VOCAB, max_context=limits.max_context_tokens or 10**6, capacity=capacity)
        num_draft = "auto" if setting.num_draft is None else setting.num_draft
        self.spec = SpecConfig() if not setting.drafters else SpecConfig("ngram", num_draft=num_draft)
        group = DrafterGroup(target)
        if setting.drafters:
            group.drafters[drafter_key(self.spec)] = drafter
        own = {field.name: getattr(limits, field.name) for field in fields(SchedulerConfig)}
        self.engine = Engine(target, group, limits=SchedulerConfig(**own))
        self.drafted: set[int] = set()
        self.preview_s = preview_s
        self.clock, self.steps, self.finished = 0.0, [], []
        self.observe, self.engine.chooser.observe = self.engine.chooser.observe, self.timed
        self.engine.chooser.clock = lambda: self.clock
        self.engine.chooser.observe_host = lambda host_s: None  # the profile's steps have no host's part of their own
        self.schedule, self.engine.scheduler.schedule = self.engine.scheduler.schedule, self.scheduled
        self.preview, group.preview = group.preview, self.previewed
        self.rows = self.prompt_tokens = 0

    def scheduled(self, budgets: Mapping[int, DraftBudget]) -> Batch:
        """Keep what was scheduled: an outcome does not say what was read, nor behind how much context."""
        self.batch = self.schedule(budgets)
        return self.batch

    def previewed(self, asks: Sequence[PreviewAsk], entries: Mapping[int, BatchEntry]) -> Previews:
        """Previews that take `preview_s` each instead of this machine's time."""
        self.previews = Previews(self.preview(asks, entries).shown, self.preview_s * len(asks))
        return self.previews

    def timed(self, step: StepOutcome) -> None:
        """The chooser learns the profile's times instead of this machine's."""
        entries = self.batch.entries
        anchors = {e.request.request_id: e for e in entries if e.decodes and len(e.pending) == 1}
        self.prompt_tokens = sum(len(e.pending) for e in entries if e.request.request_id not in anchors)
        self.rows = sum(1 + len(one.parents) for one in step.rounds if one.request_id in anchors)
        self.target_s = self.profile.step_s(self.rows, [e.start for e in entries], self.prompt_tokens)
        self.drafted -= {state.request_id for state in self.engine.scheduler.preempted}
        drafts, num_read = self.drafting([e for e in anchors.values() if e.num_draft])
        self.draft_s = sum(drafts.values()) + self.previews.seconds
        self.observe(replace(step, target_s=self.target_s, draft_s=drafts, num_read_tokens=num_read))

    def drafting(self, users: Sequence[BatchEntry]) -> tuple[dict[object, float], dict[object, int]]:
        """Seconds by drafter, and tokens that were new to it: a text that it has not seen is read first."""
        drafts: dict[object, float] = {}
        users = [e for e in users if not self.previews.of(e.request.request_id)]  # the others' time is spent already
        if not users:
            return drafts, {}
        kind = option_kind(self.spec)
        (option,) = self.engine.drafters.options(users[0].request.request_id)
        if option.shows and self.setting.num_draft is None:  # budgets were repeated without a preview
            return drafts | {kind: self.preview_s * len(users)}, {}
        unread = sum(e.round_start for e in users if e.request.request_id not in self.drafted)
        self.drafted |= {e.request.request_id for e in users}
        seconds = self.profile.drafters["ngram"].seconds(max(e.num_draft for e in users), len(users), unread)
        return drafts | {kind: seconds}, {kind: unread}

    def submit(self, job: Job, prompt: Sequence[int]) -> None:
        """Queue a request as if it had come at the time the trace says."""
        params = SamplingParams(
            max_tokens=job.output_tokens, ignore_eos=True, priority=job.priority, deadline_s=job.deadline_s
        )
        state = self.engine.submit(list(prompt), params, self.spec)
        self.engine.scheduler.remove(state.request_id)
        state.arrived_s = job.arrival_s
        self.engine.scheduler.add(state)

    def run(self) -> None:
        coming = list(zip(self.jobs, self.prompts, strict=True))
        while coming or self.engine.has_work:
            if not self.engine.has_work:
                self.clock = max(self.clock, coming[0][0].arrival_s)
            while coming and coming[0][0].arrival_s <= self.clock:
                self.submit(*coming.pop(0))
            outputs = self.engine.step()
            seconds = self.draft_s + self.target_s
            emitted = tuple((o.request_id, len(o.token_ids)) for o in outputs)
            preempted = tuple(state.request_id for state in self.engine.scheduler.preempted)
            self.steps.append(
                Step(0, self.clock, seconds, self.draft_s, self.rows, self.prompt_tokens, emitted, preempted)
            )
            self.clock += seconds
            self.finished += [(o.request_id, self.clock) for o in outputs if o.finish_reason is not None]


def compare(profile: Profile, jobs: Sequence[Job], setting: SimSetting, limits: Limits) -> list[Step]:
    """Simulated steps, after they were found equal to the engine's: rows, prompt tokens, tokens per request, times,
    order of finishing.
    """
    steps: list[Step] = []
    ended = simulate(profile, jobs, setting, limits, seed=3, watch=steps.append)
    real = Real(profile, setting, limits, jobs, DrawnDrafter(ended.requests))
    real.run()
    assert_alike(steps, ended, real)
    return steps


def assert_alike(steps: Sequence[Step], ended: Ended, real: Real) -> None:
    """No step and no finish differs."""
    assert len(steps) == len(real.steps) == real.engine.stats.num_steps
    for ours, theirs in zip(steps, real.steps, strict=True):
        assert replace(ours, start_s=0, seconds=0, draft_s=0) == replace(theirs, start_s=0, seconds=0, draft_s=0)
        assert (ours.start_s, ours.seconds, ours.draft_s) == pytest.approx(
            (theirs.start_s, theirs.seconds, theirs.draft_s)
        )
    assert dict(real.finished) == pytest.approx({c.request_id: c.finish_s for c in ended.requests})
    assert [r for r, _ in real.finished] == [
        c.request_id for c in sorted(ended.requests, key=lambda c: (c.finish_s, ranks(steps)[c.request_id]))
    ]


def ranks(steps: Sequence[Step]) -> dict[int, int]:
    """When each request was last heard of, in the order of a step's own answers."""
    return {index: place for place, index in enumerate(index for step in steps for index, _ in step.emitted)}


def mixed_jobs(count: int, seed: int, rate: float = 0.4, urgent: bool = False) -> list[Job]:
    rng, now, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        chances = tuple(rng.choice((0.0, 0.3, 0.6, 0.9, 1.0)) for _ in range(rng.randint(1, 4)))
        job = Job(now, rng.choice((1, 2, 7, 30, 65)), rng.choice((1, 2, 9, 40)), chances)
        jobs.append(
            replace(job, priority=rng.randint(-2, 2), deadline_s=rng.choice((None, 1.0, 20.0))) if urgent else job
        )
    return jobs


@pytest.mark.parametrize("chance", [0.0, 1.0])
@pytest.mark.parametrize("num_draft", [0, 3])
def test_all_or_nothing_at_one_second_a_step(chance: float, num_draft: int) -> None:
    """Every step costs a second; every draft token stands or none does."""
    jobs = [Job(float(i), 5, 13, (chance,)) for i in range(6)]
    steps = compare(UNIT, jobs, SimSetting(("ngram",), num_draft), Limits(max_batch_size=4))
    alone = compare(UNIT, jobs[:1], SimSetting(("ngram",), num_draft), Limits())
    # The prompt's own step emits one token; then 12 remain, four or one at a time.
    assert len(alone) == 1 + (3 if chance and num_draft else 12)
    assert all(step.seconds == 1.0 for step in steps)


STEPPED = [SimSetting(), *(SimSetting(("ngram",), count) for count in (1, 6, None))]
LIMITS = {
    "wide": Limits(),
    "narrow": Limits(3, 16),
    "cache": Limits(8, 64, cache_tokens=160, block_tokens=1),
    "context": Limits(4, 24, max_context_tokens=80),
}


@pytest.mark.parametrize("seed", range(2))  # more of them: proof/test_simulate.py
@pytest.mark.parametrize("setting", STEPPED, ids=lambda s: s.name)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_every_step_is_the_engines(seed: int, setting: SimSetting, limits: Limits) -> None:
    """Mixed lengths and chances, prompts in chunks, full batches and caches, the policy's own choices: no step
    differs.
    """
    compare(CURVED, mixed_jobs(12, seed), setting, limits)


@pytest.mark.parametrize(
    "setting", [SimSetting(), SimSetting(("ngram",), 6), SimSetting(("ngram",), None)], ids=lambda s: s.name
)
@pytest.mark.parametrize(
    "limits",
    [
        Limits(8, 64, cache_tokens=120, block_tokens=1, cache_reserve=0.0),
        Limits(8, 64, cache_tokens=250, block_tokens=1, cache_reserve=0.3, aging_s=5.0),
        Limits(6, 64, max_step_tokens=9),
        Limits(8, 20, max_step_tokens=22, cache_tokens=120, block_tokens=1, cache_reserve=0.0),
    ],
    ids=["tight", "roomy", "few_rows", "both"],
)
def test_priorities_preemption_and_the_token_budget_are_the_engines(setting: SimSetting, limits: Limits) -> None:
    """Urgent and patient requests in caches and steps that are too small for them: no step differs, nor does who gives
    way.
    """
    steps = [
        step for seed in range(3) for step in compare(CURVED, mixed_jobs(16, seed, 2.0, urgent=True), setting, limits)
    ]
    assert any(step.preempted for step in steps) == (limits.cache_tokens == 120)
    if limits.max_step_tokens is not None:
        assert max(step.num_rows + step.num_prompt_tokens for step in steps) == limits.max_step_tokens


@pytest.mark.filterwarnings("ignore:the draft has")
@pytest.mark.parametrize("num_draft", [0, 3])
def test_a_real_model_that_drafts_for_itself(pair: SimpleNamespace, num_draft: int) -> None:
    """A tiny checkpoint as its own draft keeps every draft token: steps and tokens are those simulated with acceptance
    1, blocks of 32 included.
    """
    jobs = [Job(float(i // 2), 3 + 9 * i, 6 + i, (1.0,)) for i in range(8)]
    steps: list[Step] = []
    simulate(UNIT, jobs, SimSetting(("ngram",), num_draft), Limits(4, 40, cache_tokens=256), watch=steps.append)
    spec = SpecConfig("draft_model", str(pair.target), num_draft=num_draft) if num_draft else SpecConfig()
    with LLM(pair.target, spec, dtype="float32", cache_tokens=256, max_batch_size=4, max_prompt_tokens=40) as llm:
        coming, emitted = list(jobs), []
        while coming or llm.engine.has_work:
            while coming and coming[0].arrival_s <= len(emitted):
                job = coming.pop(0)
                llm.submit(
                    token_ids(job.prompt_tokens, seed=job.prompt_tokens),
                    SamplingParams(max_tokens=job.output_tokens, ignore_eos=True),
                    spec,
                )
            emitted.append(tuple((o.request_id, len(o.token_ids)) for o in llm.step()))
    assert emitted == [step.emitted for step in steps]
    assert len(emitted) == rounds_of_the_last(jobs, num_draft, emitted)


def rounds_of_the_last(jobs: Sequence[Job], num_draft: int, emitted: Sequence[tuple[tuple[int, int], ...]]) -> int:
    """Rounds of the request that ended last, and the steps before its first: a count that does not come from the
    simulator.
    """
    last = emitted[-1][0][0]
    first = next(i for i, pairs in enumerate(emitted) if last in dict(pairs))
    return first + 1 + -(-(jobs[last].output_tokens - 1) // (1 + num_draft))


def test_whole_blocks_count() -> None:
    """Two requests of 34 tokens need two blocks of 32 each: in three of them the second gives way when it meets the end
    of its first.
    """
    jobs = [Job(0.0, 30, 5), Job(0.0, 30, 5)]
    together = simulate(UNIT, jobs, SimSetting(), Limits(cache_tokens=128))
    apart = simulate(UNIT, jobs, SimSetting(), Limits(cache_tokens=127))
    assert [c.finish_s for c in together.requests] == [5.0, 5.0]
    # In the fourth step the one block that is free goes to the first; the second is read again in step 6, and goes on
    # in 7 and 8.
    assert [c.finish_s for c in apart.requests] == [5.0, 8.0]
    assert [c.num_preempted for c in apart.requests] == [0, 1]
