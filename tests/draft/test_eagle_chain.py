"""Chains of an EAGLE head in one compiled call: token for token what it drafts with a call for each pass, and the same
keys and values of the texts; when that call is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request
from foretoken.draft import chain as chain_module
from foretoken.draft.base import HiddenRows
from foretoken.draft.eagle import EagleDrafter
from foretoken.errors import CapacityError
from foretoken.heads import eagle_chain as eagle_chain_module
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.eagle_chain import EagleChain
from foretoken.heads.weights import pack, replace_weights, weights_of
from foretoken.model.chain_kernel import Reach
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import tiny_checkpoint, token_ids, variant
from tests.helpers.mtp_checkpoints import random_mtp
from tests.helpers.tiny_heads import eagle_head

BLOCK = 4
ROUNDS = 6
LONG = 45  # tokens of a prompt whose first pass is torch's
LENGTHS = (2, 9, LONG, 17, 30)
EAGLE, GREEDY = SpecConfig("eagle", head="unread"), SamplingParams(temperature=0.0)
KINDS: dict[str, Callable[[PagedModel], EagleHead]] = {
    "3": lambda target: eagle_head(target.config),
    "3.1": lambda target: eagle_head(target.config, fc_norm=True, norm_output=True),
    "norms": lambda target: eagle_head(target.config, norm_before_fc=True, norm_before_residual=True),
    "narrow": lambda target: eagle_head(target.config, hidden_size=32),
    "1": lambda target: eagle_head(target.config, 1),
    "mtp": lambda target: random_mtp(target.config),
}
FORMATS = [
    *(("float32", "int8", "int8"), ("float32", "int4", "int4"), ("bfloat16", "auto", "auto")),
    ("bfloat16", "auto", "int8"),
]


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bf16 matrices, also on a processor where oneDNN's are taken."""
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Reach]]:
    """The requests of every compiled chain."""
    found: list[Sequence[Reach]] = []
    draft = EagleChain.draft

    def noted(self: EagleChain, tokens: Tensor, features: Tensor, requests: Sequence[Reach]) -> Tensor:
        found.append(requests)
        return draft(self, tokens, features, requests)

    monkeypatch.setattr(EagleChain, "draft", noted)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant(tmp_path_factory.mktemp("target"), "llama", head_dim=16)


def target_of(folder: Path, dtype: str, weights: str, num_slots: int = 200) -> PagedModel:
    decoder = load_decoder(folder, dtype, quant=None if weights == "auto" else weights)
    return PagedModel(decoder, num_slots, BLOCK)


def head_of(target: PagedModel, kind: str, weights: str) -> EagleHead:
    head = KINDS[kind](target).to(target.decoder.norm.weight.dtype)
    pack(head, weights)
    return head


class Drafted(NamedTuple):
    """What requests were drafted, and the keys and values of their texts, layer by layer."""

    drafts: list[Draft]
    kept: dict[int, list[Tensor]]


@dataclass
class Texts:
    """Requests of a drafter whose texts grow by made-up tokens and states; `num_draft` of request i in round r is
    (i + r) % 6.
    """

    drafter: EagleDrafter
    spec: SpecConfig
    params: SamplingParams
    draft_probability: float

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self.texts = {number: token_ids(length, seed=number) for number, length in enumerate(LENGTHS)}

    def states(self, count: int) -> dict[int, Tensor]:
        head, target = self.drafter.runner.head, self.drafter.runner.target
        assert isinstance(target, PagedModel)
        shape = (count, target.config.hidden_size)
        return {
            layer: torch.randn(shape, generator=self._generator).to(head.norm_dtype) for layer in head.hidden_layers()
        }

    def start(self) -> None:
        """Read all prompts; the last request adopts the states of another one's beginning."""
        for number, text in self.texts.items():
            self.drafter.start(Request(number, tuple(text), self.params, self.spec, number))
            first = 0
            if number == len(self.texts) - 1:
                text[:8] = self.texts[number - 1][:8]
                self.drafter.adopt_states(number, [self.drafter.export_states(number - 1, 0, 8)])
                first = 8
            self.read(number, first, len(text) - 1)

    def read(self, number: int, first: int, stop: int) -> None:
        text = self.texts[number]
        rows = HiddenRows(number, first, tuple(text[first:stop]), text[stop], self.states(stop - first))
        self.drafter.read_hidden([rows])

    def rounds(self) -> Iterator[Draft]:
        """All drafts; after each, one to three tokens come to every text."""
        for turn in range(ROUNDS):
            entries = []
            for number, text in self.texts.items():
                request = Request(number, tuple(text), self.params, self.spec, number)
                entry = BatchEntry(request, len(text) - 1, (text[-1],), True, (number + turn) % 6)
                entries.append(replace(entry, draft_probability=self.draft_probability))
            yield self.drafter.propose(Batch(tuple(entries)))
            for number, text in self.texts.items():
                known = len(text) - 1
                text += token_ids(1 + (number + turn) % 3, seed=turn)
                self.read(number, known, len(text) - 1)


