"""Attribution of a step's time to its requests.

A drafter's time is divided among its requests by their drafted tokens (evenly if it drafted none); the rest of the
drafting phase, routing and merging, evenly among all. The target's forward and the rules are divided by rows: pending
tokens, drafted tokens and probes. Shares add up to the step. Wasted is the share of rejected tokens in a request's
drafting time, and what their rows added to the forward: by the measured times of steps with as many rows and with
fewer, and at most the rows' share, since a small step mostly reads weights, which drafted tokens do not make slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from foretoken.control.cost import CostTable
from foretoken.core import Batch, BatchEntry, Draft, Verdict
from foretoken.draft.base import DrafterKey
from foretoken.draft.group import GRAMMAR
from foretoken.engine.stats import EngineStats, RequestStats
from foretoken.engine.watch import StepClock

KeysOf = Callable[[int], Sequence[DrafterKey]]  # the drafters of a request's options


def charge(
    batch: Batch,
    draft: Draft,
    verdict: Verdict,
    clock: StepClock,
    spent_s: Mapping[DrafterKey, float],
    keys_of: KeysOf,
    steps: CostTable,
    accounts: Sequence[RequestStats],
    totals: EngineStats,
) -> None:
    """Add the time of a step to its entries, one account each in their order, and to `totals`.

    `spent_s` is what each drafter took of the clock's `draft_s`, `keys_of` which drafters a request has; `steps` tells
    what a step takes by its rows.
    """
    rows = [len(entry.pending) for entry in batch.entries]
    for b, (drafted, probes) in enumerate(zip(draft.lengths, draft.probe_lengths, strict=True)):
        rows[b] += drafted + probes
    num_rows = sum(rows)
    row_s = (clock.target_s + clock.rule_s) / num_rows
    rejected = [length - len(path) for length, path in zip(draft.lengths, verdict.paths, strict=True)]
    wasted_row_s = _added_row_s(steps, num_rows, sum(rejected), row_s)
    drafting = _drafting_s(batch.decoding, draft, spent_s, keys_of)
    shared_s = (clock.draft_s - sum(drafting)) / len(rows)
    num_decoding = len(rejected)
    for b, (entry, account) in enumerate(zip(batch.entries, accounts, strict=True)):
        draft_s, wasted_s = shared_s, 0.0
        if b < num_decoding:
            draft_s += drafting[b]
            account.num_steps += 1
            if rejected[b]:
                wasted_s = rejected[b] * (wasted_row_s + drafting[b] / draft.lengths[b])
        run_s = rows[b] * row_s
        if _reads_prompt(entry):
            account.prompt_s += run_s
            totals.prompt_s += run_s
        else:
            account.verify_s += run_s
            totals.verify_s += run_s
        account.draft_s += draft_s
        account.wasted_s += wasted_s
        totals.draft_s += draft_s
        totals.wasted_s += wasted_s


def gain(batch: Batch, clock: StepClock, steps: CostTable) -> tuple[float, float] | None:
    """(seconds per token of plain decoding, seconds charged to each request for this step), for comparison.

    With plain decoding the requests of a step would have got one token each in a step of as many rows; each of the B
    requests is charged a B-th of a step. None if a prompt was read as well, or until steps of so few rows were
    measured.
    """
    count = len(batch.entries)
    if not steps.reaches(count) or not batch.only_decodes:
        return None
    return steps.seconds(count) / count, (clock.draft_s + clock.target_s + clock.rule_s) / count


def _reads_prompt(entry: BatchEntry) -> bool:
    """Whether an entry's rows are existing text: a prompt, or text recomputed after preemption."""
    return len(entry.pending) > 1 or not entry.decodes or entry.start < len(entry.request.prompt_ids)


def _added_row_s(steps: CostTable, num_rows: int, num_rejected: int, row_s: float) -> float:
    """Seconds that each rejected row added to the step; 0 while unknown."""
    if not num_rejected:
        return 0.0
    return min(row_s, max(0.0, steps.seconds(num_rows) - steps.seconds(num_rows - num_rejected)) / num_rejected)


def _drafting_s(
    entries: Sequence[BatchEntry], draft: Draft, spent_s: Mapping[DrafterKey, float], keys_of: KeysOf
) -> list[float]:
    """Each entry's part of what its drafters took: by the draft tokens they made, evenly among their requests where
    they made none.

    Tokens forced by a grammar cost nothing.
    """
    parts = [0.0] * len(entries)
    if not spent_s:
        return parts
    drafted: dict[DrafterKey, dict[int, int]] = {}  # by drafter and request
    for b, entry in enumerate(entries):
        for option, key in enumerate(keys_of(entry.request.request_id)):
            made = draft.lengths[b] if option == entry.option and draft.drafters[b] != GRAMMAR else 0
            own = drafted.setdefault(key, {})
            own[b] = own.get(b, 0) + made
    for key, took_s in spent_s.items():
        own = drafted.get(key, {})  # none: it previewed draft tokens for a request that was then preempted
        total = sum(own.values())
        for b, made in own.items():
            parts[b] += took_s * (made / total if total else 1 / len(own))
    return parts


def book(clock: StepClock, stats: EngineStats) -> None:
    """Add a step's phases to the totals; the drafting is there already, charged to the requests."""
    stats.num_steps += 1
    stats.schedule_s += clock.schedule_s
    stats.target_s += clock.target_s
    stats.rule_s += clock.rule_s
    stats.commit_s += clock.commit_s
    stats.observe_s += clock.observe_s
    stats.emit_s += clock.emit_s
