"""Checkpoints on disk: read the configuration, stream the weights into a decoder.

Only safetensors and GGUF files are read and no code from a checkpoint ever runs. Each matrix is read, cut to the rank's
part (`sharding`), cast and packed (or quantised) before the next one, so that loading needs little more memory than
the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import InputError, warn
from foretoken.machine.process import give_back_freed_memory
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import config_from_hf
from foretoken.model.decoder import Decoder
from foretoken.model.expert_weights import ExpertWeights
from foretoken.model.experts import Experts
from foretoken.model.families import FAMILIES
from foretoken.model.fields import Fields, check_links, read_json, refuse_adapter
from foretoken.model.gguf.header import is_gguf
from foretoken.model.gguf.names import config_fields
from foretoken.model.gguf.parts import read_header
from foretoken.model.gguf.weights import GgufWeights
from foretoken.model.layer_tensors import (
    MatrixTensors,
    layer_matrices,
    layer_norms,
    layer_scores,
    mtp_tensors,
    sinks_name,
)
from foretoken.model.layers import Embedding, Linear, packs_with_own_kernel
from foretoken.model.matrices.codes import Allocate, GroupedCodes, SharedPages
from foretoken.model.matrices.grouped_kernel import GroupedWeight, merged
from foretoken.model.matrices.quant import ACTIVATIONS, GroupQuantiser, check_quant
from foretoken.model.packed.weights import (
    PackedWeights,
    assembled,
    method_of,
    packed_format,
    with_older_settings,
)
from foretoken.model.rope import RowOrders, in_order
from foretoken.model.sharding import Collective, Shard
from foretoken.model.weights import EMBEDDING, HEAD, TensorSource, Weights

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Return the parsed `config.json`, with the end-of-text ids of `generation_config.json`, which take precedence; of
    a GGUF file what its metadata says in the same words.

    Raises:
        CheckpointError: missing, unreadable or not a JSON object; token ids that are none; a file that is a link out of
        the folder.
        UnsupportedModelError: the folder holds an adapter.
    """
    if is_gguf(folder):
        return config_fields(read_header(folder))
    check_links(folder)
    refuse_adapter(folder)
    raw = read_json(folder / "config.json")
    fields = Fields(raw, str(folder / "config.json"))
    size = raw.get("vocab_size")
    vocab_size = size if isinstance(size, int) and size > 0 else None  # models of several parts have it elsewhere
    fields.token_ids("eos_token_id", vocab_size)
    generation = folder / "generation_config.json"
    if generation.exists():
        own = Fields(read_json(generation), str(generation))
        if own.token_ids("eos_token_id", vocab_size):
            raw["eos_token_id"] = own.raw["eos_token_id"]
    return raw


def open_weights(folder: Path) -> TensorSource:
    """The tensors of a checkpoint folder or GGUF file; packed matrices of a family with a native decoder unpacked.

    Raises:
        CheckpointError: a file is missing or malformed.
        UnsupportedModelError: a GGUF file of a family that does not run, or matrices packed in a way that is not read.
    """
    if is_gguf(folder):
        return GgufWeights(folder)
    file = folder / "config.json"
    raw: Mapping[str, Any] = read_json(file) if file.exists() else {}
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        return Weights(folder)
    raw, where = with_older_settings(folder, raw)
    fields = Fields({**family.defaults, **raw}, str(where))
    weights: Weights | PackedWeights
    if family.experts is not None and (method_of(fields) in (None, "mxfp4")):
        weights = ExpertWeights(folder, family.experts)
    else:
        form = packed_format(fields)
        weights = Weights(folder, is_decoder=True) if form is None else PackedWeights(folder, form)
    if fields.flag("tie_word_embeddings"):
        weights.take_head()
    return weights


