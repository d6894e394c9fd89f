"""Families that only transformers knows, behind our interface: every row equals a plain pass over its own text."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, cache_utils

from foretoken.errors import CapacityError, CheckpointError
from foretoken.model.hf import TransformersModel, _new_cache
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.open import open_model
from tests.helpers.checkpoints import randomise, tiny_checkpoint, token_ids, transformers_logits
from tests.helpers.families import WINDOW, family_model, write_family

FAMILIES = {
    "gpt2": True,
    "opt": True,
    "gpt_neox": True,
    "phi": True,
    "gemma2": True,
    "gemma3_text": True,
    "mistral": True,
    "mamba": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: tiny_checkpoint(root / name, name, **({"sliding_window": 6} if name == "mistral" else {}))
        for name in FAMILIES
    }


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> TransformersModel:
    return TransformersModel(folders[request.param])


def plain(model: TransformersModel, ids: list[int]) -> Tensor:
    """The oracle: one pass without any cache."""
    with torch.no_grad():
        logits: Tensor = model._model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_it_is_a_language_model(model: TransformersModel) -> None:
    typed: LanguageModel = model
    assert typed.vocab_size == 97
    assert typed.eos_token_ids == (0,)
    assert typed.num_layers >= 2
    assert typed.num_parameters > 10_000
    assert model.can_crop == FAMILIES[model._model.config.model_type]


def test_chains_chunks_and_ragged_batches(model: TransformersModel) -> None:
    first, second = token_ids(30), token_ids(25, seed=2)
    model.open(1)
    model.open(2)
    out = model.forward(
        torch.tensor(first[:10] + second[:4]), [Segment(1, 10, num_logits=0), Segment(2, 4, num_logits=1)]
    )
    assert out.logits.shape == (1, 97)
    close(out.logits, plain(model, second[:4])[-1:])
    model.commit(1, 10)
    model.commit(2, 4)
    rows = first[10:15] + second[4:6]
    out = model.forward(
        torch.tensor(rows), [Segment(1, 2, (-1, 0, 1), num_logits=4), Segment(2, 1, (-1,), num_logits=2)]
    )
    close(out.logits[:4], plain(model, first[:15])[-4:])
    close(out.logits[4:], plain(model, second[:6])[-2:])
    model.commit(1, 2, (0, 1))
    model.commit(2, 1, (0,))
    assert (model.length(1), model.length(2)) == (14, 6)
    out = model.forward(torch.tensor(first[20:21]), [Segment(1, 1)])
    close(out.logits, plain(model, first[:14] + first[20:21])[-1:])


@pytest.mark.parametrize("factor", [0.35, 0.5])
def test_an_odd_number_of_rotated_channels_is_left_to_transformers(tmp_path: Path, factor: float) -> None:
    """It rotates one channel more: 8 of 20 for 7, and 6 of 10 for 5."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": factor}
    folder = tiny_checkpoint(tmp_path, "glm4", head_dim=20 if factor < 0.5 else 10, rope_parameters=rope)
    model, text = open_model(folder), token_ids(40)
    assert isinstance(model, TransformersModel)
    model.open(1)
    found = model.forward(torch.tensor(text), [Segment(1, len(text), num_logits=len(text))]).logits
    close(found, transformers_logits(folder, text))


def test_rejected_tokens_leave_no_trace(model: TransformersModel) -> None:
    """A random walk of commits and rollbacks, past the sliding windows, against the text itself."""
    generator, text = random.Random(3), []
    model.open(7)
    for _ in range(25):
        pending = [generator.randrange(97) for _ in range(generator.randrange(1, 4))]
        nodes = [generator.randrange(97) for _ in range(generator.randrange(5))]
        out = model.forward(
            torch.tensor(pending + nodes),
            [Segment(7, len(pending), tuple(range(-1, len(nodes) - 1)), num_logits=1 + len(nodes))],
        )
        close(out.logits, plain(model, text + pending + nodes)[-1 - len(nodes) :])
        kept = generator.randrange(len(nodes) + 1)
        model.commit(7, len(pending), tuple(range(kept)))
        text += pending + nodes[:kept]
        if generator.random() < 0.3:
            text = text[: generator.randrange(len(text) + 1)]
            model.rollback(7, len(text))
        assert model.length(7) == len(text)
        if len(text) > 60:
            text = text[:20]
            model.rollback(7, 20)


def test_every_path_of_a_tree_is_its_own_text(model: TransformersModel) -> None:
    prompt, nodes = token_ids(12), [5, 6, 7, 8, 9, 10]
    parents = (-1, -1, 0, 0, 2, 1)
    model.open(1)
    out = model.forward(torch.tensor(prompt + nodes), [Segment(1, 12, parents, num_logits=7)])
    close(out.logits[0], plain(model, prompt)[-1])
    paths = [[0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5]]
    for row, path in enumerate(paths, start=1):
        close(out.logits[row], plain(model, prompt + [nodes[node] for node in path])[-1])
    model.commit(1, 12, (0, 3))
    assert model.length(1) == 14
    out = model.forward(torch.tensor([11, 12]), [Segment(1, 1, (-1,), num_logits=2)])
    close(out.logits, plain(model, [*prompt, 5, 8, 11, 12])[-2:])


