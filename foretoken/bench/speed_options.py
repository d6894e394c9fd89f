"""Options of `foretoken bench speed`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foretoken.bench.drafting import DrafterChoice, parse_drafters
from foretoken.bench.measure import DEFAULT_NUMERICS
from foretoken.bench.peer_kinds import EVERY as EVERY_KIND
from foretoken.bench.peer_kinds import check_kinds
from foretoken.bench.plot import check_plot
from foretoken.bench.prompts import ALL
from foretoken.bench.workload import MOST_PROMPTS, SLICES
from foretoken.config import NUMERICS
from foretoken.errors import ConfigError, InputError
from foretoken.measure.write import check_name
from foretoken.params import check_number, check_whole


@dataclass(frozen=True)
class SpeedOptions:
    """What to measure, and where the result is written.

    Plain decoding is always measured, as the baseline. `drafters` are names, optionally with options behind a colon
    (`drafting`), or `all`. `prompts` is a file or folder that replaces the library's texts; `slices` selects from them.
    `chat` sends texts as a user's message through the target's chat template.
    `peer_drafters` are the drafting methods to run in other engines, `peer_num_drafts` their numbers of draft tokens,
    `peer_lookup_num_drafts` those of n-gram lookups.
    Under each of `numerics` everything is measured, with a plain decoding of its own. `warm`: drafters keep what they
    remember from prompt to prompt, but never to a repeat of it; otherwise they are emptied before every answer.

    `out` is a folder for a dated result, `name` the end of its file name, `plot` a .png or .svg file. `resume` is a
    file that keeps each answer; what it holds already is not measured again. `threads=None` keeps torch's number.
    """

    target: str
    draft: str | None = None
    drafters: tuple[str, ...] = ("draft_model", "ngram")
    num_drafts: tuple[int | Literal["auto"], ...] = (3, 5)
    rules: tuple[str, ...] = ("auto",)
    allow_lossy: bool = False
    slices: tuple[str, ...] = (ALL,)
    prompts: Path | None = None
    chat: bool = False
    prompts_per_slice: int = 2
    max_tokens: int = 128
    repeats: int = 3
    warmup: int = 1
    warm: bool = False
    temperatures: tuple[float, ...] = (0.0, 0.8)
    ignore_eos: bool = True
    numerics: tuple[str, ...] = (DEFAULT_NUMERICS,)
    weights: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    peers: bool = False
    peer_drafters: tuple[str, ...] = (EVERY_KIND,)
    peer_num_drafts: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    peer_lookup_num_drafts: tuple[int, ...] = (4, 8, 12, 16, 24, 32)
    plot: Path | None = None
    out: Path | None = None
    resume: Path | None = None
    name: str = "bench"
    seed: int = 0

    def __post_init__(self) -> None:
        for field, low, high in (
            ("prompts_per_slice", 1, MOST_PROMPTS),
            ("max_tokens", 2, None),
            ("repeats", 1, None),
            ("warmup", 0, None),
            ("seed", 0, 2**63),
        ):
            check_whole(field, getattr(self, field), low, high)
        if self.threads is not None and self.threads < 1:
            raise InputError("threads", self.threads, "must be at least 1; leave it out for torch's own number")
        if not self.temperatures:
            raise InputError("temperatures", self.temperatures, "give at least one; 0 is greedy")
        for temperature in self.temperatures:
            check_number("temperatures", temperature, low=0.0, high=100.0)
        from foretoken.verify import resolve  # rules need torch, and help is printed without it

        for rule, temperature in itertools.product(self.rules, self.temperatures):
            resolve(rule, greedy=temperature == 0, seeded=True, allow_lossy=self.allow_lossy)
        if not self.slices:
            raise InputError("slices", self.slices, f"give at least one of {', '.join(SLICES)}, or {ALL}")
        if self.drafters and not self.num_drafts:
            raise InputError("num_drafts", self.num_drafts, "give at least one number of tokens to draft, or 'auto'")
        for field in ("num_drafts", "peer_num_drafts", "peer_lookup_num_drafts"):
            for number in getattr(self, field):
                if number != "auto" or field != "num_drafts":
                    check_whole(field, number, low=1, high=1024)
        for choice in self.choices:
            if choice.required and "draft" in choice.needs and self.draft is None:
                raise ConfigError(
                    "draft",
                    None,
                    f"drafter {choice.name} needs a draft; give its folder, or leave {choice.name} out of the drafters",
                )
        if not self.numerics or not set(self.numerics) <= set(NUMERICS):
            raise InputError("numerics", ",".join(self.numerics), f"choose from {', '.join(NUMERICS)}")
        if self.warm and self.resume is not None:
            raise InputError(
                "resume", str(self.resume), "what warm drafters remember is not kept; leave one of them out"
            )
        check_kinds(self.peer_drafters)
        check_name(self.name)
        if self.plot is not None:
            check_plot(self.plot)

    @property
    def choices(self) -> tuple[DrafterChoice, ...]:
        """The drafters to measure."""
        return parse_drafters(self.drafters)

    @property
    def num_threads(self) -> int:
        """Threads that every engine of the run gets."""
        import torch

        return self.threads if self.threads is not None else torch.get_num_threads()
