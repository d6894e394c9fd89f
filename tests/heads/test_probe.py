"""The trial at load finds a head that is wired wrongly, and names what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.draft.open_head import _deviations, _other_configs, _own_text, probe, probe_at_load
from foretoken.errors import SpeculationWarning
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import load_head, make_head, save_head
from foretoken.heads.config import HeadConfig
from foretoken.model.interface import SharesWeights
from foretoken.model.loader import read_config
from foretoken.model.open import open_model
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.stored_heads import block_config, eagle_config, medusa_config, stored_head

ROWS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8, seed=1)


class Blind:
    """A target whose embeddings say nothing: a head has to read the states. Random targets repeat a few tokens, and
    the token alone would tell the next one.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens) * 0


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Any:
    return open_model(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def target(seeing: Any) -> Any:
    return Blind(seeing)


def learnt(config: HeadConfig, target: SharesWeights, num_steps: int = 120) -> Head:
    """A head that knows the text of the trial by heart."""
    head = stored_head(config, dtype=torch.float32)
    with torch.inference_mode(False):
        batch = _own_text(target, ROWS, list(range(9)))
        optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
        for step in range(num_steps):
            losses = []
            for place in head.places(batch, target, 4, seed=step):
                wanted = batch.tokens[0, place.rows + 1]  # the vocabulary is whole
                losses.append(F.cross_entropy(place.logits, wanted))
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
    return head.requires_grad_(False)


def with_config(head: Head, **changes: Any) -> Head:
    """The same weights, read with another configuration."""
    other = make_head(replace(head.config, **changes), head.vocabulary)  # type: ignore[type-var]
    other.load_state_dict(head.state_dict())
    return other


def settings(folder: Path) -> Any:
    return read_config(folder)


def test_the_text_is_what_the_target_writes(seeing: Any) -> None:
    before = seeing.num_free_tokens()
    batch = _own_text(seeing, 6, [0, 8])
    assert seeing.num_free_tokens() == before
    logits = seeing.output_logits(batch.normed[0])
    assert torch.equal(logits.argmax(-1), batch.tokens[0, 1:])
    assert torch.equal(batch.states[0][0], seeing.embed(batch.tokens[0, :-1]))


@pytest.fixture(scope="module")
def known(target: SharesWeights, folder: Path) -> Head:
    return learnt(eagle_config(target=settings(folder)), target)


def test_a_head_that_fits_is_left_alone(known: Head, target: SharesWeights) -> None:
    found = probe(known, target, num_rows=ROWS)
    assert found.agreement[0] > 0.7
    assert found.advice() is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"taps": (1, 3, 4)}, "layers [2, 4, 5] in place of [1, 3, 4]"),
        pytest.param({"taps": (3, 5, 6)}, "layers [2, 4, 5] in place of [3, 5, 6]", marks=pytest.mark.repeated),
        ({"norm_before_residual": True}, "norm_before_residual=false"),
        ({"norm_output": True}, "norm_output=false"),
    ],
)
def test_the_mistake_is_named(known: Head, target: SharesWeights, wrong: dict[str, Any], words: str) -> None:
    assert words in str(probe(with_config(known, **wrong), target, num_rows=ROWS).advice())


def test_what_is_tried_beside_an_eagle_head(folder: Path) -> None:
    names = [name for name, _ in _other_configs(eagle_config(target=settings(folder), norm_output=True))]
    assert names == [
        "layers [1, 3, 4] in place of [2, 4, 5]",
        "layers [3, 5, 6] in place of [2, 4, 5]",
        "norm_before_residual=true",
        "norm_output=false",
    ]


def test_layers_of_a_block_drafter(target: SharesWeights, folder: Path) -> None:
    head = learnt(block_config(target=settings(folder), taps=(2, 5), markov_rank=0), target, 120)
    assert probe(head, target, num_rows=ROWS).agreement[0] > 0.8
    found = probe(with_config(head, taps=(1, 4)), target, num_rows=ROWS)
    assert found.better is not None
    assert found.better[0] == "layers [2, 5] in place of [1, 4]"


def test_an_untrained_head_is_near_chance(target: SharesWeights, folder: Path, tmp_path: Path) -> None:
    config = settings(folder)
    save_head(stored_head(medusa_config(target=config), seed=3), tmp_path, config)
    found = probe(load_head(tmp_path, config, dtype="float32"), target)
    assert found.is_near_chance
    assert "near chance" in str(found.advice())


def test_rows_that_repeat_are_one_observation() -> None:
    """A minute's head of smollm2 was blamed by 48 rows, nearly all of which were one repeated token."""
    tokens = [5, 6, 7] + [8] * 40
    ours = {(0, row): (False, -1.0) for row in range(42)}
    theirs = {(0, row): (False, log) for row, log in enumerate([-1.1, -0.9, -1.05, *[-0.5] * 39])}
    assert 0.0 < _deviations(theirs, ours, tokens) < 1.0
    assert _deviations(theirs, ours, list(range(43))) > 10.0, "where each row says something else, all count"


def test_a_wiring_that_is_right_by_chance_is_no_remedy(
    target: SharesWeights, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`agrees at 0% of 16 rows; with layers [3, 16, 28] in place of [2, 15, 27] it would be 0%`."""
    monkeypatch.setattr("foretoken.draft.open_head._deviations", lambda *scores: 9.0)
    found = probe(stored_head(eagle_config(target=settings(folder)), seed=3, dtype=torch.float32), target)
    assert found.is_near_chance
    assert found.better is None


def test_the_trial_at_load_warns_and_can_be_turned_off(
    target: SharesWeights, folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    head = stored_head(medusa_config(target=settings(folder)), seed=3, dtype=torch.float32)
    probe_at_load(head, target)
    assert not recwarn.list
    monkeypatch.delenv("FORETOKEN_PROBE")
    with pytest.warns(SpeculationWarning, match="near chance"):
        probe_at_load(head, target)
