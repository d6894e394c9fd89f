"""Whether a request can run at all, checked before anything is queued, and what the engine keeps for it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.routing import RoutingRules
from foretoken.core import Request
from foretoken.engine.request import RequestState, TextAssembler
from foretoken.engine.stats import RequestStats
from foretoken.errors import CapacityError, ConfigError, ContextLengthError, InputError
from foretoken.model.interface import LanguageModel
from foretoken.model.loader import parse_dtype
from foretoken.model.open import NUMERICS, open_device
from foretoken.model.processors import RequestProcessors, make_processors
from foretoken.model.randomness import RaceNoise
from foretoken.model.structure import StructureCompiler
from foretoken.model.tokenizer import Detokenizer, Tokenizer
from foretoken.verify import is_lossless, resolve

Prompt = str | Sequence[int]


def as_prompts(prompts: object) -> list[Prompt]:
    """One text, one list of ids, or a list of either, as a list of prompts; tensors and arrays of ids count as lists.

    Raises:
        InputError: anything else.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise InputError("prompts", prompts, "give a text, a list of token ids, or a list of those")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return [as_prompt(prompt) for prompt in prompts]


def as_prompt(prompt: object) -> Prompt:
    """One text, or one list of ids; a tensor or array of ids counts as a list.

    Raises:
        InputError: anything else.
    """
    plain = _plain(prompt)
    if not isinstance(plain, str | list):
        raise InputError("prompt", prompt, "give a text or a list of token ids")
    return plain


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple | range) else value


