"""Requests of every kind through the public front: aborted, broken, queued, counted; and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foretoken import (
    LLM,
    GenerateOutput,
    InputError,
    NumericsError,
    SamplingParams,
    SpecConfig,
)
from foretoken.core import StepOutput
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.scheduler import SchedulerConfig
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.specs import key_of

PROMPTS = [token_ids(3 + 2 * i, seed=70 + i) if i % 2 else token_ids(4 + i, seed=i) * 2 for i in range(8)]
LONG = SamplingParams(max_tokens=16, ignore_eos=True)
NOT_A_NUMBER, ENDLESS = float("nan"), float("inf")


def ids_of(outputs: list[GenerateOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outputs]


# ---- NaN logits: one request fails, the others do not notice


def broken_target(bad: float) -> ScriptedModel:
    """Counts upwards; a context that holds a 9 and is 12 tokens long gives `bad` logits."""

    def script(context: tuple[int, ...]) -> list[float]:
        if 9 in context and len(context) >= 12:
            return [bad] * 20
        return [30.0 * (token == (context[-1] + 1) % 7) for token in range(20)]

    return ScriptedModel(script, 20)


@pytest.mark.parametrize("bad", [NOT_A_NUMBER, ENDLESS, -ENDLESS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_fail_their_request_only(bad: float, temperature: float) -> None:
    """Also when the broken row is that of a token deep in the draft: nothing of that round leaves."""
    draft = ScriptedModel(lambda context: (context[-1] + 1) % 7, 20)
    specs = [SpecConfig(), SpecConfig("ngram"), SpecConfig("draft_model", "d", num_draft=4)]

    def run(target: ScriptedModel) -> dict[int, list[StepOutput]]:
        drafters = DrafterGroup(target)
        drafters.drafters = {key_of("ngram"): NgramDrafter(), key_of("draft_model", "d"): DraftModelDrafter(draft)}
        engine = Engine(target, drafters)
        params = SamplingParams(max_tokens=15, temperature=temperature, seed=1)
        states = [engine.submit([9 if i % 2 else 8, 0, 1], params, specs[i // 2]) for i in range(6)]
        steps: dict[int, list[StepOutput]] = {state.request_id: [] for state in states}
        while engine.has_work:
            for output in engine.step():
                steps[output.request_id].append(output)
        check_idle(engine)
        for state in states:
            assert state.stats.num_emitted == len(state.output_ids) == len(state.provenance)
            assert state.stats.num_accepted == sum(
                origin.kind == "accepted" for origin in state.provenance
            )  # none of the broken round
        assert engine.stats.num_failed == sum(state.finish_reason == "error" for state in states)
        return steps

    steps, healthy = run(broken_target(bad)), run(broken_target(0.0))
    for request_id, outputs in steps.items():
        emitted = [token for output in outputs for token in output.token_ids]
        right = [(2 + i) % 7 for i in range(15)]
        if request_id % 2:
            assert (outputs[-1].finish_reason, outputs[-1].token_ids) == ("error", ())
            assert isinstance(outputs[-1].error, NumericsError)
            assert f"request {request_id}: the target's logits are not finite at token {3 + len(emitted)}" in str(
                outputs[-1].error
            )
            assert emitted == right[: len(emitted)]
            assert len(emitted) <= 9
        else:
            assert (emitted, outputs[-1].finish_reason) == (right, "length")
            assert emitted == [token for output in healthy[request_id] for token in output.token_ids]


@pytest.fixture
def poisoned(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A real engine whose target overflows for token 42: NaN in its own cache slots too."""
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
        with torch.no_grad():
            llm.target.decoder.embedding.weight[42] = NOT_A_NUMBER  # type: ignore[attr-defined]
        yield llm


