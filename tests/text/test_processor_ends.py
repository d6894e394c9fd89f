"""Processors where no token is left, beside structured answers, and as they are made from parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.config import SamplingParams
from foretoken.errors import InputError
from foretoken.text.processors import RequestProcessors, make_processors
from foretoken.text.sampling import target_probs
from tests.text.test_processors import ALONE, ENDS, INF, Fake, V, make, noise, theirs


class TestNothingLeft:
    """A row without a choice is the request's error when the text comes there, and only then."""

    def test_at_the_committed_text_at_once(self) -> None:
        processors = make_processors(SamplingParams(bad_words=[[0], [1]], min_tokens=4), (0,), 4, (2, 3))
        logits = noise(1, 0, 4)
        assert torch.equal(processors.adjust(logits, [()]), logits)
        assert isinstance(processors.error, InputError)
        assert processors.error.field == "bad_words"
        assert "together with min_tokens" in str(processors.error)
        assert "after 0 tokens" in str(processors.error)

    def blind_alley(self) -> RequestProcessors:
        """Nothing may follow 1; anything else is followed by anything."""
        return make_processors(SamplingParams(bad_words=[[1, token] for token in range(4)]), (0,), 4, ())

    def test_behind_a_draft_token_only_when_it_is_emitted(self) -> None:
        logits = noise(3, 0, 4)
        paths = [(), (2,), (2, 1)]
        for emitted, fails in (((3,), False), ((2, 0), False), ((2, 1), True), ((2, 1, 0), True)):
            for calls in (emitted,), [(token,) for token in emitted]:
                processors = self.blind_alley()
                assert torch.equal(processors.adjust(logits, paths), logits)  # row 2 unprocessed
                assert processors.error is None
                for call in calls:
                    processors.commit(call)
                assert (processors.error is not None) == fails
                assert not fails or "after 2 tokens" in str(processors.error)

    @pytest.mark.parametrize("is_draft", [False, True])
    def test_a_draft_that_lacks_the_token_is_not_the_requests_error(self, is_draft: bool) -> None:
        processors = make_processors(SamplingParams(bad_words=[[0], [1], [2]]), (0,), 4, ())
        logits = noise(1, 0, 4)
        logits[0, 3] = -INF  # the only one that may follow is none of the draft's
        assert torch.equal(processors.adjust(logits, [()], is_draft=is_draft), logits)
        assert (processors.error is None) == is_draft

    def test_it_comes_at_the_same_token_without_a_draft(self) -> None:
        processors = self.blind_alley()
        for token, fails in ((2, False), (1, True)):
            assert processors.error is None
            processors.commit((token,))
            processors.adjust(noise(1, 0, 4), [()])
            assert (processors.error is not None) == fails

    def test_an_old_blind_alley_is_forgotten(self) -> None:
        processors = self.blind_alley()
        processors.adjust(noise(2, 0, 4), [(), (1,)])
        processors.commit((2,))
        processors.commit((1,))  # another row (1,) than the one seen before
        assert processors.error is None

    def test_broken_logits_are_not_the_requests_fault(self) -> None:
        processors = make(ALONE["bad_words"], [1])
        for value in (torch.nan, -INF, INF):
            out = processors.adjust(torch.full((1, V), value), [()])
            assert not bool(torch.isfinite(out).any())
        logits = torch.full((1, V), -INF)
        logits[0, 4] = torch.nan
        assert bool(processors.adjust(logits, [()]).isnan().any()) or processors.adjust(logits, [()]).amax() == -INF
        assert processors.error is None

    def test_one_row_without_a_choice_leaves_the_others_alone(self) -> None:
        logits = noise(3, 4, 4)
        paths = [(1,), (), (3,)]
        out = self.blind_alley().adjust(logits, paths)
        assert torch.equal(out[1:], self.blind_alley().adjust(logits[1:], paths[1:]))

    def test_an_empty_structure_names_its_field(self) -> None:
        structure = Fake()
        structure.follow = lambda text: set(ENDS)
        processors = make_processors(SamplingParams(min_tokens=2, json_schema="{}"), (0,), V, ENDS, structure=structure)
        processors.adjust(noise(1, 0), [()])
        assert processors.error.field == "min_tokens"
        assert "together with json_schema" in str(processors.error)
        processors = make_processors(SamplingParams(grammar="start: x"), (0,), V, ENDS, structure=structure)
        structure.follow = lambda text: set()
        processors.adjust(noise(1, 0), [()])
        assert processors.error.field == "grammar"


