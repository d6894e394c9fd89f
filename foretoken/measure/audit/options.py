"""Options of an audit, of our engine or of another, and its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.config import SpecConfig
from foretoken.engine.prompts import Conversation, prompt_content
from foretoken.engine_config import EngineConfig
from foretoken.errors import InputError
from foretoken.field_text import numbers
from foretoken.files import parse_json, read_text
from foretoken.measure.asked import BackendSource
from foretoken.measure.options import NAME_OPTION, OUT_OPTION, check_wholes, resume_option, setting
from foretoken.measure.write import check_result
from foretoken.option import check_fields, same_option
from foretoken.params import check_temperatures

MAX_PROMPTS = 100_000  # all answers are held in memory until they are tested


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that the target's chat template lays out; `place` says where it was read."""

    messages: Conversation
    place: str = field(default="messages", compare=False)


Prompt = str | list[int] | ChatPrompt


@dataclass(frozen=True)
class AuditOptions:
    """Models, settings and length of an audit.

    `num_prompts` answers of `max_tokens` tokens are sampled at each of `temperatures`, prompts taken in turn. `alpha`
    is the probability that a correct engine fails any of the statistical tests. `seed` is the first seed of the sampled
    answers. `resume` is a file that keeps every group of checks.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    spec: SpecConfig
    num_prompts: int = setting(16, "Answers at each temperature; prompts are taken in turn.")
    max_tokens: int = setting(128, "Tokens per answer.")
    temperatures: tuple[float, ...] = setting((0.0, 0.8), "Temperatures, separated by commas.", read=numbers)
    seed: int = setting(0, "First seed of the sampled answers.")
    numerics: str = field(default="default", metadata=same_option(EngineConfig, "numerics"))
    weights: str = field(default="auto", metadata=same_option(EngineConfig, "weights"))
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    cache_tokens: int | None = field(default=None, metadata=same_option(EngineConfig, "cache_tokens"))
    resume: Path | None = field(default=None, metadata=resume_option("group of checks"))
    out: Path | None = field(default=None, metadata=OUT_OPTION)
    name: str = field(default="audit", metadata=NAME_OPTION)
    alpha: float = 1e-4

    def __post_init__(self) -> None:
        check_fields(self)
        check_wholes(self, num_prompts=(1, MAX_PROMPTS), max_tokens=(2, None), seed=(0, 2**63))
        check_temperatures("temperatures", self.temperatures)
        check_result(self.out, self.name)

    @property
    def sampled(self) -> tuple[float, ...]:
        """Temperatures above 0, each once."""
        return tuple(dict.fromkeys(temperature for temperature in self.temperatures if temperature > 0))


def prompt_name(place: int) -> str:
    """What messages call the prompt at `place`."""
    return f"prompt {place + 1}"


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a file: JSON lines with `prompt` (a text), `prompt_ids` or `messages` (a conversation, up to its
    last answer), or else one text per line.

    A file is read as JSON lines when its name ends in .jsonl or its first line begins with a brace.

    Raises:
        StorageError: the file cannot be read.
        InputError: a line that is not such an object, tools beside a conversation, or no line at all.
    """
    every = enumerate(read_text("prompts", path).split("\n"), start=1)
    lines = [(number, line) for number, line in every if line.strip()]
    if not lines:
        raise InputError("prompts", str(path), "the file is empty; write one prompt a line")
    if path.suffix.lower() == ".json":
        raise InputError("prompts", str(path), "is one JSON text; write one object a line into a .jsonl file")
    if path.suffix.lower() != ".jsonl" and not lines[0][1].lstrip().startswith("{"):
        return [line.removesuffix("\r") for _, line in lines]
    return [_parse(f"{path}:{number}", line) for number, line in lines]


def _parse(where: str, line: str) -> Prompt:
    item = parse_json("prompts", where, line)
    if not isinstance(item, dict):
        raise InputError("prompts", where, "every line must be an object")
    content = prompt_content(where, item)
    if isinstance(content, str):
        return content
    ids = [token for token in content if isinstance(token, int)]
    return ids or ChatPrompt([message for message in content if not isinstance(message, int)], where)


@dataclass(frozen=True)
class BackendAuditOptions:
    """The backend, what its answers are compared with, and the length of the audit.

    Greedy answers are compared with those of `against`, or with the backend's own plain ones where it is None.
    `target` is the model whose logits judge the answers, loaded here with `dtype`, `weights`, `device` and
    `cache_tokens`; None: nothing judges them. `draftings` are kinds of drafting of the backend (None: all). `num_seeds`
    answers are sampled for their first tokens alone. The others are those of `AuditOptions`.
    """

    source: BackendSource
    against: BackendSource | None = None
    target: str | None = None
    draftings: Sequence[str] | None = None
    num_draft: int = 5
    num_prompts: int = field(default=16, metadata=same_option(AuditOptions, "num_prompts"))
    max_tokens: int = field(default=128, metadata=same_option(AuditOptions, "max_tokens"))
    temperatures: tuple[float, ...] = field(default=(0.0, 0.8), metadata=same_option(AuditOptions, "temperatures"))
    seed: int = field(default=0, metadata=same_option(AuditOptions, "seed"))
    num_seeds: int = setting(256, "With --backend and --target: first tokens sampled at temperature 1.")
    weights: str = field(default="auto", metadata=same_option(AuditOptions, "weights"))
    dtype: str = field(default="auto", metadata=same_option(AuditOptions, "dtype"))
    device: str = field(default="auto", metadata=same_option(AuditOptions, "device"))
    cache_tokens: int | None = field(default=None, metadata=same_option(AuditOptions, "cache_tokens"))
    resume: Path | None = field(default=None, metadata=same_option(AuditOptions, "resume"))
    out: Path | None = field(default=None, metadata=same_option(AuditOptions, "out"))
    name: str = field(default=AuditOptions.name, metadata=same_option(AuditOptions, "name"))
    alpha: float = 1e-4

    def __post_init__(self) -> None:
        check_wholes(self, num_draft=(1, 256), num_prompts=(1, MAX_PROMPTS), num_seeds=(1, MAX_PROMPTS))
        check_wholes(self, max_tokens=(2, None), seed=(0, 2**62))
        check_temperatures("temperatures", self.temperatures)
        check_result(self.out, self.name)

    @property
    def sampled(self) -> tuple[float, ...]:
        """Temperatures above 0, each once."""
        return tuple(dict.fromkeys(temperature for temperature in self.temperatures if temperature > 0))
