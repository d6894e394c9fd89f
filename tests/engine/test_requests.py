"""Requests of every kind through the public front: refused by name, aborted, broken, queued, counted; and nothing is left behind."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import (
    LLM,
    CapacityError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    ForetokenError,
    GenerateOutput,
    InputError,
    MismatchError,
    NumericsError,
    SamplingParams,
    SpecConfig,
)
from foretoken.config import from_mapping
from foretoken.core import StepOutput
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.scheduler import SchedulerConfig
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer, token_ids
from tests.helpers.scripted import ScriptedModel, recite

PROMPTS = [token_ids(3 + 2 * i, seed=70 + i) if i % 2 else token_ids(4 + i, seed=i) * 2 for i in range(8)]
LONG = SamplingParams(max_tokens=16, ignore_eos=True)


def ids_of(outputs: list[GenerateOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outputs]


# ---- bad input: the right error, naming field, value and remedy, and nothing lost

NOT_A_NUMBER, ENDLESS = float("nan"), float("inf")

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NOT_A_NUMBER}, "temperature=nan: must be a finite number"),
    ({"temperature": ENDLESS}, "temperature=inf: must be a finite number"),
    ({"temperature": -0.1}, r"temperature=-0.1: must lie in \[0, 100\]"),
    ({"temperature": 1e9}, r"temperature=1000000000.0: must lie in \[0, 100\]"),
    ({"temperature": "hot"}, "temperature='hot': must be a finite number"),
    ({"temperature": True}, "temperature=True: must be a finite number"),
    ({"top_p": 0.0}, r"top_p=0.0: must lie in \(0, 1\]"),
    ({"top_p": 1.1}, r"top_p=1.1: must lie in \(0, 1\]"),
    ({"top_p": NOT_A_NUMBER}, "top_p=nan: must be a finite number"),
    ({"min_p": -1e-9}, r"min_p=-1e-09: must lie in \[0, 1\]"),
    ({"min_p": 2}, r"min_p=2: must lie in \[0, 1\]"),
    ({"top_k": -1}, "top_k=-1: must be at least 0"),
    ({"top_k": 2.5}, "top_k=2.5: must be a whole number"),
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"max_tokens": -3}, "max_tokens=-3: must be at least 1"),
    ({"max_tokens": 1.0}, "max_tokens=1.0: must be a whole number"),
    ({"seed": -1}, "seed=-1: must be at least 0"),
    ({"seed": 2**64}, "seed=18446744073709551616: must be at least 0 and at most 18446744073709551615"),
    ({"stop": ""}, "stop='': each stop string must be a text of at least one character"),
    ({"stop": ("a", 3)}, "stop=3: each stop string must be a text"),
    ({"stop": 5}, "stop=5: must be a text or a list of texts"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5: not supported yet; leave it at 0.0"),
    ({"frequency_penalty": NOT_A_NUMBER}, "frequency_penalty=nan: not supported yet"),
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2: not supported yet; leave it at 1.0"),
    ({"logit_bias": {3: 1.0}}, "logit_bias={3: 1.0}: not supported yet; leave it out"),
    ({"logprobs": 5}, "logprobs=5: not supported yet"),
    ({"logprobs": 0}, "logprobs=0: not supported yet"),  # it asks for the chosen token's own
    ({"min_tokens": 4}, "min_tokens=4: not supported yet"),
    ({"n": 2}, "n=2: not supported yet"),
]


@pytest.mark.parametrize(("values", "message"), BAD_SAMPLING, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_bad_sampling_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        SamplingParams(**values)
    assert (caught.value.field, caught.value.exit_code) == (next(iter(values)), 2)


@pytest.mark.parametrize("stop", [None, (), [], "x", ("x",), ["x"]], ids=repr)
def test_stop_in_every_form(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop_strings == (("x",) if stop else ())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": "oracle"}, "drafter='oracle': choose one of draft_model, ngram, or None"),
        ({"rule": "lucky"}, "rule='lucky': choose one of auto, greedy, rejection"),
        ({"drafter": "ngram", "draft": "x"}, "draft='x': only drafter='draft_model' takes a draft"),
        ({"draft": "x"}, "draft='x': only drafter='draft_model' takes a draft, not drafter=None"),
        ({"num_draft": -1}, "num_draft=-1: must be at least 0"),
        ({"num_draft": 100_000}, "num_draft=100000: must be at least 0 and at most 1024"),
        ({"num_draft": "many"}, "num_draft='many': must be a whole number"),
        ({"num_draft": 2.0}, "num_draft=2.0: must be a whole number"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_spec_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        SpecConfig(**values)
    assert (caught.value.field, caught.value.exit_code) == (list(values)[-1], 2)


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"temprature=0\.5: unknown option of SamplingParams; did you mean 'temperature'"):
        from_mapping(SamplingParams, {"temprature": 0.5})
    with pytest.raises(ConfigError, match="zzz=1: unknown option of SpecConfig; known options: drafter, draft, num_draft"):
        from_mapping(SpecConfig, {"zzz": 1})
    assert from_mapping(SpecConfig, {"drafter": "ngram", "num_draft": 3}) == SpecConfig("ngram", num_draft=3)


BAD_REQUESTS: list[tuple[object, dict[str, Any], SpecConfig, type[ForetokenError], str]] = [
    ([], {}, SpecConfig(), InputError, r"prompt=\[\]: is empty; give at least one token"),
    ([5, 97], {}, SpecConfig(), InputError, "prompt=97: token ids must be whole numbers from 0 to 96"),
    ([-1], {}, SpecConfig(), InputError, "prompt=-1: token ids must be whole numbers from 0 to 96"),
    ([5, 2.0], {}, SpecConfig(), InputError, "prompt=2.0: token ids must be whole numbers"),
    ([5, True], {}, SpecConfig(), InputError, "prompt=True: token ids must be whole numbers"),
    ([5, None], {}, SpecConfig(), InputError, "prompt=None: token ids must be whole numbers"),
    ([1] * 256, {}, SpecConfig(), ContextLengthError, "prompt='256 tokens': the context holds 256 tokens; shorten the prompt to at most 255"),
    ([1], {"stop": "x"}, SpecConfig(), InputError, r"stop=\('x',\): stop strings need a tokenizer, and this model folder has none"),
    ("text", {}, SpecConfig(), InputError, "prompt='text': .* has no tokenizer; give token ids instead of text"),
    ([1], {}, SpecConfig("ngram", num_draft=256), InputError, "num_draft=256: must be smaller than the context of 256 tokens"),
    ([1], {"temperature": 1.0}, SpecConfig("ngram", rule="greedy"), ConfigError, "rule='greedy': it would change the law at temperature > 0"),
    ([1], {}, SpecConfig("draft_model"), ConfigError, "draft=None: drafter='draft_model' needs the folder or hub id of a draft model"),
]


@pytest.mark.parametrize(("prompt", "params", "spec", "kind", "message"), BAD_REQUESTS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_bad_requests_leave_nothing(
    llm: LLM, prompt: Any, params: dict[str, Any], spec: SpecConfig, kind: type[ForetokenError], message: str, how: str
) -> None:
    """Alone, and as the second of three: then none of the three runs."""
    sampling, free, looked_up = SamplingParams(**params), SamplingParams(), SpecConfig("ngram")

    def ask() -> object:
        if how == "stream":
            return list(llm.stream(prompt, sampling, spec))
        return llm.generate([[1, 2], prompt, [3]], [free, sampling, free], [looked_up, spec, looked_up])

    with pytest.raises(kind, match=message):
        ask()
    check_idle(llm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "prompts=5: give a text, a list of token ids, or a list of those"),
        (({"prompt": [1]},), "prompts={'prompt'.*: give a text"),
        (([[1], 5],), "prompt=5: give a text or a list of token ids"),
        (([[1], None],), "prompt=None: give a text or a list of token ids"),
        (([[1]], {"temperature": 1}), "params={'temperature': 1}: give SamplingParams"),
        (([[1]], None, "ngram"), "spec='ngram': give SpecConfig"),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_things_of_the_wrong_kind(llm: LLM, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(*arguments)
    check_idle(llm)


def test_a_long_bad_value_is_shortened() -> None:
    with pytest.raises(InputError) as caught:
        SpecConfig(drafter="x" * 10_000)
    assert len(str(caught.value)) < 250


def test_a_request_that_can_never_fit_is_refused(pair: SimpleNamespace) -> None:
    with LLM(pair.target, cache_tokens=64) as small:
        with pytest.raises(CapacityError, match="may need 101 tokens and the cache holds 64; lower max_tokens or raise cache_tokens"):
            small.generate([[1]], SamplingParams(max_tokens=100))
        check_idle(small)
        assert len(small.generate([[1]], SamplingParams(max_tokens=63, ignore_eos=True))[0].token_ids) == 63  # to the last slot


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_tokens": 3}, "cache_tokens=3: must be at least one block of 32 tokens"),
        ({"device": "toaster"}, "device='toaster': use auto, cpu, cuda or cuda:N"),
        ({"max_batch_size": 0}, "max_batch_size=0: must be a whole number of at least 1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0: must be a whole number of at least 1"),
        ({"spec": SpecConfig("draft_model")}, "draft=None: drafter='draft_model' needs"),
    ],
    ids=str,
)
def test_bad_engine_options(pair: SimpleNamespace, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(pair.target, **options)


def test_cache_tokens_is_honoured_by_models_of_transformers_too(tmp_path: Path) -> None:
    with LLM(tiny_checkpoint(tmp_path, "gpt2"), cache_tokens=48) as small:
        assert small.target.capacity_tokens == 48


def test_per_prompt_lists_must_fit(llm: LLM) -> None:
    for values in ([LONG], [LONG] * 3, []):
        with pytest.raises(InputError, match=f"params='{len(values)} values': give one value, or one for each of the 2 prompts"):
            llm.generate([[1], [2]], values)
    with pytest.raises(InputError, match="spec='3 values': give one value"):
        llm.generate([[1], [2]], LONG, [SpecConfig()] * 3)
    check_idle(llm)


# ---- pairs that do not belong together


@pytest.fixture(scope="module")
def mismatched(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("mismatched")
    for name, vocab, texts in (("target", 300, ()), ("other-words", 300, ("zzzz yyyy xxxx " * 50,)), ("other-size", 280, ())):
        tiny_checkpoint(folder / name, "llama", num_hidden_layers=2 if name == "target" else 1, hidden_size=32, vocab_size=vocab)
        tiny_tokenizer(folder / name, vocab, texts)
    return SimpleNamespace(**{path.name.replace("-", "_"): path for path in folder.iterdir()})


def test_a_draft_of_another_vocabulary_is_refused(mismatched: SimpleNamespace) -> None:
    with LLM(mismatched.target, cache_tokens=256) as target:
        for _ in range(2):  # the failed attempt is not remembered as a drafter
            with pytest.raises(MismatchError, match="has a vocabulary of 280 tokens, the target one of 300") as caught:
                target.generate([[1]], spec=SpecConfig("draft_model", str(mismatched.other_size)))
        assert (caught.value.exit_code, str(mismatched.other_size) in str(caught.value)) == (3, True)
        assert len(target.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_draft_of_another_tokenizer_is_refused(mismatched: SimpleNamespace) -> None:
    """Equal sizes are not enough: the first token that means something else is named."""
    with pytest.raises(MismatchError, match=r"has another tokenizer than the target: .*token \d+ is '.+' here and '.+' there"):
        LLM(mismatched.target, SpecConfig("draft_model", str(mismatched.other_words)), cache_tokens=256)


def test_a_draft_as_large_as_the_target_is_warned_about(pair: SimpleNamespace) -> None:
    with pytest.warns(UserWarning, match="parameters, the target .* drafting costs as much as decoding"):
        LLM(pair.target, SpecConfig("draft_model", str(pair.target)), cache_tokens=256).close()


def test_a_draft_that_does_not_exist(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        llm.generate([[1]], spec=SpecConfig("draft_model", str(tmp_path / "nowhere")))
    check_idle(llm)


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
    """Also when the broken row is that of a guess deep in the draft: nothing of that round leaves."""
    drafters = DrafterGroup(torch.device("cpu"))
    guess = ScriptedModel(lambda context: (context[-1] + 1) % 7, 20)
    drafters.drafters = {("ngram", None): NgramDrafter(), ("draft_model", "d"): DraftModelDrafter(guess)}
    specs = [SpecConfig(), SpecConfig("ngram"), SpecConfig("draft_model", "d", num_draft=4)]

    def run(target: ScriptedModel) -> dict[int, list[StepOutput]]:
        engine = Engine(target, drafters)
        params = SamplingParams(max_tokens=15, temperature=temperature, seed=1)
        states = [engine.submit([9 if i % 2 else 8, 0, 1], params, specs[i // 2]) for i in range(6)]
        steps: dict[int, list[StepOutput]] = {state.request_id: [] for state in states}
        while engine.has_work:
            for output in engine.step():
                steps[output.request_id].append(output)
        check_idle(engine)
        for state in states:
            assert state.stats.num_emitted == len(state.output_ids) == len(state.origins)
            assert state.stats.num_accepted == sum(origin.kind == "accepted" for origin in state.origins)  # none of the broken round
        assert engine.stats.num_failed == sum(state.finish_reason == "error" for state in states)
        return steps

    steps, healthy = run(broken_target(bad)), run(broken_target(0.0))
    for request_id, outputs in steps.items():
        emitted = [token for output in outputs for token in output.token_ids]
        right = [(2 + i) % 7 for i in range(15)]
        if request_id % 2:
            assert (outputs[-1].finish_reason, outputs[-1].token_ids) == ("error", ())
            assert isinstance(outputs[-1].error, NumericsError)
            assert f"request {request_id}: the target's logits are not finite at token {3 + len(emitted)}" in str(outputs[-1].error)
            assert emitted == right[: len(emitted)]
            assert len(emitted) <= 9
        else:
            assert (emitted, outputs[-1].finish_reason) == (right, "length")
            assert emitted == [token for output in healthy[request_id] for token in output.token_ids]


@pytest.fixture
def poisoned(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A real engine whose target overflows for token 42: NaN in its own cache slots too."""
    with LLM(pair.target, dtype="float32", cache_tokens=512) as llm:
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
        states = [llm.engine.submit(*each) for each in zip(PROMPTS[:4], [LONG] * 4, mixed_specs(pair), strict=True)]
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
    between = llm.generate(PROMPTS[3:4], LONG, on_step=lambda outputs: foreign.extend(len(output.token_ids) for output in outputs))
    assert ids_of(between) == expected[3:]
    assert sum(foreign) == len(expected[3])  # on_step shows its own requests only
    for i, stream in enumerate(streams):
        for output in stream:
            got[i].extend(output.token_ids)
    assert [tuple(tokens) for tokens in got] == expected[:3]


