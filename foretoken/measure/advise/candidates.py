"""What may draft for the target: each item of `--drafts` with its configuration, and what is known of it from files."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from foretoken.backend.drafting import parse_drafters
from foretoken.config import SpecConfig
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads.kind import head_kind, with_head_kind
from foretoken.measure.advise.options import AdviseOptions
from foretoken.model.names import model_folder
from foretoken.registry import known_drafters, traits_of

Kind = Literal["lookup", "draft model", "head", "own layers"]


@dataclass(frozen=True)
class AdviseCandidate:
    """Something that may draft. `source` is the draft model or head as the user named it, None without one.

    `spec` drafts as many tokens as are ever compared.
    """

    name: str
    kind: Kind
    spec: SpecConfig
    source: str | None = None

    @property
    def runs_model(self) -> bool:
        """Whether it drafts with a forward pass or probes in the target's: its whole steps are timed."""
        return self.kind != "lookup"


def candidates_of(options: AdviseOptions) -> list[AdviseCandidate]:
    """The candidates in the order in which they were named.

    Raises:
        ConfigError: an unknown drafter or option, or one that cannot be judged by itself.
        ModelError: no such model or head.
    """
    found = [_candidate(text, max(options.lengths)) for text in dict.fromkeys(options.drafts)]
    names = [one.name for one in found]
    return [one if names.count(one.name) == 1 else replace(one, name=one.source or one.name) for one in found]


def _candidate(text: str, num_draft: int) -> AdviseCandidate:
    name = text.partition(":")[0]
    if name not in known_drafters():
        return _of_files(text, num_draft)
    (choice,) = parse_drafters((text,))
    if name == "auto" or traits_of(name).composite or choice.needs or choice.own("num_draft") is not None:
        remedy = (
            "name drafters that can be judged by themselves: a draft model or head by its folder, ngram, suffix, "
            "recycling, mtp; numbers of draft tokens are those of num_drafts"
        )
        raise ConfigError("drafts", text, remedy)
    spec = with_head_kind(choice.spec(num_draft=num_draft))
    if spec.drafter == "early_exit" and spec.exit_layer == "auto" and spec.skip_layers is None and spec.head is None:
        remedy = "give early_exit:exit_layer=N: without it the engine tries several while it runs, and no one is judged"
        raise ConfigError("drafts", text, remedy)
    source = spec.draft or spec.head
    kind: Kind = "own layers" if traits_of(name).samples or spec.num_probe else "lookup"
    if source is not None:
        kind = "draft model" if spec.draft else "head"
    return AdviseCandidate(choice.label, kind, spec, source)


def _of_files(name: str, num_draft: int) -> AdviseCandidate:
    """A trained head where the files are those of one, else a draft model."""
    short = Path(name).name or name
    try:
        folder = model_folder(name)
    except CheckpointError as error:
        near = difflib.get_close_matches(name.partition(":")[0].lower(), known_drafters(), n=1)
        if near:
            raise ConfigError("drafts", name, f"did you mean {near[0]!r}? It is no model either: {error}") from error
        raise
    try:
        kind = head_kind(folder)
    except CheckpointError:
        return AdviseCandidate(short, "draft model", SpecConfig("draft_model", draft=name, num_draft=num_draft), name)
    spec = with_head_kind(SpecConfig(kind, head=name, num_draft=num_draft))
    return AdviseCandidate(short, "head", spec, name)
