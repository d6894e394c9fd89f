"""Compiled norms, gates, rotations and attention: equal to float64 up to rounding, and to the last bit whatever is
beside a row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.build import built
from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import KernelAttention, KeySlots, PagedAttention, Reader, _plan, visible_slots
from foretoken.model.interface import Segment
from foretoken.model.row_kernels import (
    ACTIVATIONS,
    FLAGS,
    SOURCE,
    RowKernels,
    Scoring,
    SegmentRows,
    kernels_for,
    load,
    row_kernels,
)
from tests.helpers.instruction_sets import INSTRUCTION_SETS

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # one rounding to the format, or a few units of float32


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> RowKernels:
    """The kernels as other processors get them; older instructions run here too."""
    flags = tuple(flag.replace("native", request.param) for flag in FLAGS)
    return load(built(SOURCE, flags))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=ROUNDING[found.dtype], atol=ROUNDING[found.dtype] * 1e-1)


@pytest.mark.parametrize("size", [1, 15, 16, 64, 100])
def test_rows_on_their_own_equal_float64(kernels: RowKernels, dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(5, 2 * size).to(dtype), torch.randn(2 * size).to(dtype)
    full = x.double()
    norm = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert close(kernels.rms_norm(x, weight, 1e-5), norm)
    steep = 30 * x
    gate, up = steep.double().chunk(2, dim=-1)
    assert close(kernels.gate(steep), F.silu(gate) * up)
    heads, cos, sin = torch.randn(5, 3, 2 * size).to(dtype), torch.randn(5, 1, 2 * size), torch.randn(5, 1, 2 * size)
    cos, sin = cos.to(dtype), sin.to(dtype)
    turned = torch.cat((-heads[..., size:], heads[..., :size]), -1).double()
    expected = heads.double() * cos.double() + turned * sin.double()
    found = kernels.rotate(heads, cos, sin).double()
    assert bool((found - expected).abs().max() <= ROUNDING[dtype] * (heads.double().abs().max() * 8))


def near(found: Tensor, expected: Tensor) -> bool:
    """The same for numbers of size 1 of which parts cancel."""
    return torch.allclose(found.double(), expected, rtol=ROUNDING[found.dtype], atol=2 * ROUNDING[found.dtype])


@pytest.mark.parametrize("size", [1, 15, 16, 64, 100])
def test_the_norms_activations_and_caps_of_other_families_equal_float64(
    kernels: RowKernels, dtype: torch.dtype, size: int
) -> None:
    x, weight, bias = torch.randn(5, 3, size).to(dtype) + 1, torch.randn(3, size).to(dtype), torch.randn(3, size)
    bias = bias.to(dtype)
    full, wide = x.double(), weight.double()
    layer = F.layer_norm(full, (size,), eps=1e-3) * wide + bias.double()  # each head with its own weights
    assert near(kernels.layer_norm(x, weight, bias, 1e-3), layer)
    one = weight[0].contiguous()
    assert near(kernels.layer_norm(x, one, None, 1e-3), F.layer_norm(full, (size,), one.double(), eps=1e-3))
    root = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert close(kernels.rms_norm(x, weight, 1e-5, offset=1.0), root * (1 + wide))
    rows = 4 * x.flatten(1)
    for activation in ("gelu", "gelu_tanh", "silu"):
        exact = rows.double()
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        exact = F.silu(exact) if activation == "silu" else F.gelu(exact, approximate=approximate)
        assert close(kernels.activate(rows, activation), exact)
        half = torch.cat((rows, rows.flip(-1)), dim=-1)
        assert close(kernels.gate(half, activation), exact * rows.flip(-1).double())
    assert near(kernels.softcap(rows, 3.0), 3.0 * torch.tanh(rows.double() / 3.0))


def test_views_are_read_as_they_lie(dtype: torch.dtype) -> None:
    kernels = row_kernels()
    assert kernels is not None
    wide = torch.randn(4, 6, 32).to(dtype)
    cos, sin, weight = torch.randn(4, 1, 32).to(dtype), torch.randn(4, 1, 32).to(dtype), torch.randn(32).to(dtype)
    for view in (wide[:, 1:4], wide.transpose(0, 1)[:4], wide[..., :32][::2].repeat(2, 1, 1)):
        turn = cos[: len(view)], sin[: len(view)]
        assert torch.equal(kernels.rotate(view, *turn), kernels.rotate(view.contiguous(), *turn))
        assert torch.equal(kernels.rms_norm(view, weight, 1e-6), kernels.rms_norm(view.contiguous(), weight, 1e-6))
    assert torch.equal(kernels.gate(wide.flatten(1).t()), kernels.gate(wide.flatten(1).t().contiguous()))


def test_numbers_that_are_none_stay_in_their_row(dtype: torch.dtype) -> None:
    kernels = row_kernels()
    assert kernels is not None
    x = torch.randn(3, 64).to(dtype)
    expected, weight = x.clone(), torch.ones(64, dtype=dtype)
    x[1, 3], x[1, 40] = math.nan, math.inf
    functions = (
        lambda rows: kernels.rms_norm(rows, weight, 1e-6),
        lambda rows: kernels.layer_norm(rows, weight, weight, 1e-6),
        *(functools.partial(kernels.gate, activation=name) for name in ACTIVATIONS),
        lambda rows: kernels.softcap(rows, 30.0),
    )
    for function in functions:
        found, clean = function(x), function(expected)
        assert bool(found[1].isnan().any())
        assert torch.equal(found[[0, 2]], clean[[0, 2]])
    large = torch.tensor([-1e30, -100.0, 100.0, 1e30, math.inf]).to(dtype)
    for activation in ACTIVATIONS:
        assert torch.equal(kernels.activate(large[None], activation), large.clamp(min=0)[None])
    assert torch.equal(kernels.softcap(large[None], 8.0), large.clamp(-8, 8)[None])


def test_only_answers_on_a_cpu_in_two_formats_have_kernels() -> None:
    x = torch.randn(2, 16)
    assert kernels_for(x) is None  # a graph may be wanted
    with torch.inference_mode():
        assert kernels_for(x) is row_kernels()
        assert kernels_for(x.bfloat16()) is row_kernels()
        assert kernels_for(x.double()) is None
        assert kernels_for(x.half()) is None
        assert kernels_for(x.to("meta")) is None


# ---- attention

TREE = (-1, 0, -1, 2, 2, 0)


def small_cache(
    heads: int, groups: int, head_dim: int, dtype: torch.dtype, num_slots: int, window: int | None = None
) -> tuple[ModelConfig, KVPool]:
    """One layer's cache, filled at random."""
    config = ModelConfig("llama", 8, 8, 8, 1, heads, groups, head_dim, 512, sliding_window=(window,))
    pool = KVPool(1, groups, num_slots, head_dim, dtype, torch.device("cpu"))
    for own in (*pool.keys, *pool.values):
        own.normal_()
    return config, pool


