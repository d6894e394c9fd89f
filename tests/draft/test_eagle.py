"""The EAGLE drafter in the engine: every chain and every tree is what its head makes of a fresh run over the text.

The oracle runs target and head over the whole text for each draft token, without a cache. That the network is right is
shown in `tests/heads/test_eagle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.core import Batch, Draft
from foretoken.draft import eagle, head_drafter
from foretoken.draft.eagle import EagleDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.engine import Engine
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.engine.startup.start_profile import measure_start, model_drafters
from foretoken.heads.base import Head
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.kind import with_head_kind
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.interface import SharesWeights
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.draft.test_trained_heads import BLOCK, GREEDY, PROMPTS, CheckedReleasing, fresh_states, run
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.tiny_heads import eagle_head, tiny_head
from tests.helpers.usual import some_of

KINDS = {
    "3": {},
    "1": {"version": 1},
    "3.1": {"fc_norm": True, "norm_output": True},
    "narrow": {"hidden_size": 40},
    "norms": {"norm_before_fc": True, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def decoder(pair: SimpleNamespace) -> Decoder:
    return load_decoder(pair.target, dtype="float64").requires_grad_(False)


@torch.no_grad()
def expected_logits(head: EagleHead, decoder: Decoder, text: Sequence[int], draft_tokens: Sequence[int]) -> Tensor:
    """What the head says behind the text and `draft_tokens`, [V]: the whole text anew for each of them."""
    features = head.features(fresh_states(decoder, text[:-1], head.hidden_layers()), decoder)
    tokens = [*text[1:], *draft_tokens]
    while True:
        num_rows = len(features)
        attention = PackedAttention(head.config.layer, 1, num_rows)
        rows = head.run(torch.tensor(tokens[:num_rows]), features, torch.arange(num_rows), attention, decoder)
        if num_rows == len(tokens):
            return head.vocabulary.expand(head.logits(rows.output[-1:], decoder))[0]
        features = torch.cat((features, rows.feedback[-1:]))


class CheckedEagle(CheckedReleasing):
    """Compares every path of every draft, of greedy requests, with the oracle."""

    has_little_room = False
    oracle = staticmethod(expected_logits)

    def propose(self, batch: Batch) -> Draft:
        draft = self.inner.propose(batch)
        self.largest_batch = max(self.largest_batch, sum(length > 0 for length in draft.lengths))
        for b, entry in enumerate(batch.decoding):
            text = self.texts[entry.request.request_id]
            assert entry.round_start == len(text)
            if len(entry.pending) > 1 or len(text) == 1 or not entry.num_draft:
                assert not draft.lengths[b]
                self.num_unread += 1
                continue
            assert draft.lengths[b] == entry.num_draft or (self.has_little_room and draft.lengths[b] < entry.num_draft)
            tokens = draft.tokens[draft.offsets[b] : draft.offsets[b + 1]].tolist()
            parents = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
            for node, path in enumerate(draft.paths(b)[1:]):
                logits = self.expected(text, path[:-1])
                rank = sum(parent == parents[node] for parent in parents[:node])
                assert logits.topk(rank + 1).indices[-1] == tokens[node]
                self.num_checked += 1
        return draft


def engine_of(
    decoder: Decoder, head: EagleHead, num_slots: int, chunk: int = 512, **options: object
) -> tuple[Engine, CheckedEagle, SpecConfig]:
    target = PagedModel(decoder, num_slots, BLOCK)
    drafter = EagleDrafter(CachedEagle(head, target))
    checked, spec = CheckedEagle(drafter, decoder), SpecConfig("eagle", num_draft=5, **options)
    checked.has_little_room = num_slots < 1000
    group = DrafterGroup(target)
    group.add(drafter_key(spec), checked)
    return Engine(target, group, limits=SchedulerConfig(8, chunk)), checked, spec


WHOLE, TIGHT = (4096, 512), (112, 11)  # slots of the target's cache and tokens of a prompt per step
FRESH_RUNS = [  # the other trees and caches: proof/test_eagle.py
    *(("3", "chain", *WHOLE), ("3", "best_first", *TIGHT), ("1", "chain", *TIGHT), ("narrow", "best_first", *WHOLE)),
    *(("3.1", "chain", *WHOLE), ("norms", "best_first", *WHOLE)),
]
USUAL = FRESH_RUNS[:4]  # the flags of 3.1 and norms act in the network alone


@pytest.mark.parametrize(("kind", "tree", "num_slots", "chunk"), some_of(FRESH_RUNS, USUAL))
def test_every_draft_is_that_of_a_fresh_run_over_the_text(
    decoder: Decoder, kind: str, tree: str, num_slots: int, chunk: int
) -> None:
    """Ragged batches with plain requests, requests that are preempted, prefixes that are adopted the second time."""
    check_fresh_run(decoder, kind, tree, num_slots, chunk)


def check_fresh_run(decoder: Decoder, kind: str, tree: str, num_slots: int, chunk: int) -> None:
    """Every draft of two turns of an engine is what the head gives over the text alone."""
    head = eagle_head(decoder.config, **KINDS[kind]).double()
    engine, checked, spec = engine_of(decoder, head, num_slots, chunk, tree=tree)
    specs = [replace(spec, num_draft=1 + i) if i % 4 != 3 else SpecConfig() for i in range(len(PROMPTS))]
    plain = run(engine, PROMPTS, [SpecConfig()] * len(PROMPTS), replace(GREEDY, tenant="plain"))
    for turn in range(2):
        found = run(engine, PROMPTS, specs)
        assert [state.output_ids for state in found] == [state.output_ids for state in plain]
        assert checked.num_checked > 40 * (turn + 1)
        if num_slots > 1000:
            assert checked.largest_batch >= 4
            assert not turn or sum(state.stats.num_cached_tokens for state in found) > 40
    assert num_slots > 1000 or engine.stats.num_preempted > 0
    check_idle(engine)


def test_long_texts_in_pieces_and_states_of_rounds_without_a_draft(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "_PIECE_TOKENS", 7)
    monkeypatch.setattr(head_drafter, "_MAX_UNREAD", 3)
    engine, checked, spec = engine_of(decoder, eagle_head(decoder.config).double(), 4096, 16)
    auto = [replace(spec, num_draft=n) for n in (0, 2, 2)]
    states = run(engine, [token_ids(n, seed=n) for n in (50, 51, 64)], auto)
    assert checked.num_checked > 20
    assert states[0].stats.num_drafted == 0


def test_the_heads_cache_gives_way(decoder: Decoder) -> None:
    """A request that does not draft in a round loses what the head holds of it, and gets it again."""
    engine, checked, spec = engine_of(decoder, eagle_head(decoder.config).double(), 4096)
    inner, held = checked.inner, []
    small = CachedEagle(inner.head, PagedModel(decoder, 40, BLOCK)).cache
    inner.runner.cache = inner.cache = small
    propose = inner.propose

    def in_turns(batch: Batch) -> Draft:
        number = max(entry.round_start for entry in batch.decoding)
        asked = [min(one.num_draft, 3 * ((one.request.request_id + number) % 2)) for one in batch.entries]
        return propose(
            Batch(tuple(replace(one, num_draft=most) for one, most in zip(batch.entries, asked, strict=True)))
        )

    def check(batch: Batch) -> Draft:
        draft = in_turns(batch)
        held.append([small.length(entry.request.request_id) for entry in batch.decoding])
        for b, entry in enumerate(batch.decoding):
            text = checked.texts[entry.request.request_id]
            tokens = draft.tokens[draft.offsets[b] : draft.offsets[b + 1]].tolist()
            for place, token in enumerate(tokens):
                assert token == expected_logits(inner.head, decoder, text, tokens[:place]).argmax()
                checked.num_checked += 1
        return draft

    checked.propose = check  # type: ignore[method-assign]
    run(engine, [token_ids(20, seed=i) for i in range(2)], [spec] * 2)
    assert checked.num_checked > 15
    assert any(one == 0 for one, _ in held[2:])
    assert all(0 in lengths for lengths in held)


def test_costs_are_measured_without_a_trace(pair: SimpleNamespace) -> None:
    target = PagedModel(load_decoder(pair.target, dtype="float32"), 2048, 16)
    drafter, spec = EagleDrafter(CachedEagle(eagle_head(target.config), target)), SpecConfig("eagle")
    # More time than any machine needs: a count is run five times at most.
    profile = measure_start(target, model_drafters([(spec, drafter)]), "tiny", budget_s=60.0)
    assert profile is not None
    draft_seconds = dict(profile.drafters["eagle"].guesses.points)
    assert set(draft_seconds) == {1, 2, 4, 8}
    assert draft_seconds[8] > draft_seconds[1]  # it really drafted
    assert not drafter._texts
    assert drafter.cache.num_free_tokens() == drafter.cache.capacity_tokens
    drafter.cache.check()


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_targets_that_run_through_transformers(tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    from foretoken.heads.checkpoint import save_head
    from foretoken.model.architecture import ModelConfig

    folder = tmp_path_factory.mktemp("foreign")
    target = tiny_checkpoint(folder / "target", family)
    with LLM(target, cache_tokens=1024, dtype="float32") as llm:
        width = llm.target.embed(torch.zeros(1, dtype=torch.int64)).shape[-1]
        layers = llm.target.num_layers
        config = ModelConfig("llama", llm.target.vocab_size, width, 40, layers, 4, 2, 8, 256)
        head = eagle_head(config)
        save_head(head, folder / "head", config)
        prompts, params = [token_ids(n, seed=n) for n in (2, 9, 20)], SamplingParams(max_tokens=10, ignore_eos=True)
        plain = llm.generate(prompts, params, SpecConfig())
        found = llm.generate(prompts, params, SpecConfig("eagle", head=str(folder / "head"), num_draft=3))
        assert [out.token_ids for out in found] == [out.token_ids for out in plain]
        assert sum(out.stats.num_drafted for out in found) > 30


@pytest.mark.parametrize("name", ["auto", "mix"])
def test_a_head_is_a_part(pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    head = tiny_head(tmp_path_factory.mktemp("head"), pair.target, "eagle")
    spec = SpecConfig(name, head=str(head), num_draft=4 if name == "mix" else "auto")
    assert with_head_kind(spec).configs[-1].drafter == "eagle"
    with LLM(pair.target, dtype="float32") as llm:
        plain = llm.generate(PROMPTS, GREEDY, SpecConfig())
        found = llm.generate(PROMPTS, GREEDY, spec)
        assert [out.token_ids for out in found] == [out.token_ids for out in plain]
        if name == "mix":
            names = {origin.drafter for out in found for origin in out.provenance}
            assert sum(out.stats.num_drafted for out in found) > 50
            assert names <= {None, "ngram", "suffix", "recycling", "eagle"}


def test_what_cannot_be_opened_is_named(pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("heads")
    medusa = tiny_head(folder / "medusa", pair.target, "medusa")
    with LLM(pair.target, dtype="float32") as llm:
        with pytest.raises(ConfigError, match="head=None: drafter='eagle' needs"):
            llm.prepare(SpecConfig("eagle"))
        with pytest.raises(ConfigError, match="is a head of drafter='medusa', not of 'eagle'"):
            llm.prepare(SpecConfig("eagle", head=str(medusa)))
    with pytest.raises(ConfigError, match="only drafter='early_exit', 'eagle', 'medusa' or 'block' takes it"):
        SpecConfig("ngram", head="x")


def test_a_head_is_tried_while_no_step_runs(
    pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial runs the target: a head may be loaded while other requests are answered."""
    head, held = tiny_head(tmp_path / "head", pair.target, "eagle"), []
    with LLM(pair.target, dtype="float32") as llm:

        def probe(head: Head, target: SharesWeights) -> None:
            assert target is llm.target
            held.append(llm._turns.lock._is_owned())  # type: ignore[attr-defined]

        monkeypatch.setattr("foretoken.draft.open_head.probe_at_load", probe)
        llm.prepare(SpecConfig("eagle", head=str(head)))
    assert held == [True]
