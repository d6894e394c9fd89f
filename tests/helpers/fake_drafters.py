"""Every kind of drafter beside a target of fake weights, for whole steps inside `fake_cuda`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from foretoken import SpecConfig
from foretoken.draft.base import Drafter
from foretoken.draft.block import BlockDrafter
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.eagle import EagleDrafter, MtpDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.medusa import MedusaDrafter
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.predicted import PredictedDrafter
from foretoken.draft.recycling import NUM_RANKS, RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import make_head
from foretoken.heads.config import HeadConfig
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.mtp import MtpHead, mtp_config
from foretoken.model.paged import PagedModel
from tests.helpers.fake_cuda import DEVICE, fake_model
from tests.helpers.stored_heads import adapter_config, block_config, eagle_config, medusa_config, vocabulary_of

CUT = 8  # tokens of a head's own vocabulary
DRAFT = "llama-mqa"  # the variant that draft models are


def fake_draft() -> PagedModel:
    """A draft model of one layer."""
    return fake_model(DRAFT, num_hidden_layers=1)


def fake_head(config: HeadConfig, make: Callable[..., Head] = make_head) -> Head:
    """A head of fake weights; its vocabulary is checked before it goes to the device, as on loading."""
    with _disable_current_modes():
        vocabulary = vocabulary_of(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            head = make(config, vocabulary)
    finally:
        torch.set_default_dtype(before)
    vocabulary.ids = torch.empty(len(vocabulary.ids), dtype=torch.int64, device=DEVICE)
    return head.requires_grad_(False)


def _eagle(target: PagedModel, version: int) -> Drafter:
    cut = {"draft_vocab_size": CUT, "taps": (1, 2, 3)} if version == 3 else {}
    head = fake_head(eagle_config(version, target.config, **cut))
    return EagleDrafter(CachedEagle(head, target))  # type: ignore[arg-type]


def _mtp(target: PagedModel) -> Drafter:
    return MtpDrafter(CachedEagle(fake_head(mtp_config(target.config), MtpHead), target))  # type: ignore[arg-type]


def _medusa(target: PagedModel, **options: object) -> Drafter:
    return MedusaDrafter(fake_head(medusa_config(target.config, num_heads=3, **options)), target)  # type: ignore[arg-type]


def _block(target: PagedModel) -> Drafter:
    config = block_config(target.config, taps=(1, 2, 3), draft_vocab_size=CUT, has_confidence=True)
    return BlockDrafter(fake_head(config), target)  # type: ignore[arg-type]


def _adapter(target: PagedModel) -> Drafter:
    head = fake_head(adapter_config(target.config))
    return EarlyExitDrafter(target, head)  # type: ignore[arg-type]


def _recycling(target: PagedModel) -> Drafter:
    drafter = RecyclingDrafter(target.vocab_size)
    drafter.successors[:] = range(NUM_RANKS)  # as if every token had stood in a text
    return drafter


def _cascade(target: PagedModel) -> Drafter:
    return CascadeDrafter([fake_draft()], NgramDrafter())


_NGRAM, _MODEL = SpecConfig("ngram", num_draft=3), SpecConfig("draft_model", "toy", num_draft=3)
_TREE = {"num_draft": 5, "tree": "best_first"}

Made = Callable[[PagedModel], Drafter]
DRAFTERS: dict[str, tuple[SpecConfig, Made]] = {
    "ngram": (_NGRAM, lambda _: NgramDrafter()),
    "suffix": (SpecConfig("suffix", num_draft=3), lambda _: SuffixDrafter()),
    "recycling": (SpecConfig("recycling", num_draft=3), _recycling),
    "predicted": (SpecConfig("predicted", num_draft=3), lambda _: PredictedDrafter()),
    "lookahead": (SpecConfig("lookahead", num_draft=3, lookahead_window=4), lambda _: LookaheadDrafter()),
    "draft_model": (_MODEL, lambda _: DraftModelDrafter(fake_draft())),
    "draft_model/best_first": (replace(_MODEL, **_TREE), lambda _: DraftModelDrafter(fake_draft())),
    "draft_model/static": (replace(_MODEL, num_draft=5, tree="static"), lambda _: DraftModelDrafter(fake_draft())),
    "early_exit": (SpecConfig("early_exit", num_draft=3, exit_layer=1), lambda target: EarlyExitDrafter(target)),
    "early_exit:adapter": (SpecConfig("early_exit", head="toy", num_draft=3), _adapter),
    "early_exit:search": (
        SpecConfig("early_exit", skip_layers="auto", num_draft=3),
        lambda target: EarlyExitDrafter(target),
    ),
    "eagle": (SpecConfig("eagle", head="toy", num_draft=3), lambda target: _eagle(target, 3)),
    "eagle:1": (SpecConfig("eagle", head="toy", num_draft=3), lambda target: _eagle(target, 1)),
    "eagle/best_first": (SpecConfig("eagle", head="toy", **_TREE), lambda target: _eagle(target, 3)),
    "mtp": (SpecConfig("mtp", num_draft=3), _mtp),
    "medusa": (SpecConfig("medusa", head="toy", num_draft=3), _medusa),
    "medusa/static": (
        SpecConfig("medusa", head="toy", num_draft=5, tree="static"),
        lambda target: _medusa(target, is_sequential=True),
    ),
    "block": (SpecConfig("block", head="toy", num_draft=3, min_confidence=0.1), _block),
    "block/best_first": (SpecConfig("block", head="toy", **_TREE), _block),
    "cascade": (SpecConfig("cascade", parts=("ngram", "draft_model"), draft="toy", num_draft=3), _cascade),
    "mix": (
        SpecConfig("mix", parts=("ngram", "draft_model"), draft="toy", num_draft=4),
        lambda _: MixDrafter([NgramDrafter(), DraftModelDrafter(fake_draft())]),
    ),
}
