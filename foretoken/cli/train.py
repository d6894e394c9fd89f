"""`foretoken train`: answers of a target, heads and draft models that learn from it, a language model from scratch."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foretoken.cli.common import JsonOption, print_json
from foretoken.cli.flags import config_from, takes
from foretoken.cli.usage import Group
from foretoken.cli.verb import EngineVerb
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.files import check_file
from foretoken.measure.speed.options import SpeedOptions
from foretoken.printing.console import Console
from foretoken.train.answers import AnswerConfig, placed_prompts, write_answers
from foretoken.train.run_options import (
    DraftOptions,
    HeadOptions,
    RunOptions,
    TrainConfig,
    read_settings,
    with_overrides,
    with_settings,
)

if TYPE_CHECKING:
    from foretoken.train.head_recipes import HeadShape
    from foretoken.train.head_run import HeadPlan, HeadSettings
    from foretoken.train.head_trainer import HeadResult
    from foretoken.train.recipes import ModelSize
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
    from foretoken.train.head_recipes import usual_training
    from foretoken.train.head_run import HeadSettings, places_of
    from foretoken.train.head_train_config import HeadTrainConfig

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


app = typer.Typer(
    cls=Group,
    help="Train heads and draft models for a target, or a language model from scratch. Interrupted runs resume.",
    no_args_is_help=True,
)


@app.command("lm", cls=EngineVerb)
@takes(TrainConfig)
def lm(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="Folder of the run: state, corpus, and at the end the finished model in OUT/model.")
    ],
    shape: Annotated[
        str, typer.Option(help="target or draft (the reference sizes), or hidden,intermediate,layers,heads,kv_heads.")
    ] = "target",
    teacher: Annotated[
        str | None, typer.Option(help="Distil from this model instead of training on the text alone.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of another run whose tokenizer and tokens are used.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Start from this model of the same shape instead of random weights.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device to train on: auto, cpu, cuda, cuda:N.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train a small Llama-style model on the Python standard library that is on this machine."""
    from foretoken.model.names import model_folder
    from foretoken.train.recipes import train_lm

    config = config_from(TrainConfig, context.params)
    result, folder = train_lm(
        out,
        _shape(shape),
        config,
        None if teacher is None else model_folder(teacher),
        corpus,
        None if init is None else model_folder(init),
        device,
    )
    if as_json:
        print_json(dataclasses.asdict(result) | {"model": str(folder)})
    else:
        Console().line(
            f"{folder}: {result.bits_per_byte:.4f} bits per byte on held-out modules after {result.tokens:,} tokens"
        )


@takes(EngineConfig, fields=("model", "dtype", "device"))
@takes(SpeedOptions, fields=("threads",))
@takes(AnswerConfig)
def answers(
    context: typer.Context,
    target: str,
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with prompt (a text), messages (a conversation) or prompt_ids.")
    ],
    out: Annotated[Path, typer.Option(help="File of the answers; an existing file is continued.")],
    dtype: str = EngineConfig.dtype,
    device: str = EngineConfig.device,
    threads: int | None = None,
    as_json: JsonOption = False,
) -> None:
    """Let the target answer prompts and write a file to train heads on; an interrupted run is continued."""
    import torch

    from foretoken.config import SpecConfig
    from foretoken.engine.llm import LLM

    config = config_from(AnswerConfig, context.params)
    placed = placed_prompts(prompts)
    sources, texts = [source for source, _ in placed], [prompt for _, prompt in placed]
    check_file("out", out)
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(stderr=True)
    # Plain: in a full batch the rows of draft tokens cost more than they save.
    with (
        LLM(target, SpecConfig(), dtype=dtype, device=device, max_batch_size=config.batch_size) as llm,
        console.bar("answering", len(texts), counts=True) as bar,
    ):

        def tell(done: int) -> None:
            bar.update(completed=done)
            if not console.is_terminal and done % config.batch_size == 0:
                console.line(f"answering: {done} of {len(texts)}")

        count = write_answers(llm, texts, out, config, tell, sources)
    if as_json:
        print_json(dataclasses.asdict(count) | {"answers": str(out)})
    else:
        Console().line(f"{out}: {count.num_answers:,} answers, {count.num_tokens:,} tokens")


@takes(EngineConfig, fields=("model",))
def ngrams(
    target: str,
    answers: Annotated[
        list[Path], typer.Option(help="The target's answers, as train answers writes them; may be given several times.")
    ],
    out: Annotated[Path, typer.Option(help="The file of the table.")],
    as_json: JsonOption = False,
) -> None:
    """Count the n-gram table of a target from its answers, for --ngram-table and the drafters suffix and auto."""
    from foretoken.draft.ngram_table import save_table
    from foretoken.model.names import model_folder
    from foretoken.train.ngrams import table_of_answers

    folder = model_folder(target)
    check_file("out", out)
    with Console(stderr=True).bar("counting n-grams", None):
        table, note = table_of_answers(answers, folder)
    save_table(table, out, {name: str(value) for name, value in note.items()})
    if as_json:
        print_json(note | {"table": str(out), "entries": table.num_entries, "bytes": table.num_bytes})
    else:
        Console().line(f"{out}: {table.num_entries:,} entries from {note['answer_tokens']:,} tokens of answers")


for _verb in (answers, ngrams, eagle, medusa, block, adapter, draft):
    app.command(_verb.__name__, cls=EngineVerb)(_verb)


def _shape(text: str) -> ModelSize:
    from foretoken.train.recipes import DRAFT_SHAPE, TARGET_SHAPE, ModelSize

    named = {"target": TARGET_SHAPE, "draft": DRAFT_SHAPE}
    if text in named:
        return named[text]
    try:
        hidden, intermediate, layers, heads, kv_heads = (int(part) for part in text.split(","))
    except ValueError:
        remedy = "use target, draft, or five numbers: hidden,intermediate,layers,heads,kv_heads"
        raise ConfigError("shape", text, remedy) from None
    return ModelSize(hidden, intermediate, layers, heads, kv_heads)
