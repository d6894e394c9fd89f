"""Bad input: the right error, naming field, value and remedy, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
    RoutingRules,
    SamplingParams,
    SpecConfig,
)
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer, token_ids
from tests.helpers.faults import Fault

PROMPTS = [token_ids(3 + 2 * i, seed=70 + i) if i % 2 else token_ids(4 + i, seed=i) * 2 for i in range(8)]
LONG = SamplingParams(max_tokens=16, ignore_eos=True)


def ids_of(outputs: list[GenerateOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outputs]


# ---- bad input: the right error, naming field, value and remedy, and nothing lost


BAD_REQUESTS: list[tuple[object, dict[str, Any], SpecConfig, type[ForetokenError], str]] = [
    (
        [5],
        {},
        SpecConfig("early_exit", exit_layer=2),
        ConfigError,
        "exit_layer=2: must be less than the target's 2 layers",
    ),
    (
        [5],
        {},
        SpecConfig("early_exit", skip_layers=[2]),
        ConfigError,
        r"skip_layers=\(2,\): the target's layers are numbered 0 to 1",
    ),
    (
        [5],
        {},
        SpecConfig("early_exit", skip_layers=[1, 0]),
        ConfigError,
        r"skip_layers=\(0, 1\): leaves no layer to draft with",
    ),
    (
        [5],
        {},
        SpecConfig("early_exit", skip_layers="auto"),
        ConfigError,
        "the target has 2 layers, and a draft with fewer needs at least 3",
    ),
    ([], {}, SpecConfig(), InputError, r"prompt=\[\]: is empty; give at least one token"),
    ([5, 97], {}, SpecConfig(), InputError, "prompt=97: token ids must be whole numbers from 0 to 96"),
    ([-1], {}, SpecConfig(), InputError, "prompt=-1: token ids must be whole numbers from 0 to 96"),
    ([5, 2.0], {}, SpecConfig(), InputError, "prompt=2.0: token ids must be whole numbers"),
    ([5, True], {}, SpecConfig(), InputError, "prompt=True: token ids must be whole numbers"),
    ([5, None], {}, SpecConfig(), InputError, "prompt=None: token ids must be whole numbers"),
    (
        [1] * 256,
        {},
        SpecConfig(),
        ContextLengthError,
        "prompt='256 tokens': the context holds 256 tokens; shorten the prompt to at most 255",
    ),
    (
        [1],
        {"stop": "x"},
        SpecConfig(),
        InputError,
        r"stop=\('x',\): stop strings need a tokenizer, and this model folder has none",
    ),
    ("text", {}, SpecConfig(), InputError, "prompt='text': .* has no tokenizer; give token ids instead of text"),
    (
        [1],
        {},
        SpecConfig("ngram", num_draft=256),
        InputError,
        "num_draft=256: must be smaller than the context of 256 tokens",
    ),
    (
        [1],
        {"temperature": 1.0},
        SpecConfig("ngram", rule="greedy"),
        ConfigError,
        "rule='greedy': it would change the distribution at temperature > 0",
    ),
    (
        [1],
        {},
        SpecConfig("draft_model"),
        ConfigError,
        "draft=None: drafter='draft_model' needs the folder or hub id of a draft model",
    ),
]


@pytest.mark.parametrize(
    ("prompt", "params", "spec", "kind", "message"), BAD_REQUESTS, ids=lambda value: str(value)[:30]
)
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


@pytest.mark.parametrize("name", ["prepare", "loaded_drafters", "reset_drafters", "take_drafters"])
@pytest.mark.parametrize("spec", ["ngram", 0, [SpecConfig("ngram")]])
def test_what_names_no_drafters(llm: LLM, name: str, spec: object) -> None:
    with pytest.raises(InputError, match=r"spec=.*give SpecConfig"):
        getattr(llm, name)(spec)


def test_a_long_bad_value_is_shortened() -> None:
    with pytest.raises(InputError) as caught:
        SpecConfig(drafter="x" * 10_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": 10**5000}, "drafter=<int>: choose one of"),
        ({"drafter": [10**5000]}, "drafter=<list>: choose one of"),
        ({"drafter": "ngram", "options": {10**5000: 1}}, "options=<int>: an option is named by a text"),
        ({"drafter": "draft_model", "draft": "x", "draft_top_k": 10**5000}, "draft_top_k=<int>: must have at most"),
    ],
    ids=["drafter", "list", "option", "number"],
)
def test_a_number_that_python_does_not_write_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpecConfig(**fields)


def test_a_request_that_can_never_fit_is_refused(pair: SimpleNamespace) -> None:
    with LLM(pair.target, cache_tokens=64) as small:
        with pytest.raises(
            CapacityError, match="may need 101 tokens and the cache holds 64; lower max_tokens or raise cache_tokens"
        ):
            small.generate([[1]], SamplingParams(max_tokens=100))
        check_idle(small)
        assert (
            len(small.generate([[1]], SamplingParams(max_tokens=63, ignore_eos=True))[0].token_ids) == 63
        )  # to the last slot


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model=None: give a folder, a GGUF file, a hub id, or smollm2"),
        ({"model": 5}, "model=5: give a folder"),
        ({"spec": "ngram"}, "spec='ngram': give SpecConfig"),
        ({"spec": 5}, "spec=5: give SpecConfig"),
        ({"spec": ""}, "spec='': give SpecConfig"),
        ({"spec": 0}, "spec=0: give SpecConfig"),
        ({"dtype": 5}, "dtype=5: give a name, such as auto, bfloat16 or float32"),
        ({"dtype": None}, "dtype=None: give a name"),
        ({"dtype": ["float32"]}, "dtype=.*: give a name"),
        ({"dtype": "int8"}, "dtype='int8': choose one of auto, "),
        ({"device": None}, "device=None: use auto, cpu, cuda or cuda:N"),
        ({"device": 5}, "device=5: use auto, cpu, cuda or cuda:N"),
        ({"device": "toaster"}, "device='toaster': use auto, cpu, cuda or cuda:N"),
        ({"numerics": 5}, "numerics=5: choose one of default, strict"),
        ({"numerics": "foo"}, "numerics='foo': choose one of default, strict"),
        ({"trace": 5}, "trace=5: give the name of a file, or leave it out"),
        ({"trace": ""}, "trace='': give the name of a file"),
        ({"trace": True}, "trace=True: give the name of a file"),
        ({"shadow_rate": "x"}, "shadow_rate='x': must be a number from 0 to 1"),
        ({"shadow_rate": float("nan")}, "shadow_rate=nan: must be a number from 0 to 1"),
        ({"cache_reserve": None}, "cache_reserve=None: must be a number from 0 to 1"),
        ({"routing": 5}, "routing=5: give RoutingRules, or leave it out"),
        ({"routing": {}}, "routing={}: give RoutingRules, or leave it out"),
        ({"profile": 5}, "profile=5: use auto, off, measure, or an existing file"),
        ({"profile": None}, "profile=None: use auto, off, measure, or an existing file"),
        ({"on_profile": 5}, "on_profile=5: give a function that takes a text, or leave it out"),
        ({"cache_tokens": "x"}, "cache_tokens='x': must be a whole number of at least 1"),
        ({"cache_tokens": 1.5}, "cache_tokens=1.5: must be a whole number of at least 1"),
        ({"max_batch_size": None}, "max_batch_size=None: must be a whole number of at least 1"),
        ({"max_prompt_tokens": "x"}, "max_prompt_tokens='x': must be a whole number of at least 1"),
        ({"max_step_tokens": True}, "max_step_tokens=True: must be a whole number of at least 1"),
    ],
    ids=str,
)
def test_c7_a_bad_option_is_named_before_anything_is_loaded(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    for name in ("model_folder", "open_target", "load_tokenizer"):
        monkeypatch.setattr(f"foretoken.engine.llm.{name}", Fault(lambda *_: None))
    with pytest.raises(InputError, match=message):
        LLM(**{"model": pair.target} | options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            SpecConfig(),
            (
                "routing=.*: rules hold where the number of draft tokens is open, and nobody drafts: name a "
                "drafter, or leave this out"
            ),
        ),
        (
            SpecConfig("ngram", num_draft=3),
            "routing=.*: rules hold where .*, and num_draft=3 is set: leave that to 'auto', or leave this out",
        ),
    ],
)
def test_w8_rules_that_nobody_would_ask_are_refused(pair: SimpleNamespace, spec: SpecConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(pair.target, spec=spec, routing=RoutingRules(min_tokens_to_speculate=4))
    for open_spec in (None, SpecConfig("ngram"), SpecConfig("auto")):  # None: every request says it itself
        LLM(
            pair.target,
            spec=open_spec,
            cache_tokens=256,
            profile="off",
            routing=RoutingRules(min_tokens_to_speculate=4),
        ).close()


def test_a_stream_is_checked_and_its_prompt_read_at_the_call(llm: LLM) -> None:
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=4)
    (whole,) = llm.generate(prompt, params)
    pieces = llm.stream(prompt, params)
    prompt[:] = [9, 9]
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    with pytest.raises(InputError, match="prompt"):
        llm.stream([-1], params)
    check_idle(llm)


def test_c7_things_of_the_wrong_kind_in_a_request(llm: LLM) -> None:
    uses: list[tuple[Callable[[], object], str]] = [
        (lambda: llm.stream([1], 0), "params=0: give SamplingParams"),  # type: ignore[arg-type]
        (lambda: llm.stream([1], "hot"), "params='hot': give SamplingParams"),  # type: ignore[arg-type]
        (lambda: llm.stream([1], spec=""), "spec='': give SpecConfig"),  # type: ignore[arg-type]
        (lambda: llm.stream(5), "prompt=5: give a text or a list of token ids"),  # type: ignore[arg-type]
        (lambda: llm.submit(None, LONG, SpecConfig()), "prompt=None: give a text or a list of token ids"),  # type: ignore[arg-type]
        (lambda: llm.submit([1], LONG, "ngram"), "spec='ngram': give SpecConfig"),  # type: ignore[arg-type]
        (lambda: llm.prepare("ngram"), "spec='ngram': give SpecConfig"),  # type: ignore[arg-type]
        (lambda: llm.generate([[1]], on_step=5), "on_step=5: give a function"),  # type: ignore[arg-type]
        (lambda: llm.encode(5), "text=5: must be a text"),  # type: ignore[arg-type]
        (lambda: llm.encode_plain("prediction", 5), "prediction=5: must be a text"),  # type: ignore[arg-type]
    ]
    for use, message in uses:
        with pytest.raises(InputError, match=message):
            use()
    check_idle(llm)


def test_cache_tokens_is_honoured_by_models_of_transformers_too(tmp_path: Path) -> None:
    with LLM(tiny_checkpoint(tmp_path, "gpt2"), cache_tokens=48) as small:
        assert small.target.capacity_tokens == 48


def test_per_prompt_lists_must_fit(llm: LLM) -> None:
    for values in ([LONG], [LONG] * 3, []):
        with pytest.raises(
            InputError, match=f"params='{len(values)} values': give one value, or one for each of the 2 prompts"
        ):
            llm.generate([[1], [2]], values)
    with pytest.raises(InputError, match="spec='3 values': give one value"):
        llm.generate([[1], [2]], LONG, [SpecConfig()] * 3)
    check_idle(llm)


# ---- pairs that do not belong together


@pytest.fixture(scope="module")
def mismatched(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("mismatched")
    for name, vocab, texts in (
        ("target", 300, ()),
        ("other-words", 300, ("zzzz yyyy xxxx " * 50,)),
        ("other-size", 280, ()),
    ):
        tiny_checkpoint(
            folder / name, "llama", num_hidden_layers=2 if name == "target" else 1, hidden_size=32, vocab_size=vocab
        )
        tiny_tokenizer(folder / name, vocab, texts)
    return SimpleNamespace(**{path.name.replace("-", "_"): path for path in folder.iterdir()})


def test_a_draft_of_another_vocabulary_is_refused(mismatched: SimpleNamespace) -> None:
    with LLM(mismatched.target, cache_tokens=256) as target:
        for _ in range(2):  # the failed attempt is not remembered as a drafter
            with pytest.raises(
                MismatchError, match="has another tokenizer than the target: 300 against 280 tokens"
            ) as caught:
                target.generate(
                    [[1]], spec=SpecConfig("draft_model", str(mismatched.other_size), draft_vocabulary="same")
                )
        assert (caught.value.exit_code, str(mismatched.other_size) in str(caught.value)) == (3, True)
        assert len(target.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_draft_of_another_tokenizer_is_refused(mismatched: SimpleNamespace) -> None:
    """Equal sizes are not enough: the first token that means something else is named."""
    with pytest.raises(
        MismatchError, match=r"has another tokenizer than the target: .*token \d+ is '.+' here and '.+' there"
    ):
        LLM(
            mismatched.target,
            SpecConfig("draft_model", str(mismatched.other_words), draft_vocabulary="same"),
            cache_tokens=256,
        )


def test_a_draft_as_large_as_the_target_is_warned_about(pair: SimpleNamespace) -> None:
    with pytest.warns(
        UserWarning, match="MB of weights to read per step, the target .* drafting costs as much as decoding"
    ):
        LLM(pair.target, SpecConfig("draft_model", str(pair.target)), cache_tokens=256).close()


def test_a_draft_that_does_not_exist(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        llm.generate([[1]], spec=SpecConfig("draft_model", str(tmp_path / "nowhere")))
    check_idle(llm)
