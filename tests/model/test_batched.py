"""Attention of a whole batch in one call gives what one call per segment gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.batched import BatchedAttention, grouped
from foretoken.model.attention.paged import KeySlots, PagedAttention, Reader
from foretoken.model.interface import EarlySegment, Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import token_ids, variant

BLOCK, HEAD_DIM = 4, 16
CPU = torch.device("cpu")
# Of sums of 16 products and of up to 200 values of unit variance. A key too many or too few changes the first digit.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}
TREE = (-1, 0, 0, 1, 2, 1, 3)


def config(heads: int, groups: int, windows: tuple[int | None, ...]) -> ModelConfig:
    return ModelConfig("llama", 8, 8, 8, len(windows), heads, groups, HEAD_DIM, 512, sliding_window=windows)


def random_segment(rng: random.Random, sequence: int) -> tuple[int, Segment]:
    """Past and segment of any kind: a chunk of a prompt, one token, a chain, a tree, and nodes behind held ones."""
    past, num_nodes = rng.choice([0, 1, 7, 30, 150]), rng.randint(1, 9)
    tree = tuple(rng.randint(-1, node - 1) for node in range(num_nodes))
    return past, rng.choice(
        [
            Segment(sequence, rng.choice([2, 13, 40]), (), 0),
            Segment(sequence, 1),
            Segment(sequence, rng.randint(1, 3), tuple(range(-1, num_nodes - 1))),
            Segment(sequence, rng.randint(1, 3), tree),
            Segment(sequence, 0, tree, 1, num_held=rng.randint(0, num_nodes - 1)),
            Segment(sequence, 0, tuple(range(-1, num_nodes - 1)), 1, num_held=rng.randint(0, num_nodes - 1)),
        ]
    )


def random_readers(rng: random.Random, count: int) -> list[Reader]:
    """Segments over blocks of their own, some of them neighbours, in a pool of which they use a half."""
    shapes = [random_segment(rng, sequence) for sequence in range(count)]
    needed = [-(-(past + segment.num_held + segment.num_rows) // BLOCK) for past, segment in shapes]
    free = list(range(2 * sum(needed)))
    if rng.random() < 0.7:
        rng.shuffle(free)
    readers: list[Reader] = []
    first = 0
    for (past, segment), num_blocks in zip(shapes, needed, strict=True):
        blocks, free = tuple(free[:num_blocks]), free[num_blocks:]
        slots = KeySlots(blocks, BLOCK, past + segment.num_held + segment.num_rows, CPU)
        readers.append(Reader(slice(first, first + segment.num_rows), slots, past, segment))
        first += segment.num_rows
    return readers


def both(seed: int, heads: int, groups: int, windows: tuple[int | None, ...], dtype: torch.dtype) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    readers = random_readers(rng, rng.choice([1, 2, 5, 12]))
    num_rows = readers[-1].rows.stop
    slots = [
        [reader.slots.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(reader.slots))] for reader in readers
    ]
    written = [slot for own, reader in zip(slots, readers, strict=True) for slot in own[-reader.segment.num_rows :]]
    held = [slot for own in slots for slot in own]
    num_slots = 2 * BLOCK * sum(len(reader.slots.blocks) for reader in readers)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pool = KVPool(len(windows), groups, num_slots, HEAD_DIM, dtype, CPU)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))  # of others, or rejected: a single one of them would show
        tensor[:, held] = noise(groups, len(held), HEAD_DIM)
    some = config(heads, groups, windows)
    for layer in range(len(windows)):
        parts = noise(num_rows, heads, HEAD_DIM), noise(num_rows, groups, HEAD_DIM), noise(num_rows, groups, HEAD_DIM)
        expected = PagedAttention(some, pool, torch.tensor(written), readers).attend(layer, *parts)
        got = BatchedAttention(some, pool, torch.tensor(written), readers).attend(layer, *parts)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4), (6, 1)], ids=["gqa", "mha", "mqa"])
def test_any_batch_is_read_as_segment_by_segment(heads: int, groups: int, dtype: torch.dtype) -> None:
    """Random ragged batches, with no window, one shorter than the past, and one shorter than a tree is deep."""
    for seed in range(15):
        both(seed, heads, groups, (None, 20, 3), dtype)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries of every attention call from now on."""
    shapes: list[tuple[int, ...]] = []
    attend = F.scaled_dot_product_attention

    def counted(query: Tensor, *args: Tensor, **options: Tensor) -> Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return shapes


