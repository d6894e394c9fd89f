"""Medusa and block drafters in the engine: every draft is what their networks make of a fresh run over the text.

The oracle runs the target over the whole text without its last token, then the head for one request alone, and draws
the greedy chain from left to right.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Feedback, HiddenRows
from foretoken.draft.block import BlockDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.medusa import MedusaDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.heads.base import Head
from foretoken.heads.block import BlockHead, CachedAttention, admit_blocks
from foretoken.heads.medusa import MedusaHead
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import PagedCache
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.random_heads import HEADS, head_drafter, random_head
from tests.helpers.usual import some_of

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
PROMPTS = [token_ids(1 + 8 * i, seed=i) if i % 2 else token_ids(7 + 3 * i, seed=i) * 2 for i in range(7)]
BLOCK = 4


@pytest.fixture(scope="module")
def decoder(pair: SimpleNamespace) -> Decoder:
    return load_decoder(pair.target, dtype="float32").requires_grad_(False)


def fresh_states(decoder: Decoder, text: Sequence[int], layers: Sequence[int]) -> dict[int, Tensor]:
    """The target's states of a text, from a run over all of it: every node of a draft, every turn, and every kind of
    head ask for those of the same texts.
    """
    if not text:
        return {layer: torch.empty(0, decoder.config.hidden_size) for layer in layers}
    return _states_of(decoder, tuple(text), tuple(layers))


@functools.lru_cache(maxsize=4096)
@torch.no_grad()
def _states_of(decoder: Decoder, text: tuple[int, ...], layers: tuple[int, ...]) -> dict[int, Tensor]:
    attention = PackedAttention(decoder.config, 1, len(text))
    return decoder(torch.tensor(text), torch.arange(len(text)), attention, taps=layers).taps


@torch.no_grad()
def expected_logits(head: Head, decoder: Decoder, text: Sequence[int], draft_tokens: Sequence[int]) -> Tensor:
    """What the head says at the places of `draft_tokens` and one more behind the text, [len(draft_tokens) + 1, V]."""
    states = fresh_states(decoder, text[:-1], head.hidden_layers())
    before, found = [text[-1], *draft_tokens], []
    if isinstance(head, MedusaHead):
        state = decoder.final_norm(states[decoder.config.num_layers][-1:])
        for place in range(min(len(before), head.config.num_heads)):
            beside = decoder.embed(torch.tensor(before[: place + 1])).view(1, -1) if head.config.is_sequential else None
            found.append(head.predict(place, state, beside, decoder)[0])
    else:
        assert isinstance(head, BlockHead)
        config = head.config
        cache = PagedCache(config.layer, torch.float32, torch.device("cpu"), 512)
        cache.open(0)
        admitted = admit_blocks(cache, [0], [len(text) - 1], [config.block_size], config.is_causal)
        attention = CachedAttention(cache, admitted)
        inputs = torch.tensor([text[-1], *[config.mask_token] * (config.block_size - 1)])
        hidden = head.run(inputs, head.features(states), attention.positions, attention, decoder)
        hidden = hidden[config.block_size - config.num_places :]
        for place, token in enumerate(before[: config.num_places]):
            row = hidden[place : place + 1]
            found.append(head.correct(head.logits(row, decoder), torch.tensor([token]))[0])
    return head.vocabulary.expand(torch.stack(found))


class CheckedHead:
    """`inner` with every chain compared with the oracle's, wherever states are complete."""

    oracle = staticmethod(expected_logits)

    def __init__(self, inner: MedusaDrafter | BlockDrafter, decoder: Decoder) -> None:
        self.inner, self.name, self.decoder = inner, inner.name, decoder
        self.texts: dict[int, list[int]] = {}
        self.num_checked = self.num_unread = 0
        self.largest_batch = 0
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}  # a second turn asks for the same again

    def expected(self, text: Sequence[int], draft_tokens: Sequence[int]) -> Tensor:
        """What the oracle says behind a text and draft tokens."""
        key = tuple(text), tuple(draft_tokens)
        if key not in self.known:
            self.known[key] = self.oracle(self.inner.head, self.decoder, text, draft_tokens)
        return self.known[key]

    def start(self, request: object) -> None:
        self.texts[request.request_id] = list(request.prompt_ids)
        self.inner.start(request)

    def propose(self, batch: Batch) -> Draft:
        draft = self.inner.propose(batch)
        self.largest_batch = max(self.largest_batch, sum(length > 0 for length in draft.lengths))
        for b, entry in enumerate(batch.decoding):
            text = self.texts[entry.request.request_id]
            draft_tokens = draft.tokens[draft.offsets[b] : draft.offsets[b + 1]].tolist()
            assert entry.round_start == len(text)
            if len(entry.pending) > 1 or (len(text) == 1 and isinstance(self.inner, MedusaDrafter)):
                assert not draft_tokens
                self.num_unread += 1
                continue
            head = self.inner.head
            places = head.config.num_heads if isinstance(head, MedusaHead) else head.config.num_places
            assert len(draft_tokens) == min(entry.num_draft, places)
            if draft_tokens:
                logits = self.expected(text, draft_tokens[:-1])
                assert draft_tokens == logits.argmax(-1).tolist()
                self.num_checked += 1
        return draft

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        for b, entry in enumerate(batch.decoding):
            self.texts[entry.request.request_id] += verdict.emitted(b)
        self.inner.commit(batch, draft, verdict, feedback)

    def hidden_layers(self) -> tuple[int, ...]:
        return self.inner.hidden_layers()

    def read_hidden(self, rows: Sequence[object]) -> None:
        self.inner.read_hidden(rows)

    def export_states(self, request_id: int, start: int, stop: int) -> object:
        return self.inner.export_states(request_id, start, stop)

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        self.inner.adopt_states(request_id, blocks)

    def finish(self, request_id: int) -> None:
        del self.texts[request_id]
        self.inner.finish(request_id)


