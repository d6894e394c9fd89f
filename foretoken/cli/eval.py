"""`foretoken eval`: acceptance by drafter, position and slice, written to a file and compared with an earlier one."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.bench.prompts import ALL
from foretoken.bench.speed_options import SpeedOptions
from foretoken.cli.bench_options import DEFAULT_DRAFTERS, check_common, command_line, drafters_of
from foretoken.cli.common import DEFAULT_MODEL, JsonOption, print_json
from foretoken.cli.flags import config_from, takes
from foretoken.errors import GateError, InputError
from foretoken.evaluate.options import EvalOptions
from foretoken.field_text import words
from foretoken.files import check_file
from foretoken.params import check_number
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from foretoken.evaluate.compare import EvalComparison
    from foretoken.evaluate.result import EvalResult
    from foretoken.evaluate.run import EvalRun

_LINE_EVERY_S = 10.0  # without a terminal


@takes(SpeedOptions, fields=("threads",))
@takes(EvalOptions)
def evaluate(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    drafters: str = DEFAULT_DRAFTERS,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File or folder of prompts: JSON lines with `prompt`, `messages` or `prompt_ids` and optional `slice`, "
                "or public evaluation sets."
            )
        ),
    ] = None,
    slices: Annotated[str, typer.Option(help="Kinds of text, separated by commas; or all.")] = ALL,
    threads: int | None = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the result into this JSON file, or a page of it into .html or .md.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with this earlier result.")] = None,
    max_lost: Annotated[
        float,
        typer.Option(
            help="With --against: exit code 5 where the acceptance rate fell by more than this, not by chance."
        ),
    ] = 0.05,
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance by drafter, position and slice; compare it with an earlier result."""
    import torch

    from foretoken.evaluate.compare import compare

    check_common(context.params)
    check_number("max_lost", max_lost, low=0, high=1)
    options = config_from(EvalOptions, context.params, drafters=drafters_of(context))
    earlier = _earlier(against, out)
    run = _run_of(options, earlier, prompts, words("slices", slices))
    if threads is not None:
        torch.set_num_threads(threads)
    _evaluate(run, out, as_json)
    result = run.result()
    found = None if earlier is None else compare(earlier, result, max_lost)
    _report(result, found, out, as_json)
    if found is not None and found.lost:
        changed = f" (changed: {'; '.join(found.changed)})" if found.changed else ""
        raise GateError(f"acceptance fell: {'; '.join(map(str, found.lost))}{changed}")


def _earlier(against: Path | None, out: Path | None) -> EvalResult | None:
    """The result to compare with, once the file to write is known to be another one that can be written.

    Raises:
        StorageError: a file that cannot be read or written.
        InputError: both are the same file.
    """
    from foretoken.evaluate.result import read_result

    earlier = None if against is None else read_result(against)
    if out is not None:
        check_file("out", out)
        if against is not None and out.exists() and out.samefile(against):
            raise InputError("out", str(out), "is the earlier result itself; name another file")
    return earlier


def _run_of(options: EvalOptions, earlier: EvalResult | None, prompts: Path | None, names: tuple[str, ...]) -> EvalRun:
    """The run over the library's prompts or those of a file, which must be comparable with the earlier one.

    Raises:
        InputError: no such slice, or prompts or settings that the earlier result does not have.
    """
    from foretoken.evaluate.compare import check_comparable
    from foretoken.evaluate.prompts import own_prompts, prompts_of
    from foretoken.evaluate.run import EvalRun, settings_of

    count = options.prompts_per_slice
    texts = own_prompts(names, count) if prompts is None else prompts_of(prompts, names, count)
    if earlier is not None:
        drafters_here = [one.name for one in options.settings]
        check_comparable(earlier, settings_of(options), drafters_here, [one.slice for one in texts])
    return EvalRun(options, texts, command_line())


def _evaluate(run: EvalRun, out: Path | None, as_json: bool) -> None:
    """Run it; whatever ends it early, what is finished is reported."""
    try:
        with _progress(len(run.jobs)) as tell:
            run.run(tell)
    except BaseException:
        if run.samples:
            _report(run.result(), None, out, as_json)
        raise


def _report(result: EvalResult, found: EvalComparison | None, out: Path | None, as_json: bool) -> None:
    """Write the file and print the tables, or the object of the file."""
    from foretoken.evaluate.result import write_result
    from foretoken.evaluate.rows import rows_of
    from foretoken.evaluate.tables import eval_report
    from foretoken.measure.text import print_report
    from foretoken.measure.write import is_page, write_report

    rows = rows_of(result)
    written = result.as_dict(rows)
    if found is not None:
        written["comparison"] = asdict(found) | {"verdict": found.verdict}
    report = eval_report(result, rows, found)
    if out is not None and is_page(out) and out.suffix.lower() != ".json":
        report = write_report(report, out, out.stem)
    elif out is not None:
        write_result(written, out)
        report = replace(report, files=(str(out) + ("" if result.complete else " (incomplete)"),))
    if as_json:
        print_json(written)
    else:
        print_report(report)


@contextmanager
def _progress(num_answers: int) -> Iterator[Callable[[str], None]]:
    """A function to call before each answer: a bar on a terminal, elsewhere a line on standard error now and then."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.bar("evaluating", num_answers, counts=True) as bar:
            yield lambda name: bar.update(name, advance=1)
        return
    yield _AnswerLines(console, num_answers)


class _AnswerLines:
    """Prints a line for the first answer, and then one every `_LINE_EVERY_S` seconds: a log shows that it goes on."""

    def __init__(self, console: Console, num_answers: int) -> None:
        self._console, self._num_answers = console, num_answers
        self._num_begun, self._next_s = 0, 0.0

    def __call__(self, name: str) -> None:
        """The next answer begins."""
        self._num_begun += 1
        now_s = time.monotonic()
        if now_s >= self._next_s or self._num_begun == self._num_answers:
            self._console.line(f"evaluating: answer {self._num_begun} of {self._num_answers} ({name})")
            self._next_s = now_s + _LINE_EVERY_S
