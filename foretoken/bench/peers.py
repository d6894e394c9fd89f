"""Other engines on the same checkpoint in the same run: transformers, and llama.cpp where it is installed."""

from __future__ import annotations

import copy
import itertools
import json
import os
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from foretoken.backend.answering import Answer
from foretoken.bench import llama_cpp
from foretoken.bench.llama_programs import LLAMA_CPP, LlamaCpp
from foretoken.bench.measure import Contender, SpeedSetting
from foretoken.bench.peer_kinds import EVERY, KINDS, TRANSFORMERS_KINDS
from foretoken.bench.workload import Prompt
from foretoken.config import SamplingParams
from foretoken.errors import ForetokenError
from foretoken.model.gguf.header import is_gguf

TRANSFORMERS = "transformers"
_COUNTERPARTS = {"assisted": "draft_model", "lookup": "ngram", "early_exit": "early_exit"}
# What the documentation of transformers suggests for prompt lookup.
_LOOKUP_TOKENS = 10
_LAYER = "layer="
# Two more after a fully accepted draft, else one less; from the number that was the default with this schedule.
_HEURISTIC, _HEURISTIC_START = "heuristic", 5


def contenders(
    target: Path,
    draft: Path | None,
    dtype: str,
    device: str,
    threads: int,
    num_drafts: Sequence[int],
    lookup_num_drafts: Sequence[int],
    kinds: Sequence[str] = (EVERY,),
) -> tuple[list[Contender], list[str]]:
    """Every setting of the other engines on the checkpoints in two folders, and a note for each engine that is not
    here.

    Lookups draft `lookup_num_drafts` tokens, what runs a model `num_drafts`: draft tokens that cost nothing pay
    further ahead.

    Raises:
        ForetokenError: llama.cpp is asked for but incomplete, or a checkpoint cannot be converted for it.
    """
    kinds = KINDS if EVERY in kinds else kinds
    found: list[Contender] = []
    missing: list[str] = []
    if is_gguf(target) or (draft is not None and is_gguf(draft)):
        missing.append("transformers was not measured: it dequantises GGUF files when it loads them.")
    else:
        found += _transformers(HuggingFace(target, draft, dtype, device), num_drafts, lookup_num_drafts, kinds)
    if not os.environ.get("FORETOKEN_LLAMA_CPP"):
        missing.append("llama.cpp was not measured: FORETOKEN_LLAMA_CPP does not name the folder of its programs.")
        return found, missing
    programs = Path(os.environ["FORETOKEN_LLAMA_CPP"])
    others, notes = llama_cpp.contenders(programs, target, draft, dtype, threads, num_drafts, lookup_num_drafts, kinds)
    notes.append(
        "llama.cpp reads its checkpoint anew for every answer (not timed); its plain speed is "
        "llama-bench's at the same depth, its first-token "
        "time the prompt's pass and one average step; it may run past the token limit by the end of a "
        "draft, and what it emitted is what counts."
    )
    return [*found, *others], [*missing, *notes]


def _transformers(
    library: HuggingFace, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int], kinds: Sequence[str]
) -> list[Contender]:
    """Plain decoding and its ways to speculate: each at its own default (where a model drafts: until its confidence
    falls below a threshold that adapts), with the number that follows acceptance, and at every fixed number.
    """
    settings = [SpeedSetting(TRANSFORMERS, TRANSFORMERS)]
    wanted = [
        kind for kind in TRANSFORMERS_KINDS if kind in kinds and (kind != "assisted" or library.names[1] is not None)
    ]
    for kind in wanted:
        numbers: list[int | str] = (
            sorted({*lookup_num_drafts, _LOOKUP_TOKENS}) if kind == "lookup" else ["auto", _HEURISTIC, *num_drafts]
        )
        for options, number in itertools.product(_exits(library.names[0]) if kind == "early_exit" else ("",), numbers):
            name = "-".join(filter(None, (TRANSFORMERS, kind, options, "" if number == "auto" else str(number))))
            free = kind != "assisted"
            settings.append(
                SpeedSetting(
                    name,
                    TRANSFORMERS,
                    kind,
                    number,
                    options=options,
                    counterpart=_COUNTERPARTS[kind],
                    free=free,
                )
            )
    return [Generate(setting, library) for setting in settings]


