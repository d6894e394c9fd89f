"""The simulator against the real engine where a lookup shows its draft tokens and the policy chooses: from records,
step by step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from foretoken.config import SpecConfig
from foretoken.draft.lookup_tree import Lookup
from foretoken.draft.ngram import NgramDrafter
from foretoken.simulate.inputs import Job, Limits, SimSetting
from foretoken.simulate.sim_request import Records
from foretoken.simulate.simulate import Step, simulate
from studies.validation.answers import Answer, look_through
from tests.simulate.test_simulate import CURVED, Real, assert_alike, mixed_jobs


def babbles(context: Sequence[int]) -> int:
    """What the scripted target says: words that come again and again, told apart by the two before, with a slip now and
    then.
    """
    rng = random.Random(f"{context[0] % 3} {context[-2:]}")
    usual = rng.randrange(1, 8)
    return usual if random.Random(f"{context[0]} {len(context)}").random() < 0.8 else usual + 1


def asked(jobs: Sequence[Job]) -> tuple[list[list[int]], list[Answer]]:
    """Prompts of the wanted lengths, and what the target answers."""
    prompts, answers = [], []
    for index, job in enumerate(jobs):
        text = [10 + index]
        while len(text) < job.prompt_tokens + job.output_tokens:
            text.append(babbles(tuple(text)))
        prompts.append(text[: job.prompt_tokens])
        answers.append(Answer(f"answer {index}", tuple(prompts[-1]), tuple(text[job.prompt_tokens :])))
    return prompts, answers


def compare(drafter: Lookup, jobs: Sequence[Job], setting: SimSetting, limits: Limits, preview_s: float) -> list[Step]:
    """Simulated steps, after they were found equal to the engine's, whose previews take `preview_s` each."""
    prompts, answers = asked(jobs)
    jobs = [replace(job, acceptance=answer.name) for job, answer in zip(jobs, answers, strict=True)]
    records = {}
    for answer in answers:
        record = look_through(drafter, SpecConfig("ngram"), answer)
        if record is not None:
            records[answer.name] = Records((replace(record, preview_s=preview_s),))
    known = {"ngram": {answer.name: records.get(answer.name, (0.0,)) for answer in answers}}
    steps: list[Step] = []
    ended = simulate(CURVED, jobs, setting, limits, watch=steps.append, known=known)
    real = Real(CURVED, setting, limits, jobs, drafter, babbles, prompts, preview_s)
    real.run()
    assert_alike(steps, ended, real)
    return steps


PREVIEWS_S = {"free": 0.0, "cheap": 2.0**-6, "expensive": 2.0**-3}
STEPPED = [SimSetting(("ngram",), None), SimSetting(("ngram",), 5)]
LIMITS = {
    "wide": Limits(),
    "narrow": Limits(3, 16),
    "cache": Limits(8, 64, cache_tokens=120, block_tokens=1, cache_reserve=0.0),
    "few_rows": Limits(6, 64, max_step_tokens=9),
}


@pytest.mark.parametrize("preview_s", PREVIEWS_S.values(), ids=PREVIEWS_S)
@pytest.mark.parametrize("setting", STEPPED, ids=lambda s: s.name)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_every_step_is_the_engines(setting: SimSetting, limits: Limits, preview_s: float) -> None:
    """What the engine sees before it chooses the simulator finds in its records: trees of real draft tokens, judged
    used or not.
    """
    compare(NgramDrafter(), mixed_jobs(14, 0), setting, limits, preview_s)  # other seeds: proof/test_simulate.py


def test_previews_decide() -> None:
    """Draft tokens are made and accepted; where previews are expensive budgets are repeated without one."""
    jobs = [replace(job, output_tokens=60) for job in mixed_jobs(10, 1)]
    num_free = []
    for preview_s in (2.0**-12, 2.0**-2):
        steps = compare(NgramDrafter(), jobs, SimSetting(("ngram",), None), Limits(), preview_s)
        assert sum(count for step in steps for _, count in step.emitted) == 600
        assert max(count for step in steps for _, count in step.emitted) > 3
        num_free.append(sum(not step.draft_s for step in steps) / len(steps))
    assert num_free[1] > 0.2 + num_free[0]
