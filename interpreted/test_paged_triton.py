"""Attention as a Triton kernel gives what torch's operations give, through Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels import paged_triton, paged_work, row_triton
from foretoken.kernels.paged_work import MERGE_FIELDS
from foretoken.kv.pool import KVPool
from foretoken.model.attention import fused
from foretoken.model.attention.fused import numbers_of, work_of
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.attention.strict import PathAttention
from foretoken.model.graphs.cache import StepShape
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import ForwardInputs
from interpreted.batches import CPU, MIXED, TREE, Batch, config_of
from tests.helpers.checkpoints import VARIANTS, token_ids, variant
from tests.model.test_batched import random_segment

# Of sums of up to 40 products and 200 values of unit variance. A key too many or too few changes the first digit.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPAN = 64  # texts of 150 tokens have three spans, of one tile of keys each, or of four where heads are large


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged_work, paged_triton, fused):
        monkeypatch.setattr(module, "SPAN_COLUMNS", SPAN)
    monkeypatch.setattr("foretoken.model.attention.paged.kernels_for", lambda _: None)  # the twin is torch's


def close(batch: Batch, dtype: torch.dtype = torch.float32, has_sinks: bool = False) -> None:
    sinks = batch.sinks if has_sinks else None
    got, expected = batch.fused(sinks), batch.expected(sinks)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "groups", "head_dim", "window"), [(4, 2, 16, None), (2, 2, 72, 70), (6, 1, 40, 3)])
def test_any_batch_is_read_as_segment_by_segment(heads: int, groups: int, head_dim: int, window: int | None) -> None:
    """A window longer than a span, and one shorter than a tree is deep; head sizes that are no power of two."""
    close(Batch(MIXED, config_of(heads, groups, head_dim, window), seed=heads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    close(Batch(MIXED[1:4], config_of(4, 2, 16), dtype), dtype)


def test_slots_that_see_their_whole_block() -> None:
    """Of block drafters: rows see what is behind them too, behind short and long texts and beside causal ones."""
    batch = Batch([(140, Segment(0, 7)), (3, Segment(1, 16)), (37, Segment(2, 3))], config_of(4, 2, 16))
    causal = batch.fused()
    for reader in batch.readers[:2]:
        reader.sees_all = True
    close(batch)
    assert torch.equal(batch.fused()[-3:], causal[-3:])
    assert not torch.isclose(batch.fused()[0], causal[0]).any()


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0)], ids=["chain", "tree"])
def test_a_row_that_overflows_harms_only_those_that_see_it(
    parents: tuple[int, ...], poison: float, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft token's values are not finite: the rows before and beside it share its call, and keep their bits."""

    def write(pool: KVPool, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        row_triton.write(key, value, (pool.keys[layer], pool.values[layer]), slots)

    monkeypatch.setattr(KVPool, "write", write)
    batch = Batch([(140, Segment(0, 1, parents)), (5, Segment(1, 1))], config_of(4, 2, 16, attention_softcap=softcap))
    expected = batch.fused()
    batch.parts[2][2:4] = poison
    got = batch.fused()
    assert bool(got[2:4].isnan().all())
    for kept in (slice(0, 2), slice(4, 5)):
        assert torch.equal(got[kept], expected[kept])


@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores_beside_sinks(window: int | None) -> None:
    """A cap that bends scores of unit variance; sinks where a row's columns have one part and where they have three."""
    close(Batch(MIXED[:4], config_of(4, 2, 16, window, attention_softcap=0.7)), has_sinks=True)


def test_no_score_is_too_large_for_a_cap() -> None:
    batch = Batch(MIXED[1:3], config_of(2, 1, 16, attention_softcap=30.0, attention_scale=1000.0))
    close(batch)


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_blocks_of_any_size(block_size: int) -> None:
    close(Batch(MIXED[1:6:2], config_of(2, 1, 16), block_size=block_size))


def test_more_heads_in_a_group_than_a_tile_has_lines() -> None:
    close(Batch(MIXED[2:3], config_of(70, 1, 16)))


def test_a_row_keeps_its_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and among others, however many programs share its text, and with other rows of its text in one pass."""
    batch = Batch(MIXED, config_of(4, 2, 16, 100), seed=5)
    together = batch.fused()
    for index, reader in enumerate(batch.readers):
        assert torch.equal(batch.alone(index), together[reader.rows])
    assert work_of(batch.readers, batch.config, CPU).num_parts == 3
    monkeypatch.setattr(fused, "_MAX_SHARED_ROWS", 0)
    assert work_of(batch.readers, batch.config, CPU).num_parts == 1
    assert torch.equal(batch.fused(), together)


def test_a_row_keeps_its_bits_however_its_text_is_cut() -> None:
    """150 tokens at once, and the last of them behind the others."""
    config = config_of(2, 1, 16)
    whole = Batch([(0, Segment(0, 150))], config)
    expected = whole.fused()
    (reader,) = whole.readers
    for rows in (1, 7):
        parts = [part[-rows:] for part in whole.parts]
        last = replace(reader, rows=slice(0, rows), past=150 - rows, segment=Segment(0, rows))
        got = fused.FusedAttention(config, whole.pool, whole.write_slots[-rows:], [last]).attend(0, *parts)
        assert torch.equal(got, expected[-rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_strict_rows_of_a_tree_have_the_bits_of_their_paths(window: int | None, dtype: torch.dtype) -> None:
    """Each row as if its path were all that stands behind its text; other branches between change how it is rounded."""
    batch = Batch(MIXED[:5], config_of(4, 2, 16, window), dtype, seed=7)
    scattered, differing = batch.fused(), 0
    strict = PathAttention(batch.config, batch.pool, batch.write_slots, batch.readers).attend(0, *batch.parts)
    close(batch, dtype)
    for reader in batch.readers:
        for row in range(reader.segment.num_rows):
            path = path_of(reader.segment, row)
            expected = batch.along(reader, path)
            assert torch.equal(strict[reader.rows][row], expected)
            differing += int(not torch.equal(scattered[reader.rows][row], expected))
    assert differing or dtype != torch.float32  # rounding to 16 bits hides most of it in one layer


def path_of(segment: Segment, row: int) -> list[int]:
    """The rows of `segment` from its first one to `row`."""
    path, pending = [row], segment.num_pending
    while path[0] > 0:
        at = path[0]
        parent = at - 1 if at < pending else segment.parents[at - pending]
        path.insert(0, parent if at < pending else pending - 1 if parent < 0 else pending + parent)
    return path


def test_padding_changes_no_bit() -> None:
    """As a captured step has it: rows of NaN that go to a spare slot, tiles without columns, rows without parts."""
    batch = Batch(MIXED, config_of(4, 2, 16), seed=3)
    expected, work = batch.fused(), numbers_of(batch.readers, batch.config)
    inputs, num_rows = ForwardInputs(work.positions, batch.write_slots.tolist()), len(batch.write_slots)
    shape = StepShape.of(num_rows, work, ())
    assert shape.rows > num_rows > len(work.merged) // MERGE_FIELDS
    assert shape.rows > work.num_tiles
    assert shape.parts > work.num_parts
    spare = int(batch.pool.keys[0][0, :, 0].isnan().nonzero()[0])
    numbers = torch.tensor([*shape.numbers(inputs, work, spare), *work.blocks], dtype=torch.int32)
    numbers = torch.cat([numbers, *work.distances])
    padding = (0, 0, 0, 0, 0, shape.rows - num_rows)
    parts = [F.pad(part, padding, value=float("nan")) for part in batch.parts]
    slots, on_device = numbers[shape.places["slots"]].long(), shape.work(numbers, batch.config.num_heads)
    attention = fused.FusedAttention.over(batch.config, batch.pool, slots, 4, on_device)
    assert torch.equal(attention.attend(0, *parts)[:num_rows], expected)


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("gemma2", marks=pytest.mark.repeated)])
def test_a_model_of_windows_and_caps_or_sinks(family: str, tmp_path: Path) -> None:
    """Prompts, then a tree, a chain and a single token behind them, through all layers."""
    name = next(name for name, (kind, _) in VARIANTS.items() if kind == family)
    decoder = load_decoder(variant(tmp_path, name), dtype=torch.float32)
    found = []
    for kind in (PagedAttention, fused.FusedAttention):
        model = PagedModel(decoder, 200, 4)
        model.attention = kind
        for sequence in range(3):
            model.open(sequence)
        model.forward(torch.tensor(token_ids(33)), [Segment(sequence, 11) for sequence in range(3)])
        for sequence in range(3):
            model.commit(sequence, 11)
        segments = [Segment(0, 1, TREE, 8), Segment(1, 1, (-1, 0, 1), 4), Segment(2, 1)]
        found.append(model.forward(torch.tensor(token_ids(13, seed=1)), segments).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.repeated
@pytest.mark.parametrize("seed", range(24))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    segments = [random_segment(rng, sequence) for sequence in range(rng.choice([1, 2, 5]))]
    heads, groups = rng.choice([(4, 2), (4, 4), (6, 1), (7, 1), (12, 2)])
    dtype = rng.choice(list(TOLERANCE))
    softcap = rng.choice([0.0, 2.0])
    config = config_of(
        heads, groups, rng.choice([16, 20, 64]), rng.choice([None, 64, 20, 1]), attention_softcap=softcap
    )
    close(Batch(segments, config, dtype, rng.choice([3, 4, 16]), seed), dtype, has_sinks=rng.random() < 0.5)
