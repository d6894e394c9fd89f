"""The header of a GGUF file: metadata and the table of tensors, checked before anything is allocated.

Layout (ggml's `docs/gguf.md`): magic, version, number of tensors, number of metadata pairs, the pairs, the table of
tensors, padding, data. All numbers are little-endian. Every count and length is compared with the bytes that are left
before it is used, so that reading takes no more memory than the header has bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from foretoken.errors import CheckpointError
from foretoken.model.fields import MAX_SIZE, Fields, shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class GgmlType:
    """A block of `block` numbers takes `num_bytes`."""

    name: str
    block: int
    num_bytes: int

    def bytes_of(self, count: int) -> int:
        """Bytes of `count` numbers, which are whole blocks."""
        return count // self.block * self.num_bytes


GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 counted in 32 bits and was replaced in the year GGUF appeared
_MAX_HEADER_BYTES = 1 << 28  # 128 k tokens with their merges take some 8 MB
_MAX_DIMENSIONS = 4  # ggml's own limit
_MAX_NAME_BYTES = 1 << 16  # of a metadata key (the format's limit) and of a tensor
_MIN_PAIR_BYTES, _MIN_TENSOR_BYTES = 13, 32
_DEFAULT_ALIGNMENT = 32
_TEXT, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True)
class MetadataArray:
    """An array of the metadata, left in the file: `count` items of value type `item` from byte `start` on."""

    item: int
    count: int
    start: int


Value: TypeAlias = int | float | bool | str | MetadataArray


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file `path`: `shape` with the rows first, `start` its first byte."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.kind.bytes_of(math.prod(self.shape))


@dataclass(frozen=True)
class Header:
    """What a file says about itself, or a model's first part about all of them."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def fields(self) -> Fields:
        """The metadata, each value read with its type and bounds."""
        return Fields(self.metadata, f"{self.path}: metadata")

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty if the key is absent.

        Raises:
            CheckpointError: another kind of value, or text that is not UTF-8.
        """
        array = self._array(key)
        if array is None:
            return []
        if array.item != _TEXT:
            raise self.fields.refusal(key, "a list of strings")
        with _opened(self.path) as cursor:
            cursor.position = array.start
            return [cursor.text(f"metadata {key!r}") for _ in range(array.count)]

    def numbers(self, key: str) -> npt.NDArray[np.generic] | None:
        """A list of numbers; None if the key is absent.

        Raises:
            CheckpointError: another kind of value.
        """
        import numpy as np  # late: the server's front, which reads names of models, does without

        array = self._array(key)
        if array is None:
            return None
        if array.item == _TEXT:
            raise self.fields.refusal(key, "a list of numbers")
        with _opened(self.path) as cursor:
            return np.frombuffer(cursor.view, _SCALARS[array.item], array.count, array.start).copy()

    def _array(self, key: str) -> MetadataArray | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, MetadataArray):
            raise self.fields.refusal(key, "a list")
        return value


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint is a GGUF file rather than a folder."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_part(path: Path) -> Header:
    """Read the header of one GGUF file and compare it with the file's size; `parts.read_header` reads a model's.

    Raises:
        CheckpointError: names the metadata key or the tensor that is wrong.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    return _read(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=64)  # target and draft, their parts, asked for configuration, weights and tokenizer
