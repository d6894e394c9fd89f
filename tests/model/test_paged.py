"""The decoder over a block-table cache gives transformers' logits, however the rows reach it."""

from __future__ import annotations

import functools
import itertools
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.errors import CapacityError, InputError
from foretoken.kv.blocks import slots_of
from foretoken.model.attention.paged import (
    KeySlots,
    PagedAttention,
    Reader,
    additive_mask,
    row_positions,
    visible_slots,
)
from foretoken.model.interface import ForwardOutput, Segment
from tests.helpers.checkpoints import USUAL, VARIANTS, token_ids, variant
from tests.helpers.paged_family import BLOCK, LEAF_PATHS, TREE, Family, extend, is_scattered, path_of, run, scatter
from tests.helpers.usual import some_of


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Family]:
    @functools.cache
    def folder(name: str) -> Path:
        return variant(tmp_path_factory.mktemp(name), name)

    return functools.cache(lambda name, dtype: Family(folder(name), dtype))  # type: ignore[return-value]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


SOME = ("llama", "mistral-sliding", "qwen2-layer-types")


@pytest.fixture(
    params=[
        *((name, torch.float64) for name in USUAL),
        *(pytest.param((name, torch.float64), marks=pytest.mark.repeated) for name in VARIANTS if name not in USUAL),
        *((name, torch.float32) for name in SOME),
    ],
    ids=lambda one: f"{one[0]}-{one[1]}".replace("torch.", ""),
)
def family(request: pytest.FixtureRequest, families: functools.partial[Family]) -> Family:
    """All in float64, where the tolerance is tight; every one in float32 is in test_families.py."""
    return families(*request.param)


@pytest.fixture(params=SOME)
def some(request: pytest.FixtureRequest, families: functools.partial[Family], dtype: torch.dtype) -> Family:
    """Without, with, and with mixed sliding windows: for what does not depend on the family otherwise."""
    return families(request.param, dtype)


def test_prefill_in_one_go(family: Family) -> None:
    model, ids = family.model(), token_ids(40)
    model.open(0)
    expected = family.oracle(ids)
    assert expected.std() > 0.3  # the test means something
    family.check(extend(model, 0, ids), expected)


def test_prefill_in_chunks_then_single_tokens_then_several(family: Family) -> None:
    model, ids = family.model(), token_ids(40)
    model.open(0)
    pieces = [ids[:13], ids[13:14], ids[14:27], *([token] for token in ids[27:33]), ids[33:37], ids[37:40]]
    got = torch.cat([extend(model, 0, piece) for piece in pieces])
    family.check(got, family.oracle(ids))
    assert model.length(0) == 40


def test_a_ragged_batch_over_scattered_blocks(family: Family) -> None:
    """A chunk, a single token, a first prefill and a tree in one forward; every sequence reads through a gather."""
    model, texts = family.model(), [token_ids(n, seed=n) for n in (30, 21, 9, 20)]
    scatter(model, 30)
    for sequence, held in enumerate((17, 20, 0, 13)):
        model.open(sequence)
        if held:
            extend(model, sequence, texts[sequence][:held])
    got = run(
        model, (0, texts[0][17:], ()), (1, texts[1][20:], ()), (2, texts[2], ()), (3, texts[3][13:14], texts[3][14:20])
    )
    assert all(is_scattered(model, sequence) for sequence in (0, 1, 3))
    family.check(got[:13], family.oracle(texts[0])[17:])
    family.check(got[13:14], family.oracle(texts[1])[20:])
    family.check(got[14:23], family.oracle(texts[2]))
    for node in range(6):
        text = [*texts[3][:14], *(texts[3][14 + i] for i in path_of(node))]
        family.check(got[24 + node], family.oracle(text)[-1])


