"""What a GPU computes is what the CPU computes: forward, cache, sampling. `pytest -m gpu` runs these and the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product as product_of
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken import SamplingParams
from foretoken.kv.pool import KVPool
from foretoken.model.attention.choice import ATTENTION_VARIABLE
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.graphs.cache import REPLAYED
from foretoken.model.graphs.choice import GRAPHS_VARIABLE
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.model.strict import ExactDeviceModel
from foretoken.text.sampling import target_probs, top_two
from foretoken.transfer import to_device, to_host
from foretoken.verify import draw
from tests.helpers.checkpoints import token_ids, variant
from tests.helpers.experts import HIDDEN, MIXTURES, mixture
from tests.model.test_experts import by_hand

GPU = "cuda"
BLOCK = 4
TREE = (-1, 0, 0, 1, 2, 1, 3)
# float64 rounds sums of a few hundred numbers in the 14th digit, whatever their order. In bf16 a logit near 4 has steps
# of 2^-6, and three layers round in between.
TOLERANCE = {torch.float64: 1e-9, torch.bfloat16: 0.25}
FAMILIES = ["llama", "llama-mqa", "mistral-sliding", "qwen2-layer-types", "qwen3-tied-biases"]


def model(folder: Path, dtype: torch.dtype, device: str) -> PagedModel:
    return PagedModel(load_decoder(folder, dtype=dtype, device=device), 400, BLOCK)


def rounds(model: PagedModel) -> Tensor:
    """Logits of chunks, single tokens, chains and trees over several rounds, behind a shared prefix too."""
    rows: list[Tensor] = []

    def run(tokens: Sequence[int], segments: Sequence[Segment]) -> None:
        rows.append(model.forward(to_device(tokens, model.device), segments).logits)

    for sequence in range(4):
        model.open(sequence)
        prompt = token_ids(9 + 5 * sequence, seed=sequence)
        run(prompt, [Segment(sequence, len(prompt))])
        model.commit(sequence, len(prompt))
    model.fork(3, 4)
    for turn, path in enumerate(((0, 2, 4), (), (0, 1, 3, 6))):
        segments = [Segment(0, 1, TREE, 8), Segment(1, 2, TREE[:4], 5), Segment(2, 1), Segment(3, 1, (-1, 0, 1), 4)]
        segments.append(Segment(4, 11, (), 2))
        run(token_ids(sum(segment.num_rows for segment in segments), seed=50 + turn), segments)
        for segment, kept in zip(segments, (path, (0, 1), (), (0, 1), ()), strict=True):
            model.commit(segment.sequence, segment.num_pending, kept)
    return torch.cat(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_forward_is_that_of_the_cpu(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one attention call of torch's per layer, and with one per segment."""
    folder = variant(tmp_path, name)
    expected = rounds(model(folder, torch.float64, "cpu"))
    for attention in ("batched", "segments"):
        monkeypatch.setenv(ATTENTION_VARIABLE, attention)
        there = model(folder, dtype, GPU)
        torch.testing.assert_close(rounds(there).double().cpu(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_triton_kernel_and_graphs(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel without graphs, and with them: captured once, then replayed without a wait."""
    pytest.importorskip("triton")
    folder = variant(tmp_path, name)
    expected = rounds(model(folder, torch.float64, "cpu"))
    for graphs in ("off", "on"):
        monkeypatch.setenv(GRAPHS_VARIABLE, graphs)
        there = model(folder, dtype, GPU)
        assert there.attention is FusedAttention
        assert (there.graphs is not None) == (graphs == "on")
        for turn in range(2):
            with no_waiting() if turn else nullcontext():
                got = rounds(there)
            tolerance = 1e-4 if dtype == torch.float32 else TOLERANCE[dtype]
            torch.testing.assert_close(got.double().cpu(), expected, atol=tolerance, rtol=0)
            for sequence in range(5):
                there.close(sequence)
        if there.graphs is not None:
            assert there.graphs.steps == {REPLAYED: 14}


def in_order(order: Tensor, rows: int, sign: int) -> Tensor:
    """[rows, K]: numbers of very different size, and the same times `sign` in another order: a product of two such
    matrices is what was rounded on the way, which follows the order of its sums.
    """
    half = torch.randn(rows, len(order)) * 2.0 ** torch.randint(7, (rows, len(order)))
    return torch.cat((half, sign * half[:, order]), 1).to(GPU, torch.bfloat16)


@pytest.mark.gpu
def test_products_have_the_same_bits_for_any_number_of_rows() -> None:
    """In tiles of every size, and in those of matrices of other sizes."""
    pytest.importorskip("triton")
    from foretoken.kernels.product_triton import Operands, gated_product, product, tiled, tiling_of

    order = torch.randperm(700)
    x, weight = in_order(order, 600, 1), in_order(order, 1000, -1)
    whole, gated = product(x, weight), gated_product(x, weight, None, "silu")
    assert whole.count_nonzero() > 100_000
    for rows in (1, 2, 3, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 129, 255, 512):
        assert torch.equal(product(x[-rows:], weight), whole[-rows:])
        assert torch.equal(gated_product(x[-rows:], weight, None, "silu"), gated[-rows:])
    cells = product_of((1, 20, 40, 64, 128, 600), (576, 4096, 30_000, 150_000))
    for tiling in {tiling_of(rows, outputs, 2000) for rows, outputs in cells}:
        assert torch.equal(tiled(Operands(x, weight), tiling), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_strict_rows_have_the_same_bits(name: str, tmp_path: Path) -> None:
    """One by one, in one pass, beside other texts and along a path of a tree; steps without trees are replayed."""
    pytest.importorskip("triton")
    there = ExactDeviceModel(load_decoder(variant(tmp_path, name), dtype=torch.bfloat16, device=GPU), 1600, BLOCK)
    assert there.graphs is not None
    assert there.numerics == "strict"
    text = to_device(token_ids(250, seed=5), there.device)
    for sequence in range(5):
        there.open(sequence)
    whole = there.forward(text.repeat(3), [Segment(i, 250, (), 250) for i in range(3)]).logits  # no captured step
    assert torch.equal(whole[500:], whole[:250])
    rows, first = [], 0
    for size in (120, *[1] * 30, 9, 17, 33):
        rows.append(there.forward(text[first : first + size], [Segment(3, size, (), size)]).logits)
        there.commit(3, size)
        first += size
    assert torch.equal(torch.cat(rows), whole[:first])
    beside = [Segment(4, 200, (), 200), Segment(3, 1, tuple(range(-1, 6)), 8)]
    logits = there.forward(torch.cat((text[:200], text[first : first + 8])), beside).logits
    assert torch.equal(logits, torch.cat((whole[:200], whole[first : first + 8])))
    twice = to_device((1, 2, 2, 2, 1), there.device)  # the text goes on behind the second of two equal nodes
    tree = text[first : first + 5].repeat_interleave(twice, output_size=8)
    logits = there.forward(tree, [Segment(3, 1, (-1, -1, 1, 1, 3, 3, 5), 8)]).logits
    assert torch.equal(logits, whole[first : first + 5].repeat_interleave(twice, 0, output_size=8))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0)], ids=["chain", "tree"])
def test_a_draft_token_that_overflows_harms_only_itself(
    parents: tuple[int, ...], graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 96 gives NaN: the rows before and beside it, which share its tile, have the bits that they have without."""
    pytest.importorskip("triton")
    monkeypatch.setenv(GRAPHS_VARIABLE, graphs)
    there = model(variant(tmp_path, "llama"), torch.bfloat16, GPU)
    with torch.no_grad():
        there.decoder.embedding.weight[96] = float("nan")
    there.open(0)
    there.forward(to_device(token_ids(20), there.device), [Segment(0, 20)])
    there.commit(0, 20)
    clean, poisoned = (
        there.forward(to_device((1, 2, own, own), there.device), [Segment(0, 1, parents, 4)]).logits for own in (3, 96)
    )
    assert torch.equal(poisoned[:2], clean[:2])
    assert bool(poisoned[2:].isnan().all())
    assert bool(clean.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"])
def test_experts_are_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with experts, without graphs and with them, in float32: in 16 bit a row may choose another expert."""
    pytest.importorskip("triton")
    folder = variant(tmp_path, name)
    expected = rounds(model(folder, torch.float64, "cpu"))
    for graphs in ("off", "on"):
        monkeypatch.setenv(GRAPHS_VARIABLE, graphs)
        there = model(folder, torch.float32, GPU)
        for turn in range(2):
            with no_waiting() if turn else nullcontext():
                got = rounds(there)
            torch.testing.assert_close(got.double().cpu(), expected, atol=1e-4, rtol=0)
            for sequence in range(5):
                there.close(sequence)
        assert there.graphs is None or there.graphs.steps == {REPLAYED: 14}


# By dtype: a sum of up to 96 products of numbers up to 3, of channels that were rounded.
EXPERT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", EXPERT_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_there(name: str, dtype: torch.dtype) -> None:
    """As in float64 here, without a wait; a row's bits are its own, alone, among others, and replayed."""
    pytest.importorskip("triton")
    rows = torch.randn(600, HIDDEN).to(dtype)
    expected = by_hand(mixture(MIXTURES[name], dtype=dtype), rows[:70])
    experts, x = mixture(MIXTURES[name], dtype=dtype).to(GPU), rows.to(GPU)
    with torch.inference_mode():
        together = experts(x)
        with no_waiting():
            assert torch.equal(experts(x[:70]), together[:70])
            assert torch.equal(experts(x[33:34]), together[33:34])
        torch.testing.assert_close(
            together[:70].double().cpu(), expected, atol=EXPERT_TOLERANCE[dtype], rtol=EXPERT_TOLERANCE[dtype]
        )
        given, graph = x[:9].clone(), torch.cuda.CUDAGraph()
        experts(given)
        with torch.cuda.graph(graph):
            replayed = experts(given)
        given.copy_(x[40:49])
        graph.replay()
        assert torch.equal(replayed, together[40:49])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Operations that wait for the device raise."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the mode is called a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_forward_and_its_probabilities_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with fake tensors (`test_fake_cuda`), by the device's own count; a capture would wait."""
    monkeypatch.setenv(GRAPHS_VARIABLE, "off")
    there = model(variant(tmp_path, "qwen2-layer-types"), torch.bfloat16, GPU)
    expected = rounds(there)  # makes the tables that grow
    there = PagedModel(there.decoder, 400, BLOCK)
    params = [SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05), SamplingParams(temperature=0.0)]
    with no_waiting():
        got = rounds(there)
        probs = target_probs(got, [params[row % 2] for row in range(len(got))])
    assert torch.equal(got, expected)
    assert bool(torch.isfinite(probs).all())
    with pytest.raises(RuntimeError), no_waiting():
        to_host(probs[0])


@pytest.mark.gpu
def test_the_cache_is_written_gathered_and_moved() -> None:
    slots, sources, destinations = [7, 3, 30, 11], [3, 30], [30, 5]
    keys = torch.randn(4, 2, 16)
    read = []
    for device in (torch.device("cpu"), torch.device(GPU)):
        pool = KVPool(2, 2, 40, 16, torch.bfloat16, device)
        new = to_device(keys, device, torch.bfloat16)
        pool.write(1, to_device(slots, device), new, 2 * new)
        pool.move(sources, destinations)
        parts = (*pool.read(1, to_device([30, 5, 7, 11], device)), *pool.read(1, range(40)))
        read.append([part.cpu() for part in parts])
    for here, there in zip(*read, strict=True):
        assert torch.equal(here, there)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.7, top_k=40),
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.02),
        SamplingParams(temperature=0.8, top_k=100, top_p=0.95, min_p=0.01),
    ],
    ids=str,
)
def test_the_distribution_and_its_draws_are_those_of_the_cpu(params: SamplingParams) -> None:
    """In float64, where a border token is the same on both: probabilities, and ids for the same uniforms."""
    logits = 3 * torch.randn(6, 3000, dtype=torch.float64)
    uniforms = torch.rand(6, 500, dtype=torch.float64)
    here, there = (target_probs(part, [params] * 6) for part in (logits, logits.to(GPU)))
    torch.testing.assert_close(there.cpu(), here, atol=1e-12, rtol=1e-9)
    for row in range(6):
        ids = [draw(part[row].expand(500, -1), uniforms[row].to(part.device)).cpu() for part in (here, there)]
        assert (ids[0] != ids[1]).sum() <= 1  # a uniform within the last bits of a border
        assert bool((here[row, ids[1]] > 0).all())
    assert torch.equal(there.argmax(-1).cpu(), here.argmax(-1))