def test_close_with_a_stream_open_and_twice(pair: SimpleNamespace) -> None:
    llm = LLM(pair.target, cache_tokens=256)
    stream = llm.stream([1, 2], LONG)
    next(stream)
    llm.close()
    assert list(stream) == []
    llm.close()


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
    with LLM(pair.target, dtype="float32", cache_tokens=96) as small:
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
    first = llm.engine.submit([1, 2], LONG, SpecConfig())
    llm.engine.step()
    llm.engine.submit(token_ids(80), LONG, SpecConfig())
    for count in range(2, 8):
        llm.engine.step()
        assert len(first.output_ids) == count
    for request_id in list(llm.engine.states):
        llm.engine.abort(request_id)


# ---- per prompt, and counted


def test_params_and_spec_per_prompt(llm: LLM, pair: SimpleNamespace) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, seed=n) for n, t in ((3, 0.0), (9, 1.0), (1, 0.0), (12, 0.5))]
    specs = mixed_specs(pair)
    alone = [llm.generate([prompt], one, spec)[0] for prompt, one, spec in zip(PROMPTS[:4], params, specs, strict=True)]
    together = llm.generate(PROMPTS[:4], params, specs)
    assert ids_of(together) == ids_of(alone)
    assert [len(out.token_ids) for out in together] == [3, 9, 1, 12]
    assert ids_of(llm.generate(tuple(map(tuple, PROMPTS[:4])), tuple(params), tuple(specs))) == ids_of(alone)


