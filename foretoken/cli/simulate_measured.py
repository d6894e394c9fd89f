"""`foretoken simulate --measure`: options checked, progress shown, the result printed and written."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from foretoken.bench.report import check_folder, check_name
from foretoken.bench.validate_report import MeasureOptions, Validation, print_validation, run_validation, write_validation
from foretoken.cli.common import print_json
from foretoken.errors import ConfigError


def measure_for_real(options: MeasureOptions, out: Path | None, name: str, as_json: bool) -> None:
    """Run the comparison; what is being done goes to stderr, as a bar on a terminal and as lines elsewhere.

    Raises:
        ForetokenError: see `run_validation`, or a result that cannot be written.
    """
    check_name(name)
    if options.threads is not None and options.threads < 1:
        raise ConfigError("threads", options.threads, "must be at least 1; leave it out for torch's own number")
    if out is not None:
        check_folder(out)
    found = _with_progress(options)
    file = None if out is None else write_validation(found, out, name)
    if as_json:
        print_json(found.as_dict() | {"file": None if file is None else str(file)})
    else:
        print_validation(found, file)


def _with_progress(options: MeasureOptions) -> Validation:
    console, said = Console(stderr=True), ""
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(words: str, finished: int) -> None:
            nonlocal said
            if words != said and not console.is_terminal:
                console.print(words, markup=False, highlight=False)
            said = words
            bar.update(task, advance=finished, description=words)

        return run_validation(options, shlex.join(["foretoken", *sys.argv[1:]]), tell)