@pytest.mark.gpu
def test_the_law_of_many_draws() -> None:
    """200,000 draws of a parallel prefix sum in float32: frequencies within five standard deviations."""
    probs = (2 * torch.randn(1, 50)).softmax(-1).to(GPU)
    count = 200_000
    drawn = draw(probs.expand(count, -1), torch.rand(count, dtype=torch.float64).to(GPU))
    frequency = torch.bincount(drawn, minlength=50).double().cpu() / count
    expected = probs[0].double().cpu()
    assert bool(((frequency - expected).abs() < 5 * (expected / count).sqrt()).all())


@pytest.mark.gpu
def test_near_ties_are_found_there() -> None:
    logits = torch.randn(40, 97).bfloat16()
    here, there = (top_two(own) for own in (logits, logits.to(GPU)))
    assert here.seconds is not None
    assert there.seconds is not None
    assert here.best.tolist() == there.best.tolist()
    assert (here.peaks.tolist(), here.seconds.tolist()) == (there.peaks.tolist(), there.seconds.tolist())


@pytest.mark.gpu
def test_numbers_of_any_dtype_travel_together() -> None:
    parts = [
        torch.tensor([2**31 - 1, 0, 5]),
        torch.rand(4),
        torch.rand(2, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.empty(0),
    ]
    found = to_host(*(to_device(part, GPU, None) for part in parts))
    assert found == [part.tolist() for part in parts]
    assert [type(one[0]) for one in found if one] == [int, float, float, bool]
