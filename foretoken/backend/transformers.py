"""transformers beside us: `generate` on the same checkpoint, plain and with each of its ways to draft."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foretoken.backend.answering import (
    Answer,
    AnsweringBackend,
    Capabilities,
    Drafting,
    Question,
    answer_in_pieces,
    as_messages,
    check_question,
)
from foretoken.backend.registry import BackendOptions
from foretoken.errors import ForetokenError, InputError
from foretoken.model.gguf.header import is_gguf
from foretoken.model.names import model_folder

TRANSFORMERS = "transformers"
# `lookup` is its prompt lookup, `early_exit` its first layers as the draft; by the drafter of ours that each is like.
_COUNTERPARTS = {"assisted": "draft_model", "lookup": "ngram", "early_exit": "early_exit"}
# What the documentation of transformers suggests for prompt lookup.
_LOOKUP_TOKENS = 10
_LAYER = "layer="
# Two more after a fully accepted draft, else one less; from the number that was the default with this schedule.
_HEURISTIC, _HEURISTIC_START = "heuristic", 5


class _Clock:
    """A streamer that keeps the tokens, and of each call but the first, the prompt's, the time and their number."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.pieces: list[tuple[float, int]] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.pieces.append((time.perf_counter(), value.numel()))
            self.token_ids += value.flatten().tolist()
        self._has_prompt = True

    def end(self) -> None:
        pass


@contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, ForetokenError):
            raise
        raise ForetokenError(f"transformers failed: {error}") from error


