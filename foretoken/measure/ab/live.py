"""Live traffic that is divided between two servers by time: which has its turn when, and what the requests say.

Time is cut into blocks, and in each all requests go to one server (a switchback): two servers that share a machine, a
cache or a queue would otherwise be measured under each other's load. Two blocks are a pair, one for each server, in an
order drawn at random. Requests that arrive while a block is new (the wash-out) are not counted: those of the block
before still run.

A request says its time per token. Where an answer does not say how many tokens it has, a quarter of the characters
counts as the tokens of every answer, on both sides: a server that says its tokens would otherwise be compared with one
whose tokens are estimated. What a request asks varies more than the servers do, so that what its length explains is
taken out first (CUPED: Deng, Xu, Kohavi and Walker, 2013), with the same coefficients for both servers.

Kept are sums by block and by side, so that memory grows with neither requests nor answers. A block keeps the mean of
(log of seconds per token, logs of the lengths) and their products about it, updated one request at a time (Welford,
1962); quantiles of times are read from histograms whose bins are 1 % wide.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from foretoken.backend.registry import check_address
from foretoken.errors import ConfigError
from foretoken.measure.ab.report import metric_figure
from foretoken.measure.ab.rows import SHARES, Outcome, outcome_of
from foretoken.measure.options import NAME_OPTION, OUT_OPTION, setting
from foretoken.measure.report import Report, Table
from foretoken.measure.sequential import MIN_BLOCKS
from foretoken.measure.stats import Array, ratio_text
from foretoken.measure.write import check_result
from foretoken.option import check_fields, option
from foretoken.params import check_number, check_whole

TOKEN_CHARS = 4  # of a token, where nobody counts them
BIN_WIDTH = 0.01  # relative, of a histogram of times
_SHORTEST_S, _LONGEST_S = 1e-6, 1e6
MIN_ERRORS, ERROR_ALPHA = 5, 1e-4  # of B, before traffic goes back to A for them
EXPLAINED = (
    "B over A: A's time per token as a multiple of B's, by the mean difference of logarithms between the two blocks of "
    "a pair, without what lengths of prompts and answers explain; above 1 B is faster. In brackets a 95 % interval "
    "that holds however often one looks. p50 and p95 are those of counted requests as they came, to 1 %."
)


@dataclass(frozen=True)
class LiveTurn:
    """The block of a moment: which server has it, and whether requests that arrive now are counted."""

    block: int
    side: str
    is_counted: bool


@dataclass(frozen=True)
class LiveRequest:
    """A request that has ended: its turn, seconds until its last byte and its first text, bytes of its body, the tokens
    that its answer says it has (0: it does not) and the characters of it (0: not read). `error` is "" or why it failed.
    """

    turn: LiveTurn
    e2e_s: float
    ttft_s: float
    num_prompt_bytes: int
    num_tokens: int
    error: str = ""
    num_chars: int = 0

    @property
    def is_compared(self) -> bool:
        """Whether its time per token is compared."""
        return self.turn.is_counted and not self.error and self.num_tokens > 0 and self.e2e_s > 0

    def by_characters(self) -> LiveRequest:
        """The same with a quarter of its characters as its tokens."""
        return replace(self, num_tokens=-(-self.num_chars // TOKEN_CHARS))


@dataclass
class LiveBlock:
    """The compared requests of one block: mean [3] of log(seconds per token), log(1 + bytes of the prompt) and
    log(tokens), and the sums [3, 3] of the products of their differences from it.
    """

    block: int
    side: str
    num_compared: int = 0
    mean: Array = field(default_factory=lambda: np.zeros(3))
    products: Array = field(default_factory=lambda: np.zeros((3, 3)))

    def add(self, request: LiveRequest) -> None:
        """Take in a request that is compared."""
        value = np.log([request.e2e_s / request.num_tokens, 1 + request.num_prompt_bytes, request.num_tokens])
        off = value - self.mean
        self.num_compared += 1
        self.mean = self.mean + off / self.num_compared
        self.products = self.products + np.outer(off, value - self.mean)


@dataclass
class TimeHistogram:
    """Counts of times in bins that are `BIN_WIDTH` wide; those beyond a microsecond and eleven days are in the last."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        """Count a time."""
        bounded = min(max(seconds, _SHORTEST_S), _LONGEST_S)
        self.counts[math.floor(math.log(bounded) / math.log1p(BIN_WIDTH))] += 1

    def quantile(self, share: float) -> float | None:
        """The middle of the bin that holds the smallest time which `share` of them do not exceed; None without any."""
        rest = max(1, math.ceil(share * self.counts.total()))
        for place, count in sorted(self.counts.items()):
            rest -= count
            if rest <= 0:
                return math.exp((place + 0.5) * math.log1p(BIN_WIDTH))
        return None


@dataclass
class LiveSide:
    """The requests of one server: how many there were, failed, were compared, came in the wash-out, or have an unknown
    number of tokens; and the times of those that were compared.
    """

    num_requests: int = 0
    num_errors: int = 0
    num_compared: int = 0
    num_early: int = 0
    num_unknown: int = 0
    times: dict[str, TimeHistogram] = field(
        default_factory=lambda: {name: TimeHistogram() for name in ("ttft", "e2e", "itl")}
    )

    def add(self, request: LiveRequest) -> None:
        """Take in any request."""
        self.num_requests += 1
        self.num_errors += bool(request.error)
        self.num_early += not request.turn.is_counted
        self.num_unknown += not request.error and not request.num_tokens
        if request.is_compared:
            self.num_compared += 1
            self.times["ttft"].add(request.ttft_s)
            self.times["e2e"].add(request.e2e_s)
            self.times["itl"].add(request.e2e_s / request.num_tokens)


class LiveSums:
    """What is kept of all requests of a comparison; `num_estimated` answers would have been compared, had they said how
    many tokens they have. With one of them characters are counted, on both sides.
    """

    def __init__(self) -> None:
        self.num_estimated = 0
        # By tokens, and by characters.
        self._sides = [{"a": LiveSide(), "b": LiveSide()} for _ in range(2)]
        self._blocks: list[dict[tuple[int, str], LiveBlock]] = [{}, {}]

    @property
    def sides(self) -> Mapping[str, LiveSide]:
        """Both servers by their letter."""
        return self._sides[self.num_estimated > 0]

    def add(self, request: LiveRequest) -> None:
        """Take in a request that has ended."""
        turn, estimated = request.turn, request.by_characters()
        for sides, blocks, one in zip(self._sides, self._blocks, (request, estimated), strict=True):
            sides[turn.side].add(one)
            if one.is_compared:
                blocks.setdefault((turn.block, turn.side), LiveBlock(turn.block, turn.side)).add(one)
        self.num_estimated += estimated.is_compared and not request.num_tokens

    def blocks(self, before: int | None = None) -> list[LiveBlock]:
        """The blocks with compared requests, in their order; those before the block `before` where that is given."""
        own = sorted(self._blocks[self.num_estimated > 0].items())
        return [one for (block, _), one in own if before is None or block < before]


@dataclass(frozen=True)
class LiveOptions:
    """Two servers and how traffic is divided between them; `margin` is as in `AbOptions`."""

    a: str = field(metadata=option("A, the current one: the address of a server."))
    b: str = field(metadata=option("B, the candidate: the address of a server."))
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8100, "Port to listen on; 0 = a free one.")
    block_s: float = setting(60.0, "Seconds for which all requests go to one server.")
    washout_s: float = setting(10.0, "Seconds at the beginning of a block in which requests are not counted.")
    margin: float = setting(0.03, "Relative difference below which the two count as equivalent.")
    out: Path | None = field(default=None, metadata=OUT_OPTION)
    name: str = field(default="ab-live", metadata=NAME_OPTION)
    seed: int = setting(0, "Seed of the order of the two servers.")

    def __post_init__(self) -> None:
        check_fields(self)
        check_address("a", self.a)
        check_address("b", self.b)
        check_whole("port", self.port, 0, 65_535)
        check_whole("seed", self.seed, 0, 2**62)
        check_number("block_s", self.block_s, 1.0, 86_400.0)
        check_number("washout_s", self.washout_s, 0.0, 86_400.0)
        if self.washout_s >= self.block_s:
            raise ConfigError("washout_s", self.washout_s, f"must be less than block_s, which is {self.block_s:g}")
        check_number("margin", self.margin, 0.0, 1.0, open_low=True)
        check_result(self.out, self.name)


def turn_at(options: LiveOptions, elapsed_s: float) -> LiveTurn:
    """Whose turn it is `elapsed_s` after the beginning."""
    block, within_s = divmod(elapsed_s, options.block_s)
    pair, place = divmod(int(block), 2)
    a_first = random.Random(f"{options.seed} {pair}").random() < 0.5
    return LiveTurn(int(block), "a" if a_first == (place == 0) else "b", within_s >= options.washout_s)


def pair_means(blocks: Sequence[LiveBlock]) -> list[float]:
    """Of each pair of blocks that has requests on both sides, in their order: the mean log of A's time per token less
    that of B's, above 0 where B is faster, without what the lengths of prompts and answers explain within blocks.
    """
    if not blocks:
        return []
    slopes = _slopes(blocks)
    pairs: dict[int, dict[str, Array]] = {}
    for one in blocks:
        pairs.setdefault(one.block // 2, {})[one.side] = one.mean
    differences = [sides["a"] - sides["b"] for _, sides in sorted(pairs.items()) if len(sides) == 2]
    return [float(off[0] - off[1:] @ slopes) for off in differences]


def _slopes(blocks: Sequence[LiveBlock]) -> Array:
    """How log(seconds per token) goes with the logs of the lengths [2], by least squares within blocks."""
    products = np.sum([one.products for one in blocks], axis=0)
    found: Array = np.linalg.lstsq(products[1:, 1:], products[1:, 0], rcond=None)[0]
    return found


def live_outcome(blocks: Sequence[LiveBlock], margin: float) -> Outcome:
    """What the blocks so far say, at whatever moment one looks; `margin` is a share."""
    return outcome_of(pair_means(blocks), margin)


def fails_more(sides: Mapping[str, LiveSide]) -> bool:
    """Whether B fails more often than A, by Fisher's exact test at a level that many looks do not use up."""
    failed = {side: one.num_errors for side, one in sides.items()}
    number = {side: one.num_requests for side, one in sides.items()}
    if failed["b"] < MIN_ERRORS:
        return False
    total, errors = sum(number.values()), sum(failed.values())
    at_least = range(failed["b"], min(errors, number["b"]) + 1)
    log_all = _log_ways(total, errors)
    log_chances = (_log_ways(number["b"], k) + _log_ways(number["a"], errors - k) - log_all for k in at_least)
    return math.fsum(map(math.exp, log_chances)) < ERROR_ALPHA


