"""The expected speed of a candidate on a kind of text at a load, from acceptance and the costs of steps.

An answer of n tokens, c requests at once, takes n plain steps, or its rounds; meanwhile the prompts of c requests are
read, its own among them:

    speed-up = (c * prefill + n * plain step(c)) / (c * (prefill + draft's) + sum over rounds of step(c, drafts))

Without the prompts it is E[tokens per step] / (step with drafts / plain step). The interval is over prompts: it says
what other texts of the same kind would give, at the same costs of steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import InputError
from foretoken.files import read_json
from foretoken.measure.advise.costs import LoadCosts
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.advise.rounds import AnswerRounds, shortened
from foretoken.measure.options import check_price
from foretoken.measure.price import million_price
from foretoken.measure.stats import Estimate, estimate
from foretoken.params import check_number

ALL_SLICES = ""
_MAX_SPEED = 1e9
_KEYS = {"name", "price_per_hour", "speed"}


@dataclass(frozen=True)
class SpeedCell:
    """A candidate on a slice ("": all) with `concurrency` requests at once and at most `num_draft` draft tokens.

    `speedup` is end to end, `decode_speedup` without reading prompts. `emitted_per_step` is what a step emits for a
    request, `step_ratio` what it takes, in plain steps. `tokens_per_s` and `plain_tokens_per_s` are of all requests
    together, `served` of which run at once within the memory (`plain_served` without the drafter); the others wait.
    `ms_per_token` is the mean time between tokens of an answer, prompts of others read meanwhile.
    """

    candidate: str
    slice: str
    concurrency: int
    num_draft: int
    speedup: Estimate
    decode_speedup: float
    emitted_per_step: float
    accepted_per_draft: float | None
    step_ratio: float
    ms_per_token: float
    plain_ms_per_token: float
    tokens_per_s: float
    plain_tokens_per_s: float
    served: int
    plain_served: int

    @property
    def throughput_ratio(self) -> float:
        """Tokens per second over plain decoding's; below the speed-up where memory lets fewer requests run."""
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s > 0 else 0.0

    def pays(self, margin: float) -> bool:
        """Whether it is faster than plain decoding by more than `margin`, the whole interval."""
        low = self.speedup.value if self.speedup.low is None else self.speedup.low
        return min(low, self.throughput_ratio) > 1 + margin


@dataclass(frozen=True)
class MemoryRoom:
    """Requests that fit into the memory at once, without and with a candidate; None: not known."""

    plain: int | None = None
    candidate: int | None = None

    def served(self, concurrency: int) -> tuple[int, int]:
        """(plain, candidate): how many of so many requests run at once."""
        return tuple(concurrency if most is None else min(concurrency, most) for most in (self.plain, self.candidate))  # type: ignore[return-value]


def cells_of(
    answers: Mapping[str, Sequence[AnswerRounds]],
    costs: LoadCosts,
    loads: Sequence[int],
    lengths: Sequence[int],
    rooms: Mapping[str, MemoryRoom],
) -> list[SpeedCell]:
    """Every candidate by slice, load and number of draft tokens."""
    found = []
    for name, own in answers.items():
        names = list(dict.fromkeys(one.slice for one in own))
        for slice_name in (ALL_SLICES, *names) if len(names) > 1 else (ALL_SLICES,):
            chosen = [one for one in own if slice_name in (one.slice, ALL_SLICES)]
            room = rooms.get(name, MemoryRoom())
            for load, length in itertools.product(loads, lengths):
                found.append(predicted(name, slice_name, chosen, costs, load, length, room))
    return found


def predicted(
    name: str,
    slice_name: str,
    answers: Sequence[AnswerRounds],
    costs: LoadCosts,
    concurrency: int,
    num_draft: int,
    room: MemoryRoom,
) -> SpeedCell:
    """The cell of these answers."""
    rounds = [shortened(one.rounds, num_draft) for one in answers]
    every = [one for own in rounds for one in own]
    drafted, accepted = sum(one.num_drafted for one in every), sum(len(one.path) for one in every)
    steps, drafts = len(every), sum(one.num_drafted > 0 for one in every)
    tokens = sum(one.num_tokens for one in answers)
    plain_served, served = room.served(concurrency)
    plain_s = costs.plain_s(max(1, plain_served))
    mean = drafted / steps

    def spent(requests: int) -> NDArray[np.float64]:  # [answers]: seconds of the decoding of each
        lengths = {one.num_drafted for one in every}
        known = {length: costs.round_s(name, requests, num_draft, length, mean) for length in lengths}
        return np.array([sum(known[one.num_drafted] for one in own) for own in rounds])

    counts = np.array([one.num_tokens for one in answers], dtype=np.float64)
    plain = counts * costs.plain_s(concurrency)
    own, reading = spent(concurrency), concurrency * costs.prefill_s
    prompt_s = costs.drafters[name].prompt_s
    draft_reading = concurrency * prompt_s
    whole = np.stack([plain + reading, own + reading + draft_reading], axis=1)
    beside = len(answers) * (concurrency - 1) * costs.prefill_s  # prompts of others between tokens of an answer
    return SpeedCell(
        candidate=name,
        slice=slice_name,
        concurrency=concurrency,
        num_draft=num_draft,
        speedup=estimate(whole),
        decode_speedup=float(plain.sum() / own.sum()),
        emitted_per_step=tokens / steps,
        accepted_per_draft=accepted / drafts if drafts else None,
        step_ratio=float(own.sum() / steps / costs.plain_s(concurrency)),
        ms_per_token=1e3 * float(own.sum() + beside + len(answers) * draft_reading) / tokens,
        plain_ms_per_token=1e3 * float(plain.sum() + beside) / tokens,
        tokens_per_s=_rate(served, tokens, spent(max(1, served)).sum(), len(answers), costs.prefill_s + prompt_s),
        plain_tokens_per_s=_rate(plain_served, tokens, tokens * plain_s, len(answers), costs.prefill_s),
        served=served,
        plain_served=plain_served,
    )


