"""The target as its own drafter: no layer runs a row twice, exits may change between rounds, a search finds layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.cli.flags import spec_from
from foretoken.core import Batch, Draft
from foretoken.draft.base import variants_of
from foretoken.draft.early_exit import NUM_TRIALS, EarlyExitDrafter, SkipSearch
from foretoken.draft.group import DrafterGroup
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.specs import key_of
from tests.helpers.usual import some_of
from tests.model.test_early import counted

NUM_LAYERS = 6
PROMPTS = [token_ids(4 + 3 * i, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=NUM_LAYERS, hidden_size=32)


def silenced(folder: Path, silent: Sequence[int]) -> Decoder:
    """The checkpoint with layers that write nothing into the residual stream."""
    decoder = load_decoder(folder, dtype="float32")
    with torch.no_grad():
        for layer in silent:
            decoder.layers[layer].o_proj.weight.zero_()
            decoder.layers[layer].mlp.down_proj.weight.zero_()
    return decoder


def engine_of(decoder: Decoder) -> tuple[Engine, EarlyExitDrafter]:
    target = PagedModel(decoder, 4096, 16)
    drafters = DrafterGroup(target)
    drafters.drafters[key_of("early_exit")] = drafter = EarlyExitDrafter(target)
    return Engine(target, drafters, eos_token_ids=()), drafter


def run(
    engine: Engine, spec: SpecConfig, params: SamplingParams | None = None, prompts: Sequence[list[int]] = PROMPTS
) -> list[RequestState]:
    params = params or SamplingParams(max_tokens=33, ignore_eos=True)
    states = [engine.submit(prompt, params, spec) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return states


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_exit_is_always_right_and_no_row_runs_twice(folder: Path, temperature: float) -> None:
    """The last four layers write nothing: every draft token of the first two stands, and each layer runs each verified
    row once.
    """
    decoder = silenced(folder, (2, 3, 4, 5))
    engine, _ = engine_of(decoder)
    params = SamplingParams(max_tokens=33, ignore_eos=True, temperature=temperature)
    with counted(decoder) as ran:
        states = run(engine, SpecConfig("early_exit", exit_layer=2, num_draft=3), params)
    assert [state.stats.acceptance_rate for state in states] == [1.0] * 4
    assert [state.stats.num_steps for state in states] == [9] * 4  # the first token, then four a round
    verified = sum(state.stats.num_drafted + state.stats.num_steps - 1 for state in states)
    assert ran == [sum(map(len, PROMPTS)) + verified] * NUM_LAYERS


def test_skipped_layers_that_write_nothing_are_not_missed(folder: Path) -> None:
    """What ran before the gap is taken up, the rest runs again: layers 0 and 1 once, skipped ones only to verify, the
    others twice.
    """
    decoder = silenced(folder, (2, 4))
    engine, _ = engine_of(decoder)
    with counted(decoder) as ran:
        states = run(engine, SpecConfig("early_exit", skip_layers=[4, 2], num_draft=3), prompts=PROMPTS[:1])
    assert states[0].stats.acceptance_rate == 1.0
    whole = len(PROMPTS[0]) + 8 * 4
    assert ran == [whole, whole, whole, whole + 8 * 3, whole, whole + 8 * 3]


@pytest.mark.parametrize("numerics", some_of(["default", "strict"], ["strict"]))
def test_different_layers_side_by_side_are_plain_greedy(folder: Path, numerics: str) -> None:
    specs = [SpecConfig("early_exit", exit_layer=e, num_draft=1 + e) for e in range(1, NUM_LAYERS)]
    specs += [SpecConfig("early_exit", skip_layers=layers, num_draft=4) for layers in ((0,), (1, 4), (2, 3), "auto")]
    specs += [SpecConfig("early_exit"), SpecConfig(), SpecConfig("ngram")]
    prompts = [token_ids(3 + i, seed=i) * (1 + i % 2) for i in range(len(specs))]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(folder, dtype="float32", cache_tokens=4096, numerics=numerics) as llm:
        plain = [out.token_ids for out in llm.generate(prompts, params)]
        outputs = llm.generate(prompts, params, specs)
    assert [out.token_ids for out in outputs] == plain
    assert sum(out.stats.num_accepted for out in outputs) > 50


def test_an_open_exit_gives_a_variant_for_each(folder: Path) -> None:
    _, drafter = engine_of(silenced(folder, ()))
    exits = variants_of(drafter, SpecConfig("early_exit"))
    assert [spec.exit_layer for spec in exits] == [1, 3, 4]
    assert variants_of(drafter, exits[0]) == (exits[0],)
    skipping = SpecConfig("early_exit", skip_layers="auto")
    assert variants_of(drafter, skipping) == (skipping,)
    both = variants_of(drafter, SpecConfig("early_exit", draft_probability="auto"))
    assert [(spec.exit_layer, spec.draft_probability) for spec in both] == [
        (e, a) for e in (1, 3, 4) for a in (0.5, 1.0)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exits_that_change_from_round_to_round(
    folder: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round under another variant: a perfect exit stays perfect, and the greedy text stays plain."""
    decoder = silenced(folder, (1, 2, 3, 4, 5))
    engine, drafter = engine_of(decoder)
    params = SamplingParams(max_tokens=33, ignore_eos=True, temperature=temperature)
    plain = run(engine_of(decoder)[0], SpecConfig(), params)
    variants, used, propose = drafter.variants(SpecConfig("early_exit", num_draft=3)), set(), drafter.propose

    def under_a_variant(batch: Batch) -> Draft:
        entries = []
        for entry in batch.decoding:
            variant = variants[entry.round_start % len(variants)]
            used.add(variant.exit_layer)
            entries.append(replace(entry, request=replace(entry.request, spec=variant)))
        return propose(Batch(tuple(entries)))

    monkeypatch.setattr(drafter, "propose", under_a_variant)
    states = run(engine, SpecConfig("early_exit", num_draft=3), params)
    assert [state.stats.acceptance_rate for state in states] == [1.0] * 4
    assert used == {1, 3, 4}
    if not temperature:
        assert [state.output_ids for state in states] == [state.output_ids for state in plain]


