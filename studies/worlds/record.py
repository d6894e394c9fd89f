"""Record answers of the reference pair, and what drafters would have drafted at every place of them.

The answers are plain decoding's. A lookup is asked at each place of the finished answer. What the draft model would
draft is its own answer to the text so far, with the request's own temperature and seed: under the greedy and the
coupled rule these are exactly the drafts of drafter `draft_model`.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Sequence
from statistics import median

import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request, Verdict, empty_draft
from foretoken.draft.base import Feedback
from foretoken.draft.lookup_tree import Lookup, LookupTree
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.machine.identity import machine, versions
from foretoken.measure.load.prompts import Ask, asks
from studies.worlds.data import Look, Looks, RecordedAnswer, Recording

SLICES = ("code", "docstring", "edit", "json", "chat", "random")
PER_SLICE = 10
ANSWER_TOKENS = 64
PROMPT_TOKENS = 64
CHAIN_TOKENS = 12
NODES = 24
SEED = 0
LOOKUPS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_BATCH = 32
_PASSES = 3  # over an answer; the fastest look at each place counts
_NOTHING = Feedback(torch.empty(0, 0), (0,))
_numbers = itertools.count(-1, -1)  # of requests that no engine knows


def record(target: str, draft: str, per_slice: int = PER_SLICE, answer_tokens: int = ANSWER_TOKENS) -> Recording:
    """Answers to `per_slice` prompts of every slice; float32, so that batching cannot change a token."""
    with LLM(target, dtype="float32", max_batch_size=_BATCH, profile="off") as llm:
        found = asks(SLICES, per_slice, llm.encode, PROMPT_TOKENS, SEED)
        every = [ask for own in found.values() for ask in own]
        params = [_params(ask, place, answer_tokens) for place, ask in enumerate(every)]
        outputs = llm.generate([list(ask.prompt_ids) for ask in every], params)
        answers = [_told(output.token_ids, output.error) for output in outputs]
    chains = _chains(draft, every, answers)
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "target": target,
        "draft": draft,
        "dtype": "float32",
        "prompt_tokens": PROMPT_TOKENS,
        "seed": SEED,
    }
    recorded = [
        RecordedAnswer(
            slice=ask.slice,
            prompt=ask.name,
            num_prompt_tokens=len(ask.prompt_ids),
            tokens=answer,
            looks={name: look_through(made(), ask.prompt_ids, answer) for name, made in LOOKUPS.items()},
            chains={"draft_model": own},
        )
        for ask, answer, own in zip(every, answers, chains, strict=True)
    ]
    return Recording(about, tuple(recorded))


def look_through(drafter: Lookup, prompt_ids: Sequence[int], answer: Sequence[int]) -> Looks:
    """What a lookup shows at every place but the first, and the median over places of the seconds of a look."""
    spec = SpecConfig(drafter.name)
    request = Request(next(_numbers), tuple(prompt_ids), SamplingParams(), spec, 0)
    trees: list[LookupTree] = []
    took_s: list[float] = []
    drafter.start(request)
    try:
        for place, token in enumerate(answer[:-1]):
            before = (*prompt_ids, *answer[:place])[-1]
            entry = _entry(request, len(prompt_ids) + place - 1, before)
            drafter.commit(Batch((entry,)), empty_draft(1), Verdict(((),), ((),), (token,), ("bonus",)), _NOTHING)
            entry, times = _entry(request, len(prompt_ids) + place, token), []
            for _ in range(_PASSES):
                began = time.perf_counter()
                tree = drafter.look_up(entry)
                times.append(time.perf_counter() - began)
            trees.append(tree)
            took_s.append(min(times))
    finally:
        drafter.finish(request.request_id)
    return Looks(round(median(took_s), 9), tuple(Look(tree.tokens, tree.parents, tree.chances) for tree in trees))


def _entry(request: Request, start: int, token: int) -> BatchEntry:
    return BatchEntry(request, start, (token,), True, NODES, takes_trees=True)


def _params(ask: Ask, place: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=ask.temperature, seed=SEED + place, ignore_eos=True)


def _chains(draft: str, every: Sequence[Ask], answers: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """For each answer the draft model's chain at each place but the first, as long as the rest of the answer allows."""
    prompts: list[list[int]] = []
    params: list[SamplingParams] = []
    for number, (ask, answer) in enumerate(zip(every, answers, strict=True)):
        for place in range(len(answer) - 1):
            prompts.append([*ask.prompt_ids, *answer[: place + 1]])
            params.append(_params(ask, number, CHAIN_TOKENS))
    with LLM(draft, dtype="float32", max_batch_size=_BATCH, max_prompt_tokens=4096, profile="off") as llm:
        outputs = iter([_told(output.token_ids, output.error) for output in llm.generate(prompts, params)])
    return [tuple(itertools.islice(outputs, len(answer) - 1)) for answer in answers]


def _told(token_ids: Sequence[int], error: Exception | None) -> tuple[int, ...]:
    if error is not None:
        raise error
    return tuple(token_ids)
