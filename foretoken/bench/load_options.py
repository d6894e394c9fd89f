"""What to measure under load, and the model opened for it: shared by batches, trace and recovery."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretoken.bench.batch_prompts import BATCH_SLICES, Ask, asks
from foretoken.bench.batch_settings import BatchSetting, Stage, parse_batch_settings
from foretoken.bench.prompts import ALL, read_prompts
from foretoken.bench.report import check_name, machine, source_caveats, versions
from foretoken.bench.rival_policies import TABLE, BatchTable, measured_table
from foretoken.bench.sheets import Sheet, SheetReport, write_sheets
from foretoken.bench.workload import MOST_PROMPTS
from foretoken.control.queue import SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError, InputError
from foretoken.files import check_folder
from foretoken.model.open import model_folder
from foretoken.model.tokenizer import load_tokenizer
from foretoken.params import check_limits, check_number, check_share, check_whole, is_count
from foretoken.printing.console import Console

_MOST_BATCH = 4096  # every place of a batch is a request with a cache of its own
MEASURED = "measured"
DEFAULT_SETTINGS = (
    "plain",
    "ngram-2",
    "ngram-5",
    "draft_model-2",
    "draft_model-5",
    "table",
    "ema",
    "ngram-auto",
    "draft_model-auto",
    "auto",
)
_TABLE_NUMBERS = (0, 1, 3, 5)  # of guesses that a measured table chooses from
_PROMPT_TOKENS_PER_STEP = (
    4096  # a batch's prompts are read in one step, so that all its requests begin to decode together
)
_SPARE_TOKENS = 64  # of cache for each request, for guesses and what is rounded up


@dataclass(frozen=True)
class Phase:
    """A part of a trace: so many requests at a time, of one slice."""

    batch: int
    slice: str


MIXED = (Phase(1, "code"), Phase(16, "random"), Phase(4, "edit"), Phase(32, "chat"), Phase(2, "json"))


@dataclass(frozen=True)
class LoadOptions:
    """`prompts` is a file or folder of prompts in place of the library's. A cell answers `prompts_per_slice` requests,
    or a whole batch where that is more; `prompt_tokens` is how much of a prompt is kept. `table` belongs to the rule of
    this name: None is measured first. `phases` are those of a trace, each long enough for plain decoding to take
    `phase_s`.

    The engine's limits are `foretoken.LLM`'s. Without them a step takes all prompts of a batch, and place and cache
    suffice for the largest batch. `min_tokens_to_speculate` and `max_speculating_requests` are `RoutingRules`, for
    settings that choose the number of guesses.
    """

    target: str
    draft: str | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    slices: tuple[str, ...] = ("code", "edit", "chat", "random")
    settings: tuple[str, ...] = DEFAULT_SETTINGS
    table: Mapping[int, int] | None = field(default_factory=lambda: dict(TABLE))
    phases: tuple[Phase, ...] = MIXED
    phase_s: float = 4.0
    prompts: Path | None = None
    prompt_tokens: int = 64
    cache_tokens: int | None = None
    cache_reserve: float = SchedulerConfig.cache_reserve
    max_batch_size: int | None = None
    max_prompt_tokens: int = _PROMPT_TOKENS_PER_STEP
    max_step_tokens: int | None = None
    min_tokens_to_speculate: int = RoutingRules.min_tokens_to_speculate
    max_speculating_requests: int | None = None
    prompts_per_slice: int = 2
    max_tokens: int = 48
    repeats: int = 2
    warmup: int = 1
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    out: Path | None = None
    name: str = "batches"
    seed: int = 0

    def __post_init__(self) -> None:
        lows = {"prompt_tokens": 1, "prompts_per_slice": 1, "max_tokens": 4, "repeats": 1, "warmup": 0, "seed": 0}
        for name, low in lows.items():
            check_whole(name, getattr(self, name), low, {"prompts_per_slice": MOST_PROMPTS, "seed": 2**63}.get(name))
        if not self.batches or not all(1 <= batch <= _MOST_BATCH for batch in self.batches):
            raise InputError("batches", self.batches, f"give batch sizes from 1 to {_MOST_BATCH}, separated by commas")
        if not self.settings:
            raise InputError("settings", self.settings, "name at least one; plain is always measured")
        if any(phase.batch > _MOST_BATCH for phase in self.phases):
            raise InputError(
                "trace", max(phase.batch for phase in self.phases), f"at most {_MOST_BATCH} requests at a time"
            )
        if self.threads is not None and self.threads < 1:
            raise InputError("threads", self.threads, "must be at least 1; leave it out for torch's own number")
        check_number("phase_s", self.phase_s, low=0.0, high=1e6, open_low=True)
        if self.prompts is None:
            for name in (*self.slices, *(phase.slice for phase in self.phases)):
                if name not in BATCH_SLICES:
                    raise InputError("slices", name, f"choose from {', '.join(BATCH_SLICES)}")
        if not self.slices:
            raise InputError("slices", self.slices, f"give at least one of {', '.join(BATCH_SLICES)}")
        if self.table is not None:
            BatchTable(self.table)
        check_limits(
            cache_tokens=self.cache_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            max_step_tokens=self.max_step_tokens,
        )
        if self.max_batch_size is not None:
            check_limits(max_batch_size=self.max_batch_size)
        check_share("cache_reserve", self.cache_reserve)
        self._check_rules()
        check_name(self.name)
        if self.out is not None:
            check_folder(self.out)

    @property
    def routing(self) -> RoutingRules:
        """When not to guess."""
        return RoutingRules(
            min_tokens_to_speculate=self.min_tokens_to_speculate, max_speculating_requests=self.max_speculating_requests
        )

    def _check_rules(self) -> None:
        """Rules make sense, and there is a setting that asks them."""
        neutral = RoutingRules()
        if self.routing == neutral or any(
            setting.adapts for setting in parse_batch_settings(self.settings, self.draft)[0]
        ):
            return
        name = next(
            name
            for name in ("min_tokens_to_speculate", "max_speculating_requests")
            if getattr(self, name) != getattr(neutral, name)
        )
        raise ConfigError(
            name,
            getattr(self, name),
            "is for settings that choose the number of guesses; add one, such as ngram-auto, or drop it",
        )


def parse_table(text: str) -> dict[int, int] | None:
    """A table written as 1:5,4:3,16:1; None for `measured`.

    Raises:
        InputError: anything else.
    """
    if text == MEASURED:
        return None
    pairs = [part.partition(":") for part in text.split(",") if part.strip()]
    if not pairs or not all(is_count(batch.strip()) and is_count(number.strip()) for batch, _, number in pairs):
        raise InputError(
            "table", text, f"must be BATCH:GUESSES separated by commas, such as {table_text(TABLE)}, or {MEASURED}"
        )
    return {int(batch): int(number) for batch, _, number in pairs}


def table_text(table: Mapping[int, int]) -> str:
    """The table as it is written."""
    return ",".join(f"{batch}:{number}" for batch, number in table.items())


def slice_names(words: Sequence[str], prompts: Path | None) -> tuple[str, ...]:
    """The slices that `words` name; `all` are those of the file of prompts, or all of `batch_prompts`."""
    if ALL not in words:
        return tuple(words)
    return BATCH_SLICES if prompts is None else tuple(dict.fromkeys(prompt.slice for prompt in read_prompts(prompts)))


def parse_phases(text: str) -> tuple[Phase, ...]:
    """The phases of a trace written as 1:code,16:random; `mixed` is a usual one.

    Raises:
        InputError: anything else.
    """
    if text == "mixed":
        return MIXED
    pairs = [part.strip().partition(":") for part in text.split(",") if part.strip()]
    if not pairs or not all(is_count(batch) and int(batch) and name for batch, _, name in pairs):
        raise InputError("trace", text, "must be mixed, or BATCH:SLICE separated by commas, such as 1:code,16:random")
    return tuple(Phase(int(batch), name) for batch, _, name in pairs)


Tell = Callable[[str], None]  # a piece of work begins: what it is


@contextmanager
def progress(total: int) -> Iterator[Tell]:
    """A bar on a terminal's standard error that goes on by one at each call."""
    with Console(stderr=True).bar("measuring", total, counts=True) as bar:
        began = [False]

        def tell(words: str) -> None:
            bar.update(words, advance=int(began[0]))
            began[0] = True

        yield tell


