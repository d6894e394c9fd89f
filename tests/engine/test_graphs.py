"""Whole runs of the engine whose forwards are replayed (`helpers.emulated_graphs`) give the tokens and logits of runs
without graphs, and wait as often for a device.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams, SpecConfig, transfer
from foretoken.draft.base import Drafter
from foretoken.draft.block import BlockDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.eagle import EagleDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.medusa import MedusaDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.engine import Engine
from foretoken.heads.block import BlockHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.graphs import MedusaGraphs
from foretoken.heads.medusa import MedusaHead
from foretoken.kernels.paged_work import PagedWork
from foretoken.model.decoder import Decoder
from foretoken.model.graphs.cache import JOINED, MANY_ROWS, REPLAYED, ROW_BUCKETS, ROWS_AHEAD, StepGraphs, StepShape
from foretoken.model.interface import ForwardOutput, Segment
from foretoken.model.paged import PagedModel
from foretoken.model.strict import ExactDeviceModel
from tests.engine import test_fake_cuda
from tests.engine.test_fake_cuda import NUM_TOKENS, PLAIN, PROMPT, engine_with, steps
from tests.helpers import emulated_graphs as emulation
from tests.helpers.checkpoints import token_ids
from tests.helpers.emulated_graphs import emulated_graphs, launched
from tests.helpers.fake_cuda import fake_cuda, fake_model
from tests.helpers.fake_drafters import DRAFTERS
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_heads import eagle_head
from tests.model.test_graphs import TOLERANCE, decoder_of

no_recovery = test_fake_cuda.no_recovery  # a step or a drafter that raises fails the test
repeated = pytest.mark.repeated
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=0.8, seed=5, top_k=20)
# When a request comes, and with what: buckets grow, shrink and come back.
ARRIVALS = ((0, 9, GREEDY), (2, 4, SAMPLED), (3, 40, GREEDY), (4, 150, GREEDY), (20, 7, GREEDY), (21, 23, SAMPLED))
Made = Callable[[PagedModel, Decoder], Drafter]


def _drafted(_: PagedModel, draft: Decoder) -> Drafter:
    return DraftModelDrafter(PagedModel(draft, 600, 4))


def _eagle(version: int = 3) -> Made:
    def made(target: PagedModel, _: Decoder) -> Drafter:
        return EagleDrafter(CachedEagle(eagle_head(target.config, version).to(target.device, target.dtype), target))

    return made


def _medusa(target: PagedModel, _: Decoder) -> Drafter:
    head = random_head("medusa", replace(target.config, sliding_window=())).to(target.device, target.dtype)
    assert isinstance(head, MedusaHead)
    head.vocabulary = head.vocabulary.to(target.device)
    return MedusaDrafter(head, target)


def _block(name: str) -> Made:
    def made(target: PagedModel, _: Decoder) -> Drafter:
        head = random_head(name, replace(target.config, sliding_window=())).to(target.device, target.dtype)
        assert isinstance(head, BlockHead)
        head.vocabulary = head.vocabulary.to(target.device)
        return BlockDrafter(head, target)

    return made


POWERS = {1 << place for place in range(8)}
MODEL, TREE = SpecConfig("draft_model", "toy", num_draft=3), {"num_draft": 6, "tree": "best_first"}
HEAD = SpecConfig("eagle", head="toy", num_draft=3)
BLOCK = SpecConfig("block", head="toy", num_draft=3)
CASES: dict[str, tuple[SpecConfig, Made | None]] = {
    "plain": (SpecConfig(), None),
    "ngram": (SpecConfig("ngram", num_draft=3), lambda *_: NgramDrafter()),
    "draft_model": (MODEL, _drafted),
    "draft_model/best_first": (replace(MODEL, **TREE), _drafted),
    "eagle": (HEAD, _eagle()),
    "eagle:1": (HEAD, _eagle(1)),
    "eagle/best_first": (replace(HEAD, **TREE), _eagle()),
    "block": (BLOCK, _block("block:cut")),
    "block:open": (BLOCK, _block("block:open")),
    "medusa": (SpecConfig("medusa", head="toy", num_draft=3), _medusa),
    "early_exit": (SpecConfig("early_exit", num_draft=3, exit_layer=1), lambda target, _: EarlyExitDrafter(target)),
}


REPEATED = ("draft_model", "early_exit", "eagle:1", "eagle/best_first", "block")


@dataclass
class Run:
    """A target, a drafter's model if it has one, and what came of the requests."""

    target: PagedModel
    drafter: Drafter | None
    answers: list[list[int]]
    kept: list[Tensor]  # what the target returned, as it is when all is over

    @property
    def graphs(self) -> list[StepGraphs]:
        own = getattr(self.drafter, "_cache", None)
        found = [self.target.graphs, getattr(getattr(own, "model", None), "graphs", None)]
        found += [self.drafter.runner.graphs] if isinstance(self.drafter, EagleDrafter) else []
        if isinstance(self.drafter, BlockDrafter) and self.drafter.graphs is not None:
            found += [self.drafter.graphs.context, self.drafter.graphs.slots]
        return [one for one in found if one is not None]


