"""Drafts that are asked for once an answer is known, against those that were made while it came."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken import LLM, SpecConfig
from foretoken.control.candidates import Preview
from foretoken.draft.ngram import NgramDrafter
from foretoken.simulate.inputs import Job
from foretoken.simulate.sim_request import Round
from studies.validation.answers import Answer, look_through, looked_through
from studies.validation.calibrate import calibrate
from studies.validation.records import told
from tests.helpers.checkpoints import token_ids

#   The answer is 5 6 7 8 9. At its first place 6 or 4 were shown, behind 6 a 7, behind that a 9.
SHOWN = Preview((-1, -1, 0, 2), (0.6, 0.3, 0.5, 0.4), (6, 4, 7, 9))


def test_a_record_of_what_was_shown_by_hand() -> None:
    """The path is the answer's own; fewer draft tokens are the first ones; what a round emits ends with the answer."""
    nothing = Preview()
    record = told((5, 6, 7, 8, 9), (SHOWN, nothing, nothing, nothing), 0.5)
    assert record.rounds == (Round((-1, -1, 0, 2), (0, 2)), Round(), Round(), Round())
    assert record.at(0, 2) == Round((-1, -1), (0,))
    assert record.preview_at(0, 3) == Preview((-1, -1, 0), (0.6, 0.3, 0.5), (6, 4, 7))
    assert record.preview_at(4, 9) == SHOWN  # beyond its end the answer begins anew
    assert [record.emitted(place, 3) for place in (0, 2, 4)] == [(6, 7, 8), (8, 9), (6, 7, 8)]
    assert record.preview_s == 0.5


@pytest.mark.parametrize("num_draft", [1, 4, 9])
def test_what_was_really_drafted(pair: SimpleNamespace, num_draft: int) -> None:
    """Every round that ran, whatever its budget, is the beginning of what is asked for afterwards; places between are
    known as well.
    """
    jobs = [Job(0.0, 24, 60, "code"), Job(0.0, 9, 40, "code")]
    prompts = [token_ids(job.prompt_tokens, seed=5 + index) for index, job in enumerate(jobs)]
    with LLM(pair.target, dtype="float32") as llm:
        done = calibrate(llm, jobs, prompts, SpecConfig("ngram", num_draft=num_draft))
    drafter = NgramDrafter()
    records = looked_through(drafter, SpecConfig("ngram"), done.answers)["code"]
    assert not drafter._indexes
    checked = 0
    for record, rounds, answer in zip(records, done.run.rounds(), done.answers, strict=True):
        assert len(record.rounds) == len(answer.token_ids) - 1
        for place, (budget, found) in rounds.items():
            assert record.at(place, budget) == found
            checked += len(found.path)
    assert checked > 10


def test_an_answer_of_one_token_tells_nothing() -> None:
    assert look_through(NgramDrafter(), SpecConfig("ngram"), Answer("code", (1, 2), (3,))) is None
