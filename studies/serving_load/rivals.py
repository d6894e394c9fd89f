"""The same requests to our server and llama.cpp's, plain and speculating, at a sweep of arrival rates.

    python -m studies.serving_load.rivals --target FILE.gguf --draft DRAFT.gguf --rates 0.1,0.2,0.3,0.4 \\
        --servers foretoken,foretoken-auto,llama.cpp,llama.cpp-draft-simple-8 --keep rivals --out rivals.json

A server's name is its engine, for plain decoding, or ENGINE-DRAFTER, or ENGINE-DRAFTER-NUMBER of drafted tokens; the
drafters of llama.cpp are its `--spec-type`s. The servers run one after the other on this machine, each with `--threads`
threads and room for `--slots` requests. Requests arrive in an open loop (`foretoken bench load --url`); their prompts
are of `--slices` in turn, from the standard library, or with `--prompts` from files, sent as a user's messages. For
each rate the servers are compared at the 95th percentile of a request's time that the first plain server had there: the
most tokens per second that each reached, at any rate, with a percentile no longer than that.

`--keep` is a folder with all requests as they end; the same command goes on with a run that was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foretoken.backend.llama_cpp import KINDS
from foretoken.backend.llama_programs import LLAMA_CPP
from foretoken.errors import InputError, UnavailableError
from foretoken.files import check_folder
from foretoken.measure.kept import KeptFile
from foretoken.measure.prompts import choose, fit, read_prompts
from foretoken.measure.url.plan import UrlOptions
from foretoken.measure.url.run import run_url
from foretoken.measure.workload import in_turns, source_of
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer
from studies.command import INTERRUPTED, end, exit_code_of, record, record_file, words
from studies.gguf_rivals.files import programs
from studies.gguf_rivals.prompts import SLICES, prompt_lines
from studies.real_batches.asking import as_asked
from studies.serving_load.client import get

OURS = "foretoken"
_MODEL, _PROMPTS = "served", "prompts.jsonl"
_WARM_UP = 2
_OF_RUN = (
    *("target", "draft", "rates", "requests", "slices", "prompt_tokens", "max_tokens", "slots", "context", "threads"),
    "seed",
)
_START_S = 600.0  # for loading and, in ours, measuring what a step costs


def main() -> int:
    """Measure, print the tables, and with `--out` write the record; the exit code."""
    return exit_code_of(lambda: _run(_parser().parse_args()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies.serving_load.rivals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="a GGUF file, so that both engines read the same")
    parser.add_argument("--draft", help="the same for a draft model")
    parser.add_argument("--servers", type=words, default=(OURS, f"{OURS}-auto", LLAMA_CPP))
    parser.add_argument("--rates", type=_numbers, default=(0.1, 0.2, 0.3, 0.4), help="requests a second")
    parser.add_argument("--requests", type=int, default=40, help="of each rate")
    parser.add_argument("--prompts", type=Path, help="file or folder of prompts; without it, the standard library's")
    parser.add_argument("--slices", type=words, default=SLICES, help="of the prompts")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16, help="requests that run at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens that each of them may have")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8731)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("rivals"), help="a folder")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in words(text))


def _run(options: argparse.Namespace) -> int:
    commands = {name: command_of(name, options) for name in options.servers}
    options.keep.mkdir(parents=True, exist_ok=True)
    check_folder(options.keep)
    about = {name: getattr(options, name) for name in _OF_RUN} | {"chat": options.prompts is not None}
    _write_prompts(options)
    kept = KeptFile(options.keep / "servers.jsonl", "study serving_load", about, option="keep")
    known = {line["server"] for line in kept.lines}
    is_stopped = False
    try:
        for name, command in commands.items():
            if name not in known:
                rows, is_stopped = _measure(name, command, options)
                if is_stopped:
                    break
                line = {"server": name, "command": command, "rows": rows}
                kept.append(line)
    except KeyboardInterrupt:  # while a server starts; during a load it is a part of the report
        is_stopped = True
    finally:
        kept.close()
    found = {line["server"]: line["rows"] for line in kept.lines if line["server"] in options.servers}
    at_p95 = compared(found)
    print_tables(found, at_p95)
    results = about | {"servers": kept.lines, "at_p95_of_plain": at_p95, "is_stopped": is_stopped}
    record("serving_load.rivals", results, options.out)
    return INTERRUPTED if is_stopped else 0


def _write_prompts(options: argparse.Namespace) -> None:
    """As many prompts as there are requests, of all slices in turn (`in_turns`)."""
    tokenizer = load_tokenizer(model_folder(options.target))
    if tokenizer is None:
        raise InputError("target", options.target, "has no tokenizer, and requests are texts")
    count = -(-(_WARM_UP + options.requests * len(options.rates)) // len(options.slices))
    if options.prompts is None:
        lines = prompt_lines(tokenizer, options.slices, count, options.prompt_tokens)
    else:
        chosen, _ = choose(read_prompts(options.prompts), options.slices, count)
        room, asked = options.prompt_tokens, [as_asked(prompt) for prompt in chosen]
        fitted, _ = fit(asked, lambda text: len(tokenizer.encode(text, add_special_tokens=False)), room)
        named = in_turns((replace(prompt, name=f"{prompt.slice}:{prompt.name}") for prompt in fitted), source_of)
        lines = [{"prompt": prompt.text, "name": prompt.name} for prompt in named]
    texts = (json.dumps(line | {"slice": "mixed"}) + "\n" for line in lines)
    (options.keep / _PROMPTS).write_text("".join(texts), encoding="utf-8")


def command_of(name: str, options: argparse.Namespace) -> list[str]:
    """The command line of a server.

    Raises:
        InputError: a name that means none.
        ForetokenError: llama.cpp's programs, or a model, are not there.
    """
    engine = next((known for known in (OURS, LLAMA_CPP) if name == known or name.startswith(f"{known}-")), None)
    if engine is None:
        raise InputError("servers", name, f"begin with {OURS} or {LLAMA_CPP}")
    drafter, number = _drafter_of(name.removeprefix(engine).removeprefix("-"))
    target, draft = str(model_folder(options.target)), options.draft and str(model_folder(options.draft))
    if engine == OURS:
        command = [sys.executable, "-m", "foretoken", "serve", "--target", target, "--port", str(options.port)]
        command += ["--name", _MODEL, "--json", "--request-log", "none", "--max-batch-size", str(options.slots)]
        command += ["--drafter", drafter or "none"]
        command += ["--draft", draft] if draft and drafter in ("auto", "draft_model") else []
        return command + (["--num-draft", str(number)] if number is not None else [])
    command = [str(programs().program("llama-server")), "-m", target, "--port", str(options.port), "-a", _MODEL]
    command += ["-t", str(options.threads), "-np", str(options.slots), "-c", str(options.slots * options.context)]
    if drafter:
        command += speculation(drafter, number)
        command += ["-md", draft, "-td", str(options.threads)] if draft and drafter.startswith("draft") else []
    return command


def _drafter_of(words_of_name: str) -> tuple[str, int | None]:
    """`ngram-mod-8` is ("ngram-mod", 8)."""
    drafter, _, end = words_of_name.rpartition("-")
    return (drafter, int(end)) if drafter and end.isdigit() else (words_of_name, None)


def _measure(name: str, command: Sequence[str], options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """A row for each rate, and whether the run was interrupted."""
    given = UrlOptions(
        f"http://127.0.0.1:{options.port}",
        model=_MODEL,
        rates=options.rates,
        requests=options.requests,
        prompts=options.keep / _PROMPTS,
        prompts_per_slice=_WARM_UP + options.requests * len(options.rates),
        warmup=_WARM_UP,
        max_tokens=options.max_tokens,
        seed=options.seed,
        chat=options.prompts is not None,
        resume=options.keep / f"{name}.jsonl",
    )
    with running(name, command, options):
        report = run_url(given, "python -m studies.serving_load.rivals")
    return [asdict(row) for row in report.results["rows"]], bool(report.results["interrupted"])


@contextmanager
def running(name: str, command: Sequence[str], options: argparse.Namespace) -> Iterator[None]:
    """A server that answers, until the end of the block; its own words go into a file of `--keep`.

    Raises:
        UnavailableError: it ended, or was not ready in ten minutes.
    """
    log = options.keep / f"{name}.log"
    Console(stderr=True).line(f"starting {name}")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    with log.open("wb") as file:
        process = subprocess.Popen(list(command), env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        path = "/ready" if name.startswith(OURS) else "/health"
        asyncio.run(_wait(process, options.port, path, name, log))
        yield
    finally:
        end(process)


async def _wait(process: subprocess.Popen[bytes], port: int, path: str, name: str, log: Path) -> None:
    began_s = time.monotonic()
    while time.monotonic() - began_s < _START_S:
        if process.poll() is not None:
            raise UnavailableError(f"{name} ended with exit code {process.returncode}; its words are in {log}")
        with suppress(OSError, IndexError):  # not listening yet, or cut off while it starts
            if await get(port, path):
                return
        await asyncio.sleep(0.2)
    raise UnavailableError(f"{name} was not ready in {_START_S:g} s; its words are in {log}")


def compared(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """For each rate of the first plain server: the most tokens per second of every server within its 95th percentile
    of the whole time of a request; None where no rate of a server is within.
    """
    plain = next((name for name in found if name in (OURS, LLAMA_CPP)), None)
    if plain is None:
        return []
    rows = []
    for base in found[plain]:
        limit_s = _p95(base)
        if limit_s is None:
            continue
        within = {
            name: max((_tokens_per_s(row) for row in rates if (_p95(row) or limit_s + 1) <= limit_s), default=None)
            for name, rates in found.items()
        }
        own = within[plain]
        assert own is not None, "the rate itself is within"
        ratios = {name: None if speed is None else speed / own for name, speed in within.items()}
        rows.append(
            {"plain": plain, "rate": base["setting"], "p95_s": limit_s, "tokens_per_s": within, "ratio": ratios}
        )
    return rows


def _p95(row: Mapping[str, Any]) -> float | None:
    """None where a request failed: a percentile of the others would flatter."""
    return row["e2e_s"]["p95"]["value"] if row["num_ok"] == row["num_requests"] else None


def _tokens_per_s(row: Mapping[str, Any]) -> float:
    return float(row["tokens_per_s"]["value"])


def print_tables(found: Mapping[str, Sequence[Mapping[str, Any]]], at_p95: Sequence[Mapping[str, Any]]) -> None:
    """One line for each server and rate, then the comparison at each 95th percentile."""
    for name, rows in found.items():
        for row in rows:
            p95 = _p95(row)
            shown = "   failed" if p95 is None else f"{p95:7.2f} s"
            print(f"{name:<32} {row['setting']:>8} {_tokens_per_s(row):8.2f} tokens/s  p95 {shown}")
    for line in at_p95:
        figures = ", ".join(
            f"{name} " + ("none" if speed is None else f"{speed:.2f} ({line['ratio'][name]:.2f}x)")
            for name, speed in line["tokens_per_s"].items()
        )
        print(f"within {line['p95_s']:.2f} s, the p95 of {line['plain']} at {line['rate']}: {figures}")


def speculation(kind: str, num_draft: int | None) -> tuple[str, ...]:
    """Arguments of llama.cpp's programs for a way to speculate that is a `--spec-type`, at `num_draft` drafted tokens
    (None: as the program comes); the server takes the same.

    Raises:
        InputError: no such way.
    """
    arguments = KINDS[kind].arguments(num_draft) if kind in KINDS else ()
    if "--spec-type" not in arguments:
        raise InputError("kind", kind, f"choose from {', '.join(KINDS)}, but none with a program of its own")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