def announce(words: str) -> None:
    """One line on standard error, before something that takes minutes."""
    Console(stderr=True).line(words)


@contextmanager
def opened(
    options: LoadOptions, slices: Sequence[str], most_batch: int, count: int, answer_tokens: int
) -> Iterator[tuple[Stage, dict[str, tuple[Ask, ...]]]]:
    """The model, opened with room for `most_batch` answers of `answer_tokens`, and `count` requests of every slice.

    Raises:
        InputError: a target without a tokenizer, or an unknown slice.
        ForetokenError: a model that cannot be used.
    """
    folder = model_folder(options.target)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise InputError("target", options.target, "has no tokenizer, and the prompts are texts; choose another target")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = asks(slices, count, tokenizer.encode, options.prompt_tokens, options.seed, options.prompts)
    longest = max(len(ask.prompt_ids) for own in found.values() for ask in own)
    with LLM(
        options.target,
        dtype=options.dtype,
        device=options.device,
        cache_tokens=options.cache_tokens or 2 * most_batch * (longest + answer_tokens + _SPARE_TOKENS),
        cache_reserve=options.cache_reserve,
        max_batch_size=options.max_batch_size or most_batch,
        max_prompt_tokens=options.max_prompt_tokens,
        max_step_tokens=options.max_step_tokens,
        routing=options.routing,
    ) as llm:
        yield Stage(llm, options.draft, options.table or TABLE, options.seed), found


