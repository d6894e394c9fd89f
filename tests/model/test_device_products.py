"""Where a GPU's kernels multiply (twins of torch's operations stand in for them), and what they make strict."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken.kernels import launches
from foretoken.kernels.launches import MAX_PRODUCT_ROWS, products_for
from foretoken.model import layers, strict
from foretoken.model.attention import choice
from foretoken.model.attention.choice import ATTENTION_VARIABLE
from foretoken.model.interface import Segment
from foretoken.model.layers import activated
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.model.strict import ExactDeviceModel, StrictModel, has_exact_launches, strict_kind
from tests.helpers.checkpoints import token_ids, variant
from tests.helpers.fake_cuda import fake_cuda, fake_model

# Biases, other activations, layers in parallel, norms behind MLP and attention, scaled residuals, no gate.
FAMILIES = ["llama-biases", "gemma2", "granite", "cohere", "glm4", "starcoder2", "qwen3-tied-biases"]


class Twin:
    """Stands for the module `product_triton`, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        self.calls.append("product" if residual is None else "added")
        out = torch.nn.functional.linear(x, weight, bias)
        return out if residual is None else residual + out

    def gated_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        self.calls.append("gated")
        return activated(torch.nn.functional.linear(x, weight, bias), activation, is_gated=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_multiply_by_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits as without, with every matrix multiplied once."""
    decoder, tokens = load_decoder(variant(tmp_path, name), dtype=torch.float64), torch.tensor(token_ids(9))

    def logits() -> Tensor:
        model = PagedModel(decoder, 64, 4)
        model.open(0)
        return model.forward(tokens, [Segment(0, 9, (), 9)]).logits

    expected, twin = logits(), Twin()
    monkeypatch.setattr(layers, "products_for", lambda *_: twin)
    torch.testing.assert_close(logits(), expected, atol=1e-12, rtol=1e-12)
    config = decoder.config
    gated = config.num_layers if config.is_gated else 0
    assert twin.calls.count("gated") == gated
    assert len(twin.calls) == 4 * config.num_layers + 1
    assert ("added" in twin.calls) == (name not in ("gemma2", "glm4", "granite"))  # others norm or scale what is added


def test_a_library_multiplies_many_rows_unless_they_are_to_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace()
    monkeypatch.setattr(launches, "launches_for", lambda _: module)
    monkeypatch.setattr(launches, "_product_triton", lambda: module)
    weight = torch.empty(4, 8, dtype=torch.bfloat16)
    few, many = (torch.empty(count, 8, dtype=torch.bfloat16) for count in (MAX_PRODUCT_ROWS, MAX_PRODUCT_ROWS + 1))
    assert products_for(few, weight) is module
    assert products_for(many, weight) is None
    assert products_for(many, weight, is_exact=True) is module
    assert products_for(few.float(), weight.float(), is_exact=True) is None
    assert products_for(few, weight.half(), is_exact=True) is None
    monkeypatch.setattr(launches, "launches_for", lambda _: None)
    assert products_for(few, weight) is None


@pytest.mark.parametrize(
    ("name", "dtype", "is_exact"),
    [
        ("llama", torch.bfloat16, True),
        ("qwen3-tied-biases", torch.float16, True),
        ("llama", torch.float32, False),  # multiplied by a library
        ("starcoder2", torch.bfloat16, False),  # layer norms are torch's
        ("mixtral", torch.bfloat16, False),
    ],
)
def test_what_they_make_strict(name: str, dtype: torch.dtype, is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (strict, choice):
        monkeypatch.setattr(module, "has_triton", lambda: True)
    with fake_cuda():
        decoder = fake_model(name, dtype).decoder
        assert has_exact_launches(decoder) == is_exact
        assert strict_kind(decoder) is (ExactDeviceModel if is_exact else StrictModel)
        if is_exact:
            model = ExactDeviceModel(decoder, 400, 4)
            assert model.numerics == "strict"
            assert decoder.lm_head.keeps_rows_exact
            assert all(layer.qkv_proj.keeps_rows_exact for layer in decoder.decoder_layers())
        monkeypatch.setenv(ATTENTION_VARIABLE, "batched")
        assert strict_kind(decoder) is StrictModel
