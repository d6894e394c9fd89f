"""Steps of an EAGLE head that are captured and replayed give what its steps give as they run without graphs; see
`helpers.emulated_graphs`. Whole runs of the engine are in `tests/engine/test_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from foretoken import transfer
from foretoken.errors import ConfigError
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.graphs import EagleGraphs, likeliest
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.graphs import cache
from foretoken.model.graphs.cache import Step
from foretoken.model.graphs.choice import GRAPHS_VARIABLE
from foretoken.model.interface import Segment
from foretoken.model.layers import MkldnnWeight
from foretoken.model.paged import PagedModel
from foretoken.text.sampling import without_broken
from foretoken.transfer import to_device
from tests.helpers.checkpoints import token_ids
from tests.helpers.emulated_graphs import EmulatedCapture, emulated_graphs, launched, memory_of
from tests.helpers.fake_cuda import DEVICE, fake_cuda, fake_model
from tests.helpers.fake_drafters import fake_head
from tests.helpers.mtp_checkpoints import random_mtp
from tests.helpers.stored_heads import eagle_config
from tests.helpers.tiny_heads import eagle_head
from tests.model.test_gpu import GPU, no_waiting
from tests.model.test_graphs import BLOCK, TOLERANCE, decoder_of

repeated = pytest.mark.repeated
HEADS: dict[str, Callable[[PagedModel], EagleHead]] = {
    "3": lambda target: eagle_head(target.config),
    "narrow": lambda target: eagle_head(target.config, hidden_size=32),
    "1": lambda target: eagle_head(target.config, 1),
    "mtp": lambda target: random_mtp(target.config),
}
# Rows of text of each sequence in each round, and how many tokens are drafted behind them.
ROUNDS = (((9, 3), (31, 3)), ((1, 1), (2, 4), (140, 2)), ((3, 3), (1, 2), (2, 3)), ((1, 3), (1, 3), (1, 3)))


class Drafted(NamedTuple):
    """What two runners were given, and drafted behind it."""

    tokens: list[Tensor]
    logits: list[Tensor]


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest prompt has too many rows for a graph."""
    monkeypatch.setattr(cache, "MAX_ROWS", 128)


@pytest.fixture
def graphs() -> Iterator[None]:
    with emulated_graphs():
        yield


def runner_of(name: str = "3", device: str = "cpu", dtype: torch.dtype = torch.float64) -> CachedEagle:
    target = PagedModel(decoder_of("llama").to(device, dtype), 600, BLOCK)
    return CachedEagle(HEADS[name](target).to(device, dtype), target)


def captured(runner: CachedEagle) -> EagleGraphs:
    assert runner.graphs is not None
    return runner.graphs


def usual(runner: CachedEagle) -> CachedEagle:
    """The same head as it runs without graphs, by torch's operations."""
    other = CachedEagle(runner.head, runner.target)
    other.graphs, other.cache.attention = None, PagedAttention
    return other


def drafted(runner: CachedEagle) -> Drafted:
    """Rounds of chains of several requests, and a tree behind each round."""
    found = Drafted([], [])
    for turn, texts in enumerate(ROUNDS):
        num_rows = sum(rows for rows, _ in texts)
        tokens, features = rows_of(runner, num_rows, turn)
        for sequence in range(len(texts)):
            if sequence not in runner.cache.tables:
                runner.cache.open(sequence)
        segments = [Segment(sequence, rows) for sequence, (rows, _) in enumerate(texts)]
        found.tokens.append(chains(runner, tokens, features, segments, [count for _, count in texts]))
        tree = [Segment(sequence, 0, (-1, -1, 0), 2) for sequence in range(len(texts))]
        out = runner.run(*rows_of(runner, 3 * len(tree), 9 + turn), tree)
        found.logits.extend((out.own_logits, out.feedback))
    return found


