"""The tensors of a checkpoint on disk: which files hold them, what their headers say, and whether a model's tensors are
all there.

Only safetensors are read. Headers are compared with config.json before anything is allocated, so that a model takes no
more memory than its files hold.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError, ModelError
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import Fields, check_links, checkpoint_file, read_json
from foretoken.model.layer_tensors import layer_tensors
from foretoken.model.matrices.codes import GroupedCodes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BASE = "model."  # what names of all tensors but the head begin with
AS_CODES = "multiplied by its codes on a CPU, elsewhere dequantised when loaded"  # what becomes of a quantised type
# As AutoGPTQ named them.
_OLDER_WEIGHTS = "gptq_model-*.safetensors"
_OLDER_INDEX = f"{_OLDER_WEIGHTS}.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Tables that old checkpoints carry and every implementation computes afresh.
_HARMLESS = re.compile(r"(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias|position_ids)$")
_BITS = re.compile(r"\d+")
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True)
class StoredKind:
    """One of the types in which a checkpoint stores its numbers; `read` says what becomes of them."""

    name: str
    num_tensors: int
    num_bytes: int
    read: str


def stored_kinds(tensors: Iterable[tuple[str, int]], read: Callable[[str], str]) -> list[StoredKind]:
    """The types of `tensors` (name of the type, bytes), the one with most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    for name, num_bytes in tensors:
        count, size = found.get(name, (0, 0))
        found[name] = count + 1, size + num_bytes
    kinds = [StoredKind(name, count, size, read(name)) for name, (count, size) in found.items()]
    return sorted(kinds, key=lambda kind: -kind.num_bytes)


def stored_bytes(shape: Sequence[int], stored: str) -> int:
    """Bytes of a tensor whose type its file calls `stored`."""
    bits = _BITS.search(stored)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