class TestStructure:
    def test_a_rejected_draft_token_is_no_error(self) -> None:
        processors = make(ALONE["structure"], [0])
        refused = next(token for token in range(V) if token not in Fake().follow(()))
        logits = noise(2, 0)
        out = processors.adjust(logits, [(), (refused,)])
        assert out[0, refused] == -INF
        assert torch.equal(out[1], logits[1])
        processors.commit((min(Fake().follow(())),))
        assert processors.error is None

    def test_its_state_is_handed_on(self) -> None:
        structure = Fake()
        processors = make_processors(ALONE["structure"], (0,), V, ENDS, structure=structure)
        assert not processors.finished
        assert processors.error is None
        structure.finished, structure.error = True, ValueError("gave up")
        assert processors.finished
        assert processors.error is structure.error
        processors.commit((5, 6))
        assert structure.text == (5, 6)

    def test_complete_before_min_tokens(self) -> None:
        structure = Fake()
        processors = make_processors(replace(ALONE["structure"], min_tokens=3), (0,), V, ENDS, structure=structure)
        processors.commit((1,))
        assert processors.error is None
        structure.finished = True
        processors.commit((2,))
        assert processors.error.field == "min_tokens"
        assert "after 2 tokens" in str(processors.error)
        enough = make_processors(replace(ALONE["structure"], min_tokens=3), (0,), V, ENDS, structure=structure)
        enough.commit((1, 2, 3))
        assert enough.finished
        assert enough.error is None

    def test_forced_tokens_end_before_a_banned_one(self) -> None:
        structure = Fake()
        structure.sure = (5, 1, 2, 3, 4)

        def forced(most: int = 9, committed: tuple[int, ...] = (), **params) -> tuple[int, ...]:
            processors = make_processors(SamplingParams(regex=".", **params), (9,), V, ENDS, structure=structure)
            processors.commit(committed)
            return processors.forced(most)

        assert forced() == (5, 1, 2, 3, 4)
        assert forced(2) == (5, 1)
        assert forced(0) == ()
        assert forced(bad_words=[[4]]) == (5, 1, 2, 3)
        assert forced(bad_words=[[9, 5]]) == ()
        assert forced(bad_words=[[5, 1, 2]]) == (5, 1)
        assert forced(min_tokens=4) == (5, 1, 2)  # 3 is an end token
        assert forced(min_tokens=4, committed=(8,)) == (5, 1, 2, 3, 4)
        assert make(ALONE["min_tokens"], [0]).forced(4) == ()


class TestMaking:
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(),
            SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop="x", ignore_eos=True, logprobs=3),
            SamplingParams(logit_bias={}),
            SamplingParams(logit_bias={3: 0.0}),
        ],
    )
    def test_nothing_to_do(self, params: SamplingParams) -> None:
        assert make_processors(params, (1, 2), V, ENDS) is None

    def test_min_tokens_without_an_end_token(self) -> None:
        assert make_processors(SamplingParams(min_tokens=3), (1,), V, ()) is None
        assert make_processors(SamplingParams(min_tokens=3), (1,), V, (V,)) is None
        assert make_processors(SamplingParams(min_tokens=3, ignore_eos=True), (1,), V, ENDS) is not None

    def test_a_bias_of_zero_is_checked_all_the_same(self) -> None:
        with pytest.raises(InputError, match=r"logit_bias=23: .* 0 to 22"):
            make_processors(SamplingParams(logit_bias={V: 0.0}), (1,), V, ENDS)

    @pytest.mark.parametrize("word", [[V], [0, -1], [0, "a"], [True], [1.0]])
    def test_bad_words_outside_the_vocabulary(self, word: list) -> None:
        with pytest.raises(InputError, match="bad_words"):
            make_processors(SamplingParams(bad_words=[[1], word]), (1,), V, ENDS)

    def test_texts_need_a_tokenizer(self) -> None:
        with pytest.raises(InputError, match=r"bad_words='no': .*tokenizer"):
            make_processors(SamplingParams(bad_words=["no"]), (1,), V, ENDS)

    @pytest.mark.parametrize(("ids", "message"), [([], "no token"), ([V], "0 to 22")])
    def test_texts_that_cannot_be_banned(self, ids: list[int], message: str) -> None:
        class Odd:
            token_bytes, special_ids = None, frozenset[int]()

            def encode(self, text: str, add_special_tokens: bool) -> list[int]:
                return ids

        with pytest.raises(InputError, match=message):
            make_processors(SamplingParams(bad_words=["word"]), (1,), V, ENDS, Odd())

    def test_a_repetition_penalty_that_would_overflow(self) -> None:
        with pytest.raises(InputError, match="repetition_penalty"):
            SamplingParams(repetition_penalty=1e-40)
        processors = make_processors(SamplingParams(repetition_penalty=1e-3, temperature=1e-9), (1,), 3, ())
        distribution = target_probs(
            processors.adjust(torch.tensor([[1.0, 2.0, 3.0]]), [()]), [SamplingParams(temperature=1e-9)]
        )
        assert distribution.tolist() == [[0, 1, 0]]

    def test_prompt_tokens_beyond_the_models_columns_are_passed_over(self) -> None:
        """As in transformers, whose embedding may be larger than its output."""
        processors, logits = make(ALONE["repetition_penalty"], [1, V, V + 5]), noise(1, 0)
        assert torch.equal(
            processors.adjust(logits, [()])[0], theirs(ALONE["repetition_penalty"], [1, V, V + 5], [], logits[0])
        )

    def test_the_prompt_is_read_once(self) -> None:
        class Once(tuple):
            reads = 0

            def __iter__(self):
                Once.reads += 1
                return super().__iter__()

        processors = make_processors(ALONE["repetition_penalty"], Once(range(9)), V, ENDS)
        for _ in range(3):
            processors.adjust(noise(2, 0), [(), (3,)])
            processors.commit((3, 4))
        assert Once.reads == 1
