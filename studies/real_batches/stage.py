"""The engine on which settings take turns, with nothing kept from one setting or answer to another."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.control.chooser import Policy
from foretoken.engine.stats import RequestStats
from foretoken.machine.neighbours import OtherLoad
from foretoken.registry import HEADS
from foretoken.spec_checks import NO_TABLE

PLAIN, LOOKUPS, WITHOUT_TABLE = "plain", "auto-lookups", "auto-without-table"
# Ends with the process that started it, however that ends.
_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass\n"
_LOOP_BEGINS_S = 0.5


def spec_of(setting: str, draft: str | None = None, head: str | None = None) -> SpecConfig:
    """The configuration that a setting names: `plain`, a drafter, a drafter and its number (`ngram-3`),
    `auto-lookups`, which is `auto` without a model or head, or `auto-without-table`, which has no n-gram table either.
    `auto` gets the `draft` model and the `head`, if there are any.

    Raises:
        ConfigError: no such drafter.
    """
    if setting == PLAIN:
        return SpecConfig(None)
    if setting == LOOKUPS:
        return SpecConfig("auto", parts=("suffix",))
    if setting == WITHOUT_TABLE:
        return SpecConfig("auto", ngram_table=NO_TABLE)
    name, _, number = setting.rpartition("-")
    drafter = name if name and number.isdigit() else setting
    return SpecConfig(
        drafter,
        num_draft="auto" if drafter == setting else int(number),
        draft=draft if drafter in ("draft_model", "auto") else None,
        head=head if drafter in (*HEADS, "auto") else None,
    )


@dataclass(frozen=True)
class Sampling:
    """How the prompts of a turn are answered; `schemas` are those that their answers must fit, one each, if any."""

    max_tokens: int
    temperature: float
    seed: int
    schemas: tuple[str, ...] = ()


class Stage:
    """One engine for a number of requests at once.

    Each setting has a policy of its own, which keeps what it has learnt of steps and acceptance, as in a server that
    runs for long. Drafters are reset before each turn, and each turn has a tenant of its own, so that neither a
    drafter nor the prefix cache knows an answer or a prompt of another turn.
    """

    def __init__(self, llm: LLM, draft: str | None = None, head: str | None = None) -> None:
        self.llm, self._draft, self._head = llm, draft, head
        self._policies: dict[str, Policy] = {}
        self._tenants = itertools.count()

    def answer(self, setting: str, texts: Sequence[str], places: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """Answer `texts`, which stand at `places` of their kind; what it took, as JSON values.

        `seconds` is the time from before tokenising to after the last token, `prompts` each prompt's tokens and its
        share of the seconds: by the time that the engine attributes to requests.

        Raises:
            ForetokenError: an answer failed.
        """
        spec = spec_of(setting, self._draft, self._head)
        self._policies[setting] = self.llm.reset_controller(self._policies.get(setting))
        self.llm.reset_drafters(spec)
        tenant = f"turn {next(self._tenants)}"
        params = [
            SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=sampling.seed + place,
                tenant=tenant,
                json_schema=schema,
            )
            for place, schema in zip(places, sampling.schemas or [None] * len(places), strict=True)
        ]
        before, load = self.llm.stats, OtherLoad()
        began = time.perf_counter()
        outputs = self.llm.generate(list(texts), params, spec)
        seconds = time.perf_counter() - began
        for output in outputs:
            if output.error is not None:
                raise output.error
        after = self.llm.stats
        shares = shared([_own_s(output.stats) for output in outputs], seconds)
        names = ("num_steps", "schedule_s", "target_s", "rule_s", "commit_s", "observe_s", "emit_s", "draft_s")
        return {
            "seconds": seconds,
            "others_cores": load.cores(),
            "phases": {name: getattr(after, name) - getattr(before, name) for name in names},
            "prompts": [
                {
                    "place": place,
                    "num_tokens": len(output.token_ids),
                    "seconds": share,
                    "ttft_s": output.stats.ttft_s,
                    "num_steps": output.stats.num_steps,
                    "num_drafted": output.stats.num_drafted,
                    "num_accepted": output.stats.num_accepted,
                    "finish": output.finish_reason,
                    "answer": hashlib.sha256(repr(tuple(output.token_ids)).encode()).hexdigest()[:16],
                }
                for place, output, share in zip(places, outputs, shares, strict=True)
            ],
        }


def shared(own_s: Sequence[float], seconds: float) -> list[float]:
    """`seconds` divided in proportion to `own_s`, evenly where those are zero."""
    total_s = sum(own_s)
    return [seconds * one / total_s if total_s > 0 else seconds / len(own_s) for one in own_s]


def _own_s(stats: RequestStats) -> float:
    return stats.draft_s + stats.verify_s + stats.prompt_s


@contextmanager
def looping_process(is_there: bool) -> Iterator[None]:
    """A process that keeps one core busy, if there is to be one."""
    if not is_there:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _LOOP, str(os.getpid())])
    try:
        time.sleep(_LOOP_BEGINS_S)
        yield
    finally:
        process.kill()
        process.wait()
