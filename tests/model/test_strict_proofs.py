"""Strict numerics: what is proven of a machine, and what happens when it is not so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.model import strict
from foretoken.model.attention import strict as strict_attention
from foretoken.model.attention.strict import key_range
from foretoken.model.interface import LanguageModel
from foretoken.model.layers import Linear
from foretoken.model.matrices.dense import has_amx
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from foretoken.model.row_kernels import row_kernels
from foretoken.model.strict import Proven, StrictModel, cut, prove
from tests.helpers.checkpoints import tiny_checkpoint
from tests.model.test_strict import BLOCK, Case, case, cases, extend, folders, one_thread, ragged

__all__ = ["case", "cases", "folders", "one_thread"]  # fixtures


def broken_linear(monkeypatch: pytest.MonkeyPatch, error: Callable[[int], Tensor | float]) -> None:
    """Add to every matrix product an error that follows from the number of rows."""
    whole = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: whole(self, x) * (1 + error(len(x))))


def noisy_from(count: int) -> Callable[[int], float]:
    return lambda num_rows: 0.01 * (num_rows >= count)


def noisy_by_place(num_rows: int) -> Tensor:
    return 0.01 * (torch.arange(num_rows)[:, None] == 7)


@pytest.mark.parametrize(
    ("error", "sizes"), [(noisy_from(48), (8, 16, 24, 32)), (noisy_from(9), (8,)), (noisy_by_place, (1,))]
)
def test_sizes_that_disagree_are_not_used(
    cases: Callable[[str, str], Case],
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[int], Tensor | float],
    sizes: tuple[int, ...],
) -> None:
    """On a machine whose kernels change with the number of rows, or with the place of a row, strict stays strict."""
    case = cases("llama", "float32")
    broken_linear(monkeypatch, error)
    proven = prove(case.decoder)
    assert proven.sizes == sizes
    model = StrictModel(case.decoder, 800, BLOCK)
    assert model.proven == proven
    model.open(9)
    expected = torch.cat([extend(model, 9, [token]) for token in case.text])
    model.close(9)
    assert ragged(model, case.text, expected, seed=1, num_rows=200) == 0
    model = case.model(800)
    model._proven = {torch.get_num_threads(): Proven((8, 16, 64), 64)}  # had it been believed without proof
    assert ragged(model, case.text, expected, seed=1, num_rows=200) > 0


def broken_attention(monkeypatch: pytest.MonkeyPatch, error: Callable[[int, int], float]) -> None:
    """Add to all attention an error that follows from the numbers of positions and of keys."""
    whole = strict.attend_together
    for module in (strict, strict_attention):
        monkeypatch.setattr(
            module, "attend_together", lambda q, k, *rest: whole(q, k, *rest) * (1 + error(len(q), k.shape[1]))
        )


def test_positions_that_do_not_agree_get_a_call_each(
    cases: Callable[[str, str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases("llama", "float32")
    broken_attention(monkeypatch, lambda positions, _: 0.01 * (positions > 1))
    assert prove(case.decoder).positions_per_call == 1
    assert ragged(StrictModel(case.decoder, 800, BLOCK), case.text, case.expected, seed=1, num_rows=200) == 0
    assert (
        ragged(case.model(), case.text, case.expected, seed=1, num_rows=200) > 0
    )  # had it been believed without proof


@pytest.mark.parametrize("name", ["llama", "mistral", "mistral-sliding"])
def test_the_number_of_keys_follows_from_the_position(
    cases: Callable[[str, str], Case], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With kernels that give other results for another number of keys, plain and batched decoding still agree."""
    case = cases(name, "float32")
    broken_attention(monkeypatch, lambda _, keys: 0.001 * keys)
    expected = case.plain(case.text)
    assert not torch.equal(expected, case.expected)
    assert ragged(case.model(), case.text, expected, seed=1, num_rows=300) == 0


def test_a_new_number_of_threads_is_proven_anew(
    cases: Callable[[str, str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = StrictModel(cases("llama", "float32").decoder, 400, BLOCK), []
    monkeypatch.setattr(strict, "prove", lambda decoder: asked.append(torch.get_num_threads()) or Proven((8,), 64))
    model.open(0)
    for count in (1, 2, 1, 2):
        torch.set_num_threads(count)
        extend(model, 0, [1])
    assert asked == [2]


def test_tiles_by_hand() -> None:
    sizes = (8, 16, 64)
    assert [*cut(0, sizes)] == []
    assert [*cut(1, sizes)] == [(0, 1, 8)]
    assert [*cut(9, sizes)] == [(0, 9, 16)]
    assert [*cut(200, sizes)] == [(0, 64, 64), (64, 128, 64), (128, 192, 64), (192, 200, 8)]
    assert [*cut(3, (1,))] == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]


def test_key_ranges_by_hand() -> None:
    assert [key_range(position, None) for position in (0, 63, 64, 128)] == [(0, 64), (0, 64), (0, 128), (0, 192)]
    assert [key_range(position, 7) for position in (63, 69, 70, 130)] == [(0, 64), (0, 128), (64, 128), (64, 192)]


def test_opening_by_name(tmp_path: Path) -> None:
    native, other = tiny_checkpoint(tmp_path / "native", "llama"), tiny_checkpoint(tmp_path / "other", "gpt2")
    opened: LanguageModel = open_model(native, cache_tokens=64, numerics="strict")
    assert isinstance(opened, StrictModel)
    for numerics in ("strict", "default"):
        packed = open_model(native, "bfloat16", cache_tokens=64, numerics=numerics)
        is_exact = type(packed) is PagedModel and packed.numerics == "strict"
        assert is_exact == (row_kernels() is not None and not has_amx())
    assert type(open_model(native, cache_tokens=64)) is PagedModel
    with pytest.raises(
        ConfigError, match=r"numerics='strict': .*other runs through transformers, .*use numerics='default'"
    ):
        open_model(other, numerics="strict")
    with pytest.raises(ConfigError, match="numerics='exact': choose one of default, strict"):
        open_model(native, numerics="exact")
