"""Probes: the target runs them at their place and nothing else notices. Lookahead is who asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.group import DrafterGroup
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.engine.engine import Engine
from foretoken.model.attention.paged import row_positions
from foretoken.model.interface import ForwardOutput, LanguageModel, Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import tiny_checkpoint, token_ids, variant
from tests.helpers.scripted import ScriptedModel
from tests.helpers.specs import key_of, spec_of
from tests.helpers.watch import Watched, check_cache

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [token_ids(1 + 2 * i, seed=i) if i % 2 else token_ids(3 + i, seed=i) * 2 for i in range(8)]
SHAPES = ((4, 3), (3, 2), (5, 4), (1, 3), (2, 6))  # window, n-gram


def lookaheads(count: int, **options: object) -> list[SpecConfig]:
    return [
        SpecConfig("lookahead", lookahead_window=SHAPES[i % 5][0], lookahead_ngram=SHAPES[i % 5][1], **options)
        for i in range(count)
    ]


class Jacobi(LookaheadDrafter):
    """Compares what the target said behind every probe with a plain run of the text that the probe should have seen."""

    def __init__(self, target: LanguageModel, tolerance: float) -> None:
        super().__init__()
        self.target, self.tolerance, self.num_compared = target, tolerance, 0
        self.texts: dict[int, list[int]] = {}

    def start(self, request) -> None:
        super().start(request)
        self.texts[request.request_id] = list(request.prompt_ids)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        said = None if feedback.probe_logits is None else feedback.probe_logits[list(feedback.probe_rows)]
        likeliest = feedback.after_probes()
        moved: dict[int, list[list[int]]] = {}
        for b, entry in enumerate(batch.decoding):
            sequence = entry.request.request_id
            window = self._requests[sequence].window
            rows = [[column[r] for column in window.columns] for r in range(window.depth)]
            answers = []
            for i in range(draft.probe_lengths[b]):
                j, r = divmod(i, window.depth)
                path = [*rows[0][: j + 1], *(rows[row][j] for row in range(1, r + 1))]
                plain = self.plain([*self.texts[sequence], *path])
                place = draft.probes.offsets[b] + i
                torch.testing.assert_close(said[place], plain, atol=self.tolerance, rtol=0)
                assert likeliest[place] == said[place].argmax()
                self.num_compared += 1
                if r == window.depth - 1:
                    answers.append(int(said[place].argmax()))
            self.texts[sequence] += verdict.emitted(b)
            # The oldest row is dropped, the answers are the newest; a column further for every token beyond the first.
            grid = [row[: len(answers)][len(verdict.emitted(b)) - 1 :] for row in (*rows[1:], answers)]
            moved[sequence] = [list(column) for column in zip(*grid, strict=True)]
        super().commit(batch, draft, verdict, feedback)
        for sequence, columns in moved.items():
            assert [list(column) for column in self._requests[sequence].window.columns[: len(columns)]] == columns

    def plain(self, text: Sequence[int]) -> Tensor:
        """Logits after `text`, run from its beginning."""
        self.target.open(-3)
        logits = self.target.forward(torch.tensor(text), [Segment(-3, len(text), (), 1)]).logits[0]
        self.target.close(-3)
        return logits


TARGETS = {
    "llama": (lambda folder: variant(folder, "llama"), {}, 1e-4),
    "sliding window": (lambda folder: variant(folder, "mistral-sliding"), {}, 1e-4),
    "transformers": (lambda folder: tiny_checkpoint(folder, "gpt2"), {}, 1e-4),
    "transformers, sliding window": (lambda folder: tiny_checkpoint(folder, "gemma2"), {}, 1e-4),
    "strict": (
        lambda folder: variant(folder, "mistral-sliding", dtype=torch.bfloat16),
        {"numerics": "strict", "dtype": "bfloat16"},
        0.0,
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_every_probe_sees_its_own_text(kind: str, tmp_path: Path) -> None:
    """Against a plain run for every probe, in a batch mixed with other drafters; strict numerics to the last bit."""
    make, options, tolerance = TARGETS[kind]
    folder = make(tmp_path)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(folder, cache_tokens=4096, **({"dtype": "float32"} | options)) as llm:
        jacobi = llm._drafters.drafters[key_of("lookahead")] = Jacobi(llm.target, tolerance)
        specs = [spec if i % 3 else SpecConfig("ngram") for i, spec in enumerate(lookaheads(6, num_draft=5))]
        plain = llm.generate(PROMPTS[:6], params)
        outputs = llm.generate(PROMPTS[:6], params, specs)
        assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
        assert jacobi.num_compared == sum(out.stats.num_probed for out in outputs) > 100
        assert all(
            (out.stats.num_probed > 0) == (spec.drafter == "lookahead")
            for out, spec in zip(outputs, specs, strict=True)
        )


def test_the_cache_holds_the_text_alone(pair: SimpleNamespace) -> None:
    """After every step, whatever came before: draft tokens from trees, accepted and rejected, and probes."""
    target = PagedModel(load_decoder(pair.target), 4096, 4)
    engine, watched = engine_of(target)
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=(0.0, 0.7)[i % 2], seed=i) for i in range(6)]
    states = [engine.submit(PROMPTS[i], params[i], spec) for i, spec in enumerate(lookaheads(6, num_draft=6))]
    while engine.has_work:
        engine.step()
        for sequence, text in watched.texts.items():
            check_cache(target, sequence, text)
    assert watched.num_trees
    assert sum(state.stats.num_accepted for state in states) > 5


def engine_of(target: LanguageModel) -> tuple[Engine, Watched]:
    drafters = DrafterGroup(target)
    watched = Watched(LookaheadDrafter(), target.vocab_size)
    drafters.drafters[key_of("lookahead")] = watched
    return Engine(target, drafters), watched


def answers(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, specs: Sequence[SpecConfig]
) -> tuple[list[list[int]], list[int]]:
    """Answers and probes of requests that arrive together."""
    states = [engine.submit(prompt, params, spec) for prompt, spec in zip(prompts, specs, strict=True)]
    while engine.has_work:
        engine.step()
    assert all(state.error is None for state in states)
    return [state.output_ids for state in states], [state.stats.num_probed for state in states]


@pytest.mark.parametrize("num_slots", [36, 40, 44, 64])
def test_a_cache_without_room_takes_fewer_probes(pair: SimpleNamespace, num_slots: int) -> None:
    """Nothing fails, whoever shares the cache; who draws with a seed has as many probes alone as in company, who does
    not need them gives way.
    """
    specs = [SpecConfig("lookahead", num_draft=4)] * 8
    roomy = PagedModel(load_decoder(pair.target), 4096, 4)
    plain, _ = answers(Engine(roomy, DrafterGroup(roomy)), PROMPTS, GREEDY, [SpecConfig()] * 8)
    engine, _ = engine_of(PagedModel(load_decoder(pair.target), num_slots, 4))
    greedy = answers(engine, PROMPTS, GREEDY, specs)
    assert greedy[0] == plain
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.5, seed=1)
    specs = [SpecConfig("lookahead", num_draft=4, rule="rejection")] * 8
    together = answers(engine, PROMPTS, params, specs)
    alone = [answers(engine, [prompt], params, [spec]) for prompt, spec in zip(PROMPTS, specs, strict=True)]
    assert engine.stats.num_preempted
    assert together[0] == [one[0][0] for one in alone]
    assert together[1] == [one[1][0] for one in alone]
    longest = max(range(8), key=lambda i: len(PROMPTS[i]))  # 18 tokens: 34 in the end, and up to 8 probes
    roomy, _ = engine_of(PagedModel(load_decoder(pair.target), 4096, 4))
    most = answers(roomy, [PROMPTS[longest]], params, specs[:1])[1][0]
    assert (0 < together[1][longest] < most) if num_slots < 44 else together[1][longest] == most


def test_nothing_is_run_beyond_the_context() -> None:
    """The window is cut to whole columns as the end comes near, and ends with the last draft token."""
    positions, probed = [], []

    class Short(ScriptedModel):
        def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
            positions.append(max(row_positions(segments[0], self.length(segments[0].sequence))))
            return super().forward(tokens, segments, taps)

    engine, watched = engine_of(Short(lambda context: hash(context) % 50, 50, max_context=24))
    engine.submit([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True), SpecConfig("lookahead", num_draft=3))
    while engine.has_work:
        before = watched.num_probed
        engine.step()
        probed.append(watched.num_probed - before)
    assert max(positions) == 23
    assert probed[0] == probed[-1] == 0
    assert probed[1] == 8
    assert set(probed) == {8, 6, 4, 2, 0}
    assert sorted(probed[1:], reverse=True) == probed[1:]


def test_one_more_token_needs_no_probe() -> None:
    engine, watched = engine_of(ScriptedModel(lambda context: len(context) % 9, 9))
    for max_tokens, num_draft in ((1, 4), (2, 4), (9, 0)):
        state = engine.submit(
            [1], SamplingParams(max_tokens=max_tokens, ignore_eos=True), SpecConfig("lookahead", num_draft=num_draft)
        )
        while engine.has_work:
            engine.step()
        assert state.stats.num_probed == watched.num_probed == 0


@pytest.mark.parametrize("rule", ["tree", "traversal", "block", "auto"])
def test_neighbours_change_nothing(llm: LLM, pair: SimpleNamespace, rule: str) -> None:
    """Sampled without shared noise, so that any other draft token would show; prompts in chunks, others with trees and
    probes beside it.
    """
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=i) for i in range(8)]
    specs = [
        spec if i % 4 else spec_of("draft_model", pair.draft, num_draft=3)
        for i, spec in enumerate(lookaheads(8, num_draft=5, rule=rule))
    ]
    alone = [llm.generate([PROMPTS[i]], params[i], specs[i])[0] for i in range(8)]
    together = llm.generate(PROMPTS, params, specs)
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert [out.stats.num_probed for out in together] == [out.stats.num_probed for out in alone]


def test_a_probe_that_overflows_is_left_out() -> None:
    """A masked key that is not finite spoils the rows beside it: then the round is run again without probes."""

    class Fragile(ScriptedModel):
        def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
            output = super().forward(tokens, segments, taps)
            return (
                ForwardOutput(output.logits + float("nan"), {})
                if 99 in tokens[len(segments) :].tolist() and self.num_forwards > 3
                else output
            )

    def script(context: tuple[int, ...]) -> int:
        return (
            99 if context[-3:-1] == (5, 6) else (context[-1] * 3 + len(context)) % 90
        )  # never said behind the text itself

    engine, watched = engine_of(Fragile(script, 100))
    prompt = [5, 7, 6, 99, 4]
    states = [
        engine.submit(prompt, SamplingParams(max_tokens=30), spec)
        for spec in (SpecConfig("lookahead", num_draft=4), SpecConfig())
    ]
    engine.drafters.drafters[key_of("lookahead")].inner._requests[
        0
    ].pool._found.clear()  # no draft of 99 from the prompt
    while engine.has_work:
        engine.step()
    assert states[0].error is None
    assert states[0].output_ids == states[1].output_ids
    assert watched.num_probed


def test_the_shadow_follows_answers_with_probes(pair: SimpleNamespace) -> None:
    """It borrows what nobody was promised, promises for probes included."""
    specs = lookaheads(8, num_draft=4)
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=(0.0, 1.0)[i % 2]) for i in range(8)]
    with LLM(pair.target, dtype="float32", cache_tokens=128, shadow_rate=1.0) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, specs)
            assert sum(out.stats.num_probed for out in outputs) > 100
        llm.drain_shadow()
        assert llm.stats.shadow is not None
        assert (llm.stats.shadow.num_requests, llm.stats.shadow.alarm) == (16, False)
        assert llm.stats.num_probed > 200


def test_every_drafter_gets_its_own_probes() -> None:
    """Two drafters that probe, their requests interleaved: the row that says n belongs to probe n."""

    class Probing(LookaheadDrafter):
        seen: Tensor | None = None

        def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
            return (spec,)

        def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
            self.seen = feedback.after_probes()
            super().commit(batch, draft, verdict, feedback)

    group = DrafterGroup(ScriptedModel(lambda context: 1, 100))
    first, second = Probing(), Probing()
    specs = [SpecConfig("ngram"), SpecConfig("suffix"), SpecConfig()]
    group.drafters = {key_of("ngram"): first, key_of("suffix"): second}
    requests = [Request(i, (1, 2, 3 + i), SamplingParams(), specs[i % 3], i) for i in range(5)]
    for request in requests:
        group.start(request)
    batch = Batch(
        tuple(
            BatchEntry(
                r,
                2,
                r.prompt_ids[-1:],
                True,
                3,
                num_probe=(8, 4, 8, 2, 8)[i],
                probe_depth=9,
                option=(0, 0, None)[i % 3],
            )
            for i, r in enumerate(requests)
        )
    )
    draft = group.propose(batch)
    assert draft.probe_lengths == (8, 4, 0, 2, 8)
    nothing = Verdict(((),) * 5, ((),) * 5, (9,) * 5, ("bonus",) * 5)
    feedback = Feedback(torch.zeros(draft.num_rows, 30), tuple(range(draft.num_rows)), probe_logits=torch.eye(22, 30))
    group.commit(batch, draft, nothing, feedback)
    assert first.seen.tolist() == [*range(8), 12, 13]
    assert second.seen.tolist() == [8, 9, 10, 11, *range(14, 22)]
    for request in requests:
        group.finish(request)


def test_log_probabilities_are_those_of_plain_decoding(llm: LLM) -> None:
    """Prompt rows, decode rows and probes of several requests in one forward are told apart; a request joins while
    others probe.
    """
    params = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2, logprobs_of="model", prompt_logprobs=1)
    plain = llm.generate(PROMPTS, params)
    states = []
    for i, spec in enumerate(lookaheads(8, num_draft=4)):
        states.append(llm.submit(PROMPTS[i], params, spec))
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert sum(state.stats.num_probed for state in states) > 200
    for state, out in zip(states, plain, strict=True):
        assert [one.token_id for one in state.logprobs] == list(out.token_ids)
        for ours, theirs in ((state.logprobs, out.logprobs), (state.prompt_logprobs[1:], out.prompt_logprobs[1:])):
            assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


def test_the_controller_counts_probes_as_rows(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs is told by all its rows; probes weigh on the first draft token, since they come with it."""
    engine, _ = engine_of(PagedModel(load_decoder(pair.target), 1024, 4))
    policy, seen, planned = engine.chooser.policy, [], []
    observe, plan = policy.step_costs.observe, policy.plan
    monkeypatch.setattr(policy.step_costs, "observe", lambda *told: seen.append(told[1]) or observe(*told))
    monkeypatch.setattr(policy, "plan", lambda requests: planned.append(requests) or plan(requests))
    state = engine.submit(
        PROMPTS[1], SamplingParams(max_tokens=8, ignore_eos=True), SpecConfig("lookahead", num_draft=2)
    )
    engine.step()
    engine.step()
    assert seen[0] >= 9
    (request,) = planned[-1]
    drafted = policy._candidate(request, request.options[0]).drafted
    assert drafted[0] >= 8 > 1 >= drafted[1]
    engine.abort(state.request_id)
    assert not engine.chooser._num_probed


def test_a_share_of_the_verify_time_is_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows: 1 anchor and 8 probes against 1 anchor."""
    engine, _ = engine_of(ScriptedModel(lambda context: hash(context) % 5000, 5000))
    ticks = itertools.count()
    monkeypatch.setattr("foretoken.engine.engine.time.perf_counter", lambda: float(next(ticks)))
    states = [
        engine.submit([1, 2], SamplingParams(max_tokens=5, ignore_eos=True), spec)
        for spec in (SpecConfig("lookahead", num_draft=4), SpecConfig())
    ]
    engine.step()
    before = [state.stats.verify_s for state in states]
    engine.step()
    assert states[0].stats.num_drafted == 0
    assert [state.stats.verify_s - start for state, start in zip(states, before, strict=True)] == pytest.approx(
        [2 * 0.9, 2 * 0.1]
    )
    engine.close()