def test_a_set_of_layers_is_found(folder: Path) -> None:
    """Layers 1, 2 and 4 write nothing. The search begins with 1 and 3, and ends with layers that nobody misses."""
    decoder = silenced(folder, (1, 2, 4))
    engine, drafter = engine_of(decoder)
    spec = SpecConfig("early_exit", skip_layers="auto", num_draft=4)
    assert drafter.skips.skipped == {1, 3}
    states = [state for _ in range(20) for state in run(engine, spec)]
    assert drafter.skips.num_trials <= NUM_TRIALS
    assert drafter.skips.skipped == {1, 2, 4}
    assert states[-1].stats.acceptance_rate == 1.0
    assert not engine.target.tables  # type: ignore[attr-defined]


def test_the_search_costs_what_it_says(folder: Path) -> None:
    """At most two passes over 24 rows every eighth round, for 48 trials; after that none."""
    search, calls = SkipSearch(NUM_LAYERS, 0.3), []

    def agree(layers: tuple[int, ...]) -> list[float]:
        calls.append(layers)
        return [0.5] * 24

    per_round = []
    for _ in range(48 * 8 + 640):
        before = len(calls)
        if search.tries():
            search.trial(agree, 4)
        per_round.append(len(calls) - before)
    assert max(per_round[: 48 * 8]) == 2
    assert 30 < sum(count > 0 for count in per_round[: 48 * 8]) <= 48  # a neighbour may be the set itself
    assert sum(per_round[48 * 8 :]) == 0
    assert all({0, NUM_LAYERS - 1} <= set(layers) for layers in calls)
    again = SkipSearch(NUM_LAYERS, 0.3)
    for _ in range(48):
        again.trial(agree, 4)
    assert again.skipped == search.skipped  # nothing random in it


