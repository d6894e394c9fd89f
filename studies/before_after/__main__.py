"""Compare two checkouts of foretoken in one run.

    python -m studies.before_after --before DIR --after DIR --target T --draft D --out DIR [--mixed]

Run it from the checkout whose `foretoken` makes the prompts (any will do: both get the same token ids).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from foretoken.measure.write import write_report
from studies.before_after import grid, mixed, report
from studies.before_after.pair import AFTER, BEFORE, Options, opened, setting_fields
from studies.changing_load.options import MIXED

_FIXED = "ngram,suffix,recycling,lookahead,early_exit,cascade,draft_model,mix"
_NEEDS_DRAFT = ("draft_model", "cascade")
_ALWAYS = ("plain", "auto")
_TOLD = ("dtype", "device", "threads", "profile", "seed", "temperature", "top_p")


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, write; 0 also where Ctrl-C ended the run early, after writing what there is."""
    chosen = _parser().parse_args(argv)
    command = "python -m studies.before_after " + shlex.join(_without_folders(argv or sys.argv[1:]))
    settings = tuple(dict.fromkeys((*_ALWAYS, *_list(chosen.settings))))
    grid_plan = grid.GridPlan(
        batches=tuple(int(text) for text in _list(chosen.batches)),
        slices=_list(chosen.slices),
        settings=settings,
        repeats=chosen.repeats,
        max_tokens=chosen.max_tokens,
        min_requests=chosen.prompts_per_slice,
    )
    trace_plan = mixed.MixedPlan(
        fixed=_fixed_settings(chosen) if chosen.mixed else (),
        finalists=chosen.finalists,
        repeats=chosen.repeats,
        max_tokens=chosen.max_tokens,
        phase_s=chosen.phase_s,
    )
    slices, largest = _needed(chosen.mixed, chosen.no_grid, grid_plan)
    options = Options(
        folders={BEFORE: chosen.before, AFTER: chosen.after},
        target=_found(chosen.target),
        draft=None if chosen.draft is None else _found(chosen.draft),
        settings={
            name: setting_fields(name, None if chosen.draft is None else _found(chosen.draft))
            for name in dict.fromkeys((*settings, *trace_plan.fixed))
        },
        slices=slices,
        max_batch=largest,
        num_requests=max(largest, chosen.prompts_per_slice),
        max_tokens=chosen.max_tokens,
        dtype=chosen.dtype,
        device=chosen.device,
        threads=chosen.threads,
        profile=chosen.profile,
        prompt_tokens=chosen.prompt_tokens,
        seed=chosen.seed,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
    )
    samples: list[grid.Sample] = []
    traces: list[mixed.TraceSample] = []
    interrupted, load = False, os.getloadavg()[0]
    _tell("loading the model in both checkouts, one after the other")
    with opened(options) as pair:
        for name, about in pair.about.items():
            _tell(f"{name}: commit {about['commit']}, open after {about['open_s']:.0f} s")
        try:
            if not chosen.no_grid:
                plain_s = grid.warm_up(pair, grid_plan)
                seconds = grid.estimate_s(grid_plan, plain_s, len(pair.checkouts))
                _tell(f"grid: about {max(1, round(seconds / 60))} min if every setting takes as long as plain")
                grid.measure(pair, grid_plan, samples, _tell)
            if chosen.mixed:
                mixed.measure(pair, trace_plan, traces, _tell)
        except KeyboardInterrupt:
            interrupted = True
        listed = {
            "grid": None if chosen.no_grid else asdict(grid_plan),
            "mixed": asdict(trace_plan) if chosen.mixed else None,
            **{name: getattr(chosen, name) for name in _TOLD},
        }
        run = report.Run(command, listed, pair, samples, traces, interrupted, load)
        for path in write_report(report.report_of(run), chosen.out, chosen.name).files:
            _tell(f"written: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m studies.before_after", description=__doc__)
    add = parser.add_argument
    add("--before", type=Path, required=True, help="a checkout of foretoken")
    add("--after", type=Path, required=True, help="another one")
    add("--target", default="reference:target")
    add("--draft", help="draft model; without it auto has none")
    add("--batches", default="1,2,4,8,16,32")
    add("--slices", default="code,edit,chat,random")
    add("--settings", default="", help="beside plain and auto, such as ngram-auto,draft_model-auto,ngram-5")
    add("--repeats", type=int, default=3)
    add("--max-tokens", type=int, default=32)
    add("--temperature", type=float, help="of all requests; without it, that of their slice")
    add("--top-p", type=float, default=1.0)
    add("--prompt-tokens", type=int, default=64, help="tokens kept of a prompt; an edit is kept whole")
    add("--prompts-per-slice", type=int, default=2, help="requests of a cell with a smaller batch")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--threads", type=int, help="OpenMP threads of each child; all cores without it")
    add("--profile", default="auto", help="what LLM(profile=...) takes; auto measures once in each child")
    add("--seed", type=int, default=0)
    add("--mixed", action="store_true", help="also run the changing load")
    add("--no-grid", action="store_true", help="leave out the grid")
    add("--fixed-drafters", default=_FIXED, help="drafters of the fixed settings of --mixed")
    add("--fixed-numbers", default="2,3,5,8", help="their numbers of draft tokens")
    add("--finalists", type=int, default=3, help="fixed settings that are repeated, the fastest ones")
    add("--phase-s", type=float, default=4.0, help="seconds of plain decoding for each phase of --mixed")
    add("--out", type=Path, required=True)
    add("--name", default="before-after")
    return parser


def _needed(with_trace: bool, without_grid: bool, plan: grid.GridPlan) -> tuple[tuple[str, ...], int]:
    """Slices and the largest batch of everything that is measured."""
    slices, largest = ((), 1) if without_grid else (plan.slices, max(plan.batches))
    if with_trace:
        slices = (*slices, *(phase.slice for phase in MIXED))
        largest = max(largest, *(phase.batch for phase in MIXED))
    return tuple(dict.fromkeys(slices)), largest


def _fixed_settings(chosen: argparse.Namespace) -> tuple[str, ...]:
    drafters = [name for name in _list(chosen.fixed_drafters) if chosen.draft or name not in _NEEDS_DRAFT]
    return tuple(f"{name}-{number}" for name in drafters for number in _list(chosen.fixed_numbers))


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _found(model: str) -> str:
    """A folder as an absolute path, since children may run elsewhere; a name as it is."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _without_folders(words: list[str]) -> list[str]:
    """The command for the record: of folders their last part."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def _tell(words: str) -> None:
    print(time.strftime("%H:%M:%S"), words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
