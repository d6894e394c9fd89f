"""`foretoken eval`: acceptance by drafter, position and slice, written to a file and compared with an earlier one."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, print_json
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import (
    DEFAULT_DRAFTERS,
    BackendOption,
    ServedModelOption,
    check_common,
    command_line,
    drafters_of,
    given_where_set,
    refuse_of_engines,
    refuse_set,
    source_of,
)
from foretoken.errors import GateError, InputError
from foretoken.field_text import words
from foretoken.files import check_file
from foretoken.measure.eval.options import EvalOptions
from foretoken.measure.options import ALL
from foretoken.measure.speed.options import SpeedOptions
from foretoken.params import check_number
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from foretoken.measure.eval.compare import EvalComparison
    from foretoken.measure.eval.options import BackendEvalOptions
    from foretoken.measure.eval.prompts import EvalPrompt
    from foretoken.measure.eval.result import EvalResult
    from foretoken.measure.eval.run import BackendEvalRun, EvalRun

_Run = TypeVar("_Run", "EvalRun", "BackendEvalRun")
_LINE_EVERY_S = 10.0  # without a terminal
_OF_OUR_ENGINE = ("rule", "allow_lossy", "numerics", "weights")
_OF_BACKENDS = ("drafters", "temperatures")  # whose defaults depend on the engine


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
            help="With --against: exit code 5 if the acceptance rate fell by more than this, and not by chance."
        ),
    ] = 0.05,
    backend: BackendOption = None,
    model: ServedModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance by drafter, position and slice; compare it with an earlier result."""
    import torch

    from foretoken.measure.eval.compare import compare
    from foretoken.measure.eval.run import BackendEvalRun, EvalRun

    check_number("max_lost", max_lost, low=0, high=1)
    names = words("slices", slices)
    if backend is None:
        refuse_set(context, ("model",), "names the model at the address of a --backend; leave it out")
        check_common(context.params)
        options = config_from(EvalOptions, context.params, drafters=drafters_of(context))
        earlier = _earlier(against, out)
        texts = _prompts(prompts, names, options.prompts_per_slice)
        drafters_here = [one.name for one in options.settings]
        run: EvalRun | BackendEvalRun = _comparable(
            EvalRun(options, texts, command_line()), drafters_here, earlier, texts
        )
        if threads is not None:
            torch.set_num_threads(threads)
        _evaluate(run, out, as_json)
        result = run.result()
    else:
        asked = _backend_options(context, backend)
        earlier = _earlier(against, out)
        texts = _prompts(prompts, names, asked.prompts_per_slice)
        with asked.source.open() as opened:
            on_backend = BackendEvalRun(asked, texts, command_line(), opened)
            run = _comparable(on_backend, on_backend.drafters(), earlier, texts)
            _evaluate(run, out, as_json)
            result = run.result()
    found = None if earlier is None else compare(earlier, result, max_lost)
    _report(run, found, out, as_json)
    if found is not None and found.lost:
        changed = f" (changed: {'; '.join(found.changed)})" if found.changed else ""
        raise GateError(f"acceptance fell: {'; '.join(map(str, found.lost))}{changed}")


def _earlier(against: Path | None, out: Path | None) -> EvalResult | None:
    """The result to compare with, once the file to write is known to be another one that can be written."""
    from foretoken.measure.eval.result import read_result

    earlier = None if against is None else read_result(against)
    if out is not None:
        check_file("out", out)
        if against is not None and out.exists() and out.samefile(against):
            raise InputError("out", str(out), "is the earlier result itself; name another file")
    return earlier


def _prompts(path: Path | None, names: tuple[str, ...], count: int) -> list[EvalPrompt]:
    """The library's prompts or those of a file, `count` of each slice."""
    from foretoken.measure.eval.prompts import prompts_of

    return prompts_of(path, names, count)


def _backend_options(context: typer.Context, backend: str) -> BackendEvalOptions:
    """What to ask which backend.

    Raises:
        InputError: an option that the backend does not take; names it.
    """
    from foretoken.measure.eval.options import BackendEvalOptions

    refuse_set(context, _OF_OUR_ENGINE, f"is chosen by {backend} itself; leave it out")
    source = source_of(context, backend)
    if source.is_address:
        refuse_of_engines(context, backend)
        refuse_set(context, ("target",), f"{backend} serves its own model, see --model; leave it out")
    else:
        refuse_set(context, ("model",), "names the model at an address; the target is what this engine loads")
    return config_from(BackendEvalOptions, given_where_set(context, _OF_BACKENDS), source=source)


def _comparable(run: _Run, drafters: Sequence[str], earlier: EvalResult | None, texts: Sequence[EvalPrompt]) -> _Run:
    """The run, which must be comparable with the earlier one.

    Raises:
        InputError: prompts or settings that the earlier result does not have.
    """
    from foretoken.measure.eval.compare import check_comparable

    if earlier is not None:
        check_comparable(earlier, run.options.comparable, drafters, [one.slice for one in texts])
    return run


def _evaluate(run: EvalRun | BackendEvalRun, out: Path | None, as_json: bool) -> None:
    """Run it; whatever ends it early, what is finished is reported."""
    try:
        with _progress(len(run.jobs)) as tell:
            run.run(tell)
    except BaseException:
        if run.samples:
            _report(run, None, out, as_json)
        raise


def _report(run: EvalRun | BackendEvalRun, found: EvalComparison | None, out: Path | None, as_json: bool) -> None:
    """Write the file and print the tables, or the object of the file."""
    from foretoken.measure.eval.report import eval_report
    from foretoken.measure.eval.result import rows_of, write_result
    from foretoken.measure.html import PAGE_KEY
    from foretoken.measure.report import print_report
    from foretoken.measure.write import is_page, write_report

    result, prices = run.result(), run.prices()
    rows = rows_of(result)
    written = result.as_dict(rows)
    if prices:
        written["prices"] = [asdict(one) for one in prices]
    if found is not None:
        written["comparison"] = asdict(found) | {"verdict": found.verdict}
    report = eval_report(result, rows, found, prices)
    if out is not None and is_page(out) and out.suffix.lower() != ".json":
        report = write_report(report, out, out.stem)
    elif out is not None:
        write_result(written | {PAGE_KEY: report.page_values()}, out)
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
        self._num_begun += 1
        now_s = time.monotonic()
        if now_s >= self._next_s or self._num_begun == self._num_answers:
            self._console.line(f"evaluating: answer {self._num_begun} of {self._num_answers} ({name})")
            self._next_s = now_s + _LINE_EVERY_S
