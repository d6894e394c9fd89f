"""`foretoken certify`: whether a backend that speculates answers as one that does not."""

from __future__ import annotations

import typer

from foretoken.cli.common import JsonOption, fetch_models
from foretoken.cli.flags import config_from, takes
from foretoken.cli.measuring import command_line, finish, require_pass
from foretoken.measure.certify.options import CertifyOptions


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
