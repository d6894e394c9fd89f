"""The cursor follows a prediction, loses it, and takes it up again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from foretoken import LLM, InputError, SamplingParams, SpecConfig
from foretoken.draft.predicted import PredictedDrafter, num_followed
from tests.helpers.checkpoints import token_ids
from tests.helpers.rounds import Alone

TEXT = np.random.default_rng(0).permutation(200).tolist()  # no token twice
LOOP = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6]  # every anchor of up to three tokens stands several times


def alone(prediction: list[int]) -> Alone:
    return Alone(PredictedDrafter(), (999,), prediction=prediction)


def test_a_right_prediction_takes_few_rounds() -> None:
    rounds, wasted = alone(TEXT).run(TEXT, num_draft=12)
    assert (rounds, wasted) == (1 + 16, 0)  # the first token, then 13 a round, and 199 = 15 * 13 + 4


@pytest.mark.parametrize(
    ("answer", "max_rounds"),
    [
        ([*TEXT[:80], 500, *TEXT[81:]], 22),  # a changed word
        ([*TEXT[:80], 500, 501, 502, *TEXT[80:]], 25),  # an insertion
        ([*TEXT[:80], *TEXT[100:]], 20),  # a deletion
        ([500, 501, *TEXT], 24),  # something before it
        ([*TEXT[:60], 500, *TEXT[61:90], 501, *TEXT[95:150], 502, 503, *TEXT[150:]], 30),  # several edits
        ([*TEXT[:100], *TEXT[:100]], 22),  # back to the start
        (TEXT[50:], 18),  # the start is missing
    ],
)
def test_after_an_edit_the_prediction_is_taken_up_again(answer: list[int], max_rounds: int) -> None:
    rounds, wasted = alone(TEXT).run(answer, num_draft=12)
    assert rounds <= max_rounds
    assert wasted <= 12 * 4  # a whole draft at each place where the answer leaves


def test_nothing_is_drafted_while_the_answer_has_left() -> None:
    one = alone(TEXT)
    one.emit(*TEXT[:20])
    assert one.chain(5) == TEXT[20:25]
    for token in range(500, 520):
        one.emit(token)
        assert one.chain(5) == []
    one.emit(TEXT[40])
    assert one.chain(5) == []  # one token in common is noise
    one.emit(TEXT[41])
    assert one.chain(5) == TEXT[42:46]  # twice what agreed, at first
    one.emit(*TEXT[42:46])
    assert one.chain(9) == TEXT[46:55]


def test_nothing_is_drafted_past_the_end() -> None:
    one = alone(TEXT)
    one.emit(*TEXT[:-2])
    assert one.chain(9) == TEXT[-2:]
    one.emit(*TEXT[-2:])
    assert one.chain(9) == []
    one.emit(700)
    assert one.chain(9) == []


def test_a_place_behind_where_it_was_lost_comes_first() -> None:
    one = alone([1, 2, 3, 10, 11, 12, 13, 1, 2, 4, 20, 1, 2, 5])
    one.emit(1, 2, 3, 10, 11, 12, 99, 1, 2)  # (1, 2) stands at the start, a little ahead, and further on
    assert one.chain(2) == [4, 20]
    one.emit(5)
    assert one.chain(2) == []  # the end of the prediction


def test_a_longer_agreement_comes_before_a_nearer_place() -> None:
    one = alone([10, 11, 12, 13, 14, 15, 1, 2, 9, 2, 3, 8, 1, 2, 3, 4, 80])
    one.emit(10, 11, 12, 13, 14, 15, 99, 1, 2)
    assert one.chain(1) == [9]
    one.emit(3)
    assert one.chain(2) == [4, 80]


def test_a_wrong_place_does_not_count_as_progress() -> None:
    """The pair (1, 2) leads far ahead by mistake; what comes next is found all the same, before that place."""
    body = TEXT[:100]
    one = alone([*body, 901, 902, 903, body[30], body[31], 904])
    one.emit(*body[:20], 901, 902)
    assert one.chain(1) == [903]
    one.emit(body[30], body[31])
    assert one.chain(4) == body[32:36]


def test_repeats_do_not_trap_the_cursor() -> None:
    """A loop in the prediction, followed rightly, wastes nothing; an answer that loops where the prediction does not
    comes out.
    """
    assert alone(LOOP * 5).run(LOOP * 5, 8)[1] == 0
    rounds, _ = alone([*TEXT[:10], *LOOP, *TEXT[10:]]).run([*TEXT[:10], *LOOP * 3, *TEXT[10:]], 8)
    assert rounds < 3 * len(LOOP) + 30


def test_requests_have_cursors_of_their_own() -> None:
    drafter = PredictedDrafter()
    one, other = Alone(drafter, (7,), 0, prediction=TEXT), Alone(drafter, (7,), 1, prediction=TEXT[::-1])
    one.emit(TEXT[0])
    assert one.chain(2) == TEXT[1:3]
    assert other.chain(2) == TEXT[::-1][:2]
    one.finish()
    other.finish()
    assert not drafter._indexes


def test_accounts_in_openais_words(llm: LLM) -> None:
    """A right prediction needs few steps, and what of it was drafted is accepted or rejected."""
    prompt, params = token_ids(9, seed=1), SamplingParams(max_tokens=40, ignore_eos=True)
    plain = llm.generate([prompt], params)[0]
    right, wrong = llm.generate(
        [prompt] * 2,
        [replace(params, prediction=text) for text in (plain.token_ids, [3, 3, 3])],
        SpecConfig("predicted", num_draft=12),
    )
    assert right.token_ids == wrong.token_ids == plain.token_ids
    assert right.stats.num_steps <= 1 + 4  # twelve draft tokens and one of the target's own a step
    assert right.stats.rejected_prediction_tokens == 0
    assert right.stats.accepted_prediction_tokens == right.stats.num_accepted > 30
    found = wrong.stats.as_dict()
    assert found["accepted_prediction_tokens"] + found["rejected_prediction_tokens"] == wrong.stats.num_drafted
    assert plain.stats.as_dict()["accepted_prediction_tokens"] == plain.stats.rejected_prediction_tokens == 0


def test_a_prediction_may_be_text(text_pair: SimpleNamespace) -> None:
    with LLM(text_pair.target, dtype="float32", cache_tokens=512) as llm:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        plain = llm.generate(["ab ab"], params)[0]
        expected = plain.text[0] + " some text that is not the answer"
        out = llm.generate(["ab ab"], replace(params, prediction=expected), SpecConfig("predicted", num_draft=4))[0]
        assert out.token_ids == plain.token_ids
        assert out.stats.num_drafted > 0


def test_wrong_predictions_are_refused_by_name(llm: LLM) -> None:
    for prediction in ("", [], 5):
        with pytest.raises(InputError, match=r"prediction=.*: must be a text or a list of token ids, and not empty"):
            SamplingParams(prediction=prediction)
    expected = SamplingParams(prediction="x")
    for params, spec, message in (
        (
            SamplingParams(),
            SpecConfig("predicted"),
            "prediction=None: drafter='predicted' needs the text that you expect",
        ),
        (
            SamplingParams(),
            SpecConfig("mix", parts=("ngram", "predicted")),
            "prediction=None: drafter='predicted' needs",
        ),
        (
            expected,
            SpecConfig(),
            "prediction='x': only drafter='predicted' takes it, not drafter=None: name",
        ),
        (expected, SpecConfig("ngram"), "prediction='x': only drafter='predicted' takes it, not drafter='ngram'"),
        (
            expected,
            SpecConfig("mix", parts=("ngram", "suffix")),
            "parts: ngram, suffix.: name predicted among",
        ),
        (SamplingParams(prediction=[99999]), SpecConfig("predicted"), "prediction=99999"),  # outside the vocabulary
        (SamplingParams(prediction="text"), SpecConfig("predicted"), "prediction='text'"),  # no tokenizer
    ):
        with pytest.raises(InputError, match=message):
            llm.generate([[1, 2]], params, spec)


@pytest.mark.parametrize(("drafter", "usual"), [("mix", ["ngram", "suffix", "recycling"]), ("auto", ["suffix"])])
def test_the_usual_parts_hold_predicted_for_requests_with_a_prediction(
    llm: LLM, pair: SimpleNamespace, drafter: str, usual: list[str]
) -> None:
    """Per prompt in one batch; parts that were named stay as they are."""
    spec = SpecConfig(drafter, str(pair.draft))
    assert [part.drafter for part in spec.configs] == [*usual, "draft_model"]
    assert spec.for_request(None) is spec
    given = replace(spec, parts=("ngram", "predicted", "draft_model"))
    assert given.for_request("text") is given
    params = [SamplingParams(max_tokens=4, prediction=prediction) for prediction in (None, [3, 4, 5], None)]
    states = [llm.submit(token_ids(5, seed=i), one, spec) for i, one in enumerate(params)]
    while llm.engine.has_work:
        llm.step()
    for state, one in zip(states, params, strict=True):
        own = [*usual, *(["predicted"] if one.prediction else []), "draft_model"]
        assert [part.drafter for part in state.request.spec.configs] == own
        assert state.error is None


def test_places_of_a_prediction_count_once() -> None:
    assert num_followed((1, 2, 3, 4), (1, 2, 3, 4)) == 4
    assert num_followed((1, 2, 3, 4), ()) == num_followed((), (1, 2)) == 0
    assert num_followed((1, 2, 3, 4), (1, 2, 9, 9)) == 2
    assert num_followed((1, 2, 3, 4, 5), (1, 2, 3, 1, 2, 3, 4, 5)) == 5  # taken up again behind a repeat
    assert num_followed((7, 8, 1, 2, 3), (1, 2, 3)) == 1  # found after two tokens of agreement
