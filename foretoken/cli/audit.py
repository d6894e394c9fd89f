"""`foretoken audit`: tests that target, drafter and rule answer as the target alone would, with a report."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, fetch_models, is_set, progress, was_given
from foretoken.cli.flags import check_sources, config_from, named_drafter, spec_from, takes
from foretoken.cli.measuring import (
    BackendOption,
    ServedModelOption,
    command_line,
    finish,
    given_where_set,
    refuse_of_engines,
    refuse_set,
    require_pass,
    source_of,
)
from foretoken.config import SpecConfig
from foretoken.field_text import wholes, words
from foretoken.measure.audit.options import AuditOptions, Prompt, read_prompts
from foretoken.measure.report import Report
from foretoken.measure.workload import SLICES, in_turns, slices
from foretoken.option import options_of, setting_name

if TYPE_CHECKING:
    from foretoken.measure.audit.options import BackendAuditOptions

# With nothing named: the controller may decide not to draft, which tests nothing.
_DRAFTER, _NUM_DRAFT = "ngram", "5"
_ASKED = ("drafter", "num_draft", "draft")  # settings of drafting that another engine may take
_OF_TARGET = ("dtype", "weights", "device", "cache_tokens", "num_seeds")


@takes(SpecConfig)
@takes(AuditOptions)
def audit(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt per line, or JSON lines with `prompt`, `prompt_ids` or `messages`.")
    ] = None,
    backend: BackendOption = None,
    against_backend: Annotated[
        str | None, typer.Option(help="With --backend: compare greedy answers with those of this engine.")
    ] = None,
    model: ServedModelOption = None,
    num_seeds: Annotated[
        int, typer.Option(help="With --backend and --target: first tokens sampled at temperature 1.")
    ] = 256,
    as_json: JsonOption = False,
) -> None:
    """Check greedy equality, the distribution of sampled tokens, seeds, logits and cache; exit code 5 if anything
    fails.

    Where no drafter, draft or head is named, it is ngram with 5 draft tokens. Ctrl-C reports the checks that were made
    until then.
    """
    options = _options(context) if backend is None else _backend_options(context, backend)
    report = _run(options, prompts)
    finish(report, as_json)
    require_pass("audit", report.results["checks"], report.passed)


def _options(context: typer.Context) -> AuditOptions:
    refuse_set(context, ("model", "against_backend", "num_seeds"), "goes with --backend; leave it out")
    given = dict(context.params)
    if named_drafter(given) is None:
        given["drafter"] = _DRAFTER
        if not was_given(context, "num_draft"):
            given["num_draft"] = _NUM_DRAFT
    spec = spec_from(given)
    options = config_from(AuditOptions, given, spec=spec)
    fetch_models(given["target"])
    check_sources(spec)
    return options


def _backend_options(context: typer.Context, backend: str) -> BackendAuditOptions:
    """What to ask which backend, and what judges its answers: a target that is named, or that the engine loads."""
    from foretoken.measure.audit.options import BackendAuditOptions

    others = [setting_name(one) for one, _ in options_of(SpecConfig) if setting_name(one) not in _ASKED]
    refuse_set(context, [*others, "numerics"], f"is chosen by {backend} itself; leave it out")
    source = source_of(context, backend)
    second = context.params["against_backend"]
    against = None if second is None else source_of(context, second, "against_backend")
    target = context.params["target"]
    if source.is_address:
        refuse_of_engines(context, backend, _ASKED)
        if not is_set(context, "target"):
            target = None
            refuse_set(context, _OF_TARGET, "is of a target that judges the answers: give --target, or leave it out")
        else:
            fetch_models(target)
    if not (source.is_address or (against is not None and against.is_address)):
        refuse_set(context, ("model",), "names the model at an address; the target is what this engine loads")
    given = given_where_set(context, ("num_draft", "drafter"))
    named = given.get("drafter")
    return config_from(
        BackendAuditOptions,
        given,
        source=source,
        against=against,
        target=target,
        draftings=None if named is None else words("drafter", named),
        num_draft=wholes("num_draft", given.get("num_draft", _NUM_DRAFT))[0],
    )


def _run(options: AuditOptions | BackendAuditOptions, prompts: Path | None) -> Report:
    from foretoken.measure.audit.options import BackendAuditOptions
    from foretoken.measure.audit.run import run_audit, run_backend_audit

    texts = _own_prompts(options.num_prompts) if prompts is None else read_prompts(prompts)
    with progress("auditing") as status:

        def tell(doing: str) -> None:
            status.update(f"auditing: {doing}")

        if isinstance(options, BackendAuditOptions):
            return run_backend_audit(options, texts, command_line(), tell)
        return run_audit(options, texts, command_line(), tell=tell)


def _own_prompts(count: int) -> list[Prompt]:
    every = slices(per_slice=-(-min(count, 50) // len(SLICES)))
    return [prompt.text for prompt in in_turns(every, lambda prompt: prompt.slice)[:count]]
