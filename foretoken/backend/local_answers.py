"""The engine of this process, asked one question at a time through its public interface."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from foretoken.backend.answering import (
    Answer,
    AnsweringBackend,
    Capabilities,
    Drafting,
    Question,
    as_messages,
    check_question,
)
from foretoken.backend.drafting import EVERY, parse_drafters
from foretoken.backend.registry import LOCAL, BackendOptions
from foretoken.backend.requesting import ApiChoice, ApiRequest, Reply
from foretoken.backend.rounds import TokenSpellings
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.chooser import Policy
from foretoken.core import StepOutput, TokenLogprobs
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError, ForetokenError, InputError


class _Watch:
    """The time and the engine's totals at the first tokens, which end the prefill."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.start = time.perf_counter()
        self.first_at: float | None = None
        self.num_first = 0
        self.first_totals = (0.0, 0.0, 0.0)

    def on_step(self, outputs: list[StepOutput]) -> None:
        if self.first_at is None and any(output.token_ids for output in outputs):
            self.first_at = time.perf_counter()
            self.num_first = sum(len(output.token_ids) for output in outputs)
            self.first_totals = self.totals()

    def totals(self) -> tuple[float, float, float]:
        """(draft, target and rule, rule alone) seconds so far."""
        stats = self.llm.engine.stats
        return stats.draft_s, stats.target_s + stats.rule_s, stats.rule_s


class LocalWay:
    """One configuration of drafting of an `LLM`.

    It has a policy of its own, which keeps what it measured (step times, acceptance) from answer to answer, as in a
    server. What drafters remember is the caller's: see `LLM.reset_drafters`.
    """

    def __init__(self, llm: LLM, spec: SpecConfig, name: str, takes_prediction: bool = False) -> None:
        self.llm, self.spec, self.name, self.takes_prediction = llm, spec, name, takes_prediction
        self._policy: Policy | None = None

    def spec_for(self, question: Question) -> SpecConfig:
        """The configuration that drafts for the question."""
        return self.spec.for_request(question.prediction if self.takes_prediction else None)

    def answer(self, question: Question, tenant: str) -> Answer:
        """Answer alone, timed outside the engine; requests of one `tenant` share prefixes and what was drafted from.

        Raises:
            ForetokenError: the engine failed, or gave no token.
        """
        llm = self.llm
        self._policy = llm.reset_controller(self._policy)
        params = SamplingParams(
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            ignore_eos=question.ignore_eos,
            tenant=tenant,
            prediction=question.prediction if self.takes_prediction else None,
        )
        prompt: str | list[int] = question.text
        if question.messages:
            prompt = llm.encode_chat(as_messages(question.messages))
        return self._timed(prompt, params)

    def _timed(self, prompt: str | list[int], params: SamplingParams) -> Answer:
        watch = _Watch(self.llm)
        output = self.llm.generate([prompt], params, spec=self.spec, on_step=watch.on_step)[0]
        stop = time.perf_counter()
        if isinstance(output.error, ForetokenError):
            raise output.error
        if watch.first_at is None:
            raise ForetokenError(f"{self.name} gave no token")
        draft_s, verify_s, rule_s = watch.totals()
        return Answer(
            token_ids=tuple(output.token_ids),
            text=output.text,
            num_emitted=len(output.token_ids),
            decode_tokens=len(output.token_ids) - watch.num_first,
            decode_s=stop - watch.first_at,
            ttft_s=watch.first_at - watch.start,
            e2e_s=stop - watch.start,
            num_steps=output.stats.num_steps,
            decode_steps=output.stats.num_steps - 1,
            num_drafted=output.stats.num_drafted,
            num_accepted=output.stats.num_accepted,
            draft_s=draft_s - watch.first_totals[0],
            verify_s=verify_s - watch.first_totals[1],
            rule_s=rule_s - watch.first_totals[2],
            wasted_s=output.stats.wasted_s,
            positions=tuple(output.stats.accepted_per_position),
        )


