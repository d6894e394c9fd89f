"""Every family and every form of weights on 2 and 3 ranks: what one process answers, drawn by every rule.

Where compiled kernels multiply everywhere, log-probabilities are compared to the last bit; elsewhere tokens.
`make proof` runs families and types of GGUF files, each on 2 or on 3 ranks, the release the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import RULES
from foretoken.core import TokenLogprobs
from foretoken.model.layer_pass import has_exact_rows
from foretoken.model.matrices.dense import has_amx
from foretoken.model.paged import PagedModel
from tests.engine.test_exactness import PROMPTS
from tests.helpers.checkpoints import ONE_OF_EACH, variant
from tests.helpers.forked_ranks import forked
from tests.helpers.gguf_files import QUANTISED, write_gguf
from tests.helpers.packed_files import FORMS, write_packed

pytestmark = [
    pytest.mark.filterwarnings("ignore:the draft has .* MB of weights to read"),
    pytest.mark.filterwarnings("ignore::foretoken.model.loader.DequantisedWarning"),
]
# Divisible by 2 and by 3; the second one also into blocks of 256 inputs.
SHAPE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 192}
EXPERTS = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
BLOCKS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "intermediate_size": 768,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
NOT_DIVIDED = ("olmo2",)  # see `test_what_is_not_divided_is_refused_by_name`
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss")
WORLDS = (2, 3)
Answers = list[tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path) -> Iterator[None]:
    with forked(tmp_path / "no-fault"):
        yield


def answers(folder: Path, world: int, options: dict[str, Any]) -> tuple[Answers, bool]:
    """Greedy and drawn by every rule, plain and with drafts, side by side; and whether the logits are exact."""
    drawn = [
        replace(drafter, rule=rule, allow_lossy=True)
        for rule in RULES
        for drafter in (SpecConfig("ngram", num_draft=3), SpecConfig("early_exit", exit_layer=1, num_draft=3))
        if rule != "greedy"
    ]
    specs = [SpecConfig(), SpecConfig("ngram", num_draft=3), *drawn]
    params = [GREEDY, GREEDY, *(replace(GREEDY, temperature=0.8, seed=seed) for seed in range(len(drawn)))]
    settings = {"dtype": "float32", "cache_tokens": 2048} | options
    with LLM(folder, SpecConfig(), tensor_parallel=world, **settings) as llm:
        found = llm.generate(PROMPTS[: len(specs)], params, specs)
        assert isinstance(llm.target, PagedModel)
        return [(out.token_ids, out.logprobs) for out in found], has_exact_rows(llm.target.decoder)


def check(folder: Path, worlds: Sequence[int] = WORLDS, **options: Any) -> bool:
    """Ranks answer as one process; whether that was compared to the last bit."""
    expected, is_exact = answers(folder, 1, options)
    for world in worlds:
        found, is_exact_too = answers(folder, world, options)
        assert is_exact_too == is_exact
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert not is_exact or found == expected
    return is_exact


def checkpoint(folder: Path, name: str) -> Path:
    return variant(folder, name, **SHAPE, **(EXPERTS if "moe" in name else {}))


def in_turns(names: Iterable[str]) -> list[Any]:
    """Each name on 2 or on 3 ranks, and before a release on both."""
    usual = list(zip(names, itertools.cycle([(2,), (3,)])))
    return [*usual, *(pytest.param(name, WORLDS, marks=pytest.mark.release) for name, _ in usual)]


@pytest.mark.parametrize(("name", "worlds"), in_turns(name for name in ONE_OF_EACH if name not in NOT_DIVIDED))
def test_every_family(tmp_path: Path, name: str, worlds: tuple[int, ...]) -> None:
    """Codes to the last bit; floats on 2 ranks, and strict ones to the last bit on 3; before a release on both."""
    folder = checkpoint(tmp_path, name)
    assert check(folder, worlds, weights="int8")
    if 2 in worlds:
        assert not check(folder, worlds)
    if 3 in worlds:
        assert check(folder, worlds, dtype="bfloat16", numerics="strict") != has_amx()


@pytest.mark.release
@pytest.mark.parametrize("options", [{}, {"numerics": "strict"}, {"cache_dtype": "model"}], ids=str)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_integers(tmp_path: Path, weights: str, options: dict[str, str]) -> None:
    for name in ("llama", "gemma2", "gpt-oss"):
        assert check(checkpoint(tmp_path / name, name), weights=weights, **options)


@pytest.mark.parametrize(("kind", "worlds"), in_turns(QUANTISED))
def test_every_type_of_gguf(tmp_path: Path, kind: str, worlds: tuple[int, ...]) -> None:
    assert check(write_gguf(tmp_path / "codes.gguf", variant(tmp_path, "llama", **BLOCKS), kind), worlds)


@pytest.mark.release
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "MXFP4"])
def test_mixtures_in_codes(tmp_path: Path, name: str, kind: str) -> None:
    assert check(write_gguf(tmp_path / "codes.gguf", checkpoint(tmp_path, name), kind))


@pytest.mark.release
@pytest.mark.parametrize("form", FORMS)
def test_every_packed_form(tmp_path: Path, form: str) -> None:
    plain = variant(tmp_path / "plain", "llama", **SHAPE)
    check(write_packed(tmp_path / "packed", plain, FORMS[form]))
