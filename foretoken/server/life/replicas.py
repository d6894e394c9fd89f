"""Several workers behind one front, as one `Backend`, with their statistics as one; also how a single one is run."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from foretoken.backend.call import Call, ModelInfo, State, TextToEncode
from foretoken.engine_config import EngineConfig
from foretoken.errors import ForetokenError, InputError, UnavailableError
from foretoken.server.life.config import LifeConfig
from foretoken.server.life.remote import BEING_RESTARTED, RemoteBackend, RemoteGeneration
from foretoken.server.life.supervisor import SupervisedWorker

# ---- which worker answers a call
#
# The least loaded one, or the one that has read the same beginning before; none, for a while, if it was in flight at
# two deaths of a worker: it may be what kills them.

# Beginnings that differ in these are different ones: a system prompt and the first question, as a rule.
_PREFIX_CHARACTERS = 512
_PREFIX_TOKENS = 128
_MAX_PREFIXES = 16_384  # about 2 MB
_SLACK = 4  # a worker with the prefix may have so many more calls in flight than the least loaded one
_DEATHS = 2  # one may be chance: everything in flight dies with the worker


_Name = TypeVar("_Name", int, str)


class PrefixRouting(Generic[_Name]):
    """Remembers by the beginning of the prompt (`prefix_of`) which worker read it last."""

    def __init__(self) -> None:
        self._worker_of: OrderedDict[bytes, _Name] = OrderedDict()

    def choose(self, prefix: bytes, loads: Mapping[_Name, int], new: Collection[_Name] = ()) -> _Name:
        """The worker for a call, of those in `loads` (calls in flight by worker; at least one). A beginning that nobody
        has read goes to the least loaded of `new`, and of all where that is empty or much busier: most calls may begin
        alike, with a long system prompt, and a few workers would answer them all.
        """
        least = min(loads, key=lambda name: (loads[name], name))
        if new:
            best = min(new, key=lambda name: (loads[name], name))
            least = best if loads[best] <= loads[least] + _SLACK else least
        if len(loads) == 1:
            return least
        known = self._worker_of.pop(prefix, None)
        is_free = known is not None and known in loads and loads[known] <= loads[least] + _SLACK
        chosen = known if known is not None and is_free else least
        self._worker_of[prefix] = chosen
        while len(self._worker_of) > _MAX_PREFIXES:
            self._worker_of.popitem(last=False)
        return chosen


def prefix_of(call: Call) -> bytes:
    """The tenant and the beginning of the (first) prompt as a hash."""
    prompt: object
    if call.messages is not None:
        prompt = repr(call.messages)[:_PREFIX_CHARACTERS]
    else:
        first = call.prompts[0] if call.prompts else ""
        prompt = first[:_PREFIX_CHARACTERS] if isinstance(first, str) else list(first[:_PREFIX_TOKENS])
    text = repr((call.params.tenant, prompt))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class Quarantine:
    """Counts deaths by the fingerprint of what was in flight; forgets them after `quarantine_s`, 0 turns it off. Deaths
    between which nobody asked the same again count once: its copies ran at the first of them already.
    """

    def __init__(self, quarantine_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._quarantine_s, self._clock = quarantine_s, clock
        self._deaths: dict[bytes, list[float]] = {}
        self._asked_again: set[bytes] = set()  # since their last death

    def __len__(self) -> int:
        self._forget()
        return sum(len(times) >= _DEATHS for times in self._deaths.values())

    def died(self, fingerprints: Iterable[bytes]) -> None:
        """A worker died while requests of these fingerprints were in flight."""
        if self._quarantine_s:
            self._forget()
            now = self._clock()
            for one in set(fingerprints):
                if one not in self._deaths or one in self._asked_again:
                    self._deaths.setdefault(one, []).append(now)
                    self._asked_again.discard(one)

    def check(self, fingerprint: bytes) -> None:
        """Let a request pass.

        Raises:
            InputError: it was in flight at two deaths.
        """
        self._forget()
        times = self._deaths.get(fingerprint, ())
        if len(times) >= _DEATHS:
            remedy = (
                f"the engine died {len(times)} times while it answered this request, which is refused for "
                f"{self._quarantine_s:g} s; change the request, or come again later"
            )
            raise InputError("request", len(times), remedy)
        if times:
            self._asked_again.add(fingerprint)

    def _forget(self) -> None:
        oldest = self._clock() - self._quarantine_s
        self._deaths = {one: times for one, times in self._deaths.items() if times[-1] > oldest}
        self._asked_again &= self._deaths.keys()


def fingerprint_of(call: Call) -> bytes:
    """The same for the same request, whatever its seed and tenant."""
    params = replace(call.params, seed=None, tenant="")
    asked = repr(msgspec.structs.replace(call, params=params, trace=False))
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).digest()


# A mean over workers says nothing about rates: these are computed anew from their sums, numerator by denominator.
_RATES: Mapping[str, tuple[str, str]] = {"acceptance_rate": ("num_accepted", "num_drafted")}
# Of values that cannot be added, what describes all workers: the largest.
_LARGEST = ("near_tie_gap", "longest_gap_s", "kv_cache_usage", "draft_kv_cache_usage", "max_greedy_gap", "e_value")
# Means by request or token: weighed by what they are means of.
_MEANS: Mapping[str, str] = {"inter_token_s": "num_emitted", "estimated_speedup": "num_emitted"}
_WHY: Mapping[State, str] = {
    "loading": "the model is being loaded",
    "draining": "the server is shutting down",
    "restarting": "the engine is being restarted",
    "failed": "the engine could not be started",
}


class Replicas:
    """`Backend` over `config.workers` supervised workers with the same model. Each call runs in one of them.

    Everything happens in the event loop that called `start`; `close` ends the workers.
    """

    def __init__(self, engine: EngineConfig, name: str, config: LifeConfig, draft_required: bool = False) -> None:
        self.changes = AsyncCondition()
        self._routing, self._quarantine = PrefixRouting[int](), Quarantine(config.quarantine_s)
        self._is_draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self.workers = [
            SupervisedWorker(number, engine, name, config, draft_required, self.changes.notify_all, self._note_death)
            for number in range(config.workers)
        ]

    def start(self) -> None:
        """Start the workers in the background."""
        self._tasks = [asyncio.create_task(worker.run()) for worker in self.workers]

    @property
    def state(self) -> State:
        """See `Backend.state`: ready while any worker is."""
        if self._is_draining:
            return "draining"
        states = {worker.state for worker in self.workers}
        for state in ("ready", "loading", "restarting"):
            if state in states:
                return state
        return "failed"

    @property
    def info(self) -> ModelInfo | None:
        """See `Backend.info`."""
        return next((worker.info for worker in self.workers if worker.info is not None), None)

    def described(self) -> tuple[ModelInfo, tuple[str, ...], float, int]:
        """Of the first worker that is ready: model, drafters, seconds of loading; and the number of workers."""
        first = next(worker for worker in self.workers if worker.state == "ready")
        assert first.info is not None
        return first.info, first.drafters, first.load_s, len(self.workers)

    @property
    def failure(self) -> ForetokenError | None:
        """Why no worker will ever be ready again; None while one may."""
        failures = [worker.failure for worker in self.workers]
        return failures[0] if all(failures) else None

    @property
    def num_open(self) -> int:
        """Commands in flight."""
        return sum(worker.backend.num_open for worker in self.workers if worker.backend is not None)

    async def open(self, call: Call) -> RemoteGeneration:
        """See `Backend.open`.

        Raises:
            InputError: the engine died twice while it answered this request; WorkerDiedError: the engine's process died
                meanwhile.
        """
        backends = self._backends()
        fingerprint = fingerprint_of(call)
        self._quarantine.check(fingerprint)
        loads = {number: backend.num_open for number, backend in backends.items()}
        number = self._routing.choose(prefix_of(call), loads)
        return await backends[number].open(call, fingerprint)

    async def tokenize(self, text: TextToEncode) -> list[int]:
        """See `Backend.tokenize`."""
        return await self._least_loaded().tokenize(text)

    async def spell(self, token_ids: Sequence[int]) -> list[str | None]:
        """See `Backend.spell`."""
        return await self._least_loaded().spell(token_ids)

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        """See `Backend.detokenize`."""
        return await self._least_loaded().detokenize(token_ids, has_specials)

    async def stats(self) -> dict[str, Any]:
        """See `Backend.stats`: sums over the workers, rates and shares recomputed (`merged`). Also `num_restarts`, and
        `replicas`: the statistics of each worker, `engine` naming its process.
        """
        pids = {worker.number: worker.pid for worker in self.workers}
        found = await self._of_each(lambda backend: backend.stats())
        restarts = sum(max(0, worker.num_starts - 1) for worker in self.workers)
        replicas = [{**stats, "engine": str(pids[number])} for number, stats in found.items()]
        return merged(list(found.values())) | {"num_restarts": restarts, "replicas": replicas}

    async def invariants(self) -> dict[str, Any]:
        """What every worker holds now, and what the front holds for them."""
        found = await self._of_each(lambda backend: backend.invariants())
        return {
            "state": self.state,
            "num_open": self.num_open,
            "num_tasks": len(asyncio.all_tasks()),
            "num_quarantined": len(self._quarantine),
            "workers": [
                {
                    "number": worker.number,
                    "state": worker.state,
                    "pid": worker.pid,
                    "num_starts": worker.num_starts,
                    **found.get(worker.number, {}),
                }
                for worker in self.workers
            ],
        }

    async def drain(self, drain_s: float) -> bool:
        """Take no more calls, and wait for those in flight for at most so long; whether all of them ended. The others
        end with an `UnavailableError`.
        """
        self._is_draining = True
        self.changes.notify_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.num_open:
                    await asyncio.sleep(0.02)
        all_ended = not self.num_open
        for worker in self.workers:
            if worker.backend is not None:
                worker.backend.abandon("the server is shutting down")
        return all_ended

    async def close(self) -> None:
        """End the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill_now(self) -> None:
        """End the workers without waiting for anything, for a process that ends itself."""
        for worker in self.workers:
            worker.kill_now()

    def _backends(self) -> dict[int, RemoteBackend]:
        """The workers that take calls.

        Raises:
            UnavailableError: there is none.
        """
        found = {
            worker.number: worker.backend
            for worker in self.workers
            if worker.backend is not None and worker.state == "ready" and not self._is_draining
        }
        there = {number: backend for number, backend in found.items() if backend.state == "ready"}
        if not there:
            raise UnavailableError(BEING_RESTARTED if found else _WHY.get(self.state, "the engine takes no requests"))
        return there

    def _least_loaded(self) -> RemoteBackend:
        return min(self._backends().values(), key=lambda backend: backend.num_open)

    async def _of_each(self, ask: Callable[[RemoteBackend], Any]) -> dict[int, dict[str, Any]]:
        """What each worker says, of those that live; an `UnavailableError` where none says anything."""
        backends = {worker.number: worker.backend for worker in self.workers if worker.backend is not None}
        found = await asyncio.gather(*map(ask, backends.values()), return_exceptions=True)
        said = {number: one for number, one in zip(backends, found, strict=True) if isinstance(one, dict)}
        if not said:
            raise UnavailableError(_WHY.get(self.state, "the engine takes no requests"))
        return said

    def _note_death(self, backend: RemoteBackend) -> None:
        self._quarantine.died(backend.fingerprints)


