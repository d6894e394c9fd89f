"""`foretoken bench profile`: the cost of target steps and drafters, for `foretoken simulate` and `--cost-profile`."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.backend.drafting import parse_drafters
from foretoken.cli.bench_options import DEFAULT_DRAFTERS, check_common, command_line, drafters_of
from foretoken.cli.common import DEFAULT_MODEL, JsonOption, print_json
from foretoken.cli.flags import config_from, takes
from foretoken.files import check_folder
from foretoken.measure.speed.options import ProfileOptions, SpeedOptions
from foretoken.measure.write import check_name
from foretoken.printing.console import Console


@takes(SpeedOptions, fields=("name",))
@takes(ProfileOptions)
def profile(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    drafters: str = DEFAULT_DRAFTERS,
    out: Annotated[Path | None, typer.Option(help="Folder for the dated profile.")] = None,
    name: str = "profile",
    as_json: JsonOption = False,
) -> None:
    """Measure the seconds of target steps and of drafters by size, for `foretoken simulate`; under a minute."""
    from foretoken.measure.speed.profile import print_profile, run_profile, write_profile

    check_common(context.params)
    choices = parse_drafters(drafters_of(context))
    check_name(name)
    if out is not None:
        check_folder(out)
    asked = config_from(ProfileOptions, context.params, drafters=choices)
    with Console(stderr=True).bar("measuring", 1.0) as bar:
        found = run_profile(asked, command=command_line(), tell=lambda words, share: bar.update(words, completed=share))
    file = None if out is None else write_profile(found, out, name)
    if as_json:
        print_json(found.as_dict() | {"file": None if file is None else str(file)})
    else:
        print_profile(found, file)
