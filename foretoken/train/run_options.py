"""Options of `foretoken train eagle|medusa|block|adapter|draft`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from foretoken.engine_config import THREADS, EngineConfig
from foretoken.option import option, same_option


@dataclass(frozen=True)
class RunOptions:
    """A run: for which target, from which text, into which folder. `config` is a file of the run's settings, `tokens`
    and `state_cache_bytes` come before it, `settings`, texts NAME=VALUE, before both.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    out: Path = field(metadata=option("Folder of the run; a run that was interrupted is continued."))
    answers: Path | None = field(
        default=None,
        metadata=option(
            "Answers of the target (`foretoken train answers`); without them, the standard library's source is the "
            "text, which only a target with that text's tokenizer reads."
        ),
    )
    corpus: Path | None = field(
        default=None, metadata=option("Folder of another run whose tokens of the standard library to use.")
    )
    tokens: int | None = field(default=None, metadata=option("Tokens to see in the whole run (train.tokens)."))
    state_cache_bytes: int | None = field(
        default=None,
        metadata=option(
            "Keep up to so many bytes of the target's hidden states on disk (train.state_cache_bytes); 0: none."
        ),
    )
    config: Path | None = field(default=None, metadata=option("File of settings, JSON or TOML."))
    settings: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "A setting, such as train.loss.kind=tv or head.num_layers=2; may be given often.",
            flags=("--set",),
            repeats=True,
        ),
    )
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)


@dataclass(frozen=True)
class HeadOptions(RunOptions):
    """A run that trains a head; with `dry_run` it only says what the run would take."""

    init: str | None = field(
        default=None,
        metadata=option("Start from the weights of this head and keep its shape; without it, from new weights."),
    )
    dry_run: bool = field(
        default=False, metadata=option("Say what memory, time and disk the run would take; train nothing.")
    )


@dataclass(frozen=True)
class DraftOptions(RunOptions):
    """A run that distils a draft model."""

    init: str | None = field(
        default=None, metadata=option("Start from this draft model; without it, from random weights.")
    )
    on_policy: bool = field(
        default=False, metadata=option("The answers are those of the draft model --init, not of the target.")
    )