def segments_of(num_past: int) -> list[tuple[int, Segment]]:
    """(committed tokens, segment): a chain, a tree, one row, a tree whose first nodes are held from an earlier pass."""
    return [
        (num_past, Segment(0, 3)),
        (5, Segment(1, 2, TREE)),
        (0, Segment(2, 1)),
        (num_past // 2, Segment(3, 0, TREE, num_held=3)),
    ]


def readers_of(some: Sequence[tuple[int, Segment]], block_size: int, scattered: bool) -> list[Reader]:
    """Each in blocks of its own, which follow one another or not."""
    readers, first_row, next_block = [], 0, 0
    for past, segment in some:
        stop = past + segment.num_held + segment.num_rows
        count = -(-stop // block_size)
        blocks = [*range(next_block, next_block + count)]
        if scattered:
            blocks.reverse()
        next_block += count
        slots = KeySlots(tuple(blocks), block_size, stop, torch.device("cpu"))
        readers.append(Reader(slice(first_row, first_row + segment.num_rows), slots, past, segment))
        first_row += segment.num_rows
    return readers


def all_slots(reader: Reader) -> Tensor:
    slots = reader.slots.index
    return torch.arange(slots.start, slots.stop) if isinstance(slots, range) else slots


def write_slots(readers: Sequence[Reader]) -> Tensor:
    return torch.cat([all_slots(reader)[-reader.segment.num_rows :] for reader in readers])


def expected_read(attention: PagedAttention, reader: Reader, query: Tensor, sinks: Tensor | None = None) -> Tensor:
    """In float64, from the keys and values as they are stored."""
    config = attention.config
    keys, values = (own.double() for own in attention.pool.read(0, reader.slots.index))
    shared_by = query.shape[1] // len(keys)
    keys, values = keys.repeat_interleave(shared_by, 0), values.repeat_interleave(shared_by, 0)  # [H, C, K]
    scores = query.double().transpose(0, 1) @ keys.transpose(1, 2) * (config.attention_scale or query.shape[2] ** -0.5)
    if config.attention_softcap:
        scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
    seen = visible_slots(reader.segment, reader.past, config.window(0))
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(seen), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : seen.shape[1]]
    return (weights @ values).transpose(0, 1)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(4, 2, 16), (3, 3, 32), (8, 1, 64), (2, 2, 96)])
