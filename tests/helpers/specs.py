"""What each drafter must be given, so that a test can go over all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foretoken import SamplingParams, SpecConfig
from foretoken.draft.base import Drafter
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.group import DrafterKey, drafter_key
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.predicted import PredictedDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.model.interface import EarlyExitModel, LanguageModel
from foretoken.registry import HEADS, MTP
from tests.helpers.tiny_heads import tiny_head

# Tokens that some tests' answers hold and others' do not: a prediction may be wrong.
PREDICTION = tuple(range(3, 60))


def predicting(spec: SpecConfig, params: SamplingParams, prediction: Sequence[int] = PREDICTION) -> SamplingParams:
    """`params` with a prediction where the drafter of `spec` cannot do without one."""
    return replace(params, prediction=tuple(prediction)) if "predicted" in spec.leaves else params


def spec_of(name: str, draft: Path | str | None, **options: object) -> SpecConfig:
    """`SpecConfig` of a drafter with the options it cannot do without; `early_exit` never gives up drafting.

    `draft_model:int4` is a draft model in that format, `draft_model/static` one that drafts static trees, `eagle:1` an
    EAGLE-1 head, `medusa:hydra` and `block:cut` kinds of those, `early_exit:adapter` the exit with an adapter. Random
    heads are made beside the draft, for the target there.
    """
    drafter, dtype, tree = re.fullmatch(r"(\w+)(?::(\w+))?(?:/(\w+))?", name).groups()
    needed = {
        "draft_model": {"draft": str(draft), "draft_dtype": dtype or "auto", "tree": tree or "chain"},
        **{one: {"draft": str(draft)} for one in ("cascade", "mix")},
        "early_exit": {"exit_layer": 1},
    }
    if drafter in HEADS:
        needed[drafter] = {"head": head_beside(name.split("/")[0], draft), "tree": tree or "chain"}
    if drafter == MTP:
        needed[drafter] = {"tree": tree or "chain"}
    if name == "early_exit:adapter":
        needed[drafter] = {"head": head_beside(name, draft)}
    return SpecConfig(drafter, **needed.get(drafter, {}) | options)


def head_beside(kind: str, draft: Path | str | None) -> str | None:
    """The folder of a head beside the draft's; made where there is a target for it."""
    if draft is None:
        return None
    folder, target = Path(draft).parent / kind.replace(":", "-"), Path(draft).parent / "target"
    if target.exists() and not folder.exists():
        tiny_head(folder, target, kind)
    return str(folder)


def key_of(name: str, draft: str | None = None) -> DrafterKey:
    """Where a `DrafterGroup` keeps the drafter."""
    key = drafter_key(spec_of(name, draft))
    assert key is not None
    return key


def bare_drafter(name: str, draft: LanguageModel, vocab_size: int) -> Drafter:
    """A drafter outside an `LLM`."""
    made = {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "predicted": PredictedDrafter,
        "lookahead": LookaheadDrafter,
    }
    if name.startswith("draft_model"):
        return DraftModelDrafter(draft)
    if name.startswith("early_exit"):  # `draft` is the target itself
        assert isinstance(draft, EarlyExitModel)
        return EarlyExitDrafter(draft)
    if name == "cascade":
        return CascadeDrafter([draft], NgramDrafter())
    if name == "mix":
        return MixDrafter([NgramDrafter(), SuffixDrafter(), RecyclingDrafter(vocab_size), DraftModelDrafter(draft)])
    return RecyclingDrafter(vocab_size) if name == "recycling" else made[name]()
