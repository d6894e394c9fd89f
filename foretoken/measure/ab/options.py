"""What an A/B replay asks of which two backends, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from foretoken.backend.registry import check_address, check_backends, is_address
from foretoken.config import SpecConfig
from foretoken.engine_config import THREADS, EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.field_text import numbers
from foretoken.measure.options import CHAT_OPTION, NAME_OPTION, OUT_OPTION, SEED_OPTION
from foretoken.measure.write import check_name, check_out
from foretoken.option import check_fields, option, same_option
from foretoken.params import TEMPERATURES, check_number, check_whole

MAX_REPEATS = 1000
MAX_PRICE = 1e9

_SIDE = (
    "{}: the address of an OpenAI-compatible server, or an engine in this process: local, llama.cpp, transformers, "
    "openvino."
)
_DRAFTER = (
    "How {} drafts: plain, or one of its own ways by its name. Without it a server drafts as it was started, and an "
    "engine in this process decodes plainly."
)


@dataclass(frozen=True)
class AbOptions:
    """Two backends, the requests, and how they are compared.

    `a` is what there is now, `b` what might replace it: every ratio is B over A. `target`, `draft`, `dtype`, `device`
    and `threads` are those of an engine in this process. `max_tokens` and `temperature` hold for requests that do not
    say their own. `repeats` replays the file so often, in another order each time. A block has `pairs_per_block`
    requests, an even number, half of them first asked of A. `aa_blocks` are asked of A twice before, which must find no
    difference. `margin` is the relative difference below which two backends count as equivalent. `price_per_hour` is
    that of A's machine and B's, or one for both. `resume` is a file that keeps every pair.
    """

    a: str = field(metadata=option(_SIDE.format("A, what there is now")))
    b: str = field(metadata=option(_SIDE.format("B, what might replace it")))
    replay: Path = field(
        metadata=option(
            "File or folder of requests: JSON lines with prompt or messages [max_tokens, temperature, slice], OpenAI "
            "batch files, prompt files of guidellm and aiperf, public evaluation sets."
        )
    )
    a_drafter: str | None = field(default=None, metadata=option(_DRAFTER.format("A")))
    b_drafter: str | None = field(default=None, metadata=option(_DRAFTER.format("B")))
    a_model: str | None = field(default=None, metadata=option("Name of the model at A's address; else its first."))
    b_model: str | None = field(default=None, metadata=option("Name of the model at B's address; else its first."))
    target: str | None = field(default=None, metadata=same_option(EngineConfig, "model"))
    draft: str | None = field(default=None, metadata=same_option(SpecConfig, "draft"))
    num_draft: int = field(
        default=5, metadata=option("Draft tokens of a way to draft that is named, where it takes it.")
    )
    max_tokens: int = field(default=128, metadata=option("Tokens per answer, for requests that do not say it."))
    temperature: float = field(default=0.0, metadata=option("Temperature, for requests that do not say it."))
    ignore_eos: bool = field(
        default=False, metadata=option("Ask for answers of their full length: ignore_eos is sent.")
    )
    chat: bool = field(default=False, metadata=CHAT_OPTION)
    repeats: int = field(default=1, metadata=option("Times the file is replayed, in another order each time."))
    pairs_per_block: int = field(
        default=4, metadata=option("Requests of a block, an even number: in half of them A is asked first.")
    )
    warmup: int = field(default=2, metadata=option("Requests to each backend before the run, not counted."))
    aa_blocks: int = field(
        default=0, metadata=option("Blocks in which A is compared with itself first; 8 or more, or 0 for none.")
    )
    margin: float = field(default=0.03, metadata=option("Relative difference below which the two count as equivalent."))
    stop_early: bool = field(default=True, metadata=option("Stop as soon as there is a verdict."))
    price_per_hour: tuple[float, ...] | None = field(
        default=None,
        metadata=option("Price of a machine per hour, or of A's and B's as 2.5,3: adds costs.", read=numbers),
    )
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)
    resume: Path | None = field(
        default=None, metadata=option("File that keeps each pair; a run that was stopped goes on from it.")
    )
    out: Path | None = field(default=None, metadata=OUT_OPTION)
    name: str = field(default="ab", metadata=NAME_OPTION)
    seed: int = field(default=0, metadata=SEED_OPTION)

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_sides()
        for name, low, high in (
            ("num_draft", 1, 256),
            ("max_tokens", 1, 1 << 20),
            ("repeats", 1, MAX_REPEATS),
            ("pairs_per_block", 2, 1000),
            ("warmup", 1, 1000),
            ("aa_blocks", 0, 10_000),
            ("seed", 0, 2**62),
        ):
            check_whole(name, getattr(self, name), low, high)
        if self.pairs_per_block % 2:
            raise InputError("pairs_per_block", self.pairs_per_block, "must be even: half of a block begins with A")
        check_number("temperature", self.temperature, *TEMPERATURES)
        check_number("margin", self.margin, 0.0, 1.0, open_low=True)
        if self.price_per_hour is not None and not 0 < len(self.price_per_hour) <= 2:
            raise InputError("price_per_hour", self.price_per_hour, "give one price for both machines, or A's and B's")
        for price in self.price_per_hour or ():
            check_number("price_per_hour", price, 0.0, MAX_PRICE, open_low=True)
        check_name(self.name)
        if self.out is not None:
            check_out(self.out)

    def _check_sides(self) -> None:
        for side in ("a", "b"):
            backend: str = getattr(self, side)
            if is_address(backend):
                check_address(side, backend)
                continue
            try:
                check_backends((backend,))
            except InputError as error:
                raise InputError(side, backend, error.remedy) from error
            if self.target is None:
                raise ConfigError(
                    "target", None, f"{side}={backend} runs in this process: name the model that it loads"
                )
            if getattr(self, f"{side}_model") is not None:
                remedy = f"names a model at an address, and {side} is {backend}; leave it out"
                raise ConfigError(f"{side}_model", getattr(self, f"{side}_model"), remedy)
        if is_address(self.a) and is_address(self.b):
            for name in ("target", "draft", "threads"):
                if getattr(self, name) is not None:
                    remedy = "is of an engine in this process, and both are servers; leave it out"
                    raise ConfigError(name, getattr(self, name), remedy)

    @property
    def prices(self) -> tuple[float, float] | None:
        """What an hour of A's machine and of B's costs; None where nobody said."""
        return None if self.price_per_hour is None else (self.price_per_hour[0], self.price_per_hour[-1])
