"""What an operator may set for `suffix`, without torch: the server's front checks it (`registry.Traits.options`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.params import check_whole

DEFAULT_STORE_TOKENS = 1 << 18
# That a store is taken for, since an index takes some KB however little it holds: this bounds their number.
MIN_STORE_TOKENS = 256


@dataclass(frozen=True)
class SuffixOptions:
    """What an operator may set: `store_tokens` of finished answers are kept for each tenant, four times as many in all.

    Raises:
        InputError: not a whole number from 256 up.
    """

    store_tokens: int = field(
        default=DEFAULT_STORE_TOKENS, metadata={"help": "tokens of finished answers kept for each tenant"}
    )

    def __post_init__(self) -> None:
        check_whole("store_tokens", self.store_tokens, low=MIN_STORE_TOKENS, high=1 << 28)
