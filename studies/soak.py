"""Random requests against one engine for a while: nothing may leak, nothing may differ from the same request alone.

    python -m studies.soak --minutes 10 --out soak.json

Requests come from several threads, in bursts and pauses, long and short, for several tenants with prompts that begin
alike, by every drafter that needs no more than one draft model; some are left half-way. Twenty times the threads hold
still until the engine is idle (which adds to the time): then the blocks of every cache, the memory of the process
(after a collection, freed memory given back), tensors and Python objects are counted. A share of the greedy and seeded
answers is compared with plain decoding.

Exit code 5: from the fifth part of the time to the end the memory grew by more than --max-growth-mb, a request failed,
an answer differed, a block or a number of a request was kept.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, AsyncEngine, CapacityError, SamplingParams, SpecConfig
from foretoken.draft.suffix import SuffixDrafter
from foretoken.model.paged import PagedModel
from studies.command import record

_NUM_LOOKS = 20
_FIRST_LOOK = _NUM_LOOKS // 5  # what was read, compiled and filled by then is no growth
_MAX_OBJECTS = 200  # of one type: a few more or less are caches of the interpreter
_STORE_TOKENS = 4096  # of finished answers per tenant, so that the stores of `suffix` are full long before the end
_TENANTS = ("", "a", "b")
_TEXTS = (
    "def main(",
    "import os\n\n\nclass Reader:\n",
    "for name in sorted(names):\n    print(name",
    "    return [",
    "# A list of\n",
    "x = {\n    'a': 1,\n",
    "class Store:\n    def __init__(self, path):\n        self.path = path\n",
    "with open(path) as file:\n    for line in file:\n        yield line.strip()\n",
)


@dataclass
class Tally:
    """What the threads did; they ask only while it is `open`."""

    submitted: int = 0
    finished: int = 0
    left: int = 0
    refused: int = 0
    compared: int = 0
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    num_tokens: int = 0
    open: bool = True
    over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def enter(self, most: int) -> bool:
        """Wait until asking is allowed, and count a request; False when it is all over, or there were `most`."""
        with self.changed:
            self.changed.wait_for(lambda: self.open)
            if self.over or self.submitted >= most:
                return False
            self.submitted += 1
            return True

    def let(self, is_open: bool, over: bool = False) -> None:
        """Allow asking, or stop it."""
        with self.changed:
            self.open, self.over = is_open, over
            self.changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether a request that was counted has not come to its end."""
        with self.changed:
            return self.submitted > self.finished + self.left + self.refused + len(self.failed)

    def add(self, **counts: int) -> None:
        """Count."""
        with self.changed:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True)
class Sample:
    """What an idle engine and its process hold."""

    at_s: float
    requests: int
    resident_mb: float
    num_tensors: int
    num_objects: int
    by_type: Counter[str]


def specs(draft: str | None) -> list[SpecConfig]:
    """Every way to draft that needs no more than the draft model."""
    free = [SpecConfig(), *(SpecConfig(name) for name in ("ngram", "suffix", "recycling", "lookahead", "early_exit"))]
    free += [
        SpecConfig("predicted"),
        SpecConfig("early_exit", skip_layers="auto"),
        SpecConfig("mix"),
    ]
    if draft is None:
        return free
    shapes: tuple[dict[str, Any], ...] = (
        {},
        {"num_draft": 3},
        {"tree": "static", "num_draft": 6},
        {"tree": "best_first"},
        {"draft_probability": "auto"},
    )
    models = [SpecConfig("draft_model", draft, **shape) for shape in shapes]
    models += [SpecConfig("draft_model", draft, draft_vocabulary=how) for how in ("strings", "intersection")]
    return [*free, *models, SpecConfig("cascade", draft), SpecConfig("mix", draft)]


def request(rng: random.Random, kinds: list[SpecConfig]) -> tuple[str, SamplingParams, SpecConfig]:
    """Mostly short, some long; a third of the prompts begins with one of a few long texts."""
    head = "".join(random.Random(rng.randrange(3)).choices(_TEXTS, k=20)) if rng.random() < 0.3 else ""
    prompt = head + "".join(rng.choices(_TEXTS, k=rng.choice((1, 2, 4, 4, 12))))
    temperature = rng.choice((0.0, 0.0, 0.7, 1.0))
    seed = rng.randrange(2**32) if rng.random() < 0.8 else None
    spec = rng.choice(kinds)
    params = SamplingParams(
        max_tokens=rng.choice((1, 4, 16, 60, 60, 200)),
        temperature=temperature,
        seed=seed,
        ignore_eos=rng.random() < 0.5,
        prediction=_TEXTS[-1] if spec.drafter == "predicted" else None,
        tenant=rng.choice(_TENANTS),
    )
    return prompt, params, spec


def worker(engine: AsyncEngine, tally: Tally, kinds: list[SpecConfig], most: int, seed: int) -> None:
    """Ask until the time or the number of requests is up."""
    rng = random.Random(seed)
    while tally.enter(most):
        prompt, params, spec = request(rng, kinds)
        try:
            time.sleep(rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)))
            ticket = engine.submit(prompt, params, spec)
            if rng.random() < 0.15:
                pieces = iter(ticket)
                for _ in range(rng.choice((0, 1, 3))):
                    next(pieces, None)
                ticket.cancel()
                pieces.close()  # type: ignore[attr-defined]  # a generator
                tally.add(left=1)
                continue
            out = ticket.result()
            alone = (
                engine.submit(prompt, replace(params, prediction=None), SpecConfig()).result()
                if _is_told(params) and rng.random() < 0.05
                else None
            )
        except CapacityError:
            tally.add(refused=1)
            continue
        except Exception as error:  # noqa: BLE001 - written down, and the others go on
            tally.failed.append(f"{type(error).__name__}: {error} ({spec.drafter}, {params})")
            continue
        if out.error is not None:
            tally.failed.append(f"{type(out.error).__name__}: {out.error} ({spec.drafter}, {params})")
            continue
        tally.add(finished=1, num_tokens=len(out.token_ids), compared=alone is not None)
        if alone is not None and alone.token_ids != out.token_ids:
            tally.differing.append(f"{spec.drafter} {prompt!r} {params}; near ties: {alone.stats.num_near_ties}")


