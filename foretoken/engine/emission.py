"""Emission of a verdict's tokens for one request: provenance, log-probabilities, and the end of the answer."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import Draft, StepOutput, TokenKind, TokenLogprobs, TokenOrigin, Verdict
from foretoken.engine.recovery import engine_error
from foretoken.engine.request import RequestState
from foretoken.engine.runner import TargetOutput
from foretoken.engine.stats import EngineStats, RequestStats, RoundCounts
from foretoken.errors import NumericsError
from foretoken.text.sampling import target_probs
from foretoken.transfer import to_device, to_host

# ---- log-probabilities to report: of the distribution a token was drawn from, or of the model's own softmax


def sampling_log_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities of the distribution that each row's token is drawn from: processed logits [n, V] -> [n, V].

    `params` are each row's parameters. Tokens that the filters remove get -inf. At temperature 0 it is the distribution
    of temperature 1 without filters. float32 (float64 for float64 logits).
    """
    greedy = [row for row, choice in enumerate(params) if choice.greedy]
    if len(greedy) == len(params):
        return log_model(logits)
    distribution = target_probs(logits, params).log()
    places = to_device(greedy, logits.device)
    distribution[places] = log_model(logits[places])
    return distribution


def log_model(logits: Tensor) -> Tensor:
    """Log-softmax of `logits`, unprocessed: [n, V] -> [n, V], float32 (float64 for float64 logits)."""
    return torch.log_softmax(logits, -1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def token_logprobs(
    distribution: Tensor, tokens: Sequence[int], top: int = 0, listed: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """What to report of `tokens` [n], each drawn from its row of log-probabilities `distribution` [n, V], with the
    `top` likeliest of the row; or, in their place, with the tokens `listed` and itself.

    Equal ones are ordered by id, in lists and ranks alike. Of the likeliest, tokens of probability 0 are not listed, so
    a list may come out shorter.
    """
    assert distribution.shape[0] == len(tokens)
    if not tokens:
        return []
    chosen = to_device(tokens, distribution.device)[:, None]  # [n, 1]
    values = distribution.gather(-1, chosen)  # [n, 1]
    before = (distribution > values) | (
        (distribution == values) & (torch.arange(distribution.shape[-1], device=distribution.device) < chosen)
    )  # [n, V]
    found, ranks = to_host(values[:, 0], 1 + before.sum(-1))
    if listed:
        tops = _chosen(distribution, tokens, listed)
    else:
        tops = _likeliest(distribution, min(top, distribution.shape[-1])) if top > 0 else [()] * len(tokens)
    return [TokenLogprobs(*row) for row in zip(tokens, found, ranks, tops, strict=True)]


def _chosen(distribution: Tensor, tokens: Sequence[int], listed: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """The tokens `listed` and each row's own, best first, equal ones by id."""
    rows = [[*listed, token] for token in tokens]
    (scores,) = to_host(distribution.gather(-1, to_device(rows, distribution.device)))
    found = [dict(zip(row, values, strict=True)) for row, values in zip(rows, scores, strict=True)]
    return [tuple(sorted(row.items(), key=lambda pair: (-pair[1], pair[0]))) for row in found]


def _likeliest(distribution: Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    """The `top` likeliest tokens of each row, equal ones by id, without those of probability 0."""
    if distribution.device.type != "cpu":
        return likeliest_by_sort(distribution, top)
    least = distribution.topk(top, -1).values[:, -1:]  # [n, 1]; topk itself breaks ties as it likes
    listed = []
    for row, candidate in zip(distribution, (distribution >= least) & (distribution > -torch.inf), strict=True):
        ids = candidate.nonzero()[:, 0]  # rising, and a few more than `top` only if the last place is tied
        values, order = row[ids].sort(descending=True, stable=True)
        listed.append(tuple(zip(ids[order[:top]].tolist(), values[:top].tolist(), strict=True)))
    return listed


def likeliest_by_sort(distribution: Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    """The same from whole rows sorted, which on a device costs less than to wait for each row."""
    values, ids = distribution.sort(dim=-1, descending=True, stable=True)
    rows = zip(*to_host(ids[:, :top], values[:, :top]), strict=True)
    return [tuple(pair for pair in zip(*row, strict=True) if pair[1] > -math.inf) for row in rows]


def emit(
    state: RequestState, draft: Draft, target: TargetOutput, verdict: Verdict, b: int, now: float, totals: EngineStats
) -> StepOutput:
    """Append the tokens of request `b` up to the end of its answer, and count them for the request and in `totals`.

    If the logits of its rows are not finite, its processors failed, or its tokens cannot be converted to text or
    log-probabilities, the request fails alone and nothing of the round is appended.
    """
    before = state.mark()
    try:
        return _emit(state, draft, target, verdict, b, now, totals)
    except Exception as error:  # noqa: BLE001 - an error in its own tokens fails only this request
        state.rewind(before)
        return fail(state, engine_error("the request's output cannot be converted", error))
    except BaseException:
        state.rewind(before)
        raise


def _emit(
    state: RequestState, draft: Draft, target: TargetOutput, verdict: Verdict, b: int, now: float, totals: EngineStats
) -> StepOutput:
    rows = _used_rows(draft, verdict, b)
    error = _error(state, target, b, rows)
    if error is not None:
        return fail(state, error)
    first = len(state.provenance)
    for token, origin in zip(verdict.emitted(b), _origins(state, draft, verdict, b), strict=True):
        if state.append(token, origin):
            break
        # Behind such an error the token just appended is the last one.
        if state.processors is not None and state.processors.error is not None:
            state.finish_reason, state.error = "error", state.processors.error
            break
    num_new = len(state.provenance) - first
    tokens = tuple(state.tokens[-num_new:])
    logprobs = _logprobs(state, target, rows[:num_new], tokens)
    if state.noise is not None:
        state.noise.forget(len(state.tokens))
    text = state.text.release(final=state.finish_reason is not None)
    state.logprobs += logprobs
    near_ties = target.checks.near_ties
    gaps = [near_ties[row] for row in rows[:num_new] if row in near_ties] if near_ties else ()
    counts = _counts(draft, verdict, b, num_new, gaps)
    state.stats.count_round(counts)
    totals.count_round_of(state.request.params.slice, counts)
    _tell_time(state.stats, totals, now - state.arrived_s, is_first=not first)
    state.num_rounds += 1
    return StepOutput(
        state.request_id, tokens, text, tuple(state.provenance[first:]), state.finish_reason, state.error, logprobs
    )


def fail(state: RequestState, error: Exception) -> StepOutput:
    """End a request with an error; earlier output stays."""
    state.finish_reason, state.error = "error", error
    return StepOutput(state.request_id, (), state.text.release(final=True), (), "error", error)


def note_prompt(state: RequestState, target: TargetOutput) -> Exception | None:
    """Store the log-probabilities of the next prompt tokens but those known already; returns the error, if any."""
    logits, count = target.prompt_logits.get(state.request_id), state.request.params.prompt_logprobs
    assert count is not None
    known = state.prompt_logprobs
    if not known:
        known.append(None)  # the first token has no log-probability
    if logits is None:
        return None
    followers = state.request.prompt_ids[len(known) : len(known) + len(logits)]
    assert len(followers) == len(logits)
    try:
        known += token_logprobs(log_model(logits), followers, count)
    except Exception as error:  # noqa: BLE001 - as in `emit`
        return engine_error("the log-probabilities of the prompt cannot be computed", error)
    return None


def _counts(draft: Draft, verdict: Verdict, b: int, num_new: int, gaps: Sequence[float]) -> RoundCounts:
    if not draft.lengths[b] and not gaps and not draft.probe_lengths[b] and not draft.inner:
        return _plain_round(num_new)
    inner = draft.inner[b] if draft.inner else (0, 0)
    return RoundCounts(
        draft.depths(b), draft.provenance_of(b), verdict.paths[b], num_new, draft.probe_lengths[b], inner, gaps
    )


@functools.cache
def _plain_round(num_new: int) -> RoundCounts:
    """Provenance of a round in which nothing was drafted: of one token, or of none."""
    return RoundCounts((), (), (), num_new)


def _tell_time(stats: RequestStats, totals: EngineStats, total_s: float, is_first: bool) -> None:
    """Record the times of tokens emitted `total_s` after the request's arrival."""
    if is_first:
        stats.ttft_s = total_s
        totals.ttft_s += total_s
        totals.num_first_tokens += 1
    else:
        gap_s = total_s - stats.total_s
        totals.decode_s += gap_s
        stats.longest_gap_s, totals.longest_gap_s = max(stats.longest_gap_s, gap_s), max(totals.longest_gap_s, gap_s)
    stats.total_s = total_s


def _used_rows(draft: Draft, verdict: Verdict, b: int) -> list[int]:
    """The rows whose distributions the emitted tokens came from, in order."""
    anchor = draft.anchor_row(b)
    return [anchor, *[anchor + 1 + node for node in verdict.paths[b]]]


def _error(state: RequestState, target: TargetOutput, b: int, rows: list[int]) -> Exception | None:
    if b in target.faults:
        return engine_error("the request's own sampling parameters", target.faults[b])
    if not target.checks.broken.isdisjoint(rows):
        return NumericsError(
            f"request {state.request_id}: the target's logits are not finite at token {len(state.tokens)}"
        )
    return None if state.processors is None else state.processors.error


def _origins(state: RequestState, draft: Draft, verdict: Verdict, b: int) -> list[TokenOrigin]:
    step, provenance = state.num_rounds, draft.provenance_of(b)
    last: TokenKind = verdict.next_kinds[b]
    if last == "bonus" and not draft.lengths[b]:
        last = "plain"
    chances = verdict.probabilities[b] if verdict.probabilities else (None,) * draft.lengths[b]
    return [
        *(TokenOrigin(provenance[node], "accepted", step, chances[node]) for node in verdict.paths[b]),
        TokenOrigin(None, last, step),
    ]


def _logprobs(
    state: RequestState, target: TargetOutput, rows: list[int], tokens: tuple[int, ...]
) -> tuple[TokenLogprobs, ...]:
    params = state.request.params
    if params.logprobs is None:
        return ()
    own = to_device(rows, target.logits.device)
    distribution = (
        log_model(target.logits[own])
        if params.logprobs_of == "model"
        else sampling_log_probs(target.processed[own], [params] * len(rows))
    )
    return tuple(token_logprobs(distribution, tokens, params.logprobs, params.logprob_token_ids))
