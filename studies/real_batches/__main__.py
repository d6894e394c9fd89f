"""How fast drafters are end to end on a real model: prompts of several kinds, one and several requests at once.

    python -m studies.real_batches --target MODEL.gguf --prompts FOLDER --per-kind 30 --requests 1,4,16 \\
        --temperatures 0,0.7 --settings plain,auto,ngram,suffix --neighbour none,loop --repeats 2 \\
        --keep real.jsonl --out benchmarks --time-budget 5000

Prompts are read from FOLDER in the formats of `foretoken bench speed --prompts` and sent through the chat template; the
model ends its answers itself. A kind's prompts are divided into turns. In a turn each setting answers the same prompts,
so many at once, waiting ones joining as others end; the order of the settings is reversed at every second turn. Every
turn is written to `--keep` at once: the same command goes on from there, and a run that is stopped, or out of time, has
measured all cells about equally often. The record holds every prompt's tokens and seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM
from foretoken.errors import InputError
from foretoken.machine.identity import features, machine, stepping, versions
from foretoken.machine.threads import names_waiting
from foretoken.measure.kept import KeptFile
from foretoken.measure.progress import progress
from foretoken.measure.prompts import choose, fit, read_prompts, with_template
from foretoken.measure.report import Report, load_average, source_caveats
from foretoken.measure.workload import Prompt, in_turns, source_of
from foretoken.model.names import model_folder
from studies.command import arguments, command_line, run, whole_numbers, words
from studies.real_batches.asking import as_asked
from studies.real_batches.plan import MIXED, Turn, turns
from studies.real_batches.stage import PLAIN, Sampling, Stage, looping_process, spec_of
from studies.real_batches.tables import EXPLAINED, rows, tables

KINDS = ("chat", "code", "edit", "summarisation", "retrieval", "math")
SETTINGS = (PLAIN, "auto", "ngram", "suffix")
NEIGHBOURS = {"none": False, "loop": True}
_CACHE_SPARE = 1.25  # draft tokens, whole blocks, and the reserve that admission keeps free
_WARM_TOKENS = 24


def main() -> int:
    """Measure, print the tables, and with `--out` write the report."""
    return run(measure, _parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = arguments("real_batches", __doc__, "real-batches")
    parser.add_argument("--prompts", type=Path, required=True, help="file or folder of prompts")
    parser.add_argument("--kinds", type=words, default=(*KINDS, MIXED), help=f"slices of the prompts, and {MIXED}")
    parser.add_argument("--per-kind", type=int, default=30, help="prompts of each kind")
    parser.add_argument("--requests", type=whole_numbers, default=(1, 4, 16), help="requests at once")
    parser.add_argument("--temperatures", type=_decimals, default=(0.0,))
    parser.add_argument(
        "--settings",
        type=words,
        default=SETTINGS,
        help="plain, auto, auto-lookups, auto-without-table, DRAFTER or DRAFTER-NUMBER",
    )
    parser.add_argument("--weights", default="auto", help="auto (as stored), int8 or int4")
    parser.add_argument("--head", help="folder, hub id or smollm2-eagle")
    parser.add_argument("--neighbour", type=words, default=("none",), help="none, loop, or both: none,loop")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=2048, help="longer prompts lose their middle")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--time-budget", type=float, help="seconds after which no further turn begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("real-batches.jsonl"), help="every turn, as it is measured")
    return parser


def measure(options: argparse.Namespace) -> Report:
    """Every turn that is not there yet, and the report of all.

    Raises:
        InputError: an option that cannot be honoured.
        ForetokenError: a model or prompts that cannot be used, or another run's `--keep`.
    """
    began, load = time.monotonic(), load_average()
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = (PLAIN, *(name for name in options.settings if name != PLAIN))
    with LLM(options.target, dtype=options.dtype, weights=options.weights, device=options.device, profile="off") as llm:
        prompts, notes = _prompts(options, llm)
    plan = list(
        turns(
            settings,
            {kind: len(own) for kind, own in prompts.items()},
            options.requests,
            options.temperatures,
            [NEIGHBOURS[name] for name in options.neighbour],
            options.repeats,
        )
    )
    kept = KeptFile(options.keep, "study real_batches", _about(options, prompts), option="keep")
    done = {_key(line) for line in kept.lines}
    left = [turn for turn in plan if turn.key not in done]
    try:
        ended = _run(options, prompts, left, kept, began)
    finally:
        kept.close()
    measured = [line for line in kept.lines if _key(line) in {turn.key for turn in plan}]
    found = rows(measured, list(prompts))
    caveats = [*source_caveats(model_folder(options.target), None, load), *notes]
    if ended is not None:
        caveats.append(ended)
    return Report(
        title="Real prompts, several at once",
        command=command_line("real_batches"),
        options=_about(options, prompts),
        results={"rows": [asdict(row) for row in found], "turns": measured, "interrupted": ended == _INTERRUPTED},
        tables=tables(found),
        explained=EXPLAINED,
        caveats=tuple(caveats),
    )


_KEY = ("setting", "kind", "num_requests", "temperature", "neighbour", "part", "repeat")  # of `Turn.key`
_INTERRUPTED = "The run was interrupted: these are the turns until then; the same command goes on."


def _run(
    options: argparse.Namespace,
    prompts: Mapping[str, Sequence[Prompt]],
    left: Sequence[Turn],
    kept: KeptFile,
    began: float,
) -> str | None:
    """Measure turns; why some are missing, None if none is."""
    with ExitStack() as opened, progress(len(left)) as tell:
        stages: dict[int, Stage] = {}
        try:
            for turn in left:
                if options.time_budget is not None and time.monotonic() - began > options.time_budget:
                    return f"The time budget of {options.time_budget:g} s was used up: some turns are missing."
                n = turn.cell.num_requests
                if n not in stages:
                    stages[n] = Stage(opened.enter_context(_open(options, n)), options.draft, options.head)
                    for setting in dict.fromkeys(one.setting for one in left):
                        own = next(iter(prompts.values()))[:n]
                        texts = [prompt.text for prompt in own]
                        stages[n].answer(setting, texts, range(len(own)), Sampling(_WARM_TOKENS, 0.0, 0))
                tell(f"{turn.setting}, {n} at once, {turn.cell.kind}")
                texts = [prompts[turn.cell.kind][place].text for place in turn.places]
                sampling = Sampling(options.max_tokens, turn.cell.temperature, options.seed)
                with looping_process(turn.cell.neighbour):
                    line = stages[n].answer(turn.setting, texts, turn.places, sampling)
                line = dict(zip(_KEY, turn.key, strict=True)) | line
                kept.append(line)
        except KeyboardInterrupt:
            return _INTERRUPTED
    return None


def _open(options: argparse.Namespace, num_requests: int) -> LLM:
    """The engine for so many requests at once, with room for all of them."""
    longest = max(options.max_prompt_tokens, 64) + options.max_tokens
    return LLM(
        options.target,
        dtype=options.dtype,
        weights=options.weights,
        device=options.device,
        max_batch_size=num_requests,
        cache_tokens=int(_CACHE_SPARE * (num_requests + 1) * longest),
    )


def _prompts(options: argparse.Namespace, llm: LLM) -> tuple[dict[str, tuple[Prompt, ...]], list[str]]:
    """The prompts of each kind as the chat template writes them, and notes on what was left out or cut."""
    kinds = [kind for kind in options.kinds if kind != MIXED]
    chosen, notes = choose(read_prompts(options.prompts), kinds, options.per_kind)
    asked = [as_asked(prompt) for prompt in chosen]
    written, cut = fit(
        with_template(asked, llm, chat=True), lambda text: len(llm.encode(text)), options.max_prompt_tokens
    )
    found = {kind: tuple(prompt for prompt in written if prompt.slice == kind) for kind in kinds}
    if MIXED in options.kinds:
        by_turn = in_turns((replace(prompt, name=f"{prompt.slice}:{prompt.name}") for prompt in written), source_of)
        found[MIXED] = tuple(by_turn[: options.per_kind])
    return found, notes + cut


def _about(options: argparse.Namespace, prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    """What a turn's numbers hold for: the options that shape a turn, prompts, code, machine, threads."""
    texts = [prompt.text for own in prompts.values() for prompt in own]
    waiting = names_waiting(os.environ)
    return {
        **{
            name: getattr(options, name)
            for name in ("target", "draft", "head", "dtype", "weights", "device", "max_tokens", "seed")
        },
        "prompts": {kind: [prompt.name for prompt in own] for kind, own in prompts.items()},
        "prompts_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
        "threads": torch.get_num_threads(),
        "waiting": None if waiting is None else f"{waiting}={os.environ[waiting]}",
        "commit": commit(),
        "machine": {**machine(), "stepping": stepping(), "instructions": features()},
        "versions": versions(),
    }


def commit() -> str | None:
    """The commit that is checked out, with `-dirty` behind it where files differ; None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _check(options: argparse.Namespace) -> None:
    for name in options.neighbour:
        if name not in NEIGHBOURS:
            raise InputError("neighbour", name, f"choose from {', '.join(NEIGHBOURS)}")
    for name, values in (("requests", options.requests), ("temperatures", options.temperatures)):
        if not values or min(values) < (1 if name == "requests" else 0):
            raise InputError(name, values, "give numbers separated by commas, requests of at least 1")
    for setting in options.settings:
        spec_of(setting, options.draft, options.head)


def _decimals(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in _KEY)


if __name__ == "__main__":
    sys.exit(main())
