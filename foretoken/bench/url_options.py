"""Options of a load measurement on an OpenAI-compatible endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.backend.address import DEFAULT_KEY_VARIABLE, base_of, check_address
from foretoken.bench.prompts import ALL
from foretoken.bench.speed_options import SpeedOptions
from foretoken.errors import InputError
from foretoken.field_text import numbers
from foretoken.measure.write import check_name, check_out
from foretoken.option import option, same_option
from foretoken.params import TEMPERATURES, check_number, check_whole

if TYPE_CHECKING:
    from foretoken.backend.http import ServerAddress

MAX_REQUESTS = 1_000_000  # all are planned before the first is sent
_RATES = (1e-6, 1e6)  # requests per second
_MAX_S = 86_400.0


@dataclass(frozen=True)
class UrlOptions:
    """What to send to which endpoint.

    `url` is the server's address, with or without `/v1`. `model` None: the first that `/v1/models` names. `rates` are
    mean arrivals per second of a Poisson process, one run each; `trace` is a file of arrivals in their place. A prompt
    is continued as it stands, or with `chat` sent as a user's message. `deadlines`: a request is good if its time to
    the first token, its time per further token and its whole time are within those that are set; without one, every
    request that succeeds is good. `key_variable` names the environment variable with the API key: a key on the command
    line would be in the report. `timeout_s`: a server that is silent for so long has failed the request. `resume` is a
    file that keeps each run that has ended, a rate or the trace; what it holds already is not measured again.
    """

    url: str = field(metadata=option("Address of the server, such as http://127.0.0.1:8000, with or without /v1."))
    model: str | None = field(default=None, metadata=option("Name of the model; without it, the first of /v1/models."))
    rates: tuple[float, ...] = field(
        default=(1.0,),
        metadata=option(
            "Requests per second of a Poisson process; several with commas are runs of their own.",
            name="rate",
            read=numbers,
        ),
    )
    requests: int = field(default=64, metadata=option("Requests of each rate."))
    trace: Path | None = field(
        default=None,
        metadata=option("File of arrivals in place of --rate: JSON lines, arrival_s [prompt, max_tokens, slice]."),
    )
    prompts: Path | None = field(default=None, metadata=same_option(SpeedOptions, "prompts"))
    slices: tuple[str, ...] = field(default=(ALL,), metadata=same_option(SpeedOptions, "slices"))
    prompts_per_slice: int = field(default=8, metadata=option("Prompts of each slice; requests take them in turn."))
    chat: bool = field(default=False, metadata=option("Send prompts as a user's message to /v1/chat/completions."))
    max_tokens: int = field(default=64, metadata=same_option(SpeedOptions, "max_tokens"))
    temperature: float = field(default=0.0, metadata=option("Sampling temperature."))
    stop_at_eos: bool = field(default=False, metadata=option("Let answers end early; by default ignore_eos is sent."))
    warmup: int = field(default=2, metadata=option("Requests before the run, not counted."))
    ttft_deadline_s: float | None = field(
        default=None, metadata=option("A request is good if its first text comes within so many seconds.")
    )
    tpot_deadline_s: float | None = field(
        default=None, metadata=option("The same for the mean time of each further token.")
    )
    e2e_deadline_s: float | None = field(default=None, metadata=option("The same for the whole answer."))
    timeout_s: float = field(
        default=600.0, metadata=option("A server that sends nothing for so many seconds has failed the request.")
    )
    key_variable: str = field(default=DEFAULT_KEY_VARIABLE, metadata=option("Environment variable with the API key."))
    out: Path | None = field(default=None, metadata=same_option(SpeedOptions, "out"))
    resume: Path | None = field(
        default=None,
        metadata=option("File that keeps each load; a run that was stopped goes on from it with the same options."),
    )
    name: str = field(default="url", metadata=same_option(SpeedOptions, "name"))
    seed: int = field(default=0, metadata=same_option(SpeedOptions, "seed"))

    def __post_init__(self) -> None:
        check_address("url", self.url, self.key_variable)
        for name, low, high in (
            ("requests", 1, MAX_REQUESTS),
            ("prompts_per_slice", 1, MAX_REQUESTS),
            ("max_tokens", 1, 1 << 20),
            ("warmup", 0, MAX_REQUESTS),
            ("seed", 0, 2**63 - MAX_REQUESTS),  # request i is sent with seed + i
        ):
            check_whole(name, getattr(self, name), low, high)
        if not self.rates:
            raise InputError("rate", "", "give requests per second, several separated by commas")
        for rate in self.rates:
            check_number("rate", rate, *_RATES)
        check_number("temperature", self.temperature, *TEMPERATURES)
        check_number("timeout_s", self.timeout_s, 0.0, _MAX_S, open_low=True)
        for name in ("ttft_deadline_s", "tpot_deadline_s", "e2e_deadline_s"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, _MAX_S, open_low=True)
        for name in ("model", "key_variable"):
            if getattr(self, name) == "":
                raise InputError(name, "", "must not be empty; leave it out")
        check_name(self.name)
        if self.out is not None:
            check_out(self.out)

    @property
    def base(self) -> str:
        """The address without `/v1` and without a slash at its end."""
        return base_of(self.url)

    @property
    def server(self) -> ServerAddress:
        """What clients of the endpoint are made with."""
        from foretoken.backend.http import ServerAddress  # help is printed without an HTTP client

        return ServerAddress(self.url, self.model or "", self.key_variable, self.timeout_s)
