"""`foretoken ab` and `ab-live`: which of two backends is faster, on the same requests or on live traffic."""

from __future__ import annotations

import typer

from foretoken.cli.common import JsonOption, fetch_models
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish
from foretoken.measure.ab.live import LiveOptions
from foretoken.measure.ab.options import AbOptions
from foretoken.printing.console import Console


@takes(AbOptions)
def ab(context: typer.Context, as_json: JsonOption = False) -> None:
    """Replay requests on two backends in turns, and say which is faster, with an interval that holds at every look.

    A and B get the same requests with the same seed. Ctrl-C reports what was measured until then.
    """
    from foretoken.measure.ab.run import run_ab

    options = config_from(AbOptions, context.params)
    fetch_models(options.target, options.draft)
    finish(run_ab(options, command_line()), as_json)


@takes(LiveOptions)
def ab_live(context: typer.Context, as_json: JsonOption = False) -> None:
    """Divide live traffic between two servers by time, and say which is faster; a proxy that clients talk to.

    All requests go to A as soon as it is clear, or as B fails more of them. Ctrl-C ends the proxy and reports.
    """
    from foretoken.measure.write import write_report
    from foretoken.server.split import run_live

    options = config_from(LiveOptions, context.params)
    found = run_live(options, command_line(), lambda text: Console(stderr=True).line(text))
    finish(write_report(found, options.out, options.name), as_json)
