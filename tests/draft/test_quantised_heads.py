"""Trained heads in 8 and 4 bits: answers stay the target's; heads have its number of bits unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import QUANTISED
from foretoken.draft.base import AdaptableDrafter
from foretoken.draft.group import drafter_key
from foretoken.errors import ConfigError, InputError
from foretoken.heads.base import Head
from foretoken.heads.footprint import head_shape
from foretoken.heads.weights import head_bytes
from foretoken.kernels.build import KernelWarning
from foretoken.model.footprint import shape_of
from foretoken.model.layers import Linear
from foretoken.model.loader import read_config
from foretoken.model.matrices import grouped_kernel
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.matrices.held import format_of
from tests.helpers.checkpoints import token_ids
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_heads import tiny_head

KINDS = ("eagle", "eagle:1", "medusa", "medusa:hydra", "block", "block:cut")
PROMPTS = [token_ids(5 + 3 * i, seed=i) * 2 for i in range(5)]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def heads(pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpecConfig]:
    """A random head of each kind for the target."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        kind: SpecConfig(
            kind.partition(":")[0], head=str(tiny_head(folder / kind.replace(":", "-"), pair.target, kind)), num_draft=3
        )
        for kind in KINDS
    }


def head_of(llm: LLM, spec: SpecConfig) -> Head:
    llm.prepare(spec)
    drafter = llm._drafters.drafters[drafter_key(spec)]
    assert isinstance(drafter, AdaptableDrafter)
    return drafter.head


def formats(head: Head) -> set[str]:
    """Of all matrices with enough outputs for the kernel."""
    wide = [module for module in head.modules() if isinstance(module, Linear) and module.out_features >= 16]
    return {format_of(one.packed) if isinstance(one.packed, GroupedWeight) else "plain" for one in wide}


@pytest.mark.parametrize("kind", QUANTISED)
def test_greedy_answers_are_plain_s(
    pair: SimpleNamespace, heads: dict[str, SpecConfig], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where near ties would show a single wrong bit; heads have the target's number of bits, and draft the
    same without a compiled kernel.
    """
    with LLM(pair.target, SpecConfig(), dtype="bfloat16", numerics="strict", weights=kind, cache_tokens=2048) as llm:
        plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
        for spec in heads.values():
            assert formats(head_of(llm, spec)) == {kind}
            outs = llm.generate(PROMPTS, LONG, spec=spec)
            assert [out.token_ids for out in outs] == plain
            assert sum(out.stats.num_drafted for out in outs) > 50
        kept = [out.stats.num_accepted for out in outs]
        monkeypatch.setattr(grouped_kernel, "kernel", lambda: None)
        again = llm.generate(PROMPTS, LONG, spec=spec)
        assert [out.token_ids for out in again] == plain
        assert [out.stats.num_accepted for out in again] == kept


def test_the_format_follows_from_the_target_unless_it_is_named(
    pair: SimpleNamespace, heads: dict[str, SpecConfig], tmp_path: Path
) -> None:
    spec = heads["block"]
    named = {kind: SpecConfig("block", head=spec.head, draft_dtype=kind) for kind in (*QUANTISED, "bfloat16")}
    with LLM(pair.target, SpecConfig(), dtype="bfloat16", cache_tokens=512) as llm:
        found = {kind: formats(head_of(llm, one)) for kind, one in {"auto": spec, **named}.items()}
        assert found == {"auto": {"int8"}, "int8": {"int8"}, "int4": {"int4"}, "bfloat16": {"plain"}}
        sizes = [head_bytes(head_of(llm, one)) for one in (spec, named["int8"], named["int4"])]
        assert sizes[0] == sizes[1] > sizes[2]
    with LLM(pair.target, SpecConfig(), dtype="bfloat16", cache_tokens=512, weights="int4") as llm:
        assert [formats(head_of(llm, named[kind])) for kind in named] == [{"int8"}, {"int4"}, {"plain"}]
    for kind, expected in (("Q8_0", "int8"), ("Q4_0", "int4"), ("F32", "plain")):
        path = write_gguf(tmp_path / f"{kind}.gguf", pair.target, kind)
        with LLM(path, SpecConfig(), cache_tokens=512) as llm:
            assert formats(head_of(llm, spec)) == {expected}, kind


def test_formats_that_a_head_cannot_have(pair: SimpleNamespace, heads: dict[str, SpecConfig]) -> None:
    """Refused by name; the engine goes on."""
    head = heads["eagle"].head
    with pytest.raises(ConfigError, match="draft_dtype='int2': choose one of auto"):
        SpecConfig("eagle", head=head, draft_dtype="int2")
    with LLM(pair.target, SpecConfig(), dtype="bfloat16", cache_tokens=512) as llm:
        with pytest.raises(ConfigError, match="draft_dtype='float32': a head runs in the number format of its target"):
            llm.generate([[1]], spec=SpecConfig("eagle", head=head, draft_dtype="float32"))
        assert len(llm.generate([[1]], LONG)[0].token_ids) == LONG.max_tokens
    with (
        LLM(pair.target, SpecConfig(), dtype="float64", cache_tokens=512) as llm,
        pytest.raises(InputError, match="draft_dtype='int8': does not go with dtype='float64'"),
    ):
        llm.generate([[1]], spec=SpecConfig("eagle", head=head, draft_dtype="int8"))


def test_without_a_compiler_drafters_are_not_quantised(
    pair: SimpleNamespace, heads: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head and a draft model: one warning each with the remedy, and the same answers."""
    draft = SpecConfig("draft_model", str(pair.draft), num_draft=3, draft_dtype="int4")
    head = SpecConfig("eagle", head=heads["eagle"].head, num_draft=3, draft_dtype="int4")
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048) as llm:
        plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
        monkeypatch.setenv("CXX", "no-such-compiler")
        for spec in (head, draft):
            with pytest.warns(KernelWarning, match="not quantised: .*no-such-compiler cannot be run"):
                llm.prepare(spec)
            assert [out.token_ids for out in llm.generate(PROMPTS, LONG, spec=spec)] == plain
        assert formats(head_of(llm, head)) == {"plain"}


@pytest.mark.parametrize("kind", ["auto", *QUANTISED])
def test_the_footprint_is_that_of_the_loaded_head(
    pair: SimpleNamespace, heads: dict[str, SpecConfig], kind: str
) -> None:
    """To the byte; keys and values and a feature for each position, nothing of those for Medusa."""
    target, config = shape_of(pair.target, "target", "float32"), read_config(pair.target)
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
        for name, spec in heads.items():
            assert spec.head is not None
            shape = head_shape(Path(spec.head), "head", config, target, kind)
            head = head_of(llm, SpecConfig(spec.drafter, head=spec.head, draft_dtype=kind))
            rotary = getattr(head, "rotary", None)
            tables = 0 if rotary is None else rotary.cos.nbytes + rotary.sin.nbytes
            assert shape.weight_bytes == head_bytes(head) + tables, name
            layer = getattr(head.config, "layer", None)
            numbers = 0 if layer is None else 2 * layer.num_layers * layer.num_kv_heads * layer.head_dim
            kept = 0 if layer is None else layer.hidden_size
            assert shape.kv_bytes_per_token == (numbers + kept) * torch.float32.itemsize
