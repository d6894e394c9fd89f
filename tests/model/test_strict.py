"""Strict numerics: every logit is bitwise what decoding one token after the other gives, however the rows are
batched.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.kv.blocks import slots_of
from foretoken.model import strict
from foretoken.model.decoder import Decoder
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.model.strict import Proven, StrictModel, prove, strict_kind
from tests.helpers.checkpoints import VARIANTS, tiny_checkpoint, token_ids
from tests.helpers.paged_family import LEAF_PATHS, TREE, scatter
from tests.helpers.usual import some_of

BLOCK = 4
LENGTH = 150  # crosses two key blocks
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Every family; windows shorter and longer than a key block, on all layers and on some.
CASES = {
    "llama": {},
    "llama-mqa": {},
    "mistral-sliding": {},
    "mistral": {"sliding_window": 70},
    "qwen2": {},
    "qwen2-layer-types": {},
    "qwen3": {},
}
# Where compiled kernels run all of a model, `PagedModel` is strict: these are run by what `strict_kind` says.
KERNELS = {f"{name}-kernels": name for name in ("llama", "mistral-sliding", "mistral", "qwen2-layer-types", "qwen3")}


class Case:
    """One checkpoint in one dtype with strict numerics, its text, and the logits that decoding token by token gives."""

    def __init__(self, folder: Path, dtype: torch.dtype, kernels: bool, length: int = LENGTH) -> None:
        self.decoder: Decoder = load_decoder(folder, dtype=dtype)
        self.kind = strict_kind(self.decoder) if kernels else StrictModel
        self.proven = prove(self.decoder) if self.kind is StrictModel else Proven((), 0)
        self.text = token_ids(length)
        self._decoded = self.model()  # holds the text, decoded token by token
        self._decoded.open(0)
        self.expected = torch.cat([extend(self._decoded, 0, [token]) for token in self.text])  # [length, V]

    def model(self, num_slots: int = 1200) -> PagedModel:
        """A strict model with an empty cache; what was proven of the decoder is not proven again."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(strict, "prove", lambda _: self.proven)
            return self.kind(self.decoder, num_slots, BLOCK)

    def in_tiles(self, *proven: Any) -> PagedModel:
        """The same in tiles as if `Proven(*proven)`, if it runs in tiles."""
        model = self.model()
        if isinstance(model, StrictModel):
            model._proven[1] = Proven(*proven)
        return model

    def plain(self, text: Sequence[int]) -> Tensor:
        """Logits `[len(text), V]`, one row per forward."""
        model = self.model()
        model.open(0)
        return torch.cat([extend(model, 0, [token]) for token in text])

    def plain_after(self, past: int, tokens: Sequence[int]) -> Tensor:
        """Logits `[past + len(tokens), V]` of the first `past` tokens of the text and then others, one row per
        forward.
        """
        self._decoded.fork(0, 1)
        self._decoded.rollback(1, past)
        rows = [extend(self._decoded, 1, [token]) for token in tokens]
        self._decoded.close(1)
        return torch.cat([self.expected[:past], *rows])


def extend(model: PagedModel, sequence: int, tokens: Sequence[int]) -> Tensor:
    """Run committed tokens, all logits wanted."""
    out = model.forward(torch.tensor(tokens), [Segment(sequence, len(tokens), (), len(tokens))]).logits
    model.commit(sequence, len(tokens))
    return out


def chain(num_draft: int, sequence: int = 0) -> Segment:
    """One pending token and a chain of draft tokens."""
    return Segment(sequence, 1, tuple(range(-1, num_draft - 1)), 1 + num_draft)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, and afterwards what there was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def folder(name: str) -> Path:
        family, overrides = VARIANTS[name]
        return tiny_checkpoint(tmp_path_factory.mktemp(name), family, **(overrides | CASES[name]))

    return folder


@pytest.fixture(scope="module")
def cases(folders: Callable[[str], Path]) -> Callable[[str, str], Case]:
    return functools.cache(
        lambda name, dtype: Case(folders(KERNELS.get(name, name)), DTYPES[dtype], kernels=name in KERNELS)
    )


