"""Are a drafter's greedy answers those of plain decoding, on a real model: alone, among others, cold and cached?

    python -m studies.equal_answers --target smollm2,FOLDER --draft OTHER.gguf --prompts FOLDER --kinds chat,code \\
        --per-kind 50 --settings plain,auto,ngram,suffix@32 --requests 1,16 --keep equal.jsonl --out benchmarks

Prompts are read from FOLDER in the formats of `foretoken bench speed --prompts`, one kind after another in turn, and
sent through the chat template. `NAME@COUNT` takes the first COUNT of them. Each checkpoint's plain answers, one at a
time behind an empty cache, are what all its other answers are held against, plain ones too; with
`--reference transformers` those of transformers in float32 are. Every turn is written to `--keep` at once: the same
command goes on from there, and `--time-budget` ends it early. Nothing is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM
from foretoken.errors import InputError
from foretoken.machine.identity import features, machine, stepping, versions
from foretoken.measure.kept import KeptFile
from foretoken.measure.progress import Tell, progress
from foretoken.measure.prompts import choose, fit, read_prompts, with_template
from foretoken.measure.report import Report
from foretoken.measure.workload import in_turns, source_of
from foretoken.model.names import model_folder
from studies.command import arguments, command_line, run, whole_numbers, words
from studies.equal_answers.answers import PASSES, PLAIN, Answerer, Tokens, Transformers, Turn, spec_of
from studies.equal_answers.tables import EXPLAINED, differing, rows, tables
from studies.real_batches.__main__ import commit

SETTINGS = (PLAIN, "auto", "ngram", "suffix", "recycling", "predicted", "early_exit", "lookahead", "mix")
REFERENCES = (PLAIN, "transformers")
_PART = 25  # prompts of a turn with one request at a time
_CACHE_SPARE = 1.25  # whole blocks, draft tokens, and the reserve that admission keeps free


def main() -> int:
    """Answer, compare, print the tables, and with `--out` write the report."""
    return run(compare, _parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = arguments("equal_answers", __doc__, "equal-answers")
    parser.add_argument("--prompts", type=Path, required=True, help="file or folder of prompts")
    parser.add_argument("--kinds", type=words, default=("chat", "code", "edit", "math"), help="slices of the prompts")
    parser.add_argument("--per-kind", type=int, default=25, help="prompts of each kind")
    parser.add_argument("--settings", type=words, default=SETTINGS, help="NAME or NAME@COUNT of prompts")
    parser.add_argument("--requests", type=whole_numbers, default=(1, 16), help="requests at once")
    parser.add_argument("--num-draft", type=int, default=5, help="drafted tokens of all settings but auto")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts lose their middle")
    parser.add_argument("--reference", choices=REFERENCES, default=PLAIN, help="whose answers are expected")
    parser.add_argument("--time-budget", type=float, help="seconds after which no further turn begins")
    parser.add_argument("--keep", type=Path, default=Path("equal-answers.jsonl"), help="every turn, as it ends")
    return parser


def compare(options: argparse.Namespace) -> Report:
    """Every turn that is not there yet, and the report of all.

    Raises:
        InputError: an option that cannot be honoured.
        ForetokenError: a model or prompts that cannot be used, or another run's `--keep`.
    """
    began = time.monotonic()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    targets = words(options.target)
    with LLM(targets[0], dtype=options.dtype, device=options.device, profile="off") as llm:
        texts, notes = _texts(options, llm)
    plan = _plan(options, targets, len(texts))
    kept = KeptFile(options.keep, "equal answers", _about(options, texts), "keep")
    try:
        with progress(len(plan)) as tell:
            ended = _run(options, texts, plan, kept, began, tell)
    finally:
        kept.close()
    expected = _expected(options, kept.lines)
    keys = {turn.key for turn in plan}
    lines = [line for line in kept.lines if _key(line) in keys and line["target"] in expected]
    found = rows(lines, expected)
    return Report(
        title="Answers that differ",
        command=command_line("equal_answers"),
        options=_about(options, texts) | {"settings": list(options.settings)},
        results={
            "rows": found,
            "differing": differing(lines, expected),
            "turns": [_hashed(line) for line in lines],
            "interrupted": ended == _INTERRUPTED,
        },
        tables=tables(found),
        explained=EXPLAINED,
        caveats=(*notes, *(() if ended is None else (ended,))),
    )


_INTERRUPTED = "The run was interrupted: these are the turns until then; the same command goes on."


def _plan(options: argparse.Namespace, targets: Sequence[str], num_prompts: int) -> list[Turn]:
    """The reference of each checkpoint before its other turns. Prompts that are answered one at a time are divided into
    parts, so that what is lost with a run that is stopped is short.
    """
    found: dict[Turn, None] = {}
    for target in targets:
        found |= dict.fromkeys(_turns(target, options.reference, 1, num_prompts))
        for word in options.settings:
            setting, _, count = word.partition("@")
            spec_of(setting, options.draft, options.num_draft)
            if count and not (count.isdigit() and 0 < int(count) <= num_prompts):
                raise InputError("settings", word, f"give a number of prompts from 1 to {num_prompts} after the @")
            for num_requests in options.requests:
                found |= dict.fromkeys(_turns(target, setting, num_requests, int(count or num_prompts)))
    return list(found)


def _turns(target: str, setting: str, num_requests: int, num_prompts: int) -> Iterator[Turn]:
    size = _PART if num_requests == 1 else num_prompts
    for first in range(0, num_prompts, size):
        yield Turn(target, setting, num_requests, first, min(first + size, num_prompts))


def _run(
    options: argparse.Namespace,
    texts: Sequence[str],
    plan: Sequence[Turn],
    kept: KeptFile,
    began: float,
    tell: Tell,
) -> str | None:
    """Answer what is not answered yet; why some turns are missing, None if none is."""
    done = {_key(line) for line in kept.lines}
    opened: tuple[str, LLM, Answerer] | None = None
    try:
        for turn in plan:
            tell(f"{turn.target}, {turn.setting}, {turn.num_requests} at once")
            if turn.key in done:
                continue
            if options.time_budget is not None and time.monotonic() - began > options.time_budget:
                return f"The time budget of {options.time_budget:g} s was used up: some turns are missing."
            if opened is None or opened[0] != turn.target:
                if opened is not None:
                    opened[1].close()
                llm = _open(options, turn.target, texts)
                opened = (turn.target, llm, Answerer(llm, options.draft, options.num_draft, options.max_tokens))
            _, llm, answerer = opened
            if turn.setting == "transformers":
                found = _by_transformers(options, llm, turn, texts)
            else:
                expected = _expected(options, kept.lines).get(turn.target, {})
                found = answerer.answer(turn, texts, expected)
            line = {**_names(turn), "answers": found}
            kept.append(line)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        if opened is not None:
            opened[1].close()
    return None


def _open(options: argparse.Namespace, target: str, texts: Sequence[str]) -> LLM:
    """The engine for as many requests at once as any turn has, with room in the cache for all prompts and answers."""
    with LLM(target, dtype=options.dtype, device=options.device, profile="off") as llm:
        num_tokens = sum(len(llm.encode(text)) + options.max_tokens for text in texts)
    return LLM(
        target,
        dtype=options.dtype,
        device=options.device,
        max_batch_size=max(options.requests),
        cache_tokens=int(_CACHE_SPARE * num_tokens),
    )


def _by_transformers(options: argparse.Namespace, llm: LLM, turn: Turn, texts: Sequence[str]) -> list[dict[str, Any]]:
    model = Transformers(model_folder(turn.target), sorted(llm.engine.admission.eos_token_ids))
    return [
        {"place": place, "pass": "cold", "token_ids": list(model.answer(llm.encode(texts[place]), options.max_tokens))}
        for place in range(turn.first, turn.end)
    ]


def _expected(options: argparse.Namespace, lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Tokens]]:
    """The expected answers by checkpoint and place of the prompt, as far as they are there."""
    found: dict[str, dict[int, Tokens]] = {}
    for line in lines:
        if (line["setting"], line["num_requests"]) == (options.reference, 1):
            known = found.setdefault(line["target"], {})
            for one in line["answers"]:
                if one["pass"] == PASSES[0]:
                    known.setdefault(one["place"], tuple(one["token_ids"]))
    return found


def _texts(options: argparse.Namespace, llm: LLM) -> tuple[list[str], list[str]]:
    """The prompts as the chat template writes them, one of each kind in turn, and notes on what was left out or cut."""
    chosen, notes = choose(read_prompts(options.prompts), options.kinds, options.per_kind)
    written, cut = fit(
        with_template(in_turns(chosen, source_of), llm, chat=True),
        lambda text: len(llm.encode(text)),
        options.max_prompt_tokens,
    )
    return [prompt.text for prompt in written], notes + cut


def _about(options: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    """What an answer holds for: the options that shape it, prompts, code, machine, threads."""
    names = ("draft", "dtype", "device", "max_tokens", "num_draft", "kinds", "per_kind", "reference")
    return {
        **{name: getattr(options, name) for name in names},
        "prompts_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "machine": {**machine(), "stepping": stepping(), "instructions": features()},
        "versions": versions(),
    }


def _names(turn: Turn) -> dict[str, Any]:
    return dict(zip(_KEY, turn.key, strict=True))


_KEY = ("target", "setting", "num_requests", "first", "end")


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in _KEY)


def _hashed(line: Mapping[str, Any]) -> dict[str, Any]:
    """A turn for the record: of each answer its length and a digest in place of its tokens."""
    return {name: line[name] for name in _KEY} | {
        "answers": [
            {name: value for name, value in one.items() if name != "token_ids"}
            | {"num_tokens": len(one["token_ids"])}
            | {"answer": hashlib.sha256(repr(tuple(one["token_ids"])).encode()).hexdigest()[:16]}
            for one in line["answers"]
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
