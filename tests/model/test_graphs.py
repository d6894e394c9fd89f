"""Steps that are captured and replayed give what steps that run as usual give; see `helpers.emulated_graphs`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

from foretoken.errors import CapacityError, ConfigError
from foretoken.model import rope
from foretoken.model.attention.fused import FusedAttention, numbers_of
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.graphs import cache
from foretoken.model.graphs.cache import MAX_ROWS, ROW_BUCKETS, CudaCapture, Step, StepShape
from foretoken.model.graphs.choice import GRAPHS_VARIABLE, GraphWarning, NotCaptured, takes_graphs
from foretoken.model.interface import EarlySegment, Segment
from foretoken.model.layers import MkldnnWeight
from foretoken.model.paged import PagedModel
from foretoken.model.sharding import Shard
from foretoken.model.strict import ExactDeviceModel
from foretoken.transfer import to_device, to_host
from tests.helpers.checkpoints import randomise, token_ids
from tests.helpers.emulated_graphs import EmulatedCapture, NotCapturable, emulated_graphs, memory_of
from tests.helpers.fake_cuda import config_of
from tests.model.test_gpu import rounds

repeated = pytest.mark.repeated
MORE_FAMILIES = ("llama-head-dim", "cohere", "cohere2", "qwen3", "phi3", "olmo2", "glm4", "starcoder2", "qwen3-moe")
FAMILIES = ("llama", "mistral-sliding", "gemma2", "granite", "mixtral", "qwen2-moe", "gpt-oss")
BLOCK = 4
TOLERANCE = {"atol": 1e-12, "rtol": 0.0}  # float64; a wrong key or row changes the first digit


def decoder_of(name: str, seed: int = 0) -> Decoder:
    """Of random weights in float64, which no compiled kernel takes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        decoder = Decoder(config_of(name))
    finally:
        torch.set_default_dtype(before)
    randomise(decoder, seed)
    for table in decoder.rotaries:
        table.cover(decoder.config.max_context_tokens)  # tensors of the CPU are asked for their largest position
    return decoder.requires_grad_(False)


@pytest.fixture
def graphs() -> Iterator[None]:
    with emulated_graphs():
        yield


def captured(model: PagedModel) -> EmulatedCapture:
    assert model.graphs is not None
    assert isinstance(model.graphs.capture, EmulatedCapture)
    return model.graphs.capture


@pytest.mark.parametrize(
    "name",
    [*FAMILIES, *(pytest.param(n, marks=repeated) for n in MORE_FAMILIES)],
)
def test_replayed_steps_are_those_of_torch(name: str) -> None:
    """Prompts, single tokens, chains, trees and shared blocks; a second time nothing is captured any more."""
    decoder = decoder_of(name)
    expected = rounds(usual(decoder))
    with emulated_graphs():
        model = PagedModel(decoder, 400, BLOCK)
        for turn in range(2):
            torch.testing.assert_close(rounds(model), expected, **TOLERANCE)
            assert captured(model).num_replays == model.graphs.steps[cache.REPLAYED] == 7 * (turn + 1)
            assert len(captured(model).graphs) == len(model.graphs.shapes) == 4
            for sequence in range(5):
                model.close(sequence)
    model.check()


def test_padding_wakes_no_expert(graphs: None) -> None:
    """Rows of no numbers go to none (`kernels.experts_triton`)."""
    model = PagedModel(decoder_of("mixtral"), 400, BLOCK)
    assert model.graphs is not None
    model.open(0)
    found = model.forward(torch.tensor(token_ids(5)), [Segment(0, 5, num_taps=1)], taps=(0,))
    assert bool(found.logits.isfinite().all())
    assert model.graphs.shapes[0].rows == 6
    assert model.graphs.taps[0][:6].isnan().all(1).tolist() == [False] * 5 + [True]


def usual(decoder: Decoder) -> PagedModel:
    """The same model as it runs without graphs, by torch's operations."""
    model = PagedModel(decoder, 400, BLOCK)
    model.attention, model.graphs = PagedAttention, None
    return model


