"""How many tokens may be promised at once, over all requests that run or wait."""

from __future__ import annotations

from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import later


class TokenBudget:
    """Counts the tokens that open requests may still write."""

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self, num_tokens: int, config: ApiConfig) -> None:
        """Reserve for a whole request.

        Raises:
            ApiError: 429, not enough is free now.
        """
        most = config.max_pending_tokens
        if most is not None and self.num_taken + num_tokens > most:
            message = f"open requests may write {most} tokens together, and {self.num_taken} are taken"
            raise later(429, "token_budget_full", message, config.retry_after_s)
        self.num_taken += num_tokens

    def give_back(self, num_tokens: int) -> None:
        """Free what a request had reserved."""
        self.num_taken -= num_tokens
        assert self.num_taken >= 0