@pytest.mark.parametrize("scattered", [False, True], ids=["one-piece", "scattered"])
def test_tree_then_commit_a_path_then_continue(family: Family, scattered: bool) -> None:
    """Each path against its own sequence; the prefix and the tree are longer than every window."""
    prefix, nodes, after = token_ids(11), token_ids(len(TREE), seed=2), token_ids(3, seed=3)
    for path in LEAF_PATHS:
        model = family.model()
        if scattered:
            scatter(model)
        model.open(0)
        extend(model, 0, prefix[:9])
        got = run(model, (0, prefix[9:], nodes))  # two pending rows before the tree
        text = [*prefix, *(nodes[i] for i in path)]
        rows = [0, 1, *(2 + i for i in path)]
        family.check(got[rows], family.oracle(text)[9:])
        model.commit(0, 2, path)
        assert model.length(0) == len(text)
        family.check(extend(model, 0, after), family.oracle([*text, *after])[-3:])
        assert is_scattered(model, 0) == scattered


@pytest.mark.parametrize(
    ("levels", "scattered"),
    some_of(
        itertools.product(((3, 7), (1, 3, 6, 7), (2, 3, 4, 5, 6, 7)), (False, True)),
        {((3, 7), False), ((2, 3, 4, 5, 6, 7), True)},
    ),
)
def test_a_tree_that_grows_level_by_level(family: Family, levels: tuple[int, ...], scattered: bool) -> None:
    """Nodes behind nodes that earlier forwards ran, beside a neighbour; any path can then be kept."""
    prefix, nodes, after, other = (
        token_ids(11),
        token_ids(len(TREE), seed=2),
        token_ids(3, seed=3),
        token_ids(9, seed=4),
    )
    for path in LEAF_PATHS:
        model = family.model()
        if scattered:
            scatter(model)
        model.open(0)
        model.open(1)
        extend(model, 0, prefix)
        for held, stop in pairwise((0, *levels)):
            segments = [Segment(1, 1), Segment(0, 0, TREE[:stop], stop - held, held)]
            got = model.forward(torch.tensor([other[model.length(1)], *nodes[held:stop]]), segments).logits
            model.commit(1, 1)
            for row, node in enumerate(range(held, stop), start=1):
                family.check(got[row], family.oracle([*prefix, *(nodes[i] for i in path_of(node))])[-1])
        model.commit(0, 0, path)
        text = [*prefix, *(nodes[i] for i in path)]
        family.check(extend(model, 0, after), family.oracle([*text, *after])[-3:])
        assert is_scattered(model, 0) == scattered


@pytest.mark.parametrize("num_kept", range(5))
def test_chain_of_draft_tokens_partly_kept(some: Family, num_kept: int) -> None:
    """The shape of every speculative round: anchor, four draft tokens, a prefix of them kept, the next anchor."""
    model, prefix, drafted, after = some.model(), token_ids(10), token_ids(4, seed=2), token_ids(5, seed=3)
    model.open(0)
    extend(model, 0, prefix[:-1])
    chain = Segment(0, 1, (-1, 0, 1, 2), 5)
    got = model.forward(torch.tensor([prefix[-1], *drafted]), [chain]).logits
    some.check(got, some.oracle([*prefix, *drafted])[9:])
    model.commit(0, 1, range(num_kept))
    text = [*prefix, *drafted[:num_kept], *after]
    got = model.forward(torch.tensor(after), [Segment(0, 1, (-1, 0, 1, 2), 5)]).logits
    some.check(got, some.oracle(text)[-5:])


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_what_is_not_committed_is_never_read(some: Family, poison: float) -> None:
    """After every round all slots that are not committed are poisoned, and not one bit of a logit changes."""

    def answers(poisoned: bool) -> list[Tensor]:
        model, rows = some.model(), []
        model.open(0)
        model.open(1)
        extend(model, 0, token_ids(9))
        extend(model, 1, token_ids(6, seed=7))
        for turn, path in enumerate(((0, 2, 4), (), (0, 1, 5), (0, 1, 3, 6))):
            if poisoned:
                keep = {slot for s in (0, 1) for slot in slots_of(model.tables[s], 0, model.length(s), BLOCK)}
                gone = [slot for slot in range(model.capacity_tokens) if slot not in keep]
                for tensor in (*model.pool.keys, *model.pool.values):
                    tensor[:, gone] = poison
            nodes = token_ids(len(TREE), seed=10 + turn)
            rows.append(run(model, (0, [turn], nodes), (1, [turn, turn + 1], nodes[:3])))
            model.commit(0, 1, path)
            model.commit(1, 2, path[:2])
        return rows

    for clean, dirty in zip(answers(False), answers(True), strict=True):
        assert bool(torch.isfinite(dirty).all())
        assert torch.equal(clean, dirty)