def test_a_search_without_room_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is free for the copy: no trial, and nothing is lost."""
    engine, drafter = engine_of(silenced(folder, ()))
    reserve = PagedModel.reserve
    monkeypatch.setattr(
        PagedModel, "reserve", lambda self, sequence, rows: sequence >= 0 and reserve(self, sequence, rows)
    )
    run(engine, SpecConfig("early_exit", skip_layers="auto", num_draft=2))
    assert drafter.skips.num_trials == 0
    engine.target.check()  # type: ignore[attr-defined]


def test_the_mass_is_the_law_of_the_layers_that_drafted(folder: Path) -> None:
    """At the anchor and at every draft token, by a pass of the shallow model over all of the text; a coin scales it."""
    decoder = silenced(folder, ())
    engine, drafter = engine_of(decoder)
    seen = []
    propose = drafter.propose
    drafter.propose = lambda batch: seen.append((batch, propose(batch))) or seen[-1][1]  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=30, temperature=0.7, ignore_eos=True, seed=3)
    spec = SpecConfig("early_exit", exit_layer=3, num_draft=4, draft_probability=0.5, rule="block")
    (state,) = run(engine, spec, params, PROMPTS[:1])
    checked = 0
    for batch, draft in seen:
        context = [*state.tokens[: batch.entries[0].round_start], *draft.tokens.tolist()]
        text = torch.tensor(context)
        with torch.no_grad():
            hidden = decoder(
                text, torch.arange(len(text)), PackedAttention(decoder.config, 1, len(text)), num_layers=3
            ).last
            distributions = 0.5 * (decoder.logits(hidden) / 0.7).softmax(-1)[batch.entries[0].round_start - 1 :]
        if draft.mass is not None:
            for row, distribution in enumerate(draft.mass.distribution_of_row):
                if distribution >= 0:
                    torch.testing.assert_close(
                        draft.mass.distributions[distribution], distributions[row], atol=1e-5, rtol=0
                    )
                    checked += 1
    assert checked > 10


def test_who_cannot_stop_half_way_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gpt2")
    with pytest.raises(
        ConfigError, match=r"drafter='early_exit': .* cannot stop between two layers; choose another drafter, or a"
    ):
        LLM(folder, spec=SpecConfig("early_exit"))


def test_flags() -> None:
    assert spec_from({"exit_layer": "3"}) == SpecConfig("early_exit", exit_layer=3)
    assert spec_from({"skip_layers": "5, 2,5", "rule": "auto"}) == SpecConfig("early_exit", skip_layers=(2, 5))
    assert spec_from({"skip_layers": "auto", "exit_layer": "auto"}) == SpecConfig("early_exit", skip_layers="auto")
    assert spec_from({"drafter": "ngram", "num_draft": "3"}) == SpecConfig("ngram", num_draft=3)
    for flags in ({"exit_layer": "deep"}, {"skip_layers": "2,x"}):
        with pytest.raises(ConfigError, match="must be"):
            spec_from(flags)


def test_a_mixed_run_through_the_front(llm: LLM, pair: SimpleNamespace) -> None:
    """Under penalties and with other drafters about, draft tokens obey the request's own processors."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, frequency_penalty=1.5, logit_bias={5: -100.0}, min_tokens=i)
        for i in range(6)
    ]
    specs = [
        SpecConfig("early_exit", exit_layer=1, num_draft=3),
        SpecConfig("draft_model", str(pair.draft), num_draft=3),
    ]
    prompts = [token_ids(6, seed=i) for i in range(6)]
    plain = llm.generate(prompts, params)
    mixed = llm.generate(prompts, params, [specs[i % 2] for i in range(6)])
    assert [out.token_ids for out in mixed] == [out.token_ids for out in plain]
    assert sum(out.stats.accepted_by.get("early_exit", 0) for out in mixed) > 5
