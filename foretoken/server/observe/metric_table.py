"""Every metric of `/metrics`: name, kind, labels and help; docs/serving/metrics.md has the same table.

Names are without the prefix `foretoken_`. `alias` is the name under which vLLM has the same series, "" for none.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "foretoken_"

# Bounds of OpenTelemetry's conventions for generative models, with finer ones for models that take under 10 ms a token.
TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
REQUEST_BOUNDS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 300.0)


class Metric(NamedTuple):
    """One metric. A counter's series is called `name` + "_total"."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    alias: str = ""
    bounds_s: tuple[float, ...] = ()


def _same(name: str, kind: Kind, help_: str, labels: tuple[str, ...] = (), bounds_s: tuple[float, ...] = ()) -> Metric:
    """A metric that vLLM has under the same name."""
    return Metric(name, kind, help_, labels, f"vllm:{name}", bounds_s)


# Filled from the engine's statistics when the metrics are read.
OF_ENGINE = (
    _same("spec_decode_num_drafts", "counter", "Rounds of a request in which tokens were drafted.", ("drafter",)),
    _same("spec_decode_num_draft_tokens", "counter", "Drafted tokens.", ("drafter",)),
    _same("spec_decode_num_accepted_tokens", "counter", "Drafted tokens that were emitted.", ("drafter",)),
    _same(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Accepted tokens by position in the draft, 0 first; the last position stands for all after it.",
        ("drafter", "position"),
    ),
    Metric(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        "Drafted tokens by position in the draft, 0 first; the last position stands for all after it.",
        ("drafter", "position"),
    ),
    Metric("spec_decode_num_draft_tokens_by_slice", "counter", "Drafted tokens by kind of text.", ("drafter", "slice")),
    Metric(
        "spec_decode_num_accepted_tokens_by_slice", "counter", "Accepted tokens by kind of text.", ("drafter", "slice")
    ),
    Metric("spec_decode_num_rejected_tokens", "counter", "Drafted tokens that the verification rule rejected."),
    Metric("spec_decode_num_cut_tokens", "counter", "Drafted tokens that lay beyond the end of an accepted answer."),
    _same("num_requests_running", "gauge", "Answers in the batch."),
    _same("num_requests_waiting", "gauge", "Answers that wait for a place in the batch."),
    _same("kv_cache_usage_perc", "gauge", "Part of the target's KV cache in use, 0 to 1."),
    Metric("draft_kv_cache_usage_perc", "gauge", "Part of the fullest draft model's KV cache in use, 0 to 1."),
    _same("num_preemptions", "counter", "Requests whose cache was released to be recomputed later."),
    _same("prefix_cache_queries", "counter", "Prompt tokens that were looked up in the prefix cache."),
    _same("prefix_cache_hits", "counter", "Prompt tokens that were found in the prefix cache."),
    _same("prompt_tokens", "counter", "Prompt tokens of submitted requests."),
    _same("generation_tokens", "counter", "Emitted tokens, including those of aborted requests."),
    Metric("verify_seconds", "counter", "Time of the target and the verification rule for decoding rows."),
    Metric("prompt_seconds", "counter", "Time of the target for rows of prompts."),
    Metric("wasted_seconds", "counter", "Time spent on drafting and verifying rejected tokens."),
    Metric("engine_phase_seconds", "counter", "Time of steps by phase.", ("phase",)),
    Metric("engine_steps", "counter", "Steps of the engine."),
    Metric(
        "spec_estimated_speedup_ratio", "gauge", "Estimated time of plain decoding / time taken; absent if unknown."
    ),
    Metric(
        "drafter_failures", "counter", "Calls of a drafter that raised, took too long or were invalid.", ("drafter",)
    ),
    Metric("engine_faults", "counter", "Exceptions inside the engine that were contained."),
    Metric("engine_restarts", "counter", "Engines that were started to replace an earlier one."),
    Metric("self_audit_checks", "counter", "Requests whose answers were scored again, by result.", ("result",)),
)

# Filled by each request that finishes.
OF_REQUESTS = (
    _same("time_to_first_token_seconds", "histogram", "From arrival to the first token.", (), TTFT_BOUNDS_S),
    _same("inter_token_latency_seconds", "histogram", "Time between two tokens of an answer.", (), TOKEN_BOUNDS_S),
    _same("e2e_request_latency_seconds", "histogram", "Time of a successful request.", (), REQUEST_BOUNDS_S),
    _same("request_queue_time_seconds", "histogram", "From arrival to the first step of an answer.", (), TTFT_BOUNDS_S),
    _same("request_success", "counter", "Answers that ended, by reason.", ("finished_reason",)),
    Metric("requests_aborted", "counter", "Requests that ended before their answers, by reason.", ("reason",)),
    Metric(
        "admission_rejections",
        "counter",
        "Requests that were refused because a limit was reached, by reason.",
        ("reason",),
    ),
    Metric("requests_not_speculated", "counter", "Answered requests without a drafted token, by reason.", ("reason",)),
    Metric("corrupted_requests", "counter", "Requests in which the model produced NaN or infinite logits."),
    Metric("numerical_errors", "counter", "Answers that ended because of NaN or infinite logits."),
    Metric("draft_seconds", "counter", "Time of drafting for finished requests.", ("drafter",)),
    Metric("drafter_disabled", "counter", "Answers for which a drafter was disabled after failures.", ("drafter",)),
    Metric("prediction_tokens", "counter", "Tokens of Predicted Outputs, by result.", ("result",)),
)

# Filled by every response, refused ones included.
OF_RESPONSES = (
    Metric("http_requests", "counter", "Responses by route template, method and status.", ("route", "method", "code")),
    Metric(
        "event_loop_lag_seconds",
        "histogram",
        "Delay of the server's timers: how long something blocked its event loop.",
        (),
        bounds_s=LAG_BOUNDS_S,
    ),
)

HISTORY_DROPPED = Metric("history_dropped_rows", "counter", "Requests that could not be written to the history.")
LOG_DROPPED = Metric("request_log_dropped_lines", "counter", "Lines that could not be written to the request log.")
ACCEPTANCE_FELL = Metric(
    "acceptance_fell", "gauge", "1 where acceptance by day has fallen and is still low.", ("drafter", "slice")
)
ENGINE_UP = Metric("scrape_engine_up", "gauge", "1 if the engine answered for this scrape, 0 if its figures are older.")

METRICS = (*OF_ENGINE, *OF_REQUESTS, *OF_RESPONSES, HISTORY_DROPPED, LOG_DROPPED, ACCEPTANCE_FELL, ENGINE_UP)
