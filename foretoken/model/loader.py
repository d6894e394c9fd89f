"""Checkpoints on disk: find the folder, read its configuration, stream its weights into a decoder, write one back.

Only safetensors are read and no code from a checkpoint ever runs. Each matrix is read, cast and packed (or quantised) before the
next one, so that loading needs little more memory than the weights themselves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.errors import CheckpointError, InputError, ModelError, StorageError
from foretoken.model.architecture import ModelConfig, config_from_hf, config_to_hf
from foretoken.model.decoder import Decoder, DecoderLayer
from foretoken.model.layers import Embedding, Linear, RMSNorm
from foretoken.model.quant import Quantiser, check_quant
from foretoken.model.writing import writing_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
_HUB_SKIPPED = ["consolidated*", "original/*"]  # the same weights once more, in their maker's own layout
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Tables that old checkpoints carry and every implementation computes afresh.
_HARMLESS = re.compile(r"(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias|position_ids)$")
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def resolve_folder(path_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """Return the checkpoint's folder: a local one, or the hub's snapshot, downloaded unless HF_HUB_OFFLINE is set.

    Raises:
        CheckpointError: neither a local folder nor reachable on the hub.
    """
    name = os.fspath(path_or_hub_id)
    if not name:
        raise CheckpointError("no model is named; give the folder of a checkpoint, a hub id, or reference:target")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json")
    if isinstance(path_or_hub_id, Path) or not _HUB_ID.fullmatch(name) or name[0] == ".":
        raise CheckpointError(f"folder {path} does not exist; give the folder of a checkpoint, or a hub id")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_SKIPPED))
    except Exception as error:  # network, access and cache errors of the hub have no common base
        offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name!r} is neither a local folder nor available from the Hugging Face hub{offline}: {reason}") from error


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Return the parsed `config.json`, with the end-of-text ids of `generation_config.json`, which take precedence.

    Raises:
        CheckpointError: missing, unreadable or not a JSON object.
    """
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists() and (eos := _read_json(generation).get("eos_token_id")) is not None:
        raw["eos_token_id"] = eos
    return raw


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a checkpoint that the native decoder can run.

    Raises:
        CheckpointError: missing or malformed.
        UnsupportedModelError: not a causal decoder, or none that the native decoder knows.
    """
    return config_from_hf(read_raw_config(folder))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: this is not a Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


class Weights:
    """The tensors of a checkpoint folder by name, whole files and shards alike; nothing is read until asked for.

    Raises:
        CheckpointError: no safetensors, a missing shard, or a truncated or corrupt file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._about: dict[str, tuple[tuple[int, ...], str]] = {}
        for file in self._files():
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    view = tensors.get_slice(name)
                    self._file_of[name], self._about[name] = file, (tuple(view.get_shape()), str(view.get_dtype()))
        self._check_index()

    def _files(self) -> list[Path]:
        if (self.folder / INDEX).exists():
            self._index = dict(_read_json(self.folder / INDEX).get("weight_map") or {})
            files = [self.folder / name for name in sorted(set(self._index.values()))]
            for file in files:
                if not file.exists():
                    raise CheckpointError(f"shard {file.name} is missing in {self.folder}; {INDEX} lists it: download the folder again")
            return files
        self._index = {}
        if (self.folder / WEIGHTS).exists():
            return [self.folder / WEIGHTS]
        refuse_pickle(self.folder)
        raise CheckpointError(f"{self.folder} holds neither {WEIGHTS} nor {INDEX}")

    def _check_index(self) -> None:
        for name, shard in self._index.items():
            if name not in self._file_of:
                raise CheckpointError(f"tensor {name} is not in {shard} as {INDEX} says: download the folder again")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    @property
    def own_names(self) -> list[str]:
        """Names without the tables that our decoder computes anyway."""
        return [name for name in self._file_of if not _HARMLESS.search(name)]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        self._require(name)
        return self._about[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of one tensor.

        Raises:
            CheckpointError: missing, or not a floating point dtype that is read here.
        """
        self._require(name)
        stored = self._about[name][1]
        if stored not in _STORED:
            remedy = "take the checkpoint's float16 or bfloat16 version"
            raise CheckpointError(f"tensor {name} in {self._file_of[name]} is stored as {stored}, which is not read here: {remedy}")
        return _STORED[stored]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return one tensor as stored, on the CPU; it may be a view of the mapped file: copy it.

        Raises:
            CheckpointError: missing, of another shape, or of a dtype that is not read.
        """
        self.dtype(name)
        file = self._file_of[name]
        if self.shape(name) != shape:
            raise CheckpointError(f"tensor {name} in {file} has shape {list(self.shape(name))}; config.json asks for {list(shape)}")
        # Opened anew for each tensor: pages of a mapped file count as our memory until it is closed.
        with _opened(file) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor

    def _require(self, name: str) -> None:
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name} is missing in {self.folder}: the checkpoint is incomplete or of another architecture")

    def check_extra(self, expected: set[str]) -> None:
        """Refuse tensors that nobody would read, except tables that are computed anyway."""
        extra = [name for name in self._file_of if name not in expected and not _HARMLESS.search(name)]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(f"tensor {extra[0]}{more} in {self.folder} has no place in the model that config.json describes")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """`safe_open` whose failures say which file is broken."""
    try:
        handle: Any = safe_open(file, framework="pt")
        with handle as tensors:
            yield tensors
    except ModelError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt ({error}): download it again") from error


