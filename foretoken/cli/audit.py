"""`foretoken audit`: tests that target, drafter and rule answer as the target alone would, with a report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from foretoken.audit.plan import AuditOptions, Prompt, read_prompts
from foretoken.audit.report import AuditReport, audit_report, check_out
from foretoken.bench.workload import SLICES, slices
from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models, print_json, progress, was_given
from foretoken.cli.flags import config_from, takes
from foretoken.cli.spec_options import check_sources, named_drafter, spec_from
from foretoken.config import SpecConfig
from foretoken.errors import GateError
from foretoken.machine.identity import machine, versions
from foretoken.measure.text import print_report
from foretoken.measure.write import write_report

# With nothing named: the controller may decide not to draft, which tests nothing.
_DRAFTER, _NUM_DRAFT = "ngram", "5"


@takes(SpecConfig)
@takes(AuditOptions)
def audit(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt per line, or JSON lines with `prompt`, `prompt_ids` or `messages`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report into this .html, .md or .json file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check greedy equality, the distribution of sampled tokens, seeds, logits and cache; exit code 5 if anything
    fails.
    """
    given = dict(context.params)
    if named_drafter(given) is None:
        given["drafter"] = _DRAFTER
        if not was_given(context, "num_draft"):
            given["num_draft"] = _NUM_DRAFT
    spec = spec_from(given)
    options = config_from(AuditOptions, given, spec=spec)
    fetch_models(target)
    check_sources(spec)
    found = _run(options, prompts, out)
    report = audit_report(found)
    if out is not None:
        report = write_report(report, out, out.stem)
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
    if found.failed:
        raise GateError(
            "audit failed: " + "; ".join(dict.fromkeys(f"{check.name} ({check.where})" for check in found.failed))
        )


def _run(options: AuditOptions, prompts: Path | None, out: Path | None) -> AuditReport:
    """The audit; `out` is checked first."""
    from foretoken.audit.run import run_audit

    if out is not None:
        check_out(out)
    texts = _own_prompts(options.num_prompts) if prompts is None else read_prompts(prompts)
    with progress("auditing") as status:
        return run_audit(
            options,
            texts,
            shlex.join(["foretoken", *sys.argv[1:]]),
            machine(),
            versions(),
            tell=lambda words: None if status is None else status.update(f"auditing: {words}"),
        )


def _own_prompts(count: int) -> list[Prompt]:
    """Prompts of every slice of the bench."""
    found: list[Prompt] = [prompt.text for prompt in slices(per_slice=-(-min(count, 50) // len(SLICES)))]
    return found[:count]