def _is_told(params: SamplingParams) -> bool:
    """Greedy and seeded (coupled) answers do not depend on who drafts or who else is there."""
    return params.greedy or params.seed is not None


def drafters_of(drafters: Any) -> Iterator[Any]:  # noqa: ANN401
    """Drafters and their parts."""
    for drafter in drafters:
        yield drafter
        yield from drafters_of(getattr(drafter, "parts", ()))
        yield from drafters_of([lookup] if (lookup := getattr(drafter, "lookup", None)) else ())


def look(tally: Tally, began_s: float) -> Sample:
    """Count, when nothing runs."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    objects = gc.get_objects()
    by_type = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects)
    num_tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    done = tally.finished + tally.left
    return Sample(time.monotonic() - began_s, done, resident_bytes() / 1e6, num_tensors, len(objects), by_type)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def hold_still(engine: AsyncEngine, tally: Tally) -> list[str]:
    """Let nobody ask until nothing runs; what is still kept then."""
    tally.let(False)
    while tally.is_busy:
        time.sleep(0.02)
    between_steps = threading.Event()
    with engine._wake:  # commands run between two steps
        engine._commands.append(lambda _engine: between_steps.set())
        engine._wake.notify()
    between_steps.wait()
    return list(dict.fromkeys(kept(engine)))


def paged_models() -> list[PagedModel]:
    """The target and every draft, wherever they are held."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), PagedModel)]


def kept(engine: AsyncEngine) -> Iterator[str]:
    """What an idle engine should not hold."""
    idle = engine.llm.engine
    if engine._orders or idle.states or idle.scheduler.running or idle.scheduler.waiting:
        yield "a request"
    for model in paged_models():
        try:
            model.check()
        except AssertionError as error:
            yield f"blocks: {error}"
        if model.tables or model.num_free_tokens() != model.capacity_tokens:
            yield f"blocks of a cache of {model.capacity_tokens} tokens"


def grown_types(first: Sample, last: Sample) -> dict[str, int]:
    """Types of which there are markedly more at the end."""
    more = last.by_type - first.by_type
    return {name: count for name, count in more.most_common(12) if count > _MAX_OBJECTS}


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the threads; everything that was counted."""
    tally, looks, problems = Tally(), list[Sample](), list[str]()
    kinds = specs(options.draft)
    limits = {"max_batch_size": 8, "max_prompt_tokens": 128, "cache_tokens": options.cache_tokens}
    with (
        LLM(options.target, dtype="float32", **limits) as llm,
        AsyncEngine(llm, max_waiting=4 * options.workers) as engine,
    ):
        for spec in kinds:
            llm.prepare(spec)
        for drafter in drafters_of(llm.loaded_drafters()):
            if isinstance(drafter, SuffixDrafter):
                drafter._store_tokens, drafter._max_tokens = _STORE_TOKENS, 4 * _STORE_TOKENS
        for model in paged_models():
            for tensor in (*model.pool.keys, *model.pool.values):
                tensor.zero_()  # memory that the system has promised is taken now, and is no growth later
        began_s = time.monotonic()
        arguments = (engine, tally, kinds, options.requests)
        threads = [
            threading.Thread(target=worker, args=(*arguments, 1000 * options.seed + i)) for i in range(options.workers)
        ]
        for thread in threads:
            thread.start()
        for _ in range(_NUM_LOOKS):
            tally.let(True)
            time.sleep(60 * options.minutes / _NUM_LOOKS)
            problems += hold_still(engine, tally)
            looks.append(look(tally, began_s))
            now = looks[-1]
            print(
                f"{now.at_s:6.0f} s {now.requests:7d} requests {now.resident_mb:8.1f} MB {now.num_objects:8d} objects",
                flush=True,
            )
        tally.let(True, over=True)
        for thread in threads:
            thread.join()
        problems += hold_still(engine, tally)
        prefix = llm.stats.prefix
    first, last = looks[_FIRST_LOOK - 1], looks[-1]
    return {
        **{
            name: getattr(tally, name)
            for name in ("submitted", "finished", "left", "refused", "num_tokens", "compared", "differing", "failed")
        },
        "kept": list(dict.fromkeys(problems)),
        "prefix": None if prefix is None else vars(prefix),
        "growth_mb": last.resident_mb - first.resident_mb,
        "max_growth_mb": options.max_growth_mb,
        "growth_tensors": last.num_tensors - first.num_tensors,
        "growth_objects": last.num_objects - first.num_objects,
        "grown_types": grown_types(first, last),
        "looks": [{name: value for name, value in vars(one).items() if name != "by_type"} for one in looks],
    }


def main() -> int:
    """Run the soak; 5 if something leaked, failed or differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="reference:target")
    parser.add_argument("--draft", default="reference:draft")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=10**9)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument(
        "--cache-tokens", type=int, default=2048, help="of the target and of every draft: small, so that they fill up"
    )
    parser.add_argument("--max-growth-mb", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = record("soak", soak(options), options.out)
    print(json.dumps({key: value for key, value in report.items() if key != "looks"}, indent=1))
    bad = report["differing"] or report["failed"] or report["kept"] or report["growth_mb"] > options.max_growth_mb
    return 5 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
