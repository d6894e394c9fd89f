"""What the engine's own work costs beside the models': milliseconds of a step by phase.

    python -m studies.bookkeeping --target reference:target --draft reference:draft --requests 1,8,32 --steps 60 --out
    FILE.json

Every setting answers the same prompts, so many at once, with nothing but decoding in the steps that count. Medians over
the steps; the share is of the median step. `bookkeeping` is schedule, commit and observe. `commit` leaves out what
drafters took in it: that is part of `draft`, beside it as `taught`. On a machine that does other things the shares
still say something, the milliseconds do not.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.measure.workload import SLICES, slices
from studies.command import record, setting_of

PHASES = ("schedule", "draft", "target", "rule", "commit", "observe", "emit")
BOOKKEEPING = ("schedule", "commit", "observe")
_WARM_UP_STEPS = 8
_PROMPT_TOKENS = 200


@dataclass(frozen=True)
class Row:
    """One setting: medians in milliseconds over its steps, and the share of the engine's own work in a step."""

    setting: str
    num_requests: int
    num_steps: int
    rows_per_step: float
    emitted_per_step: float
    step_ms: float
    phase_ms: dict[str, float]
    bookkeeping_ms: float
    bookkeeping_share: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="reference:target")
    parser.add_argument("--draft", default="reference:draft")
    parser.add_argument("--requests", default="1,8,32", help="numbers of requests, separated by commas")
    parser.add_argument(
        "--settings",
        default="plain,ngram,draft_model",
        help="plain, or drafters that choose their number of draft tokens",
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counts = [int(word) for word in options.requests.split(",")]
    rows = []
    with LLM(options.target, max_batch_size=max(counts), max_prompt_tokens=1024, profile="off") as llm:
        for count in counts:
            for setting in options.settings.split(","):
                rows.append(measure(llm, setting, options.draft, count, options.steps))
                print_row(rows[-1])
    results = {"setting": setting_of(options), "rows": [asdict(row) for row in rows]}
    record("bookkeeping", results, options.out)


def measure(llm: LLM, setting: str, draft: str, num_requests: int, num_steps: int) -> Row:
    """`num_steps` steps in which `num_requests` requests decode, after all prompts were read and a few steps of
    warm-up.
    """
    spec = SpecConfig(None if setting == "plain" else setting, draft=draft if setting == "draft_model" else None)
    params = SamplingParams(
        max_tokens=llm.target.max_context_tokens - _PROMPT_TOKENS,
        ignore_eos=True,
        tenant=f"{setting} {num_requests}",
    )
    prompts = [llm.encode(prompt.text)[-_PROMPT_TOKENS:] for prompt in slices(SLICES, -(-num_requests // len(SLICES)))][
        :num_requests
    ]
    states = [llm.submit(prompt, params, spec) for prompt in prompts]
    while not all(state.provenance for state in states):
        llm.step()
        for state in states:
            if state.error is not None:
                raise state.error
    for _ in range(_WARM_UP_STEPS):
        llm.step()
    engine, before = llm.engine, llm.stats
    times: list[dict[str, float]] = []
    while len(times) < num_steps and len(engine.states) == num_requests:
        llm.step()
        clock = engine.clock
        times.append({"taught": clock.taught_s} | {phase: getattr(clock, f"{phase}_s") for phase in PHASES})
    after = llm.stats
    for state in states:
        engine.abort(state.request_id)
    phase_ms = {phase: 1e3 * statistics.median(one[phase] for one in times) for phase in times[0]}
    step_ms = 1e3 * statistics.median(sum(one[phase] for phase in PHASES) for one in times)
    bookkeeping_ms = 1e3 * statistics.median(sum(one[phase] for phase in BOOKKEEPING) for one in times)
    return Row(
        setting,
        num_requests,
        len(times),
        num_requests + (after.num_drafted - before.num_drafted) / len(times),
        (after.num_emitted - before.num_emitted) / len(times),
        step_ms,
        phase_ms,
        bookkeeping_ms,
        bookkeeping_ms / step_ms,
    )


def print_row(row: Row) -> None:
    print(
        f"{row.setting}, {row.num_requests} requests: {row.step_ms:.2f} ms a step, "
        f"{row.rows_per_step:.1f} rows, {row.emitted_per_step:.1f} tokens"
    )
    for phase, value in row.phase_ms.items():
        print(f"  {phase:12s} {value:8.3f} ms  {100 * value / row.step_ms:5.1f} %")
    print(f"  {'bookkeeping':12s} {row.bookkeeping_ms:8.3f} ms  {100 * row.bookkeeping_share:5.1f} %", flush=True)


if __name__ == "__main__":
    main()
