"""The account against what a tiny model really allocates, and against numbers worked out by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.footprint import shape_of
from foretoken.model.layers import Linear, can_pack
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from foretoken.plan.memory import Account, Budget, Load, ModelShape, account, contexts_to_show, fitting, largest_batch
from tests.helpers.checkpoints import USUAL, VARIANTS, tiny_checkpoint, token_ids, variant
from tests.helpers.gguf_files import QUANTISED, write_gguf
from tests.helpers.packed_files import FORMS, write_packed
from tests.helpers.usual import some_of

LLAMAS = ("llama", "llama-tied", "llama-biases", "llama-head-dim")
ONE_OF_EACH = (
    *("qwen3-tied-biases", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "granite", "glm4", "starcoder2"),
    *("cohere-qk-norm", "cohere2"),
)
SHAPE = ModelShape("m", 1000, 10, 2, 0, 0, 5, 4, 256, 32)


def table_bytes(model: PagedModel) -> int:
    """Of all rotations."""
    return sum(table.cos.nbytes + table.sin.nbytes for table in model.decoder.rotaries)


def held_bytes(model: PagedModel) -> int:
    """Weights and tables: every tensor once."""
    decoder = model.decoder
    plain = {parameter.data_ptr(): parameter.nbytes for parameter in decoder.parameters()}
    packed = [m.packed.nbytes for m in decoder.modules() if isinstance(m, Linear) and m.packed is not None]
    return sum(plain.values()) + sum(packed) + table_bytes(model)


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_of(
        itertools.product(sorted(VARIANTS), ("float32", "bfloat16")),
        {*((name, "bfloat16") for name in VARIANTS), *((name, "float32") for name in USUAL)},
    ),
)
def test_weights_and_cache_are_those_of_the_loaded_model(name: str, dtype: str, tmp_path: Path) -> None:
    """Tied or not, packed or not, with biases, norms and windows: equal to the byte."""
    folder = variant(tmp_path, name)
    shape, model = shape_of(folder, name, dtype), open_model(folder, dtype, "cpu", cache_tokens=320)
    assert isinstance(model, PagedModel)
    assert shape.weight_bytes == held_bytes(model)
    assert 320 * shape.kv_bytes_per_token == sum(t.nbytes for t in (*model.pool.keys, *model.pool.values))
    assert shape.cache_tokens(33) == model.footprint_tokens(33) == 64
    assert (shape.vocab_size, shape.max_context_tokens) == (model.vocab_size, model.max_context_tokens)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    some_of(
        itertools.product((*LLAMAS, *ONE_OF_EACH), ("int8", "int4"), ("float32", "bfloat16")),
        {
            *((name, kind, dtype) for name in LLAMAS for kind in ("int8", "int4") for dtype in ("float32", "bfloat16")),
            *((name, "int4", "bfloat16") for name in ONE_OF_EACH),
        },
    ),
)
def test_weights_in_8_or_4_bits(name: str, kind: str, dtype: str, tmp_path: Path) -> None:
    """Widths that groups of 32 divide or not; rows that are filled up: equal to the byte."""
    folder = variant(tmp_path, name, intermediate_size=96, hidden_size=64)
    shape = shape_of(folder, name, dtype, weights=kind)
    model = open_model(folder, dtype, "cpu", 320, weights=kind)
    assert shape.weight_bytes == model.weight_bytes + table_bytes(model)
    assert shape.kv_bytes_per_token == model.kv_bytes_per_token


def coded_bytes(model: PagedModel) -> int:
    """Weights and tables of a model whose matrices are held by codes: what each really takes."""
    return model.weight_bytes + table_bytes(model)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "llama-head-dim", "qwen3-tied-biases"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_targets_in_8_or_4_bits(name: str, kind: str, tmp_path: Path) -> None:
    folder = variant(tmp_path, name, intermediate_size=96)
    model = open_model(folder, "bfloat16", "cpu", 320, weights=kind)
    assert shape_of(folder, name, "bfloat16", weights=kind).weight_bytes == coded_bytes(model)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gguf_files(kind: str, dtype: str, tmp_path: Path) -> None:
    """By codes, and in float64, for which no kernel is: as numbers."""
    folder = variant(tmp_path / "hf", "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    path = write_gguf(tmp_path / "model.gguf", folder, kind)
    shape = shape_of(path, "m", dtype)
    if dtype == "float64":
        assert shape.weight_bytes == 2 * shape_of(folder, "m", "float32").weight_bytes
    else:
        model = open_model(path, dtype, "cpu", 320)
        assert shape.weight_bytes == coded_bytes(model)
        assert shape.weight_format == model.weight_format
        assert shape.weight_bytes < shape_of(folder, "m", dtype).weight_bytes / 2
    assert shape_of(path, "m", "bfloat16", device="cuda").weight_bytes > 256 * 512 * 3 * 2


@pytest.mark.parametrize("name", ["gptq", "gptq-8", "gptq-act-order", "awq", "gptq-asymmetric", "int8", "fp8-blocks"])
@pytest.mark.filterwarnings("ignore::foretoken.model.loader.DequantisedWarning")
def test_packed_checkpoints(name: str, tmp_path: Path) -> None:
    source = variant(tmp_path / "hf", "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    folder = write_packed(tmp_path / "packed", source, FORMS[name])
    shape = shape_of(folder, "m", "float32")
    model = open_model(folder, "float32", "cpu", 320)
    assert shape.weight_bytes == coded_bytes(model)
    assert shape.weight_format == model.weight_format
    plain = shape_of(source, "m", "float32").weight_bytes
    assert (shape.weight_bytes < plain) if FORMS[name].as_codes else (shape.weight_bytes == plain)


def test_auto_is_what_the_checkpoint_is_stored_in(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    assert shape_of(tmp_path, "m").itemsize == 2
    assert shape_of(tmp_path, "m", "float32").kv_bytes_per_token == 2 * shape_of(tmp_path, "m").kv_bytes_per_token
    if can_pack():  # on a GPU nothing is packed, so that a tied head needs no second copy
        tied = variant(tmp_path / "tied", "llama-tied", dtype=torch.bfloat16)
        gpu = shape_of(tied, "m", device="cuda").weight_bytes
        padding = shape_of(tied, "m").weight_bytes - gpu - 97 * 48 * 2
        assert 0 <= padding <= 16 * 48 * 2 * 13  # of whole blocks of 16 outputs, in the head and twelve matrices


def peak_bytes(llm: LLM, path: Path, batch: int, context: int, params: SamplingParams, spec: SpecConfig) -> int:
    """Most bytes alive at once beyond those that were alive before, while a batch runs."""
    prompts = [token_ids(context - params.max_tokens, llm.target.vocab_size, seed=i) for i in range(batch)]
    llm.generate(prompts, params, spec)  # tables that are built on first use
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        llm.generate(prompts, replace(params, tenant="another"), spec)  # who finds nothing of what was read before
    record.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    assert peak > 0
    return peak


@pytest.mark.parametrize(
    ("batch", "context", "vocab", "hidden", "weights"),
    [
        (1, 200, 97, 32, "auto"),
        (8, 60, 97, 32, "auto"),
        (4, 100, 2000, 32, "auto"),
        (2, 200, 97, 128, "auto"),
        (2, 200, 97, 128, "int8"),
    ],
)
def test_a_step_stays_within_its_account(
    tmp_path: Path, batch: int, context: int, vocab: int, hidden: int, weights: str
) -> None:
    """Dominated by masks, rows, distributions and width in turn: never more than planned, and not planned many
    times over.
    """
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": vocab, "eos_token_id": None}
    target = tiny_checkpoint(tmp_path / "target", "llama", **shape)
    draft = tiny_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1, **shape)
    load = Load(batch, context, num_draft=6, max_prompt_tokens=128)
    draft_shape = shape_of(draft, "d", weights=weights)
    planned = account(shape_of(target, "t", weights=weights), draft_shape, load).workspace_bytes
    spec = SpecConfig("draft_model", str(draft), num_draft=6, rule="block", draft_dtype=weights)
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, ignore_eos=True)
    with LLM(target, spec, cache_tokens=1024, max_batch_size=batch, max_prompt_tokens=128, weights=weights) as llm:
        used = peak_bytes(llm, tmp_path / "trace.json", batch, context, params, spec)
    # The compiled pass, which runs prompts in int8 too, takes its rows, those of the final norm among them, outside of
    # torch's account.
    assert (0.04 if weights == "int8" else 0.1) * planned < used <= planned


def test_the_parts_by_hand() -> None:
    draft = ModelShape("d", 100, 3, 1, 0, 0, 5, 4, 64, 32)
    found = account(SHAPE, draft, Load(batch=2, context_tokens=100, num_draft=3, max_prompt_tokens=10))
    # Two requests of four blocks; the draft's own context holds two. 8 decoding rows and 10 of prompts, distributions
    # of 5 entries.
    assert (found.kv_bytes, found.draft_kv_bytes) == (2 * 128 * 10, 2 * 64 * 3)
    assert found.workspace_bytes == 18 * (2 + 1) + 2 * 8 * 5 * (4 + 36)
    assert found.total_bytes == 1000 + 100 + 2560 + 384 + found.workspace_bytes
    alone = account(SHAPE, None, Load(2, 100, 3, 10))
    assert (alone.draft_weight_bytes, alone.draft_kv_bytes) == (0, 0)


def test_missing_and_largest_agree() -> None:
    """The largest batch fits, one more does not, and what is missing is exactly what makes it fit."""
    load = Load(1, 100, 2)
    for memory in (1000, 8000, 20_000, 123_456):
        budget = Budget(memory, reserve=0.25)
        assert budget.usable_bytes == int(memory * 0.75)
        most = largest_batch(SHAPE, None, load, budget)
        over = account(SHAPE, None, Load(most + 1, 100, 2))
        missing = budget.missing_bytes(over)
        assert missing > 0
        assert most == 0 or budget.missing_bytes(account(SHAPE, None, Load(most, 100, 2))) == 0
        assert Budget(budget.usable_bytes + missing, 0.0).missing_bytes(over) == 0
    assert largest_batch(SHAPE, None, load, Budget(1000)) == 0
    assert Budget(100, 0.0).missing_bytes(Account(1, 2, 3, 4, 5)) == 0


def test_the_table_has_the_length_that_was_asked_for() -> None:
    assert contexts_to_show(SHAPE, 100) == (100, 256)
    wide = ModelShape("m", 1, 1, 1, 1, 1, 1, 1, 3000, 1)
    assert contexts_to_show(wide, 700) == (512, 700, 1024, 2048, 3000)
    grid = fitting(SHAPE, None, Load(1, 1, 0), Budget(20_000), (1, 64), (100, 256))
    assert grid[100][1] == 0 < grid[256][64]


def test_other_families(tmp_path: Path, pair: SimpleNamespace) -> None:
    """Through transformers the usual cache is planned; a family that has none is refused by name."""
    gpt2, mamba = tiny_checkpoint(tmp_path / "gpt2", "gpt2"), tiny_checkpoint(tmp_path / "mamba", "mamba")
    shape, model = shape_of(gpt2, "gpt2"), open_model(gpt2, "auto", "cpu")
    assert shape.weight_bytes == 4 * model.num_parameters
    assert shape.kv_bytes_per_token == 2 * 2 * 32 * 4
    assert shape.max_context_tokens == 128
    with pytest.raises(UnsupportedModelError, match="num_heads"):
        shape_of(mamba, "mamba")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((Path(pair.target) / "config.json").read_text())
    with pytest.raises(CheckpointError, match="holds neither"):
        shape_of(tmp_path / "empty", "m")
