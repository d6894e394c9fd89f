"""The process that runs one checkout: it loads the model once and answers on request.

Started by its path with `PYTHONPATH` set to the checkout, so it imports nothing but the standard library and the public
API of foretoken. Commands come as JSON lines on standard input, replies leave as JSON lines on what was standard
output; between commands the process blocks in a read. End of input ends it.

Commands, by their key `do`:

    open     load the model; the pool of prompts by slice; settings by name
    cell     answer requests of one slice together under a setting
    trace    go through the phases of a changing load under a setting
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import os
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

Message = dict[str, Any]

# Fields of the engine's statistics that are not phases of a step.
_NOT_PHASES = (
    *("queued_s", "ttft_s", "longest_gap_s", "inter_token_s", "decode_s"),
    *("plain_s", "compared_s", "verify_s", "prompt_s", "wasted_s", "profile_s", "step_s"),
)


class Child:
    """One open model of this checkout."""

    def __init__(self, options: Message) -> None:
        import foretoken

        self._api: Any = foretoken
        self.options = options
        self.pool: dict[str, list[Message]] = options["pool"]
        self.settings: dict[str, Message] = options["settings"]
        self._tenants = itertools.count()
        self._learnt: dict[str, Any] = {}
        self._preview_s = 0.0
        began = time.perf_counter()
        self.llm = self._open()
        self.open_s = time.perf_counter() - began
        _use_draft_models_for_short_answers(self.llm)
        self._holder = _policy_holder(self.llm)
        self._pristine = None if self._holder is None else copy.deepcopy(self._holder.policy)

    def about(self) -> Message:
        """What the parent must know of this checkout."""
        return {
            "package": str(Path(self._api.__file__).resolve().parent),
            "open_s": self.open_s,
            "separate_policies": self._holder is not None,
            "measured_s": getattr(getattr(self.llm, "costs", None), "measured_s", None),
        }

    def cell(self, message: Message) -> Message:
        """Answer requests, a batch at a time."""
        self._enter(message["setting"])
        asks = self.pool[message["slice"]][: message["count"]]
        before, seconds, outputs = self._phases(), 0.0, []
        for first in range(0, len(asks), message["batch"]):
            own = asks[first : first + message["batch"]]
            calls = [self._call(message["setting"], ask, first + b, message["max_tokens"]) for b, ask in enumerate(own)]
            began = time.perf_counter()
            found = self.llm.generate(
                [ask["ids"] for ask in own], [p for p, _ in calls], [s for _, s in calls], on_step=self._count_previews
            )
            seconds += time.perf_counter() - began
            outputs += found
        for output in outputs:
            if output.error is not None:
                raise output.error
        return {
            "seconds": seconds,
            "answers": [list(output.token_ids) for output in outputs],
            "near_ties": [getattr(output.stats, "num_near_ties", 0) for output in outputs],
            "request_tokens_per_s": [output.stats.tokens_per_s for output in outputs],
            "num_drafted": sum(output.stats.num_drafted for output in outputs),
            "num_accepted": sum(output.stats.num_accepted for output in outputs),
            "num_rounds": sum(output.stats.num_steps for output in outputs),
            "phases": _difference(self._phases(), before),
        }

    def trace(self, message: Message) -> Message:
        """Keep each phase's number of requests running until it has sent all of its own; see `bench.load_trace`."""
        self._enter(message["setting"])
        before = self._phases()
        seconds: list[float] = []
        tokens: list[int] = []
        running = 0
        phases = message["phases"]
        for number, phase in enumerate(phases):
            began, emitted, queue = time.perf_counter(), 0, deque(phase["jobs"])
            is_last = number == len(phases) - 1
            while queue or (is_last and running):
                while queue and running < phase["batch"]:
                    place, max_tokens = queue.popleft()
                    own = self.pool[phase["slice"]]
                    params, spec = self._call(message["setting"], own[place % len(own)], place, max_tokens)
                    self.llm.submit(own[place % len(own)]["ids"], params, spec)
                    running += 1
                if not queue and running < phase["batch"] and not is_last:
                    break
                outputs = self.llm.step()
                self._count_previews(outputs)
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    emitted += len(output.token_ids)
                    running -= output.finish_reason is not None
            seconds.append(time.perf_counter() - began)
            tokens.append(emitted)
        return {"seconds": seconds, "tokens": tokens, "phases": _difference(self._phases(), before)}

    def _open(self) -> Any:  # noqa: ANN401 - an LLM of either checkout
        wanted = dict(self.options["llm"])
        if self.options["settings"].get("auto"):
            wanted["spec"] = self._spec("auto", "")[1]  # its draft model is profiled at the start too
        taken = inspect.signature(self._api.LLM.__init__).parameters
        if all(name in taken for name in wanted):
            return self._api.LLM(self.options["target"], **wanted)
        known = {field.name for field in dataclasses.fields(self._api.EngineConfig)}
        given = {name: value for name, value in wanted.items() if name in known}
        direct = {name: value for name, value in wanted.items() if name not in known}
        if "model" in known:
            return self._api.LLM(self._api.EngineConfig(self.options["target"], **given), **direct)
        return self._api.LLM(self.options["target"], config=self._api.EngineConfig(**given), **direct)

    def _spec(self, setting: str, tenant: str) -> tuple[Message, Any]:
        """Values for `SamplingParams` and a `SpecConfig`; the tenant goes to whichever of them takes it."""
        given = {name: value for name, value in self.settings[setting].items() if value is not None}
        of_request: Message = {}
        names = {field.name for field in dataclasses.fields(self._api.SamplingParams)}
        if "tenant" in names:
            of_request["tenant"] = tenant
        else:
            given["tenant"] = tenant
        return of_request, self._api.SpecConfig(**given)

    def _call(self, setting: str, ask: Message, place: int, max_tokens: int) -> tuple[Any, Any]:
        of_request, spec = self._spec(setting, f"{setting} {next(self._tenants)}")
        params = self._api.SamplingParams(
            max_tokens=max_tokens,
            temperature=ask["temperature"],
            top_p=ask["top_p"],
            seed=self.options["seed"] + place,
            ignore_eos=True,
            **of_request,
        )
        return params, spec

    def _enter(self, setting: str) -> None:
        """Give the engine what this setting learnt in its own turns, and drafters without earlier answers."""
        if self._holder is not None:
            if setting not in self._learnt:
                self._learnt[setting] = copy.deepcopy(self._pristine)
            self._holder.policy = self._learnt[setting]
        drafters = getattr(getattr(self.llm.engine, "drafters", None), "drafters", {})
        for key in [key for key in drafters if "recycling" in str(key)]:
            del drafters[key]
        self.llm.prepare(self._spec(setting, "")[1])

    def _count_previews(self, _outputs: list[Any]) -> None:
        """Add the last step's previews, where the engine times them; its statistics count them as drafting."""
        self._preview_s += getattr(getattr(self.llm.engine, "clock", None), "preview_s", 0.0)

    def _phases(self) -> dict[str, float]:
        """Seconds by phase of a step, and the number of steps, since the engine started."""
        stats = self.llm.stats
        names = [field.name for field in dataclasses.fields(stats)]
        phases = {
            name: float(getattr(stats, name)) for name in names if name.endswith("_s") and name not in _NOT_PHASES
        }
        return phases | {
            "preview_s": self._preview_s,
            "step_s": float(stats.step_s),
            "num_steps": float(stats.num_steps),
        }


def _policy_holder(llm: Any) -> Any | None:  # noqa: ANN401 - of either checkout
    """The object whose attribute `policy` decides, where it is one that can be copied; None: all settings share it."""
    for name in ("controller", "chooser"):
        holder = getattr(llm.engine, name, None)
        if holder is not None and hasattr(holder, "policy"):
            return holder
    return None


def _use_draft_models_for_short_answers(llm: Any) -> None:  # noqa: ANN401 - of either checkout
    """Switch off the routing rule that one of the checkouts may lack: answers here are shorter than it asks for."""
    routing: Any = getattr(getattr(llm.engine, "chooser", None), "routing", None)
    if hasattr(getattr(routing, "rules", None), "min_tokens_for_draft_model"):
        routing.rules = dataclasses.replace(routing.rules, min_tokens_for_draft_model=0)


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def main() -> None:
    """Answer commands until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed goes to standard error
    child: Child | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["do"] == "open":
                child = Child(message)
                reply = child.about()
            else:
                assert child is not None
                reply = child.cell(message) if message["do"] == "cell" else child.trace(message)
        except Exception as error:  # noqa: BLE001 - the parent is told, whatever it was
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
