"""The cost of a target step on a machine, as a few measured curves, and the estimate for a step that was not measured.

    step = rows(decoding rows)                                       one request, a short text
         + chunk(decoding rows + prompt rows) - chunk(decoding rows)  with prompts (`rows` below the start of `chunk`)
         + batch(requests) - rows(requests), each beyond its first    several requests against as many rows of one
         + sum over requests of context(tokens) - context(short)      reading a longer context

Curves are interpolated linearly, constant before the first point, and extrapolated with their last slope. Without a
context curve the `roofline` is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foretoken.errors import InputError

# ---- a lower bound of a forward: the time to read weights and cache, or to compute, whichever is longer
#
# Williams et al. 2009, "Roofline: an insightful visual performance model". Real kernels miss it by a factor that
# hardly changes with the number of rows, so measured points give the height of the curve, and the roofline its shape
# between them.

_SHARPNESS = 4.0  # exponent of the norm that joins memory and compute
_MIN_FACTOR, _MAX_FACTOR = (
    0.5,
    4.0,
)  # limits of the ratio of measured steps to the roofline that is used for extrapolation
_MAX_ROWS = 512  # points up to here; beyond, the slope is that of compute

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Roofline:
    """A model on a machine: bytes of weights per step, operations per row, bytes of keys and values per cached token.

    `bytes_per_s` and `flops_per_s` are measured in a copy and in a matrix product. `step_bytes` is what one row reads.
    Of a mixture of experts, which take `expert_bytes` in all, one row reads `expert_share`, and more rows read more.
    """

    step_bytes: float
    row_flops: float
    kv_bytes_per_token: float
    bytes_per_s: float
    flops_per_s: float
    expert_bytes: float = 0.0
    expert_share: float = 1.0

    def __post_init__(self) -> None:
        if min(self.step_bytes, self.row_flops, self.bytes_per_s, self.flops_per_s) <= 0 or self.kv_bytes_per_token < 0:
            raise ValueError("bytes, arithmetic and speeds must be positive")
        if self.expert_bytes < 0 or not 0 < self.expert_share <= 1:
            raise ValueError("the bytes of experts must not be negative, and a row's share of them lies in (0, 1]")

    def seconds(self, rows: float, past_tokens: float = 0.0) -> float:
        """Seconds of a forward over `rows` rows of requests with `past_tokens` cached tokens in total; the cache of a
        request is read once for all its rows.
        """
        memory = (self.read_bytes(rows) + past_tokens * self.kv_bytes_per_token) / self.bytes_per_s
        compute = rows * self.row_flops / self.flops_per_s
        longer = max(memory, compute)
        return float(longer * ((memory / longer) ** _SHARPNESS + (compute / longer) ** _SHARPNESS) ** (1 / _SHARPNESS))

    def read_bytes(self, rows: float) -> float:
        """Weights that a forward over `rows` rows reads: each expert that a row goes to once for all its rows.

        An expert is read with the probability 1 - (1 - share) ** rows, if rows go to experts independently and no
        expert is preferred. Rows of one text agree more, and measured points take precedence.
        """
        others = 1.0 - self.expert_share
        return self.step_bytes + self.expert_bytes * float(others - others ** max(rows, 1))

    def past_s(self, past_tokens: float) -> float:
        """Seconds for reading the keys and values of cached tokens."""
        return past_tokens * self.kv_bytes_per_token / self.bytes_per_s

    def fill(self, points: Sequence[tuple[int, float]]) -> Points:
        """Measured `points` (rows ascending, seconds) with points between and beyond them; measured points are
        unchanged.

        Between two points the curve follows the roofline. Beyond the last it is the roofline times the ratio of the
        last point to it, which is clipped: where calls dominate instead of rows, the ratio is meaningless. Increasing
        points give an increasing curve.
        """
        assert points
        last_rows, last_s = points[-1]
        factor = min(max(last_s / self.seconds(last_rows), _MIN_FACTOR), _MAX_FACTOR)
        filled = dict(points)
        for rows in _grid():
            place = next((place for place, (known, _) in enumerate(points) if known >= rows), len(points))
            if place == len(points):
                filled[rows] = last_s + factor * (self.seconds(rows) - self.seconds(last_rows))
            elif place:
                (low, below), (high, above) = points[place - 1 : place + 1]
                rise = self.seconds(high) - self.seconds(low)
                share = (self.seconds(rows) - self.seconds(low)) / rise if rise > 0 else (rows - low) / (high - low)
                filled.setdefault(rows, below + share * (above - below))
        return tuple(sorted(filled.items()))


def _grid() -> list[int]:
    """Row counts from 1 on, with growing distances."""
    rows = [1]
    while rows[-1] < _MAX_ROWS:
        rows.append(rows[-1] + max(1, rows[-1] // 8))
    return rows


FORMAT = "foretoken-profile-1"
_MAX_COUNT, _MAX_SECONDS = 1 << 40, 1e6  # larger values cannot be measurements, and their sums overflow


@dataclass(frozen=True)
class Curve:
    """Seconds by count: `points` ascending; no point means 0 everywhere."""

    points: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.points]
        if counts != sorted(set(counts)) or any(not math.isfinite(s) or s < 0 for _, s in self.points):
            raise ValueError("points must ascend, with seconds of at least 0")

    def seconds(self, count: float) -> float:
        """Seconds for `count`."""
        if not self.points:
            return 0.0
        place = bisect_left(self.points, (count,))
        if place < len(self.points) and (place == 0 or self.points[place][0] == count):
            return self.points[place][1]
        if len(self.points) == 1:
            return self.points[0][1]
        (low, below), (high, above) = (
            self.points[place - 1 : place + 1] if place < len(self.points) else self.points[-2:]
        )
        slope = (above - below) / (high - low)
        if place < len(self.points):
            return below + slope * (count - low)
        return above + max(0.0, slope) * (count - high)

    def beyond(self, count: float, base: float) -> float:
        """Additional seconds of `count` over `base`; never negative."""
        return max(0.0, self.seconds(count) - self.seconds(base))


@dataclass(frozen=True)
class DrafterCost:
    """Seconds of a drafter in a round, for proposing and for committing what was emitted.

    `guesses` (the key of saved profiles) by its longest draft, one request; `batch` by requests, with
    `batch_num_draft` drafted tokens each;
    `prompt` by the length of a prompt that is read for the first time. `about` describes what determines this drafter's
    cost.
    """

    guesses: Curve
    batch: Curve = Curve()
    batch_num_draft: int = 1
    prompt: Curve = Curve()
    about: Mapping[str, Any] = field(default_factory=dict)

    def seconds(self, num_draft: int, batch: int = 1, prompt_tokens: int = 0) -> float:
        """A round in which the longest draft has `num_draft` drafted tokens and `batch` requests draft; 0 for none."""
        if num_draft < 1 or batch < 1:
            return 0.0
        alone = self.batch.seconds(1)
        share = self.batch.seconds(batch) / alone if alone > 0 else 1.0
        return self.guesses.seconds(num_draft) * max(1.0, share) + (
            self.prompt.seconds(prompt_tokens) if prompt_tokens else 0.0
        )


@dataclass(frozen=True)
class Profile:
    """Measured curves of one target on one machine, with their provenance.

    `rows` by decoding rows, `batch` by requests of one row each, `context` by cached tokens (one row), `chunk` by
    prompt tokens; `drafters` by name. `target` describes the model, `caveats` what was left out or unusual. `roofline`
    is the lower bound of this machine.
    """

    target: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    date: str
    rows: Curve
    batch: Curve = Curve()
    context: Curve = Curve()
    chunk: Curve = Curve()
    drafters: Mapping[str, DrafterCost] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    roofline: Roofline | None = None

    def step_s(self, decode_rows: int, contexts: Sequence[int], prompt_tokens: int = 0) -> float:
        """A step over `decode_rows` rows and `prompt_tokens` of prompts, of requests with `contexts` cached tokens."""
        seconds = self.rows.seconds(decode_rows) if decode_rows else 0.0
        if prompt_tokens:
            seconds += self._beside_s(decode_rows, prompt_tokens) if decode_rows else self.chunk.seconds(prompt_tokens)
        if len(contexts) > 1:  # differences within a curve: the speed of the machine changes between curves
            seconds += max(0.0, self.batch.beyond(len(contexts), 1) - self.rows.beyond(len(contexts), 1))
        if self.context.points:
            short, _ = self.context.points[0]
            seconds += sum(self.context.beyond(tokens, short) for tokens in contexts if tokens > short)
        elif self.roofline is not None:
            seconds += self.roofline.past_s(sum(contexts))
        return seconds

    def _beside_s(self, decode_rows: int, prompt_tokens: int) -> float:
        """Additional seconds of prompt rows; below the start of the chunk curve, from the curve of rows."""
        total = decode_rows + prompt_tokens
        first = self.chunk.points[0][0] if self.chunk.points else total
        return self.rows.beyond(min(first, total), decode_rows) + self.chunk.beyond(total, max(first, decode_rows))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": FORMAT, "fingerprint": self.fingerprint, **asdict(self)}

    @property
    def fingerprint(self) -> str:
        """See `fingerprint`."""
        return fingerprint(
            self.machine, self.target, self.versions, {name: cost.about for name, cost in self.drafters.items()}
        )


def profile_from_mapping(raw: object) -> Profile:
    """Read what `Profile.as_dict` wrote

    Raises:
        InputError: not a profile, or one with a missing or malformed part; names it.
    """
    if not isinstance(raw, Mapping) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, Mapping) else type(raw).__name__
        raise InputError(
            "profile",
            found,
            f"not a profile of this version ({FORMAT}); make one with `foretoken bench profile --out DIR`",
        )
    rows = _curve(raw, "rows")
    if not rows.points:
        raise InputError("profile.rows", raw.get("rows"), "needs at least one point [rows, seconds]")
    drafters = raw.get("drafters", {})
    if not isinstance(drafters, Mapping):
        raise InputError("profile.drafters", drafters, "must map names to curves")
    caveats = raw.get("caveats", ())
    if not isinstance(caveats, list | tuple):
        raise InputError("profile.caveats", caveats, "must be a list of texts")
    return Profile(
        target=_mapping(raw, "target"),
        machine=_mapping(raw, "machine"),
        versions=_mapping(raw, "versions"),
        command=str(raw.get("command", "")),
        date=str(raw.get("date", "")),
        rows=rows,
        batch=_curve(raw, "batch"),
        context=_curve(raw, "context"),
        chunk=_curve(raw, "chunk"),
        drafters={str(name): _drafter(f"drafters.{name}", cost) for name, cost in drafters.items()},
        caveats=tuple(map(str, caveats)),
        roofline=_roofline(raw),
    )


def fingerprint(
    machine: Mapping[str, Any],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    drafters: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """The fingerprint of a profile: equal on the same machine, model, versions and drafters only."""
    text = json.dumps([machine, target, versions, drafters or {}], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _drafter(name: str, raw: object) -> DrafterCost:
    if not isinstance(raw, Mapping):
        raise InputError(f"profile.{name}", raw, "must hold curves")
    drafting, num_draft = _curve(raw, "guesses", name), raw.get("batch_num_draft", 1)
    if isinstance(num_draft, bool) or not isinstance(num_draft, int) or num_draft < 1:
        raise InputError(f"profile.{name}.batch_num_draft", num_draft, "must be a whole number of at least 1")
    about = raw.get("about", {})
    if not isinstance(about, Mapping):
        raise InputError(f"profile.{name}.about", about, "must be an object")
    return DrafterCost(drafting, _curve(raw, "batch", name), num_draft, _curve(raw, "prompt", name), about)


def _roofline(raw: Mapping[str, Any]) -> Roofline | None:
    value = raw.get("roofline")
    if value is None:
        return None
    try:
        return Roofline(**{str(name): _number(number) for name, number in value.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError("profile.roofline", value, f"must hold the numbers of a roofline: {error}") from error


def _curve(raw: Mapping[str, Any], name: str, where: str = "") -> Curve:
    value = raw.get(name, {"points": []})
    points: Any = value.get("points") if isinstance(value, Mapping) else value
    try:
        return Curve(tuple((_count(count), _number(seconds, _MAX_SECONDS)) for count, seconds in points))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"profile.{where + '.' if where else ''}{name}", value, f"must be pairs [count, seconds]: {error}"
        ) from error


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{value!r} is not a count")
    return value


def _number(value: object, most: float = sys.float_info.max) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a number from 0 to {most:g}")
    return float(value)


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, Mapping):
        raise InputError(f"profile.{name}", value, "must be an object")
    return value