def test_shapes_of_prompts(llm: LLM) -> None:
    """One list of ids is one prompt, also as a tuple, tensor or array; no prompts give no answers."""
    expected = ids_of(llm.generate([[1, 2, 3]], LONG))
    for one in ([1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]]), [np.array([1, 2, 3])], [(1, 2, 3)], range(1, 4)):
        assert ids_of(llm.generate(one, LONG)) == expected  # type: ignore[arg-type]
    assert [token for piece in llm.stream(np.array([1, 2, 3]), LONG) for token in piece.token_ids] == list(expected[0])  # type: ignore[arg-type]
    assert llm.generate([], LONG) == []
    assert llm.generate([[1, 2]], LONG)[0].prompt_ids == (1, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stats_add_up(llm: LLM, pair: SimpleNamespace, temperature: float) -> None:
    """Tokens, drafts and provenance tell the same story, per request and for the engine."""
    before = Counter(vars(llm.engine.stats))
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=8)
    specs = [mixed_specs(pair)[i % 4] for i in range(8)]
    outputs = llm.generate(PROMPTS, params, specs)
    for out, spec in zip(outputs, specs, strict=True):
        stats, kinds = out.stats, Counter(origin.kind for origin in out.provenance)
        assert stats.num_emitted == len(out.token_ids) == len(out.provenance) == 20
        assert stats.num_accepted == kinds["accepted"] == sum(stats.accepted_at)
        assert stats.num_drafted == sum(stats.drafted_at) >= stats.num_accepted
        assert stats.num_steps == 20 - kinds["accepted"]  # every step emits one token of the target's own
        assert [origin.step for origin in out.provenance] == sorted(origin.step for origin in out.provenance)
        assert {origin.step for origin in out.provenance} == set(range(stats.num_steps))
        assert all((origin.drafter == spec.drafter) if origin.kind == "accepted" else origin.drafter is None for origin in out.provenance)
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
        assert set(stats.as_dict()) >= {"num_steps", "num_drafted", "num_accepted", "num_emitted", "acceptance_rate", "draft_s", "verify_s", "ttft_s"}
    after = Counter(vars(llm.engine.stats))
    after.subtract(before)
    assert after["num_emitted"] == sum(out.stats.num_emitted for out in outputs)
    assert after["num_drafted"] == sum(out.stats.num_drafted for out in outputs)
    assert after["num_accepted"] == sum(out.stats.num_accepted for out in outputs)
    assert after["num_finished"] == len(outputs)


def test_provenance_by_hand() -> None:
    """The draft knows the first two tokens after the anchor, then errs, then knows four."""
    said, guessed = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 0, 5, 6, 7, 8, 9]
    drafters = DrafterGroup(torch.device("cpu"))
    drafters.drafters["draft_model", "d"] = DraftModelDrafter(ScriptedModel(recite(guessed), 10))
    engine = Engine(ScriptedModel(recite(said), 10), drafters)
    state = engine.submit([0], SamplingParams(max_tokens=9), SpecConfig("draft_model", "d", num_draft=4))
    while engine.has_work:
        engine.step()
    assert state.output_ids == said
    assert [(origin.kind, origin.step) for origin in state.origins] == [
        ("plain", 0),
        ("accepted", 1),
        ("accepted", 1),
        ("residual", 1),
        *[("accepted", 2)] * 4,
        ("bonus", 2),
    ]
    assert state.stats.accepted_per_position == ((2, 2), (2, 2), (2, 1), (2, 1))
