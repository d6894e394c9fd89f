"""What a diagnosis reads and runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from foretoken.backend.registry import check_address
from foretoken.config import SpecConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.measure import options as shared
from foretoken.measure.options import check_wholes, resume_option, setting
from foretoken.measure.write import check_result
from foretoken.option import check_fields, same_option
from foretoken.params import TEMPERATURES, check_number


@dataclass(frozen=True)
class DiagnoseOptions:
    """A target, its head or its draft model, and the texts.

    Without `prompts` the library's own are used, `num_prompts` in all. `dtype` is the number format that the engine
    runs in, which is compared with float32. `greedy_drafts`: the engine drafts the likeliest token and verifies it as a
    point mass, as vLLM does. `url` is a server with the same target and head, `model` its name there. `resume` is a
    file that keeps what was answered and measured.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    head: str | None = field(default=None, metadata=same_option(SpecConfig, "head"))
    draft: str | None = field(default=None, metadata=same_option(SpecConfig, "draft"))
    prompts: Path | None = field(default=None, metadata=shared.PROMPTS_OPTION)
    num_prompts: int = setting(12, "Prompts to answer; more make the result more certain.")
    max_tokens: int = setting(96, "Tokens per answer of the target.")
    num_draft: int = setting(4, "Positions of a draft to measure.")
    temperature: float = setting(0.0, "Temperature of use; 0 is greedy.")
    greedy_drafts: bool = setting(
        False, "The engine drafts the most likely token above temperature 0 too, as vLLM does."
    )
    chat: bool = field(default=False, metadata=shared.CHAT_OPTION)
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    url: str | None = setting(None, "Server with this target and head; its figures are shown for comparison.")
    model: str | None = setting(None, "Name of the model at --url; else its first.")
    resume: Path | None = field(default=None, metadata=resume_option("set of answers and each repair"))
    out: Path | None = field(default=None, metadata=shared.OUT_OPTION)
    name: str = field(default="diagnose", metadata=shared.NAME_OPTION)
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.head is None) == (self.draft is None):
            raise ConfigError("head", self.head, "give --head for a trained head, or --draft for a draft model")
        check_wholes(self, num_prompts=(2, 10_000), max_tokens=(8, 1 << 20), num_draft=(1, 64), seed=(0, 2**62))
        check_number("temperature", self.temperature, *TEMPERATURES)
        if self.url is not None:
            check_address("url", self.url)
        elif self.model is not None:
            raise ConfigError("model", self.model, "names a model at --url; give that, or leave it out")
        check_result(self.out, self.name)