class CheckedReleasing(CheckedHead):
    def release(self, request_id: int) -> None:
        self.inner.release(request_id)


def engine_of(
    decoder: Decoder, name: str, num_slots: int, limits: SchedulerConfig | None = None, head: Head | None = None
) -> tuple[Engine, CheckedHead, SpecConfig]:
    target = PagedModel(decoder, num_slots, BLOCK)
    drafter = head_drafter(head or random_head(name, decoder.config), target)
    checked = (CheckedReleasing if isinstance(drafter, BlockDrafter) else CheckedHead)(drafter, decoder)
    spec = SpecConfig(drafter.name, num_draft=5)
    group = DrafterGroup(target)
    group.add(drafter_key(spec), checked)
    return Engine(target, group, limits=limits), checked, spec


def run(
    engine: Engine, prompts: Sequence[list[int]], specs: Sequence[SpecConfig], params: SamplingParams = GREEDY
) -> list[RequestState]:
    states = [engine.submit(prompt, params, spec) for prompt, spec in zip(prompts, specs, strict=True)]
    while engine.has_work:
        engine.step()
    assert all(state.error is None and not state.stats.draft_failures for state in states)
    return states


@pytest.mark.parametrize(
    ("name", "num_slots", "chunk"),
    some_of(
        [(name, *room) for name in HEADS for room in ((4096, 512), (112, 11))],
        {*((name, 112, 11) for name in HEADS), ("medusa", 4096, 512), ("block", 4096, 512)},
    ),
)
def test_every_chain_is_that_of_a_fresh_run_over_the_text(
    decoder: Decoder, name: str, num_slots: int, chunk: int
) -> None:
    """Ragged batches with plain requests, requests that are preempted, prefixes that are adopted the second time."""
    engine, checked, spec = engine_of(decoder, name, num_slots, SchedulerConfig(8, chunk))
    specs = [replace(spec, num_draft=1 + i) if i % 4 != 3 else SpecConfig() for i in range(len(PROMPTS))]
    plain = run(engine, PROMPTS, [SpecConfig()] * len(PROMPTS), replace(GREEDY, tenant="plain"))
    for turn in range(2):
        found = run(engine, PROMPTS, specs)
        assert [state.output_ids for state in found] == [state.output_ids for state in plain]
        assert checked.num_checked > 20 * (turn + 1)
        if num_slots > 1000:
            assert checked.largest_batch >= 5
        if turn and num_slots > 1000:
            assert sum(state.stats.num_cached_tokens for state in found) > 40, "prefixes are adopted"
    assert num_slots > 1000 or engine.stats.num_preempted > 0
    check_idle(engine)