def test_a_broken_request_does_not_poison_the_cache(poisoned: LLM, llm: LLM, pair: SimpleNamespace) -> None:
    """Its slots hold NaN and are given to others: those answer as in an engine that never saw it."""
    prompts = [prompt for prompt in PROMPTS if 42 not in prompt][:4]
    expected = ids_of(llm.generate(prompts, LONG))
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=3)
    for _ in range(3):
        outputs = poisoned.generate([prompts[0], [5, 42, 6] * 40, *prompts[1:]], LONG, spec)
        assert isinstance(outputs[1].error, NumericsError)
        assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", ())
        assert [out.token_ids for i, out in enumerate(outputs) if i != 1] == expected
        assert all(out.error is None for i, out in enumerate(outputs) if i != 1)
    with pytest.raises(NumericsError, match="not finite"):
        list(poisoned.stream([42]))
    check_idle(poisoned)


# ---- abort, early close, queues


def mixed_specs(pair: SimpleNamespace) -> list[SpecConfig]:
    return [
        SpecConfig("draft_model", str(pair.draft), num_draft=3),
        SpecConfig("ngram"),
        SpecConfig(),
        SpecConfig("draft_model", str(pair.draft), num_draft=8),
    ]


def test_abort_at_any_moment_frees_everything(llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits, in the middle of its prompt, between rounds, after its end; twice; unknown."""
    monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(max_batch_size=2, max_prompt_tokens=5))
    expected = ids_of(llm.generate(PROMPTS[:4], LONG, mixed_specs(pair)))
    for num_steps, victim in itertools.product((0, 1, 2, 3, 5, 9), range(4)):
        states = [llm.submit(*each) for each in zip(PROMPTS[:4], [LONG] * 4, mixed_specs(pair), strict=True)]
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(states[victim].request_id)
        llm.engine.abort(states[victim].request_id)
        llm.engine.abort(10_000_000)
        assert states[victim].finish_reason is not None
        while llm.engine.has_work:
            llm.engine.step()
        others = [i for i in range(4) if i != victim]
        assert [tuple(states[i].output_ids) for i in others] == [expected[i] for i in others]
        check_idle(llm)


def test_a_step_without_work_does_nothing(llm: LLM) -> None:
    steps = llm.engine.stats.num_steps
    assert llm.engine.step() == []
    assert llm.engine.stats.num_steps == steps


def test_an_error_in_the_callers_code_frees_everything(llm: LLM, pair: SimpleNamespace) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, SpecConfig("draft_model", str(pair.draft)), on_step=interrupt)
    check_idle(llm)


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_a_stream_closed_early_frees_its_request(llm: LLM, pair: SimpleNamespace, num_pieces: int) -> None:
    for spec in mixed_specs(pair):
        stream = llm.stream(PROMPTS[0], LONG, spec)
        for _ in range(num_pieces):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        check_idle(llm)


def test_streams_side_by_side_each_get_all_of_their_answer(llm: LLM, pair: SimpleNamespace) -> None:
    """Whoever is read advances all; nobody's pieces get lost, also with a `generate` in between."""
    expected = ids_of(llm.generate(PROMPTS[:4], LONG))
    streams = [llm.stream(prompt, LONG, spec) for prompt, spec in zip(PROMPTS[:3], mixed_specs(pair), strict=False)]
    got: list[list[int]] = [[], [], []]
    for turn in range(3):
        for i in range(turn + 1):
            got[i].extend(next(streams[i]).token_ids)
    foreign: list[int] = []
    between = llm.generate(
        PROMPTS[3:4], LONG, on_step=lambda outputs: foreign.extend(len(output.token_ids) for output in outputs)
    )
    assert ids_of(between) == expected[3:]
    assert sum(foreign) == len(expected[3])  # on_step shows its own requests only
    for i, stream in enumerate(streams):
        for output in stream:
            got[i].extend(output.token_ids)
    assert [tuple(tokens) for tokens in got] == expected[:3]


def test_close_with_a_stream_open_and_twice(pair: SimpleNamespace) -> None:
    llm = LLM(pair.target, SpecConfig(), cache_tokens=256)
    stream = llm.stream([1, 2], LONG)
    next(stream)
    llm.close()
    with pytest.raises(InputError, match="was closed"):  # what came is not the whole answer
        next(stream)
    llm.close()


def test_close_lets_the_weights_go(pair: SimpleNamespace) -> None:
    """Though the closed object is still held: the target's and the draft's."""
    llm = LLM(pair.target, SpecConfig(), cache_tokens=256, shadow_rate=1.0)
    llm.generate([[1, 2]], LONG, SpecConfig("draft_model", draft=str(pair.draft), num_draft=2))
    (drafter,) = llm.engine.drafters.drafters.values()
    kept = [weakref.ref(llm.target), weakref.ref(drafter)]
    del drafter
    llm.close()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_queue_longer_than_the_batch(llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """All finish, in order of arrival where they are alike, and never more than the limit run at once."""
    prompts = [token_ids(5, seed=i) for i in range(11)]
    expected = ids_of(llm.generate(prompts, LONG))
    monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(max_batch_size=3))
    sizes, ended = [], []

    def watch(outputs: list[StepOutput]) -> None:
        sizes.append(len(outputs))
        ended.extend(output.request_id for output in outputs if output.finish_reason)

    assert ids_of(llm.generate(prompts, LONG, on_step=watch)) == expected
    assert max(sizes) == 3
    assert ended == sorted(ended)


def test_a_queue_longer_than_the_cache(pair: SimpleNamespace, llm: LLM) -> None:
    """Requests wait for blocks instead of failing; a running one never meets a full cache."""
    expected = ids_of(llm.generate(PROMPTS, LONG))
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=96) as small:
        outputs = small.generate(PROMPTS, LONG, [mixed_specs(pair)[i % 4] for i in range(8)])
        assert ids_of(outputs) == expected
        check_idle(small)