def drafts(
    head: EagleHead,
    target: PagedModel,
    spec: SpecConfig = EAGLE,
    params: SamplingParams = GREEDY,
    draft_probability: float = 1.0,
) -> Drafted:
    """All drafts of `Texts`, and keys and values of its texts in the end."""
    drafter = EagleDrafter(CachedEagle(head, target))
    texts = Texts(drafter, spec, params, draft_probability)
    texts.start()
    found = list(texts.rounds())
    cache, kept = drafter.cache, {}
    for number in texts.texts:
        slots = cache.room_behind(number, 0).index
        index = torch.tensor(list(slots)) if isinstance(slots, range) else slots
        kept[number] = [part for layer in range(len(cache.pool.keys)) for part in cache.pool.read(layer, index)]
        drafter.finish(number)
    cache.check()
    return Drafted(found, kept)


def assert_same(found: Drafted, other: Drafted) -> None:
    for one, two in zip(found.drafts, other.drafts, strict=True):
        assert one.tokens.dtype == two.tokens.dtype == torch.int64
        assert one.tokens.tolist() == two.tokens.tolist()
        assert (one.parents, one.offsets, one.drafters) == (two.parents, two.offsets, two.drafters)
        assert (one.sampled, one.mass) == (two.sampled, two.mass) == ((), None)
    for number, kept in found.kept.items():
        assert all(torch.equal(one, two) for one, two in zip(kept, other.kept[number], strict=True)), number


def one_by_one(monkeypatch: pytest.MonkeyPatch, head: EagleHead, target: PagedModel) -> Drafted:
    with monkeypatch.context() as patch:
        patch.setattr(chain_module, "takes_likeliest", lambda _: False)
        return drafts(head, target)


@pytest.mark.parametrize(("dtype", "of_target", "weights"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_a_call_for_each_pass(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Sequence[Reach]],
    kind: str,
    dtype: str,
    of_target: str,
    weights: str,
) -> None:
    """A ragged batch whose requests draft 0 to 5 tokens behind 1 to 44 new rows."""
    target = target_of(folder, dtype, of_target)
    head = head_of(target, kind, weights)
    found = drafts(head, target)
    assert len(calls) == ROUNDS - 1  # not while the long prompt is read
    assert {one.num_tokens for requests in calls for one in requests} == {1, 2, 3, 4, 5}
    assert {one.num_text for requests in calls for one in requests} >= {1, 2, 3}
    assert any(isinstance(one.slots, Tensor) for requests in calls for one in requests)
    assert any(isinstance(one.slots, range) for requests in calls for one in requests)
    assert len({tuple(draft.tokens.tolist()) for draft in found.drafts}) == ROUNDS
    expected = one_by_one(monkeypatch, head, target)
    assert len(calls) == ROUNDS - 1
    assert_same(found, expected)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_the_number_of_threads_changes_nothing(folder: Path, calls: list[Sequence[Reach]], num_threads: int) -> None:
    target = target_of(folder, "float32", "int8")
    head, before = head_of(target, "3", "int8"), torch.get_num_threads()
    found = drafts(head, target)
    try:
        torch.set_num_threads(num_threads)
        assert_same(drafts(head, target), found)
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 2 * (ROUNDS - 1)


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_replaced_weights_are_the_ones_that_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Sequence[Reach]], weights: str
) -> None:
    """Each weight on its own, as on-line adaptation may replace any, in a drafter that has drafted before."""
    target = target_of(folder, "bfloat16", "auto")
    head, other = head_of(target, "1", weights), eagle_head(target.config, 1, seed=9).to(torch.bfloat16)
    pack(other, weights)
    with monkeypatch.context() as patch:
        runner = CachedEagle(head, target)
        patch.setattr("tests.draft.test_eagle_chain.CachedEagle", lambda *_: runner)
        drafts(head, target)
        made = runner._chain[1]
        for name, value in weights_of(other).items():
            replace_weights(head, {name: value})
            calls.clear()
            found = drafts(head, target)
            assert len(calls) == ROUNDS - 1
            assert_same(found, one_by_one(monkeypatch, head, target))
            assert (runner._chain[1] is made) == ("norm" in name), name  # norms are written in place
            made = runner._chain[1]