def _exits(target: Path) -> tuple[str, ...]:
    """After which layer early exit is tried: a quarter (as LayerSkip does) and half of them; none in a model of one
    layer.
    """
    try:
        layers = int(json.loads((target / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(f"{_LAYER}{layer}" for layer in dict.fromkeys((layers // 4, layers // 2)) if 0 < layer < layers)


class CausalLM(Protocol):
    """What is used of a transformers model."""

    generation_config: Any

    def generate(self, inputs: torch.Tensor, **options: object) -> object:
        """Continue `inputs` [1, T]."""
        ...


class TextTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids, special ones as the model wants them."""
        ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool) -> str:
        """The text of token ids."""
        ...


class HuggingFace:
    """Target, draft and tokenizer in transformers, loaded when first needed and shared by all its settings."""

    def __init__(self, target: Path, draft: Path | None, dtype: str, device: str) -> None:
        self.names = (target, draft)
        self.dtype = dtype
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device

    @cached_property
    def target(self) -> CausalLM:
        """The target's model."""
        return self._load(self.names[0])

    @cached_property
    def own_settings(self) -> Any:  # noqa: ANN401 - a transformers GenerationConfig
        """The target's own generation settings, read before any is changed."""
        return copy.deepcopy(self.target.generation_config)

    @cached_property
    def draft(self) -> CausalLM:
        """The draft's model."""
        assert self.names[1] is not None
        return self._load(self.names[1])

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The target's tokenizer."""
        from transformers import AutoTokenizer

        tokenizer: TextTokenizer = AutoTokenizer.from_pretrained(self.names[0])
        return tokenizer

    def _load(self, name: Path) -> CausalLM:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        model: CausalLM = AutoModelForCausalLM.from_pretrained(name, dtype=self.dtype).to(self.device).eval()
        return model


class _Clock:
    """A streamer that records the time and the tokens of every call; the first call, with the prompt, is skipped."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[int]]] | None = None

    def put(self, value: torch.Tensor) -> None:
        if self.seen is None:
            self.seen = []
            return
        self.seen.append((time.perf_counter(), value.flatten().tolist()))

    def end(self) -> None:
        pass


class Generate:
    """A setting of `transformers` `generate`."""

    def __init__(self, setting: SpeedSetting, library: HuggingFace) -> None:
        self.setting = setting
        self.library = library

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer greedily; `num_drafted` stays unknown, since `generate` does not tell.

        Raises:
            ForetokenError: transformers failed.
        """
        clock = _Clock()
        try:
            model, tokenizer = self.library.target, self.library.tokenizer
            inputs = torch.tensor([tokenizer.encode(prompt.text)], device=self.library.device)
            options = self._options(model, params)
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=clock, **options)
            stop = time.perf_counter()
        except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise ForetokenError(f"transformers failed: {error}") from error
        pieces = clock.seen or []
        if not pieces:
            raise ForetokenError("transformers gave no token")
        ids = [token for _, piece in pieces for token in piece]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return Answer(
            token_ids=tuple(ids),
            text=text,
            num_emitted=len(ids),
            decode_tokens=len(ids) - len(pieces[0][1]),
            decode_s=stop - pieces[0][0],
            ttft_s=pieces[0][0] - start,
            num_steps=len(pieces),
            decode_steps=len(pieces) - 1,
            num_accepted=len(ids) - len(pieces),
        )

    def _options(self, model: CausalLM, params: SamplingParams) -> dict[str, Any]:
        from transformers import GenerationConfig

        options: dict[str, Any] = {"max_new_tokens": params.max_tokens, "do_sample": False}
        model.generation_config = copy.deepcopy(self.library.own_settings)
        if params.ignore_eos:
            # An argument of None would be filled from the model's own settings, so the end is taken out there.
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        if self.setting.drafter == "assisted":
            draft = self.library.draft
            draft.generation_config = GenerationConfig(
                eos_token_id=model.generation_config.eos_token_id, pad_token_id=0
            )
            self._fix_length(draft.generation_config)
            options["assistant_model"] = draft
        elif self.setting.drafter == "lookup":
            options["prompt_lookup_num_tokens"] = self.setting.num_draft
        elif self.setting.drafter == "early_exit":
            self._fix_length(
                model.generation_config
            )  # the model is its own assistant, and carries an assistant's settings
            options["assistant_early_exit"] = int(self.setting.options.removeprefix(_LAYER))
        return options

    def _fix_length(self, config: Any) -> None:  # noqa: ANN401 - a transformers GenerationConfig
        if self.setting.num_draft == _HEURISTIC:
            config.num_assistant_tokens = _HEURISTIC_START
            config.num_assistant_tokens_schedule = _HEURISTIC  # begins anew here with every answer
            config.assistant_confidence_threshold = 0.0
        elif self.setting.num_draft != "auto":
            config.num_assistant_tokens = self.setting.num_draft
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0


def versions() -> dict[str, str]:
    """Versions of the other engines that are here."""
    import transformers

    found = {TRANSFORMERS: str(transformers.__version__)}
    folder = os.environ.get("FORETOKEN_LLAMA_CPP")
    if folder:
        found[LLAMA_CPP] = LlamaCpp.find(Path(folder)).version()
    return found
