"""Run all parts, one process each: what one lacks, or does not end in its time, is said, and the next one begins.

    benchmarks/gpu/run.sh --source smollm2 --out gpu-results
    benchmarks/gpu/run.sh --device cpu --source DIR --out rehearsal     (small: shows that every part runs)

Every part leaves PART.json (outcome, seconds, command, device, versions, commit), PART.log, and what it measured. The
same command goes on where it stopped: parts that are done on this device at this commit are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.errors import InputError
from foretoken.files import to_json
from foretoken.machine.identity import machine, versions
from foretoken.measure.report import now
from foretoken.printing.console import Console
from studies.command import exit_code_of
from studies.gpu.heads import FULL_HEAD, REHEARSED_HEAD, head_parts
from studies.gpu.parts import FULL, REHEARSAL, Part, parts_of

_REHEARSAL = "on a CPU, to show that the parts run: no number in it is a figure"
_CHECKOUT = Path(__file__).resolve().parents[2]
_LAST_LINES = 3
_LEAST_S = 5.0  # with less time left no part begins


def main() -> int:
    """Run the parts that are not done; 1 if any failed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for records, results and widened checkpoints")
    parser.add_argument("--source", default="smollm2", help="the checkpoint: a folder, a GGUF file, or smollm2")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu: a small rehearsal")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all parts together")
    parser.add_argument("--heads", action="store_true", help="then train an EAGLE-3 head: `studies.gpu.heads`")
    parser.add_argument("--only", help="parts, separated by commas; a name's beginning stands for all that follow")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if re.fullmatch(r"cpu|cuda(:\d+)?", options.device) is None:
        raise InputError("device", options.device, "use cuda, cuda:N, or cpu for a rehearsal")
    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    about = {"device": options.device, "commit": commit(), "machine": machine(), "versions": versions()}
    if options.device == "cpu":
        about["rehearsal"] = _REHEARSAL
    scale = REHEARSAL if options.device == "cpu" else FULL
    parts = parts_of(_absolute(options.source), options.device, scale)
    if options.heads:
        parts += head_parts(options.device, scale, REHEARSED_HEAD if options.device == "cpu" else FULL_HEAD)
    if options.only is not None:
        parts = [part for part in parts if part.name.startswith(tuple(options.only.split(",")))]
    console, ends_s = Console(stderr=True), time.monotonic() + 60 * options.minutes
    outcomes: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        console.line(f"{number} of {len(parts)} {part.name}")
        record = run_part(part, folder, about, ends_s - time.monotonic())
        outcomes[part.name] = record["outcome"]
        reason = f": {record['reason']}" if record["reason"] else ""
        console.line(f"    {record['outcome']}, {record['seconds']:.0f} s{reason}")
    (folder / "summary.json").write_text(to_json({**about, "date": now(), "parts": outcomes}, indent=1) + "\n", "utf-8")
    return 0 if all(outcome == "done" for outcome in outcomes.values()) else 1


def _absolute(source: str) -> str:
    """A folder or file as it is called from any folder; another name as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def run_part(part: Part, folder: Path, about: Mapping[str, Any], left_s: float) -> dict[str, Any]:
    """Run a part unless it is done, for at most `left_s`; its record, which is also written."""
    place = folder / f"{part.name}.json"
    known = _known(place)
    if known is not None and known["outcome"] == "done" and _same(known, about) and _is_there(part, folder):
        return known
    began = time.monotonic()
    if left_s < _LEAST_S:
        outcome, reason = "not reached", "no time was left: run the same command again"
    else:
        outcome, reason = _outcome(part, folder, min(part.limit_s, left_s))
    record = {
        "part": part.name,
        "outcome": outcome,
        "reason": reason,
        "seconds": time.monotonic() - began,
        "limit_s": part.limit_s,
        "command": [Path(word).name if Path(word).is_absolute() else word for word in part.command],
        "date": now(),
        **about,
    }
    place.write_text(to_json(record, indent=1) + "\n", "utf-8")
    return record


def _outcome(part: Part, folder: Path, limit_s: float) -> tuple[str, str]:
    """Run the command, its output in a log; what became of it, and why it is not done."""
    with (folder / f"{part.name}.log").open("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            part.command,
            cwd=_CHECKOUT if part.from_checkout else folder,
            env=_environment(part),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "out of time", f"{limit_s:.0f} s were not enough"
        finally:
            if process.poll() is None:  # interrupts too: nothing of it may go on beside the next part
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        file.seek(0)
        said = [line.strip() for line in file.read().splitlines() if line.strip()]
    if code:
        return "failed", f"exit code {code}: {' | '.join(said[-_LAST_LINES:])}"
    if part.means_nothing_ran is not None and any(line.endswith(part.means_nothing_ran) for line in said):
        return "failed", part.means_nothing_ran
    return ("done", "") if _is_there(part, folder) else ("failed", "it wrote no result")


def _environment(part: Part) -> dict[str, str]:
    """Variables of a part's process. What it says stands in the log at once, also if it is ended."""
    paths = os.pathsep.join([str(_CHECKOUT), os.environ.get("PYTHONPATH", "")])
    found = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    if part.only_gpu is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        found["CUDA_VISIBLE_DEVICES"] = visible[part.only_gpu] if part.only_gpu < len(visible) else str(part.only_gpu)
    return found


def _is_there(part: Part, folder: Path) -> bool:
    return part.out is None or (folder / part.out).exists()


def _known(place: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _same(known: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    return all(known.get(name) == about[name] for name in ("device", "commit", "machine"))


def commit() -> str:
    """The checkout's commit, and a fingerprint of what was changed since in files that it has; `FORETOKEN_COMMIT` where
    it was copied without its history.
    """
    given = os.environ.get("FORETOKEN_COMMIT")
    if given:
        return given
    try:
        found, changes = (
            subprocess.run(one, cwd=_CHECKOUT, capture_output=True, check=True, timeout=10).stdout
            for one in (("git", "rev-parse", "HEAD"), ("git", "diff", "HEAD"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    changed = f"+{hashlib.sha256(changes).hexdigest()[:12]}" if changes else ""
    return found.decode().strip() + changed


if __name__ == "__main__":
    sys.exit(main())
