"""`foretoken demo --all`: every drafter on one prompt, in one table."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.config import DRAFTERS, PLAIN, SamplingParams, SpecConfig
from foretoken.errors import CheckpointError
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from foretoken.registry import HEADS, MTP, traits_of

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM
    from foretoken.engine.output import GenerateOutput

_WITH_DRAFT = ("draft_model", "cascade", "mix", "auto")
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DrafterRow:
    """One drafter along the prompt: median tokens/s of the repeats, the rest of the last one. `identical`: its tokens
    are those of plain decoding.
    """

    drafter: str
    tokens_per_s: float
    emitted_per_step: float
    identical: bool


def packaged_heads(to: str | None, scratch: Path) -> dict[str, Path]:
    """Folders of the reference family's heads by drafter, as far as this installation has them; with `to` widened like
    the target, into `scratch`.

    Raises:
        ModelError, StorageError: see `widen_head`.
    """
    from foretoken.bench.widen_head import widen_head

    found: dict[str, Path] = {}
    for name in HEADS:
        try:
            folder = model_folder(f"reference:{name}")
        except CheckpointError:  # `every_drafter` says that it is left out
            continue
        if to is not None:
            widen_head(folder, scratch / name, model_folder("reference:target"), to)
        found[name] = folder if to is None else scratch / name
    return found


def every_drafter(
    draft: Path, heads: Mapping[str, Path], num_draft: int
) -> tuple[dict[str, SpecConfig], dict[str, str]]:
    """A configuration of every drafter that can run, by name, plain decoding first; and why the others cannot."""
    specs, left_out = {PLAIN: SpecConfig()}, dict[str, str]()
    for name in DRAFTERS:
        if name == "predicted":
            left_out[name] = "it needs the answer beforehand"
        elif name == MTP:
            left_out[name] = "the target brings no MTP layer"
        elif name in heads:
            specs[name] = SpecConfig(name, head=str(heads[name]), num_draft=num_draft)
        elif name in HEADS:
            left_out[name] = f"reference:{name} is not part of this installation"
        else:
            takes_draft = name in _WITH_DRAFT or "draft" in traits_of(name).fields
            specs[name] = SpecConfig(name, draft=str(draft) if takes_draft else None, num_draft=num_draft)
    return specs, left_out


def compare_drafters(
    llm: LLM, specs: Mapping[str, SpecConfig], prompt: str, params: SamplingParams, repeats: int
) -> list[DrafterRow]:
    """Answer `prompt` with every drafter in turn, `repeats` times; each answer has its own tenant and new drafters.

    Raises:
        ForetokenError: a drafter that cannot be loaded, or an answer that failed.
    """
    from foretoken.bench.renewal import renew_drafters

    tenants = map(str, itertools.count())
    outputs: dict[str, list[GenerateOutput]] = {name: [] for name in specs}

    def answer(spec: SpecConfig, max_tokens: int) -> GenerateOutput:
        renew_drafters(llm, spec)
        own = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=params.stop, tenant=next(tenants))
        (output,) = llm.generate([prompt], own, spec)
        if output.error is not None:
            raise output.error
        return output

    for spec in specs.values():
        answer(spec, _WARM_UP_TOKENS)
    for _ in range(repeats):
        for name, spec in specs.items():
            outputs[name].append(answer(spec, params.max_tokens))
    plain = outputs[PLAIN][-1]
    return [
        DrafterRow(
            name,
            statistics.median(output.stats.tokens_per_s for output in own),
            own[-1].stats.emitted_per_step,
            all(output.token_ids == plain.token_ids for output in own),
        )
        for name, own in outputs.items()
    ]


def show_drafters(rows: list[DrafterRow], left_out: Mapping[str, str], console: Console) -> None:
    """The table, fastest first behind plain decoding, and what is not in it."""
    plain, *others = rows
    ordered = [plain, *sorted(others, key=lambda row: -row.tokens_per_s)]
    lines = [
        (row.drafter, f"{row.tokens_per_s:.1f}", f"{row.emitted_per_step:.2f}", "yes" if row.identical else "no")
        for row in ordered
    ]
    console.table(("drafter", "tokens/s", "tok/step", "same"), lines)
    console.line()
    for name, reason in left_out.items():
        console.line(f"left out: {name}, {reason}")
