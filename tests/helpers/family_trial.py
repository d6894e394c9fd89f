"""What foretoken makes of one registered family: its answers, to the end of the context, against transformers' own."""

from __future__ import annotations

import gc
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, SamplingParams, SpecConfig, UnsupportedModelError
from foretoken.model.hf import TransformersModel
from foretoken.model.quiet import quiet_transformers
from tests.helpers.checkpoints import token_ids
from tests.helpers.families import CONTEXT, VOCABULARY, disturb, family_model, write_family

NATIVE, CACHED, RECOMPUTED, REFUSED, NOT_BUILT = "native", "transformers", "recomputed", "refused", "not built"
HOWS = (NATIVE, CACHED, RECOMPUTED, REFUSED, NOT_BUILT)
# A choice between two tokens that are closer than this is rounding's.
_NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Finding:
    """How a family is run, or why it is not; `differences` should be empty."""

    family: str
    how: str
    note: str = ""
    differences: tuple[str, ...] = ()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"drafter": "ngram", "num_draft": 4},
    "draft": {"drafter": "draft_model", "num_draft": 3},
    "static tree": {"drafter": "draft_model", "num_draft": 5, "tree": "static"},
    "best first tree": {"drafter": "draft_model", "num_draft": 5, "tree": "best_first"},
}


def try_family(family: str, folder: Path, ways: Sequence[str] = tuple(WAYS), num_prompts: int = 2) -> Finding:
    """Write a small checkpoint of `family` and one like it for drafting into `folder`, and compare several ways of
    generating.
    """
    try:
        with quiet_transformers():
            model = family_model(family)
            write_family(model, family, folder / "target")
            write_family(disturb(model), family, folder / "draft")
    except Exception as error:  # noqa: BLE001 - whatever transformers cannot build is a finding
        return Finding(family, NOT_BUILT, _first_line(error))
    try:
        llm = LLM(folder / "target", dtype="float32", profile="off")
    except UnsupportedModelError as error:
        reason = (
            str(error)
            .removeprefix(f"model_type={family!r} ")
            .removesuffix(": foretoken runs decoder-only causal language models")
        )
        return Finding(family, REFUSED, reason)
    try:
        return _compare(family, folder, llm, ways, num_prompts)
    finally:
        llm.close()
        gc.collect()


def _compare(family: str, folder: Path, llm: LLM, ways: Sequence[str], num_prompts: int) -> Finding:
    target = llm.target
    how = (
        CACHED
        if isinstance(target, TransformersModel) and target.can_crop
        else RECOMPUTED
        if isinstance(target, TransformersModel)
        else NATIVE
    )
    context = min(target.max_context_tokens, CONTEXT)
    oracle = _Oracle(folder / "target")
    fitting = (prompt[: context // 2] for prompt in _PROMPTS)
    prompts = list(islice((prompt for prompt in fitting if oracle.is_clear(prompt, context)), num_prompts))
    assert len(prompts) == num_prompts, f"{family}: the answers hang on near ties"
    params = [SamplingParams(max_tokens=context - len(prompt), ignore_eos=True) for prompt in prompts]
    differences = []
    for way in ways:
        draft = {"draft": str(folder / "draft")} if WAYS[way].get("drafter") == "draft_model" else {}
        for prompt, output in zip(
            prompts, llm.generate(prompts, params, SpecConfig(**WAYS[way], **draft)), strict=True
        ):
            expected, got = oracle.recomputed(prompt, context), list(output.token_ids)
            if output.error is not None:
                differences.append(f"{way}: {_first_line(output.error)}")
            elif got != expected:
                differences.append(f"{way}: token {_first_difference(got, expected)} of {len(expected)} differs")
    notes = [f"context {context} of {CONTEXT} tokens"] if context != CONTEXT else []
    if any(oracle.generated(prompt, context) != oracle.recomputed(prompt, context) for prompt in prompts):
        notes.append("generate() of transformers differs from its own forward without a cache, which is followed")
    return Finding(family, how, "; ".join(notes), tuple(differences))


# Long ones that repeat themselves, so that n-grams are found, and short ones.
_PROMPTS = [
    token_ids(8, VOCABULARY, seed=seed) * 3 if seed % 2 else token_ids(5, VOCABULARY, seed=seed)
    for seed in range(1, 13)
]


class _Oracle:
    """transformers: its greedy answers without a cache, and those of `generate`."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        with quiet_transformers():
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = GenerationConfig()
        self._known: dict[tuple[int, ...], tuple[list[int], float]] = {}

    def recomputed(self, prompt: list[int], context: int) -> list[int]:
        return self._answer(prompt, context)[0]

    def is_clear(self, prompt: list[int], context: int) -> bool:
        return self._answer(prompt, context)[1] > _NEAR_TIE

    @torch.inference_mode()
    def _answer(self, prompt: list[int], context: int) -> tuple[list[int], float]:
        """The tokens up to the end of the context, and the smallest lead of one over the next best."""
        key = tuple(prompt)
        if key not in self._known:
            text, lead = list(prompt), float("inf")
            while len(text) < context:
                best = self._model(torch.tensor([text]), use_cache=False).logits[0, -1].float().topk(2)
                lead = min(lead, float(best.values[0] - best.values[1]))
                text.append(int(best.indices[0]))
            self._known[key] = (text[len(prompt) :], lead)
        return self._known[key]

    @torch.inference_mode()
    def generated(self, prompt: list[int], context: int) -> list[int]:
        try:
            with quiet_transformers(), redirect_stdout(io.StringIO()):  # Reformer prints
                ids = torch.tensor([prompt])
                text: Any = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=context - len(prompt)
                )
        except Exception:  # noqa: BLE001 - transformers' own generate fails: no answer
            return []
        return text[0, len(prompt) :].tolist()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _first_difference(got: list[int], expected: list[int]) -> int:
    return next(
        (place for place, (left, right) in enumerate(zip(got, expected, strict=False)) if left != right),
        min(len(got), len(expected)),
    )
