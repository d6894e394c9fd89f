"""Every row's logits are those of transformers' processors for the row's own text; draft tokens leave no trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.config import SamplingParams
from foretoken.text.processors import RequestProcessors, make_processors
from foretoken.text.sampling import target_probs

V = 23
LETTERS = 5  # tokens that random texts are made of
ENDS = (3, 7)
INF = torch.inf

ALONE = {
    "logit_bias": SamplingParams(logit_bias={0: 2.5, 5: -100.0, 22: 0.25}),
    "repetition_penalty": SamplingParams(repetition_penalty=1.3),
    "reward_for_repetition": SamplingParams(repetition_penalty=0.7),
    "presence_penalty": SamplingParams(presence_penalty=0.9),
    "frequency_penalty": SamplingParams(frequency_penalty=-0.35),
    "bad_words": SamplingParams(
        bad_words=[[4], [1, 2], [2, 2, 0], [3, 1, 2], [0, 0, 1], [1, 0, 3], [3, 3, 2], [0, 3, 1, 4], [1, 2, 3, 4, 5]]
    ),
    "min_tokens": SamplingParams(min_tokens=5),
    "allowed_token_ids": SamplingParams(allowed_token_ids=[0, 2, 3, 9, 22]),
    "structure": SamplingParams(regex="."),
}
DEPENDS_ON_THE_PATH = sorted(ALONE.keys() - {"logit_bias", "allowed_token_ids"})


class Fake:
    """Allows the tokens that an arithmetic of the last two tokens chooses; refuses a path with any other token in
    it.
    """

    def __init__(self, text: Sequence[int] = (), vocab: int = V) -> None:
        self.text, self.vocab, self.finished, self.error, self.sure = tuple(text), vocab, False, None, ()

    def follow(self, text: tuple[int, ...]) -> set[int]:
        last, before = (0, 0, *text)[-1], (0, 0, *text)[-2]
        return {token for token in range(self.vocab) if (token * 7 + last * 5 + before) % 3}

    def mask(self, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        mask = torch.zeros(len(paths), self.vocab, dtype=torch.bool)
        for row, path in enumerate(paths):
            if all(token in self.follow(self.text + path[:i]) for i, token in enumerate(path)):
                mask[row, sorted(self.follow(self.text + path))] = True
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        self.text += tuple(tokens)

    def forced(self, most: int) -> tuple[int, ...]:
        return self.sure[:most]

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return [all(token in self.follow(self.text + path[:i]) for i, token in enumerate(path)) for path in paths]


def theirs(params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    """The same for one row `[V]` by transformers' processors, OpenAI's formula in a loop, and the fake structure."""
    ids, scores = torch.tensor([[*prompt, *answer]]), row[None]
    raw = scores
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): float(value) for token, value in params.logit_bias.items()})(
            ids, scores
        )
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = scores.clone()
    for token in range(scores.shape[1]):  # mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
        count = sum(1 for emitted in answer if emitted == token)
        scores[0, token] = (
            scores[0, token] - count * params.frequency_penalty - float(count > 0) * params.presence_penalty
        )
    if params.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids, scores)
    if params.min_tokens:
        scores = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, list(ENDS))(ids, scores)
    if params.allowed_token_ids is not None:
        kept = scores.index_select(1, torch.tensor(params.allowed_token_ids))
        scores = torch.full_like(scores, -INF).index_copy(1, torch.tensor(params.allowed_token_ids), kept)
    if params.structured:
        scores = scores.masked_fill(~Fake(answer, scores.shape[1]).mask([()]), -INF)
    return (scores if scores.amax() > -INF else raw)[0]


def make(params: SamplingParams, prompt: Sequence[int], vocab: int = V) -> RequestProcessors:
    made = make_processors(
        params, tuple(prompt), vocab, ENDS, structure=Fake(vocab=vocab) if params.structured else None
    )
    assert made is not None
    return made


def noise(n: int, seed: int, vocab: int = V, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def tree(rng: random.Random, nodes: int, vocab: int = LETTERS) -> list[tuple[int, ...]]:
    """The paths of a random tree over few tokens, so that texts repeat themselves and meet bad words."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(nodes):
        paths.append((*rng.choice(paths), rng.randrange(vocab)))
    return paths


def reachable(params: SamplingParams, output: list[int], path: tuple[int, ...]) -> bool:
    """Whether the fake structure lets the path be; what it says behind a refused one does not matter."""
    fake = Fake(output)
    return not params.structured or all(token in fake.follow((*output, *path[:i])) for i, token in enumerate(path))


def check_allowed(
    processors: RequestProcessors, paths: list[tuple[int, ...]], rows: dict[tuple[int, ...], torch.Tensor]
) -> None:
    """What may be drafted is what the target's rows allow; a row that allows all may be one that had no token left."""
    nodes = paths[1:]
    parents = [nodes.index(path[:-1]) if path[:-1] else -1 for path in nodes]
    for path, allowed in zip(nodes, processors.allowed([path[-1] for path in nodes], parents), strict=True):
        before = [rows.get(path[:i], torch.zeros(V, dtype=torch.bool)) for i in range(len(path))]
        likely = all(bool(row[token]) for row, token in zip(before, path, strict=True))
        assert allowed == likely or (likely and any(bool(row.all()) for row in before))


