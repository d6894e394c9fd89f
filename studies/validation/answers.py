"""What a drafter that needs only the text would have drafted at every position of a known answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.candidates import Preview
from foretoken.control.config import PolicyConfig
from foretoken.core import Batch, BatchEntry, Request, Verdict, empty_draft
from foretoken.draft.base import Feedback
from foretoken.draft.lookup_tree import Lookup
from foretoken.simulate.sim_request import Record
from studies.validation.records import told

FROM_TEXT = (
    "ngram",
    "suffix",
)  # drafters whose drafts follow from the request's own text; recycling learns from other requests too

_NOTHING = Feedback(torch.empty(0, 0), (0,))
_numbers = itertools.count(-1, -1)  # of the requests that are asked for: no engine counts below 0


@dataclass(frozen=True)
class Answer:
    """What a request of a run was asked and said, in tokens; `name` is the slice that its prompt is from."""

    name: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def look_through(drafter: Lookup, spec: SpecConfig, answer: Answer) -> Record | None:
    """The record of an answer; None of one that is too short to draft for.

    A chain or tree of the most draft tokens that the policy considers is asked for at each place, and fewer are its
    first ones. That is exact of a drafter that drafts the same for every budget, as far as it goes (ngram).
    """
    if len(answer.token_ids) < 2:
        return None
    request = Request(next(_numbers), answer.prompt_ids, SamplingParams(temperature=0.0), spec, 0)
    previews: list[Preview] = []
    took_s: list[float] = []
    drafter.start(request)
    try:
        for place, token in enumerate(answer.token_ids[:-1]):
            before = _entry(
                request, len(answer.prompt_ids) + place - 1, (*answer.prompt_ids, *answer.token_ids[:place])[-1]
            )
            drafter.commit(Batch((before,)), empty_draft(1), Verdict(((),), ((),), (token,), ("bonus",)), _NOTHING)
            began = time.perf_counter()
            tree = drafter.look_up(_entry(request, len(answer.prompt_ids) + place, token))
            took_s.append(time.perf_counter() - began)
            previews.append(Preview(tree.parents, tree.chances, tree.tokens))
    finally:
        drafter.finish(request.request_id)
    return told(answer.token_ids, previews, median(took_s))


def _entry(request: Request, start: int, token: int) -> BatchEntry:
    return BatchEntry(request, start, (token,), True, PolicyConfig.max_num_draft, takes_trees=True)


def looked_through(drafter: Lookup, spec: SpecConfig, answers: Sequence[Answer]) -> dict[str, list[Record]]:
    """The records of answers, by their slices."""
    found: dict[str, list[Record]] = {}
    for answer in answers:
        record = look_through(drafter, spec, answer)
        if record is not None:
            found.setdefault(answer.name, []).append(record)
    return found