def read_checkpoint(folder: Path) -> tuple[ModelConfig, TensorSource]:
    """The configuration of a checkpoint that the native decoder can run, and its tensors, compared with each other.

    A head of its own beside `tie_word_embeddings` is used, as transformers does, unless it equals the embedding bit for
    bit.

    Raises:
        CheckpointError: a file is missing or malformed, or the tensors are not those of the model that config.json
        describes.
        UnsupportedModelError: not a causal decoder, or none that the native decoder knows.
    """
    weights: TensorSource
    if is_gguf(folder):
        weights = gguf = GgufWeights(folder)
        config = gguf.config()
        weights.check(config)
    else:  # the configuration first: a folder without one is no checkpoint
        raw, where = read_raw_config(folder), str(folder / "config.json")
        config = config_from_hf(raw, where)
        weights = open_weights(folder)
        weights.check(config, mtp_tensors(weights.own_names, raw, config.num_layers, where).names)
    if config.tie_embeddings and HEAD in weights and not weights.equal(HEAD, EMBEDDING):
        config = replace(config, tie_embeddings=False)
    return config, weights


def read_config(folder: Path) -> ModelConfig:
    """The configuration alone, see `read_checkpoint`."""
    return read_checkpoint(folder)[0]


def parse_dtype(dtype: str | torch.dtype, stored: torch.dtype | None = None) -> torch.dtype:
    """Translate a dtype given by name; "auto" is the one the checkpoint is stored in.

    Raises:
        InputError: not a floating point dtype that models run in.
    """
    if isinstance(dtype, torch.dtype):
        if dtype in _FLOATS.values():
            return dtype
    elif dtype == "auto" and stored is not None:
        return stored
    elif dtype in _FLOATS:
        return _FLOATS[dtype]
    raise InputError("dtype", dtype, f"choose one of auto, {', '.join(_FLOATS)}")


def load_decoder(
    folder: Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    pack: bool = True,
    quant: str | None = None,
    rank: int = 0,
    world: int = 1,
    collective: Collective | None = None,
) -> Decoder:
    """Return the checkpoint's decoder, ready for inference (no gradients), its matrices packed for the CPU if `pack`.

    `quant` "int8" or "int4" keeps the matrices in that format, on the CPU only (`grouped_kernel`); `dtype` is then that
    of the rest. Without it, codes of a GGUF file are multiplied as they are where matrices may be packed (`pack`). With
    `world` ranks it is the part of `rank` (see `sharding`), which talks to the others by `collective`.

    Raises:
        CheckpointError: a file, shard or tensor is missing, broken or of another shape than `config.json` says.
        UnsupportedModelError: not a family of the native decoder.
        InputError: unknown `dtype` or `quant`, or a pair that does not go together.
        ConfigError: the model cannot be divided among `world` ranks.
    """
    assert world == 1 or collective is not None, "the ranks of a model must be able to talk to each other"
    config, weights = read_checkpoint(folder)
    shard = Shard(config, rank, world)
    target, place = dtype_of(folder, dtype), torch.device(device)
    quantiser: GroupQuantiser | None = None
    allocate = SharedPages().tensor
    if quant is not None:
        check_quant(quant, target, place)
        quantiser = GroupQuantiser(quant, target, allocate)
    with torch.device("meta"):
        decoder = Decoder(config, shard, collective)
    filler = _Filler(weights, shard, dtype=target, device=place, pack=pack, quantiser=quantiser, allocate=allocate)
    filler.embedding(decoder.embedding, "model.embed_tokens", config)
    for index, layer in enumerate(decoder.layers):
        filler.layer(layer, index, config)
        give_back_freed_memory()
    filler.norm(decoder.norm, "model.norm")
    if config.tie_embeddings:
        decoder.lm_head.weight = decoder.embedding.weight
        if decoder.embedding.packed is not None:
            decoder.lm_head.hold(decoder.embedding.packed)
        elif pack:
            decoder.lm_head.pack(allocate)
    else:
        filler.linear(decoder.lm_head, {"lm_head": config.vocab_size}, config.hidden_size)
    if pack and filler.dequantised:
        warn(DequantisedWarning(_dequantised_words(folder, target, filler.dequantised)), stacklevel=2)
    return decoder.eval()