def _read(path: Path, num_bytes: int, _changed_ns: int) -> Header:
    with _opened(path) as cursor:
        version, num_tensors, num_pairs = cursor.take("<IQQ", "header")
        if version not in _VERSIONS:
            reversed_order = "; its bytes are in big-endian order" if version & 0xFFFF == 0 else ""
            raise CheckpointError(
                f"{path} is GGUF version {version}{reversed_order}: versions 2 and 3, little-endian, are read; "
                "convert the model again with a current llama.cpp"
            )
        cursor.check_count(num_pairs, _MIN_PAIR_BYTES, "the number of metadata pairs")
        cursor.check_count(num_tensors, _MIN_TENSOR_BYTES, "the number of tensors")
        metadata = _read_metadata(cursor, num_pairs)
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
        alignment = _alignment(metadata, path)
        first = -(-cursor.position // alignment) * alignment
    return Header(path, metadata, _check_places(entries, first, num_bytes, alignment, path))


class _Cursor:
    """A place in the mapped file; whatever would lie behind the end is refused first."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path, self.view, self.position = path, view, len(_MAGIC)
        self.end = min(len(view), _MAX_HEADER_BYTES)

    def take(self, layout: str, what: str) -> tuple[int, ...]:
        """Numbers laid out as `struct` says."""
        start = self.skip(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self.view, start)

    def text(self, what: str, max_bytes: int = _MAX_HEADER_BYTES) -> str:
        """A string: its length, then UTF-8."""
        (length,) = self.take("<Q", what)
        if length > max_bytes:
            raise CheckpointError(f"{self.path}: {what} claims a string of {length:,} bytes; the file cannot hold it")
        start = self.skip(length, what)
        try:
            return self.view[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 text ({error.reason})") from error

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a number of things that the rest of the header cannot hold."""
        if count * min_bytes > self.end - self.position:
            raise CheckpointError(
                f"{self.path}: {what} is {count:,}, and {self.end - self.position:,} bytes of header are left: "
                "the file is truncated or corrupt"
            )

    def skip(self, num_bytes: int, what: str) -> int:
        """Go on behind `num_bytes`; where they begin."""
        start = self.position
        if num_bytes > self.end - start:
            raise CheckpointError(
                f"{self.path}: {what} ends behind the last byte of the header: the file is truncated or corrupt"
            )
        self.position = start + num_bytes
        return start


@contextmanager
def _opened(path: Path) -> Iterator[_Cursor]:
    """The file behind its magic."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(
                    f"{path} does not begin with GGUF: it is no GGUF file, or was not downloaded whole"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                yield _Cursor(path, view)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.text(f"the key of metadata pair {index}", _MAX_NAME_BYTES)
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata {shown(key)} is there twice")
        what = f"metadata {shown(key)}"
        (kind,) = cursor.take("<I", what)
        metadata[key] = _read_array(cursor, what) if kind == _ARRAY else _read_value(cursor, kind, what)
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str) -> Value:
    if kind == _TEXT:
        return cursor.text(what)
    if kind not in _SCALARS:
        raise CheckpointError(f"{cursor.path}: {what} has value type {kind}, which GGUF does not have")
    return cursor.take(_SCALARS[kind], what)[0]


def _read_array(cursor: _Cursor, what: str) -> MetadataArray:
    kind, count = cursor.take("<IQ", what)
    array = MetadataArray(kind, count, cursor.position)
    if kind in _SCALARS:
        cursor.check_count(count, struct.calcsize(_SCALARS[kind]), f"the length of {what}")
        cursor.skip(count * struct.calcsize(_SCALARS[kind]), what)
    elif kind == _TEXT:
        cursor.check_count(count, 8, f"the length of {what}")
        for _ in range(count):
            (length,) = cursor.take("<Q", what)
            cursor.skip(length, what)
    else:
        raise CheckpointError(f"{cursor.path}: {what} is a list of value type {kind}, which is not read here")
    return array


def _read_entry(cursor: _Cursor) -> TensorInfo:
    """One line of the table; `start` still counts from the beginning of the data."""
    name = cursor.text("the name of a tensor", _MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"
    (dimensions,) = cursor.take("<I", what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: {what} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
    shape = tuple(reversed(cursor.take(f"<{dimensions}Q", what)))
    if not all(1 <= size <= MAX_SIZE for size in shape):
        raise CheckpointError(f"{cursor.path}: {what} has shape {list(shape)}; sizes are 1 to {MAX_SIZE:,}")
    number, offset = cursor.take("<IQ", what)
    kind = GGML_TYPES.get(number)
    if kind is None:
        raise CheckpointError(f"{cursor.path}: {what} is of type {number}, which is unknown here")
    if shape[-1] % kind.block:
        raise CheckpointError(
            f"{cursor.path}: {what} has rows of {shape[-1]:,} numbers, not a multiple of {kind.name}'s block of "
            f"{kind.block}"
        )
    return TensorInfo(cursor.path, name, shape, kind, offset)


def _alignment(metadata: Mapping[str, Value], path: Path) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise CheckpointError(f"{path}: metadata: general.alignment={shown(value)} must be a power of two")
    return value


def _check_places(
    entries: list[TensorInfo], first: int, num_bytes: int, alignment: int, path: Path
) -> dict[str, TensorInfo]:
    """The tensors by name, none behind the end of the file and none over another."""
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        info = replace(entry, start=first + entry.start)
        if entry.name in tensors:
            raise CheckpointError(f"{path}: tensor {shown(entry.name)} is there twice")
        if entry.start % alignment:
            raise CheckpointError(
                f"{path}: tensor {shown(entry.name)} begins at {entry.start:,}, not at a multiple of {alignment}"
            )
        if info.start + info.num_bytes > num_bytes:
            raise CheckpointError(
                f"{path}: tensor {shown(entry.name)} ({info.kind.name} {list(info.shape)}) ends at byte "
                f"{info.start + info.num_bytes:,} of {num_bytes:,}: the file is truncated or corrupt"
            )
        tensors[entry.name] = info
    ordered = sorted(tensors.values(), key=lambda info: info.start)
    for before, after in pairwise(ordered):
        if before.start + before.num_bytes > after.start:
            raise CheckpointError(f"{path}: tensor {shown(after.name)} lies over {shown(before.name)}")
    return tensors
