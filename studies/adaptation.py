"""A domain shift under load: what a trained head loses, and what on-line adaptation regains.

    python -m studies.adaptation --drafter eagle --head DIR --before code --after json --minutes 5 --out result.json

1. Without adaptation: tokens per step along the target's answers to held-out prompts of both kinds of text, and the
   latency of plain requests.
2. With it: requests of the second kind are served one after another; every fourth is plain, and its latency counts.
3. The held-out prompts of both kinds again, with the weights in use then, and the latency of plain requests once more
   with learning ended.

Prompts that are served come from other modules than those that are judged by. See docs/adaptation.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.control.adaptation import AdaptConfig
from foretoken.files import to_json
from foretoken.measure.progress import Tell, progress
from foretoken.measure.workload import Prompt, slices
from foretoken.printing.console import Console
from foretoken.train.corpus import Corpus, standard_library
from studies.command import arguments, exit_code_of, record, setting_of

_PLAIN_EVERY = 4  # one plain request of so many
_BIN_S = 30.0
_ROOM_TOKENS = 16


@dataclass(frozen=True)
class ServedRequest:
    """One request: when it was over, counted from the shift, and what it took."""

    ended_s: float
    is_plain: bool
    num_tokens: int
    num_steps: int
    decode_s: float

    @property
    def token_ms(self) -> float:
        """Milliseconds per token behind the first."""
        return 1000 * self.decode_s / max(1, self.num_tokens - 1)


def main() -> int:
    """Measure; print a table, and write the raw result to `--out`."""
    parser = arguments("adaptation", __doc__, "adaptation", drafts=False)
    parser.add_argument("--drafter", default="eagle", help="eagle, medusa or block")
    parser.add_argument("--head", required=True, help="folder, hub id or reference:eagle")
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--before", default="code", help="kind of text before the shift")
    parser.add_argument("--after", default="json", help="kind of text after it")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--share", type=float, default=AdaptConfig.share)
    parser.add_argument("--buffer-tokens", type=int, default=AdaptConfig.buffer_tokens)
    parser.add_argument("--swap-interval-s", type=float, default=AdaptConfig.swap_interval_s)
    parser.add_argument("--judged", type=int, default=10, help="held-out prompts of each kind")
    parser.add_argument("--plain", type=int, default=20, help="plain requests without learning, before and after")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    found = study(options)
    out: Path | None = options.out
    result = record("adaptation", {"setting": setting_of(options), **found}, out)
    if options.json:
        Console().json_line(to_json(result))
    else:
        show(found)
    return 0


def study(options: argparse.Namespace) -> dict[str, Any]:
    """The three parts, as plain values.

    Raises:
        ForetokenError: a head that cannot be used, or a failing engine.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    judged = {kind: slices((kind,), options.judged) for kind in (options.before, options.after)}
    library = standard_library()
    served = slices((options.after,), 2000, Corpus((), library.train))
    spec = SpecConfig(options.drafter, head=options.head, num_draft=options.num_draft)
    adapt = AdaptConfig(options.share, options.buffer_tokens, options.swap_interval_s)
    ask = _Asker(options)
    num_plain, num_judged = options.plain, sum(map(len, judged.values()))
    with progress(2 * num_judged + 2 * num_plain + int(60 * options.minutes)) as tell:
        with LLM(options.target, spec, dtype=options.dtype, device=options.device) as llm:
            rate_before = {kind: ask.rate(llm, prompts, spec, tell) for kind, prompts in judged.items()}
            calm = ask.plain(llm, served[-num_plain:], tell)
        with LLM(options.target, spec, dtype=options.dtype, device=options.device, adapt=adapt) as llm:
            rounds, curve = ask.serve(llm, served, spec, 60 * options.minutes, tell)
            states = [asdict(state) for state in llm.adaptations]
            spent_s = llm.adaptation_s
            llm.end_adaptation()
            rate_after = {kind: ask.rate(llm, prompts, spec, tell) for kind, prompts in judged.items()}
            calm += ask.plain(llm, served[-num_plain:], tell)
    busy = [one.token_ms for one in rounds if one.is_plain]
    lost = rate_before[options.before] - rate_before[options.after]
    regained = rate_after[options.after] - rate_before[options.after]
    return {
        "emitted_per_step": {"not_adapted": rate_before, "adapted": rate_after},
        "lost": lost,
        "regained": regained,
        "regained_share": regained / lost if lost > 0 else None,
        "plain_ms_per_token": {"without_learning": _summary(calm), "while_learning": _summary(busy)},
        "plain_p95_ratio": _p95(busy) / _p95(calm) if busy and calm else None,
        "by_time": _by_time(rounds),
        "held_out_by_time": curve,
        "adaptations": states,
        "learning_s": spent_s,
        "requests": [asdict(one) for one in rounds],
    }


