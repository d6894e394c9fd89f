"""Decoding alone and beside a process that loops, with threads that spin or sleep while they wait for each other.

    python -m studies.neighbour --target T --draft D --peers transformers,llama.cpp,llama.cpp-ngram-mod-8 \\
        --keep lines.jsonl --out neighbour.json

One worker per way of waiting is kept, since OpenMP reads it when torch is imported. Turns are interleaved: in each,
every drafter answers one prompt in every worker, alone and beside the loop. Drafters are reset before each answer,
so that none meets its own earlier one. Every answer is written to `--keep` at once; a run that was stopped goes on from
there. The record holds all answers, the table their medians.

`--peers` names settings of other engines as `foretoken bench speed --backends` prints them. llama.cpp is a program of
its own, which each answer starts with the variables of its worker: built with OpenMP, its threads wait as they say.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from foretoken.backend.answering import Drafting, Question
from foretoken.backend.registry import BACKENDS, BackendOptions, open_backend
from foretoken.errors import InputError
from foretoken.machine.neighbours import OtherLoad
from foretoken.machine.threads import sleeping
from foretoken.measure.kept import KeptFile
from foretoken.measure.speed.contenders import Other
from studies.command import exit_code_of, record, record_file, words

PLAIN = "plain"
DRAFTERS = (PLAIN, "ngram", "draft_model", "auto")
# How threads wait: the variables of each; `short` spins for some tens of microseconds, of GNU's runtime only.
WAITING: Mapping[str, Mapping[str, str]] = {"spin": {}, "sleep": sleeping(), "short": {"GOMP_SPINCOUNT": "10000"}}
_OF_OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LOOP = "while True: pass"
PROMPTS = (
    "def fibonacci(n):\n",
    "Once upon a time there was a small",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name":',
    "import os\nimport sys\n\ndef main():\n",
)


def main() -> int:
    """Measure, print the table, and with `--out` write the record."""
    options = _parser().parse_args()
    if options.worker:
        work(options)
        return 0
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    peers_of(options)  # names that are not here, and files that have to be converted first
    about = {name: getattr(options, name) for name in ("target", "draft", "threads", "max_tokens", "drafters", "peers")}
    kept = KeptFile(options.keep, "study neighbour", about | {"waiting": options.waiting}, option="keep")
    try:
        measure(options, kept)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {options.keep}", file=sys.stderr)
        return 130
    finally:
        kept.close()
    rows = summary(kept.lines)
    print_table(rows)
    record("neighbour", about | {"rows": rows, "lines": kept.lines}, options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies.neighbour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="reference:target")
    parser.add_argument("--draft", default="reference:draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafters", type=words, default=DRAFTERS)
    parser.add_argument("--peers", type=words, default=(), help="settings of other engines")
    parser.add_argument("--waiting", type=words, default=tuple(WAITING), help=f"some of {', '.join(WAITING)}")
    parser.add_argument("--keep", type=Path, default=Path("neighbour.jsonl"), help="every answer, as it is measured")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def measure(options: argparse.Namespace, kept: KeptFile) -> None:
    """Every answer that is not there yet."""
    done = {_key(line) for line in kept.lines}
    jobs = [
        {"repeat": repeat, "prompt": prompt, "drafter": drafter, "waiting": waiting, "beside": beside}
        for repeat, prompt in product(range(options.repeats), range(options.prompts))
        for beside, drafter, waiting in product((False, True), (*options.drafters, *options.peers), options.waiting)
    ]
    left = [job for job in jobs if _key(job) not in done]
    workers = {name: _start(name, options) for name in options.waiting} if left else {}
    try:
        for number, job in enumerate(left, start=1):
            with _neighbour(bool(job["beside"])):
                line = job | _ask(workers[str(job["waiting"])], job)
            kept.append(line)
            print(f"{number} of {len(left)}: {_key(job)} {line['tokens_per_s']:.2f} tokens/s", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("repeat", "prompt", "drafter", "waiting", "beside"))


@contextmanager
def _neighbour(is_there: bool) -> Iterator[None]:
    """A process that loops, if there is to be one."""
    if not is_there:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _LOOP])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _start(waiting: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A worker whose threads wait so, its models loaded and warm."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_OPENMP}
    environment |= {**WAITING[waiting], "OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, "-m", "studies.neighbour", "--worker", "--target", options.target]
    command += ["--draft", options.draft, "--max-tokens", str(options.max_tokens)]
    command += ["--drafters", ",".join(options.drafters), "--peers", ",".join(options.peers)]
    command += ["--threads", str(options.threads)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    _line_of(process)
    return process


def _ask(worker: subprocess.Popen[str], job: Mapping[str, Any]) -> dict[str, Any]:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(job) + "\n")
    worker.stdin.flush()
    return _line_of(worker)


def peers_of(options: argparse.Namespace) -> dict[str, Other]:
    """The settings of other engines that `--peers` names.

    Raises:
        InputError: one of them is not to be had here.
        ForetokenError: a checkpoint cannot be converted for llama.cpp.
    """
    ends = {name.rpartition("-")[2] for name in options.peers}
    numbers = sorted(int(end) for end in ends if end.isdigit())
    by_name: dict[str, Other] = {}
    for engine in dict.fromkeys(_engine_of(name) for name in options.peers):
        backend = open_backend(
            BackendOptions(engine, options.target, options.draft, device="cpu", threads=options.threads)
        )
        others = (Other(backend, drafting) for drafting in (Drafting(), *backend.draftings(numbers)))
        by_name |= {other.setting.name: other for other in others}
    for name in options.peers:
        if name not in by_name:
            raise InputError("peers", name, f"choose from {', '.join(by_name)}")
    return {name: by_name[name] for name in options.peers}


def _engine_of(name: str) -> str:
    """The backend of a setting called `name`."""
    for engine in BACKENDS:
        if name == engine or name.startswith(f"{engine}-"):
            return engine
    raise InputError("peers", name, f"begin with one of {', '.join(BACKENDS)}")


def _line_of(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended with exit code {worker.wait()}; its message is above")
    found: dict[str, Any] = json.loads(line)
    return found


def work(options: argparse.Namespace) -> None:
    """A worker: a job as a line of JSON comes in, what its answer took goes out."""
    from foretoken import LLM, SamplingParams, SpecConfig

    def spec(drafter: str) -> SpecConfig:
        if drafter == PLAIN:
            return SpecConfig(None)
        return SpecConfig(drafter, draft=options.draft if drafter in ("draft_model", "auto") else None)

    llm = LLM(options.target, spec=spec("auto"), profile="off")
    peers, number = peers_of(options), itertools.count()

    def answered(drafter: str, text: str) -> dict[str, Any]:
        """Tokens behind the first pass, per second, and what was counted."""
        params = SamplingParams(
            max_tokens=options.max_tokens, temperature=0.0, ignore_eos=True, tenant=f"answer {next(number)}"
        )
        if drafter in peers:
            answer = peers[drafter].ask(_question(text, options.max_tokens))
            counted: Any = answer
            speed = answer.decode_tokens / answer.decode_s
        else:
            llm.reset_drafters(spec(drafter))
            counted = llm.generate(text, params, spec(drafter))[0].stats
            speed = counted.tokens_per_s
        counts = ("num_emitted", "num_drafted", "draft_s", "verify_s")
        return {"tokens_per_s": speed} | {name: getattr(counted, name) for name in counts}

    for drafter in (*options.drafters, *options.peers):
        answered(drafter, PROMPTS[0])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        load = OtherLoad()
        found = answered(job["drafter"], PROMPTS[job["prompt"] % len(PROMPTS)])
        print(json.dumps(found | {"others_cores": load.cores()}), flush=True)


def _question(text: str, max_tokens: int) -> Question:
    return Question(text, max_tokens=max_tokens, ignore_eos=True)


def summary(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Median tokens per second by drafter, way of waiting and neighbour, and over two others of the same turn: our
    plain decoding, and the same drafter alone.
    """
    alone = {_key(line): line for line in lines if not line["beside"]}
    plain = {_key({**line, "drafter": PLAIN}): line for line in lines if line["drafter"] == PLAIN}
    rows = []
    for drafter, waiting, beside in dict.fromkeys((one["drafter"], one["waiting"], one["beside"]) for one in lines):
        own = [one for one in lines if (one["drafter"], one["waiting"], one["beside"]) == (drafter, waiting, beside)]
        ratios = _over(own, [plain.get(_key({**one, "drafter": PLAIN})) for one in own])
        kept = _over(own, [alone.get(_key({**one, "beside": False})) for one in own])
        speeds = [one["tokens_per_s"] for one in own]
        rows.append(
            {
                "drafter": drafter,
                "waiting": waiting,
                "beside": beside,
                "num_answers": len(own),
                "tokens_per_s": statistics.median(speeds),
                "least": min(speeds),
                "most": max(speeds),
                "over_plain": ratios,
                "over_alone": kept,
            }
        )
    return rows


def _over(own: Sequence[Mapping[str, Any]], bases: Sequence[Mapping[str, Any] | None]) -> float | None:
    """The median ratio of speeds, over the answers whose base was measured."""
    pairs = zip(own, bases, strict=True)
    ratios = [one["tokens_per_s"] / base["tokens_per_s"] for one, base in pairs if base is not None]
    return statistics.median(ratios) if ratios else None


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each drafter, way of waiting and neighbour."""
    wide = max([12, *(len(row["drafter"]) for row in rows)])
    heads = f"{'tokens/s':>9} {'from':>8} {'to':>8} {'over plain':>11} {'over alone':>11}"
    print(f"{'drafter':<{wide}} {'waiting':<8} {'neighbour':<10} {heads}")
    for row in rows:
        ratios = ("" if row[name] is None else f"{row[name]:.2f}" for name in ("over_plain", "over_alone"))
        print(
            f"{row['drafter']:<{wide}} {row['waiting']:<8} {'loop' if row['beside'] else 'none':<10} "
            f"{row['tokens_per_s']:9.2f} {row['least']:8.2f} {row['most']:8.2f} "
            + " ".join(f"{ratio:>11}" for ratio in ratios)
        )


if __name__ == "__main__":
    sys.exit(main())