def settle_table(
    stage: Stage,
    options: LoadOptions,
    settings: Sequence[BatchSetting],
    batches: Sequence[int],
    found: Mapping[str, Sequence[Ask]],
) -> list[str]:
    """Measure the table of the rule where it is to be measured: each batch size once, prompts of all slices in turn;
    says what it is.
    """
    ruled = next((setting for setting in settings if setting.rule == "table"), None)
    if ruled is None:
        return []
    if options.table is None:
        speeds: dict[int, dict[int, float]] = {}
        mixed = [ask for own in zip(*found.values(), strict=True) for ask in own]
        for batch in sorted(set(batches)):
            fixed = [
                BatchSetting(f"table {number}", ruled.choice if number else None, number) for number in _TABLE_NUMBERS
            ]
            turns = {setting.num_draft: stage.answer(setting, mixed[:batch], options.max_tokens) for setting in fixed}
            speeds[batch] = {int(number): turn.num_tokens / turn.seconds for number, turn in turns.items()}
        stage.table = measured_table(speeds)
    origin = "given" if options.table is not None else "measured at the start, on prompts of all slices in turn"
    return [f"The table of guesses by batch size, {origin}: {table_text(stage.table)}."]


def make_report(
    options: LoadOptions,
    kind: str,
    command: str,
    rows: Sequence[Any],
    summary: Mapping[str, Any],
    sheets: Sequence[Sheet],
    explained: str,
    notes: Sequence[str],
    interrupted: bool,
    load: float,
) -> SheetReport:
    """The report of a run, written to `options.out` if there is one; `load` is the machine's before the run."""
    caveats = source_caveats(
        model_folder(options.target), None if options.draft is None else model_folder(options.draft), load
    )
    if interrupted:
        caveats.append("The run was interrupted: this is what had been measured by then.")
    report = SheetReport(
        kind,
        command,
        machine(),
        versions(),
        asdict(options),
        tuple(rows),
        summary,
        tuple(sheets),
        explained,
        (*caveats, *notes),
        interrupted,
    )
    return write_sheets(report, options.out, options.name) if options.out is not None else report


def load_now() -> float:
    """The machine's load average."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
