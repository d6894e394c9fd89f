"""`EngineConfig`: everything that an engine is built from, as one frozen, picklable value.

It holds no tensor, no open file and no callback, so it can be sent to another process, which builds its `LLM` from it.
What depends on the machine (whether the model, the device and the files exist) is checked there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from foretoken.config import CACHE_DTYPES, DRAFTING, DTYPES, NUMERICS, WEIGHTS, SpecConfig
from foretoken.control.adaptation import AdaptConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.errors import ConfigError, InputError
from foretoken.field_text import from_mapping
from foretoken.option import Settings, check_fields, option, same_option
from foretoken.params import check_limits, check_no_arrays, check_share, check_text, check_threads, check_whole

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# Groups of these options; a verb takes those that it reads.
MODEL = "Model"
OBSERVATION = "Observation"
_model, _observation, _drafting = Settings(MODEL), Settings(OBSERVATION), Settings(DRAFTING)


def _check_device(name: str, value: object) -> None:
    """Refuse what names no device; whether this machine has it is checked where the engine is built."""
    if not isinstance(value, str) or _DEVICE.fullmatch(value) is None:
        raise ConfigError(name, value, "use auto, cpu, cuda or cuda:N")


# torch's threads: of the process, not of one engine; what measures and trains sets them.
THREADS = option(
    "Threads of every engine; without it, OMP_NUM_THREADS, or one for each physical core that the process may use.",
    group=MODEL,
    valid=check_threads,
)


class EngineOptions(TypedDict, total=False):
    """The keywords of `LLM`, for type checkers: the fields of `EngineConfig` behind `spec`."""

    dtype: str
    device: str
    cache_tokens: int | None
    cache_dtype: str
    max_batch_size: int
    max_prompt_tokens: int
    max_step_tokens: int | None
    cache_reserve: float
    numerics: str
    trace: Path | str | None
    shadow_rate: float
    routing: RoutingRules | None
    profile: str | Path
    adapt: AdaptConfig | bool
    weights: str
    tensor_parallel: int
    chat_template: Path | str | None


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from. `LLM(EngineConfig(model, ...))` and `LLM(model, ...)` are the same.

    - `model`: a folder, a GGUF file, a hub id, or `smollm2`.
    - `spec`: the drafter of requests that name none (None: `drafter="auto"`, or plain decoding where that is not
      possible, with a warning; `SpecConfig()` is plain decoding). `generate` and `stream` take another one per call or
      per prompt. A draft model is loaded when it is first named.
    - `dtype`: the format of the weights; "auto" is the stored one. A `torch.dtype` is taken too.
    - `device`: "auto" (the first GPU, or the CPU), "cpu", "cuda" or "cuda:N".
    - `cache_tokens`: capacity of the key/value cache; None: enough for many short requests, and for one that fills
      the context if memory allows it.
    - `cache_dtype`: the format of keys and values; "model" is the one that the model computes in, "auto" takes
      "float16" with quantised weights on a CPU, where float32 would read twice as many bytes.
    - `max_batch_size`, `max_prompt_tokens`, `max_step_tokens`, `cache_reserve`: limits of the scheduler, see
      `control.queue.SchedulerConfig`.
    - `numerics`: "strict" makes the target's logits bitwise the same however rows are batched, at a cost.
    - `trace`: a file that gets one line per event (docs/trace.md). When it cannot be written any more,
      `LLM.trace_error` says so and answers continue.
    - `shadow_rate`: share of requests whose answers the target scores again in the background; `stats.shadow` has the
      result, and a warning is raised when answers do not follow the target's distribution.
    - `routing`: which requests not to speculate for, and which not with a draft model (None: `RoutingRules()`;
      docs/decisions/0007-defaults.md).
    - `profile`: where the costs of steps come from; they decide how much is drafted with `num_draft="auto"`: "auto"
      (stored by an earlier start, or measured now), "off" (learnt from the first steps), "measure" (now, again), or a
      file of `foretoken bench --profile`.
    - `adapt`: whether drafters with trained heads learn from what is served, in this process and its memory only
      (docs/adaptation.md): True, or how (`AdaptConfig`). It takes the target's own decoder.
    - `weights`: "auto" keeps the target's matrices as the checkpoint has them; "int8" and "int4" quantise them at load
      (CPU; docs/quantised.md). The distribution of answers is then that of the quantised target, with any drafter.
    - `tensor_parallel`: processes among which the target's weights are divided (docs/tensor-parallel.md), on GPUs one
      each from `device` on. Drafters stay in this process.
    - `chat_template`: a file with a Jinja chat template, used in place of the checkpoint's.

    Raises:
        InputError: a value that cannot be honoured; names the field.
    """

    model: str | Path = field(
        metadata=option(
            "The model whose answers you want: a folder, a GGUF file, a hub id, or smollm2.",
            group=MODEL,
            name="target",
            flags=("--target", "-t"),
        )
    )
    spec: SpecConfig | None = None
    dtype: str = _model(
        "auto", "Format of the weights: auto (as stored), bfloat16, float16, float32, float64.", choices=DTYPES
    )
    device: str = _model("auto", "Device to run on: auto, cpu, cuda, cuda:N.", valid=_check_device)
    cache_tokens: int | None = _model(
        None, "Tokens that the key/value cache holds; without it, enough for one whole context."
    )
    cache_dtype: str = _model(
        "auto",
        "Format of keys and values: {choices}; auto is float16 with quantised weights on a CPU.",
        choices=CACHE_DTYPES,
    )
    max_batch_size: int = field(
        default=SchedulerConfig.max_batch_size, metadata=same_option(SchedulerConfig, "max_batch_size")
    )
    max_prompt_tokens: int = field(
        default=SchedulerConfig.max_prompt_tokens, metadata=same_option(SchedulerConfig, "max_prompt_tokens")
    )
    max_step_tokens: int | None = field(
        default=SchedulerConfig.max_step_tokens, metadata=same_option(SchedulerConfig, "max_step_tokens")
    )
    cache_reserve: float = field(
        default=SchedulerConfig.cache_reserve, metadata=same_option(SchedulerConfig, "cache_reserve")
    )
    numerics: str = _model(
        "default", "default, or strict: logits bitwise the same however rows are batched.", choices=NUMERICS
    )
    trace: Path | str | None = _observation(None, "Append one line per event to this .jsonl file.")  # noqa: RUF009
    shadow_rate: float = _observation(
        0.0, "Share of answers that the target scores again, to check their distribution."
    )
    routing: RoutingRules | None = None
    profile: str | Path = _drafting(  # noqa: RUF009
        "auto",
        "Cost profile of steps: auto (stored by an earlier start, or measured now), off, measure, or a file of "
        "bench profile.",
        name="cost_profile",
    )
    adapt: AdaptConfig | bool = _drafting(  # noqa: RUF009
        False, "Let the trained head of --head learn from what is served, in memory only."
    )
    weights: str = _model(
        "auto",
        "Format of the target's matrices: auto (as in the checkpoint), or int8, int4 (quantised at load, CPU).",
        choices=WEIGHTS,
    )
    tensor_parallel: int = _model(
        1, "Processes among which the target's weights are divided.", flags=("--tensor-parallel", "--tp")
    )
    chat_template: Path | str | None = _model(None, "A Jinja chat template, used in place of the checkpoint's.")  # noqa: RUF009

    def __post_init__(self) -> None:
        check_no_arrays(self)
        for name in ("dtype", "device"):  # torch's own objects, which this module does not import
            if type(getattr(self, name)).__module__ == "torch":
                object.__setattr__(self, name, str(getattr(self, name)).removeprefix("torch."))
        self._check_model()
        self._check_limits()
        self._check_speculation()
        for name in ("trace", "chat_template"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str | Path) or not str(value)):
                raise InputError(name, value, "give the name of a file, or leave it out")
        if not isinstance(self.profile, str | Path):
            raise ConfigError("profile", self.profile, "use auto, off, measure, or an existing file")
        if not isinstance(self.adapt, AdaptConfig | bool):
            raise InputError("adapt", self.adapt, "give True, False or AdaptConfig")

    @property
    def scheduler(self) -> SchedulerConfig:
        """The limits of the scheduler."""
        return SchedulerConfig(
            max_batch_size=self.max_batch_size,
            max_prompt_tokens=self.max_prompt_tokens,
            max_step_tokens=self.max_step_tokens,
            cache_reserve=self.cache_reserve,
        )

    @property
    def adaptation(self) -> AdaptConfig | None:
        """How drafters learn; None: not at all."""
        if isinstance(self.adapt, AdaptConfig):
            return self.adapt
        return AdaptConfig() if self.adapt else None

    def _check_model(self) -> None:
        if not isinstance(self.model, str | Path):
            raise InputError("model", self.model, "give a folder, a GGUF file, a hub id, or smollm2")
        check_text("model", str(self.model))
        if not isinstance(self.dtype, str):
            raise InputError("dtype", self.dtype, "give a name, such as auto, bfloat16 or float32")
        check_fields(self)

    def _check_limits(self) -> None:
        check_limits(
            max_batch_size=self.max_batch_size,
            max_prompt_tokens=self.max_prompt_tokens,
            cache_tokens=self.cache_tokens,
            max_step_tokens=self.max_step_tokens,
        )
        check_whole("tensor_parallel", self.tensor_parallel, low=1, high=64)
        check_share("shadow_rate", self.shadow_rate)
        check_share("cache_reserve", self.cache_reserve)
        _ = self.scheduler  # checks the limits against each other

    def _check_speculation(self) -> None:
        if self.spec is not None and not isinstance(self.spec, SpecConfig):
            raise InputError("spec", self.spec, "give SpecConfig, or leave it out")
        if self.routing is None:
            return
        if not isinstance(self.routing, RoutingRules):
            raise InputError("routing", self.routing, "give RoutingRules, or leave it out")
        spec = self.spec
        if spec is None or self.routing == RoutingRules() or (spec.drafter is not None and spec.num_draft == "auto"):
            return
        closed = (
            "nobody drafts: name a drafter"
            if spec.drafter is None
            else f"num_draft={spec.num_draft} is set: leave that to 'auto'"
        )
        remedy = f"rules hold where the number of draft tokens is open, and {closed}, or leave this out"
        raise ConfigError("routing", self.routing, remedy)


def config_of(model: EngineConfig | str | Path, spec: SpecConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that the arguments of `LLM` mean.

    Raises:
        InputError: an argument that is wrong.
    """
    if not isinstance(model, EngineConfig):
        return from_mapping(EngineConfig, {"model": model, "spec": spec, **options})
    given = {**({} if spec is None else {"spec": spec}), **options}
    if given:
        name, value = next(iter(given.items()))
        raise InputError(name, value, "is a field of the EngineConfig: set it there, or use dataclasses.replace")
    return model
