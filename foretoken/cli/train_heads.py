"""`foretoken train eagle|medusa|block|adapter|draft`: heads and draft models for the user's own target."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.common import DeviceOption, JsonOption, TargetOption, ThreadsOption, print_json
from foretoken.cli.flags import flag, with_flags
from foretoken.printing.console import Console
from foretoken.train.overrides import read_settings, with_overrides, with_settings

if TYPE_CHECKING:
    from foretoken.train.head_recipes import HeadShape
    from foretoken.train.head_run import HeadPlan
    from foretoken.train.head_trainer import HeadResult
    from foretoken.train.run_job import RunSettings

OutOption = Annotated[Path, typer.Option(help="Folder of the run; a run that was interrupted is continued.")]
AnswersOption = Annotated[
    Path | None,
    typer.Option(
        help="Answers of the target (`foretoken train answers`); without them, the standard library's source is the "
        "text, which only a target with that text's tokenizer reads."
    ),
]
CorpusOption = Annotated[
    Path | None, typer.Option(help="Folder of another run whose tokens of the standard library to use.")
]
TokensOption = Annotated[int | None, typer.Option(help="Tokens to see in the whole run (train.tokens).")]
StateCacheOption = Annotated[
    int | None,
    typer.Option(
        "--state-cache-bytes",
        help="Keep up to so many bytes of the target's hidden states on disk (train.state_cache_bytes); 0: none.",
    ),
]
ConfigOption = Annotated[Path | None, typer.Option(help="File of settings, JSON or TOML.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting, such as train.loss.kind=tv or head.num_layers=2; may be given often."),
]
InitOption = Annotated[
    str | None,
    typer.Option(help="Start from the weights of this head and keep its shape; without it, from new weights."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what memory, time and disk the run would take; train nothing.")
]


_RUN_FLAGS = (
    flag("answers", None, AnswersOption),
    flag("corpus", None, CorpusOption),
    flag("tokens", None, TokensOption),
    flag("state_cache_bytes", None, StateCacheOption),
    flag("config", None, ConfigOption),
    flag("settings", None, SetOption),
    flag("device", "auto", DeviceOption),
    flag("threads", None, ThreadsOption),
    flag("as_json", False, JsonOption),
)


def _with_run_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with the flags that every run has; it reads them from its context."""
    return with_flags(verb, _RUN_FLAGS, after="out")


@_with_run_flags
def eagle(
    context: typer.Context, target: TargetOption, out: OutOption, init: InitOption = None, dry_run: DryRunOption = False
) -> None:
    """Train an EAGLE-3 head (head.version=1: EAGLE-1 and 2): a layer that continues the target's hidden states."""
    from foretoken.train.head_recipes import EagleShape

    _train(context.params, EagleShape())


@_with_run_flags
def medusa(
    context: typer.Context, target: TargetOption, out: OutOption, init: InitOption = None, dry_run: DryRunOption = False
) -> None:
    """Train Medusa heads (head.is_sequential=true: Hydra): small heads on the last hidden state."""
    from foretoken.train.head_recipes import MedusaShape

    _train(context.params, MedusaShape())


@_with_run_flags
def block(
    context: typer.Context, target: TargetOption, out: OutOption, init: InitOption = None, dry_run: DryRunOption = False
) -> None:
    """Train a block drafter: layers that read the target's states and guess several tokens in one pass."""
    from foretoken.train.head_recipes import BlockShape

    _train(context.params, BlockShape())


@_with_run_flags
def adapter(
    context: typer.Context, target: TargetOption, out: OutOption, init: InitOption = None, dry_run: DryRunOption = False
) -> None:
    """Train an early-exit adapter: a small MLP behind the target's first layers, whose output matrix then guesses."""
    from foretoken.train.head_recipes import AdapterShape

    _train(context.params, AdapterShape())


@_with_run_flags
def draft(
    context: typer.Context,
    target: TargetOption,
    out: OutOption,
    init: Annotated[
        str | None, typer.Option(help="Start from this draft model; without it, from random weights.")
    ] = None,
    on_policy: Annotated[
        bool, typer.Option("--on-policy", help="The answers are those of the draft model --init, not of the target.")
    ] = False,
) -> None:
    """Distil a draft model from the target, on its answers or on the draft model's own."""
    from foretoken.train.draft_run import MODEL, DraftJob, DraftSettings, train_draft
    from foretoken.train.parallel import joined_ranks

    given = context.params
    job = DraftJob(**_job_of(given, DraftSettings()), init=init, on_policy=on_policy)
    with joined_ranks() as ranks:
        result = train_draft(job, ranks)
        if ranks.is_first:
            _report(result, out / MODEL, given["as_json"])


def _train(given: Mapping[str, Any], shape: HeadShape) -> None:
    from foretoken.train.head_recipes import usual_training
    from foretoken.train.head_run import HEAD, HeadJob, HeadSettings, plan_head, train_head
    from foretoken.train.parallel import joined_ranks

    job = HeadJob(**_job_of(given, HeadSettings(head=shape, train=usual_training(shape))), init=given["init"])
    if given["dry_run"]:
        _show_plan(plan_head(job), given["as_json"])
        return
    with joined_ranks() as ranks:
        result = train_head(job, ranks)
        if ranks.is_first:
            _report(result, job.out / HEAD, given["as_json"])


def _job_of(given: Mapping[str, Any], usual: RunSettings) -> dict[str, Any]:
    """The fields of `RunJob` from flags by name; torch gets the threads that they ask for."""
    import torch

    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    same = {name: given[name] for name in ("target", "out", "answers", "corpus", "device")}
    return same | {"settings": _settings(usual, given), "command": tuple(sys.argv)}


def _settings(settings: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """The file's settings, then --tokens and --state-cache-bytes, then --set."""
    if given["config"] is not None:
        settings = with_settings(settings, read_settings(given["config"]))
    flags = {name: given[name] for name in ("tokens", "state_cache_bytes") if given[name] is not None}
    if flags:
        settings = with_settings(settings, {"train": flags})
    return with_overrides(settings, given["settings"] or ())


def _report(result: HeadResult, folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(result) | {"model": str(folder)})
        return
    found = result.acceptance
    Console().line(
        f"{folder}: {found.emitted_sampled:.2f} tokens per step at temperature 1 and {found.emitted_greedy:.2f} "
        f"greedy, along held-out text, after {result.tokens:,} tokens"
    )


def _show_plan(plan: HeadPlan, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(plan))
        return
    Console().table(
        ("", "this run would take"),
        [
            ("weights of the head", f"{plan.num_parameters:,}"),
            ("steps, tokens", f"{plan.num_steps:,}, {plan.tokens:,}"),
            ("memory", f"{plan.memory_bytes / 2**20:,.0f} MiB"),
            ("disk", f"{plan.disk_bytes / 2**20:,.0f} MiB"),
            ("hidden states on disk, at most", f"{plan.states_bytes / 2**20:,.0f} MiB"),
            ("time (two steps measured)", f"{plan.train_s / 60:,.1f} min"),
            ("share of the text in the head's vocabulary", f"{plan.coverage:.2%}"),
        ],
    )
