"""Drafts verified from logits in one compiled call: to the bit what the rules decide from distributions in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import Draft, Mass, RaceRows, Uniforms, Verdict
from foretoken.engine.from_logits import verify_chains, verify_coupled
from foretoken.engine.runner import RowChecks, TargetOutput
from foretoken.kernels import sampling as compiled
from foretoken.kernels.build import FLAGS, built
from foretoken.kernels.sampling import SOURCE, load
from foretoken.text.randomness import RaceNoise, round_uniforms
from foretoken.text.sampling import top_two
from foretoken.verify import race_winners, verify_batch
from tests.helpers.instruction_sets import INSTRUCTION_SETS

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.6, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.8, min_p=0.02),
)


@pytest.fixture(params=INSTRUCTION_SETS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(built(SOURCE, tuple(flag.replace("native", request.param) for flag in FLAGS)))
    monkeypatch.setattr(compiled, "sampling_kernel", lambda: found)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chain_draft(tokens: Sequence[Sequence[int]]) -> Draft:
    offsets = [0]
    for own in tokens:
        offsets.append(offsets[-1] + len(own))
    flat = [token for own in tokens for token in own]
    parents = tuple(node for own in tokens for node in range(-1, len(own) - 1))
    return Draft(torch.tensor(flat, dtype=torch.int64), parents, tuple(offsets), ("ngram",) * len(tokens))


def target_of(logits: Tensor, params: Sequence[SamplingParams]) -> TargetOutput:
    top = top_two(logits)
    checks = RowChecks((), top.peaks, None, frozenset(), logits.dtype)
    return TargetOutput(top.best, params, logits, logits, {}, checks, {})


def random_batch(vocab: int, seed: int, dtype: torch.dtype) -> tuple[Draft, TargetOutput, Uniforms, list[str]]:
    """Chains of 0 to 6 likely tokens for 1 to 6 requests, each with its own sampling."""
    made, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [made.choice(KINDS) for _ in range(made.randint(1, 6))]
    lengths = [made.choice((0, 0, 1, 2, 6)) for _ in params]
    num_rows = len(params) + sum(lengths)
    logits = (torch.randn(num_rows, vocab, generator=generator) * made.choice((0.1, 2.0, 6.0))).to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, made.randrange(vocab)] = 3.0
    tokens, row = list[list[int]](), 0
    for length in lengths:
        ranked = logits[row : row + length].float().topk(min(3, vocab)).indices.tolist()
        tokens.append([made.choice((*likely, made.randrange(vocab))) for likely in ranked])
        row += 1 + length
    draft = chain_draft(tokens)
    of_rows = [own for own, length in zip(params, lengths, strict=True) for _ in range(1 + length)]
    rules = ["greedy" if own.greedy else made.choice(("auto", "rejection")) for own in params]
    seeds = [made.getrandbits(64) for _ in params]
    starts = [made.randrange(10_000) for _ in params]
    return draft, target_of(logits, of_rows), round_uniforms(draft, seeds, starts), rules


def agreed(
    verify: Callable[[Draft, TargetOutput, Uniforms, Sequence[str]], Verdict | None],
    draft: Draft,
    target: TargetOutput,
    uniforms: Uniforms,
    rules: Sequence[str],
) -> tuple[int, int]:
    """That `verify` decides what the rules do, with one thread and two: the tokens accepted, and the requests of which
    something was left.
    """
    expected = verify_batch(draft, target.probs, uniforms, rules)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert verify(draft, target, uniforms, rules) == expected
    left = sum(len(path) < length for path, length in zip(expected.paths, draft.lengths, strict=True))
    return sum(map(len, expected.paths)), left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 17, 1000, 4097])
def test_verdicts_equal_those_of_the_rules(kernel: None, threads: None, vocab: int, dtype: torch.dtype) -> None:
    num_accepted = num_rejected = 0
    for seed in range(60):
        draft, target, uniforms, rules = random_batch(vocab, 100 * vocab + seed, dtype)
        accepted, rejected = agreed(verify_chains, draft, target, uniforms, rules)
        num_accepted, num_rejected = num_accepted + accepted, num_rejected + rejected
    assert num_accepted > 20
    assert num_rejected > 20


def test_a_rejected_token_never_follows_itself(kernel: None) -> None:
    """Of two tokens one is rejected: the other follows. Alone with all the probability it is accepted."""
    params = [SamplingParams(temperature=1.0)] * 2
    target = target_of(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), params)
    numbers = Uniforms(torch.tensor([0.9], dtype=torch.float64), torch.tensor([0.999], dtype=torch.float64))
    verdict = verify_chains(chain_draft([[1]]), target, numbers, ["auto"])
    assert verdict is not None
    assert (verdict.paths, verdict.next_tokens, verdict.next_kinds) == (((),), (0,), ("residual",))
    sure = target_of(torch.tensor([[-torch.inf, 0.0], [0.0, -torch.inf]]), params)
    verdict = verify_chains(chain_draft([[1]]), sure, numbers, ["auto"])
    assert verdict is not None
    assert (verdict.paths, verdict.next_tokens, verdict.next_kinds) == (((0,),), (0,), ("bonus",))


def test_a_number_as_large_as_the_probability_rejects(kernel: None) -> None:
    target = target_of(torch.zeros(2, 2), [SamplingParams(temperature=1.0)] * 2)
    for number, length in ((0.5, 0), (0.5 - 2**-53, 1)):
        numbers = Uniforms(torch.tensor([number], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))
        verdict = verify_chains(chain_draft([[1]]), target, numbers, ["rejection"])
        assert verdict is not None
        assert (len(verdict.paths[0]), verdict.probabilities) == (length, ((0.5,),))


def test_what_it_does_not_take_is_left_to_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target, uniforms, rules = random_batch(50, 3, torch.float32)
    assert verify_chains(draft, target, uniforms, rules) is not None
    assert verify_chains(draft, target, uniforms, ["block", *rules[1:]]) is None
    doubles = replace(target, processed=target.processed.double())
    assert verify_chains(draft, doubles, uniforms, rules) is None
    tree = Draft(torch.tensor([1, 2]), (-1, -1), (0, 2), ("ngram",))
    three = target_of(torch.zeros(3, 50), [KINDS[1]] * 3)
    numbers = round_uniforms(tree, [1], [0])
    assert verify_chains(tree, three, numbers, ["auto"]) is None
    mass = Mass(torch.full((1, 50), 0.02), (0, -1))
    one = Draft(torch.tensor([1]), (-1,), (0, 1), ("model",), (True,), mass)
    two = target_of(torch.zeros(2, 50), [KINDS[1]] * 2)
    assert verify_chains(one, two, round_uniforms(one, [1], [0]), ["auto"]) is None
    monkeypatch.setattr(compiled, "sampling_kernel", lambda: None)
    assert verify_chains(draft, target, uniforms, rules) is None


def random_trees(vocab: int, seed: int, dtype: torch.dtype) -> tuple[Draft, TargetOutput, Uniforms]:
    """Trees of 0 to 7 nodes, equal siblings among them, many of which are what the rule chooses."""
    made, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [made.choice(KINDS) for _ in range(made.randint(1, 6))]
    sizes = [made.choice((0, 1, 3, 7)) for _ in params]
    logits = torch.randn(len(params) + sum(sizes), vocab, generator=generator) * made.choice((0.1, 2.0, 6.0))
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, made.randrange(vocab)] = 3.0
    of_rows = [own for own, size in zip(params, sizes, strict=True) for _ in range(1 + size)]
    target = target_of(logits.to(dtype), of_rows)
    parents, offsets, races = list[int](), [0], list[RaceRows]()
    for size in sizes:
        own = [made.randrange(-1, node) for node in range(size)]
        depths = [0]
        for parent in own:
            depths.append(depths[1 + parent] + 1)
        start = made.randrange(10_000)
        races.append(RaceRows(RaceNoise(made.getrandbits(64), vocab), tuple(start + depth for depth in depths)))
        parents += own
        offsets.append(offsets[-1] + size)
    nothing = torch.full((len(parents),), torch.nan)
    uniforms = Uniforms(nothing, torch.full((len(params),), torch.nan), tuple(races))
    draft = Draft(torch.zeros(len(parents), dtype=torch.int64), tuple(parents), tuple(offsets), ("any",) * len(params))
    winners = race_winners(target.probs, races).tolist()
    tokens = [winners[row] if made.random() < 0.7 else made.randrange(vocab) for row in draft.parent_rows]
    return replace(draft, tokens=torch.tensor(tokens, dtype=torch.int64)), target, uniforms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 17, 1000, 20_000])
def test_coupled_verdicts_equal_those_of_the_rule(kernel: None, threads: None, vocab: int, dtype: torch.dtype) -> None:
    """20,000 tokens are several blocks of sums and several pieces of a race, which threads share."""
    num_accepted = num_ended = 0
    for seed in range(40 if vocab < 20_000 else 8):
        draft, target, uniforms = random_trees(vocab, 100 * vocab + seed, dtype)
        rules = ["coupled"] * draft.num_requests
        accepted, ended = agreed(verify_coupled, draft, target, uniforms, rules)
        num_accepted, num_ended = num_accepted + accepted, num_ended + ended
    assert num_accepted > 10
    assert num_ended > 10


def test_rows_that_no_path_reaches_are_not_read(kernel: None) -> None:
    """The token after a mismatch has a row that is not finite: the verdict is that of finite rows."""
    draft, vocab = chain_draft([[3, 4, 5]]), 50
    target = target_of(torch.zeros(4, vocab), [KINDS[1]] * 4)
    noise = RaceNoise(5, vocab)
    uniforms = Uniforms(torch.zeros(3), torch.zeros(1), (RaceRows(noise, (7, 8, 9, 10)),))
    first = int(race_winners(target.probs[:1], [RaceRows(noise, (7,))]))
    draft = replace(draft, tokens=torch.tensor([first, (first + 1) % vocab, 5]))
    target.processed[3] = torch.nan
    found = verify_coupled(draft, target, uniforms, ["coupled"])
    assert found == verify_batch(draft, target_of(torch.zeros(4, vocab), [KINDS[1]] * 4).probs, uniforms, ["coupled"])


def test_other_rules_and_noise_are_left_to_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target, uniforms = random_trees(50, 3, torch.float32)
    rules = ["coupled"] * draft.num_requests
    assert draft.num_requests > 1
    assert verify_coupled(draft, target, uniforms, rules) is not None
    assert verify_coupled(draft, target, uniforms, ["auto", *rules[1:]]) is None
    there = tuple(race.noise.at(race.positions) if isinstance(race, RaceRows) else race for race in uniforms.race)
    assert verify_coupled(draft, target, replace(uniforms, race=(there[0], *uniforms.race[1:])), rules) is None
    assert verify_coupled(draft, replace(target, processed=target.processed.double()), uniforms, rules) is None
    monkeypatch.setattr(compiled, "sampling_kernel", lambda: None)
    assert verify_coupled(draft, target, uniforms, rules) is None
