"""Function-preserving enlargement: a small checkpoint's answers at a large checkpoint's cost.

The output folder is an ordinary model of the same family. It computes the small model's logits, but every token costs
what a model of the new size costs, because almost all added weights are random and non-zero (after Net2Net, Chen et al.
1511.05641). How nothing added reaches the output:

    residual stream   D = c * d channels hold c copies of the live d. The mean square is that of one copy, so norms keep
                      their weights and epsilon on the first copy; on the others the norm weight is 0, and whatever
                      reads those channels (q, k, v, gate, up, an untied head) may be random.
    heads, neurons    a dead key/value head has v = 0, a dead neuron has up = 0: their rows are 0 on the live channels
    and
                      random on the others. What they feed is an exact 0, so o_proj and down_proj are random there.
    layers            an added layer has dead heads and neurons only, so it adds an exact 0. They stand between the live
                      ones at even distances.

Only `v`, `up` (dead rows, live channels), `o_proj` under dead query heads of a live group, and norms hold zeros.
Live channels are copied, not rounded or rescaled: in any dtype the two models differ by summation order alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from foretoken.errors import InputError, StorageError
from foretoken.files import writing_folder
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import config_to_hf
from foretoken.model.gguf.header import is_gguf
from foretoken.model.gguf.parts import read_header
from foretoken.model.loader import parse_dtype, read_checkpoint
from foretoken.model.saving import copy_tokenizer
from foretoken.model.weights import INDEX, WEIGHTS, TensorSource
from foretoken.text.gguf_tokenizer import read_tokenizer
from studies.widen.plan import WidenPlan, plan

SHARD_BYTES = 1 << 30
_POOL = (1 << 21) + 7  # random numbers; odd, so that they do not line up with the rows of a matrix
NOTE = "widening.json"


@dataclass(frozen=True)
class Widened:
    """What `widen` made: the folder, its configuration, and how much of it is real.

    `dead_share` counts weights that no output depends on (copies of live ones not among them), `nonzero_share` all
    weights that are not exactly zero.
    """

    folder: Path
    config: ModelConfig
    num_parameters: int
    dead_share: float
    nonzero_share: float


def widen(
    source: Path,
    out: Path,
    to: str,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    dtype: str | torch.dtype = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
) -> Widened:
    """Write into `out` a checkpoint of size `to` that computes what the one in `source` computes.

    `to` is a preset ("50m" ... "8b": total parameters, about) or
    "hidden=..,intermediate=..,layers=..,heads=..,kv_heads=..". `progress(done, total)` counts parameters. At most one
    shard of `shard_bytes` is held in memory.

    Raises:
        InputError: unknown preset, or a size below the source's or not reachable from it.
        StorageError: `out` is in use or cannot be written, or the disk is too small.
        CheckpointError, UnsupportedModelError: the source cannot be read.
    """
    if not 0 <= seed < 2**63:
        raise InputError("seed", seed, "must lie between 0 and 2**63 - 1")
    (config, weights), stored = read_checkpoint(source), parse_dtype(dtype)
    target = plan(config, to)
    total = target.config.num_parameters
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise StorageError(f"{out} exists already; choose another folder or remove it")
        with writing_folder(out.parent, f".{out.name}.writing-") as work:
            _check_room(work, total * stored.itemsize)
            counts = _write(weights, target, work, seed, stored, shard_bytes, progress or (lambda _done, _total: None))
            result = Widened(out, target.config, total, counts.dead / total, counts.nonzero / total)
            note = _note(source, to, seed, config, result)
            raw = config_to_hf(replace(target.config, dtype=str(stored).removeprefix("torch."))) | {"widened": note}
            (work / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            (work / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
            _write_tokenizer(source, work)
            if out.exists():
                out.rmdir()
            work.chmod(0o755)
            os.replace(work, out)
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the widened checkpoint to {out}: {error}") from error
    return result


def _write_tokenizer(source: Path, folder: Path) -> None:
    """The files of the source's tokenizer; of a GGUF file's as transformers would have them."""
    if not is_gguf(source):
        copy_tokenizer(source, folder)
        return
    found = read_tokenizer(read_header(source))
    if found is not None:
        inner, settings = found
        inner.save(str(folder / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind | settings, indent=2) + "\n", encoding="utf-8")


def _check_room(folder: Path, num_bytes: int) -> None:
    """Whether the disk of `folder` has room for `num_bytes`.

    Raises:
        StorageError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes * 1.02:
        raise StorageError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, the checkpoint needs {num_bytes / 1e9:.1f} GB"
        )


