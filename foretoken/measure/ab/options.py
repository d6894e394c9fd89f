"""What an A/B replay asks of which two backends, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from foretoken.errors import InputError
from foretoken.field_text import numbers
from foretoken.measure import options as shared
from foretoken.measure.options import check_price, check_slo, check_wholes, resume_option, setting
from foretoken.measure.sides import SideOptions
from foretoken.measure.write import check_result
from foretoken.option import check_fields, option
from foretoken.params import TEMPERATURES, check_number

MAX_REPEATS = 1000


@dataclass(frozen=True)
class AbOptions(SideOptions):
    """Two backends, the requests, and how they are compared.

    Every ratio is B over A. `max_tokens` and `temperature` hold for requests that do not say their own. `repeats`
    replays the file so often, in another order each time. A block has `pairs_per_block` requests, an even number, half
    of them first asked of A. `aa_blocks` are asked of A twice before, which must find no difference. `margin` is the
    relative difference below which two backends count as equivalent. `price_per_hour` is that of A's machine and B's,
    or one for both; of answers with more than `slo_ms` between two tokens the tokens are not counted. `resume` is a
    file that keeps every pair.
    """

    replay: Path = field(
        metadata=option(
            "File or folder of requests: JSON lines with prompt or messages [max_tokens, temperature, slice], OpenAI "
            "batch files, prompt files of guidellm and aiperf, public evaluation sets."
        )
    )
    max_tokens: int = setting(128, "Tokens per answer, for requests that do not set it.")
    temperature: float = setting(0.0, "Temperature, for requests that do not set it.")
    ignore_eos: bool = setting(False, "Ask for answers of their full length: ignore_eos is sent.")
    chat: bool = field(default=False, metadata=shared.CHAT_OPTION)
    repeats: int = setting(1, "Times the file is replayed, in another order each time.")
    pairs_per_block: int = setting(4, "Requests of a block, an even number: in half of them A is asked first.")
    warmup: int = setting(2, "Requests to each backend before the run, not counted.")
    aa_blocks: int = setting(0, "Blocks in which A is compared with itself first; 8 or more, or 0 for none.")
    margin: float = setting(0.03, "Relative difference below which the two count as equivalent.")
    stop_early: bool = setting(True, "Stop as soon as there is a verdict.")
    price_per_hour: tuple[float, ...] | None = setting(
        None, "Price of a machine per hour, or of A's and B's as 2.5,3: adds costs.", read=numbers
    )
    slo_ms: float | None = field(default=None, metadata=shared.SLO_OPTION)
    resume: Path | None = field(default=None, metadata=resume_option("pair"))
    out: Path | None = field(default=None, metadata=shared.OUT_OPTION)
    name: str = field(default="ab", metadata=shared.NAME_OPTION)
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_sides()
        counts = {"max_tokens": (1, 1 << 20), "repeats": (1, MAX_REPEATS), "pairs_per_block": (2, 1000)}
        check_wholes(self, **counts, warmup=(1, 1000), aa_blocks=(0, 10_000), seed=(0, 2**62))
        if self.pairs_per_block % 2:
            raise InputError("pairs_per_block", self.pairs_per_block, "must be even: half of a block begins with A")
        check_number("temperature", self.temperature, *TEMPERATURES)
        check_number("margin", self.margin, 0.0, 1.0, open_low=True)
        if self.price_per_hour is not None and not 0 < len(self.price_per_hour) <= 2:
            raise InputError("price_per_hour", self.price_per_hour, "give one price for both machines, or A's and B's")
        for price in self.price_per_hour or ():
            check_price(price)
        check_slo(self.slo_ms, self.price_per_hour is not None)
        check_result(self.out, self.name)

    @property
    def prices(self) -> tuple[float, float] | None:
        """What an hour of A's machine and of B's costs; None where nobody said."""
        return None if self.price_per_hour is None else (self.price_per_hour[0], self.price_per_hour[-1])
