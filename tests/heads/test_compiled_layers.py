"""The layers of trained heads in one compiled call: bit for bit what they compute one by one, also once weights were
replaced.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.heads import block as block_module
from foretoken.heads import eagle as eagle_module
from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.block import BlockHead, CachedAttention, admit_blocks
from foretoken.heads.config import BlockConfig, EagleConfig
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.weights import pack, replace_weights, weights_of
from foretoken.model.interface import Segment
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import cache_beside
from tests.helpers.checkpoints import randomise, token_ids, variant
from tests.helpers.compiled_pass import note_passes

TREE = (-1, 0, -1, 2, 2)
EAGLES: dict[str, dict[str, Any]] = {
    "1": {"version": 1},
    "1-two-layers": {"version": 1, "num_layers": 2},
    "3": {"version": 3},
    "3-two-layers": {"version": 3, "num_layers": 2},
    "3-norm-before-residual": {"version": 3, "norm_before_residual": True},
    "3-qk-norm": {"version": 3, "qk_norm": True},
    "3-output-bias": {"version": 3, "o_bias": True},
    "3-another-width": {"version": 3, "hidden_size": 128, "has_own_output": True},
}
BLOCKS = {"one-layer": 1, "two-layers": 2}
FORMATS = [("bfloat16", "auto"), ("bfloat16", "int4"), ("float32", "int8")]


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bf16 matrices, also on a processor where oneDNN's are taken."""
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: False)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each run of a head had a compiled pass."""
    return note_passes(monkeypatch, eagle_module, block_module)


def without_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (eagle_module, block_module):
        monkeypatch.setattr(module, "layer_pass", lambda *_, **__: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant(tmp_path_factory.mktemp("target"), "llama", head_dim=16)


def target_of(folder: Path, dtype: str) -> PagedModel:
    model = open_model(folder, dtype, cache_tokens=256)
    assert isinstance(model, PagedModel)
    return model


def eagle(target: PagedModel, name: str, weights: str) -> EagleHead:
    given = dict(EAGLES[name])
    version = given.pop("version")
    of_layer = {key: given.pop(key) for key in ("num_layers", "qk_norm", "o_bias", "hidden_size") if key in given}
    layer = replace(target.config, **{"num_layers": 1, **of_layer})
    taps = (target.num_layers,) if version == 1 else (0, 1, target.num_layers)
    size = layer.vocab_size
    config = EagleConfig(version, layer, target.config.hidden_size, target.num_layers, taps, size, **given)
    head = EagleHead(config, DraftVocabulary.whole(size))
    use(head, target, weights)
    return head


def block(target: PagedModel, num_layers: int, weights: str, is_causal: bool = True) -> BlockHead:
    layer = replace(target.config, model_type="qwen3", num_layers=num_layers, qk_norm=True)
    size, taps = layer.vocab_size, (1, target.num_layers)
    config = BlockConfig(layer, layer.hidden_size, target.num_layers, taps, size, 5, is_causal=is_causal)
    head = BlockHead(config, DraftVocabulary.whole(size))
    use(head, target, weights)
    return head


def use(head: Head, target: PagedModel, weights: str, seed: int = 3) -> None:
    """Random weights, laid out as those of a head in use."""
    head.to(target.decoder.norm.weight.dtype)
    randomise(head, seed)
    pack(head.requires_grad_(False), weights)


@torch.inference_mode()
def eagle_answers(head: EagleHead, target: PagedModel) -> list[Tensor]:
    """Of two texts in one batch, a chain behind the first and a tree behind the second."""
    runner, ids = CachedEagle(head, target), torch.tensor(token_ids(11))
    features = torch.randn(11, head.config.layer.hidden_size, generator=torch.Generator().manual_seed(1))
    features = features.to(head.norm_dtype)
    for sequence in (0, 1):
        runner.cache.open(sequence)
    both = runner.run(ids, features, [Segment(0, 6, (), 6), Segment(1, 5, (), 5)])
    chain = runner.run(ids[:1], both.feedback[5:6], [Segment(0, 0, (-1,), 1, 0)])
    deeper = runner.run(ids[1:2], chain.feedback, [Segment(0, 0, (-1, 0), 1, 1)])
    tree = runner.run(ids[:5], both.feedback[6:], [Segment(1, 0, TREE, 5, 0)])
    return [part for run in (both, chain, deeper, tree) for part in (run.logits, run.feedback)]


@torch.inference_mode()
def block_answers(head: BlockHead, target: PagedModel) -> list[Tensor]:
    """Of two texts in one batch, the second without new rows."""
    cache, dtype = cache_beside(target, head.config.layer, head.norm.weight.dtype), head.norm.weight.dtype
    context = torch.randn(9, head.config.layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    found: list[Tensor] = []
    for sequence in (0, 1):
        cache.open(sequence)
    for num_new, rows in (([4, 3], context[:7]), ([2, 0], context[7:])):
        admitted = admit_blocks(cache, [0, 1], num_new, [5, 3], head.config.is_causal)
        attention = CachedAttention(cache, admitted)
        tokens = torch.tensor([7, *[head.config.mask_token] * 4, 9, *[head.config.mask_token] * 2])
        found.append(head.run(tokens, rows, attention.positions, attention, target))
        admitted.commit(cache)
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "weights"), FORMATS)
@pytest.mark.parametrize("name", EAGLES)
def test_an_eagle_head(
    folder: Path, monkeypatch: pytest.MonkeyPatch, passes: list[bool], name: str, dtype: str, weights: str
) -> None:
    target = target_of(folder, dtype)
    head = eagle(target, name, weights)
    together = eagle_answers(head, target)
    assert passes == [True] * 4
    without_pass(monkeypatch)
    assert_same(together, eagle_answers(head, target))


@pytest.mark.parametrize(("dtype", "weights"), FORMATS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_drafter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, passes: list[bool], name: str, dtype: str, weights: str
) -> None:
    target = target_of(folder, dtype)
    head = block(target, BLOCKS[name], weights)
    together = block_answers(head, target)
    assert passes == [True, True]
    without_pass(monkeypatch)
    assert_same(together, block_answers(head, target))


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_replaced_weights_are_the_ones_that_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, passes: list[bool], weights: str
) -> None:
    """Each matrix on its own, as on-line adaptation may replace any."""
    target = target_of(folder, "bfloat16")
    plain = EagleHead(eagle(target, "1", weights).config, DraftVocabulary.whole(target.vocab_size))
    use(plain, target, weights, seed=9)
    for name, value in weights_of(plain).items():
        head = eagle(target, "1", weights)
        before = eagle_answers(head, target)
        replace_weights(head, {name: value})
        together = eagle_answers(head, target)
        with monkeypatch.context() as patch:
            patch.setattr(eagle_module, "layer_pass", lambda *_, **__: None)
            assert_same(together, eagle_answers(head, target))
        assert not torch.equal(together[0], before[0]), name
    assert all(passes)


def test_what_has_no_pass(folder: Path, passes: list[bool]) -> None:
    """Slots that see one another, matrices that are not packed, and biases of matrices that are read as one."""
    bf16, float32 = target_of(folder, "bfloat16"), target_of(folder, "float32")
    block_answers(block(bf16, 1, "auto", is_causal=False), bf16)
    eagle_answers(eagle(float32, "1", "auto"), float32)
    config = eagle(bf16, "1", "auto").config
    config = replace(config, layer=replace(config.layer, qkv_bias=True))
    biased = EagleHead(config, DraftVocabulary.whole(bf16.vocab_size))
    use(biased, bf16, "auto")
    eagle_answers(biased, bf16)
    assert passes == [False] * 10