def test_logits_that_are_no_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Sequence[Reach]]
) -> None:
    """A head that overflows drafts the first token of its vocabulary, as it does with a call for each pass."""
    target = target_of(folder, "float32", "int8")
    head = head_of(target, "3", "int8")
    assert head.norm is not None
    with torch.no_grad():
        head.norm.weight[3] = float("nan")
    found = drafts(head, target)
    assert len(calls) == ROUNDS - 1
    assert {token for draft in found.drafts for token in draft.tokens.tolist()} == {int(head.vocabulary.ids[0])}
    assert_same(found, one_by_one(monkeypatch, head, target))


@pytest.mark.parametrize(
    ("spec", "params", "draft_probability"),
    [
        ({}, {"temperature": 0.7}, 1.0),
        ({"min_confidence": 0.03}, {}, 1.0),
        ({}, {}, 0.5),
    ],
)
def test_other_requests_draft_one_by_one(
    folder: Path,
    calls: list[Sequence[Reach]],
    spec: dict[str, float],
    params: dict[str, float],
    draft_probability: float,
) -> None:
    """Sampled ones, and those whose chains may end early."""
    target = target_of(folder, "float32", "int8")
    given = SpecConfig("eagle", head="unread", **spec)  # type: ignore[arg-type]
    sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    found = drafts(head_of(target, "3", "int8"), target, given, sampling, draft_probability)
    assert sum(draft.num_nodes for draft in found.drafts) > 10
    assert calls == []


def test_heads_and_targets_without_a_compiled_chain(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Sequence[Reach]]
) -> None:
    """Matrices in plain numbers, a bias, a target that multiplies its embeddings or logits, no compiler."""
    plain = target_of(folder, "float32", "auto")
    drafts(head_of(plain, "3", "auto"), plain)
    target = target_of(folder, "float32", "int8")
    head = eagle_head(target.config, 1)
    biased = EagleHead(replace(head.config, fc_bias=True), head.vocabulary).requires_grad_(False)
    biased.initialise(1)
    pack(biased, "int8")
    drafts(biased, target)
    for family in ("granite", "gemma2"):
        other = target_of(tiny_checkpoint(tmp_path / family, family), "float32", "int8")
        assert other.output_module() is None
        drafts(head_of(other, "3", "int8"), other)
    monkeypatch.setattr(eagle_chain_module, "chain_library", lambda: None)
    drafts(head_of(target, "3", "int8"), target)
    assert calls == []


def test_a_head_with_all_of_its_own_needs_nothing_of_its_target(
    folder: Path, tmp_path: Path, calls: list[Sequence[Reach]]
) -> None:
    other = target_of(tiny_checkpoint(tmp_path, "granite"), "float32", "int8")
    drafts(head_of(other, "narrow", "int8"), other)
    assert len(calls) == ROUNDS - 1


def test_no_room_for_the_rows(folder: Path, calls: list[Sequence[Reach]]) -> None:
    """Nothing is kept then; the last token of a chain needs none."""
    target = target_of(folder, "float32", "int8", num_slots=12)
    runner, text = CachedEagle(head_of(target, "3", "int8"), target), torch.tensor(token_ids(5))
    features = torch.zeros(5, target.config.hidden_size)
    runner.cache.open(0)
    with pytest.raises(CapacityError, match="out of KV blocks: 13 rows wanted, 12 tokens free"):
        runner.draft(text, features, [Segment(0, 5)], [9])
    assert (calls, runner.cache.length(0)) == ([], 0)
    drafted = runner.draft(text, features, [Segment(0, 5)], [8])
    assert drafted is not None
    assert (len(drafted), runner.cache.length(0)) == (8, 5)