def rounds(params: SamplingParams, seed: int, adjust=RequestProcessors.adjust, num_rounds: int = 5) -> None:
    """Random trees and commits; every row against the oracle, then the distributions behind temperature and filters."""
    rng = random.Random(seed)
    prompt, output = [rng.randrange(LETTERS) for _ in range(rng.randrange(1, 12))], []
    processors = make(params, prompt)
    for number in range(num_rounds):
        paths = tree(rng, rng.randrange(0, 9))
        logits = noise(len(paths), seed * 100 + number)
        ours = adjust(processors, logits, paths)
        kept = [row for row, path in enumerate(paths) if reachable(params, output, path)]
        expected = torch.stack([theirs(params, prompt, [*output, *paths[row]], logits[row]) for row in kept])
        torch.testing.assert_close(ours[kept], expected, rtol=1e-12, atol=0)
        check_allowed(
            processors, paths, {paths[row]: scores > -INF for row, scores in zip(kept, expected, strict=True)}
        )
        warped = LogitsProcessorList(
            [TemperatureLogitsWarper(0.8), TopKLogitsWarper(6), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]
        )
        distribution = target_probs(
            ours[kept], [replace(params, temperature=0.8, top_k=6, top_p=0.9, min_p=0.05)] * len(kept)
        )
        torch.testing.assert_close(distribution, warped(None, expected).softmax(-1), rtol=1e-12, atol=0)
        emitted = [*rng.choice(paths), rng.randrange(LETTERS)]
        processors.commit(emitted)
        output += emitted


def many_rounds(params: SamplingParams, adjust) -> None:
    for seed in range(20):
        rounds(params, seed, adjust)


def mixed(rng: random.Random) -> SamplingParams:
    """Any combination of parameters; bias in quarters, because transformers keeps it in float32."""
    some = {
        "logit_bias": {rng.randrange(V): rng.randrange(-40, 40) / 4 for _ in range(rng.randrange(1, 6))},
        "repetition_penalty": rng.uniform(0.5, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "bad_words": [
            [rng.randrange(LETTERS) for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))] for _ in range(rng.randrange(1, 12))
        ],
        "min_tokens": rng.randrange(1, 12),
        "allowed_token_ids": rng.sample(range(V), rng.randrange(1, V)),
        "regex": ".",
    }
    return SamplingParams(**{name: value for name, value in some.items() if rng.random() < 0.5} or {"min_tokens": 3})


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("seed", range(4))
def test_each_parameter_alone_equals_transformers(name: str, seed: int) -> None:
    rounds(ALONE[name], seed)


@pytest.mark.parametrize("seed", range(40))
def test_combinations_equal_transformers(seed: int) -> None:
    rounds(mixed(random.Random(seed)), seed)


def test_a_real_vocabulary_and_a_long_prompt_in_float32() -> None:
    """The operations are the same ones, so even float32 agrees to the last bit."""
    rng, vocab = random.Random(5), 5000
    params = replace(
        mixed(random.Random(11)),
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=9,
        regex=None,
    )
    prompt = [rng.randrange(vocab) for _ in range(3000)]
    processors, output = make(params, prompt, vocab), []
    for number in range(3):
        paths = tree(rng, 6, vocab)
        logits = noise(len(paths), number, vocab, torch.float32)
        expected = torch.stack(
            [theirs(params, prompt, [*output, *path], logits[row]) for row, path in enumerate(paths)]
        )
        assert torch.equal(processors.adjust(logits, paths), expected)
        processors.commit(paths[-1])
        output += paths[-1]


@pytest.mark.parametrize("name", DEPENDS_ON_THE_PATH)
def test_one_penalty_for_the_whole_block_is_noticed(name: str) -> None:
    """T08: the planted bug processes every row as if it followed the committed text."""

    def stale(processors: RequestProcessors, logits: torch.Tensor, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        return processors.adjust(logits, [()] * len(paths))

    with pytest.raises(AssertionError):
        many_rounds(ALONE[name], stale)


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens"]
)
def test_draft_tokens_that_are_counted_for_good_are_noticed(name: str) -> None:
    """The planted bug commits what was only drafted."""

    def leaking(processors: RequestProcessors, logits: torch.Tensor, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        out = processors.adjust(logits, paths)
        processors.commit(paths[-1])
        return out

    with pytest.raises(AssertionError):
        many_rounds(ALONE[name], leaking)


tokens = st.integers(0, 5)
texts = st.lists(tokens, max_size=8)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), min_size=1),
        "repetition_penalty": st.floats(1e-3, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=8),
        "min_tokens": st.integers(0, 12),
        "regex": st.just("."),
    },
)


