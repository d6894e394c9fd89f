"""Counters of what happened: one source, read by outputs, bench, trace and server alike. docs/batching.md lists them.

A drafted token is one node of a draft. It is *accepted* when its token was emitted, *rejected* when its rule did not
let it stand, and *cut* when it would have stood but the answer ended before it; each drafted one is exactly one of the
three. A round that fails counts none of its drafted tokens; the time it took is counted.

Time belongs to requests so that their sums are the engine's totals, whatever becomes of a request (`accounts` does the
sharing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretoken.core import FinishReason
from foretoken.kv.prefix import PrefixStats


@dataclass(frozen=True)
class RoundCounts:
    """One round of one request: what was drafted, and what of it left the engine.

    `depths` [n] and `authors` [n] are those of the n drafted tokens (1 = first place of the draft; None: nobody's
    account). `path` are the drafted tokens that stand, root to leaf, of which the first `num_emitted` - 1 or fewer were
    emitted: the answer may end on the way. `inner` counts drafted tokens that a drafter judged itself, and those that
    it kept. `tie_gaps` are those of near ties among the emitted.
    """

    depths: Sequence[int]
    authors: Sequence[str | None]
    path: Sequence[int]
    num_emitted: int
    num_probed: int = 0
    inner: tuple[int, int] = (0, 0)
    tie_gaps: Sequence[float] = ()


@dataclass
class Counters:
    """What one request, or all together, drafted and got; times in seconds.

    `num_drafts` counts rounds of a request in which something was drafted. `num_probed` counts rows that the target ran
    for a drafter beside its drafted tokens (`core.Probes`): they cost what a drafted token costs and can never be
    accepted. Drafted tokens that a drafter judged itself while it drafted (a cascade's levels among each other) are
    `num_inner_drafted` and `num_inner_accepted`, and count nowhere else. `drafted_at` and `accepted_at` count by place
    of the draft, `drafted_by` and `accepted_by` by drafter. `num_near_ties` counts greedy tokens whose two best logits
    were one rounding unit apart or less: only there can 16-bit arithmetic make a speculative answer differ from a plain
    one; `near_tie_gap` is the widest such gap. `num_preempted` counts how often a cache was given back to be read
    again. `draft_failures` counts by drafter the calls that raised, took too long or gave what cannot be verified; they
    cost drafted tokens only.

    `draft_s` went into drafting, `verify_s` into the target's forward and the rule where they decoded, `prompt_s` where
    they read prompts, and `wasted_s`, a part of `draft_s` + `verify_s`, into drafted tokens that were rejected.
    `queued_s` is the time from arrival to the first step, `ttft_s` to the first token, `longest_gap_s` the longest wait
    for a next one. `plain_s` is what decoding without drafted tokens would have taken, and `compared_s` what it took,
    over the rounds where both are known (`accounts.gain`).
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

    @property
    def num_rejected(self) -> int:
        """Drafted tokens that the rule did not let stand."""
        return self.num_drafted - self.num_accepted - self.num_cut

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def accepted_per_position(self) -> tuple[tuple[int, int], ...]:
        """(drafted, accepted) counts at each place of the draft, first place first."""
        return tuple(zip(self.drafted_at, self.accepted_at, strict=True))

    @property
    def estimated_speedup(self) -> float | None:
        """How many times as long decoding without drafted tokens would have taken for the same tokens in the same
        company.

        From the measured times of steps; None while too little was measured.
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
            self._count_guesses(counts)

    def count_failure(self, drafter: str) -> None:
        """Add one failure of a drafter."""
        self.draft_failures[drafter] = self.draft_failures.get(drafter, 0) + 1

    def count_gain(self, plain_s: float, compared_s: float) -> None:
        """Add one round of one request: what its tokens would have taken without drafted tokens, and what it was
        charged.
        """
        self.plain_s += plain_s
        self.compared_s += compared_s

    def _count_guesses(self, counts: RoundCounts) -> None:
        emitted = counts.path[: counts.num_emitted]
        self.num_drafts += 1
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
        for account, authors in (
            (self.drafted_by, counts.authors),
            (self.accepted_by, [counts.authors[node] for node in emitted]),
        ):
            for author in authors:
                if author is not None:
                    account[author] = account.get(author, 0) + 1

    def _values(self, *names: str) -> dict[str, Any]:
        """The values of some fields or properties, for JSON, and those that every kind of counters has."""
        values = {name: getattr(self, name) for name in (*names, *_PUBLIC)}
        values |= {name: dict(getattr(self, name)) for name in ("drafted_by", "accepted_by", "draft_failures")}
        return values | {"accepted_per_position": [list(pair) for pair in self.accepted_per_position]}


_CONTAINERS = ("drafted_at", "accepted_at", "drafted_by", "accepted_by", "draft_failures")
_PUBLIC = (
    "num_steps",
    "num_drafts",
    "num_drafted",
    "num_probed",
    "num_preempted",
    "num_accepted",
    "num_rejected",
    "num_cut",
    "num_emitted",
    "num_inner_drafted",
    "num_inner_accepted",
    "num_near_ties",
    "near_tie_gap",
    "num_prompt_tokens",
    "num_cached_tokens",
    "acceptance_rate",
    "estimated_speedup",
    "draft_s",
    "verify_s",
    "prompt_s",
    "wasted_s",
    "queued_s",
    "ttft_s",
    "inter_token_s",
    "longest_gap_s",
)


@dataclass
class RequestStats(Counters):
    """What one request cost and gained.

    `rule` is the rule by its resolved name; where `lossy` is true the answer does not have the target's distribution.
    `num_steps` are passes of the target that decoded for it, `num_cached_tokens` the tokens of its prompt that an
    earlier request had left in the cache. `total_s` is the time from arrival to the last token. `disabled_drafters`
    names the drafters that were switched off for the request after too many failures, each with the last of its
    reasons.
    """

    rule: str = "auto"
    lossy: bool = False
    started: bool = False  # whether it took part in a step
    total_s: float = 0.0
    disabled_drafters: dict[str, str] = field(default_factory=dict)

    @property
    def emitted_per_step(self) -> float:
        """Tokens per pass of the target, the first one (prompt) included."""
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
        """Decode speed: tokens after the first one, by the time after the first one. One token alone: 1 / total
        time.
        """
        if self.num_emitted > 1 and self.decode_s > 0:
            return (self.num_emitted - 1) / self.decode_s
        return self.num_emitted / self.total_s if self.total_s > 0 else 0.0

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of `SpecConfig.prediction` that stand in the answer because they were drafted (OpenAI's name)."""
        return self.accepted_by.get("predicted", 0)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens of `SpecConfig.prediction` that were drafted and do not stand in the answer."""
        return self.drafted_by.get("predicted", 0) - self.accepted_prediction_tokens

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the public names, for JSON."""
        return self._values(
            "rule",
            "lossy",
            "total_s",
            "tokens_per_s",
            "emitted_per_step",
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
        ) | {"disabled_drafters": dict(self.disabled_drafters)}


@dataclass(frozen=True)
class ShadowStats:
    """What the shadow has found.

    `num_requests` and `num_tokens` were counted, `num_waiting` are finished or still running. `e_value` grows without
    bound when sampled tokens leave their distributions, and reaches 1/alpha by chance with probability alpha at most,
    however long it runs. Of `num_greedy_tokens`, `num_greedy_other` were not the argmax; `max_greedy_gap` is how far
    below it, in logits.
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
    """Totals since the engine started, over all requests: those that run, ended or broke.

    `num_submitted` requests are waiting, running, finished, failed or aborted; `num_aborted_tokens` were emitted by
    those that were aborted. `num_steps` are the engine's; `schedule_s` to `emit_s` are their phases and add up to them:
    `target_s` and `rule_s` together are `verify_s` and `prompt_s`; `commit_s` leaves out what drafters took for it,
    which is drafting. `queued_s` and `ttft_s` are sums over requests that have started and that have a first token.
    `profile_s` was spent before the first request on measuring what steps cost; `num_recomputed_tokens` were run again
    after preemptions. `num_faults` counts calls that raised and were contained (`recovery`): 0 unless something is
    broken. `shadow` is None where no share of the answers is scored again, `prefix` where the target keeps none.
    """

    num_submitted: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_recomputed_tokens: int = 0
    num_faults: int = 0
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

    def count_end(self, reason: FinishReason | None, num_emitted: int) -> None:
        """A request left for good, with so many tokens."""
        self.num_finished += reason in ("stop", "length")
        self.num_failed += reason == "error"
        if reason == "abort":
            self.num_aborted += 1
            self.num_aborted_tokens += num_emitted

    def snapshot(self, shadow: ShadowStats | None, prefix: PrefixStats | None) -> EngineStats:
        """A copy that later steps do not change."""
        containers = {name: getattr(self, name).copy() for name in _CONTAINERS}
        return replace(self, shadow=shadow, prefix=prefix, **containers)

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the public names, for JSON; `shadow` and `prefix` are objects, or null."""
        names = (
            "num_submitted",
            "num_waiting",
            "num_running",
            "num_finished",
            "num_failed",
            "num_aborted",
            "num_aborted_tokens",
        )
        phases = ("step_s", "schedule_s", "target_s", "rule_s", "commit_s", "observe_s", "emit_s", "profile_s")
        values = self._values(*names, "num_started", "num_first_tokens", "num_recomputed_tokens", "num_faults", *phases)
        for name in ("shadow", "prefix"):
            inner = getattr(self, name)
            values[name] = None if inner is None else asdict(inner)
        return values