class TransformersBackend(AnsweringBackend):
    """Target, draft and tokenizer in transformers, loaded when first needed."""

    name = TRANSFORMERS

    def __init__(self, target: Path, draft: Path | None, dtype: str, device: str) -> None:
        self._names = (target, draft)
        self._dtype = dtype
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device

    @cached_property
    def target(self) -> Any:  # noqa: ANN401 - a transformers model
        """The target's model."""
        return self._load(self._names[0])

    @cached_property
    def own_settings(self) -> Any:  # noqa: ANN401 - a transformers GenerationConfig
        """The target's own generation settings, read before any is changed."""
        return copy.deepcopy(self.target.generation_config)

    @cached_property
    def draft(self) -> Any:  # noqa: ANN401
        """The draft's model."""
        if self._names[1] is None:
            raise InputError("draft", None, "assisted generation needs a draft; open the backend with one")
        return self._load(self._names[1])

    @cached_property
    def tokenizer(self) -> Any:  # noqa: ANN401 - a transformers tokenizer
        """The target's tokenizer."""
        with _as_ours():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self._names[0])

    @property
    def capabilities(self) -> Capabilities:
        """All, but for conversations with a model that has no chat template; it does not count draft tokens."""
        has_template = self.tokenizer.chat_template is not None
        return Capabilities(True, True, True, True, "none", conversations=has_template)

    def version(self) -> str:
        """Of the library."""
        import transformers

        return str(transformers.__version__)

    def draftings(
        self, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int] | None = None
    ) -> Sequence[Drafting]:
        """Each way at its own default (where a model drafts: until its confidence falls below a threshold that
        adapts), with the number that follows acceptance, and at every fixed number.
        """
        lookups = num_drafts if lookup_num_drafts is None else lookup_num_drafts
        models: tuple[int | str | None, ...] = (None, _HEURISTIC, *num_drafts)
        ways: list[tuple[str, str, Sequence[int | str | None]]] = []
        if self._names[1] is not None:
            ways.append(("assisted", "", models))
        ways.append(("lookup", "", sorted({*lookups, _LOOKUP_TOKENS})))
        ways += [("early_exit", layer, models) for layer in exits(self._names[0])]
        return [
            Drafting(kind, number, options, _COUNTERPARTS[kind], is_free=kind != "assisted")
            for kind, options, numbers in ways
            for number in numbers
        ]

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer one question; `num_drafted` stays unknown, since `generate` does not tell.

        Raises:
            InputError: a way to draft that it does not have; see `AnsweringBackend.answer`.
            ForetokenError: transformers failed.
        """
        check_question(self.name, question, drafting, self.capabilities)
        clock = _Clock()
        with _as_ours():
            model = self.target
            inputs = torch.tensor([self._encode(question)], device=self._device)
            options = self._options(model, question, drafting)
            with torch.inference_mode(), torch.random.fork_rng(enabled=question.temperature > 0):
                if question.temperature > 0 and question.seed is not None:
                    torch.manual_seed(question.seed)
                start = time.perf_counter()
                model.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=clock, **options)
            stop = time.perf_counter()
        if not clock.pieces:
            raise ForetokenError("transformers gave no token")
        text = self.tokenizer.decode(clock.token_ids, clean_up_tokenization_spaces=False)
        return answer_in_pieces(clock.token_ids, text, clock.pieces, start, stop)

    def close(self) -> None:
        """Free the models."""
        for name in ("target", "draft"):
            self.__dict__.pop(name, None)

    def _load(self, name: Path) -> Any:  # noqa: ANN401
        with _as_ours():
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()
            logging.set_verbosity_error()
            return AutoModelForCausalLM.from_pretrained(name, dtype=self._dtype).to(self._device).eval()

    def _encode(self, question: Question) -> list[int]:
        if not question.messages:
            return list(self.tokenizer.encode(question.text))
        messages = as_messages(question.messages)
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _options(self, model: Any, question: Question, drafting: Drafting) -> dict[str, Any]:  # noqa: ANN401
        """Arguments of `generate`; what it has no argument for is set in the model's own settings."""
        options: dict[str, Any] = {"max_new_tokens": question.max_tokens, "do_sample": question.temperature > 0}
        if question.temperature > 0:
            options |= {"temperature": question.temperature, "top_k": 0, "top_p": 1.0}
        model.generation_config = copy.deepcopy(self.own_settings)
        model.generation_config.repetition_penalty = 1.0
        model.generation_config.min_p = None
        if question.ignore_eos:
            # An argument of None would be filled from the model's own settings, so the end is taken out there.
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        return options | self._drafting_options(model, drafting)

    def _drafting_options(self, model: Any, drafting: Drafting) -> dict[str, Any]:  # noqa: ANN401
        from transformers import GenerationConfig

        if drafting.kind is None:
            return {}
        if drafting.kind == "assisted":
            own = model.generation_config
            self.draft.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=0)
            _fix_length(self.draft.generation_config, drafting)
            return {"assistant_model": self.draft}
        if drafting.kind == "lookup":
            return {"prompt_lookup_num_tokens": drafting.num_draft or _LOOKUP_TOKENS}
        if drafting.kind == "early_exit":
            # The model is its own assistant, and carries an assistant's settings.
            _fix_length(model.generation_config, drafting)
            return {"assistant_early_exit": int(drafting.options.removeprefix(_LAYER))}
        raise InputError("drafting", drafting.kind, f"choose from {', '.join(_COUNTERPARTS)}")


def _fix_length(config: Any, drafting: Drafting) -> None:  # noqa: ANN401 - a transformers GenerationConfig
    if drafting.num_draft == _HEURISTIC:
        config.num_assistant_tokens = _HEURISTIC_START
        config.num_assistant_tokens_schedule = _HEURISTIC  # begins anew here with every answer
        config.assistant_confidence_threshold = 0.0
    elif drafting.num_draft is not None:
        config.num_assistant_tokens = drafting.num_draft
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0


def exits(target: Path) -> tuple[str, ...]:
    """After which layer early exit is tried: a quarter (as LayerSkip does) and half; none in a model of one layer."""
    try:
        layers = int(json.loads((target / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(f"{_LAYER}{layer}" for layer in dict.fromkeys((layers // 4, layers // 2)) if 0 < layer < layers)


def open_transformers(options: BackendOptions) -> TransformersBackend:
    """transformers on the checkpoints in two folders.

    Raises:
        InputError: a GGUF file, or an option that it does not have; ModelError: no such checkpoint.
    """
    target = model_folder(options.model)
    draft = None if options.draft is None else model_folder(options.draft)
    for path in (target, *(() if draft is None else (draft,))):
        if is_gguf(path):
            remedy = f"dequantises {path.name} when it loads it, so it runs another model; leave it out"
            raise InputError("backends", options.name, remedy)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return TransformersBackend(target, draft, options.dtype, options.device)
