"""What a request cost: OpenAI's `usage`, llama.cpp's `timings`, vLLM's `metrics`, and our own `foretoken`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.backend.call import RoundEvent, TokenEvent
from foretoken.registry import PLAIN
from foretoken.server.api.exchange import AnswerBook, AnswerProgress, Exchange


def usage(exchange: Exchange, has_prediction: bool) -> dict[str, Any]:
    """OpenAI's object, also while the answers still grow."""
    book = exchange.book
    num_prompt, num_cached, num_completion = exchange.num_prompt_tokens, exchange.num_cached_tokens, book.num_tokens
    details: dict[str, int] = {"reasoning_tokens": 0}
    if has_prediction:
        pairs = [end.prediction or (0, 0) for end in book.ended]
        details["accepted_prediction_tokens"] = sum(pair[0] for pair in pairs)
        details["rejected_prediction_tokens"] = sum(pair[1] for pair in pairs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_prompt - num_cached},
        "completion_tokens_details": details,
    }


def timings(exchange: Exchange) -> dict[str, Any]:
    """llama.cpp's object: tokens of all answers, times of the slowest. Rates leave out the first token of each answer,
    which comes with the prompt.
    """
    stats = [end.stats for end in exchange.book.ended]
    num_cached = exchange.num_cached_tokens
    num_prompt = exchange.num_prompt_tokens - num_cached
    num_predicted = exchange.book.num_tokens
    num_decoded = num_predicted - sum(bool(answer.tokens) for answer in exchange.book.answers)
    prompt_ms = 1000 * max((max(0.0, one["ttft_s"] - one["queued_s"]) for one in stats), default=0.0)
    predicted_ms = 1000 * max((one["total_s"] - one["ttft_s"] for one in stats), default=0.0)
    return {
        "cache_n": num_cached,
        "prompt_n": num_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, num_prompt),
        "prompt_per_second": _ratio(1000 * num_prompt, prompt_ms),
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, num_decoded),
        "predicted_per_second": _ratio(1000 * num_decoded, predicted_ms),
        "draft_n": sum(one["num_drafted"] for one in stats),
        "draft_n_accepted": sum(one["num_accepted"] for one in stats),
    }


def metrics(answer: AnswerProgress, level: str) -> dict[str, Any]:
    """vLLM's object for one answer that ended, at level "summary" or "detailed"."""
    assert answer.ended is not None
    stats = answer.ended.stats
    made: dict[str, Any] = {
        "time_to_first_token_ms": 1000 * stats["ttft_s"],
        "generation_time_ms": 1000 * max(0.0, stats["total_s"] - stats["ttft_s"]),
        "queue_time_ms": 1000 * stats["queued_s"],
        **({"mean_itl_ms": 1000 * stats["inter_token_s"]} if len(answer.tokens) > 1 else {}),
        "tokens_per_second": stats["tokens_per_s"],
        "speculative_decoding": _speculative_decoding(answer, stats) if stats["num_drafts"] else None,
    }
    if level == "detailed":
        made["per_step_accepted"] = [one.num_accepted for one in answer.rounds]
        made["per_step_drafted"] = [len(one.token_ids) for one in answer.rounds]
    return made


def _speculative_decoding(answer: AnswerProgress, stats: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mean_acceptance_length": 1 + _ratio(stats["num_accepted"], stats["num_drafts"]),
        "draft_acceptance_rate": stats["acceptance_rate"],
        "acceptance_histogram": _acceptance_histogram(answer, stats["num_drafts"]),
        "num_spec_steps": stats["num_drafts"],
        "num_accepted_draft_tokens": stats["num_accepted"],
        "num_draft_tokens": stats["num_drafted"],
        "num_spec_tokens": len(stats["accepted_per_position"]),
    }


def _acceptance_histogram(answer: AnswerProgress, num_drafts: int) -> list[int]:
    """At index j how many steps with a draft had exactly j of its tokens accepted."""
    by_step = Counter(token.step for token in answer.tokens if token.kind == "accepted")
    counts = Counter(by_step.values())
    return [num_drafts - counts.total(), *(counts[j] for j in range(1, max(counts, default=0) + 1))]


# Of `foretoken.spec`: sums over the answers.
_SUMMED = (
    *("num_steps", "num_drafts", "num_drafted", "num_accepted", "num_rejected", "num_cut", "num_emitted"),
    *("draft_s", "verify_s"),
)


def spec_report(book: AnswerBook, drafter: str | None, why_off: str | None) -> dict[str, Any]:
    """`foretoken.spec`: over all answers of the request."""
    stats = [end.stats for end in book.ended]
    plain_s = [one["estimated_speedup"] for one in stats if one["estimated_speedup"] is not None]
    return {
        "drafter": drafter,
        "rule": next((one["rule"] for one in stats), None),
        "lossless": not any(one["lossy"] for one in stats),
        **{name: sum(one[name] for one in stats) for name in _SUMMED},
        "est_speedup": sum(plain_s) / len(plain_s) if plain_s else None,
        "by_drafter": {
            name: {
                "num_drafted": sum(one["drafted_by"].get(name, 0) for one in stats),
                "num_accepted": sum(one["accepted_by"].get(name, 0) for one in stats),
            }
            for name in sorted({name for one in stats for name in one["drafted_by"]})
        },
        "disabled_drafters": sorted({name for one in stats for name in one["disabled_drafters"]}),
        "why_off": why_off,
    }


def trace_record(
    request_id: str, index: int, step: int, tokens: Sequence[TokenEvent], one: RoundEvent | None, why_off: str
) -> dict[str, Any]:
    """One step of one answer in `foretoken.trace`: drafted and emitted; `why_off`: why nobody drafts."""
    record: dict[str, Any] = {"request": request_id, "index": index, "step": step}
    if one is not None:
        draft = {"drafter": one.drafter or PLAIN, "ids": one.token_ids, "texts": one.texts, "parents": one.parents}
        record |= {
            "t_ms": 1000 * one.time_s,
            "draft_ms": 1000 * one.draft_s,
            "verify_ms": 1000 * one.verify_s,
            "batch_size": one.batch_size,
            "planned": one.num_planned,
            "drafts": [draft | {"p_accept": one.probabilities}] if one.token_ids else [],
            "num_accepted": one.num_accepted,
            "why": why_off if one.why == "off" else one.why,
        }
    emitted = []
    for token in tokens:
        shown: dict[str, Any] = {"id": token.token_id, "text": token.text, "drafter": token.drafter, "kind": token.kind}
        if token.data is not None and "\ufffd" in token.text:  # a part of a character: only its bytes tell which
            shown["bytes"] = list(token.data)
        if token.logprob is not None:
            shown["logprob"] = token.logprob
        if token.probability is not None:
            shown["p_accept"] = token.probability
        emitted.append(shown)
    return record | {"emitted": emitted}


def _ratio(amount: float, count: float) -> float:
    return amount / count if count > 0 else 0.0
