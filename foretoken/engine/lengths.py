"""Whether a prompt fits into the context."""

from __future__ import annotations

from foretoken.errors import ContextLengthError


def check_length(num_tokens: int, context: int, is_minimum: bool = False) -> None:
    """Whether a prompt of `num_tokens` leaves room for a token of the answer; `is_minimum`: it may have more of them.

    Raises:
        ContextLengthError: it does not.
    """
    if num_tokens >= context:
        raise ContextLengthError(
            "prompt",
            f"{num_tokens} tokens{' or more' if is_minimum else ''}",
            f"the context holds {context} tokens; shorten the prompt to at most {context - 1}",
        )