def run(name: str, target_decoder: Decoder, draft_decoder: Decoder) -> Run:
    """An engine with requests that come and go, share blocks and write over those of others."""
    spec, make = CASES[name]
    target = PagedModel(target_decoder, 200, 4)
    group, drafter = DrafterGroup(target), None if make is None else make(target, draft_decoder)
    if drafter is not None:
        group.add(drafter_key(spec), drafter)
    kept, engine = list[Tensor](), Engine(target, group)
    forward = target.forward

    def watched(tokens: Tensor, segments: Sequence[object], taps: Sequence[int] = ()) -> ForwardOutput:
        found = forward(tokens, segments, taps)
        kept.extend((found.logits, *(found.taps[layer] for layer in sorted(found.taps))))
        return found

    target.forward = watched
    states, turn = [], 0
    while engine.has_work or turn <= ARRIVALS[-1][0]:
        for place, (when, length, params) in enumerate(ARRIVALS):
            if when == turn:
                states.append(engine.submit(token_ids(length, seed=place % 3), params, spec))
        assert all(output.error is None for output in engine.step())
        turn += 1
    assert engine.stats.num_faults == 0
    assert min(target.prefix_stats.num_found_tokens, target.prefix_stats.num_evicted_blocks) > 0
    target.check()
    return Run(target, drafter, [list(state.output_ids) for state in states], kept)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=repeated) if name in REPEATED else name for name in CASES],
)
def test_replayed_runs_answer_as_usual(name: str) -> None:
    target, draft = decoder_of("mistral-sliding"), decoder_of("llama-mqa", seed=1)
    with torch.inference_mode():
        usual = run(name, target, draft)
        with emulated_graphs():
            replayed = run(name, target, draft)
    assert replayed.answers == usual.answers
    assert len(replayed.kept) == len(usual.kept)
    for got, expected in zip(replayed.kept, usual.kept, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)
    assert len(replayed.graphs) == num_graph_caches(name)
    if isinstance(replayed.drafter, MedusaDrafter):
        assert isinstance(replayed.drafter.graphs, MedusaGraphs)
        assert set(replayed.drafter.graphs.steps) == {REPLAYED}
        assert replayed.drafter.graphs.capture.num_replays == replayed.drafter.graphs.steps[REPLAYED] > 2
    for graphs in replayed.graphs:
        counts, capture = graphs.steps, graphs.capture
        assert counts.keys() <= {REPLAYED, MANY_ROWS, JOINED}
        assert capture.num_replays == counts[REPLAYED] > 2
        assert (counts[JOINED] > 0) == (name == "early_exit")
        shapes = graphs.shapes
        assert len(capture.graphs) == len(set(shapes)) <= bound(shapes)


