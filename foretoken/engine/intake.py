"""Whether a request can run at all: checked before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.config import SamplingParams, SpecConfig
from foretoken.errors import CapacityError, ContextLengthError, InputError
from foretoken.model.interface import LanguageModel


def check_request(prompt_ids: Sequence[int], params: SamplingParams, spec: SpecConfig, target: LanguageModel, has_text: bool) -> int:
    """Most tokens, prompt and output together, that the request may reach.

    Raises:
        InputError: empty prompt, ids outside the vocabulary, stop strings without a tokenizer, num_draft beyond the context.
        ContextLengthError: the prompt leaves no room for a token.
        CapacityError: the cache can never hold the request.
    """
    if not prompt_ids:
        raise InputError("prompt", list(prompt_ids), "is empty; give at least one token")
    for token in prompt_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < target.vocab_size:
            raise InputError("prompt", token, f"token ids must be whole numbers from 0 to {target.vocab_size - 1}")
    context = target.max_context_tokens
    if len(prompt_ids) >= context:
        raise ContextLengthError(
            "prompt", f"{len(prompt_ids)} tokens", f"the context holds {context} tokens; shorten the prompt to at most {context - 1}"
        )
    if params.stop_strings and not has_text:
        raise InputError("stop", params.stop_strings, "stop strings need a tokenizer, and this model folder has none; leave `stop` out")
    if spec.num_draft != "auto" and spec.num_draft >= context:
        raise InputError("num_draft", spec.num_draft, f"must be smaller than the context of {context} tokens")
    max_total = min(len(prompt_ids) + params.max_tokens, context)
    if target.footprint_tokens(max_total) > target.capacity_tokens:
        raise CapacityError(
            f"out of KV blocks: the request may need {max_total} tokens and the cache holds {target.capacity_tokens}; "
            "lower max_tokens or raise cache_tokens"
        )
    return max_total