class AsyncCondition:
    """`asyncio.Condition` without its lock: code that cannot wait may notify too. For one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify_all(self) -> None:
        """Something has changed: whoever waits looks again."""
        for one in self._waiting:
            if not one.done():
                one.set_result(None)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate` holds."""
        while not predicate():
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                await changed
            finally:
                self._waiting.discard(changed)


def merged(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of all workers together: counts and times are added, rates computed anew, extremes kept; those of a
    single worker are returned as they are.
    """
    if len(stats) == 1:
        return dict(stats[0])
    found: dict[str, Any] = _merge(stats)
    for name, (over, under) in _RATES.items():
        if name in found:
            found[name] = found[over] / found[under] if found[under] else 0.0
    for name, weight in _MEANS.items():
        known = [(one[name], one[weight]) for one in stats if one.get(name) is not None]
        total = sum(count for _, count in known)
        if known:
            found[name] = sum(value * count for value, count in known) / total if total else known[0][0]
    return found


def _merge(values: Sequence[Any]) -> Any:  # noqa: ANN401 - JSON of any shape
    first = next((value for value in values if value is not None), None)
    if isinstance(first, Mapping):
        given = [value for value in values if value is not None]
        names = dict.fromkeys(name for value in given for name in value)
        return {name: _merge_named(name, [value.get(name) for value in given]) for name in names}
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, int | float):
        return sum(value for value in values if value is not None)
    if isinstance(first, list):
        return _merge_lists([value for value in values if value is not None])
    return first


def _merge_named(name: str, values: Sequence[Any]) -> Any:  # noqa: ANN401
    if name in _LARGEST:
        return max((value for value in values if value is not None), default=None)
    return _merge(values)


def _merge_lists(lists: Sequence[list[Any]]) -> list[Any]:
    """Counts by position: entry by entry, the longest list wins."""
    longest = max(map(len, lists))
    return [_merge([one[place] for one in lists if place < len(one)]) for place in range(longest)]
