"""A model in one GGUF file, or in several that `llama-gguf-split` wrote: `NAME-00001-of-00003.gguf` and so on.

The first part has all metadata, each part a table of its own tensors; `split.no` counts from 0.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from foretoken.errors import CheckpointError
from foretoken.model.fields import shown
from foretoken.model.gguf.header import Header, TensorInfo, read_part

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def read_header(path: Path) -> Header:
    """Read what a GGUF file says about its model; `path` is the file, or any part of a model in several.

    Raises:
        CheckpointError: names the metadata key or the tensor that is wrong, or the part that is missing.
    """
    own = read_part(path)
    count = _count(own)
    if count == 1:
        return own
    parts = [read_part(file) for file in _files(own, count)]
    tensors: dict[str, TensorInfo] = {}
    for index, part in enumerate(parts):
        if (part.fields.whole("split.no", least=0), _count(part)) != (index, count):
            raise CheckpointError(
                f"{part.path} says that it is part {part.metadata['split.no']} (from 0) of {_count(part)}, and its "
                f"name that it is part {index} of {count}: it was renamed, or belongs to another model"
            )
        for name, info in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"tensor {shown(name)} is in {tensors[name].path} and in {part.path}")
            tensors[name] = info
    expected = parts[0].fields.whole_or("split.tensors.count", len(tensors), least=0)
    if len(tensors) != expected:
        raise CheckpointError(
            f"{parts[0].path}: split.tensors.count={expected:,}, and the {count} parts hold {len(tensors):,} tensors: "
            "a part belongs to another model"
        )
    return replace(parts[0], tensors=tensors)


def part_files(path: Path) -> list[Path]:
    """The files of the model of which `path` is one, the first part first."""
    own = read_part(path)
    count = _count(own)
    return [path] if count == 1 else _files(own, count)


def _count(header: Header) -> int:
    return max(1, header.fields.whole_or("split.count", 1, least=0, most=2**16 - 1))


def _files(own: Header, count: int) -> list[Path]:
    found = _NAME.fullmatch(own.path.name)
    if found is None or int(found[3]) != count:
        raise CheckpointError(
            f"{own.path} is one of {count} parts, and its name does not end in -00001-of-{count:05}.gguf or another "
            "number: give all parts the names that they were written with"
        )
    files = [own.path.with_name(f"{found[1]}-{index:05}-of-{found[3]}{found[4]}") for index in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: {own.path} is one of {count} parts; put all into one folder")
    return files
