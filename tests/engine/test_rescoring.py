"""An answer scored again: the same distributions as a whole pass over the text, in pieces of any size, and nothing left
behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.engine.shadow.rescoring import Rescoring, ScoredRows, rescore
from foretoken.errors import CapacityError, NumericsError
from foretoken.model.interface import LanguageModel, Segment
from foretoken.text.processors import make_processors
from foretoken.text.sampling import target_probs
from tests.helpers.audit import open_sequences
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel

PROMPT, OUTPUT = token_ids(9, seed=1), token_ids(14, seed=2)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9)


def whole(target: LanguageModel, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Logits `[n, V]` of the output tokens by one pass over the text."""
    text = [*prompt, *output]
    target.open(-7)
    logits = target.forward(torch.tensor(text), [Segment(-7, len(text), (), len(output) + 1)]).logits[:-1]
    target.close(-7)
    return logits


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 9, 10, 22, 23, 256])
def test_any_size_of_pieces_gives_the_same_rows(llm: LLM, chunk: int) -> None:
    """Also where the prompt ends inside a piece, or right at its end."""
    parts = list(rescore(llm.target, PROMPT, OUTPUT, SAMPLED, chunk_tokens=chunk))
    assert [place for part in parts for place in range(part.first, part.first + len(part.tokens))] == list(
        range(len(OUTPUT))
    )
    assert torch.cat([part.tokens for part in parts]).tolist() == OUTPUT
    expected = whole(llm.target, PROMPT, OUTPUT)
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        torch.cat([part.distributions for part in parts]),
        target_probs(expected, [SAMPLED] * len(OUTPUT)),
        atol=1e-4,
        rtol=0,
    )


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_the_log_probabilities_are_those_the_engine_reported(llm: LLM, pair: SimpleNamespace, rule: str) -> None:
    """The engine computed them from rows of draft tokens, with the request's processors."""
    params = SamplingParams(
        max_tokens=24,
        temperature=0.0 if rule == "greedy" else 0.8,
        seed=5,
        ignore_eos=True,
        logprobs=0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
    )
    answer = llm.generate([PROMPT], params, SpecConfig("draft_model", str(pair.draft), num_draft=3, rule=rule))[0]
    distribution = (
        SamplingParams(temperature=1.0) if rule == "greedy" else params
    )  # reported at temperature 1 where the distribution is a point
    processors = make_processors(params, PROMPT, 97, ())
    found = [
        float(row[token].log())
        for part in rescore(llm.target, PROMPT, answer.token_ids, distribution, processors, chunk_tokens=7)
        for row, token in zip(part.distributions, part.tokens, strict=True)
    ]
    assert found == pytest.approx([entry.logprob for entry in answer.logprobs], abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_processors_see_the_answer_before_each_row(llm: LLM, chunk: int) -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5, min_tokens=6, bad_words=[OUTPUT[3:5]])
    new = lambda: make_processors(params, PROMPT, 97, (3, 4))  # noqa: E731
    parts = list(rescore(llm.target, PROMPT, OUTPUT, params, new(), chunk_tokens=chunk))
    raw, processors = whole(llm.target, PROMPT, OUTPUT), new()
    expected = processors.adjust(raw, [tuple(OUTPUT[:i]) for i in range(len(OUTPUT))])
    found = torch.cat([part.logits for part in parts])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert found[:6, 3].max() == -torch.inf < found[6:, 3].min()
    assert torch.cat([part.distributions for part in parts])[4, OUTPUT[4]] == 0


def test_an_answer_without_tokens_costs_nothing(llm: LLM) -> None:
    assert list(rescore(llm.target, PROMPT, [], SAMPLED)) == []
    one = list(rescore(llm.target, PROMPT[:1], OUTPUT[:1], SAMPLED))
    assert [part.tokens.tolist() for part in one] == [OUTPUT[:1]]


