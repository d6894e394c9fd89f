"""A few points of what steps and drafters cost, measured before the first request and without a trace.

One request of random tokens runs on a twin of the target (`model.interface.TwinModel`): the same weights, a cache of
its own. Its drafter is a fresh one over twins of the draft's models (`draft.base.ModelDrafter`). So caches, what
drafters have learnt, counters and random numbers are the same before and after.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.core import Batch, Draft
from foretoken.draft.base import Drafter, ModelDrafter, parts_of, variants_of
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.engine import Engine
from foretoken.engine.startup.profiling import SHORT_TOKENS, StandInDrafter, stand_in, timed
from foretoken.machine.identity import machine, versions
from foretoken.model.interface import LanguageModel, MixtureModel, TwinModel
from foretoken.plan.profile import Curve, DrafterCost, Profile, Roofline

BUDGET_S = 2.0
_ROWS = (1, 2, 4, 8, 16, 32)
_DRAFT_COUNTS = (1, 2, 4, 8)
_MAX_REPEATS = 5
_MAX_TOKENS = 256  # of the stand-in's answer; a step emits at least one
_MIN_TOKENS = 12  # room without which there is nothing to measure
_SEED = 0
_COPY_BYTES = 1 << 26  # beyond what caches hold
_PRODUCT = (256, 1024)  # rows, and width of the square matrix: enough arithmetic for the few bytes
_TRIES = 3
_DTYPES = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes of a weight

Made = tuple[SpecConfig, Drafter]
Say = Callable[[float], None]  # called between steps with the seconds since the beginning


def describe_target(target: LanguageModel) -> dict[str, Any]:
    """What makes a target's steps cost what they cost, beside the machine."""
    return {
        **_describe_model(target),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "numerics": target.numerics,
    }


def describe_drafter(spec: SpecConfig, drafter: Drafter) -> dict[str, Any]:
    """The same of a drafter: its models, and what shapes its work."""
    fields = ("drafter", "head", "draft_dtype", "draft_vocabulary", "exit_layer", "skip_layers", "tree", "branching")
    layers = {
        name: list(value) if isinstance(value, tuple) else value
        for name in fields
        if (value := getattr(spec, name)) is not None
    }
    options = {"options": dict(spec.options)} if spec.options else {}
    models = drafter.models() if isinstance(drafter, ModelDrafter) else ()
    return {**layers, **options, "models": [_describe_model(model) for model in models]}


def model_drafters(made: Sequence[Made]) -> dict[str, Made]:
    """Those of `made`, or of their parts, that run a model, by the names that a profile gives them: the drafter's own,
    numbered where equal.

    Of one with variants (`base.Variants`) each that is described otherwise is an entry of its own.
    """
    found: dict[str, Made] = {}
    for own, part in (member for spec, drafter in made for member in parts_of(spec, drafter)):
        if not isinstance(part, ModelDrafter):
            continue
        seen: list[dict[str, Any]] = []
        for variant in variants_of(part, own):
            about = describe_drafter(variant, part)
            if about not in seen:
                seen.append(about)
                number = 1 + sum(name.split("#")[0] == part.name for name in found)
                found[part.name if number == 1 else f"{part.name}#{number}"] = (variant, part)
    return found


def measure_roofline(target: LanguageModel) -> Roofline:
    """The target on this machine, within a second: one copy and one matrix product, the best of a few tries each."""
    size = min(_DTYPES, key=lambda size: abs(size - target.weight_bytes / target.num_parameters))
    rows, width = _PRODUCT
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=target.device)
    copied = torch.empty_like(source)
    x, matrix = (torch.ones(count, width, dtype=_DTYPES[size], device=target.device) for count in (rows, width))
    copy_s = _best_s(lambda: copied.copy_(source), target.device)
    product_s = _best_s(lambda: x @ matrix, target.device)
    mixture = target if isinstance(target, MixtureModel) else None
    return Roofline(
        expert_bytes=0.0 if mixture is None else mixture.expert_bytes,
        expert_share=1.0 if mixture is None else mixture.expert_share,
        step_bytes=target.step_bytes,
        row_flops=2 * target.step_bytes / size,
        kv_bytes_per_token=target.kv_bytes_per_token,
        bytes_per_s=2 * _COPY_BYTES / copy_s,  # read and written
        flops_per_s=2 * rows * width * width / product_s,
    )


