"""`foretoken simulate --measure`: options checked, progress shown, the result printed and written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.bench.report import check_name
from studies.validation.tables import (
    MeasureOptions,
    Validation,
    print_validation,
    run_validation,
    write_validation,
)
from foretoken.cli.common import print_json
from foretoken.cli.simulate_requests import jobs_of, settings_of, trace_names
from foretoken.files import check_folder
from foretoken.printing.console import Console

_SLICE = "code"  # that prompts are taken from where nothing is said


def measure_for_real(given: Mapping[str, Any]) -> None:
    """Run the comparison that the command's options ask for; what is being done goes to stderr, as a bar on a terminal
    and as lines elsewhere.

    Raises:
        ForetokenError: see `run_validation`, or a result that cannot be written.
    """
    out: Path | None = given["out"]
    check_name(given["name"])
    options = _options(given)
    if out is not None:
        check_folder(out)
    found = _with_progress(options)
    file = None if out is None else write_validation(found, out, given["name"])
    if given["as_json"]:
        print_json(found.as_dict() | {"file": None if file is None else str(file)})
    else:
        print_validation(found, file)


def _options(given: Mapping[str, Any]) -> MeasureOptions:
    names = trace_names(given["trace"])
    settings = (
        given["settings"]
        if given["settings"] is not None
        else "plain,ngram-4" + ("" if given["draft"] is None else ",draft_model-4")
    )
    same = (
        "target",
        "draft",
        "max_batch_size",
        "max_prompt_tokens",
        "max_step_tokens",
        "cache_reserve",
        "cache_tokens",
        "dtype",
        "device",
        "threads",
    )
    return MeasureOptions(
        settings=tuple(settings_of(settings)),
        traces=dict.fromkeys(names) or {given["trace"]: jobs_of(given, _SLICE)},
        seconds=given["trace_seconds"],
        seed=given["seed"],
        **{name: given[name] for name in same},
    )


def _with_progress(options: MeasureOptions) -> Validation:
    console, said = Console(stderr=True), ""
    with console.bar("", None) as bar:

        def tell(words: str, finished: int) -> None:
            nonlocal said
            if words != said and not console.is_terminal:
                console.line(words)
            said = words
            bar.update(words, advance=finished)

        return run_validation(options, shlex.join(["foretoken", *sys.argv[1:]]), tell)