@pytest.mark.parametrize("taps", [(), (1, 3)])
def test_captured_ahead_a_step_of_few_rows_captures_nothing(taps: tuple[int, ...]) -> None:
    """What padding leaves behind is read by nobody: the same logits and taps as a model that captured nothing."""
    decoder = decoder_of("mistral-sliding")
    with torch.inference_mode(), emulated_graphs():
        usual, ahead = PagedModel(decoder, 200, 4), PagedModel(decoder, 200, 4)
        assert ahead.graphs is not None
        ahead.capture_ahead(taps, has_trees=False)
        num_captured = len(ahead.graphs.shapes)
        assert num_captured == (len(ROWS_AHEAD) + 1) * (2 if taps else 1)
        assert not ahead.graphs.steps
        found = []
        for model in (usual, ahead):
            model.open(0)
            outputs = []
            for turn, size in enumerate((7, 1, 3, 1)):
                tokens, segment = torch.tensor(token_ids(size, seed=turn)), Segment(0, size, (), size, num_taps=size)
                outputs.append(model.forward(tokens, [segment], taps if turn != 2 else ()))
                model.commit(0, size)
            found.append(outputs)
        for got, expected in zip(*found, strict=True):
            assert torch.equal(got.logits, expected.logits)
            assert got.taps.keys() == expected.taps.keys()
            assert all(torch.equal(got.taps[layer], expected.taps[layer]) for layer in expected.taps)
        assert len(ahead.graphs.shapes) == num_captured
        assert ahead.graphs.steps == {REPLAYED: 4}


