"""`foretoken ab`, `ab-live` and `certify`: two backends compared, by speed and by what they answer."""

from __future__ import annotations

import typer

from foretoken.cli.common import JsonOption, fetch_models
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish, require_pass
from foretoken.measure.ab.live import LiveOptions
from foretoken.measure.ab.options import AbOptions
from foretoken.measure.certify.options import CertifyOptions
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


@takes(CertifyOptions)
def certify(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check whether B, which speculates, gives the answers of A; exit code 5 if a check fails.

    Greedy answers, sampled ones, parameters, stop strings, JSON and calls, log-probabilities, streams and counts.
    """
    from foretoken.measure.certify.run import run_certify

    options = config_from(CertifyOptions, context.params)
    fetch_models(options.target, options.draft)
    report = run_certify(options, command_line())
    finish(report, as_json)
    require_pass("certify", report.results["checks"], report.passed)