def test_pieces_between_the_steps_of_other_requests(llm: LLM) -> None:
    """Neither the requests nor the scores notice each other."""
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    expected = llm.generate([PROMPT, OUTPUT], params)
    rows = torch.cat([part.distributions for part in rescore(llm.target, PROMPT, OUTPUT, SAMPLED)])
    scoring, found = Rescoring(llm.target, PROMPT, OUTPUT, SAMPLED), []

    def piece(_: object) -> None:
        if scoring.num_remaining:
            found.append(scoring.advance(2).distributions)

    again = llm.generate([PROMPT, OUTPUT], params, on_step=piece)
    assert scoring.num_remaining == 0
    assert [out.token_ids for out in again] == [out.token_ids for out in expected]
    torch.testing.assert_close(torch.cat(found), rows, atol=1e-5, rtol=0)


# ---- what is left behind


def test_the_cache_is_free_when_the_iterator_is_left(llm: LLM) -> None:
    pieces = rescore(llm.target, PROMPT, OUTPUT, SAMPLED, chunk_tokens=4)
    next(pieces)
    held = open_sequences(llm.target)
    assert len(held) == 1
    assert held[0] < 0
    pieces.close()
    assert open_sequences(llm.target) == []


def test_no_room_is_an_error_that_holds_nothing() -> None:
    model = ScriptedModel(lambda context: 1, vocab_size=5, capacity=10)
    model.open(3)
    model.forward(torch.tensor([1, 1, 1]), [Segment(3, 3)])
    model.commit(3, 3)
    scoring = Rescoring(model, [1, 2, 3, 4], [1] * 6, SAMPLED)
    assert scoring.footprint_tokens == 9
    scoring.advance(7)
    with pytest.raises(CapacityError):
        scoring.advance(2)
    assert list(model.sequences) == [3]


def test_broken_logits_are_an_error_that_holds_nothing() -> None:
    model = ScriptedModel(lambda context: [float("nan")] * 5 if len(context) == 6 else 1, vocab_size=5)
    with pytest.raises(NumericsError, match="output token 1 or a later one"):
        list(rescore(model, [1, 2, 3, 4], [1] * 6, SAMPLED, chunk_tokens=2))
    assert not model.sequences


# ---- borders


def rows_of(logits: list[float], token: int, rounding: float, **params: float) -> ScoredRows:
    row, distribution = torch.tensor([logits]), SamplingParams(temperature=1.0, **params)
    return ScoredRows(
        0,
        torch.tensor([token]),
        row,
        target_probs(row, [distribution]),
        torch.tensor([rounding]),
        torch.float32,
        distribution,
    )


@pytest.mark.parametrize(
    ("logits", "token", "params", "least"),
    [
        ([3.0, 2.0, 1.9, 0.0], 2, {"top_k": 2}, 0.1),  # the next below the k-th
        ([3.0, 2.0, 1.9, 0.0], 2, {"top_k": 1}, 1.1),
        ([0.0, -2.2, -9.0, -9.0], 1, {"top_p": 0.9}, 0.0005),  # the first alone holds just a little more than 0.9
        ([0.0, -2.0, -9.0, -9.0], 1, {"min_p": 0.15}, 0.103),  # exp(-2) = 0.135
        ([1.0, 1.0, -torch.inf, 0.0], 2, {}, torch.inf),  # banned: no rounding brings it back
    ],
)
def test_tokens_at_the_edge_of_a_filter(
    logits: list[float], token: int, params: dict[str, float], least: float
) -> None:
    """`least` is the rounding from which on the token may have been inside."""
    assert rows_of(logits, token, 0.0, **params).distributions[0, token] == 0
    assert not is_edge(rows_of(logits, token, min(0.9 * least, 100.0), **params))
    if least < torch.inf:
        assert is_edge(rows_of(logits, token, 1.02 * least + 1e-3, **params))
    assert not is_edge(rows_of(logits, 0, 0.0, **params))  # inside


