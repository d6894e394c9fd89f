"""The target's own MTP layer as a drafter: an EAGLE head that came with the checkpoint (`heads.mtp`)."""

from __future__ import annotations

from typing import Self

from foretoken.config import SpecConfig
from foretoken.draft.base import Factory
from foretoken.draft.eagle import EagleDrafter
from foretoken.draft.open_head import open_mtp
from foretoken.heads.eagle_cache import CachedEagle


class MtpDrafter(EagleDrafter):
    """Chains or trees that the target's MTP layer draws under the request's own sampling parameters."""

    name = "mtp"

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`.

        Raises:
            ConfigError, CheckpointError, UnsupportedModelError: see `open_mtp`.
        """
        return cls(CachedEagle(*open_mtp(factory, spec)))