# Windows meet every dtype; what else tells families apart are biases, norms and shapes: one dtype each.
WITH_DTYPES = ("llama", "mistral-sliding", "mistral", "qwen2-layer-types")


@pytest.fixture(
    params=[
        *((name, dtype) for dtype in DTYPES for name in WITH_DTYPES),
        *((name, "bfloat16") for name in (*CASES, *KERNELS) if name not in WITH_DTYPES),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, one_thread: None, cases: Callable[[str, str], Case]) -> Case:
    return cases(*request.param)


@pytest.fixture(
    params=[*((name, dtype) for dtype in DTYPES for name in ("llama", "mistral")), ("llama-kernels", "bfloat16")],
    ids="-".join,
)
def some(request: pytest.FixtureRequest, one_thread: None, cases: Callable[[str, str], Case]) -> Case:
    """Without and with a window, and by compiled kernels."""
    return cases(*request.param)


def ragged(model: PagedModel, text: Sequence[int], expected: Tensor, seed: int, num_rows: int = 500) -> int:
    """Serve several sequences that all continue `text`, in random batches of prompt chunks, chains and trees.

    Draft tokens follow the text for a while and are wrong from then on; what agrees is kept. Returns the rows that
    differ from `expected`.
    """
    choose = random.Random(seed)
    wrong = rows_seen = 0
    for sequence in range(4):
        model.open(sequence)
    while rows_seen < num_rows:
        tokens, segments, checks, commits = [], [], [], []
        for sequence in choose.sample(range(4), choose.randint(1, 4)):
            at = model.length(sequence)
            if at > len(text) - 2:
                model.rollback(sequence, at := choose.choice((0, 1, 63, 64, at // 2)))
            pending = choose.choice((1, 1, 1, 2, choose.randint(1, 100))) if at else choose.randint(1, 130)
            pending = min(pending, len(text) - at)
            parents, right, nodes = (), [], []
            if choose.random() < 0.7:
                parents = tuple(range(-1, choose.randint(0, 16) - 1)) if choose.random() < 0.5 else TREE
                line = range(len(parents)) if parents != TREE else choose.choice(LEAF_PATHS)
                right = [*line][: min(choose.randint(0, len(line)), len(text) - at - pending)]
                nodes = [(token + 1 + choose.randrange(90)) % 97 for token in range(len(parents))]
                for depth, node in enumerate(right):
                    nodes[node] = text[at + pending + depth]
            segments.append(Segment(sequence, pending, parents, pending + len(parents)))
            checks += [(len(tokens) + i, at + i) for i in range(pending)]
            checks += [(len(tokens) + pending + node, at + pending + depth) for depth, node in enumerate(right)]
            tokens += [*text[at : at + pending], *nodes]
            commits.append((sequence, pending, right))
        logits = model.forward(torch.tensor(tokens), segments).logits
        rows, places = zip(*checks, strict=True)
        wrong += int((logits[list(rows)] != expected[list(places)]).any(-1).sum())
        rows_seen += len(rows)
        for sequence, pending, right in commits:
            model.commit(sequence, pending, right)
    return wrong


def test_random_ragged_batches(case: Case) -> None:
    """Any neighbours, chunks, chains and trees, over adjacent and over scattered blocks."""
    assert ragged(case.model(), case.text, case.expected, seed=1, num_rows=300) == 0
    model = case.model(2400)
    scatter(model, 280)
    assert ragged(model, case.text, case.expected, seed=2, num_rows=300) == 0
    assert isinstance(slots_of(model.tables[0], 0, model.length(0), BLOCK), list)


@pytest.mark.parametrize(
    ("name", "dtype_name"),
    [
        pytest.param("llama", "float32", marks=pytest.mark.repeated),
        pytest.param("mistral", "bfloat16", marks=pytest.mark.repeated),
        ("llama-kernels", "bfloat16"),
    ],
)
def test_random_ragged_batches_with_two_threads(folders: Callable[[str], Path], name: str, dtype_name: str) -> None:
    """Threads share out the work of a kernel, and where a row lands must not matter. Few rows: a busy machine makes
    threads wait.
    """
    torch.set_num_threads(2)
    case = Case(folders(KERNELS.get(name, name)), DTYPES[dtype_name], name in KERNELS, length=80)
    assert ragged(case.model(), case.text, case.expected, seed=3, num_rows=300) == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_default_numerics_fail_the_same_check(cases: Callable[[str, str], Case], name: str) -> None:
    """The check can see: our default path does differ in the last bits."""
    case = cases(name, "float32")
    model = PagedModel(case.decoder, 1200, BLOCK)
    model.open(9)
    expected = torch.cat([extend(model, 9, [token]) for token in case.text])
    model.close(9)
    assert ragged(model, case.text, expected, seed=0) > 0
    torch.testing.assert_close(case.expected, expected, atol=1e-4, rtol=0)  # and yet both compute the same thing


def test_verify_passes_of_every_size_around_the_edges_of_key_blocks(some: Case) -> None:
    model = some.model()
    model.open(0)
    extend(model, 0, some.text[:130])
    for start in (129, 128, 127, 126, 120, 66, 65, 64, 63, 62, 55, 1):
        model.rollback(0, start)
        for num_draft in range(17):
            tokens = some.text[start : start + 1 + num_draft]
            got = model.forward(torch.tensor(tokens), [chain(num_draft)]).logits
            assert torch.equal(got, some.expected[start : start + 1 + num_draft]), (start, num_draft)


@pytest.mark.parametrize(
    ("past", "scattered"),
    some_of(itertools.product((9, 59, 62, 64), (False, True)), {(9, False), (59, True), (62, True), (64, False)}),
)
def test_every_node_of_a_tree_and_what_follows_it(some: Case, past: int, scattered: bool) -> None:
    """Each node against plain decoding of its own path, in a tree that spans key blocks; then on along each path."""
    nodes, after = token_ids(len(TREE), seed=2), token_ids(4, seed=3)
    for path in LEAF_PATHS:
        model = some.model()
        if scattered:
            scatter(model, 60)
        model.open(0)
        extend(model, 0, some.text[: past - 2])
        got = model.forward(
            torch.tensor([*some.text[past - 2 : past], *nodes]), [Segment(0, 2, TREE, 2 + len(TREE))]
        ).logits
        expected = some.plain_after(past, [*(nodes[node] for node in path), *after])
        assert torch.equal(got[[0, 1, *(2 + node for node in path)]], expected[past - 2 : past + len(path)])
        model.commit(0, 2, path)
        assert torch.equal(extend(model, 0, after), expected[-len(after) :])
        assert isinstance(slots_of(model.tables[0], 0, model.length(0), BLOCK), list) == scattered


@pytest.mark.parametrize(
    ("chunk", "num_neighbours"),
    some_of(itertools.product((3, 63, 64, 65, 128, LENGTH), (0, 3)), {(LENGTH, 0), (64, 0), (3, 3), (63, 3), (65, 3)}),
)
def test_prompt_chunks(some: Case, chunk: int, num_neighbours: int) -> None:
    """Any chunking, alone or behind neighbours that push the rows to other places in the tiles."""
    model = some.model(2400)
    for sequence in range(num_neighbours + 1):
        model.open(sequence)
    for start in range(0, LENGTH, chunk):
        piece = some.text[start : start + chunk]
        others = [token_ids(1 + 5 * sequence, seed=start + sequence) for sequence in range(num_neighbours)]
        segments = [Segment(1 + i, len(other), (), 1) for i, other in enumerate(others)]
        flat = torch.tensor([token for other in [*others, piece] for token in other])
        got = model.forward(flat, [*segments, Segment(0, len(piece), (), len(piece))]).logits
        assert torch.equal(got[num_neighbours:], some.expected[start : start + chunk])
        model.commit(0, len(piece))  # the neighbours begin anew


def test_close_to_default_numerics(case: Case) -> None:
    """Strict is not only equal to itself: float32 to rounding, 16 bits as close as two orders of summation are."""
    model = PagedModel(case.decoder, 400, BLOCK)
    model.open(0)
    reference = extend(model, 0, case.text).float()
    atol = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}[case.expected.dtype]
    torch.testing.assert_close(case.expected.float(), reference, atol=atol, rtol=0)
    assert reference.std() > 0.3  # of which the tolerance is a small part


def test_taps_and_row_choice(some: Case) -> None:
    """Taps are strict too, whichever rows want logits."""
    layers, model = (0, 1, 3), some.in_tiles((8, 64), 1)
    model.open(0)
    model.open(1)
    whole = model.forward(torch.tensor(some.text), [Segment(0, LENGTH, (), 2, num_taps=LENGTH)], layers)
    assert torch.equal(whole.logits, some.expected[-2:])
    extend(model, 1, some.text[:-2])
    for i, token in enumerate(some.text[-2:]):
        one = model.forward(torch.tensor([token]), [Segment(1, 1, num_taps=1)], layers)
        model.commit(1, 1)
        assert all(torch.equal(one.taps[layer][0], whole.taps[layer][LENGTH - 2 + i]) for layer in layers)
    none = model.forward(torch.tensor(some.text[:3]), [Segment(0, 3, (), 0)])
    assert none.logits.shape == (0, model.vocab_size)


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
def test_slots_that_are_not_ours_or_not_written_yet_are_never_read(
    some: Case, monkeypatch: pytest.MonkeyPatch, poison: float
) -> None:
    # Many tiles: later rows are not written when earlier ones read.
    model = some.in_tiles((8,), some.proven.positions_per_call)
    if isinstance(model, StrictModel):
        first_try = model.run_pass
        monkeypatch.setattr(model, "run_pass", lambda one: first_try(replace(one, alone=False)))  # no second one
    scatter(model, 60)
    model.open(0)
    for start, stop in ((0, 60), (60, 66), (66, 110)):
        kept = set(slots_of(model.tables[0], 0, model.length(0), BLOCK))
        gone = [slot for slot in range(model.capacity_tokens) if slot not in kept]
        for tensor in (*model.pool.keys, *model.pool.values):
            tensor[:, gone] = poison
        assert torch.equal(extend(model, 0, some.text[start:stop]), some.expected[start:stop])


@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0)], ids=["chain", "tree"])
def test_a_draft_token_that_overflows_harms_only_itself(some: Case, parents: tuple[int, ...]) -> None:
    """Token 96 gives NaN; as a draft token it must not reach the rows before and beside it, which share its calls."""
    model, weight = some.model(), some.decoder.embedding.weight
    model.open(0)
    extend(model, 0, some.text[:20])
    kept = weight[96].clone()
    weight[96] = float("nan")
    try:
        got = model.forward(torch.tensor([some.text[20], some.text[21], 96, 96]), [Segment(0, 1, parents, 4)]).logits
        assert torch.equal(got[:2], some.expected[20:22])
        assert bool(got[2:].isnan().all())
    finally:
        weight[96] = kept
    model.commit(0, 1, (0,))
    assert torch.equal(extend(model, 0, some.text[22:30]), some.expected[22:30])


def test_greedy_decoding_in_bf16_is_the_same_with_and_without_a_draft(cases: Callable[[str, str], Case]) -> None:
    """Token for token over a long answer, whatever is drafted: half of the draft tokens are right."""
    case, choose = cases("llama", "bfloat16"), random.Random(3)
    model, plain = case.model(), [7]
    model.open(0)
    while len(plain) < 200:
        plain.append(int(extend(model, 0, plain[-1:])[0].argmax()))
    text = [7]
    model.open(1)
    while len(text) < 200:
        count = choose.randint(0, 9)
        drafted = [
            token if choose.random() < 0.8 else choose.randrange(97) for token in plain[len(text) : len(text) + count]
        ]
        answers = model.forward(torch.tensor([text[-1], *drafted]), [chain(len(drafted), 1)]).logits.argmax(-1).tolist()
        right = next((i for i, token in enumerate(drafted) if token != answers[i]), len(drafted))
        model.commit(1, 1, range(right))
        text += answers[: right + 1]
    assert text[:200] == plain
