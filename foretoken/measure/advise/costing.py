"""What a million tokens cost before and after, on the machines that the user named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foretoken.errors import InputError
from foretoken.files import read_json
from foretoken.measure.advise.cells import SpeedCell
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.options import check_price
from foretoken.measure.price import million_price
from foretoken.params import check_number

_MAX_SPEED = 1e9
_KEYS = {"name", "price_per_hour", "speed"}


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
    return [
        _row(machine, name, [cell for cell in cells if cell.slice == name], slo_ms, margin)
        for machine in machines
        for name in slices
    ]


def _row(machine: Machine, slice_name: str, cells: Sequence[SpeedCell], slo_ms: float | None, margin: float) -> CostRow:
    def price(tokens_per_s: float) -> float:
        return million_price(machine.price_per_hour, 1 / (tokens_per_s * machine.speed))

    def in_time(ms_per_token: float) -> bool:
        return slo_ms is None or ms_per_token / machine.speed <= slo_ms

    before = [
        (price(cell.plain_tokens_per_s), cell.concurrency)
        for cell in cells
        if cell.plain_served and in_time(cell.plain_ms_per_token)
    ]
    with_drafts = [
        (price(cell.tokens_per_s), cell.concurrency)
        for cell in cells
        if cell.pays(margin) and in_time(cell.ms_per_token)
    ]
    plain = min(before, default=(None, None))
    after = min(before + with_drafts, default=(None, None))
    return CostRow(machine.name, slice_name, *plain, *after)
