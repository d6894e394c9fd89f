"""Reported log-probabilities are those of the distribution the token came from, in an order that leaves nothing
open.
"""

import itertools
import math

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.config import SamplingParams
from foretoken.core import TokenLogprobs
from foretoken.engine.emission import log_model, sampling_log_probs, token_logprobs
from foretoken.text.sampling import target_probs


def noise(n: int, vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def slow(row: list[float], token: int, top: int) -> TokenLogprobs:
    """The definition: sort by probability, then by id."""
    order = sorted(range(len(row)), key=lambda other: (-row[other], other))
    return TokenLogprobs(
        token, row[token], 1 + order.index(token), tuple((i, row[i]) for i in order[:top] if row[i] > -math.inf)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_law_is_that_of_transformers_warpers(dtype: torch.dtype) -> None:
    logits = noise(4, 60, dtype)
    wide = logits if dtype == torch.float64 else logits.float()
    for t, k, p, m in itertools.product((0.3, 1.7), (0, 5), (1.0, 0.8731), (0.0, 0.1)):
        params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)] * 4
        scores = TemperatureLogitsWarper(t)(None, wide)
        scores = TopKLogitsWarper(k)(None, scores) if k else scores
        scores = TopPLogitsWarper(p)(None, scores) if p < 1 else scores
        scores = MinPLogitsWarper(m)(None, scores) if m else scores
        distribution = sampling_log_probs(logits, params)
        assert distribution.dtype == wide.dtype
        assert torch.equal(distribution > -torch.inf, target_probs(logits, params) > 0)
        torch.testing.assert_close(
            distribution,
            scores.log_softmax(-1),
            rtol=1e-12 if dtype == torch.float64 else 1e-5,
            atol=1e-12 if dtype == torch.float64 else 1e-6,
        )


def test_at_temperature_zero_the_law_before_the_argmax() -> None:
    """At temperature 1 and without filters; rows with other parameters keep their own."""
    logits = noise(3, 40)
    logits[0, 7] = -torch.inf
    greedy, warm = SamplingParams(top_k=1, top_p=0.1, min_p=0.9), SamplingParams(temperature=0.5, top_k=3)
    assert torch.equal(sampling_log_probs(logits, [greedy] * 3), logits.log_softmax(-1))
    mixed = sampling_log_probs(logits, [greedy, warm, greedy])
    torch.testing.assert_close(mixed[::2], logits[::2].log_softmax(-1), rtol=1e-12, atol=0)
    assert torch.equal(mixed[1], sampling_log_probs(logits[1:2], [warm])[0])
    assert int((mixed[1] > -torch.inf).sum()) == 3
    far = torch.tensor(
        [[0.0, -150.0]]
    )  # beyond float32's smallest probability, but no distribution of its own at temperature 0
    assert sampling_log_probs(far, [greedy]).tolist() == [[0.0, -150.0]]


def test_the_models_own_softmax() -> None:
    logits = noise(3, 40, torch.bfloat16)
    assert torch.equal(log_model(logits), logits.float().log_softmax(-1))
    assert log_model(noise(1, 4)).dtype == torch.float64


@pytest.mark.parametrize("top", [0, 1, 5, 40, 1024])
@pytest.mark.parametrize("kind", ["distinct", "tied", "flat", "filtered"])
def test_lists_and_ranks_follow_the_definition(kind: str, top: int) -> None:
    n, vocab = 25, 40
    logits = noise(n, vocab, torch.float32)
    if kind == "tied":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros(n, vocab)
    elif kind == "filtered":
        logits = logits.round().masked_fill(noise(n, vocab, seed=1) < 2, -torch.inf)
        logits[:, 0] = 0
    distribution = log_model(logits)
    tokens = [row % vocab for row in range(n)]
    assert token_logprobs(distribution, tokens, top) == [
        slow(distribution[row].tolist(), token, top) for row, token in enumerate(tokens)
    ]


@pytest.mark.parametrize("listed", [(7,), (3, 39, 0, 11)])
def test_listed_tokens_stand_in_place_of_the_likeliest(listed: tuple[int, ...]) -> None:
    n, vocab = 25, 40
    logits = noise(n, vocab, torch.float32).round()
    logits[:, 11] = -torch.inf
    distribution = log_model(logits)
    tokens = [row % 10 for row in range(n)]
    for row, found in enumerate(token_logprobs(distribution, tokens, 5, listed)):
        values = distribution[row].tolist()
        plain = slow(values, tokens[row], 0)
        assert (found.token_id, found.logprob, found.rank) == (plain.token_id, plain.logprob, plain.rank)
        assert list(found.top) == sorted(
            {(one, values[one]) for one in (*listed, tokens[row])}, key=lambda x: (-x[1], x[0])
        )


def test_the_token_of_the_argmax_has_rank_one_and_leads_the_list() -> None:
    logits = noise(20, 50, torch.bfloat16).round()
    chosen = target_probs(logits, [SamplingParams()] * 20).argmax(-1).tolist()
    for answer in token_logprobs(sampling_log_probs(logits, [SamplingParams()] * 20), chosen, 3):
        assert answer.rank == 1
        assert answer.top[0] == (answer.token_id, answer.logprob)


def test_no_rows() -> None:
    assert token_logprobs(torch.empty(0, 5), [], 3) == []
    assert sampling_log_probs(torch.empty(0, 5), []).shape == (0, 5)
