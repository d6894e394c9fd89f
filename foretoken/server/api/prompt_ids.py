"""Token ids of texts that a route puts together to a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.backend.call import TextToEncode
from foretoken.errors import ContextLengthError
from foretoken.server.api.call import Terms
from foretoken.server.api.errors import of_length
from foretoken.server.api.exchange import Api


@dataclass(frozen=True)
class TextReader:
    """Reads texts of one caller. `terms`: they are parts of a prompt, which must fit into the context."""

    api: Api
    tenant: str = ""
    terms: Terms | None = None
    max_tokens: int | None = None  # that the request asks for, to be named in errors

    @classmethod
    def of_prompt(cls, api: Api, terms: Terms, max_tokens: int | None = None) -> TextReader:
        """For the parts of a prompt."""
        return cls(api, terms.caller.tenant, terms, max_tokens)

    def check_fits(self, num_tokens: int, context: int) -> None:
        """Refuse (`ApiError`) parts of a prompt that have `num_tokens` or more, where they do not fit."""
        if self.terms is not None and num_tokens >= context:
            error = ContextLengthError("prompt", f"{num_tokens} tokens or more", f"the context holds {context} tokens")
            raise of_length(error, context, self.max_tokens)

    async def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        Raises:
            ApiError: it does not fit.
        """
        asked = TextToEncode(
            text, add_special_tokens=add_special_tokens, tenant=self.tenant, must_fit=self.terms is not None
        )
        try:
            return await self.api.backend.tokenize(asked)
        except ContextLengthError as error:
            raise of_length(error, self.api.ready_info().max_model_len, self.max_tokens) from None
