"""Statistics of requests and engine: the only source for outputs, bench, event log and command line. See
docs/statistics.md.

A drafted token is one node of a draft. It is *accepted* if it was emitted, *rejected* if its rule refused it, and *cut*
if it would have been accepted but the answer ended before it; each is exactly one of the three. A round that fails
counts none of its drafted tokens; its time counts.

Times are attributed to requests so that their sums are the engine's totals, whatever becomes of a request
(`time_attribution`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from foretoken.core import FinishReason
from foretoken.kv.prefix import PrefixStats

MAX_SLICES = 64  # slices are named by callers: without a limit their names would fill the memory of a server

PositionCounts = list[tuple[int, int]]


@dataclass
class SliceAcceptance:
    """Drafted and accepted tokens of at most `MAX_SLICES` slices; the one unused longest is dropped for a new one.

    `num_dropped` counts the dropped slices. A dropped slice that comes again begins at zero. Requests without a slice
    count under "".
    """

    num_dropped: int = 0
    _counts: OrderedDict[str, dict[str, PositionCounts]] = field(default_factory=OrderedDict)  # used last at the end

    def count(
        self, slice_: str, depths: Sequence[int], provenance: Sequence[str | None], emitted: Sequence[int]
    ) -> None:
        """Add one round: `depths` [n] and `provenance` [n] of its drafted tokens, and indices of the emitted ones."""
        drafters = self._drafters(slice_)
        accepted = set(emitted)
        for node, (depth, drafter) in enumerate(zip(depths, provenance, strict=True)):
            if drafter is None:
                continue
            positions = drafters.setdefault(drafter, [])
            positions += [(0, 0)] * (depth - len(positions))
            num_drafted, num_accepted = positions[depth - 1]
            positions[depth - 1] = (num_drafted + 1, num_accepted + (node in accepted))

    def of(self, slice_: str, drafter: str) -> tuple[tuple[int, int], ...]:
        """(drafted, accepted) counts at each position of the draft, the first one first; empty without drafts."""
        return tuple(self._counts.get(slice_, {}).get(drafter, ()))

    @property
    def slices(self) -> tuple[str, ...]:
        """The slices that are counted, the one used last at the end."""
        return tuple(self._counts)

    def copy(self) -> SliceAcceptance:
        """A copy that later rounds do not change; any thread may ask for one while another one counts."""
        # A list of items is made in one piece: a loop over them could meet a round half-way.
        counts = OrderedDict(
            (name, {drafter: list(positions) for drafter, positions in list(drafters.items())})
            for name, drafters in list(self._counts.items())
        )
        return SliceAcceptance(self.num_dropped, counts)

    def as_dict(self) -> dict[str, Any]:
        """[drafted, accepted] per position by slice and drafter, for JSON."""
        return {
            name: {drafter: [list(pair) for pair in positions] for drafter, positions in drafters.items()}
            for name, drafters in self._counts.items()
        }

    def _drafters(self, slice_: str) -> dict[str, PositionCounts]:
        if slice_ not in self._counts:
            self._counts[slice_] = {}
            if len(self._counts) > MAX_SLICES:
                self._counts.popitem(last=False)
                self.num_dropped += 1
        self._counts.move_to_end(slice_)
        return self._counts[slice_]


@dataclass(frozen=True)
class RoundCounts:
    """One round of one request: what was drafted, and what was emitted.

    `depths` [n] and `provenance` [n] belong to the n drafted tokens (1 = first position of the draft; None: no
    drafter). `path` is the accepted path, root to leaf, of which the first `num_emitted` - 1 or fewer were emitted: the
    answer may end within it. `inner` counts tokens drafted and accepted inside a drafter. `tie_gaps` are those of near
    ties among the emitted tokens.
    """

    depths: Sequence[int]
    provenance: Sequence[str | None]
    path: Sequence[int]
    num_emitted: int
    num_probed: int = 0
    inner: tuple[int, int] = (0, 0)
    tie_gaps: Sequence[float] = ()


@dataclass
class Counters:
    """Counters of one request, or of all together; times in seconds.

    `num_drafts` counts rounds of a request in which something was drafted. `num_probed` counts rows of probes
    (`core.Probes`): they cost as much as drafted tokens and are never accepted. Tokens verified inside a drafter (the
    levels of a cascade) are `num_inner_drafted` and `num_inner_accepted`, and count nowhere else. `drafted_at` and
    `accepted_at` count by position in the draft, `drafted_by` and `accepted_by` by drafter, `drafts_by` the rounds by
    drafter ("mix": several in one draft). `num_near_ties` counts greedy tokens whose two best logits differ by at most
    one rounding unit: only there can 16-bit arithmetic make a speculative answer differ from a plain one;
    `near_tie_gap` is the widest such gap. `draft_failures` counts by drafter the calls that raised, exceeded their time
    or returned an invalid draft.

    `draft_s` is drafting, `verify_s` the target's forward and the rule for decoding rows, `prompt_s` for prompt rows,
    and `wasted_s`, a part of `draft_s` + `verify_s`, was spent on rejected tokens. `queued_s` is the time from arrival
    to the first step, `ttft_s` to the first token, `longest_gap_s` the longest time between tokens. `plain_s` is the
    estimated time of plain decoding, and `compared_s` the actual time, over the rounds where both are known
    (`time_attribution.gain`).
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_probed: int = 0
    num_accepted: int = 0
    num_cut: int = 0
    num_emitted: int = 0
    num_inner_drafted: int = 0
    num_inner_accepted: int = 0
    num_near_ties: int = 0
    near_tie_gap: float = 0.0
    num_preempted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    prompt_s: float = 0.0
    wasted_s: float = 0.0
    queued_s: float = 0.0
    ttft_s: float = 0.0
    longest_gap_s: float = 0.0
    plain_s: float = 0.0
    compared_s: float = 0.0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    draft_failures: dict[str, int] = field(default_factory=dict)
    drafts_by: dict[str, int] = field(default_factory=dict)

    @property
    def num_rejected(self) -> int:
        """Drafted tokens that the rule rejected."""
        return self.num_drafted - self.num_accepted - self.num_cut

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def accepted_per_position(self) -> tuple[tuple[int, int], ...]:
        """(drafted, accepted) counts at each position of the draft, first position first."""
        return tuple(zip(self.drafted_at, self.accepted_at, strict=True))

    @property
    def estimated_speedup(self) -> float | None:
        """Estimated time of plain decoding for the same tokens in the same batches, divided by the actual time.

        From the measured times of steps; None until enough was measured.
        """
        return self.plain_s / self.compared_s if self.compared_s > 0 else None

    def count_round(self, counts: RoundCounts) -> None:
        """Add one round of one request."""
        self.num_emitted += counts.num_emitted
        self.num_probed += counts.num_probed
        self.num_inner_drafted += counts.inner[0]
        self.num_inner_accepted += counts.inner[1]
        if counts.tie_gaps:
            self.num_near_ties += len(counts.tie_gaps)
            self.near_tie_gap = max(self.near_tie_gap, *counts.tie_gaps)
        if counts.depths:
            self._count_drafted(counts)

    def count_failure(self, drafter: str) -> None:
        """Add one failure of a drafter."""
        self.draft_failures[drafter] = self.draft_failures.get(drafter, 0) + 1

    def count_gain(self, plain_s: float, compared_s: float) -> None:
        """Add one round of one request: the estimated time of plain decoding, and the time charged."""
        self.plain_s += plain_s
        self.compared_s += compared_s

    def _count_drafted(self, counts: RoundCounts) -> None:
        emitted = counts.path[: counts.num_emitted]
        self.num_drafts += 1
        names = [name for name in dict.fromkeys(counts.provenance) if name is not None]
        whose = names[0] if len(names) == 1 else "mix" if names else "unknown"
        self.drafts_by[whose] = self.drafts_by.get(whose, 0) + 1
        self.num_drafted += len(counts.depths)
        self.num_accepted += len(emitted)
        self.num_cut += len(counts.path) - len(emitted)
        missing = max(counts.depths) - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        for depth in counts.depths:
            self.drafted_at[depth - 1] += 1
        for place in range(len(emitted)):
            self.accepted_at[place] += 1
        for account, provenance in (
            (self.drafted_by, counts.provenance),
            (self.accepted_by, [counts.provenance[node] for node in emitted]),
        ):
            for drafter in names:
                if count := provenance.count(drafter):
                    account[drafter] = account.get(drafter, 0) + count

    def _values(self, *properties: str) -> dict[str, Any]:
        """The public fields, and those and other properties, for JSON."""
        names = [own.name for own in fields(self) if own.name not in _PRIVATE]
        values = {name: getattr(self, name) for name in (*names, *_PROPERTIES, *properties)}
        values |= {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
        return values | {"accepted_per_position": [list(pair) for pair in self.accepted_per_position]}


_PRIVATE = ("plain_s", "compared_s", "drafted_at", "accepted_at", "started", "decode_s", "acceptance")
_PROPERTIES = ("num_rejected", "acceptance_rate", "estimated_speedup", "inter_token_s")


@dataclass
class RequestStats(Counters):
    """Statistics of one request.

    `rule` is the rule by its resolved name; if `lossy` is true the answer does not have the target's distribution.
    `num_steps` are forward passes of the target that decoded for it, `num_cached_tokens` the prompt tokens found in the
    prefix cache. `total_s` is the time from arrival to the last token. `disabled_drafters` names the drafters disabled
    for the request after too many failures, each with its last reason.
    """

    rule: str = "auto"
    lossy: bool = False
    started: bool = False  # whether it was part of a step
    total_s: float = 0.0
    disabled_drafters: dict[str, str] = field(default_factory=dict)

    @property
    def emitted_per_step(self) -> float:
        """Tokens per forward pass of the target, the first one (prompt) included."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0

    @property
    def decode_s(self) -> float:
        """Time from the first token to the last one."""
        return self.total_s - self.ttft_s

    @property
    def inter_token_s(self) -> float:
        """Mean time between two tokens; 0 while there are not two."""
        return self.decode_s / (self.num_emitted - 1) if self.num_emitted > 1 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens per second after the first token. For a single token: 1 / total time."""
        if self.num_emitted > 1 and self.decode_s > 0:
            return (self.num_emitted - 1) / self.decode_s
        return self.num_emitted / self.total_s if self.total_s > 0 else 0.0

    @property
    def accepted_prediction_tokens(self) -> int:
        """Accepted tokens of `SamplingParams.prediction` (OpenAI's name)."""
        return self.accepted_by.get("predicted", 0)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Drafted tokens of `SamplingParams.prediction` that were not accepted."""
        return self.drafted_by.get("predicted", 0) - self.accepted_prediction_tokens

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the public names, for JSON."""
        own = ("tokens_per_s", "emitted_per_step", "accepted_prediction_tokens", "rejected_prediction_tokens")
        return self._values(*own)


@dataclass(frozen=True)
class ShadowStats:
    """Results of the shadow checks.

    `num_requests` and `num_tokens` were evaluated, `num_waiting` are finished or still running. `e_value` grows without
    bound if sampled tokens do not follow their distributions, and reaches 1/alpha by chance with probability at most
    alpha, however long it runs. Of `num_greedy_tokens`, `num_greedy_other` were not the argmax; `max_greedy_gap` is the
    largest difference, in logits.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    e_value: float = 1.0
    num_greedy_tokens: int = 0
    num_greedy_other: int = 0
    max_greedy_gap: float = 0.0
    alarm: bool = False
    message: str = ""


@dataclass
class EngineStats(Counters):
    """Totals since the engine started, over all requests: running, finished, failed or cancelled.

    `num_submitted` requests are waiting, running, finished, failed or aborted; `num_aborted_tokens` were emitted by
    aborted ones. `num_steps` are the engine's; `schedule_s` to `emit_s` are their phases and add up to them: `target_s`
    and `rule_s` together are `verify_s` and `prompt_s`; `commit_s` excludes the drafters' part, which is drafting.
    `queued_s` and `ttft_s` are sums over requests that have started and that have a first token. `profile_s` was spent
    on profiling before the first request; `num_recomputed_tokens` were recomputed after preemptions. `num_faults`
    counts contained exceptions (`recovery`). `num_threads` and `waiting` are how steps run now (`step_threads`), 0 and
    empty before the first one. `acceptance` counts by slice, drafter and position. `shadow` is None
    without shadow checks, `prefix` if the target has no prefix cache.
    """

    num_submitted: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_recomputed_tokens: int = 0
    num_faults: int = 0
    num_threads: int = 0
    waiting: str = ""
    num_aborted: int = 0
    num_aborted_tokens: int = 0
    num_started: int = 0
    num_first_tokens: int = 0
    decode_s: float = 0.0
    schedule_s: float = 0.0
    target_s: float = 0.0
    rule_s: float = 0.0
    commit_s: float = 0.0
    observe_s: float = 0.0
    emit_s: float = 0.0
    profile_s: float = 0.0
    acceptance: SliceAcceptance = field(default_factory=SliceAcceptance)
    shadow: ShadowStats | None = None
    prefix: PrefixStats | None = None

    @property
    def inter_token_s(self) -> float:
        """Mean time between two tokens of a request; 0 while there are none."""
        gaps = self.num_emitted - self.num_first_tokens
        return self.decode_s / gaps if gaps > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Time spent in steps, all phases together."""
        return (
            self.schedule_s + self.draft_s + self.target_s + self.rule_s + self.commit_s + self.observe_s + self.emit_s
        )

    def count_round_of(self, slice_: str, counts: RoundCounts) -> None:
        """Add one round of one request of a slice."""
        self.count_round(counts)
        if counts.depths:
            emitted = counts.path[: counts.num_emitted]
            self.acceptance.count(slice_, counts.depths, counts.provenance, emitted)

    def count_end(self, reason: FinishReason | None, num_emitted: int) -> None:
        """A request ended, after so many tokens."""
        self.num_finished += reason in ("stop", "length")
        self.num_failed += reason == "error"
        if reason == "abort":
            self.num_aborted += 1
            self.num_aborted_tokens += num_emitted

    def snapshot(self, shadow: ShadowStats | None, prefix: PrefixStats | None) -> EngineStats:
        """A copy that later steps do not change."""
        held: dict[str, Any] = {own.name: getattr(self, own.name) for own in fields(self)}
        copies = {name: one.copy() for name, one in held.items() if isinstance(one, list | dict | SliceAcceptance)}
        return replace(self, shadow=shadow, prefix=prefix, **copies)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the public names, for JSON; `shadow` and `prefix` are objects, or null."""
        values = self._values("step_s")
        for name in ("shadow", "prefix"):
            values[name] = None if values[name] is None else asdict(values[name])
        values["acceptance_by_slice"] = self.acceptance.as_dict()
        values["num_dropped_slices"] = self.acceptance.num_dropped
        return values