def test_attention_equals_float64(
    kernels: RowKernels,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    head_dim: int,
    scattered: bool,
) -> None:
    monkeypatch.setattr("foretoken.model.attention.paged.kernels_for", lambda _: kernels)
    readers = readers_of(segments_of(37), 8, scattered)
    config, pool = small_cache(heads, groups, head_dim, dtype, num_slots=200)
    attention = PagedAttention(config, pool, write_slots(readers), readers)
    query, key, value = (torch.randn(readers[-1].rows.stop, n, head_dim).to(dtype) for n in (heads, groups, groups))
    found = attention.attend(0, query, key, value)
    assert torch.equal(pool.read(0, attention.write_slots)[0], key.transpose(0, 1))
    assert torch.equal(pool.read(0, attention.write_slots)[1], value.transpose(0, 1))
    for reader in readers:
        expected = expected_read(attention, reader, query[reader.rows])
        assert torch.allclose(found[reader.rows].double(), expected, rtol=ROUNDING[dtype], atol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(4, 2, 16), (9, 3, 64), (6, 1, 20), (2, 2, 96)])
def test_a_cache_in_float16_is_read_as_one_in_float32_that_holds_the_same_numbers(
    kernels: RowKernels, monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, head_dim: int, scattered: bool
) -> None:
    """To the last bit: chains and trees, new rows' own keys and values rounded too."""
    monkeypatch.setattr("foretoken.model.attention.paged.kernels_for", lambda _: kernels)
    readers = readers_of(segments_of(137), 8, scattered)
    config, narrow = small_cache(heads, groups, head_dim, torch.float16, num_slots=400)
    wide = KVPool(1, groups, 400, head_dim, torch.float32, torch.device("cpu"))
    for own, other in zip((*narrow.keys, *narrow.values), (*wide.keys, *wide.values), strict=True):
        other.copy_(own)
    query, key, value = (torch.randn(readers[-1].rows.stop, n, head_dim) for n in (heads, groups, groups))
    slots = write_slots(readers)
    found = PagedAttention(config, narrow, slots, readers).attend(0, query, key, value)
    rounded = key.half().float(), value.half().float()
    expected = PagedAttention(config, wide, slots, readers).attend(0, query, *rounded)
    assert torch.equal(found, expected)
    assert torch.equal(narrow.keys[0].float(), wide.keys[0])
    assert torch.equal(narrow.values[0].float(), wide.values[0])


def test_float16_rounds_as_torch_does(kernels: RowKernels) -> None:
    """Ties to even, subnormal numbers, what is too large, no number."""
    exact = torch.arange(0, 1 << 16, 7).to(torch.uint16).view(torch.float16).float()
    between = (exact[:-1] + exact[1:]) / 2
    odd = torch.tensor([0.0, -0.0, 65519.9, 65520.0, -1e9, 2.0**-25, 3 * 2.0**-26, 2.0**-14, math.inf, math.nan])
    numbers = torch.cat((exact, between, odd, torch.randn(999) * 1e-6))
    numbers = F.pad(numbers, (0, -len(numbers) % 20)).view(-1, 1, 20)
    cache = [torch.zeros(1, len(numbers), 20, dtype=torch.float16) for _ in range(2)]
    slots, out = torch.arange(len(numbers)), torch.empty(len(numbers), 1, 20)
    segment = SegmentRows(first_slot=0, num_columns=1, num_rows=1)
    kernels.attend((cache[0], cache[1]), slots, (numbers, numbers, numbers), [segment], Scoring(1.0), out)
    for own in cache:
        assert torch.equal(own[0].nan_to_num(7.0), numbers[:, 0].half().nan_to_num(7.0))
        assert torch.equal(own[0].isnan(), numbers[:, 0].isnan())


