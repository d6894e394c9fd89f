"""An open loop of Poisson arrivals with clients that leave: nothing may be lost, and nothing may stay behind."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from studies.serving_load.client import StreamAnswer, ask, post
from studies.serving_load.server import KEY, Held, LoadedServer, kept
from studies.serving_load.statistics import quantile_of, theil_sen

LEAVING = 0.05  # of the requests: their client goes away after a few events
_PARTS = 4  # of the run, to compare the first with the last
WARM_SHARE = 0.2  # of the samples of memory: what is read, compiled and filled by then is no growth
_TENANTS = ("a", "b", "c")
_NUM_PATTERNS = 48  # more than the compiled grammars that a server keeps
_STRUCTURED = 0.05  # of the requests, where `Mix.structures` says so
# What fills the store of finished answers: of each answer it keeps up to so many tokens of the prompt too.
_FILL_CHOICES, _FILL_TOKENS, _KEPT_PROMPT_TOKENS = 8, 128, 32
_TEXTS = (
    "def main(",
    "import os\n\n\nclass Reader:\n",
    "for name in sorted(names):\n    print(name",
    "class Store:\n    def __init__(self, path):\n        self.path = path\n",
    "with open(path) as file:\n    for line in file:\n        yield line.strip()\n",
)
_DRAFTERS: tuple[dict[str, Any] | None, ...] = (None, {"drafter": None}, {"drafter": "ngram"}, {"drafter": "suffix"})


@dataclass(frozen=True)
class Mix:
    """What is asked: by how many tenants, and whether some answers follow a grammar."""

    num_tenants: int = len(_TENANTS)
    structures: bool = False


@dataclass
class SoakTally:
    """What came of the requests, in order of their arrival, and what the server held meanwhile."""

    answers: list[tuple[bool, StreamAnswer]] = field(default_factory=list)  # (whether its client left, answer)
    held: list[tuple[float, Held]] = field(default_factory=list)
    max_open: int = 0


def request_body(
    model: str, rng: random.Random, max_tokens: Sequence[int] = (16, 32, 64, 64, 128), mix: Mix = Mix()
) -> dict[str, Any]:
    """Mostly short, some long; greedy and sampled; by several drafters; a few tenants."""
    spec = rng.choice(_DRAFTERS)
    body: dict[str, Any] = {
        "model": model,
        "prompt": "".join(rng.choices(_TEXTS, k=rng.choice((1, 2, 4, 12)))),
        "max_tokens": rng.choice(max_tokens),
        "temperature": rng.choice((0.0, 0.0, 0.8)),
        "ignore_eos": rng.random() < 0.7,
        "cache_salt": rng.choice(_TENANTS[: mix.num_tenants]),
        "seed": rng.randrange(1 << 31),
    }
    if mix.structures and rng.random() < _STRUCTURED:
        body["structured_outputs"] = _pattern(rng.randrange(_NUM_PATTERNS))
        body["ignore_eos"] = False
    return body if spec is None else body | {"spec": spec}


def _pattern(place: int) -> dict[str, str]:
    return {"regex": f"[a-z]{{8,{8 + place}}}"}


async def capacity(server: LoadedServer, num_streams: int, num_requests: int, seed: int) -> float:
    """Requests per second of `num_streams` clients that each ask again at once; a first part is not counted."""
    rng, ended = random.Random(seed), list[float]()
    bodies = [request_body(server.model, rng) for _ in range(num_requests)]

    async def client() -> None:
        while bodies:
            answer = await ask(server.port, bodies.pop(), KEY)
            if answer.error:
                raise RuntimeError(f"a request failed while the capacity was measured: {answer.error}")
            ended.append(answer.ended_s)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(client())
    skipped = len(ended) // 4
    ended.sort()
    return (len(ended) - skipped) / (ended[-1] - (ended[skipped - 1] if skipped else began_s))


async def fill(server: LoadedServer, num_tokens: int, num_streams: int, mix: Mix, seed: int) -> dict[str, Any]:
    """Have every tenant's store of finished answers take in `num_tokens`, as fast as the server answers; then a few
    requests of the soak's own kind, one grammar after the other. What was asked, and how long it took.
    """
    rng, missing, began_s = random.Random(seed), dict.fromkeys(_TENANTS[: mix.num_tenants], num_tokens), time.time()
    num_requests = 0

    async def client() -> None:
        nonlocal num_requests
        while any(left > 0 for left in missing.values()):
            tenant = max(missing, key=lambda name: missing[name])
            body = request_body(server.model, rng, (_FILL_TOKENS,)) | {"cache_salt": tenant, "n": _FILL_CHOICES}
            body |= {"temperature": 0.8, "ignore_eos": True}
            expected = _FILL_CHOICES * _FILL_TOKENS
            missing[tenant] -= expected
            usage = (await post(server.port, "/v1/completions", body, KEY))["usage"]
            kept_prompt = _FILL_CHOICES * min(_KEPT_PROMPT_TOKENS, usage["prompt_tokens"])
            missing[tenant] += expected - usage["completion_tokens"] - kept_prompt
            num_requests += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(client())
        for place in range(_NUM_PATTERNS if mix.structures else 0):
            body = request_body(server.model, rng, (16,)) | {"structured_outputs": _pattern(place)}
            tasks.create_task(ask(server.port, body | {"ignore_eos": False}, KEY))
    return {"num_requests": num_requests, "num_tokens_each": num_tokens, "seconds": round(time.time() - began_s)}


async def soak(
    server: LoadedServer, minutes: float, rate: float, seed: int, mix: Mix = Mix(), warm_share: float = WARM_SHARE
) -> dict[str, Any]:
    """`rate` requests per second for so many minutes, or until an interrupt; everything that was counted. The slope of
    the memory leaves out the first `warm_share` of its samples.
    """
    rng, tally = random.Random(seed), SoakTally()
    await server.idle()
    before, lag_before = server.held(), await server.metrics()
    began_s, due_s, num_open, stopped = time.perf_counter(), 0.0, 0, asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stopped.set)
    watcher = asyncio.create_task(_watch(server, tally, began_s))

    async def one(body: dict[str, Any], leave_after: int | None) -> None:
        nonlocal num_open
        num_open += 1
        tally.max_open = max(tally.max_open, num_open)
        answer = await ask(server.port, body, KEY, leave_after)
        num_open -= 1
        tally.answers.append((leave_after is not None, answer))

    async with asyncio.TaskGroup() as tasks:
        while (due_s := due_s + rng.expovariate(rate)) < 60 * minutes:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), max(0.0, began_s + due_s - time.perf_counter()))
            if stopped.is_set():
                break
            leave_after = rng.choice((1, 3, 8)) if rng.random() < LEAVING else None
            tasks.create_task(one(request_body(server.model, rng, mix=mix), leave_after))
    lasted_s = time.perf_counter() - began_s
    if watcher.done():
        watcher.result()  # raises what ended it: without its samples nothing is known of the memory
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    invariants = await server.idle()
    return _report(tally, before, server.held(), invariants, warm_share) | {
        "rate": rate,
        "minutes": round(lasted_s / 60, 1),
        "loop_lag_share_over_50_ms": _lag_share(lag_before, await server.metrics(), "0.05"),
    }


def _report(
    tally: SoakTally, before: Held, after: Held, invariants: dict[str, Any], warm_share: float
) -> dict[str, Any]:
    stayed = [answer for leaves, answer in tally.answers if not leaves]
    errors = Counter(answer.error for answer in stayed if answer.error)
    samples = [(at_s / 3600, held.resident_bytes / 1e6) for at_s, held in tally.held]
    front = [(at_s / 3600, held.front_bytes / 1e6) for at_s, held in tally.held]
    num_warm = int(warm_share * len(samples))
    stayed.sort(key=lambda answer: answer.sent_s)
    size = max(1, len(stayed) // _PARTS)
    gaps = [[gap for answer in part for gap in answer.gaps_s] for part in (stayed[:size], stayed[-size:])]
    first, last = (quantile_of(part, 0.99) for part in gaps)
    return {
        "num_requests": len(tally.answers),
        "num_left": sum(leaves for leaves, _ in tally.answers),
        "num_tokens": sum(answer.num_tokens for answer in stayed),
        "max_open": tally.max_open,
        "errors": dict(errors),
        "ttft_p99_s": quantile_of([a.times_s[0] - a.sent_s for a in stayed if a.times_s], 0.99),
        "itl_p99_first_s": first,
        "itl_p99_last_s": last,
        "itl_p99_drift": last / first - 1,
        "resident_mb_per_hour": theil_sen(samples[num_warm:]),
        "front_mb_per_hour": theil_sen(front[num_warm:]),
        "num_memory_samples": len(samples) - num_warm,
        "resident_mb_by_minute": _by_minute(samples),
        "front_mb_by_minute": _by_minute(front),
        "processor_s": after.processor_s - before.processor_s,
        "files_before": before.num_files,
        "files_after": after.num_files,
        "threads_before": before.num_threads,
        "threads_after": after.num_threads,
        "kept": kept(invariants),
    }


def _by_minute(samples: Sequence[tuple[float, float]]) -> list[float]:
    """The first sample (hours, MB) of each minute."""
    first: dict[int, float] = {}
    for at_h, megabytes in samples:
        first.setdefault(int(60 * at_h), round(megabytes, 1))
    return list(first.values())


async def _watch(server: LoadedServer, tally: SoakTally, began_s: float) -> None:
    """Note what the processes hold, every two seconds."""
    while True:
        tally.held.append((time.perf_counter() - began_s, server.held()))
        await asyncio.sleep(2.0)


def _lag_share(before: dict[str, float], after: dict[str, float], bound: str) -> float:
    """Share of the timers of the server's loop that ran later than `bound` seconds."""
    name = "foretoken_event_loop_lag_seconds"

    def grown(series: str) -> float:
        return after[series] - before.get(series, 0.0)

    total = grown(f"{name}_count")
    return 1 - grown(f'{name}_bucket{{le="{bound}"}}') / total if total else 0.0