def _note(source: Path, to: str, seed: int, config: ModelConfig, result: Widened) -> dict[str, object]:
    return {
        "source": source.resolve().name,
        "source_parameters": config.num_parameters,
        "to": to,
        "seed": seed,
        "parameters": result.num_parameters,
        "dead_share": round(result.dead_share, 6),
        "nonzero_share": round(result.nonzero_share, 6),
        "meaning": (
            "computes the source's logits; added weights are random and do not reach the output; for "
            "measuring cost only"
        ),
    }


@dataclass
class _Counts:
    dead: int = 0
    nonzero: int = 0


def _write(
    weights: TensorSource,
    target: WidenPlan,
    folder: Path,
    seed: int,
    dtype: torch.dtype,
    shard_bytes: int,
    progress: Callable[[int, int], None],
) -> _Counts:
    """Write the shards, and their index when there is more than one."""
    maker = _Maker(weights, target, dtype, seed)
    shards, where, counts = _shards(maker.shapes(), dtype, shard_bytes), {}, _Counts()
    done, total = 0, target.config.num_parameters
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors[name], dead = maker.make(name)
            where[name] = file
            counts.dead += dead
            counts.nonzero += int(torch.count_nonzero(tensors[name]))
            done += tensors[name].numel()
            progress(done, total)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    assert done == total
    if len(shards) > 1:
        index = {"metadata": {"total_size": total * dtype.itemsize}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return counts


def _shards(shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, shard_bytes: int) -> list[list[str]]:
    """Tensor names in order, cut so that a shard holds at most `shard_bytes` (or one tensor)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes:
        size = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


class _Maker:
    """Makes the tensors of the large model, one by one.

    Rows and columns of a matrix are each described by a list of source indices, -1 where there is none.
    """

    def __init__(self, weights: TensorSource, target: WidenPlan, dtype: torch.dtype, seed: int) -> None:
        self.weights, self.plan, self.dtype, self.seed = weights, target, dtype, seed
        small, big = target.source, target.config
        copies = big.hidden_size // small.hidden_size
        self.written = torch.arange(small.hidden_size).repeat(copies)  # [D]: every copy is written alike
        self.read = torch.cat(
            (torch.arange(small.hidden_size), _dead(big.hidden_size - small.hidden_size))
        )  # [D]: one is read
        self.neurons = torch.cat(
            (torch.arange(small.intermediate_size), _dead(big.intermediate_size - small.intermediate_size))
        )
        self.q_rows = _channels(target.query_heads, small.head_dim)
        self.kv_rows = _channels(target.kv_heads, small.head_dim)
        self.pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed))
        self.pool[self.pool == 0] = 1.0

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the whole checkpoint, in the order of writing."""
        big = self.plan.config
        hidden, wide = big.hidden_size, big.intermediate_size
        q, kv = big.num_heads * big.head_dim, big.num_kv_heads * big.head_dim
        listed: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (big.vocab_size, hidden))]
        for layer in range(big.num_layers):
            listed += [
                (f"model.layers.{layer}.{name}", shape) for name, shape in _layer_shapes(big, hidden, wide, q, kv)
            ]
        listed.append(("model.norm.weight", (hidden,)))
        if not big.tie_embeddings:
            listed.append(("lm_head.weight", (big.vocab_size, hidden)))
        return listed

    def make(self, name: str) -> tuple[Tensor, int]:
        """The tensor called `name`, and how many of its weights are dead."""
        start = _start_of(self.seed, name)
        if name == "model.embed_tokens.weight":
            # When tied, the final norm's zeros silence the copies in the head, so plain copies serve both uses.
            return self._source(name)[:, self.written].to(self.dtype).contiguous(), 0
        if name == "lm_head.weight":
            return self._matrix(name, torch.arange(self.plan.config.vocab_size), self.read, start)
        if name == "model.norm.weight":
            return self._norm(name)
        _, _, number, part = name.split(".", 3)
        live = self.plan.layers[int(number)]
        like = f"model.layers.{live if live >= 0 else 0}.{part}"  # an added layer borrows the first one's scale
        return self._layer_part(like, part, live >= 0, start)

    def _layer_part(self, like: str, part: str, live: bool, start: int) -> tuple[Tensor, int]:
        if part.endswith(("q_norm.weight", "k_norm.weight")):
            weight = self._source(like).to(self.dtype)
            return weight, 0 if live else weight.numel()
        if part.endswith("layernorm.weight"):
            tensor, dead = self._norm(like)
            return tensor, dead if live else tensor.numel()
        rows, columns, silent_rows, silent_columns = self._layout(part, live)
        if part.endswith(".bias"):
            return self._bias(like, rows, silent_rows, live, start)
        tensor, dead = self._matrix(like, rows, columns, start)
        if silent_rows is not None:
            # A dead row must give an exact 0: the channels it could read from are zeroed, the silenced ones stay
            # random.
            tensor[silent_rows[:, None] & (self.read >= 0)[None, :]] = 0
        if silent_columns is not None:
            tensor[:, silent_columns] = 0
        return tensor, dead

    def _layout(self, part: str, live: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Source rows and columns of a part, the rows that must give 0, and the columns that must be 0."""
        q, kv, neurons = (index if live else _dead(len(index)) for index in (self.q_rows, self.kv_rows, self.neurons))
        kind = part.split(".")[1]
        if kind == "o_proj":
            leaky = _channels(self.plan.leaky_heads, self.plan.config.head_dim) >= 0
            return self.written, q, None, leaky if live else None
        if kind == "down_proj":
            return self.written, neurons, None, None
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": neurons, "up_proj": neurons}[kind]
        return rows, self.read, rows < 0 if kind in ("v_proj", "up_proj") else None, None

    def _matrix(self, like: str, rows: Tensor, columns: Tensor, start: int) -> tuple[Tensor, int]:
        """Random like the source's matrix, with the source's own entries where both row and column are live."""
        small = self._source(like)
        full = self._noise((len(rows), len(columns)), float(small.float().std()), start)
        live_rows, live_columns = (rows >= 0).nonzero()[:, 0], (columns >= 0).nonzero()[:, 0]
        if len(live_rows) and len(live_columns):
            full[live_rows[:, None], live_columns[None, :]] = small[rows[live_rows]][:, columns[live_columns]].to(
                self.dtype
            )
        return full, full.numel() - len(live_rows) * len(live_columns)

    def _bias(self, like: str, rows: Tensor, silent: Tensor | None, live: bool, start: int) -> tuple[Tensor, int]:
        small = self._source(like)
        full = self._noise((len(rows),), float(small.float().std()) or 0.02, start)
        full[rows >= 0] = small[rows[rows >= 0]].to(self.dtype)
        if silent is not None:
            full[silent] = 0
        writes = rows is self.written
        if writes and not live:  # an added layer adds nothing to the residual stream
            full.zero_()
        return full, len(rows) if not live else int((rows < 0).sum())

    def _norm(self, like: str) -> tuple[Tensor, int]:
        """The source's weights on the first copy, 0 on the others."""
        full = torch.zeros(len(self.read), dtype=self.dtype)
        small = self._source(like)
        full[: len(small)] = small.to(self.dtype)
        return full, len(full) - len(small)

    def _noise(self, shape: tuple[int, ...], std: float, start: int) -> Tensor:
        """Random non-zero weights of the given spread."""
        # Drawing billions of normals would take longer than writing them; a pool is drawn once and read in turn.
        scaled = (self.pool * std).to(self.dtype).roll(start)
        full = torch.empty(shape, dtype=self.dtype)
        for piece in torch.split(full.view(-1), _POOL):
            piece.copy_(scaled[: len(piece)])
        return full

    def _source(self, name: str) -> Tensor:
        return self.weights.read(name, self.weights.shape(name))


def _layer_shapes(big: ModelConfig, hidden: int, wide: int, q: int, kv: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (hidden,)
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if big.qkv_bias:
            yield f"self_attn.{name}.bias", (rows,)
    if big.qk_norm:
        yield "self_attn.q_norm.weight", (big.head_dim,)
        yield "self_attn.k_norm.weight", (big.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, q)
    if big.o_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, shape in (("gate_proj", (wide, hidden)), ("up_proj", (wide, hidden)), ("down_proj", (hidden, wide))):
        yield f"mlp.{name}.weight", shape
        if big.mlp_bias:
            yield f"mlp.{name}.bias", shape[:1]


def _dead(count: int) -> Tensor:
    return torch.full((count,), -1, dtype=torch.int64)


def _channels(heads: Sequence[int], head_dim: int) -> Tensor:
    """Channel indices of a list of heads, `[len(heads) * head_dim]`; -1 stays -1."""
    index = torch.tensor(heads, dtype=torch.int64)[:, None] * head_dim + torch.arange(head_dim)
    return torch.where(torch.tensor(heads)[:, None] >= 0, index, -1).reshape(-1)


def _start_of(seed: int, name: str) -> int:
    """Where a tensor begins to read the pool: its own place, whatever the order of writing."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little") % _POOL
