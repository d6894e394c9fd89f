"""What deciding costs: each rule's `verify`, and the distribution of the rows before it, at a given vocabulary and
draft length.

    python -m studies.rule_cost --vocab 32000 --num-draft 8 --step-ms 54 --out benchmarks/rule-cost.json

`--step-ms` is the time of one target step that the figures are compared with (`studies.step_cost` measures it). Timed
are the distributions of one request on a CPU or GPU: peaked ones (logits of standard deviation 4), a draft related to
the target.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import Draft, Mass, Uniforms, Verdict
from foretoken.text.randomness import RaceNoise, round_uniforms
from foretoken.text.sampling import target_probs
from foretoken.verify import RULES, verify_batch
from studies.command import record, record_file, setting_of

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--num-draft", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--step-ms", type=float, default=54.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    torch.manual_seed(0)
    logits = torch.randn(options.num_draft + 1, options.vocab, device=options.device) * 4
    sampled = SamplingParams(temperature=1.0)
    probs = target_probs(logits, [sampled] * len(logits))
    distributions = target_probs(logits[:-1] + torch.randn_like(logits[:-1]), [sampled] * options.num_draft)
    times = {name: law_times(logits, name, options.repeats) for name in FILTERS}
    found = {f"distribution, {name}": value for name, value in times.items()}
    for name in RULES:
        found[f"verify, {name}"] = rule_times(name, probs, distributions, options.repeats)
    for name, value in found.items():
        share = 100 * value["median_ms"] / options.step_ms
        print(
            f"{name:20s} {value['median_ms']:8.3f} ms  ({value['low_ms']:.3f} to {value['high_ms']:.3f})  "
            f"{share:5.2f} % of a step"
        )
    record("rule_cost", {"setting": setting_of(options), "times": found}, options.out)


def law_times(logits: Tensor, name: str, repeats: int) -> dict[str, float]:
    """The distribution of every row, with one filter."""
    params = [SamplingParams(temperature=0.8, **FILTERS[name])] * len(logits)
    return timed(lambda _: target_probs(logits, params), repeats)


def rule_times(name: str, probs: Tensor, distributions: Tensor, repeats: int) -> dict[str, float]:
    """One rule on fresh drafts; what it draws from, noise included, is made inside the clock."""
    num_draft = len(distributions)
    if name == "greedy":
        probs = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1)
    drafts = []
    for _ in range(repeats + 3):
        tokens = torch.multinomial(distributions, 1).squeeze(1)
        distribution_of_row = (*range(num_draft), -1)
        drafts.append(
            Draft(
                tokens,
                tuple(range(-1, num_draft - 1)),
                (0, num_draft),
                ("d",),
                (True,) * num_draft,
                Mass(distributions, distribution_of_row),
            )
        )
    noise = RaceNoise(1, probs.shape[-1], probs.device)

    def once(i: int) -> Verdict:
        uniforms: Uniforms = round_uniforms(drafts[i], [i], [100 * i], probs.device)
        if name == "coupled":  # three new positions a round: what a typical round emits
            rows = noise.rows([3 * i + place for place in range(num_draft + 1)])
            uniforms = replace(uniforms, race=(rows,))
            noise.forget(3 * i + 3)
        return verify_batch(drafts[i], probs, uniforms, [name])

    return timed(once, repeats)


def timed(call: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Milliseconds per call: median and the middle 80 %."""
    seconds = []
    for i in range(repeats + 3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(i)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    ordered = sorted(seconds[3:])
    tenth = len(ordered) // 10
    return {
        "median_ms": 1e3 * statistics.median(ordered),
        "low_ms": 1e3 * ordered[tenth],
        "high_ms": 1e3 * ordered[-1 - tenth],
    }


if __name__ == "__main__":
    main()