def test_scores_that_differ_by_hundreds() -> None:
    """The largest decides; nothing overflows on the way."""
    config, pool = small_cache(2, 1, 32, torch.float32, num_slots=64)
    readers = readers_of([(40, Segment(0, 1, TREE))], 8, scattered=False)
    attention = PagedAttention(config, pool, write_slots(readers), readers)
    rows = [torch.randn(7, n, 32) * scale for n, scale in ((2, 200), (1, 1), (1, 1))]
    with torch.inference_mode():
        found = attention.attend(0, *rows)
    assert torch.allclose(found.double(), expected_read(attention, readers[0], rows[0]), atol=1e-3)


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_head_size_was_compiled(kept: torch.dtype) -> None:
    """In each format of the cache, by one head of a group and by more than are read together."""
    rows_in = torch.bfloat16 if kept == torch.bfloat16 else torch.float32
    for head_dim, heads in itertools.product((1, 8, 15, 16, 20, 32, 64, 80, 96, 112, 120, 128, 160, 256), (1, 7)):
        config, pool = small_cache(heads, 1, head_dim, kept, num_slots=96)
        readers = readers_of([(77, Segment(0, 2))], 8, scattered=True)
        attention = PagedAttention(config, pool, write_slots(readers), readers)
        rows = [torch.randn(2, n, head_dim).to(rows_in) for n in (heads, 1, 1)]
        with torch.inference_mode():
            found = attention.attend(0, *rows)
        expected = expected_read(attention, readers[0], rows[0])
        assert torch.allclose(found.double(), expected, rtol=ROUNDING[rows_in], atol=max(1e-5, 2 * ROUNDING[rows_in]))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_node_of_a_tree_gets_the_bits_of_a_chain_in_any_batch(dtype: torch.dtype) -> None:
    """Every row of the batch above, computed alone behind its own text."""
    heads, groups, head_dim = 6, 2, 64
    readers = readers_of(segments_of(300), 8, scattered=True)
    config, pool = small_cache(heads, groups, head_dim, dtype, num_slots=700)
    query, key, value = (torch.randn(readers[-1].rows.stop, n, head_dim).to(dtype) for n in (heads, groups, groups))
    attention = PagedAttention(config, pool, write_slots(readers), readers)
    with torch.inference_mode():
        found = attention.attend(0, query, key, value)
        for reader in readers:
            slots = all_slots(reader)
            seen = visible_slots(reader.segment, reader.past, None)
            for place, row in enumerate(range(reader.rows.start, reader.rows.stop)):
                text = slots[seen[place]]
                alone_config, alone_pool = small_cache(heads, groups, head_dim, dtype, num_slots=320)
                alone_pool.keys[0][:, : len(text)], alone_pool.values[0][:, : len(text)] = pool.read(0, text)
                torch.set_num_threads(1 + row % 2)
                alone = readers_of([(len(text) - 1, Segment(0, 1))], 320, scattered=False)
                attention = PagedAttention(alone_config, alone_pool, write_slots(alone), alone)
                own = slice(row, row + 1)
                assert torch.equal(attention.attend(0, query[own], key[own], value[own]), found[own]), row


OPTIONS = {
    "window": {"sliding_window": (70,)},
    "short window": {"sliding_window": (1,)},
    "scale": {"attention_scale": 0.3},
    "soft cap": {"attention_softcap": 2.0},
    "sinks": {},
    "all": {"sliding_window": (130,), "attention_scale": 0.5, "attention_softcap": 5.0},
}