def decoding(count: int, chunk: int = 0) -> list[Reader]:
    """Requests that decode with 0 to 4 draft tokens behind similar texts, and perhaps a chunk of a prompt."""
    segments = [(40 + b % 9, Segment(b, 1, tuple(range(-1, b % 5 - 1)))) for b in range(count)]
    segments += [(0, Segment(count, chunk, (), 0))] if chunk else []
    readers, first = list[Reader](), 0
    for past, segment in segments:
        num = past + segment.num_rows
        readers.append(
            Reader(
                slice(first, first + segment.num_rows), KeySlots(tuple(range(-(-num // 4))), 4, num, CPU), past, segment
            )
        )
        first += segment.num_rows
    return readers


@pytest.mark.parametrize("count", [2, 8, 64])
def test_requests_that_decode_share_one_call(count: int) -> None:
    """However many they are; a long chunk of a prompt has another one of its own."""
    assert [sorted(group) for group in grouped(decoding(count))] == [list(range(count))]
    assert sorted(map(len, grouped(decoding(count, chunk=2000)))) == [1, count]


def test_padding_is_bounded_and_so_are_the_calls() -> None:
    """Texts from 10 to 100,000 tokens: a call for each magnitude, not for each of 200 requests."""
    readers = [
        Reader(slice(b, b + 1), KeySlots((0,), 4, int(10 * 1.047**b), CPU), int(10 * 1.047**b) - 1, Segment(b, 1))
        for b in range(200)
    ]
    groups = grouped(readers)
    assert sorted(i for group in groups for i in group) == list(range(200))
    assert 4 < len(groups) < 16
    for group in groups:
        lengths = [len(readers[i].slots) for i in group]
        assert len(group) * max(lengths) <= max(1.5 * sum(lengths), 65_536 / 17)


@pytest.fixture(scope="module", params=["llama", "qwen2-layer-types"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[PagedModel]]:
    """Two models with the same weights, one for each way to read."""
    folder: Path = variant(tmp_path_factory.mktemp(request.param), request.param)
    decoder = load_decoder(folder, dtype=torch.float32)

    def make() -> list[PagedModel]:
        one, other = PagedModel(decoder, 400, BLOCK), PagedModel(decoder, 400, BLOCK)
        assert one.attention is PagedAttention  # what a CPU does unless told otherwise
        other.attention = BatchedAttention
        return [one, other]

    return make


def test_rounds_of_a_batch(models: Callable[[], list[PagedModel]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk, single tokens and trees; a shared prefix; paths kept and dropped; the pool scattered by then."""
    monkeypatch.setattr("foretoken.model.attention.paged.kernels_for", lambda _: None)  # whose calls are not counted
    shapes, found, counts = calls(monkeypatch), [], []
    for model in models():
        rows = []
        for sequence in range(4):
            model.open(sequence)
            prompt = token_ids(9 + 5 * sequence, seed=sequence)
            rows.append(model.forward(torch.tensor(prompt), [Segment(sequence, len(prompt))]).logits)
            model.commit(sequence, len(prompt))
        model.fork(3, 4)
        shapes.clear()
        for turn, path in enumerate(((0, 2, 4), (), (0, 1, 3, 6))):
            segments = [
                Segment(0, 1, TREE, 8),
                Segment(1, 2, TREE[:4], 5),
                Segment(2, 1),
                Segment(3, 1, (-1, 0, 1), 4),
                Segment(4, 11, (), 2),
            ]
            tokens = token_ids(sum(segment.num_rows for segment in segments), seed=50 + turn)
            rows.append(model.forward(torch.tensor(tokens), segments).logits)
            for segment, kept in zip(segments, (path, (0, 1), (), (0, 1), ()), strict=True):
                model.commit(segment.sequence, segment.num_pending, kept)
        counts.append(len(shapes))
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
    assert counts == [3 * 3 * 5, 3 * 3]  # 3 turns, 3 layers, 5 segments


def test_rows_that_ran_early(models: Callable[[], list[PagedModel]]) -> None:
    """A request drafts with its first layers; verification runs the others for those rows, beside a neighbour."""
    found = []
    for model in models():
        for sequence in (0, 1):
            model.open(sequence)
            model.forward(torch.tensor(token_ids(11 + sequence)), [Segment(sequence, 11 + sequence)])
            model.commit(sequence, 11 + sequence)
        anchor, drafted = token_ids(1, seed=5), token_ids(3, seed=6)
        rows = [
            model.forward_early(torch.tensor([token]), [EarlySegment(0, offset, 1)], range(2))
            for offset, token in enumerate((*anchor, *drafted))
        ]
        flat = torch.tensor([*anchor, *drafted, *anchor])
        rows.append(model.forward(flat, [Segment(0, 1, (-1, 0, 1), 4), Segment(1, 1)]).logits)
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
