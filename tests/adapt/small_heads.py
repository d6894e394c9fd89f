"""Small random heads of every kind, and their drafters."""

from __future__ import annotations

from foretoken.draft.base import AdaptableDrafter
from foretoken.draft.eagle import EagleDrafter
from foretoken.heads.base import Head
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import SharesWeights
from tests.helpers.random_heads import head_drafter, random_head
from tests.helpers.tiny_heads import eagle_head

KINDS = ("medusa", "medusa:hydra", "block", "block:cut", "eagle", "eagle1")


def small_head(kind: str, target: ModelConfig, seed: int = 0) -> Head:
    """A head of one of `KINDS`."""
    if kind.startswith("eagle"):
        return eagle_head(target, 1 if kind == "eagle1" else 3, seed)
    return random_head(kind, target, seed)


def drafter_of(head: Head, target: SharesWeights) -> AdaptableDrafter:
    """The drafter of a head."""
    if isinstance(head, EagleHead):
        return EagleDrafter(CachedEagle(head, target))
    return head_drafter(head, target)


def drafter_name(kind: str) -> str:
    """The name of the drafter that runs a kind of head."""
    return kind.partition(":")[0].rstrip("1")