def rows_of(runner: CachedEagle, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens [T] and features [T, D] as numbers of the host."""
    width, generator = runner.head.config.layer.hidden_size, torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    device = runner.cache.device
    return to_device(token_ids(num_rows, seed=seed), device), to_device(features, device, runner.head.norm_dtype)


def chains(
    runner: CachedEagle, tokens: Tensor, features: Tensor, segments: Sequence[Segment], counts: Sequence[int]
) -> Tensor:
    """What `draft` gives; without graphs, what calls of `run` give."""
    if runner.graphs is not None:
        whole = runner.draft(tokens, features, segments, counts)
        assert whole is not None
        return whole
    found = []
    out = runner.run(tokens, features, segments)
    for row, (segment, count) in enumerate(zip(segments, counts, strict=True)):
        token, feature = out.logits[row : row + 1].argmax(-1), out.feedback[row : row + 1]
        found.append(token)
        for place in range(count - 1):
            own = Segment(segment.sequence, 0, (*range(-1, place),), 1, place)
            later = runner.run(token, feature, [own])
            token, feature = later.logits.argmax(-1), later.feedback
            found.append(token)
    return torch.cat(found)


@pytest.mark.parametrize("name", ["3", "1", *(pytest.param(name, marks=repeated) for name in ("narrow", "mtp"))])
def test_replayed_drafts_are_those_of_single_steps(name: str, graphs: None) -> None:
    """Chains of one length and of several, prompts, trees; a long text runs without a graph. A second time nothing is
    captured any more.
    """
    runner = runner_of(name)
    expected, own = drafted(usual(runner)), captured(runner)
    for turn in range(2):
        found = drafted(runner)
        assert [one.tolist() for one in found.tokens] == [one.tolist() for one in expected.tokens]
        for got, wanted in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(got, wanted, **TOLERANCE)
        num_steps = sum(1 + max(count for _, count in texts) for texts in ROUNDS)
        assert own.steps == {cache.REPLAYED: (turn + 1) * (num_steps - 1), cache.MANY_ROWS: turn + 1}
        assert isinstance(own.capture, EmulatedCapture)
        if not turn:
            num_graphs = len(own.capture.graphs)
        assert len(own.capture.graphs) == len(own.shapes) == num_graphs < num_steps
        for sequence in range(3):
            runner.cache.close(sequence)
    runner.cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", HEADS)
def test_replayed_drafts_on_a_gpu_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once captured, nothing waits for the device."""
    pytest.importorskip("triton")
    expected = drafted(usual(runner_of(name)))
    monkeypatch.setenv("FORETOKEN_ATTENTION", "triton")
    monkeypatch.setenv(GRAPHS_VARIABLE, "on")
    runner = runner_of(name, GPU, torch.float32)
    for turn in range(2):
        with no_waiting() if turn else nullcontext():
            found = drafted(runner)
        assert [one.tolist() for one in found.tokens] == [one.tolist() for one in expected.tokens]
        for got, wanted in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(got.double().cpu(), wanted, atol=1e-3, rtol=0)
        for sequence in range(3):
            runner.cache.close(sequence)
    assert captured(runner).steps.keys() == {cache.REPLAYED, cache.MANY_ROWS}


def test_a_replay_reads_weights_tables_cache_and_inputs_alone(graphs: None) -> None:
    runner = runner_of()
    drafted(runner)
    own, rotary = captured(runner), runner.head.rotary
    target = runner.target
    assert isinstance(target, PagedModel)
    known = [*runner.head.parameters(), *target.decoder.parameters(), rotary.cos, rotary.sin, runner.vocabulary.ids]
    known += [*runner.cache.pool.keys, *runner.cache.pool.values]
    inputs = [own.tokens, own.features, own.block]
    outputs = [own.logits, own.feedback, own.likeliest]
    memory = {memory_of(tensor) for tensor in (*known, *inputs, *outputs)}
    assert isinstance(own.capture, EmulatedCapture)
    for graph in own.capture.graphs:
        assert graph.inputs.keys() <= memory
        assert {memory_of(tensor) for tensor in (*inputs, *outputs)} <= graph.inputs.keys()


def test_without_memory_for_a_graph_chains_are_the_same(graphs: None) -> None:
    runner = runner_of()
    own, expected = captured(runner), drafted(usual(runner))
    own.capture = _without_memory
    found = drafted(runner)
    assert [one.tolist() for one in found.tokens] == [one.tolist() for one in expected.tokens]
    assert own.steps.keys() == {cache.NO_MEMORY, cache.MANY_ROWS}


def _without_memory(step: Step) -> Step:
    raise torch.OutOfMemoryError


def test_other_weights_are_captured_anew(graphs: None) -> None:
    """A matrix in another place, as adaptation may put it."""
    runner = runner_of()
    drafted(runner)
    for sequence in range(3):
        runner.cache.close(sequence)
    for linear in (runner.head.fc, runner.head.decoder_layers[0].mlp.down_proj, runner.head.lm_head):
        assert linear is not None
        assert linear.weight is not None
        linear.weight = nn.Parameter(-linear.weight, requires_grad=False)
    found, expected = drafted(runner), drafted(usual(runner))
    assert [one.tolist() for one in found.tokens] == [one.tolist() for one in expected.tokens]


def test_a_row_that_cannot_be_sampled_from_drafts_what_it_drafts_elsewhere() -> None:
    rows = torch.randn(6, 9)
    rows[1, 2], rows[2, 3], rows[3, :] = float("nan"), float("inf"), -float("inf")
    rows[4, :5] = -float("inf")
    assert likeliest(rows).tolist() == without_broken(rows).argmax(-1).tolist()


def test_a_twin_replays_the_same_graphs(graphs: None) -> None:
    """What is tried beside a twin of the target is not captured again."""
    runner = runner_of()
    assert isinstance(runner.target, PagedModel)
    twin = runner.twin(runner.target.twin())
    expected = drafted(twin).tokens
    own = captured(runner)
    num_graphs = len(own.shapes)
    assert [one.tolist() for one in drafted(runner).tokens] == [one.tolist() for one in expected]
    assert len(own.shapes) == num_graphs


def test_a_chain_brings_one_copy_a_place_to_the_device() -> None:
    """And waits for nothing."""
    with emulated_graphs(capture=launched), fake_cuda() as transfers, torch.inference_mode():
        target = fake_model("llama")
        head = fake_head(eagle_config(3, target.config, taps=(1, 2, 3)))
        assert isinstance(head, EagleHead)
        runner, copies = CachedEagle(head, target), list[Tensor]()
        tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        features = torch.zeros(2, head.config.layer.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        for sequence in range(2):
            runner.cache.open(sequence)
        segments = [Segment(sequence, 1) for sequence in range(2)]
        runner.draft(tokens, features, segments, (4, 4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "_pinned", lambda host: copies.append(host) or host)
            runner.draft(tokens, features, segments, (4, 4))
        assert captured(runner).steps == {cache.REPLAYED: 8}
        assert len(copies) == 4
        assert not transfers.lengths


@pytest.mark.parametrize("reason", ["Triton", "look up", "kernels of their own", "another format"])
def test_heads_without_graphs(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told to, they run as ever."""
    with nullcontext() if reason == "Triton" else emulated_graphs():
        target = PagedModel(decoder_of("gemma2" if reason == "look up" else "llama"), 200, BLOCK)
        head = eagle_head(target.config)
        head = head.half() if reason == "another format" else head.double()
        if reason == "kernels of their own":
            head.fc.hold(MkldnnWeight(torch.zeros(1), 4))
        assert CachedEagle(head, target).graphs is None
        monkeypatch.setenv(GRAPHS_VARIABLE, "on")
        with pytest.raises(ConfigError, match=reason):
            CachedEagle(head, target)
        monkeypatch.setenv(GRAPHS_VARIABLE, "off")
        assert CachedEagle(head, target).graphs is None