def test_rollback_then_continue(some: Family) -> None:
    model, ids, other = some.model(), token_ids(22), token_ids(9, seed=5)
    model.open(0)
    extend(model, 0, ids)
    for length in (17, 16, 3):  # inside a block, at its edge, far back
        model.rollback(0, length)
        assert model.length(0) == length
        some.check(extend(model, 0, other), some.oracle([*ids[:length], *other])[length:])
        model.rollback(0, length)
        some.check(extend(model, 0, ids[length:]), some.oracle(ids)[length:])
    model.rollback(0, 0)
    assert model.num_free_tokens() == model.capacity_tokens


@pytest.mark.parametrize("length", [14, 16])  # inside a block: copy on write; at its edge: nothing to copy
def test_fork_then_diverge(some: Family, length: int) -> None:
    model, ids, mine, theirs = some.model(), token_ids(length), token_ids(6, seed=5), token_ids(6, seed=6)
    model.open(0)
    extend(model, 0, ids)
    model.fork(0, 1)
    assert model.allocator.num_used == -(-length // BLOCK)  # shared, not copied
    got = run(model, (0, mine, ()), (1, theirs, ()))  # both write in the same forward
    some.check(got[:6], some.oracle([*ids, *mine])[length:])
    some.check(got[6:], some.oracle([*ids, *theirs])[length:])
    model.commit(0, 6)
    model.commit(1, 6)
    model.close(0)
    some.check(extend(model, 1, mine), some.oracle([*ids, *theirs, *mine])[-6:])
    model.close(1)
    assert model.num_free_tokens() == model.capacity_tokens


def test_taps_are_transformers_hidden_states(families: functools.partial[Family]) -> None:
    from transformers import AutoModelForCausalLM

    family, ids = families("qwen2-layer-types", torch.float32), token_ids(25)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(family.folder)(
            torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
    model = family.model()
    model.open(0)
    model.open(1)
    extend(model, 0, ids[:20])
    layers = tuple(range(model.num_layers + 1))
    # Taps of two rows of the first sequence and one of the second; logits of other rows.
    out: ForwardOutput = model.forward(
        torch.tensor([*ids[20:], *ids[:3]]),
        [Segment(0, 5, (), num_logits=0, num_taps=2), Segment(1, 3, (), num_logits=3, num_taps=1)],
        layers,
    )
    assert len(out.logits) == 3
    assert sorted(out.taps) == list(layers)
    for layer in layers:
        tap = (
            family.decoder.norm(out.taps[layer]) if layer == model.num_layers else out.taps[layer]
        )  # theirs ends with the norm
        torch.testing.assert_close(tap, torch.stack([expected[layer][0][i] for i in (23, 24, 2)]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_first_layers_alone(families: functools.partial[Family], num_layers: int) -> None:
    from transformers import AutoModelForCausalLM

    family, ids = families("qwen2-layer-types", torch.float32), token_ids(20)
    pool = family.model().pool
    slots = KeySlots(tuple(range(5)), BLOCK, 20, torch.device("cpu"))
    attention = PagedAttention(
        family.decoder.config, pool, torch.arange(20), [Reader(slice(0, 20), slots, 0, Segment(0, 20))]
    )
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(family.folder)(
            torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
        hidden = family.decoder(torch.tensor(ids), torch.arange(20), attention, num_layers=num_layers)
    torch.testing.assert_close(hidden.last, expected[num_layers][0], atol=1e-4, rtol=0)
    assert not pool.keys[num_layers].any()  # later layers did not run


def test_no_tap_is_computed_unless_a_row_wants_it(families: functools.partial[Family]) -> None:
    """Layers without rows, and rows without layers: the decoder is asked for nothing."""
    family, ids = families("llama", torch.float32), token_ids(12)
    model, asked = family.model(), []
    run_layers = model.decoder.run
    model.decoder.run = lambda *given: asked.append(given[4] if len(given) > 4 else ()) or run_layers(*given)  # type: ignore[method-assign]
    try:
        model.open(0)
        assert model.forward(torch.tensor(ids[:4]), [Segment(0, 4)], (1, 2)).taps == {}
        model.commit(0, 4)
        assert model.forward(torch.tensor(ids[4:]), [Segment(0, 8, num_taps=8)]).taps == {}
    finally:
        del model.decoder.run
    assert asked == [(), ()]


def test_num_logits_counts_rows_from_the_end(families: functools.partial[Family]) -> None:
    family, ids = families("llama", torch.float32), token_ids(12)
    model = family.model()
    model.open(0)
    model.open(1)
    got = model.forward(torch.tensor([*ids, *ids]), [Segment(0, 12, (), 0), Segment(1, 12, (), 3)]).logits
    family.check(got, family.oracle(ids)[-3:])
    none = model.forward(torch.tensor(ids), [Segment(0, 12, (), 0)]).logits
    assert none.shape == (0, model.vocab_size)


def test_masks_and_positions_by_the_definition() -> None:
    """Position = past + pending + depth; a row sees the past, earlier pending rows, its ancestors, itself, inside its
    window.
    """
    past, pending = 5, 2
    segment = Segment(0, pending, TREE, 1)
    for held in range(len(TREE)):
        grown, whole = Segment(0, 0, TREE, 1, held), Segment(0, 0, TREE, 1)
        assert row_positions(grown, past) == [past + len(path_of(node)) - 1 for node in range(held, len(TREE))]
        assert all(
            torch.equal(visible_slots(grown, past, window), visible_slots(whole, past, window)[held:])
            for window in (None, 2, 6)
        )
    depth = [len(path_of(node)) - 1 for node in range(len(TREE))]
    assert row_positions(segment, past) == [5, 6, *(past + pending + d for d in depth)]
    at = [*range(past + pending), *(past + pending + d for d in depth)]
    for window in (None, 1, 2, 3, 6, 100):
        visible = visible_slots(segment, past, window)
        for row in range(segment.num_rows):
            node = row - pending
            seen = (
                set(range(past + row + 1))
                if node < 0
                else {*range(past + pending), *(past + pending + i for i in path_of(node))}
            )
            near = {slot for slot in seen if window is None or at[past + row] - at[slot] < window}
            assert {slot for slot, yes in enumerate(visible[row].tolist()) if yes} == near


def test_out_of_blocks_is_an_error_that_loses_nothing(families: functools.partial[Family]) -> None:
    family, ids = families("llama", torch.float32), token_ids(12)
    model = family.model(num_slots=16)
    model.open(0)
    extend(model, 0, ids)
    assert model.reserve(0, 4)
    assert not model.reserve(0, 5)
    model.rollback(0, 12)
    with pytest.raises(CapacityError, match="out of KV blocks: 5 rows wanted, 4 tokens free"):
        run(model, (0, ids[:5], ()))
    assert (model.length(0), model.num_free_tokens()) == (12, 4)
    family.check(extend(model, 0, ids[:4]), family.oracle([*ids, *ids[:4]])[-4:])
    assert (model.footprint_tokens(13), model.capacity_tokens) == (16, 16)


def test_a_cache_smaller_than_a_block_is_refused(families: functools.partial[Family]) -> None:
    with pytest.raises(InputError, match="num_slots=3: must be at least the block size, 4"):
        families("llama", torch.float32).model(num_slots=3)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, 1),
        Segment(0, 4),
        Segment(0, 1, (-1, 0, 1)),
        Segment(0, 0, (-1, 0, 1), 1, 2),
        Segment(0, 2, (-1, -1, 0)),
    ],
)
def test_additive_masks_say_what_is_visible(segment: Segment, window: int | None) -> None:
    """The short way to a chain's mask is the long one's result; no mask means that everything is seen."""
    past, per_group = 5, 2
    visible = visible_slots(segment, past, window).repeat(per_group, 1)
    mask = additive_mask(segment, past, window, per_group, torch.empty(0))
    if mask is None:
        assert bool(visible.all())
    else:
        assert torch.equal(mask[0, 0], torch.where(visible, 0.0, -torch.inf))