def refuse_pickle(folder: Path) -> None:
    """Refuse a folder whose weights exist only as pickles, which may run code when read.

    Raises:
        CheckpointError: pickles and no safetensors.
    """
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles and not any(folder.glob("*.safetensors")):
        remedy = "convert it to safetensors (model.save_pretrained(folder) in transformers), or take a revision that has them"
        raise CheckpointError(f"{folder} has its weights only as pickle ({pickles[0]}), which is never read: {remedy}")


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
    folder: Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu", pack: bool = True, quant: str | None = None
) -> Decoder:
    """Return the checkpoint's decoder, ready for inference (no gradients), its matrices packed for the CPU if `pack`.

    `quant` "int8" or "int4" keeps the matrices in that format (see `quant`), on the CPU alone; `dtype` is then that of the rest.

    Raises:
        CheckpointError: a file, shard or tensor is missing, broken or of another shape than `config.json` says.
        UnsupportedModelError: not a family of the native decoder.
        InputError: unknown `dtype` or `quant`, or a pair that does not go together.
    """
    config, weights = read_config(folder), Weights(folder)
    target, place = dtype_of(folder, dtype), torch.device(device)
    quantiser = None
    if quant is not None:
        check_quant(quant, target, place)
        quantiser = Quantiser(quant, target)
    with torch.device("meta"):
        decoder = Decoder(config)
    filler = _Filler(weights, target, place, pack, quantiser)
    filler.embedding(decoder.embedding, "model.embed_tokens", config)
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        filler.layer(layer, f"model.layers.{index}", config)
    filler.norm(decoder.norm, "model.norm")
    if config.tie_embeddings:
        filler.seen.add("lm_head.weight")
        decoder.lm_head.weight = decoder.embedding.weight
        if decoder.embedding.packed is not None:
            decoder.lm_head.hold(decoder.embedding.packed)
        elif pack:
            decoder.lm_head.pack()
    else:
        filler.linear(decoder.lm_head, ["lm_head"], [config.vocab_size])
    weights.check_extra(filler.seen)
    return decoder.eval()


def dtype_of(folder: Path, dtype: str | torch.dtype = "auto") -> torch.dtype:
    """What `load_decoder` makes of `dtype`: "auto" is what config.json says, or else how the embedding is stored.

    Raises:
        CheckpointError: a file is missing or broken.
        InputError: unknown `dtype`.
    """
    raw = read_raw_config(folder)
    named = str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
    return parse_dtype(dtype, _FLOATS[named] if named in _FLOATS else Weights(folder).dtype("model.embed_tokens.weight"))


