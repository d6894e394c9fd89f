"""Sampling parameters and SpecConfig refuse bad values by field, value and remedy."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

import foretoken
from foretoken import (
    ConfigError,
    InputError,
    SamplingParams,
    SpecConfig,
)
from foretoken.field_text import from_mapping

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
    ({"presence_penalty": 2.5}, r"presence_penalty=2.5: must lie in \[-2, 2\]"),
    ({"frequency_penalty": NOT_A_NUMBER}, "frequency_penalty=nan: must be a finite number"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0: must lie in \[0.001, 100\]"),
    ({"logit_bias": {3: 101}}, r"logit_bias=101: must lie in \[-100, 100\]"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias='3': must be a whole number"),
    ({"logit_bias": [1]}, r"logit_bias=\[1\]: must map token ids to numbers"),
    ({"bad_words": "no"}, "bad_words='no': must be a list"),
    ({"bad_words": [""]}, "bad_words='': each must be a text or a list of token ids, and not empty"),
    ({"logprobs": -1}, "logprobs=-1: must be at least 0"),
    ({"logprobs": True}, "logprobs=True: must be a whole number"),
    ({"logprobs_of": "raw"}, "logprobs_of='raw': must be 'distribution' or 'model'"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs=1.5: must be a whole number"),
    ({"min_tokens": 65}, "min_tokens=65: must be at most max_tokens, 64"),
    ({"n": 0}, "n=0: must be at least 1"),
    ({"ignore_eos": "no"}, "ignore_eos='no': must be True or False"),
    ({"grammar": "b", "regex": "a"}, "grammar='b': the answer has a structure already"),
    ({"regex": ""}, "regex='': must be a text of at least one character"),
    ({"json_schema": 3}, "json_schema=3: must be a schema"),
    ({"prediction": ""}, "prediction='': must be a text or a list of token ids, and not empty"),
    ({"prediction": 5}, "prediction=5: must be a text or a list of token ids"),
    ({"tenant": 5}, "tenant=5: must be a text"),
    ({"slice": None}, "slice=None: must be a text"),
]


@pytest.mark.parametrize(
    ("values", "message"), BAD_SAMPLING, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
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
        (
            {"drafter": "oracle"},
            (
                "drafter='oracle': choose one of draft_model, ngram, suffix, recycling, predicted, "
                "early_exit, eagle, medusa, block, mtp, lookahead, cascade, mix, auto, or none"
            ),
        ),
        ({"rule": "lucky"}, "rule='lucky': choose one of auto, greedy, rejection"),
        ({"drafter": "ngram", "draft": "x"}, "draft='x': only drafter='draft_model' takes it"),
        ({"draft": "x"}, "draft='x': only drafter='draft_model' takes it, not drafter=None"),
        ({"num_draft": 5}, "num_draft=5: nobody drafts: name a drafter, or leave it out"),
        ({"num_draft": 0}, "num_draft=0: nobody drafts: name a drafter, or leave it out"),
        ({"rule": "block"}, "rule='block': nobody drafts: name a drafter, or leave it out"),
        ({"allow_lossy": True, "rule": "typical"}, "rule='typical': nobody drafts: name a drafter, or leave it out"),
        ({"draft_probability": 0.5}, "draft_probability=0.5: needs a drafter that samples"),
        ({"min_confidence": 0.5}, "min_confidence=0.5: needs a drafter that samples"),
        ({"draft_top_k": 2}, "draft_top_k=2: needs a drafter that samples"),
        (
            {"draft_dtype": "int8"},
            "only drafter='draft_model', 'eagle', 'medusa', 'block' or 'mtp' takes it, not drafter=None",
        ),
        (
            {"draft_vocabulary": "same"},
            "draft_vocabulary='same': only drafter='draft_model' takes it, not drafter=None",
        ),
        ({"corpus": "file"}, "corpus='file': only drafter='suffix' takes it, not drafter=None"),
        ({"exit_layer": 2}, "exit_layer=2: only drafter='early_exit' takes it, not drafter=None"),
        ({"skip_layers": (1,)}, r"skip_layers=\(1,\): only drafter='early_exit' takes it, not drafter=None"),
        ({"lookahead_window": 5}, "lookahead_window=5: only drafter='lookahead' takes it, not drafter=None"),
        ({"lookahead_ngram": 5}, "lookahead_ngram=5: only drafter='lookahead' takes it, not drafter=None"),
        (
            {"tree": "static"},
            "tree='static': only drafter='draft_model', 'eagle', 'medusa', 'block' or 'mtp' takes it, not drafter=None",
        ),
        ({"branching": 2}, "branching=2: a chain does not branch"),
        ({"options": {"width": 3}}, "options={'width': 3}: are a drafter's"),
        ({"drafter": "ngram", "options": 3}, "options=3: must be a mapping"),
        ({"parts": ("ngram",)}, "parts=.*: drafter=None has no parts"),
        ({"drafter": "ngram", "corpus": "file"}, "corpus='file': only drafter='suffix' takes it"),
        (
            {"drafter": "ngram", "tree": "static"},
            "tree='static': only drafter='draft_model', 'eagle', 'medusa', 'block' or 'mtp' takes it",
        ),
        ({"drafter": "ngram", "lookahead_window": 5}, "lookahead_window=5: only drafter='lookahead' takes it"),
        ({"num_draft": -1}, "num_draft=-1: must be at least 0"),
        ({"num_draft": 100_000}, "num_draft=100000: must be at least 0 and at most 1024"),
        ({"num_draft": "many"}, "num_draft='many': must be a whole number"),
        ({"num_draft": 2.0}, "num_draft=2.0: must be a whole number"),
        ({"drafter": "early_exit", "exit_layer": 0}, "exit_layer=0: must be at least 1"),
        ({"drafter": "early_exit", "exit_layer": "first"}, "exit_layer='first': must be a whole number"),
        ({"drafter": "ngram", "exit_layer": 2}, "exit_layer=2: only drafter='early_exit' takes it"),
        ({"drafter": "ngram", "skip_layers": "auto"}, "skip_layers='auto': only drafter='early_exit' takes it"),
        (
            {"drafter": "early_exit", "skip_layers": ()},
            r"skip_layers=\(\): must be 'auto' or a list of layer numbers, and not empty",
        ),
        ({"drafter": "early_exit", "skip_layers": "3"}, "skip_layers='3': must be 'auto' or a list of layer numbers"),
        ({"drafter": "early_exit", "skip_layers": (1, -1)}, "skip_layers=-1: must be at least 0"),
        (
            {"drafter": "early_exit", "exit_layer": 2, "skip_layers": (1,)},
            r"skip_layers=\(1,\): stop early \(exit_layer=2\) or leave layers out",
        ),
        (
            {"drafter": "suffix", "draft_top_k": 2},
            r"draft_top_k=2: needs a drafter that samples from a distribution \(draft_model, early_exit, eagle, medusa",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_w8_bad_spec_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        SpecConfig(**values)
    assert (caught.value.field, caught.value.exit_code) == (list(values)[-1], 2)


BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    (
        {"drafter": "ngram", "parts": ("suffix",)},
        "parts=.*: drafter='ngram' has no parts; composite drafters: cascade, mix",
    ),
    ({"drafter": "mix", "parts": "ngram"}, "parts='ngram': must be a list of drafters"),
    ({"drafter": "mix", "parts": (3,)}, "parts=3: each must be the name of a drafter or a SpecConfig"),
    ({"drafter": "mix", "parts": ("oracle",)}, "drafter='oracle': choose one of"),
    ({"drafter": "mix", "parts": (SpecConfig(),)}, "names no drafter"),
    (
        {"drafter": "mix", "parts": ("ngram", "mix")},
        "parts='mix': cannot be a part of drafter='mix'; name its parts here instead",
    ),
    (
        {"drafter": "cascade", "draft": "d", "parts": ("cascade", "draft_model")},
        "parts='cascade': cannot be a part of drafter='cascade'",
    ),
    (
        {"drafter": "cascade", "draft": "d", "parts": ("mix", "draft_model")},
        "parts='mix': .*; put the cascade into the mix instead",
    ),
    (
        {"drafter": "mix", "parts": ("ngram", "draft_model")},
        "draft=None: part 'draft_model' of drafter='mix' needs the folder",
    ),
    ({"drafter": "cascade"}, "draft=None: part 'draft_model' of drafter='cascade' needs the folder"),
    (
        {"drafter": "mix", "parts": ("ngram", "lookahead")},
        "parts='lookahead': its probes run beside its own draft tokens",
    ),
    (
        {"drafter": "mix", "draft": "d", "tree": "static"},
        "tree='static': a mix merges other drafts with chains only",
    ),
    (
        {"drafter": "cascade", "draft": "d", "parts": ("ngram", SpecConfig("draft_model", "d", tree="static"))},
        "a cascade drafts chains",
    ),
    (
        {
            "drafter": "cascade",
            "draft": "d",
            "parts": ("ngram", SpecConfig("draft_model", "d", draft_vocabulary="strings")),
        },
        "share the target's tokens",
    ),
    (
        {"drafter": "cascade", "draft": "d", "parts": ("draft_model",)},
        "a cascade has two levels at least, cheapest first",
    ),
    (
        {"drafter": "cascade", "draft": "d", "parts": ("draft_model", "ngram")},
        "parts='ngram': every level of a cascade above the first verifies",
    ),
    (
        {"drafter": "cascade", "draft": "d", "draft_probability": 0.5},
        "draft_probability=0.5: a cascade drafts every position",
    ),
    ({"drafter": "mix", "parts": (SpecConfig("ngram", rule="tree"),)}, "rule='tree': one rule decides for all parts"),
    (
        {"drafter": "mix", "draft": "d", "parts": ("draft_model", "cascade")},
        "one part of a mix at most may ask a model; choose among several with drafter='auto'",
    ),
    (
        {"drafter": "mix", "draft": "a", "parts": (SpecConfig("draft_model", draft="b"),)},
        "draft='a': no part takes it over",
    ),
    ({"drafter": "mix", "draft": "a", "parts": ("ngram",)}, "draft='a': only drafter='draft_model' takes it"),
    ({"drafter": "mix", "min_confidence": 0.4}, "min_confidence=0.4: needs a drafter that samples from a distribution"),
    (
        {"drafter": "mix", "parts": (SpecConfig("draft_model", draft="a", draft_probability=0.5),)},
        "draft_probability=0.5: must be the same beside drafter='mix' and in its parts",
    ),
]


@pytest.mark.parametrize(
    ("values", "message"),
    BAD_PARTS,
    ids=[f"{values['drafter']} {number}" for number, (values, _) in enumerate(BAD_PARTS)],
)
def test_bad_parts(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpecConfig(**values)


def test_parts_take_over_what_their_drafter_reads() -> None:
    mix = SpecConfig("mix", "d", corpus="c.txt", min_confidence=0.3)
    assert [part.drafter for part in mix.configs] == ["ngram", "suffix", "recycling", "draft_model"]
    assert mix.configs[1] == SpecConfig("suffix", corpus="c.txt")
    assert mix.configs[3] == SpecConfig("draft_model", "d", min_confidence=0.3)
    assert replace(mix, draft="e").configs[3].draft == "e"  # the usual parts follow the fields
    assert [part.drafter for part in SpecConfig("mix").configs] == ["ngram", "suffix", "recycling"]
    assert SpecConfig("cascade", "d").configs == SpecConfig("cascade", "d", parts=("ngram", "draft_model")).configs
    nested = SpecConfig("mix", "d", parts=("recycling", "cascade"), min_confidence=0.2)
    assert nested.configs[1] == SpecConfig("cascade", "d", min_confidence=0.2)
    assert nested.leaves == {"recycling", "ngram", "draft_model"}


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"temprature=0\.5: unknown option of SamplingParams; did you mean 'temperature'"
    ):
        from_mapping(SamplingParams, {"temprature": 0.5})
    with pytest.raises(
        ConfigError, match="zzz=1: unknown option of SpecConfig; known options: drafter, draft, num_draft"
    ):
        from_mapping(SpecConfig, {"zzz": 1})
    for name in ("tenant", "slice", "prediction"):
        with pytest.raises(ConfigError, match=f"{name}='x': is a field of SamplingParams, not of SpecConfig"):
            from_mapping(SpecConfig, {name: "x"})
        with pytest.raises(TypeError, match=name):
            SpecConfig(**{name: "x"})
    assert from_mapping(SpecConfig, {"drafter": "ngram", "num_draft": 3}) == SpecConfig("ngram", num_draft=3)


@pytest.mark.parametrize(("verb", "given"), [("ab", 3), ("certify", 2), ("advise", 1), ("diagnose", 1)])
def test_an_option_that_a_measurement_does_not_have_is_refused_by_name(verb: str, given: int) -> None:
    measure = getattr(foretoken, verb)
    kind = f"{verb.capitalize()}Options"
    with pytest.raises(ConfigError, match=f"max_token=64: unknown option of {kind}; did you mean 'max_tokens'"):
        measure(*["x"] * given, max_token=64)


def test_a_requests_configuration_goes_with_its_request() -> None:
    """Without a garbage collection, which in a server's worker comes after thousands of requests."""
    gc.disable()
    try:
        spec = SpecConfig("ngram", num_draft=3)
        assert spec.drafter_options == (spec,)
        assert spec.leaves == {"ngram"}
        kept = weakref.ref(spec)
        del spec
        assert kept() is None
    finally:
        gc.enable()
