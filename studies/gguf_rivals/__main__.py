"""Our engine and llama.cpp on the same GGUF files.

    python -m studies.gguf_rivals --files A.gguf,B.gguf --threads 2 --keep rivals.jsonl --out rivals.json

`bits`: bits per byte of a held-out text. `rows`: milliseconds of a pass by rows, the engines in turns. Each measurement
is written to `--keep` at once; the same command goes on with a run that was stopped. FORETOKEN_LLAMA_CPP names the
folder of llama.cpp's programs.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.backend.llama_programs import LLAMA_CPP, LlamaCpp
from foretoken.errors import InputError
from foretoken.files import read_text
from foretoken.machine.identity import machine
from foretoken.machine.neighbours import OtherLoad
from foretoken.measure.kept import KeptFile
from foretoken.measure.progress import progress
from foretoken.model.interface import LanguageModel
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from studies.command import INTERRUPTED, exit_code_of, record, record_file, whole_numbers, words
from studies.gguf_rivals.files import programs
from studies.gguf_rivals.quality import held_out_text, our_nats, scored_bytes, their_nats, windows_of
from studies.gguf_rivals.row_cost import compared, our_times, their_times

BITS, ROWS = PARTS = ("bits", "rows")
_OURS, _THEIRS = "foretoken", LLAMA_CPP
_KEY = ("file", "part", "engine", "turn")
_OF_RUN = ("parts", "context", "windows", "rows", "depth", "repeats", "turns", "threads", "dtype")


def main() -> int:
    """Measure, print the tables, and with `--out` write the record; the exit code."""
    return exit_code_of(lambda: _run(_parser().parse_args()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies.gguf_rivals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--files", type=words, required=True, help="GGUF files")
    parser.add_argument("--parts", type=words, default=PARTS, help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--text", type=Path, help="held-out text; without it, modules of the standard library")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window of the text")
    parser.add_argument("--windows", type=int, default=16, help="at most so many windows")
    parser.add_argument("--rows", type=whole_numbers, default=(1, 2, 4, 8, 16, 32))
    parser.add_argument("--depth", type=int, default=128, help="tokens before a pass")
    parser.add_argument("--repeats", type=int, default=10, help="passes of each number of rows in a turn")
    parser.add_argument("--turns", type=int, default=5, help="of both engines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto", help="of what is not quantised, in our engine")
    parser.add_argument("--keep", type=Path, default=Path("gguf_rivals.jsonl"), help="every measurement as it is made")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    return parser


def _run(options: argparse.Namespace) -> int:
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        raise InputError("parts", unknown[0], f"choose from {', '.join(PARTS)}")
    llama = programs()
    files = [model_folder(name) for name in options.files]
    text = held_out_text() if options.text is None else read_text("text", options.text)
    torch.set_num_threads(options.threads)
    about = {name: getattr(options, name) for name in _OF_RUN}
    about |= {"text_bytes": len(text.encode()), LLAMA_CPP: llama.version(), "machine": machine()}
    kept = KeptFile(options.keep, "study gguf_rivals", about, option="keep")
    is_stopped = False
    try:
        _measure(options, llama, files, text, kept)
    except KeyboardInterrupt:
        is_stopped = True
        print(f"interrupted; the same command goes on from {options.keep}", file=sys.stderr)
    finally:
        kept.close()
    report = summary(kept.lines)
    print_tables(report)
    record("gguf_rivals", about | {"is_stopped": is_stopped, "files": report, "lines": kept.lines}, options.out)
    return INTERRUPTED if is_stopped else 0


def _measure(options: argparse.Namespace, llama: LlamaCpp, files: Sequence[Path], text: str, kept: KeptFile) -> None:
    """Every measurement that is not there yet, file after file."""
    done = {_key(line) for line in kept.lines}
    jobs = [job for path in files for job in _jobs(path, options) if _key(job) not in done]
    with progress(len(jobs)) as tell:
        for path in files:
            bench = _Bench(options, llama, path, text)
            for job in jobs:
                if job["file"] == path.name:
                    tell(" ".join(str(job[name]) for name in _KEY))
                    load = OtherLoad()
                    line = job | bench.measure(job) | {"others": load.share()}
                    kept.append(line)
            del bench
            gc.collect()  # the weights of one file at a time


def _jobs(path: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if BITS in options.parts:
        for engine in (_THEIRS, _OURS):
            yield {"file": path.name, "part": BITS, "engine": engine, "turn": 0}
    if ROWS in options.parts:
        for turn in range(options.turns):
            for engine in (_OURS, _THEIRS):
                yield {"file": path.name, "part": ROWS, "engine": engine, "turn": turn}


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in _KEY)


class _Bench:
    """Both engines on one file; ours is loaded when it is first needed."""

    def __init__(self, options: argparse.Namespace, llama: LlamaCpp, path: Path, text: str) -> None:
        self.options, self.llama, self.path, self.text = options, llama, path, text
        self._model: LanguageModel | None = None

    @property
    def model(self) -> LanguageModel:
        """Our engine's."""
        if self._model is None:
            self._model = open_model(self.path, self.options.dtype, "cpu")
        return self._model

    def measure(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """One measurement."""
        return self._bits(job["engine"]) if job["part"] == BITS else self._rows(job["engine"])

    def _bits(self, engine: str) -> dict[str, Any]:
        tokenizer = self._tokenizer()
        windows = windows_of(tokenizer, self.text, self.options.context, self.options.windows)
        found: dict[str, Any] = {"num_bytes": scored_bytes(tokenizer, windows), "num_windows": len(windows)}
        if engine == _OURS:
            found["nats"] = our_nats(self.model, windows)
        else:
            found["nats"], printed = their_nats(self.llama, self.path, self.text, windows, self.options.threads)
            found |= printed
        return found | {"bits_per_byte": found["nats"] / math.log(2) / found["num_bytes"]}

    def _rows(self, engine: str) -> dict[str, Any]:
        given = self.options
        if engine == _OURS:
            times = our_times(self.model, given.rows, given.depth, given.repeats)
        else:
            times = their_times(self.llama, self.path, given.rows, given.depth, given.repeats, given.threads)
        return {"times_ms": {str(count): values for count, values in times.items()}}

    def _tokenizer(self) -> Tokenizer:
        found = load_tokenizer(self.path)
        if found is None:
            raise InputError("files", str(self.path), "has no tokenizer; leave out the part `bits`")
        return found


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By file: bits per byte of both engines, and the cost by rows over the turns that both have."""
    found: dict[str, dict[str, Any]] = {}
    by_key = {_key(line): line for line in lines}
    for name in dict.fromkeys(line["file"] for line in lines):
        own, other = (by_key.get((name, BITS, engine, 0)) for engine in (_OURS, _THEIRS))
        found[name] = {}
        if own is not None and other is not None:
            bits = [line["bits_per_byte"] for line in (own, other)]
            found[name][BITS] = {"ours": bits[0], "theirs": bits[1], "ours_more_by": bits[0] / bits[1] - 1}
        turns = [
            [by_key[name, ROWS, engine, line["turn"]]["times_ms"] for engine in (_OURS, _THEIRS)]
            for line in lines
            if (line["file"], line["part"], line["engine"]) == (name, ROWS, _OURS)
            and (name, ROWS, _THEIRS, line["turn"]) in by_key
        ]
        if turns:
            ours, theirs = ([{int(rows): ms for rows, ms in turn[side].items()} for turn in turns] for side in (0, 1))
            found[name][ROWS] = compared(ours, theirs)
    return found


def print_tables(report: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each file and measurement."""
    for name, found in report.items():
        if BITS in found:
            bits = found[BITS]
            print(
                f"{name}: {bits['ours']:.5f} bits per byte, llama.cpp {bits['theirs']:.5f} "
                f"({bits['ours_more_by']:+.3%})"
            )
        for row in found.get(ROWS, ()):
            interval = row["theirs_over_ours_interval"]
            shown = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
            print(
                f"{name}: {row['rows']:>2} rows {row['ours_ms']:8.2f} ms ({row['ours_over_one_row']:.2f}x one row), "
                f"llama.cpp {row['theirs_ms']:8.2f} ms ({row['theirs_over_one_row']:.2f}x); "
                f"theirs over ours {row['theirs_over_ours']:.2f}{shown}"
            )


if __name__ == "__main__":
    sys.exit(main())