def _log_ways(total: int, chosen: int) -> float:
    """log of the ways to choose so many, without numbers of thousands of digits: it is asked while traffic passes."""
    if chosen > total:
        return -math.inf
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def live_report(
    options: LiveOptions, compared: Sequence[LiveBlock], sums: LiveSums, ended: str, command: str
) -> Report:
    """The report: `compared` are the blocks of whole pairs, `ended` says why the comparison was over."""
    outcome = live_outcome(compared, options.margin)
    return Report(
        title="A/B on live traffic",
        command=command,
        options=asdict(options),
        results={
            "kind": "ab live",
            "verdict": outcome.verdict,
            "outcome": outcome,
            "ended": ended,
            "pair_means": pair_means(compared),
            "sides": {side: asdict(one) for side, one in sums.sides.items()},
            "rows": [asdict(one) for one in sums.blocks()],
        },
        tables=(_table(sums.sides),),
        explained=EXPLAINED,
        caveats=_caveats(options, sums),
        verdict=_verdict(outcome, ended),
        passed=outcome.verdict != "slower" and not ended.startswith("B fails"),
    )


def _verdict(outcome: Outcome, ended: str) -> str:
    asked = f"{outcome.num_blocks} pairs of blocks"
    if outcome.speedup is None:
        return f"No verdict: no pair of blocks has requests on both sides{f'; {ended}' if ended else ''}."
    found = f"B runs at {ratio_text(outcome.speedup)} of A's speed, {asked}"
    if ended:
        return f"{ended[0].upper()}{ended[1:]}: {found}."
    if outcome.num_blocks < MIN_BLOCKS:
        return f"Go on: {found}, and {MIN_BLOCKS} are the fewest for a verdict."
    more = "" if outcome.blocks_to_decide is None else f"; about {outcome.blocks_to_decide} pairs would decide"
    return f"Go on: {found}, which decides nothing yet{more}."


