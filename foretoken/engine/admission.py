"""Admission of a request: everything that is checked and built before it is queued.

All of it runs in the thread of the caller. Encoding a prediction, compiling a grammar and building the processors may
take long, and the engine's thread only queues the result (`request.PreparedRequest`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Request
from foretoken.engine.prompts import check_length
from foretoken.engine.request import PreparedRequest, TextAssembler
from foretoken.errors import CapacityError, ConfigError, InputError
from foretoken.kernels.sampling import runs_on
from foretoken.model.interface import LanguageModel
from foretoken.text.detokenizer import Detokenizer
from foretoken.text.processors import RequestProcessors, make_processors
from foretoken.text.randomness import RaceNoise
from foretoken.text.structure import StructureCompiler
from foretoken.text.tokenizer import Tokenizer
from foretoken.verify import needs_race, resolve


def check_types(params: object, spec: object) -> None:
    """`params` and `spec` of a call.

    Raises:
        InputError: not a `SamplingParams`, not a `SpecConfig`.
    """
    if not isinstance(params, SamplingParams):
        raise InputError("params", params, "give SamplingParams, or a list with one for each prompt")
    check_spec(spec)


def check_spec(spec: object) -> None:
    """`spec` of a call.

    Raises:
        InputError: not a `SpecConfig`.
    """
    if not isinstance(spec, SpecConfig):
        raise InputError("spec", spec, "give SpecConfig, or a list with one for each prompt")


def check_request(
    prompt_ids: Sequence[int], params: SamplingParams, spec: SpecConfig, target: LanguageModel, has_text: bool
) -> int:
    """Most tokens, prompt and output together, that the request may reach.

    Raises:
        InputError: empty prompt, ids outside the vocabulary, stop strings without a tokenizer, num_draft beyond the
        context.
        ContextLengthError: the prompt leaves no room for a token.
        CapacityError: the cache can never hold the request.
    """
    if not prompt_ids:
        raise InputError("prompt", list(prompt_ids), "is empty; give at least one token")
    check_tokens("prompt", prompt_ids, target.vocab_size)
    for name in ("logprob_token_ids", "stop_token_ids", "allowed_token_ids"):
        check_tokens(name, getattr(params, name) or (), target.vocab_size)
    context = target.max_context_tokens
    check_length(len(prompt_ids), context)
    if params.stop_strings and not has_text:
        remedy = "stop strings need a tokenizer, and this model folder has none; leave `stop` out"
        raise InputError("stop", params.stop_strings, remedy)
    check_layers(spec, target.num_layers)
    if spec.num_draft != "auto" and spec.num_draft >= context:
        raise InputError("num_draft", spec.num_draft, f"must be smaller than the context of {context} tokens")
    max_total = min(len(prompt_ids) + params.max_tokens, context)
    if target.footprint_tokens(max_total) > target.capacity_tokens:
        raise CapacityError(
            f"out of KV blocks: the request may need {max_total} tokens and the cache holds {target.capacity_tokens}; "
            "lower max_tokens or raise cache_tokens"
        )
    return max_total


def check_tokens(field: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Whether all of them are ids of the vocabulary.

    Raises:
        InputError: one is not; names `field`.
    """
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError(field, token, f"token ids must be whole numbers from 0 to {vocab_size - 1}")


def check_layers(spec: SpecConfig, num_layers: int) -> None:
    """Whether the layers that a draft is to run, or its parts are, exist in the target.

    Raises:
        ConfigError: a layer that is not there, or no layer to do without.
    """
    for part in spec.configs:
        check_layers(part, num_layers)
    if spec.drafter != "early_exit":
        return
    least = 3 if spec.skip_layers == "auto" else 2
    if num_layers < least:
        remedy = f"the target has {num_layers} layers, and a draft with fewer needs at least {least}"
        raise ConfigError("drafter", spec.drafter, remedy)
    if spec.exit_layer != "auto" and spec.exit_layer >= num_layers:
        raise ConfigError("exit_layer", spec.exit_layer, f"must be less than the target's {num_layers} layers")
    if spec.skip_layers is not None and spec.skip_layers != "auto":
        if max(spec.skip_layers) >= num_layers:
            remedy = f"the target's layers are numbered 0 to {num_layers - 1}"
            raise ConfigError("skip_layers", spec.skip_layers, remedy)
        if len(spec.skip_layers) == num_layers:
            raise ConfigError("skip_layers", spec.skip_layers, "leaves no layer to draft with")


UNQUEUED = -1  # the number of a request until the engine queues it


class Admission:
    """Checks requests and builds what they run with. May be used from several threads."""

    def __init__(self, target: LanguageModel, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._target, self._tokenizer = target, tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        runs_on(target.device)  # compiled here, where no request waits for it
        self._structures = StructureCompiler(tokenizer, target.vocab_size, tuple(sorted(eos_token_ids)))

    def warm(self) -> None:
        """Do now what the first request with a structure would wait for, and all others with it."""
        self._structures.warm()

    def prepare(
        self, prompt_ids: Sequence[int], params: SamplingParams, spec: SpecConfig, arrived_s: float | None = None
    ) -> PreparedRequest:
        """A request that the engine can queue; it has arrived at `arrived_s`, or else when this is called.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run.
        """
        arrived_s = time.perf_counter() if arrived_s is None else arrived_s
        target, tokenizer = self._target, self._tokenizer
        spec = spec.for_request(params.prediction)
        max_total = check_request(prompt_ids, params, spec, target, tokenizer is not None)
        rule = resolve(spec.rule, params.greedy, params.seed is not None, spec.allow_lossy, spec.shape_follows_draws)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return PreparedRequest(
            request=Request(UNQUEUED, tuple(prompt_ids), params, spec, seed, self._prediction_ids(params)),
            text=self._text(params, prompt_ids),
            end_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids),
            max_total_tokens=max_total,
            rule=rule,
            processors=self._processors(params, prompt_ids),
            noise=RaceNoise(seed, target.vocab_size, target.device) if needs_race(rule) else None,
            arrived_s=arrived_s,
        )

    def fresh_processors(self, request: Request) -> RequestProcessors | None:
        """The processors of a request before it emitted anything; None if it needs none. Raises as `prepare`."""
        return self._processors(request.params, request.prompt_ids)

    def _text(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TextAssembler:
        decoder = None
        if self._tokenizer is not None:
            decoder = Detokenizer(self._tokenizer, prompt_ids, has_specials=not params.skip_special_tokens)
        return TextAssembler(decoder, params.stop_strings, params.include_stop_str_in_output)

    def _processors(self, params: SamplingParams, prompt_ids: Sequence[int]) -> RequestProcessors | None:
        structure = self._structures.compile(params)
        ends = self.eos_token_ids.union(params.stop_token_ids)
        return make_processors(params, prompt_ids, self._target.vocab_size, ends, self._tokenizer, structure)

    def _prediction_ids(self, params: SamplingParams) -> tuple[int, ...]:
        prediction = params.prediction
        if prediction is None:
            return ()
        if isinstance(prediction, str):
            if self._tokenizer is None:
                raise InputError("prediction", prediction, "this model folder has no tokenizer; give token ids")
            return tuple(self._tokenizer.encode(prediction, add_special_tokens=False))
        check_tokens("prediction", prediction, self._target.vocab_size)
        return tuple(prediction)


def end_tokens(target: LanguageModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's end tokens, or the tokenizer's when the model's own files name none."""
    ids = target.eos_token_ids
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)
    return ids
