"""What `foretoken eval --backend` asks another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.backend.answering import AnsweringBackend
from foretoken.bench.speed_options import SpeedOptions
from foretoken.errors import InputError
from foretoken.evaluate.options import MAX_DRAFTED, MAX_PROMPTS, EvalOptions
from foretoken.field_text import words
from foretoken.measure.asked import BackendSource
from foretoken.option import option, same_option
from foretoken.params import TEMPERATURES, check_number, check_whole

_TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class BackendEvalOptions:
    """The backend and the settings of its evaluation.

    `drafters` are its own ways to draft, at most `num_draft` tokens each where that can be chosen; None: all that it
    has. `temperatures` None: 0, and 0.8 where it samples by a seed. The others are those of `EvalOptions`.
    """

    source: BackendSource
    drafters: Sequence[str] | None = field(default=None, metadata=option("Ways to draft of the backend.", read=words))
    num_draft: int = field(default=5, metadata=same_option(EvalOptions, "num_draft"))
    prompts_per_slice: int = field(default=10, metadata=same_option(EvalOptions, "prompts_per_slice"))
    max_tokens: int = field(default=64, metadata=same_option(SpeedOptions, "max_tokens"))
    temperatures: Sequence[float] | None = field(default=None, metadata=same_option(EvalOptions, "temperatures"))
    stop_at_eos: bool = field(default=False, metadata=same_option(SpeedOptions, "stop_at_eos"))
    chat: bool = field(default=False, metadata=same_option(SpeedOptions, "chat"))
    seed: int = field(default=0, metadata=same_option(EvalOptions, "seed"))

    def __post_init__(self) -> None:
        check_whole("num_draft", self.num_draft, low=1, high=MAX_DRAFTED)
        check_whole("prompts_per_slice", self.prompts_per_slice, low=1, high=MAX_PROMPTS)
        check_whole("max_tokens", self.max_tokens, low=2)
        check_whole("seed", self.seed, low=0, high=2**62)
        for temperature in self.temperatures or ():
            check_number("temperatures", temperature, *TEMPERATURES)

    def temperatures_for(self, backend: AnsweringBackend) -> tuple[float, ...]:
        """The temperatures to ask at, each once.

        Raises:
            InputError: one above 0 was named, and the backend does not sample by a seed.
        """
        sampling = backend.capabilities.sampling
        if self.temperatures is None:
            return _TEMPERATURES if sampling else _TEMPERATURES[:1]
        for temperature in self.temperatures:
            if temperature > 0 and not sampling:
                raise InputError("temperatures", temperature, f"{backend.name} does not sample by a seed; give 0")
        return tuple(dict.fromkeys(float(one) for one in self.temperatures))

    @property
    def settings(self) -> dict[str, object]:
        """What two results must share to be comparable; the rule is the backend's own."""
        named = ("max_tokens", "stop_at_eos", "chat")
        return {"rule": "the backend's own", "allow_lossy": False} | {name: getattr(self, name) for name in named}