def check_limits(**limits: int | None) -> None:
    """Every limit is a whole number of at least 1, or None where that is allowed.

    Raises:
        ConfigError: names the limit.
    """
    for name, value in limits.items():
        if value is None and name in ("cache_tokens", "max_step_tokens"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(name, value, "must be a whole number of at least 1")


def check_share(name: str, value: object) -> None:
    """A share is a number from 0 to 1.

    Raises:
        ConfigError: names the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(name, value, "must be a number from 0 to 1")


def check_types(params: object, spec: object) -> None:
    """What `generate` takes beside the prompt.

    Raises:
        InputError: not a `SamplingParams`, not a `SpecConfig`.
    """
    check_params(params)
    check_spec(spec)


def check_params(params: object) -> None:
    """How to choose tokens.

    Raises:
        InputError: not a `SamplingParams`.
    """
    if not isinstance(params, SamplingParams):
        raise InputError("params", params, "give SamplingParams, or a list with one for each prompt")


def check_spec(spec: object) -> None:
    """Who drafts.

    Raises:
        InputError: not a `SpecConfig`.
    """
    if not isinstance(spec, SpecConfig):
        raise InputError("spec", spec, "give SpecConfig, or a list with one for each prompt")


def check_model_options(
    model: object, dtype: object, device: object, numerics: object, trace: object, on_profile: object
) -> None:
    """What `LLM` takes to load a model, as far as it can be told before anything is loaded.

    Raises:
        InputError: names the option.
    """
    if not isinstance(model, str | Path):
        raise InputError("model", model, "give a folder, a hub id, or reference:target")
    if not isinstance(dtype, str | torch.dtype):
        raise InputError("dtype", dtype, "give a name, such as auto, bfloat16 or float32")
    parse_dtype(dtype, torch.float32)
    if not isinstance(device, str | torch.device):
        raise InputError("device", device, "use auto, cpu, cuda or cuda:N")
    open_device(str(device))
    if numerics not in NUMERICS:
        raise ConfigError("numerics", numerics, f"choose one of {', '.join(NUMERICS)}")
    if trace is not None and (not isinstance(trace, str | Path) or not str(trace)):
        raise InputError("trace", trace, "give the name of a file, or leave it out")
    if on_profile is not None and not callable(on_profile):
        raise InputError("on_profile", on_profile, "give a function that takes a text, or leave it out")


def check_routing(routing: object, spec: object) -> None:
    """Rules for an engine whose requests draft as `spec` says unless they say otherwise; None: every request says it
    itself.

    Raises:
        InputError: not `RoutingRules`, or not a `SpecConfig`.
        ConfigError: rules that `spec` leaves nothing to decide.
    """
    if spec is not None:
        check_spec(spec)
    if routing is None:
        return
    if not isinstance(routing, RoutingRules):
        raise InputError("routing", routing, "give RoutingRules, or leave it out")
    if (
        isinstance(spec, SpecConfig)
        and routing != RoutingRules()
        and (spec.drafter is None or spec.num_draft != "auto")
    ):
        closed = (
            "nobody guesses: name a drafter"
            if spec.drafter is None
            else f"num_draft={spec.num_draft} is set: leave that to 'auto'"
        )
        raise ConfigError(
            "routing", routing, f"rules hold where the number of guesses is open, and {closed}, or leave this out"
        )


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
    for token in prompt_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < target.vocab_size:
            raise InputError("prompt", token, f"token ids must be whole numbers from 0 to {target.vocab_size - 1}")
    context = target.max_context_tokens
    if len(prompt_ids) >= context:
        raise ContextLengthError(
            "prompt",
            f"{len(prompt_ids)} tokens",
            f"the context holds {context} tokens; shorten the prompt to at most {context - 1}",
        )
    if params.stop_strings and not has_text:
        raise InputError(
            "stop",
            params.stop_strings,
            "stop strings need a tokenizer, and this model folder has none; leave `stop` out",
        )
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


def check_layers(spec: SpecConfig, num_layers: int) -> None:
    """Whether the layers that a draft is to run, or its parts are, exist in the target.

    Raises:
        ConfigError: a layer that is not there, or no layer to do without.
    """
    for part in spec.parts:
        if isinstance(part, SpecConfig):
            check_layers(part, num_layers)
    if spec.drafter != "early_exit":
        return
    least = 3 if spec.skip_layers == "auto" else 2
    if num_layers < least:
        raise ConfigError(
            "drafter",
            spec.drafter,
            f"the target has {num_layers} layers, and a draft with fewer needs at least {least}",
        )
    if spec.exit_layer != "auto" and spec.exit_layer >= num_layers:
        raise ConfigError("exit_layer", spec.exit_layer, f"must be less than the target's {num_layers} layers")
    if spec.skip_layers is not None and spec.skip_layers != "auto":
        if max(spec.skip_layers) >= num_layers:
            raise ConfigError(
                "skip_layers", spec.skip_layers, f"the target's layers are numbered 0 to {num_layers - 1}"
            )
        if len(spec.skip_layers) == num_layers:
            raise ConfigError("skip_layers", spec.skip_layers, "leaves no layer to draft with")


class Intake:
    """Turns what a caller asks into the state of a request that can run."""

    def __init__(self, target: LanguageModel, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._target, self._tokenizer = target, tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._structures = StructureCompiler(tokenizer, target.vocab_size, tuple(sorted(eos_token_ids)))

    def admit(
        self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams, spec: SpecConfig
    ) -> RequestState:
        """The state of a new request, ready to be queued.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run.
        """
        target, tokenizer = self._target, self._tokenizer
        max_total = check_request(prompt_ids, params, spec, target, tokenizer is not None)
        rule = resolve(spec.rule, params.greedy, params.seed is not None, spec.allow_lossy, spec.shape_follows_draws)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request = Request(request_id, tuple(prompt_ids), params, spec, seed, self._prediction(spec))
        return RequestState(
            request=request,
            text=TextAssembler(None if tokenizer is None else Detokenizer(tokenizer), params.stop_strings),
            eos_token_ids=self.eos_token_ids,
            max_total_tokens=max_total,
            rule=rule,
            processors=self.processors(request),
            noise=RaceNoise(seed, target.vocab_size, target.device) if rule == "coupled" else None,
            stats=RequestStats(rule=rule, lossy=not is_lossless(rule)),
        )

    def processors(self, request: Request) -> RequestProcessors | None:
        """What the request's parameters do to logits, as if nothing were emitted yet; None if they do nothing.

        Raises:
            InputError: tokens, texts or a structure that the target's vocabulary has no place for.
        """
        structure = self._structures.compile(request.params)
        eos = tuple(sorted(self.eos_token_ids))
        return make_processors(
            request.params, request.prompt_ids, self._target.vocab_size, eos, self._tokenizer, structure
        )

    def _prediction(self, spec: SpecConfig) -> tuple[int, ...]:
        """Token ids of the text that the caller expects."""
        if spec.prediction is None:
            return ()
        if isinstance(spec.prediction, str):
            if self._tokenizer is None:
                raise InputError("prediction", spec.prediction, "this model folder has no tokenizer; give token ids")
            return tuple(self._tokenizer.encode(spec.prediction, add_special_tokens=False))
        for token in spec.prediction:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._target.vocab_size:
                raise InputError(
                    "prediction", token, f"token ids must be whole numbers from 0 to {self._target.vocab_size - 1}"
                )
        return tuple(spec.prediction)
