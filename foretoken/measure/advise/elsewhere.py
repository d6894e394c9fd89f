"""What the steps of another engine cost, and what lookups would have drafted of its answers, through its address.

The server decodes plainly. With r requests at once its steps have r rows, so the time of a step by rows is measured by
asking it that many requests at once. A step in which c requests have d draft tokens each is taken to cost what a step
of c * (1 + d) requests does: the same rows, behind more texts than it would read, so rather more than it would.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, median_low
from typing import Any

from foretoken.backend.answering import SERVED, Answer, Drafting, Question, answer_from
from foretoken.backend.http import Endpoint, HttpBackend, ServerAddress
from foretoken.backend.http_stream import Stream
from foretoken.engine.prompts import check_no_tool_calls
from foretoken.errors import ForetokenError, InputError
from foretoken.export.engines import NAMES
from foretoken.export.launch import plain_drafters
from foretoken.machine.identity import versions
from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.measure.advise.cells import Machine
from foretoken.measure.advise.costs import DrafterCosts, LoadCosts
from foretoken.measure.advise.launches import OTHERS, OURS
from foretoken.measure.advise.options import FREE_TO_CHANGE, AdviseOptions
from foretoken.measure.advise.report import ELSEWHERE, Measured
from foretoken.measure.advise.rounds import AnswerRounds, answered, known_rounds
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.progress import Tell, progress
from foretoken.model.names import model_folder
from foretoken.plan.profile import Curve
from foretoken.text.tokenizer import Tokenizer, load_tokenizer

_HEAD_CHARS = 16  # of an answer's text that its tokens must hold
_MIN_STEPS = 4  # in which all requests of a load decode together, for its step to be known
_LOOKUP = "lookup"
# By what a server names as the owner of its model.
_BY_OWNER = {OURS: OURS, "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "trtllm"}


@dataclass(frozen=True)
class _Answered:
    """A prompt as the server gets it and in tokens, and its answer."""

    prompt: EvalPrompt
    question: Question
    prompt_ids: tuple[int, ...]
    answer: Answer


def measured_elsewhere(
    options: AdviseOptions,
    candidates: Sequence[AdviseCandidate],
    prompts: Sequence[EvalPrompt],
    machines: Sequence[Machine],
) -> Measured:
    """Everything that the answer is made of, for the server at `options.url`. `options.target` is what it serves: its
    tokenizer is read here, no weights are.

    Raises:
        InputError: a candidate that is no lookup, none that the server's engine has, prompts of token ids, or a server
            that drafts already.
        ForetokenError: the server does not answer, or serves too few requests at once for any figure.
    """
    for one in candidates:
        if one.kind != _LOOKUP:
            remedy = "only lookups are judged through an address: start the engine with it, and compare by foretoken ab"
            raise InputError("drafts", one.name, remedy)
    folder = model_folder(options.target)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise InputError("target", options.target, "has no tokenizer, which reads the server's answers; name another")
    server = ServerAddress(options.url or "", options.model or "", options.key_variable)
    rows = rows_to_measure(options.loads, max(options.lengths))
    with progress(len(prompts) + len(rows)) as tell:
        with closing(HttpBackend(server)) as backend:
            engine = _engine_at(backend.owner, backend.model)
            candidates, failed = _offered(candidates, engine)
            server_is = {"name": backend.owner, "model": backend.model, "version": backend.version()}
            keys = {"prompts": [one.key for one in prompts]}
            about = {"models": [options.target], "versions": versions(), "server": server_is}
            with closing(kept_run(options.resume, "advise", keys, options, without=FREE_TO_CHANGE, **about)) as kept:
                asked, fields = _answers(backend, options, prompts, tokenizer, kept, tell)
        _check_tokenizer(options, asked, tokenizer)
        answers, drafting_s = _drafted(candidates, asked, tokenizer, folder)
        levels, notes = asyncio.run(_levels(server, options, asked, fields, rows, tell))
    costs = _costs(options, asked, levels, drafting_s)
    notes = [*_engine_notes(engine, backend.owner, failed), *notes]
    engines = (OURS, *OTHERS) if engine is None else (engine,)
    return Measured(candidates, answers, costs, (), None, machines, (), failed, notes, ELSEWHERE, engines)


def rows_to_measure(loads: Sequence[int], num_draft: int) -> list[int]:
    """Numbers of requests to ask at once, ascending: the loads, and powers of two to the rows of the largest step."""
    most = max(loads) * (1 + num_draft)
    powers = itertools.takewhile(lambda count: count < 2 * most, (2**place for place in range(64)))
    return sorted({*loads, *powers})


def steady_step_s(streams: Sequence[Stream]) -> float | None:
    """Seconds of a step while all of these answers came at once; None where they did for less than a few steps."""
    if any(stream.error or not stream.pieces for stream in streams):
        return None
    began = max(stream.pieces[0][0] for stream in streams)
    ended = min(stream.pieces[-1][0] for stream in streams)
    count = sum(number for stream in streams for at, number in stream.counted_pieces() if began < at <= ended)
    if ended <= began or count < _MIN_STEPS * len(streams):
        return None
    return (ended - began) * len(streams) / count


def _answers(
    backend: HttpBackend,
    options: AdviseOptions,
    prompts: Sequence[EvalPrompt],
    tokenizer: Tokenizer,
    kept: KeptFile,
    tell: Tell,
) -> tuple[list[_Answered], dict[str, Any]]:
    """The answers to all prompts, one after the other, and the fields with which the server answers plainly."""
    drafting, found = Drafting() if backend.capabilities.plain else Drafting(SERVED), []
    for place, prompt in enumerate(prompts):
        tell(f"answering {prompt.name}")
        question, ids = _question(options, prompt, tokenizer)
        answer = kept.once(f"prompt {place}", answer_from, partial(backend.answer, question, drafting))
        if answer.num_drafted:
            remedy = "it drafts already: start it without speculation, or compare both ways by foretoken ab"
            raise InputError("url", options.url, remedy)
        found.append(_Answered(prompt, question, tuple(ids), answer))
    return found, backend.fields(drafting)


def _drafted(
    candidates: Sequence[AdviseCandidate], asked: Sequence[_Answered], tokenizer: Tokenizer, folder: Path
) -> tuple[dict[str, list[AnswerRounds]], dict[str, float]]:
    """By candidate: its rounds on each answer, and the seconds in which it drafts for one request."""
    texts = []
    for one in asked:
        ids = list(one.answer.token_ids) or tokenizer.encode(one.answer.text, add_special_tokens=False)
        if len(ids) > 1:
            texts.append((one, ids))
    answers, drafting_s = {}, {}
    for candidate in candidates:
        found = [known_rounds(candidate, one.prompt, one.prompt_ids, ids, tokenizer, folder) for one, ids in texts]
        answers[candidate.name] = answered([rounds for rounds, _ in found], len(asked))
        drafting_s[candidate.name] = median(seconds for _, seconds in found)
    return answers, drafting_s


def _check_tokenizer(options: AdviseOptions, asked: Sequence[_Answered], tokenizer: Tokenizer) -> None:
    """Whether the server counts the tokens of the prompts as the target's tokenizer does, but for as many more of each:
    a start token, or a template's. Another tokenizer differs by another number on most prompts. Where the server gives
    the tokens of its answers, most of them must also be read as the texts that they came with.
    """
    pairs = [(len(one.prompt_ids), one.answer.num_prompt_tokens) for one in asked]
    counts = [(here, there) for here, there in pairs if there is not None]
    more = [there - here for here, there in counts]
    if more and sum(one != median_low(more) for one in more) > len(more) / 2:
        read, there = (sum(side) for side in zip(*counts, strict=True))
        remedy = f"reads the prompts as {read} tokens and the server as {there}: name the model that it serves"
        raise InputError("target", options.target, remedy)
    listed = [one.answer for one in asked if one.answer.token_ids and one.answer.text]
    others = sum(not _reads(tokenizer, one) for one in listed)
    if others > len(listed) / 2:
        remedy = f"reads the tokens of {others} of {len(listed)} answers as other texts: name the model that it serves"
        raise InputError("target", options.target, remedy)


def _reads(tokenizer: Tokenizer, answer: Answer) -> bool:
    """Whether the tokens of an answer are its text; characters may be incomplete at its end, and white space be cut.
    Tokens that mark thinking are in no text: they stand before it and within.
    """
    own, text = (one.rstrip("\ufffd").strip() for one in (tokenizer.decode(answer.token_ids), answer.text))
    return own == text or bool(own and text and (text[:_HEAD_CHARS] in own or text.startswith(own)))


def _question(options: AdviseOptions, prompt: EvalPrompt, tokenizer: Tokenizer) -> tuple[Question, list[int]]:
    """What the server is asked, and the tokens that it reads."""
    content = prompt.content
    if isinstance(content, str) and options.chat:
        content = ({"role": "user", "content": content},)
    if isinstance(content, str):
        return _asked(options, text=content), tokenizer.encode(content)
    messages = [one for one in content if not isinstance(one, int)]
    if not messages:
        raise InputError("prompts", prompt.name, "holds token ids, and a server takes texts; give prompt or messages")
    check_no_tool_calls(prompt.name, messages)
    if not all(isinstance(one.get("content"), str) for one in messages):
        raise InputError("prompts", prompt.name, "has a message without a text; leave out images")
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    return _asked(options, messages=tuple((str(one["role"]), one["content"]) for one in messages)), ids


def _asked(options: AdviseOptions, text: str = "", messages: tuple[tuple[str, str], ...] = ()) -> Question:
    return Question(
        text, messages, options.max_tokens, options.temperature, options.seed, ignore_eos=not options.stop_at_eos
    )


async def _levels(
    server: ServerAddress,
    options: AdviseOptions,
    asked: Sequence[_Answered],
    fields: Mapping[str, Any],
    rows: Sequence[int],
    tell: Tell,
) -> tuple[dict[int, float], list[str]]:
    """Seconds of a step by requests at once, as far as the time allows and the server takes them; and notes."""
    found: dict[int, float] = {}
    why = ""
    began = time.monotonic()
    async with Endpoint(server) as endpoint:
        await endpoint.open()
        for count in rows:
            tell(f"{count} requests at once")
            level_began = time.monotonic()
            streams = [Stream() for _ in range(count)]
            questions = [one.question for one, _ in zip(itertools.cycle(asked), streams, strict=False)]
            pairs = zip(questions, streams, strict=True)
            await asyncio.gather(*(endpoint.send(*pair, time.monotonic, fields) for pair in pairs))
            step_s = steady_step_s(streams)
            if step_s is None:
                failed = next((stream.error for stream in streams if stream.error), "")
                why = f"the server failed ({failed})" if failed else "it does not decode so many together"
                break
            found[count] = max(step_s, *found.values(), 0.0)
            now = time.monotonic()
            if now - began + 2 * (now - level_began) > options.budget_s:
                why = "the time was up"
                break
    if not found:
        remedy = "no step could be timed: give a larger max_tokens"
        raise ForetokenError(f"{options.url}: {why} with {rows[0]} requests at once; {remedy}")
    if max(found) == rows[-1]:
        return found, []
    return found, [f"Steps of more than {max(found)} rows were not measured, as {why}: they lie on a line beyond."]


def _costs(
    options: AdviseOptions, asked: Sequence[_Answered], levels: dict[int, float], drafting_s: dict[str, float]
) -> LoadCosts:
    """The costs as the adviser reads them, by requests at once and draft tokens."""
    by_rows = Curve(tuple(sorted(levels.items())))
    prompt_tokens = round(sum(len(one.prompt_ids) for one in asked) / len(asked))
    ttft_s = [one.answer.ttft_s for one in asked if one.answer.ttft_s is not None]
    target = {
        load: Curve(tuple((count, by_rows.seconds(load * (1 + count))) for count in (0, *options.lengths)))
        for load in options.loads
    }
    drafters = {
        name: DrafterCosts(False, {load: Curve(((max(options.lengths), load * seconds),)) for load in options.loads})
        for name, seconds in drafting_s.items()
    }
    prefill_s = max(0.0, median(ttft_s) - by_rows.seconds(1)) if ttft_s else 0.0
    return LoadCosts(prompt_tokens, prompt_tokens + options.max_tokens // 2, prefill_s, target, drafters)


def _engine_at(owner: str, model: str) -> str | None:
    """The engine whose server serves `model` and names this owner of it; None of one that is not known here."""
    if owner == model:  # as TGI does
        return "tgi"
    return _BY_OWNER.get(owner)


def _offered(
    candidates: Sequence[AdviseCandidate], engine: str | None
) -> tuple[Sequence[AdviseCandidate], Mapping[str, str]]:
    """The candidates that the engine has, and why not the others, by name; of an engine that is not known, all."""
    if engine is None or engine == OURS:
        return candidates, {}
    known = plain_drafters(engine)
    found = [one for one in candidates if one.spec.drafter in known]
    lookups = ", ".join(name for name in known if name != "draft_model")
    left_out = {one.name: f"{NAMES[engine]} has none; of lookups it has {lookups}" for one in candidates}
    if not found:
        raise InputError("drafts", ", ".join(left_out), f"{next(iter(left_out.values()))}: name one of those")
    return found, {name: reason for name, reason in left_out.items() if name not in {one.name for one in found}}


def _engine_notes(engine: str | None, owner: str, failed: Mapping[str, str]) -> list[str]:
    """What the reader must know of the engine: which it is, and what it lacks."""
    if engine is None:
        unknown = f"The server does not say which engine it is (its model is owned by {owner!r})"
        return [f"{unknown}: look whether yours has the drafter that is advised."]
    return [f"The server runs {NAMES[engine]}, so {name} was left out: {reason}." for name, reason in failed.items()]
