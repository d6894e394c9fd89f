"""Several answers to a prompt, shortest lengths, bans that leave nothing: what the parameters promise, with and without
drafts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, InputError, SamplingParams, SpecConfig
from foretoken.core import TokenOrigin
from foretoken.engine.request import TextAssembler
from foretoken.text.randomness import derived_seed
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer, token_ids

PROMPT = token_ids(7, seed=5) * 2


def specs(pair: SimpleNamespace) -> list[SpecConfig]:
    return [SpecConfig(), SpecConfig("draft_model", str(pair.draft), num_draft=4), SpecConfig("ngram")]


def test_n_answers_each_with_a_seed_of_its_own(llm: LLM, pair: SimpleNamespace) -> None:
    """Answer 0 is the answer of n=1; answer i that of the derived seed; all answers differ, whoever drafts."""
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=9, n=4, ignore_eos=True)
    for spec in specs(pair):
        (out,) = llm.generate([PROMPT], params, spec)
        assert len(out.choices) == 4
        assert len({choice.token_ids for choice in out.choices}) == 4
        for i, choice in enumerate(out.choices):
            alone = SamplingParams(max_tokens=16, temperature=1.0, seed=derived_seed(9, i), ignore_eos=True)
            assert llm.generate([PROMPT], alone, spec)[0].token_ids == choice.token_ids


def test_n_differs_by_prompt(llm: LLM) -> None:
    outputs = llm.generate([PROMPT, PROMPT[:3]], [SamplingParams(max_tokens=3, n=3), SamplingParams(max_tokens=3)])
    assert [len(out.choices) for out in outputs] == [3, 1]
    assert len({choice.token_ids for choice in outputs[0].choices}) == 1, "greedy answers are all the same"


def test_a_stream_is_one_answer(llm: LLM) -> None:
    with pytest.raises(InputError, match="n=2: a stream is one answer"):
        next(iter(llm.stream(PROMPT, SamplingParams(n=2))))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_the_end_back(
    llm: LLM, pair: SimpleNamespace, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end token is made the model's favourite: it comes exactly when it may."""
    monkeypatch.setattr(llm.engine.admission, "eos_token_ids", frozenset({17}))
    for least in (0, 1, 5, 12):
        params = SamplingParams(
            max_tokens=20, min_tokens=least, temperature=temperature, seed=2, logit_bias={17: 100.0}
        )
        for spec in specs(pair):
            out = llm.generate([PROMPT], params, spec)[0]
            assert len(out.token_ids) == max(1, least + 1)
            assert out.token_ids[-1] == 17
            assert 17 not in out.token_ids[:-1]
            assert out.finish_reason == "stop"


class Pieces:
    """A decoder that says given pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = iter(pieces)

    def push(self, token_id: int) -> str:
        return next(self.pieces)

    def flush(self) -> str:
        return ""


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    """Neither when the answer may stop later, nor when its end comes just then; one that straddles the border does."""
    text = TextAssembler(Pieces(["xx", "aSTOPb", "c", "STOP"]), ("STOP",))
    assert [text.push(0, may_stop=i > 1) for i in range(4)] == [False, False, False, True]
    assert text.text == "xxaSTOPbc"
    text = TextAssembler(Pieces(["xST", "OPx"]), ("STOP",))
    assert [text.push(0, may_stop=i > 0) for i in range(2)] == [False, True]


def test_a_request_with_everything_banned_fails_alone(llm: LLM, pair: SimpleNamespace) -> None:
    """The error names the fields; the neighbour does not notice; plain and drafted give the same tokens before it."""
    vocab = llm.target.vocab_size
    first = llm.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids
    banned = SamplingParams(max_tokens=9, ignore_eos=True, bad_words=[[*first, token] for token in range(vocab)])
    for spec in specs(pair):
        failed, fine = llm.generate([PROMPT, PROMPT], [banned, SamplingParams(max_tokens=9, ignore_eos=True)], spec)
        assert failed.finish_reason == "error"
        assert failed.token_ids == first
        assert isinstance(failed.error, InputError)
        assert "bad_words" in str(failed.error)
        assert fine.finish_reason == "length"


def test_bad_words_as_text_need_a_tokenizer(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bad_words"):
        llm.generate([PROMPT], SamplingParams(bad_words=["word"]))
    tiny_tokenizer(tmp_path)
    with LLM(tiny_checkpoint(tmp_path, "llama", vocab_size=300), cache_tokens=512) as texts:
        params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=2.0, seed=3)
        plain = texts.generate(["the list is"], params, SpecConfig("ngram"))[0].token_ids
        word = next(piece for token in plain if (piece := texts.tokenizer.decode([token])).isalpha())
        out = texts.generate(["the list is"], replace(params, bad_words=[word]), SpecConfig("ngram"))[0]
        assert texts.encode(word)[0] in plain
        assert not set(out.token_ids) & {texts.encode(word)[0], *texts.encode(" " + word)[-1:]}


def test_origins_carry_the_chance_of_an_accepted_draft_token(llm: LLM, pair: SimpleNamespace) -> None:
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=3)
    out = llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True), spec)[0]
    by_kind = {
        kind: [o for o in out.provenance if o.kind == kind] for kind in ("accepted", "residual", "bonus", "plain")
    }
    assert all(o.probability is not None and o.drafter == "draft_model" for o in by_kind["accepted"])
    assert all(
        o.probability is None and o.drafter is None for kind in ("residual", "bonus", "plain") for o in by_kind[kind]
    )
    assert TokenOrigin("ngram", "accepted", 1).probability is None