def build(chosen: dict, prompt: Sequence[int]) -> RequestProcessors:
    """Also where nothing is asked for, and `make_processors` would rightly build nothing."""
    params = SamplingParams(**chosen)
    words = {tuple(word) for word in params.bad_words}
    return RequestProcessors(params, prompt, 8, {1, 6}, words, Fake(vocab=8) if params.structured else None)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(chosen=parameters, prompt=texts, output=texts, path=texts, seed=st.integers(0, 1000))
def test_a_path_is_processed_as_if_it_had_been_emitted(
    chosen: dict, prompt: list[int], output: list[int], path: list[int], seed: int
) -> None:
    rows = [tuple(path[:length]) for length in range(len(path) + 1)]
    logits = noise(len(rows), seed, 8)
    block = build(chosen, prompt)
    block.commit(output)
    together = block.adjust(logits, rows)
    single = build(chosen, prompt)
    for token in output:
        single.commit((token,))
    for row, prefix in enumerate(rows):
        if not SamplingParams(**chosen).structured or not prefix or bool(Fake(output, 8).mask([prefix]).any()):
            assert torch.equal(single.adjust(logits[row : row + 1], [()])[0], together[row])
        single.commit(tuple(path[row : row + 1]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    chosen=parameters,
    prompt=texts,
    others=st.lists(texts, min_size=1, max_size=4),
    rows=st.lists(texts, min_size=1, max_size=5),
    data=st.data(),
)
def test_rows_are_independent_and_leave_no_trace(
    chosen: dict, prompt: list[int], others: list, rows: list, data: st.DataObject
) -> None:
    rows, others = [tuple(row) for row in rows], [tuple(other) for other in others]
    logits = noise(len(rows), 1, 8)
    before, version = logits.clone(), logits._version
    fresh, used = build(chosen, prompt), build(chosen, prompt)
    used.adjust(noise(len(others), 2, 8), others)
    plain = fresh.adjust(logits, rows)
    assert torch.equal(logits, before)
    assert logits._version == version
    order = data.draw(st.permutations(range(len(rows))))
    assert torch.equal(used.adjust(logits[order], [rows[row] for row in order]), plain[order])
    fresh.commit(rows[0])
    used.commit(rows[0])
    used.adjust(noise(len(others), 3, 8), others)
    assert torch.equal(used.adjust(logits, rows), fresh.adjust(logits, rows))


class OneToken:
    """A structure of one token, behind which nothing but an end may stand."""

    finished, error = False, None

    def mask(self, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        ends = torch.tensor([token in ENDS for token in range(V)])
        return torch.stack([ends if path or self.finished else ~ends for path in paths])

    def commit(self, tokens: Sequence[int]) -> None:
        self.finished = True


def test_the_error_of_a_short_structure_does_not_depend_on_drafts() -> None:
    """Plain decoding has no row behind the answer's end; behind a draft there is one, in which no token is left."""
    errors = []
    for paths in ([()], [(), (4,)]):
        params = SamplingParams(max_tokens=9, min_tokens=5, bad_words=[[1, 2]])
        processors = RequestProcessors(params, [1], V, ENDS, [(1, 2)], OneToken())  # type: ignore[arg-type]
        processors.adjust(noise(len(paths), 1), paths)
        processors.commit((4,))
        errors.append(str(processors.error))
    assert errors[0] == errors[1]
    assert "min_tokens=5: the structure was complete after 1 tokens" in errors[0]


def test_the_number_of_rows_may_change_from_call_to_call() -> None:
    """T19: a drafter that stops and starts again, nothing at all included."""
    processors = make(ALONE["repetition_penalty"], [1, 2])
    for n in (5, 1, 0, 3):
        paths = [tuple(range(row)) for row in range(n)]
        logits = noise(n, n)
        out = processors.adjust(logits, paths)
        assert out.shape == (n, V)
        for row, path in enumerate(paths):
            assert torch.equal(out[row], theirs(ALONE["repetition_penalty"], [1, 2], path, logits[row]))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_processed_in_float32(name: str, dtype: torch.dtype) -> None:
    logits = noise(2, 0).to(dtype)
    paths = [(), (1,)]
    out = make(ALONE[name], [1, 6]).adjust(logits, paths)
    assert out.dtype == torch.float32
    assert torch.equal(out, make(ALONE[name], [1, 6]).adjust(logits.float(), paths))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALONE)
def test_logits_on_a_gpu(name: str) -> None:
    """The state follows the logits, also back to the CPU (a draft on another device)."""
    here, there = make(ALONE[name], [1, 6]), make(ALONE[name], [1, 6])
    for number, device in enumerate(("cuda", "cuda", "cpu", "cuda")):
        paths = [(), (1,), (1, 2)]
        logits = noise(3, number)
        torch.testing.assert_close(
            there.adjust(logits.to(device), paths).cpu(), here.adjust(logits, paths), rtol=1e-12, atol=0
        )
        here.commit((number, 6))
        there.commit((number, 6))