@pytest.mark.parametrize("name", ["medusa", "block"])
def test_rounds_without_a_draft_are_read_later(decoder: Decoder, name: str) -> None:
    """Another drafter's rounds, and rounds with no draft tokens, come as states."""
    engine, checked, spec = engine_of(decoder, name, 4096)
    params = replace(GREEDY, max_tokens=30)
    state = engine.submit(PROMPTS[4], params, spec)
    request = state.request_id
    for step in range(8):
        engine.step()
        if isinstance(checked.inner, BlockDrafter) and step:
            own = checked.inner.kept[request]
            assert own.num_rows == len(state.tokens) - 1
    engine.abort(request)


def test_context_keys_are_those_of_one_fresh_pass(decoder: Decoder) -> None:
    """After many rounds the cache holds what one pass over all features writes."""
    engine, checked, spec = engine_of(decoder, "block", 4096)
    state = engine.submit(PROMPTS[6], replace(GREEDY, max_tokens=40), spec)
    for _ in range(12):
        engine.step()
    drafter = checked.inner
    assert isinstance(drafter, BlockDrafter)
    length = drafter.cache.length(state.request_id)
    assert length > len(PROMPTS[6])
    states = fresh_states(decoder, state.tokens[:length], drafter.hidden_layers())
    cache = PagedCache(drafter.head.config.layer, torch.float32, torch.device("cpu"), 512, BLOCK)
    cache.open(0)
    admitted = admit_blocks(cache, [0], [length], [2], True)
    attention = CachedAttention(cache, admitted)
    drafter.head.run(torch.tensor([1, 5]), drafter.head.features(states), attention.positions, attention, decoder)
    admitted.commit(cache)
    for held, fresh in zip(drafter.cache.pool.keys, cache.pool.keys, strict=True):
        table = drafter.cache.tables[state.request_id].blocks
        own = torch.cat([held[:, block * BLOCK : (block + 1) * BLOCK] for block in table], 1)[:, :length]
        torch.testing.assert_close(own, fresh[:, :length], atol=1e-4, rtol=0)
    engine.abort(state.request_id)


def test_a_request_takes_room_from_one_that_does_not_draft(decoder: Decoder) -> None:
    """A cache of the drafter's own that is too small for both: what gives way is made again from the features."""
    drafter = head_drafter(random_head("block", decoder.config), PagedModel(decoder, 4096, BLOCK))
    assert isinstance(drafter, BlockDrafter)
    small = PagedCache(drafter.head.config.layer, torch.float32, torch.device("cpu"), 64, BLOCK)
    drafter.cache = small
    spec, texts = SpecConfig("block", num_draft=3), (token_ids(40, seed=1), token_ids(45, seed=2))
    entries = []
    for number, text in enumerate(texts):
        request = Request(number, tuple(text), GREEDY, spec, seed=0)
        drafter.start(request)
        states = fresh_states(decoder, text[:-1], drafter.hidden_layers())
        drafter.read_hidden([HiddenRows(number, 0, tuple(text[:-1]), text[-1], states)])
        entries.append(BatchEntry(request, len(text) - 1, (text[-1],), True, 3))
    both = drafter.propose(Batch(tuple(entries)))
    assert sorted(both.lengths) == [0, 3], "none gives way in a round in which both draft"
    for number in (0, 1, 0):
        draft = drafter.propose(Batch((entries[number],)))
        text = texts[number]
        logits = expected_logits(drafter.head, decoder, text, draft.tokens[:-1].tolist())
        assert draft.tokens.tolist() == logits.argmax(-1).tolist()
        assert drafter.cache.length(1 - number) == 0


def exact_block(decoder: Decoder) -> BlockHead:
    """A block drafter that is right about a target which looks at the last token only: the correction is its table."""
    config = decoder.config
    layer = replace(config, model_type="qwen3", num_layers=1, qk_norm=True)
    head = random_head("block", config)
    assert isinstance(head, BlockHead)
    own = replace(head.config, layer=layer, markov_rank=config.hidden_size)
    head = BlockHead(own, head.vocabulary)
    head.initialise(0)
    with torch.no_grad():
        head.norm.weight.zero_()
        tokens = torch.arange(config.vocab_size)
        head.markov_head.markov_w1.weight.copy_(decoder.final_norm(decoder.embed(tokens)))
        head.markov_head.markov_w2.weight.copy_(decoder.lm_head.weight)
    return head.requires_grad_(False)