class _Asker:
    """Asks one request at a time, each with a tenant and a seed of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, ignore_eos=True)
        self._seeds = itertools.count(options.seed)

    def rate(self, llm: LLM, prompts: Sequence[Prompt], spec: SpecConfig, tell: Tell) -> float:
        """Tokens per step along the answers to `prompts`."""
        found = [self._ask(llm, prompt, spec, tell) for prompt in prompts]
        return sum(one.num_tokens for one in found) / sum(one.num_steps for one in found)

    def plain(self, llm: LLM, prompts: Sequence[Prompt], tell: Tell) -> list[float]:
        """Milliseconds per token of plain requests."""
        return [self._ask(llm, prompt, SpecConfig(), tell).token_ms for prompt in prompts]

    def serve(
        self, llm: LLM, prompts: Sequence[Prompt], spec: SpecConfig, limit_s: float, tell: Tell
    ) -> tuple[list[ServedRequest], list[dict[str, Any]]]:
        """Serve for `limit_s` seconds; every request, and the learner's own judgements as they changed."""
        began, told = time.perf_counter(), 0
        rounds: list[ServedRequest] = []
        curve: list[dict[str, Any]] = []
        for number, prompt in enumerate(_endless(prompts)):
            passed_s = time.perf_counter() - began
            if passed_s >= limit_s:
                return rounds, curve
            is_plain = number % _PLAIN_EVERY == _PLAIN_EVERY - 1
            one = self._ask(llm, prompt, SpecConfig() if is_plain else spec, lambda _: None)
            rounds.append(replace(one, ended_s=time.perf_counter() - began, is_plain=is_plain))
            for state in llm.adaptations:
                last = curve[-1] if curve else {"num_judged": 0}
                if state.num_judged != last["num_judged"]:
                    curve.append({"seconds": rounds[-1].ended_s, **asdict(state)})
            while told < passed_s:
                tell(f"serving, {llm.adaptations[0].num_swaps if llm.adaptations else 0} changes of weights")
                told += 1
        return rounds, curve

    def _ask(self, llm: LLM, prompt: Prompt, spec: SpecConfig, tell: Tell) -> ServedRequest:
        tell(prompt.name)
        number = next(self._seeds)
        params = replace(self._params, seed=number if self._params.temperature else None, tenant=str(number))
        room = llm.target.max_context_tokens - params.max_tokens - _ROOM_TOKENS
        (output,) = llm.generate([llm.encode(prompt.text)[-room:]], params, spec)
        if output.error is not None:
            raise output.error
        stats = output.stats
        return ServedRequest(0.0, spec.drafter is None, stats.num_emitted, stats.num_steps, stats.decode_s)


def _endless(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    return itertools.cycle(prompts)


def _by_time(rounds: Sequence[ServedRequest]) -> list[dict[str, float]]:
    """Tokens per step of speculative requests, by half minute after the shift."""
    bins: dict[int, list[ServedRequest]] = {}
    for one in rounds:
        if not one.is_plain:
            bins.setdefault(int(one.ended_s // _BIN_S), []).append(one)
    return [
        {
            "from_s": number * _BIN_S,
            "num_requests": len(own),
            "emitted_per_step": sum(one.num_tokens for one in own) / sum(one.num_steps for one in own),
        }
        for number, own in sorted(bins.items())
    ]


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def _summary(values: Sequence[float]) -> dict[str, float | int]:
    if not values:
        return {"num_requests": 0}
    return {"num_requests": len(values), "median": statistics.median(values), "p95": _p95(values)}


def show(found: dict[str, Any]) -> None:
    """The result as tables."""
    console = Console()
    rates = found["emitted_per_step"]
    lines = [(kind, f"{rates['not_adapted'][kind]:.2f}", f"{rates['adapted'][kind]:.2f}") for kind in rates["adapted"]]
    console.table(("held-out text", "not adapted", "adapted"), lines, title="tokens a step")
    share = found["regained_share"]
    told = "nothing was lost" if share is None else f"regained {100 * share:.0f} % of {found['lost']:.2f}"
    console.line(told)
    lines = [
        (f"{one['from_s']:.0f}", f"{one['num_requests']}", f"{one['emitted_per_step']:.2f}") for one in found["by_time"]
    ]
    console.table(("seconds after the shift", "requests", "tokens a step"), lines)
    latency = found["plain_ms_per_token"]
    figures = [
        (name.replace("_", " "), str(own["num_requests"]), f"{own['median']:.2f}", f"{own['p95']:.2f}")
        for name, own in latency.items()
        if own["num_requests"]
    ]
    console.table(("plain requests", "requests", "median ms/token", "p95"), figures)
    for state in found["adaptations"]:
        console.line(", ".join(f"{name} {value}" for name, value in state.items()))
    console.line(f"learning took {found['learning_s']:.1f} s of processor time")


if __name__ == "__main__":
    sys.exit(main())