class Side:
    """A model whose answers are kept as they were returned, until the end."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model
        self.kept: list[Tensor] = []
        for sequence in range(4):
            model.open(sequence)

    def run(self, tokens: Sequence[int], segments: Sequence[Segment], taps: Sequence[int]) -> None:
        found = self.model.forward(torch.tensor(tokens), segments, taps)
        self.kept += [found.logits, *(found.taps[layer] for layer in sorted(found.taps))]

    def commit(self, segments: Sequence[Segment], paths: Sequence[Sequence[int]]) -> None:
        for segment, path in zip(segments, paths, strict=True):
            self.model.commit(segment.sequence, segment.num_pending, path)
            if self.model.length(segment.sequence) > 80:
                self.model.close(segment.sequence)
                self.model.open(segment.sequence)


def random_step(rng: random.Random) -> list[Segment]:
    """1 to 4 sequences, each with a few tokens, and behind them a chain, a tree or nothing."""
    segments = []
    for sequence in sorted(rng.sample(range(4), rng.randint(1, 4))):
        num_pending, num_nodes = rng.choice([1, 1, 2, 5]), rng.choice([0, 0, 2, 3, 6])
        is_chain = rng.random() < 0.5
        parents = tuple(node - 1 if is_chain else rng.randint(-1, node - 1) for node in range(num_nodes))
        num_rows = num_pending + num_nodes
        segments.append(
            Segment(sequence, num_pending, parents, rng.randint(0, num_rows), num_taps=rng.randint(0, num_rows))
        )
    return segments


def leaf_path(segment: Segment, rng: random.Random) -> list[int]:
    """From the root to a random node of a segment, or nothing."""
    node, path = rng.randint(-1, len(segment.parents) - 1), list[int]()
    while node >= 0:
        path.append(node)
        node = segment.parents[node]
    return path[::-1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=repeated) for seed in range(1, 5))])
def test_random_steps(seed: int, graphs: None) -> None:
    """Buckets, tables and padding change from step to step; what a step returned is not changed by later ones."""
    rng, decoder = random.Random(seed), decoder_of("mistral-sliding")
    sides = [Side(PagedModel(decoder, 400, BLOCK)), Side(usual(decoder))]
    for turn in range(30):
        segments = random_step(rng)
        tokens = token_ids(sum(segment.num_rows for segment in segments), seed=turn)
        paths = [leaf_path(segment, rng) for segment in segments]
        taps = rng.choice([(), (0, 2)])
        for side in sides:
            side.run(tokens, segments, taps)
            side.commit(segments, paths)
    for got, expected in zip(sides[0].kept, sides[1].kept, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)
    model = sides[0].model
    assert model.graphs.steps == {cache.REPLAYED: 30}
    assert len(captured(model).graphs) == len(set(model.graphs.shapes)) < 30
    assert max(shape.parts for shape in model.graphs.shapes) >= 4  # 16 tokens to a part


def test_a_replay_reads_weights_tables_cache_and_the_input_block_alone(graphs: None) -> None:
    model = PagedModel(decoder_of("gemma2"), 400, BLOCK)
    rounds(model)
    persistent = [*model.decoder.parameters(), *model.pool.keys, *model.pool.values]
    persistent += [tensor for table in model.decoder.rotaries for tensor in (table.cos, table.sin)]
    own = [model.graphs.tokens, model.graphs.block, model.graphs.logits]
    known = {memory_of(tensor) for tensor in (*persistent, *own)}
    for graph in captured(model).graphs:
        others = [tensor for memory, tensor in graph.inputs.items() if memory not in known]
        assert all(tensor.dim() == 0 for tensor in others)  # factors of the model
        assert {memory_of(tensor) for tensor in own} <= graph.inputs.keys()


@pytest.mark.parametrize("reason", [cache.MANY_ROWS, cache.MANY_NUMBERS, cache.MANY_GRAPHS, cache.NO_MEMORY])
def test_what_is_not_replayed_runs_as_usual(reason: str, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("llama")
    model, twin, count = PagedModel(decoder, 400, BLOCK), usual(decoder), 9
    assert model.graphs is not None
    if reason == cache.MANY_ROWS:
        monkeypatch.setattr(cache, "MAX_ROWS", count - 1)
    elif reason == cache.MANY_NUMBERS:
        model.graphs.block = model.graphs.block[:20]
    elif reason == cache.MANY_GRAPHS:
        monkeypatch.setattr(cache.CapturedSteps, "max_graphs", 0)
    elif reason == cache.NO_MEMORY:
        model.graphs.capture = _without_memory
    for sequence in range(2):
        found = []
        for one in (model, twin):
            one.open(sequence)
            found.append(one.forward(torch.tensor(token_ids(count)), [Segment(sequence, count)]).logits)
        torch.testing.assert_close(*found, **TOLERANCE)
    assert model.graphs.steps == {reason: 2}


def _without_memory(step: Step) -> Step:
    raise torch.OutOfMemoryError


def _not_captured(step: Step) -> Step:
    raise NotCaptured from RuntimeError("CUDA error: not permitted when stream is capturing\nSearch for it")


def test_a_capture_that_fails_is_told_once_and_steps_run_as_usual(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of("llama")
    model, expected = PagedModel(decoder, 400, BLOCK), rounds(usual(decoder))
    assert model.graphs is not None
    model.graphs.capture = _not_captured
    said = r"could not be captured \(RuntimeError: CUDA error: .* capturing\).*slower; FORETOKEN_GRAPHS=off leaves"
    with pytest.warns(GraphWarning, match=said) as told:
        torch.testing.assert_close(rounds(model), expected, **TOLERANCE)
    assert len(told) == 1
    assert set(model.graphs.steps) == {cache.FAILED}
    monkeypatch.setenv(GRAPHS_VARIABLE, "on")
    model = PagedModel(decoder, 400, BLOCK)
    assert model.graphs is not None
    model.graphs.capture = _not_captured
    with pytest.raises(ConfigError, match=r"FORETOKEN_GRAPHS='on': .*capturing\); leave it unset"):
        model.capture_ahead((), has_trees=False)


def test_without_memory_for_buffers_the_remedy_is_told(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PagedModel(decoder_of("llama"), 400, BLOCK)
    assert model.graphs is not None
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(CapacityError, match=rf"4 MiB .*smaller cache_tokens, or set {GRAPHS_VARIABLE}=off"):
        model.graphs.buffer(1024, dtype=torch.float64)


def test_rows_that_ran_early_are_not_replayed(graphs: None) -> None:
    decoder = decoder_of("llama")
    model, twin = PagedModel(decoder, 400, BLOCK), usual(decoder)
    tokens, found = torch.tensor(token_ids(3)), []
    for one in (model, twin):
        one.open(0)
        one.forward_early(tokens, [EarlySegment(0, 0, 3)], [0])
        found.append(one.forward(tokens, [Segment(0, 3)]).logits)
    torch.testing.assert_close(*found, **TOLERANCE)
    assert model.graphs.steps == {cache.JOINED: 1}


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_strict_trees_are_read_path_by_path(name: str, graphs: None) -> None:
    """Which no graph has a place for: among other branches a row's sum would be rounded otherwise than along its path
    (`interpreted/test_paged_triton.py`).
    """
    decoder = decoder_of(name)
    model, expected = ExactDeviceModel(decoder, 400, BLOCK), rounds(usual(decoder))
    torch.testing.assert_close(rounds(model), expected, **TOLERANCE)
    assert model.graphs is not None
    assert model.graphs.steps == {cache.REPLAYED: 4, cache.TREES: 3}


def test_other_weights_are_captured_anew(graphs: None) -> None:
    decoder, other = decoder_of("llama"), decoder_of("llama", seed=1)
    model = PagedModel(decoder, 400, BLOCK)
    rounds(model)
    for sequence in range(5):
        model.close(sequence)
    decoder.norm, decoder.layers = other.norm, other.layers
    torch.testing.assert_close(rounds(model), rounds(usual(decoder)), **TOLERANCE)


def test_tables_of_positions_are_whole_before_they_are_captured(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that grows is another tensor: if somebody else's use makes one, graphs of the old one are dropped."""
    monkeypatch.setattr(rope, "TABLE_BLOCK", 16)
    decoder = decoder_of("llama")
    model, expected = PagedModel(decoder, 600, BLOCK), rounds(usual(decoder_of("llama")))
    for _ in range(2):
        torch.testing.assert_close(rounds(model), expected, **TOLERANCE)
        for sequence in range(5):
            model.close(sequence)
        for table in decoder.rotaries:
            old, table.cos = table.cos, table.cos.clone()
            old.fill_(float("nan"))