@pytest.mark.parametrize("kind", [PagedModel, ExactDeviceModel])
def test_ahead_of_the_first_tree_and_long_text_their_kernels_are_launched(
    kind: type[PagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles for trees, for blocks of a token (paths of strict trees), and a kernel that merges parts."""
    launches = set[tuple[object, ...]]()

    def noted(work: PagedWork, cache: tuple[Tensor, Tensor], block_size: int, *rest: Any) -> Tensor:
        launches.update([("attend", work.has_trees, block_size), *[("merge",)][: work.num_merged]])
        return emulation.attend(work, cache, block_size, *rest)

    with torch.inference_mode(), emulated_graphs():
        monkeypatch.setattr(sys.modules["foretoken.kernels.paged_triton"], "attend", noted)
        model = kind(decoder_of("llama"), 200, 4)
        assert model.graphs is not None
        model.capture_ahead((), has_trees=True)
        model.check()
        assert model.num_free_tokens() == 200
        ahead = launches.copy()
        launches.clear()
        model.open(0)
        for size in (40, 1):  # more than a span
            model.forward(torch.tensor(token_ids(size)), [Segment(0, size)])
            model.commit(0, size)
        model.forward(torch.tensor(token_ids(4)), [Segment(0, 1, (-1, -1, 0), 4)])
    assert len(launches) == 3
    assert launches <= ahead


def test_an_engine_with_drafters_is_ready_for_trees(
    text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[bool]()
    monkeypatch.setattr(PagedModel, "capture_ahead", lambda *_, has_trees: asked.append(has_trees))
    for spec in (SpecConfig(), SpecConfig("ngram")):
        LLM(text_pair.target, spec, cache_tokens=64, profile="off").close()
    assert asked == [False, True]


def test_experts_are_captured() -> None:
    """Whose rows the host sorts otherwise: answers are the same, with a wait less for each layer."""
    target, draft = decoder_of("qwen2-moe"), decoder_of("llama-mqa", seed=1)
    spec, make = DRAFTERS["ngram"]
    with torch.inference_mode():
        usual = run("ngram", target, draft)
        with emulated_graphs():
            replayed = run("ngram", target, draft)
    assert replayed.answers == usual.answers
    for got, expected in zip(replayed.kept, usual.kept, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)
    (graphs,) = replayed.graphs
    assert graphs.steps[REPLAYED] > 2
    with emulated_graphs(capture=launched), fake_cuda(vocab_size=NUM_TOKENS) as transfers, torch.inference_mode():
        engine = engine_with(spec, make, fake_model("qwen2-moe"))
        engine.submit(PROMPT, PLAIN, spec)
        assert max(steps(engine, transfers, 3)) == 1
        assert set(engine.target.graphs.steps) == {REPLAYED}


def num_graph_caches(name: str) -> int:
    """Of the target and the drafter; a block drafter has two."""
    return 3 if name.startswith("block") else 1 + name.startswith(("draft_model", "eagle"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["plain", "draft_model", *(name for name in CASES if name.startswith(("eagle", "block", "medusa")))]
)
def test_replayed_runs_on_a_gpu_answer_as_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the target's logits are the same behind every drafted token, so that drafts are."""
    pytest.importorskip("triton")
    decoders = [decoder_of("mistral-sliding"), decoder_of("llama-mqa", seed=1)]
    there = [copy.deepcopy(decoder).to("cuda", torch.float32) for decoder in decoders]
    with torch.inference_mode():
        expected = run(name, *decoders)
        monkeypatch.setenv("FORETOKEN_ATTENTION", "triton")
        monkeypatch.setenv("FORETOKEN_GRAPHS", "on")
        replayed = run(name, *there)
    assert replayed.answers == expected.answers
    assert len(replayed.kept) == len(expected.kept)
    for got, wanted in zip(replayed.kept, expected.kept, strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted, atol=1e-3, rtol=0)
    assert len(replayed.graphs) == num_graph_caches(name)
    for graphs in replayed.graphs:
        assert graphs.steps[REPLAYED] > 2
        assert graphs.steps.keys() <= {REPLAYED, MANY_ROWS}


def bound(shapes: Sequence[StepShape]) -> int:
    """Most graphs of a run: buckets of rows, and for each powers of two of parts, trees or none."""
    parts = max(shape.parts for shape in shapes).bit_length()
    assert all(shape.rows in ROW_BUCKETS and shape.parts in POWERS for shape in shapes)
    return len({shape.rows for shape in shapes}) * parts * len({(shape.has_trees, shape.taps) for shape in shapes})


@pytest.mark.parametrize(
    "name",
    [
        *("ngram", "eagle"),
        *(
            pytest.param(n, marks=repeated)
            for n in ("draft_model", "draft_model/best_first", "eagle/best_first", "block", "medusa")
        ),
    ],
)
def test_waits_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a replay brings one block of numbers to the device, where a forward makes several tensors of them."""
    spec, make = DRAFTERS[name]
    waits, copies = list[list[int]](), list[int]()
    for graphs in (nullcontext(), emulated_graphs(capture=launched)):
        with graphs, fake_cuda(vocab_size=NUM_TOKENS) as transfers, torch.inference_mode():
            made = list[Drafter]()
            engine = engine_with(spec, lambda target, made=made: made.append(make(target)) or made[-1])
            for _ in range(2):
                engine.submit(PROMPT, PLAIN, spec)
            waits.append(steps(engine, transfers, 3))
            model = engine.target
            assert isinstance(model, PagedModel)
            copies.append(brought(model, monkeypatch))
            if model.graphs is not None:
                assert set(model.graphs.steps) == {REPLAYED}
                assert not isinstance(made[0], EagleDrafter) or set(made[0].runner.graphs.steps) == {REPLAYED}
    assert waits[0] == waits[1]
    assert copies[1] == 1 < copies[0]


def brought(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Copies to the device by a forward whose tokens are there."""
    model.open(99)
    tokens, count = torch.zeros(3, dtype=torch.int64, device=model.device), []

    def pinned(host: Tensor) -> Tensor:
        count.append(host)
        return host

    for _ in range(2):  # the first one captures
        with monkeypatch.context() as patch:
            patch.setattr(transfer, "_pinned", pinned)
            count.clear()
            model.forward(tokens, [Segment(99, 1, (-1, 0), 2)])
    return len(count)
