"""A head widened with its target predicts what the small pair predicts, with the same probabilities."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.draft.open_head import _own_text
from foretoken.errors import ConfigError
from foretoken.heads.checkpoint import load_head, save_head
from foretoken.heads.config import HeadConfig
from foretoken.model.architecture import ModelConfig
from foretoken.model.loader import read_config
from foretoken.model.open import open_model
from studies.widen.__main__ import main
from studies.widen.checkpoint import widen
from studies.widen.head import widen_head
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.stored_heads import (
    CUT,
    TARGET,
    adapter_config,
    block_config,
    eagle_config,
    medusa_config,
    stored_head,
)

SIZE = "hidden=144,intermediate=224,layers=12,heads=12,kv_heads=6"  # three copies


@dataclass(frozen=True)
class Pair:
    """A target and the same one widened."""

    folder: Path
    wide_folder: Path
    config: ModelConfig
    wide_config: ModelConfig
    models: tuple[Any, Any]


@pytest.fixture(scope="module", params=[False, True], ids=["own-output", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    parent = tmp_path_factory.mktemp("pair")
    folder = tiny_checkpoint(
        parent / "small", "llama", num_hidden_layers=8, tie_word_embeddings=request.param, head_dim=12
    )
    widen(folder, parent / "wide", SIZE, dtype="float32")
    models = tuple(open_model(one, dtype="float32", device="cpu") for one in (folder, parent / "wide"))
    return Pair(folder, parent / "wide", read_config(folder), read_config(parent / "wide"), models)  # type: ignore[arg-type]


def configs(target: ModelConfig) -> dict[str, HeadConfig]:
    return {
        "eagle3": eagle_config(target=target, draft_vocab_size=CUT),
        "eagle3-shared-output": eagle_config(target=target, taps=(0, 3, 8)),
        "eagle3-norms": eagle_config(
            target=target,
            draft_vocab_size=CUT,
            fc_bias=True,
            **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), True),
        ),
        "eagle3-2-layers": eagle_config(target=target, layers=2),
        "eagle1": eagle_config(1, target=target, fc_bias=True, layers=2),
        "medusa": medusa_config(target=target, num_blocks=2),
        "medusa-shared-output": medusa_config(target=target, has_own_output=False),
        "hydra": medusa_config(target=target, is_sequential=True),
        "dspark": block_config(target=target, has_confidence=True),
        "dspark-cut": block_config(target=target, draft_vocab_size=CUT),
        "adapter": adapter_config(target=target),
        "dflash": block_config(target=target, markov_rank=0, is_causal=False, predicts_at_anchor=False),
    }


@pytest.mark.parametrize("name", list(configs(TARGET)))
@torch.inference_mode()
def test_the_same_draft_tokens_with_the_same_probabilities(pair: Pair, name: str, tmp_path: Path) -> None:
    head = stored_head(configs(pair.config)[name], dtype=torch.float32)
    save_head(head, tmp_path / "head", pair.config)
    widen_head(tmp_path / "head", tmp_path / "wide", pair.folder, SIZE)
    wide = load_head(tmp_path / "wide", pair.wide_config)
    heads, found = (head, wide), []
    for one, model in zip(heads, pair.models, strict=True):
        batch = _own_text(model, 12, sorted({*one.hidden_layers(), model.num_layers}))
        found.append((batch.tokens, list(one.eval().places(batch, model, 3, seed=0))))
    (tokens, small), (wide_tokens, large) = found
    assert torch.equal(tokens, wide_tokens)
    assert len(small) == len(large) > 1
    for ours, theirs in zip(small, large, strict=True):
        assert torch.equal(ours.rows, theirs.rows)
        assert torch.equal(ours.logits.argmax(-1), theirs.logits.argmax(-1))
        assert (ours.logits.softmax(-1) - theirs.logits.softmax(-1)).abs().max() < 1e-4
    count = [sum(parameter.numel() for parameter in one.parameters()) for one in heads]
    assert count[1] > 2 * count[0]


def test_a_feedback_behind_the_norm_needs_an_output_of_its_own(pair: Pair, tmp_path: Path) -> None:
    save_head(stored_head(eagle_config(target=pair.config, norm_output=True)), tmp_path / "head", pair.config)
    with pytest.raises(ConfigError, match="norm_output"):
        widen_head(tmp_path / "head", tmp_path / "wide", pair.folder, SIZE)


def test_the_command_widens_both(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["widen", *map(str, words)])
        return main()

    save_head(stored_head(medusa_config(target=pair.config)), tmp_path / "head", pair.config)
    out = ["--out", str(tmp_path / "target"), "--source", str(pair.folder), "--to", SIZE, "--json"]
    assert run(*out, "--head", tmp_path / "head", "--head-out", tmp_path / "wide") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["folder"] == str(tmp_path / "target")
    assert load_head(tmp_path / "wide", read_config(tmp_path / "target")).config.hidden_size == 144  # type: ignore[union-attr]
    assert run(*out, "--head", tmp_path / "head") == 2
    capsys.readouterr()
    for wrong in (tmp_path / "target", pair.folder / "config.json" / "below"):  # in use, and no folder
        assert run("--to", SIZE, "--source", pair.folder, "--out", wrong) == 4
    assert run("--to", SIZE, "--source", pair.folder, "--out", tmp_path / "new", "--dtype", "int8") == 2
    assert capsys.readouterr().out == ""
