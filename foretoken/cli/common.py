"""Options and helpers that several verbs share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from foretoken.config import (
    COMBINE,
    COMPOSITES,
    DRAFT_DTYPES,
    DRAFT_VOCABULARIES,
    DRAFTERS,
    NUMERICS,
    RULES,
    TREES,
    SpecConfig,
)
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig, EngineOptions
from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.files import check_readable, read_stream, read_text, to_json
from foretoken.model.loader import parse_dtype
from foretoken.model.open import model_folder, open_device
from foretoken.params import check_whole
from foretoken.printing.console import Console, Spinner

_MOST_THREADS = 1024  # a pool of threads that no machine has would be made all the same, until memory ends


def _check_dtype(value: str) -> str:
    parse_dtype(value, stored=torch.float32)
    return value


def _check_device(value: str) -> str:
    open_device(value)
    return value


def _check_numerics(value: str) -> str:
    if value not in NUMERICS:
        raise ConfigError("numerics", value, f"choose one of {', '.join(NUMERICS)}")
    return value


def _check_threads(value: int | None) -> int | None:
    if value is not None:
        check_whole("threads", value, low=1, high=_MOST_THREADS)
    return value


TargetOption = Annotated[
    str,
    typer.Option("--target", "-t", help="The model whose answers you want: a folder, a hub id, or reference:target."),
]
DrafterOption = Annotated[
    str | None, typer.Option(help=f"Who guesses ahead: {', '.join(DRAFTERS)}. Without it, plain decoding.")
]
DraftOption = Annotated[
    str | None, typer.Option(help="The draft model for --drafter draft_model: a folder, a hub id, or reference:draft.")
]
DraftDtypeOption = Annotated[
    str,
    typer.Option(help=f"Format of the draft model's weights: {', '.join(DRAFT_DTYPES)}; auto is what --dtype says."),
]
NumDraftOption = Annotated[str, typer.Option(help="How many tokens to guess per step: a number, or auto.")]
RuleOption = Annotated[str, typer.Option(help=f"Which rule decides what stands: {', '.join(RULES)}.")]
AllowLossyOption = Annotated[
    bool, typer.Option("--allow-lossy", help="Allow a rule that changes the target's law (typical).")
]
DraftProbabilityOption = Annotated[
    str, typer.Option(help="Chance that a position is drafted at all: a number in (0, 1], or auto.")
]
DraftVocabularyOption = Annotated[
    str, typer.Option(help=f"How to use a draft whose tokenizer is not the target's: {', '.join(DRAFT_VOCABULARIES)}.")
]
TreeOption = Annotated[str, typer.Option(help=f"The shape of a draft model's guesses: {', '.join(TREES)}.")]
BranchingOption = Annotated[
    str | None, typer.Option(help="Most guesses after one guess of a tree: a number, or one for each depth, as 4,2,1.")
]
PartsOption = Annotated[
    str, typer.Option(help=f"What {' or '.join(COMPOSITES)} works with, separated by commas, cheapest first.")
]
CombineOption = Annotated[str, typer.Option(help=f"How the parts of a mix work together: {', '.join(COMBINE)}.")]
NumericsOption = Annotated[
    str,
    typer.Option(
        help="default, or strict: logits bitwise the same however rows are batched.", callback=_check_numerics
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Format of the weights: auto (as stored), bfloat16, float16, float32, float64.", callback=_check_dtype
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda, cuda:N.", callback=_check_device)]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads of every engine; without it, torch's own number.", callback=_check_threads)
]
CacheOption = Annotated[
    int | None, typer.Option(help="Tokens that the key/value cache holds; without it, enough for one whole context.")
]
CostProfileOption = Annotated[
    str,
    typer.Option(
        help=(
            "What steps cost: auto (kept from an earlier start, or measured at this one), off, measure, or a "
            "file of bench --profile."
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
MaxSpeculatingOption = Annotated[
    int | None,
    typer.Option(help="With an open number of guesses: nobody guesses while more answers run than this; no limit."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]


def spec_from(given: Mapping[str, Any]) -> SpecConfig:
    """`spec_config` of the options by name, those of other matters left out.

    Raises:
        ConfigError: see there.
    """
    return spec_config(**{name: given[name] for name in inspect.signature(spec_config).parameters if name in given})


def spec_config(
    drafter: str | None,
    draft: str | None,
    num_draft: str,
    rule: str,
    allow_lossy: bool = False,
    draft_probability: str = "1",
    *,
    min_confidence: float = 0.0,
    draft_top_k: int = 0,
    draft_dtype: str = "auto",
    draft_vocabulary: str = "auto",
    prediction: str | None = None,
    corpus: str | None = None,
    exit_layer: str = "auto",
    skip_layers: str | None = None,
    lookahead_window: int = SpecConfig.lookahead_window,
    lookahead_ngram: int = SpecConfig.lookahead_ngram,
    tree: str = "chain",
    branching: str | None = None,
    parts: str = "",
    combine: str = "best",
) -> SpecConfig:
    """`SpecConfig` from flags; a draft, a prediction, a corpus or layers without a drafter name the one that takes
    them, parts a mix.

    Raises:
        ConfigError: a value that no drafter or rule takes.
    """
    if drafter is None:
        layers = skip_layers if exit_layer == "auto" else exit_layer
        takers = {
            "mix": parts or None,
            "draft_model": draft,
            "predicted": prediction,
            "suffix": corpus,
            "early_exit": layers,
        }
        drafter = next((name for name, given in takers.items() if given is not None), None)
    if drafter is None and num_draft != "auto":
        raise ConfigError("num_draft", num_draft, "nobody guesses: name a --drafter or a --draft, or leave it out")
    return SpecConfig(
        drafter=drafter,
        draft=draft,
        num_draft=_number_or_auto("num_draft", num_draft, int, "a whole number"),
        rule=rule,
        allow_lossy=allow_lossy,
        draft_probability=_number_or_auto("draft_probability", draft_probability, float, "a number in (0, 1]"),
        min_confidence=min_confidence,
        draft_top_k=draft_top_k,
        draft_dtype=draft_dtype,
        draft_vocabulary=draft_vocabulary,
        corpus=corpus,
        exit_layer=_number_or_auto("exit_layer", exit_layer, int, "a whole number"),
        skip_layers=None if skip_layers is None else _layers(skip_layers),
        lookahead_window=lookahead_window,
        lookahead_ngram=lookahead_ngram,
        tree=tree,
        branching=_branching(branching),
        parts=tuple(word.strip() for word in parts.split(",") if word.strip()),
        combine=combine,  # type: ignore[arg-type]  # checked there
    )


def engine_config(
    target: str, spec: SpecConfig, given: Mapping[str, Any], routing: RoutingRules | None = None
) -> EngineConfig:
    """`EngineConfig` of the options by name, those of other matters left out.

    Raises:
        InputError: see there.
    """
    options = {name: given[name] for name in EngineOptions.__annotations__ if name in given}
    return EngineConfig(target, spec, **options | {"routing": routing, "profile": given["cost_profile"]})


def check_sources(spec: SpecConfig) -> None:
    """Whether the draft and the text that `spec` names are there, before the target is loaded.

    Raises:
        ModelError: no such draft.
        StorageError: the corpus cannot be opened.
    """
    if spec.draft is not None:
        model_folder(spec.draft)
    if spec.corpus is not None:
        check_readable("corpus", Path(spec.corpus))


def _layers(text: str) -> list[int] | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError("skip_layers", text, "must be layer numbers separated by commas, or auto") from None


def _branching(value: str | None) -> int | tuple[int, ...] | None:
    if value is None:
        return None
    try:
        numbers = tuple(int(word) for word in value.split(","))
    except ValueError:
        raise ConfigError("branching", value, "must be a whole number, or several separated by commas") from None
    return numbers if "," in value else numbers[0]


def _number_or_auto(field: str, value: str, kind: type[int] | type[float], words: str) -> Any:  # noqa: ANN401 - a number or "auto"
    if value == "auto":
        return value
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(field, value, f"must be {words} or auto") from None


def progress(message: str) -> AbstractContextManager[Spinner | None]:
    """A spinner on stderr while something takes long; on a file or pipe one plain line."""
    return Console(stderr=True).spinner(message)


def announcer(spinner: Spinner | None) -> Callable[[str], None]:
    """Says on stderr what takes long: in the spinner of `progress`, or on a line of its own."""
    return spinner.update if spinner is not None else Console(stderr=True).line


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
