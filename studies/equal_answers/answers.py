"""Answers of one checkpoint under a setting in each condition, and those of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.engine.request import GenerateOutput
from foretoken.errors import InputError

PLAIN = "plain"
PASSES = ("cold", "cached")
_TREES = ("static", "best_first")  # of a draft model, as settings
_WITH_DRAFT = ("draft_model", "cascade", "mix", *_TREES)
_LEFT_OUT = 9  # of a prediction every so manyth token of the answer is left out: a prediction that is right proves less

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """A setting answers the prompts from `first` to before `end`, so many at once, each one cold and then cached."""

    target: str
    setting: str
    num_requests: int
    first: int
    end: int

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """What tells it from all other turns of a run."""
        return (self.target, self.setting, self.num_requests, self.first, self.end)


def spec_of(setting: str, draft: str | None, num_draft: int) -> SpecConfig:
    """The configuration that a setting names: `plain`, a drafter, or a tree of the draft model (`static`,
    `best_first`). All but `auto`, which chooses the number, draft `num_draft` tokens: a controller that finds a drafter
    slow would let it draft nothing.

    Raises:
        ConfigError: no such drafter.
        InputError: a setting that needs a draft model, and there is none.
    """
    if setting == PLAIN:
        return SpecConfig(None)
    if setting == "auto":
        return SpecConfig("auto")
    if setting in _WITH_DRAFT and draft is None:
        raise InputError("draft", draft, f"{setting} needs one")
    if setting in _TREES:
        return SpecConfig("draft_model", draft=draft, num_draft=num_draft, tree=setting)
    return SpecConfig(setting, draft=draft if setting in _WITH_DRAFT else None, num_draft=num_draft)


class Answerer:
    """One engine, whose settings share neither prompts in the cache nor what drafters remember.

    `max_tokens` is the most tokens of an answer. Between the two passes of a turn everything is kept: in the second one
    the prompts are in the prefix cache, and the drafters that remember answers have seen these.
    """

    def __init__(self, llm: LLM, draft: str | None, num_draft: int, max_tokens: int) -> None:
        self._llm, self._draft, self._num_draft, self._max_tokens = llm, draft, num_draft, max_tokens
        self._tenants = itertools.count()

    def answer(self, turn: Turn, texts: Sequence[str], expected: Mapping[int, Tokens]) -> list[dict[str, Any]]:
        """What became of each prompt of the turn in each pass, as JSON values; `texts` and `expected` are those of all
        prompts, `expected` as far as they are known.

        Raises:
            ForetokenError: an answer failed.
        """
        spec = spec_of(turn.setting, self._draft, self._num_draft)
        self._llm.reset_drafters(spec)
        tenant = f"turn {next(self._tenants)}"
        params = {
            place: SamplingParams(
                max_tokens=self._max_tokens,
                temperature=0.0,
                tenant=tenant,
                prediction=_prediction(expected[place]) if turn.setting == "predicted" else None,
            )
            for place in range(turn.first, turn.end)
        }
        found = []
        for places in _groups(turn):
            for name in PASSES:
                outputs = self._llm.generate(
                    [texts[place] for place in places], [params[place] for place in places], spec
                )
                found += [_line(place, name, output) for place, output in zip(places, outputs, strict=True)]
        return found


def _groups(turn: Turn) -> Iterator[Sequence[int]]:
    """Which prompts are submitted together: each on its own, or all, of which the engine runs as many as it may."""
    places = range(turn.first, turn.end)
    yield from ([place] for place in places) if turn.num_requests == 1 else [places]


def _prediction(answer: Tokens) -> Tokens:
    return tuple(token for place, token in enumerate(answer) if place % _LEFT_OUT != _LEFT_OUT - 1)


def _line(place: int, name: str, output: GenerateOutput) -> dict[str, Any]:
    if output.error is not None:
        raise output.error
    stats = output.stats
    counts = ("num_cached_tokens", "num_drafted", "num_accepted", "num_probed", "num_near_ties", "num_preempted")
    return {"place": place, "pass": name, "token_ids": list(output.token_ids)} | {
        one: getattr(stats, one) for one in counts
    }


class Transformers:
    """Greedy answers of transformers in float32 to the same prompts."""

    def __init__(self, folder: Path, end_ids: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._end_ids = list(end_ids)

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], max_tokens: int) -> Tokens:
        """The tokens behind `prompt`, with the one that ends the answer."""
        inputs = torch.tensor([list(prompt)])
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self._end_ids,
            pad_token_id=self._end_ids[0],
        )
        return tuple(output[0, len(prompt) :].tolist())
