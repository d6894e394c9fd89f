"""Tensor parallelism: the ranks' parts, run side by side in threads of one process, give the whole model's logits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError, ModelError
from foretoken.model.decoder import Decoder
from foretoken.model.experts import Experts
from foretoken.model.interface import Segment
from foretoken.model.layer_pass import has_exact_rows
from foretoken.model.layers import Linear
from foretoken.model.loader import load_decoder, open_weights, read_config
from foretoken.model.matrices.grouped_kernel import GroupedWeight, MergedWeight
from foretoken.model.matrices.quant import GroupQuantiser
from foretoken.model.open import kept_dtype
from foretoken.model.paged import PagedModel
from foretoken.model.row_kernels import row_kernels
from foretoken.model.saving import save_checkpoint
from foretoken.model.sharding import Shard, SingleRank
from foretoken.model.strict import StrictModel
from foretoken.model.weights import hf_tensors
from tests.helpers.checkpoints import VARIANTS, token_ids, transformers_logits, variant
from tests.helpers.gguf_files import write_gguf
from tests.helpers.packed_files import awq, compressed_int, fp8, gptq, write_packed
from tests.helpers.usual import some_of

_Result = TypeVar("_Result")
# Every family, and every option that changes how something is divided.
FAMILIES = (
    *("llama", "llama-tied", "llama-mha", "llama-mqa", "llama-biases", "mistral-sliding", "qwen2", "qwen3"),
    *("gemma2", "phi3", "glm4", "starcoder2", "cohere-qk-norm"),
)
MIXTURES = ("mixtral", "qwen2-moe", "gpt-oss")  # of gated experts; with a shared one; with biases and clamped gates
# torch's products of float32 numbers, of other shapes. The logits of gemma2, up to 6, are off by 1.4e-5 whole.
CLOSE = {"atol": 4e-5, "rtol": 1e-5}


class Exchange:
    """Where the ranks of one process meet: every operation waits until all have given their part."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier = world, threading.Barrier(world, timeout=60)
        self.parts: list[Tensor | None] = [None] * world

    def swap(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part
        self.barrier.wait()
        everybody = [part.clone() for part in self.parts if part is not None]
        self.barrier.wait()  # nobody gives the next part before all have taken this one
        return everybody


class ThreadCollective:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.world, self.num_gathered = exchange, rank, exchange.world, 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.num_gathered += 1
        return torch.cat(self.exchange.swap(self.rank, x), dim=-1)


def load(folder: Path, world: int, **options: object) -> list[Decoder]:
    exchange = Exchange(world)
    return [
        load_decoder(folder, rank=rank, world=world, collective=ThreadCollective(exchange, rank), **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


def together(work: Callable[[int], _Result], world: int) -> list[_Result]:
    """What `work(rank)` gives on every rank, all of them running at once."""
    found: list[_Result] = [None] * world  # type: ignore[list-item]

    def one(rank: int) -> None:
        found[rank] = work(rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def decode(model: PagedModel, ids: list[int]) -> tuple[Tensor, dict[int, Tensor]]:
    """A prompt in two chunks, then a tree, whose path is committed, then a token more: logits, and taps of the tree."""
    model.open(0)
    logits = [model.forward(torch.tensor(ids[:11]), [Segment(0, 11, (), 11)]).logits]
    model.commit(0, 11)
    logits.append(model.forward(torch.tensor(ids[11:20]), [Segment(0, 9, (), 9)]).logits)
    model.commit(0, 9)
    tree = model.forward(torch.tensor(ids[20:25]), [Segment(0, 1, (-1, 0, 0, -1), 5, num_taps=5)], (1, 2))
    model.commit(0, 1, (0, 2))
    logits += [tree.logits, model.forward(torch.tensor(ids[25:26]), [Segment(0, 1)]).logits]
    model.close(0)
    return torch.cat(logits), tree.taps


@pytest.mark.parametrize(
    ("name", "world"),
    some_of(
        itertools.product((*FAMILIES, *MIXTURES), (2, 4)),
        {*((name, 2) for name in (*FAMILIES, *MIXTURES)), ("llama", 4), ("llama-mqa", 4), ("gemma2", 4)},
    ),
)
def test_the_ranks_give_the_logits_of_the_whole_model(tmp_path: Path, name: str, world: int) -> None:
    """Four heads, two key/value heads (replicated on four ranks), a vocabulary of 97 that nothing divides."""
    folder, ids = variant(tmp_path, name), token_ids(26)
    whole = PagedModel(load_decoder(folder, dtype="float32"), 128, 4)
    expected, expected_taps = decode(whole, ids)
    models = [PagedModel(decoder, 128, 4) for decoder in load(folder, world, dtype="float32")]
    for logits, taps in together(lambda rank: decode(models[rank], ids), world):
        torch.testing.assert_close(logits, expected, **CLOSE)
        for layer in (1, 2):
            torch.testing.assert_close(taps[layer], expected_taps[layer], **CLOSE)
    torch.testing.assert_close(expected[:20], transformers_logits(folder, ids)[:20], atol=1e-4, rtol=0)
    for model in models:
        config, heads = model.decoder.config, model.pool.keys[0].shape[0]
        assert heads == max(1, config.num_kv_heads // world)  # the cache is that of the rank
        assert model.kv_bytes_per_token * config.num_kv_heads == whole.kv_bytes_per_token * heads
        assert model.decoder.weight_bytes < whole.decoder.weight_bytes
        collective = model.decoder.collective
        assert isinstance(collective, ThreadCollective)
        assert collective.num_gathered == 4 * (2 + 4 * config.num_layers)


@pytest.mark.parametrize(
    ("name", "form", "world"),
    some_of(
        itertools.product((*FAMILIES, *MIXTURES), ("bfloat16", "int4"), (2, 4)),
        {
            ("llama-biases", "bfloat16", 2),
            ("llama-mqa", "int4", 4),
            ("gemma2", "int4", 2),
            ("cohere-qk-norm", "int4", 2),
        }
        | {(name, form, 2) for name in MIXTURES for form in ("bfloat16", "int4")},
    ),
)
def test_ranks_compute_the_bits_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str, world: int
) -> None:
    """Where compiled kernels multiply: every output is one sum, whichever rank computes it."""
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: False)
    folder, ids = variant(tmp_path, name), token_ids(26)
    options = {"dtype": "bfloat16"} if form == "bfloat16" else {"dtype": "float32", "quant": form}
    whole = load_decoder(folder, **options)
    kept = kept_dtype(whole, "auto")
    expected, expected_taps = decode(PagedModel(whole, 128, 4, kept), ids)
    models = [PagedModel(decoder, 128, 4, kept_dtype(decoder, "auto")) for decoder in load(folder, world, **options)]
    for logits, taps in together(lambda rank: decode(models[rank], ids), world):
        assert torch.equal(logits, expected)
        assert all(torch.equal(taps[layer], expected_taps[layer]) for layer in (1, 2))


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_divide_experts_of_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """More rows than one exchange takes, and experts of more rows than a task has."""
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: False)
    monkeypatch.setattr(Experts, "mixed", lambda *_: pytest.fail("the experts ran one by one"))
    folder, options = variant(tmp_path, name), {"dtype": "float32", "quant": "int8"}
    whole, *parts = (
        next(module for module in decoder.modules() if isinstance(module, Experts))
        for decoder in (load_decoder(folder, **options), *load(folder, 2, **options))  # type: ignore[arg-type]
    )
    rows = torch.randn(700, whole.router.weight.shape[1], generator=torch.Generator().manual_seed(3))

    def run(rank: int) -> Tensor:
        with torch.inference_mode():
            return parts[rank](rows)

    with torch.inference_mode():
        assert torch.equal(torch.cat(together(run, 2), 1), whole(rows))


@pytest.mark.parametrize(("function", "exchanges"), [("foretoken_expert_channels", 0), ("foretoken_expert_outputs", 1)])
def test_experts_without_memory_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, exchanges: int
) -> None:
    """On both sides of the exchange; without channels a rank exchanges none."""
    decoder = load(variant(tmp_path, "qwen3-moe"), 2, dtype="float32", quant="int8")[0]
    part = next(module for module in decoder.modules() if isinstance(module, Experts))
    gathered, kernels = list[Tensor](), row_kernels()
    assert kernels is not None
    monkeypatch.setattr(part.collective, "all_gather", lambda x: gathered.append(x) or torch.cat([x, x]))
    monkeypatch.setattr(kernels.library, function, lambda *_: False)
    with torch.inference_mode(), pytest.raises(MemoryError, match="no memory for the experts of 3 rows; run fewer"):
        part(torch.ones(3, part.router.weight.shape[1]))
    assert len(gathered) == exchanges


def test_every_tensor_of_every_family_is_divided_and_nothing_is_lost(tmp_path: Path) -> None:
    """The parts put together are the tensor; a name without an entry is an error."""
    for name in VARIANTS:
        folder = variant(tmp_path / name, name)
        config, weights = read_config(folder), open_weights(folder)
        if config.qk_norm_over == "projection":
            with pytest.raises(ConfigError, match="norms the queries of all heads together"):
                Shard(config, 0, 2)
            continue
        shards = [Shard(config, rank, 2) for rank in range(2)]
        for tensor_name, shape in hf_tensors(config):
            full = weights.read(tensor_name, shape)
            parts = [shard.slice(tensor_name, full) for shard in shards]
            kind = shards[0].split(tensor_name).name
            if kind == "NONE":
                assert all(torch.equal(part, full) for part in parts)
            elif kind in ("QKV", "HALVES"):  # merged tensors: each part by itself
                q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
                sizes = [len(full) // 2] * 2 if kind == "HALVES" else [q, kv, kv]
                pieces = zip(*(part.split([size // 2 for size in sizes]) for part in parts), strict=True)
                assert torch.equal(torch.cat([torch.cat(halves) for halves in pieces]), full)
            else:
                assert torch.equal(torch.cat(parts)[: len(full)], full)
            assert all(shard.slice(tensor_name, full).data_ptr() == full.data_ptr() for shard in [Shard(config)])
    with pytest.raises(KeyError):
        shards[0].slice("model.layers.0.self_attn.new_proj.weight", torch.zeros(4, 4))


def test_key_value_heads_are_replicated_on_the_ranks_of_their_queries(tmp_path: Path) -> None:
    config = read_config(variant(tmp_path, "llama"))
    heads = torch.arange(config.num_kv_heads * config.head_dim)
    found = [
        Shard(config, rank, 4).slice("model.layers.0.self_attn.k_proj.bias", heads)[0] // config.head_dim
        for rank in range(4)
    ]
    assert found == [0, 0, 1, 1]


def test_one_rank_is_the_identity(tmp_path: Path) -> None:
    decoder = load_decoder(variant(tmp_path, "llama"), dtype="float32")
    assert decoder.local is decoder.config
    assert type(decoder.collective) is SingleRank
    x = torch.ones(3)
    assert decoder.collective.all_gather(x) is x


def test_quantised_weights_are_cut_before_they_are_quantised(tmp_path: Path) -> None:
    """As if the rank's part were a checkpoint of its own."""
    folder = variant(tmp_path, "llama")
    decoders = load(folder, 2, dtype="float32", quant="int8")
    plain = load(folder, 2, dtype="float32")
    for quantised, full in zip(decoders, plain, strict=True):
        for layer, other in zip(quantised.layers, full.layers, strict=True):
            for path in ("o_proj", "qkv_proj", "mlp.down_proj", "mlp.gate_up_proj"):
                held, weight = layer.get_submodule(path).packed, other.get_submodule(path).weight
                expected = GroupQuantiser("int8", torch.float32).matrix([weight])
                assert torch.equal(held.codes, expected.codes)
                assert torch.equal(held.scales, expected.scales)


WIDE = {
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "intermediate_size": 768,
}
DEEP = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
}


@pytest.mark.filterwarnings("ignore::foretoken.model.loader.DequantisedWarning")
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        *((kind, 3) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
        # 128 inputs of a rank are half of a block of 256, 256 a whole one
        *((kind, world) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K") for world in (2, 4)),
        *((name, 3) for name in ("gptq", "gptq-128", "awq", "int8-rows", "gptq-ordered", "fp8")),
    ],
)
def test_codes_of_a_file_are_cut_and_stay_what_they_are(tmp_path: Path, kind: str, world: int) -> None:
    """Every matrix of the ranks put together has the numbers of the whole one, bit for bit, and runs in the same form:
    by its codes where it did, with the same bits in every logit.
    """
    folder = quantised(tmp_path, kind)
    whole, parts = load_decoder(folder, dtype="float32"), load(folder, world, dtype="float32")
    assert {part.weight_format for part in parts} == {whole.weight_format}
    layers = [decoder.layers[0] for decoder in (whole, *parts)]
    for path in ("o_proj", "mlp.down_proj"):
        full, *own = (numbers(layer.get_submodule(path)) for layer in layers)
        assert torch.equal(torch.cat(own), full)
    full, *own = (numbers(layer.mlp.gate_up_proj) for layer in layers)
    assert torch.equal(torch.cat([part.chunk(2)[half] for half in (0, 1) for part in own]), full)
    tables = [decoder.embedding for decoder in (whole, *parts)]
    rows = [
        table(torch.arange(decoder.local.vocab_size)) for table, decoder in zip(tables, (whole, *parts), strict=True)
    ]
    joined = torch.cat(rows[1:])
    assert torch.equal(joined[: len(rows[0])], rows[0])
    assert not joined[len(rows[0]) :].any()
    if has_exact_rows(whole):
        models = [PagedModel(decoder, 64, 4) for decoder in parts]
        expected = read(PagedModel(whole, 64, 4))
        for logits in together(lambda rank: read(models[rank]), world):
            assert torch.equal(logits, expected)


def read(model: PagedModel) -> Tensor:
    """Logits of a prompt."""
    model.open(0)
    logits = model.forward(torch.tensor(token_ids(20)), [Segment(0, 20, (), 20)]).logits
    model.close(0)
    return logits


def quantised(folder: Path, kind: str) -> Path:
    """A checkpoint whose matrices are stored in codes."""
    packed = {
        "gptq": gptq(),
        "gptq-128": gptq(group=64, symmetric=False),
        "awq": awq(),
        "int8-rows": compressed_int(8, None, True),
        "gptq-ordered": gptq(ordered=True),
        "fp8": fp8("block"),
    }
    plain = variant(folder, "llama", num_hidden_layers=1, **(DEEP if kind.endswith("_K") else WIDE))
    if kind in packed:
        return write_packed(folder / "packed", plain, packed[kind])
    return write_gguf(folder / "codes.gguf", plain, kind)


def numbers(linear: Linear) -> Tensor:
    """What a matrix [N, K] stands for, by its rows."""
    held = linear.packed
    if held is None or not isinstance(held, GroupedWeight | MergedWeight):
        return linear(torch.eye(linear.in_features)).T
    parts = held.parts if isinstance(held, MergedWeight) else (held,)
    return torch.cat([part.rows(torch.arange(part.num_rows)) for part in parts])


def test_strict_numerics_on_two_ranks(tmp_path: Path) -> None:
    """Rows do not depend on the batch there either."""
    decoders, ids = load(variant(tmp_path, "qwen3"), 2, dtype="float32"), token_ids(20)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        model = StrictModel(decoders[rank], 128, 4)
        for sequence in (0, 1):
            model.open(sequence)
        whole = model.forward(torch.tensor(ids), [Segment(0, 20, (), 20)]).logits
        rows = []
        for token in ids:
            rows.append(model.forward(torch.tensor([token]), [Segment(1, 1)]).logits)
            model.commit(1, 1)
        for sequence in (0, 1):
            model.close(sequence)
        return whole, torch.cat(rows)

    for whole, rows in together(work, 2):
        assert torch.equal(whole, rows)


@pytest.mark.parametrize(("rank", "world", "named"), [(0, 3, "heads"), (2, 2, "rank"), (0, 8, "heads")])
def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path, rank: int, world: int, named: str) -> None:
    config = read_config(variant(tmp_path, "llama"))
    with pytest.raises(ConfigError, match=named):
        Shard(config, rank, world)


def test_one_ranks_part_is_no_checkpoint(tmp_path: Path) -> None:
    decoder = load(variant(tmp_path / "in", "llama"), 2, dtype="float32")[0]
    with pytest.raises(ModelError, match="world=1"):
        save_checkpoint(decoder, decoder.config, tmp_path / "out", dtype="float32")