@pytest.fixture(scope="module")
def forgetful(pair: SimpleNamespace) -> Decoder:
    """A target whose layers add nothing."""
    decoder = load_decoder(pair.target, dtype="float32").requires_grad_(False)
    for layer in decoder.layers:
        layer.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return decoder


@pytest.mark.parametrize("tree", ["chain", "static", "best_first"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_is_right_is_always_accepted(forgetful: Decoder, tree: str, temperature: float) -> None:
    """The correction sees the token before, and the distribution told is the one drawn from: acceptance is 100 %."""
    head = exact_block(forgetful)
    target = PagedModel(forgetful, 4096, BLOCK)
    group = DrafterGroup(target)
    specs = [
        SpecConfig("block", num_draft=1 + i, tree=tree, branching=None if tree == "chain" else 1) for i in range(5)
    ]
    for spec in specs:
        if drafter_key(spec) not in group.drafters:
            group.add(drafter_key(spec), BlockDrafter(head, target))
    engine = Engine(target, group)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature)
    states = run(engine, PROMPTS[:5], specs, params)
    assert [state.stats.num_accepted for state in states] == [state.stats.num_drafted for state in states]
    assert all(state.stats.num_drafted > 10 for state in states)


def test_eos_inside_an_accepted_run(forgetful: Decoder) -> None:
    """Any token of a text that is drafted whole may be its end."""
    head, prompt, cut_runs = exact_block(forgetful), PROMPTS[2], 0
    target = PagedModel(forgetful, 4096, BLOCK)
    (plain,) = run(Engine(target, DrafterGroup(target)), [prompt], [SpecConfig()], replace(GREEDY, max_tokens=20))
    spec = SpecConfig("block", num_draft=6)
    for eos in plain.output_ids:
        group = DrafterGroup(target)
        group.add(drafter_key(spec), BlockDrafter(head, target))
        engine = Engine(target, group, eos_token_ids=(eos,))
        (state,) = run(engine, [prompt], [spec], SamplingParams(max_tokens=20))
        assert state.output_ids == plain.output_ids[: plain.output_ids.index(eos) + 1]
        assert state.finish_reason == "stop"
        cut_runs += state.provenance[-1].kind == "accepted"
    assert cut_runs > 5


@pytest.mark.parametrize("name", ["medusa", "medusa:hydra"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_medusas_tree_holds_the_likeliest_ranks_and_learns_from_rounds(
    decoder: Decoder, name: str, temperature: float
) -> None:
    head = random_head(name, decoder.config)
    assert isinstance(head, MedusaHead)
    target = PagedModel(decoder, 4096, BLOCK)
    drafter, drafts = MedusaDrafter(head, target), []
    original = drafter.propose

    def record(batch: Batch) -> Draft:
        draft = original(batch)
        for entry in batch.decoding:
            text = texts[entry.request.request_id]
            own = drafter._requests[entry.request.request_id]
            if own.tree is None or not own.tree.tokens:
                continue
            for node, (rank, parent, _, _) in enumerate(own.tree.ranks):
                path = own.tree.path(parent) if parent >= 0 else []
                logits = expected_logits(head, decoder, text.tokens, path)[len(path)]
                assert own.tree.tokens[node] == logits.topk(rank + 1).indices[-1]
            drafts.append(draft)
            assert draft.mass is None
        return draft

    drafter.propose = record  # type: ignore[method-assign]
    spec = SpecConfig("medusa", num_draft=12, tree="static")
    group = DrafterGroup(target)
    group.add(drafter_key(spec), drafter)
    engine = Engine(target, group)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature)
    texts = {}
    for prompt in PROMPTS[1:4]:
        state = engine.submit(prompt, params, spec)
        texts[state.request_id] = state
    chances = dict.fromkeys(texts)
    while engine.has_work:
        engine.step()
        for request in texts:
            if request in drafter._requests:
                chances[request] = drafter._requests[request].chances
    assert drafts
    assert max(draft.num_nodes for draft in drafts) >= 24
    assert all(own._seen[0] > 10 for own in chances.values())