def _caveats(options: LiveOptions, sums: LiveSums) -> tuple[str, ...]:
    found = []
    if sums.num_estimated:
        found.append(
            f"{sums.num_estimated} answers did not say how many tokens they have (stream_options.include_usage): a "
            "quarter of the characters counts as the tokens of all, on both sides."
        )
    if unknown := sum(one.num_unknown for one in sums.sides.values()):
        found.append(f"{unknown} answers have an unknown number of tokens, and are not compared.")
    if early := sum(one.num_early for one in sums.sides.values()):
        found.append(f"{early} requests arrived in the first {options.washout_s:g} s of a block, and are not compared.")
    found.append("Requests are not the same on both sides: a report of `foretoken ab` on recorded ones decides sooner.")
    return tuple(found)


def _table(sides: Mapping[str, LiveSide]) -> Table:
    lines = []
    for side, own in sides.items():
        quantiles = [(name, times.quantile(share)) for name, times in own.times.items() for share in SHARES.values()]
        cells = ("" if value is None else metric_figure(name, value) for name, value in quantiles)
        lines.append((side.upper(), *map(str, (own.num_requests, own.num_errors, own.num_compared)), *cells))
    headings = [f"{name} {share}" for name in ("ttft", "e2e", "per token") for share in SHARES]
    return Table("Requests", ("", "requests", "errors", "counted", *headings), tuple(lines))