class TensorSource(ABC):
    """The tensors of a checkpoint under their Hugging Face names, whatever kind of file holds them.

    `described_by` is where the shapes come from that they are compared with.
    """

    folder: Path
    described_by: ClassVar[str] = "config.json"

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors."""

    @property
    @abstractmethod
    def own_names(self) -> list[str]:
        """Names of the tensors that become weights of the decoder."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, as numbers."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the numbers of one tensor; of a quantised one float32, in which its format defines them.

        Raises:
            CheckpointError: missing, or of a type that is not read here.
        """

    @abstractmethod
    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor on the CPU: as stored, perhaps a view of the mapped file, or the float32 numbers that its codes
        stand for.

        Raises:
            CheckpointError: missing, of another shape, of a type that is not read, or out of bounds.
        """

    @abstractmethod
    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of numbers that is not of this shape.

        Raises:
            CheckpointError: missing, of another shape, or of a type that is not read.
        """

    @abstractmethod
    def kinds(self) -> list[StoredKind]:
        """The types in which the tensors are stored."""

    def grouped_rows(self, name: str) -> Iterator[GroupedCodes] | None:  # noqa: ARG002 - plain numbers have no codes
        """One matrix as codes and scales, whole blocks of the kernel's rows at a time; None if it has none that the
        kernel takes.
        """
        return None

    def sample(self, name: str) -> GroupedCodes | None:  # noqa: ARG002 - see `grouped_rows`
        """The first rows of what `grouped_rows` gives, in the file's order."""
        return None

    def why_numbers(self, name: str) -> str | None:  # noqa: ARG002 - most types are multiplied by their codes
        """Why a quantised matrix has to be dequantised wherever it runs; None for others."""
        return None

    def check(self, config: ModelConfig, beside: frozenset[str] = frozenset()) -> None:
        """Compare the headers with the tensors of `config`, before anything is allocated; those of the names `beside`
        are somebody else's.

        Raises:
            CheckpointError: a tensor is missing, superfluous, of another shape, or of a dtype that is not read.
        """
        expected = {HEAD, *beside} if config.tie_embeddings else set(beside)
        for name, shape in hf_tensors(config):
            self.check_shape(name, shape)
            expected.add(name)
        if config.tie_embeddings and HEAD in self:
            self.check_shape(HEAD, (config.vocab_size, config.hidden_size))
        extra = [name for name in self.own_names if name not in expected and not self._is_spare(name)]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(
                f"tensor {self._stored_name(extra[0])}{more} in {self.folder} has no place in the model that "
                f"{self.described_by} describes"
            )

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors of one shape hold the same numbers."""
        return torch.equal(self.read(name, self.shape(name)), self.read(other, self.shape(name)).to(self.dtype(name)))

    def _is_spare(self, name: str) -> bool:  # noqa: ARG002 - in most formats nothing is
        """Whether a tensor that the model lacks changes nothing."""
        return False

    def _stored_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return name


class Weights(TensorSource):
    """The tensors of a checkpoint folder by name, whole files and shards alike; nothing is read until asked for.

    `whole` is the name of the file that holds all of them, if there is one; AutoGPTQ's name is known too. With
    `is_decoder` the names are those of a whole model, also where the base model was saved alone (transformers'
    `AutoModel`), whose names lack "model.".

    Raises:
        CheckpointError: no safetensors, a missing shard, or a truncated or corrupt file.
    """

    def __init__(self, folder: Path, whole: str = WEIGHTS, is_decoder: bool = False) -> None:
        self.folder, self._whole = folder, whole
        self._file_of: dict[str, Path] = {}
        self._about: dict[str, tuple[tuple[int, ...], str]] = {}
        self._stored_as: dict[str, str] = {}  # tensors that go by another name here than in their file
        check_links(folder)
        for file in self._files():
            with opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if name in self._file_of:
                        raise CheckpointError(
                            f"tensor {name} is in {self._file_of[name].name} and in {file.name} of {folder}"
                        )
                    view = tensors.get_slice(name)
                    self._file_of[name], self._about[name] = file, (tuple(view.get_shape()), str(view.get_dtype()))
        for name, shard in self._index.items():
            if name not in self._file_of:
                raise CheckpointError(
                    f"tensor {name} is not in {shard} as the index of {folder} says: download the folder again"
                )
        own = EMBEDDING.removeprefix(_BASE)
        self._is_base = is_decoder and own in self._file_of and not any(one.startswith(_BASE) for one in self._file_of)
        if self._is_base:
            for name in [one for one in self._file_of if one != HEAD]:
                self._rename(name, f"{_BASE}{name}")

    def _files(self) -> list[Path]:
        self._index: dict[str, str] = {}
        if (self.folder / self._whole).exists():  # transformers prefers it too
            return [self.folder / self._whole]
        older, older_indices = (sorted(self.folder.glob(name)) for name in (_OLDER_WEIGHTS, _OLDER_INDEX))
        if (self.folder / INDEX).exists():
            return self._shards(self.folder / INDEX)
        if len(older_indices) == 1:
            return self._shards(older_indices[0])
        if len(older) == 1:
            return older
        refuse_pickle(self.folder)
        found = (
            f", but {older[0].name} and {len(older) - 1} more without an index: save it again in one file"
            if older
            else ""
        )
        raise CheckpointError(f"{self.folder} holds neither {self._whole} nor {INDEX}{found}")

    def _shards(self, index: Path) -> list[Path]:
        """The files that an index lists."""
        fields = Fields(read_json(index), str(index))
        listed = fields.fields("weight_map")
        if listed is None or not all(isinstance(shard, str) for shard in listed.raw.values()):
            raise fields.refusal("weight_map", "an object that gives the file of every tensor")
        self._index = dict(listed.raw)
        files = [checkpoint_file(self.folder, name) for name in sorted(set(self._index.values()))]
        for file in files:
            if not file.exists():
                raise CheckpointError(
                    f"shard {file.name} is missing in {self.folder}; {index.name} lists it: download the folder again"
                )
        return files

    def take_head(self) -> None:
        """Take the output matrix for the embedding if there is none: of a tied pair safetensors' `save_model` keeps one
        name.
        """
        if HEAD in self._file_of and EMBEDDING not in self._file_of:
            self._rename(HEAD, EMBEDDING)

    def _rename(self, stored: str, name: str) -> None:
        self._stored_as[name] = stored
        self._file_of[name], self._about[name] = self._file_of.pop(stored), self._about.pop(stored)

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

    def stored(self, name: str) -> str:
        """The type of one tensor as its file calls it, such as "BF16".

        Raises:
            CheckpointError: missing.
        """
        self._require(name)
        return self._about[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        stored = self.stored(name)
        if stored not in _STORED:
            remedy = "take the checkpoint's float16 or bfloat16 version"
            raise CheckpointError(
                f"tensor {name} in {self._file_of[name]} is stored as {stored}, which is not read here: {remedy}"
            )
        return _STORED[stored]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `TensorSource`."""
        self.check_shape(name, shape)
        return self.part(name)

    def read_table(self, name: str, shape: tuple[int, ...], stored: str) -> Tensor:
        """A tensor of numbers or flags, of exactly the dtype `stored` ("I64", "BOOL").

        Raises:
            CheckpointError: missing, or of another shape or dtype.
        """
        self._require(name)
        if self._about[name] != (shape, stored):
            found = f"{self._about[name][1]} {list(self.shape(name))}"
            raise CheckpointError(
                f"tensor {name} in {self._file_of[name]} is {found}; config.json asks for {stored} {list(shape)}"
            )
        return self.part(name)

    def check_part(self, name: str, shapes: Sequence[tuple[int, ...]], types: Sequence[str]) -> None:
        """Refuse a tensor of codes or scales that has none of these shapes or types.

        Raises:
            CheckpointError: missing, or of another shape or type.
        """
        self._require(name)
        shape, stored = self._about[name]
        if shape not in shapes or stored not in types:
            wanted = " or ".join(dict.fromkeys(str(list(one)) for one in shapes))
            raise CheckpointError(
                f"tensor {name} in {self._file_of[name]} is {stored} {list(shape)}; quantization_config asks for "
                f"{' or '.join(types)} {wanted}"
            )

    def part(self, name: str) -> Tensor:
        """A tensor in its own type, which may be a view of the mapped file; see `check_part`.

        Raises:
            CheckpointError: missing, or a broken file.
        """
        self._require(name)
        # Opened anew for each tensor: pages of a mapped file count as our memory until it is closed.
        with opened(self._file_of[name]) as tensors:
            tensor: Tensor = tensors.get_tensor(self._stored_name(name))
        return tensor

    def _stored_name(self, name: str) -> str:
        """See `TensorSource`."""
        return self._stored_as.get(name, name)

    def kinds(self) -> list[StoredKind]:
        """The types in which the tensors are stored."""
        tensors = [(stored, stored_bytes(shape, stored)) for shape, stored in self._about.values()]
        return stored_kinds(tensors, lambda stored: "as stored" if stored in _STORED else "not as weights")

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """See `TensorSource`."""
        self.dtype(name)
        if self.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} in {self._file_of[name]} has shape {list(self.shape(name))}; config.json "
                f"asks for {list(shape)}"
            )

    def _require(self, name: str) -> None:
        if name == HEAD and self._is_base and name not in self._file_of:
            raise CheckpointError(
                f"tensor {HEAD} is missing in {self.folder}, where only the base model is (transformers' AutoModel): "
                "save the model as AutoModelForCausalLM"
            )
        if name not in self._file_of:
            raise CheckpointError(
                f"tensor {name} is missing in {self.folder}: the checkpoint is incomplete or of another architecture"
            )


@contextmanager
def opened(file: Path) -> Iterator[Any]:
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
        remedy = (
            "convert it to safetensors (model.save_pretrained(folder) in transformers; of a head, "
            f"safetensors.torch.save_file(torch.load({pickles[0]!r}, weights_only=True), {WEIGHTS!r})), or take a "
            "revision that has them"
        )
        raise CheckpointError(f"{folder} has its weights only as pickle ({pickles[0]}), which is never read: {remedy}")


def hf_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a checkpoint, in turn: a caller may stop at the first that is missing."""
    hidden = config.hidden_size
    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        yield from layer_tensors(config, layer)
    yield "model.norm.weight", (hidden,)
    if config.norm.has_bias:
        yield "model.norm.bias", (hidden,)
    if not config.tie_embeddings:
        yield HEAD, (config.vocab_size, hidden)
