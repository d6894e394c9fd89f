"""`foretoken train eagle|medusa|block|adapter|draft`: heads and draft models for the user's own target."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from foretoken.cli.common import JsonOption, print_json
from foretoken.cli.flags import config_from, takes
from foretoken.printing.console import Console
from foretoken.train.run_options import (
    DraftOptions,
    HeadOptions,
    RunOptions,
    read_settings,
    with_overrides,
    with_settings,
)

if TYPE_CHECKING:
    from foretoken.train.head_recipes import HeadShape
    from foretoken.train.head_run import HeadPlan, HeadSettings
    from foretoken.train.head_trainer import HeadResult
    from foretoken.train.run_job import RunSettings

_Settings = TypeVar("_Settings", bound="RunSettings")


@takes(HeadOptions)
def eagle(context: typer.Context, as_json: JsonOption = False) -> None:
    """Train an EAGLE-3 head (head.version=1: EAGLE-1 and 2): a layer that continues the target's hidden states."""
    from foretoken.train.head_recipes import EagleShape

    _train(config_from(HeadOptions, context.params), EagleShape(), as_json)


@takes(HeadOptions)
def medusa(context: typer.Context, as_json: JsonOption = False) -> None:
    """Train Medusa heads (head.is_sequential=true: Hydra): small heads on the last hidden state."""
    from foretoken.train.head_recipes import MedusaShape

    _train(config_from(HeadOptions, context.params), MedusaShape(), as_json)


@takes(HeadOptions)
def block(context: typer.Context, as_json: JsonOption = False) -> None:
    """Train a block drafter: layers that read the target's states and draft several tokens in one pass."""
    from foretoken.train.head_recipes import BlockShape

    _train(config_from(HeadOptions, context.params), BlockShape(), as_json)


@takes(HeadOptions)
def adapter(context: typer.Context, as_json: JsonOption = False) -> None:
    """Train an early-exit adapter: a small MLP between the target's first layers and its output matrix."""
    from foretoken.train.head_recipes import AdapterShape

    _train(config_from(HeadOptions, context.params), AdapterShape(), as_json)


@takes(DraftOptions)
def draft(context: typer.Context, as_json: JsonOption = False) -> None:
    """Distil a draft model from the target, on its answers or on the draft model's own."""
    from foretoken.train.head_run import MODEL, DraftJob, DraftSettings, train_draft
    from foretoken.train.parallel import joined_ranks

    given = config_from(DraftOptions, context.params)
    job = DraftJob(**_job_of(given, DraftSettings()), init=given.init, on_policy=given.on_policy)
    with joined_ranks() as ranks:
        result = train_draft(job, ranks)
        if ranks.is_first:
            _report(result, given.out / MODEL, as_json)


def _train(given: HeadOptions, shape: HeadShape, as_json: bool) -> None:
    from foretoken.train.head_run import HEAD, HeadJob, plan_head, train_head
    from foretoken.train.parallel import joined_ranks

    job = HeadJob(**_job_of(given, _usual_settings(given, shape)), init=given.init)
    if given.dry_run:
        _show_plan(plan_head(job), as_json)
        return
    with joined_ranks() as ranks:
        result = train_head(job, ranks)
        if ranks.is_first:
            _report(result, job.out / HEAD, as_json)


def _usual_settings(given: HeadOptions, shape: HeadShape) -> HeadSettings:
    """What is usual for the shape that is asked for, or that the head of --init has: how many places it learns."""
    from foretoken.train.configs import HeadTrainConfig
    from foretoken.train.head_recipes import usual_training
    from foretoken.train.head_run import HeadSettings, places_of

    asked = _settings(HeadSettings(head=shape, train=HeadTrainConfig(num_places=1)), given)
    usual = usual_training(asked.head)
    if given.init is not None:
        usual = dataclasses.replace(usual, num_places=places_of(given.init, given.target))
    return HeadSettings(head=shape, train=usual)


def _job_of(given: RunOptions, usual: RunSettings) -> dict[str, Any]:
    """The fields of `RunJob`; torch gets the threads that are asked for."""
    import torch

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    same = {name: getattr(given, name) for name in ("target", "out", "answers", "corpus", "device")}
    return same | {"settings": _settings(usual, given), "command": tuple(sys.argv)}


def _settings(settings: _Settings, given: RunOptions) -> _Settings:
    """The file's settings, then --tokens and --state-cache-bytes, then --set."""
    if given.config is not None:
        settings = with_settings(settings, read_settings(given.config))
    flags = {name: getattr(given, name) for name in ("tokens", "state_cache_bytes") if getattr(given, name) is not None}
    if flags:
        settings = with_settings(settings, {"train": flags})
    return with_overrides(settings, given.settings)


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
