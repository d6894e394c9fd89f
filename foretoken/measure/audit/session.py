"""The engine under audit: runs prompts, scores answers again, records drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretoken.config import SamplingParams, SpecConfig
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.engine.llm import LLM
from foretoken.engine.request import GenerateOutput, RequestState
from foretoken.engine.shadow.rescoring import ScoredRows, rescore
from foretoken.engine.shadow.sequential_test import DraftChildren
from foretoken.engine.shadow.shadow import children_of, children_of_distribution
from foretoken.engine.watch import RoundView, RoundWatcher
from foretoken.errors import InputError
from foretoken.measure.audit.options import AuditOptions, ChatPrompt, Prompt, prompt_name
from foretoken.model.interface import LanguageModel
from foretoken.verify.dispatch import rule_for

CHUNK_TOKENS = 256


@dataclass
class Recorder(RoundWatcher):
    """Observer that records what was drafted for every token of every request, in order of arrival, and which rules
    "auto" resolved to.
    """

    drafted: dict[int, list[DraftChildren | None]] = field(default_factory=dict)
    rules: set[str] = field(default_factory=set)

    def begin(self, state: RequestState) -> None:
        """A request was queued."""
        self.drafted[state.request_id] = []

    def round(self, view: RoundView) -> None:
        """Record one round."""
        if view.draft.lengths[view.b]:
            self.rules.add(rule_for(view.draft, view.b))
        self.drafted[view.output.request_id] += children_of(view)


@dataclass(frozen=True)
class Run:
    """Answers in the order of their prompts, the drafts for each token, and the rules that "auto" resolves to."""

    outputs: list[GenerateOutput]
    drafted: list[list[DraftChildren | None]]
    rules: frozenset[str]


class Session:
    """An open engine with the audit's prompts as token ids, truncated so that the answers fit."""

    def __init__(self, options: AuditOptions, prompts: Sequence[Prompt]) -> None:
        self.options = options
        # The only place that opens the audited models.
        self.llm = LLM(
            options.target,
            spec=options.spec,
            dtype=options.dtype,
            device=options.device,
            cache_tokens=options.cache_tokens,
            numerics=options.numerics,
            weights=options.weights,
        )
        self._num_begun, self.notes = 0, list[str]()
        try:
            self.prompts = self._encode(prompts)
        except InputError:
            self.llm.close()
            raise

    @property
    def target(self) -> LanguageModel:
        """The target model."""
        return self.llm.target

    @property
    def draft(self) -> LanguageModel | None:
        """The draft model, None for other drafters."""
        spec = self.options.spec
        drafters = () if spec.drafter == "auto" else self.llm.loaded_drafters(spec)
        return next((one.model for one in drafters if isinstance(one, DraftModelDrafter)), None)

    def models(self) -> Iterator[tuple[str, LanguageModel]]:
        """All models with a cache."""
        yield "target", self.target
        if self.draft is not None:
            yield "draft", self.draft

    def begin(self) -> None:
        """Forget what earlier checks left with drafters and in the cache: a check finds the same whatever was before
        it, so that a run that goes on makes the checks that a whole run makes.
        """
        self.llm.reset_drafters()
        self._num_begun += 1

    def prompts_in_turn(self, count: int) -> list[list[int]]:
        """`count` prompts, repeated if there are fewer."""
        return [self.prompts[i % len(self.prompts)] for i in range(count)]

    def answers(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], spec: SpecConfig, together: bool = True
    ) -> Run:
        """Answers to prompts, in one batch or one by one.

        Raises:
            ForetokenError: an answer failed.
        """
        params = [replace(one, tenant=f"check {self._num_begun} {one.tenant}") for one in params]
        recorder, watchers = Recorder(), self.llm.engine.watchers
        watchers.append(recorder)
        try:
            if together:
                outputs = self.llm.generate(list(prompts), list(params), spec)
            else:
                pairs = zip(prompts, params, strict=True)
                outputs = [self.llm.generate([prompt], one, spec)[0] for prompt, one in pairs]
        finally:
            watchers.remove(recorder)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return Run(outputs, list(recorder.drafted.values()), frozenset(recorder.rules))

    def rescore(self, output: GenerateOutput, params: SamplingParams) -> Iterator[ScoredRows]:
        """An answer scored again by the target."""
        return rescore(self.target, output.prompt_ids, output.token_ids, params, chunk_tokens=CHUNK_TOKENS)

    def draft_children(self, output: GenerateOutput, params: SamplingParams) -> list[DraftChildren | None] | None:
        """The draft model's distribution at every drafted position of an answer, recomputed; None without a draft model
        with room for it.
        """
        if self.draft is None or len(output.prompt_ids) + len(output.token_ids) > self.draft.max_context_tokens:
            return None
        drafted = [origin.kind in ("accepted", "residual") for origin in output.provenance]
        found: list[DraftChildren | None] = []
        for rows in rescore(self.draft, output.prompt_ids, output.token_ids, params, chunk_tokens=CHUNK_TOKENS):
            found += [
                children_of_distribution(distribution) if drafted[rows.first + i] else None
                for i, distribution in enumerate(rows.distributions)
            ]
        return found

    @property
    def exact(self) -> bool:
        """Whether a row is bitwise the same however rows are batched, so that every difference is an error."""
        return self.options.numerics == "strict"

    def repeats_draws(self, spec: SpecConfig) -> bool:
        """Whether sampling rules see the same probabilities in two runs of `spec`: target and draft compute in wide
        formats.

        Strict numerics apply to the target only.
        """
        rows = next(rescore(self.target, self.prompts[0], [0], SamplingParams(temperature=1.0)))
        wide = rows.dtype not in (torch.bfloat16, torch.float16)
        formats = {part.draft_dtype for part in _draft_models(spec)}
        wide_formats = {"float32", "auto"} if self.options.dtype == "float32" else {"float32"}
        return (wide or self.exact) and formats <= wide_formats

    def _encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        most = self.target.max_context_tokens - self.options.max_tokens
        if most < 1:
            remedy = f"must be smaller than the context of {self.target.max_context_tokens} tokens"
            raise InputError("max_tokens", self.options.max_tokens, remedy)
        text = next((prompt for prompt in prompts if not isinstance(prompt, list)), None)
        if self.llm.tokenizer is None and text is not None:
            remedy = "this model folder has no tokenizer; give a file of JSON lines with token ids under prompt_ids"
            raise InputError("prompts", text, remedy)
        found = []
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, ChatPrompt):
                ids = self.llm.encode_chat(prompt.messages)
            else:
                ids = self.llm.encode(prompt) if isinstance(prompt, str) else prompt
            if len(ids) > most and place < self.options.num_prompts:
                self.notes.append(
                    f"{prompt_name(place)} has {len(ids)} tokens, and its last {most} were asked: the context of "
                    f"{self.target.max_context_tokens} holds no more beside {self.options.max_tokens} of an answer. "
                    "Give shorter prompts, or a smaller --max-tokens."
                )
            found.append(ids[-most:])
        return found


def scored_place(scored: Iterable[ScoredRows], place: int) -> tuple[Tensor, float]:
    """Logits `[V]` of one place of an answer, and the difference between two of them that rounding explains."""
    for rows in scored:
        if rows.first <= place < rows.first + len(rows.tokens):
            i = place - rows.first
            return rows.logits[i].float(), float(rows.rounding[i])
    raise AssertionError(f"place {place} is not part of the answer")


def _draft_models(spec: SpecConfig) -> Iterator[SpecConfig]:
    """The configurations in `spec`, itself or parts of it, that name a draft model."""
    if spec.drafter == "draft_model":
        yield spec
    for part in spec.declared:
        yield from _draft_models(part)