def test_a_tree_that_grows_level_by_level(model: TransformersModel) -> None:
    prompt, nodes, parents = token_ids(12), [5, 6, 7, 8, 9, 10], (-1, -1, 0, 0, 2, 1)
    paths = [[0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5]]
    for levels in ((0, 2, 4, 6), (0, 1, 6)):
        model.open(1)
        model.forward(torch.tensor(prompt), [Segment(1, 12)])
        model.commit(1, 12)
        for held, stop in pairwise(levels):
            out = model.forward(
                torch.tensor(nodes[held:stop]), [Segment(1, 0, parents[:stop], stop - held, held)]
            ).logits
            for row, path in zip(out, paths[held:stop], strict=True):
                close(row, plain(model, prompt + [nodes[node] for node in path])[-1])
        model.commit(1, 0, (0, 2, 4))
        close(model.forward(torch.tensor([11]), [Segment(1, 1)]).logits, plain(model, [*prompt, 5, 7, 9, 11])[-1:])
        model.close(1)


def test_taps_are_the_hidden_states_of_the_same_rows(model: TransformersModel) -> None:
    ids = token_ids(9)
    model.open(1)
    with torch.no_grad():
        hidden = model._model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    for num_taps in (3, 9, 1, 0):  # more and fewer rows than logits
        out = model.forward(torch.tensor(ids), [Segment(1, 7, (-1, 0), num_logits=3, num_taps=num_taps)], taps=(0, 1))
        assert out.logits.shape == (3, model.vocab_size)
        assert sorted(out.taps) == ([0, 1] if num_taps else [])
        for layer, tap in out.taps.items():
            close(tap, hidden[layer][0, 9 - num_taps :])