def _rate(served: int, tokens: int, decode_s: float, num_answers: int, prompt_s: float) -> float:
    """Tokens per second of `served` requests at once, prompts included; 0 where none fits."""
    seconds = decode_s + num_answers * served * prompt_s
    return served * tokens / float(seconds) if served and seconds > 0 else 0.0


def best_cells(cells: Sequence[SpeedCell]) -> list[SpeedCell]:
    """Of every candidate, slice and load the cell with the best number of draft tokens."""
    found: dict[tuple[str, str, int], SpeedCell] = {}
    for cell in cells:
        place = (cell.candidate, cell.slice, cell.concurrency)
        if place not in found or cell.speedup.value > found[place].speedup.value:
            found[place] = cell
    return list(found.values())


@dataclass(frozen=True)
class Machine:
    """A machine and its price; its steps are `speed` times as fast as those of this machine, which the user says."""

    name: str
    price_per_hour: float
    speed: float = 1.0


@dataclass(frozen=True)
class CostRow:
    """The price of a million tokens on a machine: at the load (`concurrency`) at which it is lowest with tokens no
    further apart than `slo_ms` asks, plain and with the drafter where it pays; None where no load is fast enough.
    """

    machine: str
    slice: str
    plain: float | None
    plain_concurrency: int | None
    after: float | None
    after_concurrency: int | None


def machines_of(options: AdviseOptions) -> list[Machine]:
    """This machine where its price is known, then those of the file.

    Raises:
        StorageError: the file cannot be read, or is not JSON.
        InputError: it is no list of machines.
    """
    own = [] if options.price_per_hour is None else [Machine("this machine", options.price_per_hour)]
    if options.machines is None:
        return own
    raw = read_json("machines", options.machines)
    if not isinstance(raw, list) or not all(isinstance(one, dict) for one in raw):
        raise InputError("machines", str(options.machines), 'must be a list of {"name": ..., "price_per_hour": ...}')
    for one in raw:
        if not isinstance(one.get("name"), str) or not {"price_per_hour"} <= one.keys() <= _KEYS:
            remedy = 'every machine needs "name" and "price_per_hour", and may have "speed"'
            raise InputError("machines", str(one), remedy)
        check_price(one["price_per_hour"])
        check_number("speed", one.get("speed", 1.0), 0.0, _MAX_SPEED, open_low=True)
    return own + [Machine(one["name"], float(one["price_per_hour"]), float(one.get("speed", 1.0))) for one in raw]


def cost_rows(
    machines: Iterable[Machine], cells: Sequence[SpeedCell], slo_ms: float | None, margin: float
) -> list[CostRow]:
    """By machine and slice; `cells` are the best ones of the candidate that is advised."""
    slices = list(dict.fromkeys(cell.slice for cell in cells))
    by_slice = {name: [cell for cell in cells if cell.slice == name] for name in slices}
    pairs = itertools.product(machines, by_slice.items())
    return [_row(machine, name, own, slo_ms, margin) for machine, (name, own) in pairs]


def _row(machine: Machine, slice_name: str, cells: Sequence[SpeedCell], slo_ms: float | None, margin: float) -> CostRow:
    def price(tokens_per_s: float) -> float:
        return million_price(machine.price_per_hour, 1 / (tokens_per_s * machine.speed))

    def in_time(ms_per_token: float) -> bool:
        return slo_ms is None or ms_per_token / machine.speed <= slo_ms

    timely = [cell for cell in cells if cell.plain_served and in_time(cell.plain_ms_per_token)]
    paying = [cell for cell in cells if cell.pays(margin) and in_time(cell.ms_per_token)]
    before = [(price(cell.plain_tokens_per_s), cell.concurrency) for cell in timely]
    with_drafts = [(price(cell.tokens_per_s), cell.concurrency) for cell in paying]
    plain = min(before, default=(None, None))
    after = min(before + with_drafts, default=(None, None))
    return CostRow(machine.name, slice_name, *plain, *after)
