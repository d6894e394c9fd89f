"""What drafters guess on texts of a kind and what of it stands, from a run of its own: other prompts than those it is to predict."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretoken.bench.replay import Clock, Replayed, Serving, replay
from foretoken.bench.workload import SLICES, slices
from foretoken.config import SpecConfig
from foretoken.errors import InputError
from foretoken.plan.arrivals import Job
from foretoken.plan.refine import RealStep
from foretoken.plan.rounds import Record, Records, record_of

MEASURED, CALIBRATION = 0, 1  # parts of the prompts, no text in both
_PARTS = 2
_PER_SLICE = 200  # texts of a slice that are asked for; what the library has of them is used
_SHIFT = 17  # tokens by which a text ends earlier the next time it is used
_FEWEST = 6  # requests per slice
_LIGHT, _HEAVY = 0.3, 3.0  # load at the begin and at the end, as shares of the capacity


def cut_prompts(encode: Callable[[str], list[int]], jobs: Sequence[Job], part: int) -> list[list[int]]:
    """A prompt of the wanted length for every job, the end of some text of its slice, from one `part` of the texts.

    Raises:
        InputError: a job that names no slice.
    """
    texts = {name: _texts(encode, name, part) for name in dict.fromkeys(slice_of(job) for job in jobs)}
    used = dict.fromkeys(texts, 0)
    prompts = []
    for job in jobs:
        name = slice_of(job)
        prompts.append(_cut(texts[name], used[name], job.prompt_tokens))
        used[name] += 1
    return prompts


def sample_jobs(jobs: Iterable[Job], total: int, rate: float, seed: int) -> list[Job]:
    """About `total` requests, slices and prompt lengths as in `jobs`, answers as long as the longest; they come slowly, then fast.

    `rate` is what the engine manages per second: from few requests at once to as many as fit, everything occurs.
    """
    by_slice: dict[str, list[Job]] = {}
    for job in jobs:
        by_slice.setdefault(slice_of(job), []).append(job)
    count = sum(map(len, by_slice.values()))
    longest = max(job.output_tokens for own in by_slice.values() for job in own)
    chosen: list[Job] = []
    for own in by_slice.values():
        ordered = sorted(own, key=lambda job: job.prompt_tokens)
        wanted = max(_FEWEST, round(total * len(own) / count))
        chosen += [replace(ordered[(2 * i + 1) * len(own) // (2 * wanted)], output_tokens=longest) for i in range(wanted)]
    rng = random.Random(f"calibration {seed}")
    rng.shuffle(chosen)
    now = 0.0
    for index, job in enumerate(chosen):
        now += rng.expovariate(rate * (_LIGHT + (_HEAVY - _LIGHT) * index / len(chosen)))
        chosen[index] = replace(job, arrival_s=now)
    return chosen


@dataclass(frozen=True)
class Calibration:
    """What a run of other requests told: records by slice (none of plain decoding), its steps, and the run itself."""

    records: Mapping[str, Records]
    steps: tuple[RealStep, ...]
    run: Replayed


def calibrate(
    llm: Serving,
    jobs: Sequence[Job],
    prompts: Sequence[Sequence[int]],
    spec: SpecConfig,
    clock: Clock | None = None,
    tell: Callable[[int], None] = lambda _finished: None,
) -> Calibration:
    """Run `jobs`; `spec.num_draft` is the budget of every round."""
    specs = [replace(spec, tenant=f"calibration {spec.drafter} {spec.num_draft} {index}") for index in range(len(jobs))]
    done = replay(llm, jobs, prompts, specs, "calibration", clock, tell)
    records: dict[str, list[Record]] = {}
    for index, (job, rounds) in enumerate(zip(jobs, done.rounds(), strict=True)):
        record = record_of(rounds, index)
        if record is not None:
            records.setdefault(slice_of(job), []).append(record)
    return Calibration({name: Records(tuple(own)) for name, own in records.items()}, real_steps(done), done)


def real_steps(done: Replayed) -> tuple[RealStep, ...]:
    """A run's steps as the profile is asked for them; the time between steps is shared among them alike."""
    between_s = done.outside_s / max(1, len(done.steps))
    return tuple(
        RealStep(
            one.step.num_rows,
            one.contexts,
            one.step.num_prompt_tokens,
            one.step.seconds - one.step.draft_s + between_s,
            one.longest_draft,
            one.num_drafting,
            one.num_unread,
            one.step.draft_s,
        )
        for one in done.steps
    )


def slice_of(job: Job) -> str:
    """The slice that a request's prompt is taken from.

    Raises:
        InputError: it names none.
    """
    if not isinstance(job.acceptance, str) or job.acceptance not in SLICES:
        raise InputError("acceptance", job.acceptance, f"a real run needs texts: name one of the slices {', '.join(SLICES)}")
    return job.acceptance


def _texts(encode: Callable[[str], list[int]], name: str, part: int) -> list[list[int]]:
    return [encode(prompt.text) for prompt in slices([name], _PER_SLICE)[part::_PARTS]]


def _cut(texts: Sequence[list[int]], number: int, length: int) -> list[int]:
    """The last `length` tokens of a text, others before it where it is too short; a text that was used before ends earlier."""
    place, turn = number % len(texts), number // len(texts)
    ids = texts[place][: max(1, len(texts[place]) - turn * _SHIFT)]
    while len(ids) < length:
        place = (place + 1) % len(texts)
        ids = texts[place] + ids
    return ids[-length:]