def test_chunked_prefill_equals_whole(llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [token_ids(n, seed=n) for n in (1, 7, 40, 90)]
    expected = ids_of(llm.generate(prompts, LONG))
    for chunk in (1, 6, 7, 33):
        monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(16, chunk))
        for spec in mixed_specs(pair):
            assert ids_of(llm.generate(prompts, LONG, spec)) == expected


def test_long_prompts_do_not_stop_those_who_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is read in chunks, a running request emits in every step."""
    monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(16, 8))
    first = llm.submit([1, 2], LONG, SpecConfig())
    llm.engine.step()
    llm.submit(token_ids(80), LONG, SpecConfig())
    for count in range(2, 8):
        llm.engine.step()
        assert len(first.output_ids) == count
    for request_id in list(llm.engine.states):
        llm.engine.abort(request_id)


# ---- per prompt, and counted


def test_params_and_spec_per_prompt(llm: LLM, pair: SimpleNamespace) -> None:
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, seed=n)
        for n, t in ((3, 0.0), (9, 1.0), (1, 0.0), (12, 0.5))
    ]
    specs = mixed_specs(pair)
    alone = [llm.generate([prompt], one, spec)[0] for prompt, one, spec in zip(PROMPTS[:4], params, specs, strict=True)]
    together = llm.generate(PROMPTS[:4], params, specs)
    assert ids_of(together) == ids_of(alone)
    assert [len(out.token_ids) for out in together] == [3, 9, 1, 12]
    assert ids_of(llm.generate(tuple(map(tuple, PROMPTS[:4])), tuple(params), tuple(specs))) == ids_of(alone)


def test_shapes_of_prompts(llm: LLM) -> None:
    """One list of ids is one prompt, also as a tuple, tensor or array; no prompts give no answers."""
    expected = ids_of(llm.generate([[1, 2, 3]], LONG))
    for one in (
        [1, 2, 3],
        (1, 2, 3),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        [np.array([1, 2, 3])],
        [(1, 2, 3)],
        range(1, 4),
    ):
        assert ids_of(llm.generate(one, LONG)) == expected  # type: ignore[arg-type]
    assert [token for piece in llm.stream(np.array([1, 2, 3]), LONG) for token in piece.token_ids] == list(expected[0])  # type: ignore[arg-type]
    assert llm.generate([], LONG) == []
    assert llm.generate([[1, 2]], LONG)[0].prompt_ids == (1, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stats_add_up(llm: LLM, pair: SimpleNamespace, temperature: float) -> None:
    """Tokens, drafts and provenance tell the same story, per request and for the engine."""
    before = replace(llm.engine.stats)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=8)
    specs = [mixed_specs(pair)[i % 4] for i in range(8)]
    outputs = llm.generate(PROMPTS, params, specs)
    for out, spec in zip(outputs, specs, strict=True):
        stats, kinds = out.stats, Counter(origin.kind for origin in out.provenance)
        assert stats.num_emitted == len(out.token_ids) == len(out.provenance) == 20
        assert stats.num_accepted == kinds["accepted"] == sum(stats.accepted_at)
        assert stats.num_drafted == sum(stats.drafted_at) == sum(stats.drafted_by.values()) >= stats.num_accepted
        assert stats.accepted_by == Counter(origin.drafter for origin in out.provenance if origin.kind == "accepted")
        assert stats.num_steps == 20 - kinds["accepted"]  # every step emits one token of the target's own
        assert [origin.step for origin in out.provenance] == sorted(origin.step for origin in out.provenance)
        assert {origin.step for origin in out.provenance} == set(range(stats.num_steps))
        assert all(
            (origin.drafter == spec.drafter) if origin.kind == "accepted" else origin.drafter is None
            for origin in out.provenance
        )
        assert all(a <= d for d, a in stats.accepted_per_position)
        assert out.provenance[0].kind == "plain"  # the prompt's own step drafts nothing
        if spec.drafter is None:
            assert (kinds, stats.num_drafted, stats.acceptance_rate) == ({"plain": 20}, 0, 0.0)
        else:
            assert stats.acceptance_rate == (stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0)
        assert math.isclose(stats.emitted_per_step, 20 / stats.num_steps)
        assert 0 <= stats.ttft_s <= stats.total_s
        assert stats.draft_s >= 0
        assert stats.verify_s > 0
        assert set(stats.as_dict()) >= {
            "num_steps",
            "num_drafted",
            "num_accepted",
            "num_emitted",
            "acceptance_rate",
            "draft_s",
            "verify_s",
            "ttft_s",
        }
    after = llm.engine.stats
    for name in ("num_emitted", "num_drafted", "num_accepted"):
        assert getattr(after, name) - getattr(before, name) == sum(getattr(out.stats, name) for out in outputs)
    assert after.num_finished - before.num_finished == len(outputs)


def test_provenance_by_hand() -> None:
    """The draft knows the first two tokens after the anchor, then errs, then knows four."""
    said, drafted = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 0, 5, 6, 7, 8, 9]
    target = ScriptedModel(recite(said), 10)
    drafters = DrafterGroup(target)
    drafters.drafters[key_of("draft_model", "d")] = DraftModelDrafter(ScriptedModel(recite(drafted), 10))
    engine = Engine(target, drafters)
    state = engine.submit([0], SamplingParams(max_tokens=9), SpecConfig("draft_model", "d", num_draft=4))
    while engine.has_work:
        engine.step()
    assert state.output_ids == said
    assert [(origin.kind, origin.step) for origin in state.provenance] == [
        ("plain", 0),
        ("accepted", 1),
        ("accepted", 1),
        ("residual", 1),
        *[("accepted", 2)] * 4,
        ("bonus", 2),
    ]
    assert state.stats.accepted_per_position == ((2, 2), (2, 2), (2, 1), (2, 1))
