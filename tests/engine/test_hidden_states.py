"""Drafters that read hidden states get those of every committed position, once and in order, however rows were run.

The oracle is one plain forward over the whole text in float32: transformers' `output_hidden_states`, and our decoder.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.group import DrafterGroup
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.interface import ForwardOutput, LanguageModel, Segment
from foretoken.model.loader import load_decoder
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, token_ids, variant
from tests.helpers.heads import Recording, RecordingHead, ReleasingHead, SharingHead
from tests.helpers.specs import key_of, spec_of

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
PROMPTS = [token_ids(5 + 9 * i, seed=i) if i % 2 else token_ids(7 + 3 * i, seed=i) * 2 for i in range(7)]
BLOCK = 4


class Oracle:
    """Hidden states of a whole text, by layer [T, D]."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.no_grad()
    def __call__(self, text: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple(one[0] for one in self._model(torch.tensor([text]), output_hidden_states=True).hidden_states)


def check(recording: Recording, text: Sequence[int], states: Sequence[Tensor]) -> None:
    """All positions that have a row: every committed token but the last, and what was accepted beyond a cut."""
    assert recording.tokens[: len(text) - 1] == list(text)[:-1]
    assert len(recording.tokens) >= len(text) - 1
    for layer, rows in recording.states.items():
        got = torch.stack(rows)[: len(text) - 1]
        assert got.std() > 0.1
        torch.testing.assert_close(got, states[layer][: len(text) - 1], atol=1e-4, rtol=0)


def engine_of(
    target: LanguageModel, heads: dict[str, RecordingHead], draft: Path, limits: SchedulerConfig | None = None
) -> Engine:
    group = DrafterGroup(target)
    for name, head in heads.items():
        group.add(key_of(name, str(draft)), head)
    return Engine(target, group, limits=limits)


def run(
    engine: Engine, prompts: Sequence[list[int]], specs: Sequence[SpecConfig], tenant: str = ""
) -> list[RequestState]:
    params = replace(GREEDY, tenant=tenant)
    states = [engine.submit(prompt, params, spec) for prompt, spec in zip(prompts, specs, strict=True)]
    while engine.has_work:
        engine.step()
    assert all(state.error is None and not state.stats.draft_failures for state in states)
    return states


def heads_of(kind: type[RecordingHead], pair: SimpleNamespace, vocab_size: int) -> dict[str, RecordingHead]:
    """Chains and trees, lookups and a model, with different layers."""
    return {
        "ngram": kind(NgramDrafter(), (1,)),
        "recycling": kind(RecyclingDrafter(vocab_size), (0, 1)),
        "suffix": kind(SuffixDrafter(()), (0,)),
        "lookahead": kind(LookaheadDrafter(), (1,)),  # with probes behind its rows
        "draft_model": kind(DraftModelDrafter(PagedModel(load_decoder(pair.draft), 4096, BLOCK)), (1,)),
    }


@pytest.mark.parametrize("kind", [RecordingHead, ReleasingHead, SharingHead])
@pytest.mark.parametrize(("num_slots", "chunk"), [(4096, 512), (4096, 5), (112, 11)], ids=["whole", "chunks", "tight"])
def test_every_position_once_and_equal_to_a_plain_forward(
    pair: SimpleNamespace, kind: type[RecordingHead], num_slots: int, chunk: int
) -> None:
    """Prompts in one piece, in chunks, and with requests that are preempted and read again; four drafters and plain
    requests in one batch, then the same prompts once more.
    """
    decoder = load_decoder(pair.target, dtype="float32")
    target, oracle = PagedModel(decoder, num_slots, BLOCK), Oracle(pair.target)
    heads = heads_of(kind, pair, target.vocab_size)
    engine = engine_of(target, heads, pair.draft, SchedulerConfig(8, chunk))
    names = [*heads, None, "recycling"]
    specs = [SpecConfig() if name is None else spec_of(name, pair.draft, num_draft=5) for name in names]
    for _ in range(2):
        found = run(engine, PROMPTS, specs)
        for state, name in zip(found, names, strict=True):
            if name is None:
                continue
            recording = heads[name].finished[state.request_id]
            states = oracle(state.tokens)
            check(recording, state.tokens, states)
            # Our own decoder over the whole text, which other tests compare with transformers.
            own = decoder(
                torch.tensor(state.tokens),
                torch.arange(len(state.tokens)),
                PackedAttention(decoder.config, 1, len(state.tokens)),
                taps=(0, 1),
            ).taps
            check(recording, state.tokens, [own[0].detach(), own[1].detach()])
    stats = engine.stats
    assert stats.num_accepted > 20, "accepted paths are in the streams"
    assert stats.num_probed
    assert bool(stats.num_preempted) == (num_slots == 112)
    recordings = [one for head in heads.values() for one in head.finished.values()]
    assert any(one.num_restarts for one in recordings) == (num_slots == 112 and kind is not RecordingHead)
    assert any(one.num_adopted for one in recordings) == (kind is SharingHead)
    check_idle(engine)


@pytest.mark.parametrize("case", ["transformers", "sliding window", "strict", "last layer"])
def test_other_targets(pair: SimpleNamespace, tmp_path: Path, case: str) -> None:
    if case == "transformers":
        folder = tiny_checkpoint(tmp_path, "gpt2")
    else:
        folder = variant(tmp_path, "mistral-sliding" if case == "sliding window" else "llama")
    target = open_model(
        folder, dtype="float32", cache_tokens=4096, numerics="strict" if case == "strict" else "default"
    )
    layer = target.num_layers if case == "last layer" else 2
    heads = {"recycling": RecordingHead(RecyclingDrafter(target.vocab_size), (layer,))}
    if case == "transformers":  # its last hidden state comes behind the final norm
        heads["recycling"].layers = (1,)
    engine, oracle = engine_of(target, heads, pair.draft, SchedulerConfig(8, 16)), Oracle(folder)
    for state in run(engine, PROMPTS[:4], [SpecConfig("recycling", num_draft=6)] * 4):
        states, recording = oracle(state.tokens), heads["recycling"].finished[state.request_id]
        if case == "last layer":
            assert isinstance(target, PagedModel)
            recording.states[layer] = list(target.decoder.norm(torch.stack(recording.states[layer])).detach())
        check(recording, state.tokens, states)
    assert engine.stats.num_accepted >= 3


def test_a_request_that_wants_hidden_states_adopts_only_what_its_drafter_can_adopt(pair: SimpleNamespace) -> None:
    """Blocks without states are computed again; with states they are adopted, up to the first block that has none."""
    prompt, oracle = token_ids(42, seed=8), Oracle(pair.target)
    target = PagedModel(load_decoder(pair.target, dtype="float32"), 1024, BLOCK)
    plain, sharing = RecordingHead(NgramDrafter(), (1,)), SharingHead(RecyclingDrafter(target.vocab_size), (0, 1))
    engine = engine_of(target, {"ngram": plain, "recycling": sharing}, pair.draft)

    def ask(name: str | None, text: list[int] = prompt, tenant: str = "") -> int:
        spec = SpecConfig() if name is None else SpecConfig(name, num_draft=4)
        (state,) = run(engine, [text], [spec], tenant=tenant)
        if name is not None:
            head = {"ngram": plain, "recycling": sharing}[name]
            check(head.finished[state.request_id], state.tokens, oracle(state.tokens))
        return state.stats.num_cached_tokens

    assert [ask(None), ask(None)] == [0, 40]
    assert [ask("ngram"), ask("ngram")] == [0, 0]  # it cannot adopt
    assert [ask("recycling"), ask("recycling")] == [0, 40]  # the first one attached its states to known blocks
    assert ask("recycling", [*prompt[:22], *token_ids(9, seed=3)]) == 20
    assert [ask("recycling", tenant="b"), ask("recycling", tenant="b")] == [0, 40]
    assert ask(None) == 40  # nobody else is affected
    # A longer text: a plain request publishes more blocks, without states.
    longer = [*prompt, *token_ids(20, seed=4)]
    assert ask(None, longer) == 40
    assert ask(None, longer) == 60
    assert ask("recycling", longer) == 40
    assert ask("recycling", longer) == 60
    check_idle(engine)


def test_states_are_evicted_with_their_blocks(pair: SimpleNamespace) -> None:
    target = PagedModel(load_decoder(pair.target, dtype="float32"), 160, BLOCK)
    head, oracle = SharingHead(NgramDrafter(), (1,)), Oracle(pair.target)
    engine = engine_of(target, {"ngram": head}, pair.draft)
    for seed in (1, 1, 2, 3, 4, 1, 4):
        (state,) = run(engine, [token_ids(60, seed=seed)], [SpecConfig("ngram", num_draft=3)])
        check(head.finished[state.request_id], state.tokens, oracle(state.tokens))
        index = target.allocator._index
        assert index._attached.keys() <= index._keys.keys()
    assert target.prefix_stats.num_evicted_blocks > 0
    assert sum(one.num_adopted > 0 for one in head.finished.values()) >= 2


def test_requests_that_begin_alike_wait_for_each_other_if_they_can_share(pair: SimpleNamespace) -> None:
    """A head that cannot share is not kept waiting for a prefix that it could not adopt."""
    prompt = token_ids(80, seed=2)
    plain, reader = SpecConfig(), SpecConfig("ngram", num_draft=3)
    for kind, first, num_running, num_cached in (
        (RecordingHead, reader, 2, 0),
        (SharingHead, reader, 1, 76),
        (SharingHead, plain, 2, 0),  # which leaves no states
    ):
        target = PagedModel(load_decoder(pair.target, dtype="float32"), 1024, BLOCK)
        engine = engine_of(target, {"ngram": kind(NgramDrafter(), (1,))}, pair.draft, SchedulerConfig(8, 16))
        states = [engine.submit(prompt, GREEDY, spec) for spec in (first, reader)]
        engine.step()
        engine.step()
        assert len(engine.scheduler.running) == num_running
        while engine.has_work:
            engine.step()
        assert states[1].stats.num_cached_tokens == num_cached


def test_nothing_is_tapped_when_nobody_reads(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rows nor layers; with a reader in the batch prompt rows of its own requests alone."""
    with LLM(pair.target, dtype="float32", cache_tokens=2048, max_prompt_tokens=16) as llm:
        asked: list[tuple[tuple[int, ...], dict[int, list[int]]]] = []
        forward = llm.target.forward

        def counting(tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> object:
            rows = {one.sequence: [one.num_taps, one.num_rows, one.num_logits] for one in segments}
            asked.append((tuple(taps), rows))
            return forward(tokens, segments, taps)

        monkeypatch.setattr(llm.target, "forward", counting)
        specs = [SpecConfig("ngram", num_draft=4), SpecConfig("recycling", num_draft=4), SpecConfig()]
        llm.generate(PROMPTS[:3], GREEDY, specs)
        assert all(not taps and not any(row[0] for row in rows.values()) for taps, rows in asked)
        asked.clear()
        head = llm._drafters.drafters[key_of("ngram")] = RecordingHead(NgramDrafter(), (1,))
        llm.generate(PROMPTS[3:6], GREEDY, specs)
        assert {taps for taps, _ in asked} == {(1,), ()}  # others go on after the head's request
        (reader,) = head.finished
        for taps, rows in asked:
            for request_id, (num_taps, num_rows, num_logits) in rows.items():
                if request_id == reader:
                    assert num_taps == num_rows
                else:
                    assert num_taps == (num_logits if taps else 0)
        llm._drafters.drafters.pop(key_of("ngram"))


def test_a_reader_beside_a_drafter_that_runs_the_target(pair: SimpleNamespace) -> None:
    """Hidden states of some requests, early passes of the others in one batch: the reader finds its rows."""
    target, oracle = PagedModel(load_decoder(pair.target, dtype="float32"), 2048, BLOCK), Oracle(pair.target)
    head = RecordingHead(NgramDrafter(), (0, 1))
    group = DrafterGroup(target)
    group.add(key_of("ngram"), head)
    group.add(key_of("early_exit"), EarlyExitDrafter(target))
    engine = Engine(target, group, limits=SchedulerConfig(8, 7))
    exits = SpecConfig("early_exit", exit_layer="auto", num_draft=3)
    specs = [exits, SpecConfig("ngram", num_draft=4), exits, SpecConfig("ngram", num_draft=2)]
    states = run(engine, PROMPTS[:4], specs)
    for state in states[1::2]:
        check(head.finished[state.request_id], state.tokens, oracle(state.tokens))
    expected = run(Engine(target, DrafterGroup(target)), PROMPTS[:4], [SpecConfig()] * 4)
    assert [state.output_ids for state in states] == [state.output_ids for state in expected]


def test_layers_that_the_target_does_not_have(pair: SimpleNamespace, failed_drafters: list[str]) -> None:
    target = PagedModel(load_decoder(pair.target, dtype="float32"), 1024, BLOCK)
    engine = engine_of(target, {"ngram": RecordingHead(NgramDrafter(), (9,))}, pair.draft)
    with pytest.warns(UserWarning, match="taps \\(9,\\) of a target with 2 layers"):
        state = engine.submit(PROMPTS[1], GREEDY, SpecConfig("ngram", num_draft=3))
    while engine.has_work:
        engine.step()
    assert len(state.output_ids) == 14
    assert state.stats.disabled_drafters.keys() == {"ngram"}
    assert failed_drafters


def test_a_request_that_waits_asks_no_step_for_hidden_states(pair: SimpleNamespace) -> None:
    """Nor does it take time of the steps of others: what drafters want is asked for the requests of a step."""
    target = PagedModel(load_decoder(pair.target, dtype="float32"), 4096, BLOCK)
    head = RecordingHead(NgramDrafter(), (1,))
    engine = engine_of(target, {"ngram": head}, pair.draft, SchedulerConfig(max_batch_size=1))
    plain = engine.submit(PROMPTS[0], GREEDY, SpecConfig())
    engine.submit(PROMPTS[1], GREEDY, spec_of("ngram", pair.draft, num_draft=3))
    tapped: list[tuple[bool, bool]] = []
    forward = target.forward

    def watched(tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        tapped.append((plain.finish_reason is None, bool(taps)))
        return forward(tokens, segments, taps)

    target.forward = watched  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert {(True, False), (False, True)} == set(tapped)


def test_a_drafter_that_was_taken_out_is_not_held_on_to(pair: SimpleNamespace) -> None:
    """Its head may be large; nobody need come with its key again."""
    target = PagedModel(load_decoder(pair.target, dtype="float32"), 2048, BLOCK)
    engine = engine_of(target, {"ngram": RecordingHead(NgramDrafter(), (1,))}, pair.draft)
    run(engine, PROMPTS[:1], [SpecConfig("ngram", num_draft=3)])
    head = weakref.ref(engine.drafters.drafters.pop(key_of("ngram", str(pair.draft))))
    gc.collect()
    assert head() is None