def text_of(num_tokens: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 6 heads in 2 groups of 32 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num_tokens, n, 32, generator=generator).to(dtype) for n in (6, 2, 2))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_equal_float64_in_any_pieces(kernels: RowKernels, dtype: torch.dtype, option: str) -> None:
    """Windows, scale, soft cap, sinks: a prompt in one pass, in pieces, row by row, and as lines of a tree."""
    length, block = 640, 32  # crosses the blocks of the softmax, and a split
    config = ModelConfig("llama", 8, 8, 8, 1, 6, 2, 32, 1024, **({"sliding_window": (None,)} | OPTIONS[option]))
    sinks = torch.randn(6) if option in ("sinks", "all") else None
    rows = text_of(length, 1, dtype)

    def read(pieces: Sequence[int], tree: tuple[int, ...] = ()) -> tuple[Tensor, KernelAttention]:
        """The text in `pieces`, one behind the other; the last piece is `tree` behind a pending row."""
        pool = KVPool(1, 2, 704, 32, dtype, torch.device("cpu"))
        for own in (*pool.keys, *pool.values):
            own.fill_(math.nan)  # of others, or not written yet
        found, past = [], 0
        for size in pieces:
            stop, is_last = past + size, past + size == sum(pieces)
            segment = Segment(0, 1, tree) if tree and is_last else Segment(0, size)
            slots = KeySlots(tuple(reversed(range(-(-stop // block)))), block, stop, torch.device("cpu"))
            reader = Reader(slice(0, size), slots, past, segment)
            attention = KernelAttention(config, pool, all_slots(reader)[past:], [reader])
            attention._kept_plan = _plan([reader], 10**9, kernels)
            # Blocks lie in descending order, so that a longer text moves: write all of the past anew.
            pool.write(0, all_slots(reader)[:past], rows[1][:past], rows[2][:past])
            found.append(attention.attend(0, *(part[past:stop] for part in rows), sinks))
            past = stop
        return torch.cat(found), attention

    whole, attention = read([length])
    expected = expected_read(attention, attention.readers[0], rows[0], sinks)
    assert torch.allclose(whole.double(), expected, rtol=ROUNDING[dtype], atol=2 * ROUNDING[dtype])
    for pieces in ([1] * 4 + [7, 33, 32, 64, 140, 360], [500, *[1] * 20, 120], [513, 127]):
        assert torch.equal(read(pieces)[0], whole)
    # A tree whose lines are the text's last rows, each twice; a row's twin stands in another branch.
    first = length - 4
    twice = [first, *(row for row in range(first + 1, length) for _ in range(2))]
    rows = tuple(torch.cat((part[:first], part[twice])) for part in rows)
    branches, _ = read([first, len(twice)], (-1, -1, 0, 1, 2, 3))
    assert torch.equal(branches[first:], whole[twice])


def test_many_rows_go_through_torch_where_rows_are_not_exact() -> None:
    """They stand beside those of a short segment in one forward."""
    some = [(40, Segment(0, 2)), (0, Segment(1, 50)), (3, Segment(2, 1))]
    readers = readers_of(some, 8, scattered=True)
    config, pool = small_cache(4, 2, 16, torch.float32, num_slots=200, window=16)
    query, key, value = (torch.randn(53, n, 16) for n in (4, 2, 2))
    with torch.inference_mode():
        attention = PagedAttention(config, pool, write_slots(readers), readers)
        assert attention.kernel_segments(query) is None
        found = attention.attend(0, query, key, value)
    plain = PagedAttention(config, pool, write_slots(readers), readers).attend(0, query, key, value)
    assert torch.allclose(found, plain, atol=1e-5)
    assert torch.equal(found[2:52], plain[2:52])
    assert not torch.equal(found[:2], plain[:2])


def test_rows_that_see_what_is_behind_them(dtype: torch.dtype) -> None:
    """The slots of a block drafter that is not causal: as torch reads them."""
    reader = readers_of([(70, Segment(0, 5))], 8, scattered=True)[0]
    reader.sees_all = True
    config, pool = small_cache(4, 2, 16, dtype, num_slots=80)
    rows = [torch.randn(5, n, 16).to(dtype) for n in (4, 2, 2)]
    with torch.inference_mode():
        attention = PagedAttention(config, pool, write_slots([reader]), [reader])
        assert attention.kernel_segments(rows[0])
        found = attention.attend(0, *rows)
    expected = PagedAttention(config, pool, write_slots([reader]), [reader]).attend(0, *rows)
    assert torch.allclose(found.float(), expected.float(), rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])
