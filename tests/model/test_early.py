"""Some layers ahead of the rest: a verify pass that takes up what ran early gives what a whole pass gives, and runs no
layer twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.errors import CapacityError
from foretoken.kv.blocks import slots_of
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.hf import TransformersModel
from foretoken.model.interface import EarlyExitModel, EarlySegment, Segment
from foretoken.model.paged import PagedModel, first_missing
from foretoken.model.strict import StrictModel
from tests.helpers.checkpoints import token_ids, variant
from tests.helpers.paged_family import BLOCK, TREE, Family, extend, is_scattered, scatter

NUM_LAYERS = 3
# In float64 one row or five may differ in the last bits of a sum; a wrong row, key or layer is off by far more.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}
CHAIN = (-1, 0, 1, 2)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Family]:
    return functools.cache(lambda name, dtype: Family(variant(tmp_path_factory.mktemp(name), name), dtype))  # type: ignore[return-value]


@pytest.fixture(params=["llama", "mistral-sliding", "qwen2-layer-types"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# float32 makes other sums, and no other choice of rows or layers.
@pytest.fixture(params=[pytest.param(torch.float32, marks=pytest.mark.repeated), torch.float64], ids=str)
def family(request: pytest.FixtureRequest, families: functools.partial[Family], name: str) -> Family:
    return families(name, request.param)


@pytest.fixture
def llama(families: functools.partial[Family]) -> Family:
    return families("llama", torch.float64)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=TOLERANCE[a.dtype], rtol=0)


def draft(model: PagedModel, sequence: int, tokens: Sequence[int], layers: Sequence[int], offset: int = 0) -> Tensor:
    """The tokens one by one through some layers; the logits after each, `[n, V]`."""
    steps = [
        model.forward_early(torch.tensor([token]), [EarlySegment(sequence, offset + i, 1)], layers)
        for i, token in enumerate(tokens)
    ]
    return torch.cat(steps)


@contextmanager
def counted(decoder: Decoder) -> Iterator[list[int]]:
    """Rows that every layer runs."""
    rows = [0] * decoder.config.num_layers

    def count(index: int, arguments: tuple[Tensor, ...]) -> None:
        rows[index] += arguments[0].shape[0]

    handles = [
        layer.register_forward_pre_hook(lambda _, arguments, index=index: count(index, arguments))
        for index, layer in enumerate(decoder.layers)
    ]
    yield rows
    for handle in handles:
        handle.remove()


def caches(model: PagedModel, sequence: int) -> list[Tensor]:
    """Keys and values `[G, C, K]` of the committed tokens, layer by layer."""
    table = model.tables[sequence]
    slots = list(slots_of(table, 0, table.length, BLOCK))
    return [tensor[:, slots] for tensor in (*model.pool.keys, *model.pool.values)]


def opened(
    family: Family, prefix: Sequence[int], sequences: Sequence[int] = (0,), scattered: bool = False
) -> PagedModel:
    model = family.model()
    if scattered:
        scatter(model, 30)
    for sequence in sequences:
        model.open(sequence)
        extend(model, sequence, prefix)
    return model


@pytest.mark.parametrize("num_kept", [0, 2, 4])
@pytest.mark.parametrize("exit_layer", range(1, NUM_LAYERS))
def test_a_round_is_a_whole_pass(family: Family, exit_layer: int, num_kept: int) -> None:
    """Logits, caches of all layers after the commit, and the next round; on scattered blocks too."""
    prefix, rows, after = token_ids(11), token_ids(5, seed=2), token_ids(3, seed=3)
    for scattered in (False, True):
        whole, model = (opened(family, prefix, scattered=scattered) for _ in range(2))
        draft(model, 0, rows[:4], range(exit_layer))
        assert model.length(0) == len(prefix)
        segment = Segment(0, 1, CHAIN, 5)
        with counted(family.decoder) as ran:
            got = model.forward(torch.tensor(rows), [segment]).logits
        assert ran == [1] * exit_layer + [5] * (NUM_LAYERS - exit_layer)  # the last draft token never ran
        same(got, whole.forward(torch.tensor(rows), [segment]).logits)
        for one in (whole, model):
            one.commit(0, 1, range(num_kept))
        assert is_scattered(model, 0) == scattered
        for a, b in zip(caches(model, 0), caches(whole, 0), strict=True):
            same(a, b)
        same(extend(model, 0, after), extend(whole, 0, after))


def test_a_draft_by_the_first_layers_is_a_shallow_model(families: functools.partial[Family], name: str) -> None:
    """The past comes from whole passes: the first layers of a text are the same in both."""
    family, text = families(name, torch.float64), token_ids(15)
    for exit_layer in range(1, NUM_LAYERS):
        model = opened(family, text[:11])
        hidden = family.decoder(
            torch.tensor(text), torch.arange(15), PackedAttention(family.decoder.config, 1, 15), num_layers=exit_layer
        ).last
        same(draft(model, 0, text[11:], range(exit_layer)), family.decoder.logits(hidden)[11:])


def test_skipped_layers_are_left_out(llama: Family) -> None:
    """A text that only ever ran without its second layer: logits of a model that has no second layer."""
    text, decoder = token_ids(9), llama.decoder
    shallow = Decoder(replace(decoder.config, num_layers=2)).double()
    own = {
        f"layers.{place}.{key}": w
        for place, layer in enumerate((0, 2))
        for key, w in decoder.layers[layer].state_dict().items()
    }
    shallow.load_state_dict({key: w for key, w in decoder.state_dict().items() if not key.startswith("layers.")} | own)
    with torch.no_grad():
        expected = shallow.logits(
            shallow(torch.tensor(text), torch.arange(9), PackedAttention(shallow.config, 1, 9)).last
        )
    model = llama.model()
    model.open(0)
    with counted(decoder) as ran:
        same(draft(model, 0, text, (0, 2)), expected)
    assert ran == [9, 0, 9]


@pytest.mark.parametrize(("layers", "depth"), [((0, 2), 1), ((1, 2), 0), ((2,), 0), ((0, 1), 2)])
def test_only_the_leading_layers_count(family: Family, layers: tuple[int, ...], depth: int) -> None:
    """What runs behind a gap is no part of the model: the verify pass writes it anew."""
    assert first_missing(layers) == depth
    prefix, rows = token_ids(11), token_ids(5, seed=2)
    whole, model = (opened(family, prefix) for _ in range(2))
    draft(model, 0, rows[:4], layers)
    with counted(family.decoder) as ran:
        got = model.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits
    assert ran == [1] * depth + [5] * (NUM_LAYERS - depth)
    same(got, whole.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits)
    for one in (whole, model):
        one.commit(0, 1, range(4))
    for a, b in zip(caches(model, 0), caches(whole, 0), strict=True):
        same(a, b)


@pytest.mark.parametrize("changed", range(5))
def test_other_tokens_are_not_taken_up(family: Family, changed: int) -> None:
    """Only the rows before the first token that differs, a grammar's draft token perhaps; all of them if it is the
    anchor's.
    """
    prefix, rows = token_ids(11), token_ids(5, seed=2)
    whole, model = (opened(family, prefix) for _ in range(2))
    draft(model, 0, rows[:4], range(2))
    rows[changed] = (rows[changed] + 1) % 97
    with counted(family.decoder) as ran:
        got = model.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits
    assert ran == [5 - min(changed, 4)] * 2 + [5]
    same(got, whole.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits)


def test_a_tree_and_a_shorter_draft(llama: Family) -> None:
    """A tree begins anew; of a draft that ended early every row has run."""
    prefix, rows = token_ids(11), token_ids(8, seed=2)
    whole, model = (opened(llama, prefix) for _ in range(2))
    draft(model, 0, rows[:3], range(2))
    same(*(one.forward(torch.tensor(rows), [Segment(0, 1, TREE, 8)]).logits for one in (model, whole)))
    draft(model, 0, rows[:3], range(2))
    with counted(llama.decoder) as ran:
        got = model.forward(torch.tensor(rows[:3]), [Segment(0, 1, (-1, 0), 3)]).logits
    assert ran == [0, 0, 3]
    same(got, whole.forward(torch.tensor(rows[:3]), [Segment(0, 1, (-1, 0), 3)]).logits)


@pytest.mark.parametrize("scattered", [False, True], ids=["one-piece", "scattered"])
def test_a_mixed_batch(family: Family, scattered: bool) -> None:
    """Exits at both layers, a plain row, a tree, a chunk of a prompt and drafts of other drafters in one pass."""
    prefix = token_ids(11)
    early = {0: range(1), 1: range(2), 4: range(1), 5: range(2)}
    parents = {0: CHAIN, 1: CHAIN[:2], 2: (), 3: TREE, 4: CHAIN[:3], 5: CHAIN}
    whole, model = (opened(family, prefix, range(6), scattered) for _ in range(2))
    rows = {s: token_ids(1 + len(parents[s]), seed=20 + s) for s in parents}
    for step in range(4):
        for layers in (range(1), range(2)):
            running = [s for s in early if early[s] == layers and step < len(rows[s]) - 1]
            if running:
                model.forward_early(
                    torch.tensor([rows[s][step] for s in running]), [EarlySegment(s, step, 1) for s in running], layers
                )
    rows[4][1] = 5  # a draft token of another drafter
    for one in (whole, model):
        one.open(6)
    segments = [*(Segment(s, 1, parents[s], len(rows[s])) for s in rows), Segment(6, 9, (), 1)]
    flat = torch.tensor([*(token for s in rows for token in rows[s]), *token_ids(9, seed=3)])
    with counted(family.decoder) as ran:
        got = model.forward(flat, segments).logits
    assert ran == [len(flat) - 4 - 2 - 1 - 4, len(flat) - 2 - 4, len(flat)]
    same(got, whole.forward(flat, segments).logits)
    for one in (whole, model):
        for sequence, path in ((0, (0, 1, 2, 3)), (1, ()), (2, ()), (3, (0, 2, 4)), (4, (0, 1)), (5, (0, 1))):
            one.commit(sequence, 1, path)
        one.commit(6, 9)
    for sequence in range(7):
        for a, b in zip(caches(model, sequence), caches(whole, sequence), strict=True):
            same(a, b)


@pytest.mark.parametrize(("tap", "runs_again"), [(0, True), (1, True), (2, False), (3, False)])
def test_taps_are_whole(llama: Family, tap: int, runs_again: bool) -> None:
    """A tap before the exit makes the early layers run again: they did not keep it."""
    prefix, rows = token_ids(11), token_ids(5, seed=2)
    whole, model = (opened(llama, prefix) for _ in range(2))
    draft(model, 0, rows[:4], range(2))
    with counted(llama.decoder) as ran:
        got = model.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5, num_taps=5)], (tap,))
    assert ran == ([5, 5, 5] if runs_again else [1, 1, 5])
    expected = whole.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5, num_taps=5)], (tap,))
    same(got.taps[tap], expected.taps[tap])
    same(got.logits, expected.logits)


def test_what_ran_early_is_forgotten(llama: Family) -> None:
    """By a forward, a commit, a rollback, a close; and a chain may begin anew or go on from any of its rows."""
    prefix, rows = token_ids(11), token_ids(5, seed=2)
    forgets = {
        "forward": lambda model: model.forward(torch.tensor(rows[:1]), [Segment(0, 1)]),
        "commit": lambda model: model.commit(0, 0),
        "rollback": lambda model: model.rollback(0, 11),
        "close": lambda model: (model.close(0), model.open(0), extend(model, 0, prefix)),
    }
    for forget in forgets.values():
        model = opened(llama, prefix)
        draft(model, 0, rows[:4], range(2))
        forget(model)
        with counted(llama.decoder) as ran:
            model.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)])
        assert ran == [5, 5, 5]
    model, whole = (opened(llama, prefix) for _ in range(2))
    draft(model, 0, token_ids(4, seed=9), range(1))
    draft(model, 0, [*rows[:2], 7], range(2))  # anew, with other layers
    draft(model, 0, rows[2:4], range(2), offset=2)  # the last row is taken back
    with counted(llama.decoder) as ran:
        got = model.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits
    assert ran == [1, 1, 5]
    same(got, whole.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits)


def test_a_fork_in_between_changes_nothing(llama: Family) -> None:
    """The child writes into a copy; what ran early for the parent stays where it was."""
    prefix, rows = token_ids(11), token_ids(5, seed=2)
    whole, model = (opened(llama, prefix) for _ in range(2))
    draft(model, 0, rows[:4], range(2))
    model.fork(0, 1)
    model.rollback(1, 6)
    draft(model, 1, token_ids(5, seed=4), (0, 2))
    model.close(1)
    same(*(one.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits for one in (model, whole)))
    for one in (model, whole):
        one.commit(0, 1, range(4))
    for a, b in zip(caches(model, 0), caches(whole, 0), strict=True):
        same(a, b)


def test_without_room_nothing_is_lost(llama: Family) -> None:
    model = llama.model(num_slots=12)
    model.open(0)
    extend(model, 0, token_ids(11))
    draft(model, 0, [1], range(2))
    with pytest.raises(CapacityError):
        draft(model, 0, [2], range(2), offset=1)
    assert model.length(0) == 11
    model.check()


def test_strict_numerics_run_everything_again(tmp_path: Path, families: functools.partial[Family]) -> None:
    """Its answer does not depend on a draft, to the last bit."""
    decoder = families("llama", torch.float32).decoder
    prefix, rows = token_ids(11), token_ids(5, seed=2)
    answers = []
    for drafts in (False, True):
        model = StrictModel(decoder, 64, BLOCK)
        model.open(0)
        extend(model, 0, prefix)
        if drafts:
            draft(model, 0, rows[:4], range(2))
        answers.append(model.forward(torch.tensor(rows), [Segment(0, 1, CHAIN, 5)]).logits)
        model.commit(0, 1, range(4))
        answers += caches(model, 0)
    half = len(answers) // 2
    assert all(torch.equal(a, b) for a, b in zip(answers[:half], answers[half:], strict=True))


def test_which_models_can(llama: Family) -> None:
    assert isinstance(llama.model(), EarlyExitModel)
    assert not hasattr(TransformersModel, "forward_early")
    config = llama.decoder.config
    assert llama.model().head_cost() == pytest.approx(
        97 * 48 / sum(w.numel() for w in llama.decoder.layers[0].parameters())
    )
    assert config.num_parameters == sum(w.numel() for w in llama.decoder.parameters())
