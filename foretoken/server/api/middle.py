"""`suffix`: a prompt and the text behind its answer, in the order that models trained for it read them."""

from __future__ import annotations

from foretoken.backend.events import ModelInfo
from foretoken.errors import ForetokenError
from foretoken.server.api.errors import of_exception, unsupported
from foretoken.server.api.exchange import Api
from foretoken.server.api.schemas import CompletionRequest


async def with_suffix(api: Api, body: CompletionRequest, info: ModelInfo) -> CompletionRequest:
    """The request with its suffix among the token ids of each prompt.

    Raises:
        ApiError: the model has no tokens for it, or the prompt is echoed, which has no meaning here.
    """
    if not body.suffix:
        return body
    if info.fim_tokens is None:
        raise unsupported("suffix", "the model has no tokens for a text in the middle; leave it out")
    if body.echo:
        raise unsupported("echo", "cannot stand beside suffix; leave one of them out")
    before_prefix, before_suffix, before_middle = info.fim_tokens
    try:
        behind = await api.service.tokenize(body.suffix, add_special_tokens=False)
        prefixes = [
            await api.service.tokenize(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
    except ForetokenError as error:
        raise of_exception(error, api.config.retry_after_s) from error
    filled = [[*before_prefix, *prefix, before_suffix, *behind, before_middle] for prefix in prefixes]
    return body.model_copy(update={"prompt": filled, "suffix": None})
