"""Command lines of studies: shared arguments, the report printed or written, errors as exit codes."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretoken.errors import ForetokenError, StorageError
from foretoken.files import check_file, to_json
from foretoken.machine.identity import machine, versions
from foretoken.measure.report import Report, now, print_report
from foretoken.measure.write import check_name, check_out, write_report
from foretoken.printing.console import Console

INTERRUPTED = 130
_END_S = 60.0


def arguments(study: str, text: str | None, name: str, drafts: bool = True) -> argparse.ArgumentParser:
    """A parser for `python -m studies.STUDY`, with models, threads and outputs; `name` ends the result's file name.

    `drafts=False`: a study that takes no draft model.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{study}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="reference:target", help="folder, hub id or reference:target")
    if drafts:
        parser.add_argument("--draft", help="folder, hub id or reference:draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="without it, torch's number")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for a dated result, JSON and Markdown; or one .html, .md or .json file",
    )
    parser.add_argument("--name", default=name, help="end of the result's file name")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the tables")
    return parser


def run(study: Callable[[argparse.Namespace], Report], options: argparse.Namespace) -> int:
    """Run a study, write its report to `--out` and print it; the exit code."""
    try:
        check_name(options.name)
        if options.out is not None:
            check_out(options.out)
        report = study(options)
        if options.out is not None:
            report = write_report(report, options.out, options.name)
    except ForetokenError as error:
        Console(stderr=True).message(f"error: {error}", style="red")
        return error.exit_code
    if options.json:
        Console().json_line(report.json_line())
    else:
        print_report(report)
    return INTERRUPTED if report.interrupted else 0


def exit_code_of(study: Callable[[], int]) -> int:
    """What a study returns; its error is printed and becomes its exit code."""
    try:
        return study()
    except ForetokenError as error:
        Console(stderr=True).message(f"error: {error}", style="red")
        return error.exit_code


def end(process: subprocess.Popen[Any]) -> None:
    """Terminate a process that a study started; kill it if it does not end."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def record_file(text: str) -> Path:
    """The file for a study's record, looked at before anything is measured, for argparse."""
    path = Path(text)
    try:
        check_file("--out", path)
    except StorageError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--out: ")) from None
    return path


def record(study: str, results: Mapping[str, Any], out: Path | None) -> dict[str, Any]:
    """`results` with the command, machine, versions and date; also written to the JSON file `out`, if that is set."""
    found = {"command": command_line(study), "machine": machine(), "versions": versions(), "date": now(), **results}
    if out is not None:
        out.write_text(to_json(found, indent=1) + "\n", encoding="utf-8")
    return found


def setting_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a study but its output file, for `record`."""
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items() if name != "out"
    }


def command_line(study: str) -> str:
    """The command of this process, for the report."""
    return shlex.join(["python", "-m", f"studies.{study}", *sys.argv[1:]])


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas, for argparse."""
    return tuple(int(word) for word in text.split(","))


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas, for argparse."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