def test_buckets(graphs: None) -> None:
    """Every number of rows has one, at most half as large again; and every work list fits into its shape."""
    assert ROW_BUCKETS[-1] == MAX_ROWS
    model = PagedModel(decoder_of("llama-mha"), 400, BLOCK)
    for rows in (*range(1, 140), *range(140, 257, 29)):
        model.open(rows)
        inputs = model.admit([Segment(rows, rows)])
        work = numbers_of(inputs.readers, model.local)
        shape = StepShape.of(rows, work, ())
        assert rows <= shape.rows <= max(1, rows * 3 // 2)
        assert work.num_tiles <= shape.rows
        assert work.num_parts <= shape.parts < 2 * work.num_parts
        assert len(shape.numbers(inputs, work, 400)) == shape.places["tail"].start
        assert shape.places["tail"].start <= cache.HEAD_NUMBERS
        assert all(place.start % 4 == 0 for place in shape.places.values())
        model.close(rows)


@pytest.mark.parametrize(
    ("name", "attention", "cuts_rows", "said"),
    [
        ("llama", PagedAttention, False, "its attention is not the Triton kernel"),
        ("mixtral", FusedAttention, False, "sorted on the host"),
        ("llama", FusedAttention, True, "strict numerics"),
    ],
)
def test_models_without_graphs(
    name: str, attention: type, cuts_rows: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless told to, they run as ever."""
    decoder = Decoder(config_of(name))
    assert not takes_graphs(decoder, attention, cuts_rows)
    monkeypatch.setenv(GRAPHS_VARIABLE, "on")
    with pytest.raises(ConfigError, match=said):
        takes_graphs(decoder, attention, cuts_rows)


def test_parts_of_a_model_and_packed_weights_are_not_captured() -> None:
    decoder = Decoder(config_of("llama"))
    assert takes_graphs(decoder, FusedAttention)
    decoder.shard = Shard(decoder.config, 0, 2)
    assert not takes_graphs(decoder, FusedAttention)
    decoder = Decoder(config_of("llama"))
    decoder.lm_head.hold(MkldnnWeight(torch.zeros(1), 4))
    assert not takes_graphs(decoder, FusedAttention)


def test_the_variable(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("llama")
    for value, has_graphs in (("on", True), ("", True), ("off", False)):
        monkeypatch.setenv(GRAPHS_VARIABLE, value)
        assert (PagedModel(decoder, 400, BLOCK).graphs is not None) == has_graphs
    monkeypatch.setenv(GRAPHS_VARIABLE, "yes")
    with pytest.raises(ConfigError, match="choose on or off"):
        PagedModel(decoder, 400, BLOCK)


MISTAKES: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "address": lambda x: x.data_ptr(),
    "to_host": lambda x: to_host(x),
    "nonzero": lambda x: x.nonzero(),
    "index by a mask": lambda x: x[x > 0],
    "tensor of the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "to_device": lambda x: x[to_device([0, 1], x.device)],
    "random numbers": lambda x: torch.rand_like(x),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_graph_cannot_hold_is_refused(name: str) -> None:
    x = torch.ones(3)

    capture = EmulatedCapture()
    capture(lambda: None)
    with pytest.raises(NotCapturable), torch.inference_mode():
        capture(lambda: MISTAKES[name](x))


def test_an_emulated_graph_freezes_what_python_decides() -> None:
    """Operations, numbers and tensors of the capture; only what lies in those tensors is read anew."""
    x, out, made, factor = torch.ones(3), torch.zeros(3), [torch.ones(3)], [2.0]
    capture = EmulatedCapture()
    capture(lambda: None)
    replay = capture(lambda: out.copy_(x.view(3) * factor[0] + made[0]))
    assert out.tolist() == [0.0] * 3  # a capture computes nothing
    x.fill_(3)
    made[0], factor[0] = torch.zeros(3), 0.0
    replay()
    assert out.tolist() == [7.0] * 3


def test_cuda_is_called_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, what is asked of torch: a warm-up on a stream that waits, then a capture there, whose memory
    later captures share.
    """
    cuda = mock.MagicMock()
    for name in (
        "device",
        "graph_pool_handle",
        "Stream",
        "current_stream",
        "stream",
        "set_stream",
        "CUDAGraph",
        "graph",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    capture = CudaCapture(torch.device("cuda:1"))
    replays = [capture(cuda.step) for _ in range(2)]
    assert replays == [cuda.CUDAGraph().replay] * 2
    cuda.CUDAGraph.reset_mock()
    names = [name for name, _, _ in cuda.mock_calls]
    turn = ["Stream().wait_stream", "stream", "step", "current_stream().wait_stream", "graph", "step"]
    assert [name for name in names if name in turn] == turn * 2
    shared = {"pool": cuda.graph_pool_handle(), "stream": cuda.Stream(), "capture_error_mode": "thread_local"}
    assert [call.kwargs for call in cuda.graph.mock_calls if call.kwargs] == [shared] * 2
    assert (names.count("graph_pool_handle"), names.count("Stream")) == (1, 1)
    cuda.device.assert_called_with(torch.device("cuda:1"))
    cuda.reset_mock()
    cuda.step.side_effect = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        capture(cuda.step)
    assert [name for name, _, _ in cuda.mock_calls if name in turn] == turn[:4]  # what was begun ends before more is
    cuda.reset_mock(side_effect=True)
    cuda.graph.return_value.__exit__ = mock.Mock(side_effect=RuntimeError("previous error during capture"))
    cuda.step.side_effect = [None, RuntimeError("not permitted")]
    with pytest.raises(NotCaptured) as failed:
        capture(cuda.step)
    assert str(failed.value.__cause__) == "not permitted"
    cuda.set_stream.assert_called_with(cuda.current_stream())  # torch leaves the stream of such a capture in its place
