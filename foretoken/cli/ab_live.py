"""`foretoken ab-live`: live traffic divided between two servers, until it is clear which is faster."""

from __future__ import annotations

import typer

from foretoken.cli.common import JsonOption
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish
from foretoken.measure.ab.live import LiveOptions
from foretoken.printing.console import Console


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