def is_edge(rows: ScoredRows) -> bool:
    return bool(rows.certain()[1][0])


def test_w2_a_tie_with_the_last_token_that_is_kept_is_an_edge() -> None:
    """top_k keeps both of the tied tokens, top_p drops the one with the lower id: with other rounding it drops the
    other one.
    """
    logits, params = [4.0, 2.0, 2.0, 0.0], {"top_k": 3, "top_p": 0.85}
    rows = rows_of(logits, 1, 1e-4, **params)
    assert (rows.distributions[0, 1], is_edge(rows)) == (0, True)
    assert is_edge(rows_of(logits, 2, 1e-4, **params))  # in this distribution, but it might as well be out
    assert not is_edge(rows_of(logits, 0, 1e-4, **params))
    assert not is_edge(rows_of(logits, 3, 1e-4, **params))  # outside under every rounding


def test_laws_speak_of_what_is_certain_only() -> None:
    """Under every rounding the tokens that are certain keep their proportions, whatever else the filters keep."""
    certain, _ = rows_of([3.0, 2.0, 1.0, 0.95, -1.0], 0, 0.1, top_k=3).certain()
    expected = torch.tensor([3.0, 2.0]).softmax(-1)
    torch.testing.assert_close(certain[0], torch.cat((expected, torch.zeros(3))))
    nothing, edges = rows_of([3.0, 2.95, 1.0], 0, 0.1, top_k=1).certain()
    assert (nothing.sum(), edges.tolist()) == (0, [True])


@pytest.mark.parametrize(
    ("temperature", "gap", "known"), [(0.01, 0.05, False), (0.01, 2.0, True), (1.0, 0.05, True), (0.3, 0.05, True)]
)
def test_w2_a_law_that_hangs_on_rounding_says_nothing(temperature: float, gap: float, known: bool) -> None:
    """In 16-bit numbers at a low temperature rounding, not chance, decides between two close tokens."""
    row, distribution = torch.tensor([[12.0, 12.0 - gap, 3.0]]), SamplingParams(temperature=temperature)
    rows = ScoredRows(
        0,
        torch.tensor([1]),
        row,
        target_probs(row, [distribution]),
        torch.tensor([0.375]),
        torch.bfloat16,
        distribution,
    )
    distributions, edges = rows.certain()
    assert bool(distributions.sum() > 0) == known
    assert bool(edges[0]) == (not known)


@pytest.mark.parametrize("penalty", [0.1, 1.0, 4.0])
def test_a_repetition_penalty_multiplies_the_rounding(llm: LLM, penalty: float) -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=penalty, presence_penalty=0.1)
    plain = torch.cat([rows.rounding for rows in rescore(llm.target, PROMPT, OUTPUT, SAMPLED)])
    rows = list(rescore(llm.target, PROMPT, OUTPUT, params, make_processors(params, PROMPT, llm.target.vocab_size, ())))
    assert (torch.cat([part.rounding for part in rows]) >= plain * max(penalty, 1 / penalty)).all()


@pytest.mark.parametrize(("dtype", "units"), [("bfloat16", 4), ("float32", 64)])
def test_rounding_is_counted_in_units_of_the_largest_logit(pair: SimpleNamespace, dtype: str, units: int) -> None:
    with LLM(pair.target, SpecConfig(), dtype=dtype, cache_tokens=64) as llm:
        (part,) = rescore(llm.target, PROMPT, OUTPUT, SAMPLED)
        one_by_one = torch.cat([row.logits for row in rescore(llm.target, PROMPT, OUTPUT, SAMPLED, chunk_tokens=1)])
    assert part.dtype == getattr(torch, dtype)
    unit = torch.finfo(part.dtype).eps * part.logits.float().abs().amax(-1)
    torch.testing.assert_close(part.rounding, units * unit)
    assert ((part.logits.float() - one_by_one.float()).abs().amax(-1) <= part.rounding).all()