def test_taps_of_every_row_of_a_tree_behind_a_prompt(model: TransformersModel) -> None:
    """Beside a sequence that wants none: rows before the tree, and every node on its own path."""
    prompt, nodes, parents = token_ids(6), token_ids(4, seed=2), (-1, 0, -1, 2)
    model.open(1)
    model.open(2)
    out = model.forward(
        torch.tensor([*prompt, *nodes, *prompt, 5, 6]),
        [Segment(1, 6, parents, num_logits=5, num_taps=10), Segment(2, 6, (-1, -1), num_logits=3)],
        taps=(1,),
    )
    assert (len(out.logits), len(out.taps[1])) == (8, 10)

    def plain(text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model._model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states[1][0]

    close(out.taps[1][:8], plain([*prompt, nodes[0], nodes[1]]))
    close(out.taps[1][8:], plain([*prompt, nodes[2], nodes[3]])[6:])


def test_memory_is_counted(folders: dict[str, Path]) -> None:
    model = TransformersModel(folders["gpt2"], capacity_tokens=20)
    assert model.num_free_tokens() == model.capacity_tokens == 20
    model.open(1)
    model.open(2)
    assert model.reserve(1, 15)
    assert model.num_free_tokens() == 5
    assert not model.reserve(2, 6)
    assert model.num_free_tokens() == 5
    with pytest.raises(CapacityError):
        model.forward(torch.tensor(token_ids(6)), [Segment(2, 6)])
    model.forward(torch.tensor(token_ids(12)), [Segment(1, 10, (-1, 0), num_logits=3)])
    model.commit(1, 10, (0,))
    assert (model.length(1), model.num_free_tokens()) == (11, 9)
    model.rollback(1, 4)
    assert model.num_free_tokens() == 16
    model.close(1)
    model.close(2)
    assert model.num_free_tokens() == 20


def test_dtype_is_honoured(folders: dict[str, Path]) -> None:
    model = TransformersModel(folders["gpt2"], dtype="bfloat16")
    model.open(1)
    assert model.forward(torch.tensor([1]), [Segment(1, 1)]).logits.dtype == torch.bfloat16


# --- how a model may be run ---


def written(folder: Path, family: str) -> Path:
    return write_family(family_model(family), family, folder)


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def opened(folder: Path, dtype: str = "float32") -> TransformersModel:
    return TransformersModel(folder, dtype)


@pytest.mark.parametrize("family", ["rwkv", "openai-gpt", "mamba2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_e4_families_that_do_not_read_the_cache_are_recomputed(tmp_path: Path, family: str, dtype: str) -> None:
    model = opened(written(tmp_path, family), dtype)
    assert not model.can_crop
    ids = token_ids(15)
    model.open(1)
    model.forward(torch.tensor(ids[:9]), [Segment(1, 9)])
    model.commit(1, 9)
    out = model.forward(torch.tensor(ids[9:]), [Segment(1, 6)])
    close(out.logits.float(), plain(model, ids)[-1:].float())


def test_e4_positions_that_are_counted_from_padding_tokens_are_counted_in_the_whole_text(tmp_path: Path) -> None:
    model = opened(written(tmp_path, "roberta"))
    ids = [5, 6, 1, 7, 8, 9, 1, 10]  # 1 is the padding token
    model.open(1)
    model.forward(torch.tensor(ids[:4]), [Segment(1, 4)])
    model.commit(1, 4)
    close(model.forward(torch.tensor(ids[4:]), [Segment(1, 4, num_logits=4)]).logits, plain(model, ids)[-4:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gemma2"])
def test_16_bit_rounding_does_not_cost_the_cache(tmp_path: Path, family: str, dtype: str) -> None:
    assert opened(written(tmp_path, family), dtype).can_crop


def test_c10_a_decoder_with_fewer_encoder_layers_keeps_its_cache_and_its_count(tmp_path: Path) -> None:
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
    decoder = BartForCausalLM(
        BartConfig(**sizes, vocab_size=97, encoder_layers=1, decoder_layers=3, max_position_embeddings=32)
    ).eval()
    randomise(decoder)
    decoder.save_pretrained(tmp_path)
    model = opened(tmp_path)
    assert model.can_crop
    assert model.num_layers == 3
    ids = token_ids(32)
    model.open(1)
    model.forward(torch.tensor(ids[:20]), [Segment(1, 20)])
    model.commit(1, 20)
    close(model.forward(torch.tensor(ids[20:]), [Segment(1, 12, num_logits=12)]).logits, plain(model, ids)[-12:])


@pytest.mark.parametrize(
    ("family", "context"), [("roberta", 46), ("opt", 48), ("gpt2", 48), ("camembert", 46), ("biogpt", 48)]
)
def test_c10_the_context_ends_where_the_table_of_positions_does(tmp_path: Path, family: str, context: int) -> None:
    model = opened(written(tmp_path, family))
    assert model.max_context_tokens == context
    ids = [5 + token % 90 for token in token_ids(context + 1)]
    assert plain(model, ids[:context]).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        plain(model, ids)


@pytest.mark.parametrize("family", ["phi3", "granite"])
def test_e3_the_context_ends_where_the_rotation_of_a_position_changes(tmp_path: Path, family: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 24,
        "factor": 4.0,
        **factors,
    }
    folder = tiny_checkpoint(tmp_path, family, **LONGROPE_SHAPE, rope_parameters=rope)
    assert opened(folder).max_context_tokens == 24


def test_the_context_ends_where_a_family_begins_to_choose_what_it_keeps_of_a_text(tmp_path: Path) -> None:
    assert opened(written(tmp_path, "doge")).max_context_tokens == WINDOW


LONGROPE_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "original_max_position_embeddings": 24,
    "pad_token_id": None,
}


def test_nothing_of_transformers_reaches_the_terminal(tmp_path: Path, folders: dict[str, Path]) -> None:
    """It reports tensors that it does not use, shows a bar, and says that a faster kernel is not installed."""
    tensors = load_file(folders["mamba"] / "model.safetensors")
    save_file(
        {**tensors, "classifier.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    (tmp_path / "config.json").write_text((folders["mamba"] / "config.json").read_text())
    program = f"""
from foretoken.model.hf import TransformersModel, _new_cache
from pathlib import Path
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging
settings = lambda: (logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled())
before = settings()
TransformersModel(Path({str(tmp_path)!r}))
assert settings() == before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_bars_of_transformers_are_as_before_also_after_a_failure(tmp_path: Path, folders: dict[str, Path]) -> None:
    from transformers.utils import logging

    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    logging.enable_progress_bar()
    try:
        with pytest.raises(CheckpointError):
            TransformersModel(tmp_path)
        assert logging.is_progress_bar_enabled()
    finally:
        logging.disable_progress_bar()


@pytest.mark.parametrize("tied", [True, False])
def test_e1_a_head_of_its_own_is_read_whatever_the_configuration_says(
    tmp_path: Path, folders: dict[str, Path], tied: bool
) -> None:
    tensors = load_file(folders["gpt2"] / "model.safetensors")
    table = next(tensor for name, tensor in tensors.items() if name.endswith("wte.weight"))
    head = torch.randn(table.shape, generator=torch.Generator().manual_seed(5))
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders["gpt2"] / "config.json").read_text())
    edit_config(tmp_path, tie_word_embeddings=tied)
    ids = token_ids(9)
    model = opened(tmp_path)
    model.open(1)
    close(model.forward(torch.tensor(ids), [Segment(1, 9, num_logits=9)]).logits, transformers_logits(tmp_path, ids))
    assert torch.equal(model._model.get_output_embeddings().weight, head)


def test_the_oldest_transformers_has_a_kind_of_layer_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.17, which the project allows."""
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    cache = _new_cache(AutoConfig.for_model("llama", num_hidden_layers=2))
    assert [type(layer) for layer in cache.layers] == [cache_utils.DynamicLayer] * 2