def _dequantised_words(folder: Path, dtype: torch.dtype, reasons: Mapping[str, int]) -> str:
    why = "; ".join(f"{count} ({reason})" for reason, count in reasons.items())
    return (
        f"{folder}: quantised matrices were dequantised to {_name_of(dtype)} when loaded, with more memory and time: "
        f"{why}. On a CPU weights='int8' quantises them anew, with another rounding"
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(folder: Path, dtype: str | torch.dtype = "auto") -> torch.dtype:
    """What `load_decoder` makes of `dtype`: "auto" is what config.json says, or else how the embedding is stored.

    Raises:
        CheckpointError: a file is missing or broken.
        InputError: unknown `dtype`.
    """
    return parse_dtype(dtype, stored_dtype(read_raw_config(folder), open_weights(folder), str(folder / "config.json")))


def stored_dtype(raw: Mapping[str, Any], weights: TensorSource, where: str = "config.json") -> torch.dtype:
    """What config.json says, or else how the embedding is stored, or the first tensor where nothing has its name.

    Raises:
        CheckpointError: a dtype that models do not run in.
    """
    fields = Fields(raw, where)
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    named = (fields.text(key) or "auto").removeprefix("torch.")
    if named == "auto":
        return weights.dtype(EMBEDDING if EMBEDDING in weights else weights.names[0])
    if named not in _FLOATS:
        raise fields.refusal(key, f"one of {', '.join(_FLOATS)}")
    return _FLOATS[named]


class DequantisedWarning(UserWarning):
    """Quantised matrices run as numbers of 16 or 32 bits; the message says why, and a remedy."""


class _Filler:
    """Fills the modules of a decoder on the meta device with this rank's weights, one matrix at a time.

    Shapes in its arguments are those of the checkpoint; `_read` alone cuts them.
    """

    def __init__(
        self,
        weights: TensorSource,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        pack: bool,
        quantiser: GroupQuantiser | None,
        allocate: Allocate,
    ) -> None:
        self.weights, self.shard, self.dtype, self.device = weights, shard, dtype, device
        self.pack, self.quantiser, self._allocate = pack, quantiser, allocate
        self._requests = RowOrders(shard.config)
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self.dequantised: dict[str, int] = {}  # by reason: matrices that the file has in codes and that run as numbers

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """This rank's part of a tensor of the checkpoint, as stored."""
        tensor, order = self.weights.read(name, shape), self._requests.of(name)
        return self.shard.slice(name, tensor if order is None else in_order(tensor, order))

    @property
    def _fits(self) -> bool:
        return self.pack and self.device.type == "cpu" and self.dtype in ACTIVATIONS

    def _grouped(self, names: Sequence[str]) -> list[GroupedWeight]:
        """Matrices in the codes that the file holds, if it has those of all and the kernel takes them here."""
        if not self._fits:
            return []
        found = [self._codes(name) for name in names]
        parts = [(num_rows, codes) for num_rows, codes in found if codes is not None]
        if len(parts) < len(found):
            return []
        return [assembled(codes, num_rows, self.dtype, self._allocate) for num_rows, codes in parts]

    def _codes(self, name: str) -> tuple[int, Iterator[GroupedCodes] | None]:
        """This rank's part of a matrix, some rows at a time, and the number of its rows; None if it has no codes."""
        codes, order, num_rows = self.weights.grouped_rows(name), self._requests.of(name), self.weights.shape(name)[0]
        if codes is None or (order is None and self.shard.world == 1):
            return num_rows, codes
        whole = GroupedCodes.joined(list(codes))
        if order is not None:
            whole = whole.reordered(lambda rows: in_order(rows, order))
        own = self.shard.slice_codes(name, whole)
        return len(own.codes), iter((own,))

    def _note(self, names: Sequence[str]) -> None:
        """Count quantised matrices among those that are kept as numbers."""
        for name in names:
            reason = self.weights.why_numbers(name)
            if reason is None and self.weights.sample(name) is not None:
                other = f"no kernel for codes on {self.device.type} in {_name_of(self.dtype)}"
                reason = "beside a matrix without codes" if self._fits else other
            if reason is not None:
                self.dequantised[reason] = self.dequantised.get(reason, 0) + 1

    def _merged(self, shapes: Mapping[str, tuple[int, ...]], like: nn.Parameter) -> nn.Parameter:
        """Read tensors one after the other into the rows of one parameter, of the shape of `like`."""
        full = torch.empty(like.shape, dtype=self.dtype, device=self.device)
        return self._filled(full, shapes)

    def _to_pack(self, shapes: Mapping[str, tuple[int, ...]], like: nn.Parameter) -> nn.Parameter:
        """The same in memory that the next matrix takes again, for packing that copies. Memory that is freed for each
        matrix is given to smaller ones in part, and the next temporary takes more.
        """
        if len(self._scratch) < like.numel():
            self._scratch = torch.empty(like.numel(), dtype=self.dtype, device=self.device)
        return self._filled(self._scratch[: like.numel()].view(like.shape), shapes)

    def _filled(self, full: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> nn.Parameter:
        start = 0
        for name, shape in shapes.items():
            part = self._read(name, shape)
            full[start : start + len(part)].copy_(part)
            start += len(part)
        assert start == len(full), "the parts do not make up the parameter"
        return nn.Parameter(full, requires_grad=False)

    def linear(self, module: Linear, rows: Mapping[str, int], columns: int) -> None:
        """One matrix of several of the checkpoint, by name with their rows; a bias comes with the same names."""
        if module.bias is not None:
            module.bias = self._merged({f"{name}.bias": (count,) for name, count in rows.items()}, module.bias)
        shapes = {f"{name}.weight": (count, columns) for name, count in rows.items()}
        if self.quantiser is not None:
            module.hold(self.quantiser.matrix([self._read(name, shape) for name, shape in shapes.items()]))
            return
        parts = self._grouped(list(shapes))
        if parts:
            module.hold(merged(parts))
            return
        self._note(list(shapes))
        assert module.weight is not None
        packs_copy = (
            self.pack and self.device.type == "cpu" and self.dtype == torch.bfloat16 and packs_with_own_kernel()
        )
        module.weight = (self._to_pack if packs_copy else self._merged)(shapes, module.weight)
        if self.pack:
            module.pack(self._allocate)
        assert not packs_copy or module.packed is not None, "the weight would share its memory with the next one"

    def embedding(self, module: Embedding, name: str, config: ModelConfig) -> None:
        name, shape = f"{name}.weight", (config.vocab_size, config.hidden_size)
        if self.quantiser is not None:
            module.hold(self.quantiser.matrix([self._read(name, shape)], is_table=True))
            return
        parts = self._grouped([name])
        if parts:
            module.hold(parts[0])
            return
        self._note([name])
        assert module.weight is not None
        module.weight = self._merged({name: shape}, module.weight)

    def scores(self, module: nn.Module, matrix: MatrixTensors) -> None:
        """A small matrix that stays in float32."""
        for name, shape in matrix.shapes:
            tensor = self._read(name, shape).to(self.device, torch.float32, copy=True)
            setattr(module, name.rpartition(".")[2], nn.Parameter(tensor, requires_grad=False))

    def norm(self, module: nn.Module, name: str) -> None:
        """The weights of one norm, and its bias if it has one."""
        for kind, parameter in list(module.named_parameters()):
            tensor = f"{name}.{kind}"
            setattr(module, kind, self._merged({tensor: self.weights.shape(tensor)}, parameter))

    def layer(self, layer: nn.Module, index: int, config: ModelConfig) -> None:
        for module, matrix in layer_matrices(config, index).items():
            linear = layer.get_submodule(module)
            assert isinstance(linear, Linear)
            self.linear(linear, matrix.rows, matrix.columns)
        for module, matrix in layer_scores(config, index).items():
            self.scores(layer.get_submodule(module), matrix)
        if isinstance(layer.mlp, Experts):
            layer.mlp.stack()
        for module, (name, _) in layer_norms(config, index).items():
            self.norm(layer.get_submodule(module), name)
        if config.has_sinks:
            assert isinstance(layer.sinks, nn.Parameter)
            layer.sinks = self._merged({sinks_name(config, index): (config.num_heads,)}, layer.sinks)