class _Filler:
    """Fills the modules of a decoder on the meta device, one matrix at a time."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, pack: bool, quantiser: Quantiser | None) -> None:
        self.weights, self.dtype, self.device, self.pack, self.quantiser = weights, dtype, device, pack, quantiser
        self.seen: set[str] = set()

    def merged(self, names: list[str], *shapes: tuple[int, ...]) -> nn.Parameter:
        """Read tensors one after the other into the rows of one parameter."""
        rows = sum(shape[0] for shape in shapes)
        full = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            full[start : start + shape[0]].copy_(self.weights.read(name, shape))
            self.seen.add(name)
            start += shape[0]
        return nn.Parameter(full, requires_grad=False)

    def mapped(self, names: list[str], *shapes: tuple[int, ...]) -> list[Tensor]:
        """The tensors as they are stored, for the quantiser."""
        self.seen.update(names)
        return [self.weights.read(name, shape) for name, shape in zip(names, shapes, strict=True)]

    def linear(self, module: Linear, names: list[str], rows: list[int]) -> None:
        weights, shapes = [f"{name}.weight" for name in names], [(count, module.in_features) for count in rows]
        if module.bias is not None:
            module.bias = self.merged([f"{name}.bias" for name in names], *((count,) for count in rows))
        if self.quantiser is not None:
            module.hold(self.quantiser.matrix(self.mapped(weights, *shapes)))
            return
        module.weight = self.merged(weights, *shapes)
        if self.pack:
            module.pack()

    def embedding(self, module: Embedding, name: str, config: ModelConfig) -> None:
        shape = (config.vocab_size, config.hidden_size)
        if self.quantiser is not None:
            module.hold(self.quantiser.table(self.mapped([f"{name}.weight"], shape)))
        else:
            module.weight = self.merged([f"{name}.weight"], shape)

    def norm(self, module: RMSNorm, name: str) -> None:
        module.weight = self.merged([f"{name}.weight"], tuple(module.weight.shape))

    def layer(self, layer: DecoderLayer, prefix: str, config: ModelConfig) -> None:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp, wide = f"{prefix}.self_attn", f"{prefix}.mlp", config.intermediate_size
        self.norm(layer.input_norm, f"{prefix}.input_layernorm")
        self.linear(layer.qkv_proj, [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"], [q, kv, kv])
        if layer.q_norm is not None and layer.k_norm is not None:
            self.norm(layer.q_norm, f"{attention}.q_norm")
            self.norm(layer.k_norm, f"{attention}.k_norm")
        self.linear(layer.o_proj, [f"{attention}.o_proj"], [config.hidden_size])
        self.norm(layer.post_norm, f"{prefix}.post_attention_layernorm")
        self.linear(layer.mlp.gate_up_proj, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [wide, wide])
        self.linear(layer.mlp.down_proj, [f"{mlp}.down_proj"], [config.hidden_size])


def hf_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the decoder's weights under their Hugging Face names, merged matrices split (as views).

    Raises:
        ModelError: the decoder is packed (load it with `pack=False`) or quantised.
    """
    config = decoder.config
    q, kv, wide = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    if decoder.embedding.weight is None:
        raise ModelError("a quantised decoder has no plain weights left to write; load it without quant")
    yield "model.embed_tokens.weight", decoder.embedding.weight.detach()
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        yield f"model.layers.{index}.input_layernorm.weight", layer.input_norm.weight.detach()
        yield from _split(layer.qkv_proj, [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"], [q, kv, kv])
        if layer.q_norm is not None and layer.k_norm is not None:
            yield f"{attention}.q_norm.weight", layer.q_norm.weight.detach()
            yield f"{attention}.k_norm.weight", layer.k_norm.weight.detach()
        yield from _split(layer.o_proj, [f"{attention}.o_proj"], [config.hidden_size])
        yield f"model.layers.{index}.post_attention_layernorm.weight", layer.post_norm.weight.detach()
        yield from _split(layer.mlp.gate_up_proj, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [wide, wide])
        yield from _split(layer.mlp.down_proj, [f"{mlp}.down_proj"], [config.hidden_size])
    yield "model.norm.weight", decoder.norm.weight.detach()
    if not config.tie_embeddings:
        yield from _split(decoder.lm_head, ["lm_head"], [config.vocab_size])


def _split(module: Linear, names: list[str], rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    if module.weight is None:
        raise ModelError("a packed decoder has no plain weights left to write; load it with pack=False")
    for kind, full in (("weight", module.weight), ("bias", module.bias)):
        if full is not None:
            yield from ((f"{name}.{kind}", part) for name, part in zip(names, torch.split(full.detach(), rows), strict=True))


def save_checkpoint(
    decoder_or_state: Decoder | Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path,
    tokenizer_folder: Path | None = None,
    dtype: str | torch.dtype = "bfloat16",
) -> None:
    """Write a standard Hugging Face folder: `config.json`, `model.safetensors` and the tokenizer's files if given.

    A state has Hugging Face names. Files are written beside their final names first: a crash leaves the old ones whole.

    Raises:
        StorageError: the folder cannot be written.
        ModelError: the decoder is packed.
    """
    target = parse_dtype(dtype)
    pairs = hf_state(decoder_or_state) if isinstance(decoder_or_state, Decoder) else decoder_or_state.items()
    tensors = {name: tensor.detach().to("cpu", target).contiguous().clone() for name, tensor in pairs}
    raw = config_to_hf(config) | {"torch_dtype": str(target).removeprefix("torch.")}
    try:
        with writing_folder(folder, ".writing-") as draft:
            save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
            (draft / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            if tokenizer_folder is not None:
                copy_tokenizer(tokenizer_folder, draft)
            (folder / INDEX).unlink(missing_ok=True)  # of an older, sharded checkpoint: it would win over the new file
            for file in draft.iterdir():
                file.chmod(0o644)
                os.replace(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the checkpoint to {folder}: {error}") from error


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files, those that exist."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
