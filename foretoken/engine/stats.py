"""Counters of what happened: one source, read by outputs, bench and server alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core import StepOutput
from foretoken.kv.prefix import PrefixStats


@dataclass
class RequestStats:
    """What one request cost and gained; times in seconds.

    A step's draft time is shared among the requests that drafted in it by their drafted tokens, its verify time (the
    target's forward and the rule) among all by their rows. `drafted_at` and `accepted_at` count by draft position, `drafted_by`
    and `accepted_by` by drafter. `num_probed` counts rows that the target ran for a drafter beside its guesses (`core.Probes`):
    they cost what a guess costs and can never be accepted. Guesses that a drafter judged itself while it drafted (a cascade's levels
    among each other) are `num_inner_drafted` and `num_inner_accepted`, and count nowhere else.
    `num_preempted` counts how often the request had to give back its cache and was read again later.
    `num_near_ties` counts greedy tokens whose two best logits were one rounding unit apart or less: only there can
    16-bit arithmetic make a speculative answer differ from a plain one; `near_tie_gap` is the widest such gap. `rule` is the
    rule by its resolved name; where `lossy` is true the answer does not have the target's law.
    """

    rule: str = "auto"
    lossy: bool = False

    num_steps: int = 0
    num_drafted: int = 0
    num_probed: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_inner_drafted: int = 0
    num_inner_accepted: int = 0
    num_near_ties: int = 0
    near_tie_gap: float = 0.0
    num_preempted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def emitted_per_step(self) -> float:
        """Tokens per pass of the target, the first one (prompt) included."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first one, by the time after the first one. One token alone: 1 / total time."""
        decode_s = self.total_s - self.ttft_s
        if self.num_emitted > 1 and decode_s > 0:
            return (self.num_emitted - 1) / decode_s
        return self.num_emitted / self.total_s if self.total_s > 0 else 0.0

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of `SpecConfig.prediction` that stand in the answer because they were drafted (OpenAI's name)."""
        return self.accepted_by.get("predicted", 0)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens of `SpecConfig.prediction` that were drafted and do not stand in the answer."""
        return self.drafted_by.get("predicted", 0) - self.accepted_prediction_tokens

    @property
    def accepted_per_position(self) -> tuple[tuple[int, int], ...]:
        """(drafted, accepted) counts at each place of the draft, first place first."""
        return tuple(zip(self.drafted_at, self.accepted_at, strict=True))

    def count_round(self, depths: list[int], num_accepted: int, num_emitted: int, tie_gaps: list[float]) -> None:
        """Add one round: the depth of every drafted node (1 = first place), what of it was emitted, gaps of its near ties."""
        for depth in depths:
            while len(self.drafted_at) < depth:
                self.drafted_at.append(0)
                self.accepted_at.append(0)
            self.drafted_at[depth - 1] += 1
        for place in range(num_accepted):
            self.accepted_at[place] += 1
        self.num_drafted += len(depths)
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        self.num_near_ties += len(tie_gaps)
        self.near_tie_gap = max([self.near_tie_gap, *tie_gaps])

    def count_authors(self, authors: Sequence[str | None], path: Sequence[int]) -> None:
        """Add one round's guesses to their drafters' accounts: who guessed each node, and the nodes that were emitted."""
        for author in authors:
            if author is not None:
                self.drafted_by[author] = self.drafted_by.get(author, 0) + 1
        for node in path:
            author = authors[node]
            if author is not None:
                self.accepted_by[author] = self.accepted_by.get(author, 0) + 1

    def as_dict(self) -> dict[str, float | int | str | list[list[int]] | dict[str, int]]:
        """Plain values under the public names, for JSON."""
        return {
            "rule": self.rule,
            "lossy": self.lossy,
            "num_steps": self.num_steps,
            "num_drafted": self.num_drafted,
            "num_probed": self.num_probed,
            "num_accepted": self.num_accepted,
            "num_emitted": self.num_emitted,
            "num_inner_drafted": self.num_inner_drafted,
            "num_inner_accepted": self.num_inner_accepted,
            "num_near_ties": self.num_near_ties,
            "near_tie_gap": self.near_tie_gap,
            "num_preempted": self.num_preempted,
            "acceptance_rate": self.acceptance_rate,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "drafted_by": self.drafted_by,
            "accepted_by": self.accepted_by,
            "accepted_prediction_tokens": self.accepted_prediction_tokens,
            "rejected_prediction_tokens": self.rejected_prediction_tokens,
            "accepted_per_position": [list(pair) for pair in self.accepted_per_position],
        }


@dataclass(frozen=True)
class ShadowStats:
    """What the shadow has found.

    `num_requests` and `num_tokens` were counted, `num_waiting` are finished or still running. `e_value` grows without bound when
    sampled tokens leave their laws, and reaches 1/alpha by chance with probability alpha at most, however long it runs. Of
    `num_greedy_tokens`, `num_greedy_other` were not the argmax; `max_greedy_gap` is how far below it, in logits.
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
class EngineStats:
    """Totals since the engine started.

    `num_preempted` requests gave back their cache to others, and `num_recomputed_tokens` were run again for it. `shadow` is None where no share
    of the answers is scored again, `prefix` where the target keeps none.

    `profile_s` was spent before the first request on measuring what steps cost.
    """

    num_steps: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_drafted: int = 0
    num_probed: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_preempted: int = 0
    num_recomputed_tokens: int = 0
    schedule_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    rule_s: float = 0.0
    rest_s: float = 0.0
    profile_s: float = 0.0
    shadow: ShadowStats | None = None
    prefix: PrefixStats | None = None

    def count(self, output: StepOutput, num_drafted: int, num_probed: int = 0) -> None:
        """Add what one round gave to one request; a failed round drafted and probed nothing that counts."""
        self.num_failed += output.finish_reason == "error"
        self.num_finished += output.finish_reason in ("stop", "length")
        self.num_drafted += num_drafted if output.error is None else 0
        self.num_probed += num_probed if output.error is None else 0
        self.num_accepted += sum(origin.kind == "accepted" for origin in output.origins)
        self.num_emitted += len(output.token_ids)