def measure_start(
    target: LanguageModel, drafters: Mapping[str, Made], name: str, budget_s: float = BUDGET_S, say: Say | None = None
) -> Profile | None:
    """The short profile of an idle target and of `drafters` (`model_drafters`), called `name`; None where context or
    cache are too small.

    Every count is run once, if the time allows, and again while it does: 1 to 32 rows of the target, 1 to 8 draft
    tokens of each drafter. The target's first row, and each drafter's first draft token, are measured whatever they
    take.
    """
    began = time.perf_counter()
    run = _StartRun(target, {}, began, say or (lambda _s: None))
    share_s = budget_s / (1 + len(drafters))
    steps = run.times(None, [rows - 1 for rows in _ROWS], share_s)
    if not steps:
        return None
    costs: dict[str, DrafterCost] = {}
    for label, made in drafters.items():
        times = run.times(made, _DRAFT_COUNTS, share_s)
        points = tuple((count, median_low([draft_s for _, draft_s in own])) for count, own in times.items())
        costs[label] = DrafterCost(Curve(points), about=describe_drafter(*made))
    return Profile(
        target={"name": name, **describe_target(target)},
        machine=machine(),
        versions=versions(),
        command="at the start of an engine",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        rows=Curve(tuple((1 + count, median_low([step_s for step_s, _ in times])) for count, times in steps.items())),
        drafters=costs,
        roofline=measure_roofline(target),
    )


class _MeteredGroup(DrafterGroup):
    """Drafters that are asked for `count` draft tokens at most, whatever the engine asks for."""

    count = 1

    def propose(self, batch: Batch) -> Draft:
        """Fewer draft tokens."""
        own = (replace(entry, num_draft=min(entry.num_draft, self.count)) for entry in batch.entries)
        return super().propose(Batch(tuple(own)))


@dataclass
class _StartRun:
    """One measurement; `twins` by the identity of the model."""

    target: LanguageModel
    twins: dict[int, LanguageModel]
    began: float
    say: Say

    def times(self, made: Made | None, counts: Sequence[int], share_s: float) -> dict[int, list[tuple[float, float]]]:
        """Seconds of steps by number of draft tokens, without the drafter and of it alone; {} without room for one."""
        target, began = self.twin(self.target), time.perf_counter()
        max_tokens = min(
            _MAX_TOKENS, target.max_context_tokens - SHORT_TOKENS, target.capacity_tokens - 2 * SHORT_TOKENS
        )
        counts = [count for count in counts if count + _MIN_TOKENS <= max_tokens]
        if not counts:
            return {}
        spec = replace(made[0] if made else SpecConfig(drafter="ngram"), num_draft=max(counts))
        inner: Drafter = StandInDrafter(target.vocab_size)
        if made is not None:
            assert isinstance(made[1], ModelDrafter)
            inner = made[1].fresh(self.twin)
        group, key = _MeteredGroup(target), drafter_key(spec)
        assert key is not None
        group.drafters[key] = inner
        engine = Engine(target, group, limits=SchedulerConfig(1), eos_token_ids=())
        found: dict[int, list[tuple[float, float]]] = {}
        try:
            state = engine.submit(
                stand_in(target, SHORT_TOKENS, _SEED),
                SamplingParams(max_tokens=max_tokens, seed=_SEED, ignore_eos=True),
                spec,
            )
            while state.num_rounds < 2 and state.finish_reason is None:  # the drafter's first round reads the prompt
                last_s, _ = self.step(engine)
            for count in [count for _ in range(_MAX_REPEATS) for count in counts]:
                expected_s = sum(found[count][-1]) if count in found else last_s
                if found and time.perf_counter() - began + expected_s > share_s:
                    break
                if state.finish_reason is not None or state.num_remaining - 1 < count:
                    continue
                group.count = count
                last_s, draft_s = self.step(engine)
                found.setdefault(count, []).append((last_s - draft_s, draft_s))
        finally:
            engine.close()
        return dict(sorted(found.items()))

    def step(self, engine: Engine) -> tuple[float, float]:
        found = timed(engine)
        self.say(time.perf_counter() - self.began)
        return found

    def twin(self, model: LanguageModel) -> LanguageModel:
        """The model's twin, always the same; a model that has none leaves no trace itself."""
        if id(model) not in self.twins:
            self.twins[id(model)] = model.twin() if isinstance(model, TwinModel) else model
        return self.twins[id(model)]


def _describe_model(model: LanguageModel) -> dict[str, Any]:
    return {
        "num_parameters": model.num_parameters,
        "step_bytes": model.step_bytes,
        "num_layers": model.num_layers,
        "vocab_size": model.vocab_size,
    }


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, the fastest of a few tries; the first one does not count."""
    found: list[float] = []
    for _ in range(1 + _TRIES):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return max(min(found[1:]), 1e-9)