class LocalAnswers(AnsweringBackend):
    """An `LLM` as a backend; a `Drafting` has a drafter's name as its kind, and options as `--drafters` has them.

    Drafters keep what they remember from answer to answer until `reset`.
    """

    name = LOCAL

    def __init__(self, llm: LLM, draft: str | None = None) -> None:
        self.llm, self.draft = llm, draft
        self._ways: dict[Drafting, LocalWay] = {}
        self._num_resets = 0

    @property
    def capabilities(self) -> Capabilities:
        """All, but for conversations with a model that has no chat template."""
        tokenizer = self.llm.tokenizer
        has_template = tokenizer is not None and tokenizer.chat_template is not None
        return Capabilities(True, True, True, True, "positions", conversations=has_template)

    def version(self) -> str:
        """Of this package."""
        from foretoken import __version__

        return __version__

    def draftings(
        self, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int] | None = None
    ) -> Sequence[Drafting]:
        """Every registered drafter that needs no trained head, nor anything else that was not given."""
        given = {"prediction"} if self.draft is None else {"prediction", "draft"}
        found = []
        for choice in parse_drafters((EVERY,)):
            if choice.needs <= given:
                is_lookup = "draft" not in choice.takes
                numbers = num_drafts if lookup_num_drafts is None or not is_lookup else lookup_num_drafts
                is_free = not choice.needs and (self.draft is None or "draft" not in choice.takes)
                found += [Drafting(choice.name, n, "", choice.name, is_free) for n in (None, *numbers)]
        return found

    def way(self, drafting: Drafting) -> LocalWay:
        """What answers with this drafting.

        Raises:
            ConfigError: no such drafter or option, or a draft not given.
        """
        if drafting not in self._ways:
            spec, takes_prediction = SpecConfig(), False
            if drafting.kind is not None:
                (choice,) = parse_drafters((f"{drafting.kind}:{drafting.options}".removesuffix(":"),))
                if "draft" in choice.needs and self.draft is None:
                    raise ConfigError("draft", None, f"drafter {choice.name} needs a draft; open the backend with one")
                spec = choice.spec(num_draft=drafting.num_draft, draft=self.draft if "draft" in choice.takes else None)
                takes_prediction = "prediction" in choice.takes
            self._ways[drafting] = LocalWay(self.llm, spec, str(drafting.kind), takes_prediction)
        return self._ways[drafting]

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer one question; drafters are loaded before its time begins. Raises as `AnsweringBackend.answer`."""
        check_question(self.name, question, drafting, self.capabilities)
        way = self.way(drafting)
        self.llm.prepare(way.spec_for(question))
        return way.answer(question, f"{self.name} {self._num_resets}")

    def room(self, question: Question) -> tuple[int, int] | None:
        """The context holds the prompt and one token more."""
        if question.messages and not self.capabilities.conversations:
            return None
        messages = as_messages(question.messages)
        ids = self.llm.encode_chat(messages) if messages else self.llm.encode(question.text)
        return len(ids), self.llm.target.max_context_tokens - 1

    def counters(self) -> Mapping[str, float]:
        """Of the engine."""
        stats = self.llm.stats
        return {"drafted": stats.num_drafted, "accepted": stats.num_accepted}

    def reset(self) -> None:
        """Empty every drafter, and compute the prefixes of prompts anew."""
        self.llm.reset_drafters()
        self._num_resets += 1

    def close(self) -> None:
        """Free the models."""
        self.llm.close()


def open_local(options: BackendOptions) -> LocalAnswers:
    """An engine for the model.

    Raises:
        InputError, ModelError, StorageError: see `LLM`.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    llm = LLM(options.model, SpecConfig(), dtype=options.dtype, device=options.device)
    return LocalAnswers(llm, options.draft)


_NAMES = frozenset(field.name for field in fields(SamplingParams))


class LocalRequester:
    """See `Requester`; forms of answers are asked as `response_format`, and tools belong to a server."""

    num_together = 1

    def __init__(self, backend: LocalAnswers, drafting: Drafting) -> None:
        """Load what drafts.

        Raises:
            ConfigError, ModelError: see `LocalAnswers.way`.
        """
        self._llm, self._spec = backend.llm, backend.way(drafting).spec
        self._llm.prepare(self._spec)
        self._spellings = TokenSpellings(backend.llm.tokenizer)

    def ask(self, request: ApiRequest) -> Reply:
        """See `Requester`."""
        try:
            params = _params(request)
            prompt: str | list[int] = request.text
            if request.messages:
                prompt = self._llm.encode_chat(as_messages(request.messages))
            if request.stream:
                return self._streamed(prompt, params)
            output = self._llm.generate([prompt], params, spec=self._spec)[0]
        except InputError as error:
            return Reply(refused=str(error))
        for one in output.choices:
            if isinstance(one.error, InputError):
                return Reply(refused=str(one.error))
            if one.error is not None:
                raise ForetokenError(str(one.error)) from one.error
        choices = tuple(
            self._made(one.text, one.finish_reason, one.token_ids, one.logprobs or ()) for one in output.choices
        )
        return Reply(choices, len(output.prompt_ids), sum(len(one.token_ids) for one in output.choices))

    def _streamed(self, prompt: str | list[int], params: SamplingParams) -> Reply:
        text, ids, scored, reason = "", list[int](), list[TokenLogprobs](), ""
        for piece in self._llm.stream(prompt, params, self._spec):
            text += piece.text
            ids += piece.token_ids
            scored += piece.logprobs
            reason = piece.finish_reason or reason
        return Reply((self._made(text, reason, ids, scored),), None, len(ids))

    def _made(self, text: str, reason: str, ids: Any, scored: Any) -> ApiChoice:  # noqa: ANN401
        events = [self._spellings.event(one.token_id, one, "") for one in scored]
        return ApiChoice(
            text,
            reason,
            tuple(ids),
            tuple(event.text for event in events),
            tuple(one.logprob for one in scored),
            tuple({top.text: top.logprob for top in reversed(event.top)} for event in events),
        )


def _params(request: ApiRequest) -> SamplingParams:
    """The parameters that a request asks for.

    Raises:
        InputError: a field that the engine does not have.
    """
    given: dict[str, Any] = dict(request.fields)
    form: Mapping[str, Any] | None = given.pop("response_format", None)
    if form is not None:
        given["json_schema"] = form["json_schema"]["schema"]
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    for name in given:
        if name not in _NAMES:
            raise InputError(name, given[name], "is a field of a server; ask one by its address")
    return SamplingParams(**given, logprobs=request.logprobs)
