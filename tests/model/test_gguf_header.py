"""GGUF headers written by somebody else: whatever is in them, they are refused by name before anything is allocated."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from foretoken.cli.app import run
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.gguf.header import is_gguf
from foretoken.model.gguf.parts import read_header
from foretoken.model.open import open_model
from tests.helpers.broken_gguf import GOOD, make_bases, try_case

# The largest claim below is 2 ** 64 bytes; reading a header of some hundred must not take more than this.
MAX_BYTES = 1 << 20


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(item: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + items


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def gguf_file(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 256,
    magic: bytes = b"GGUF",
) -> bytes:
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs)))) + b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % 32) + bytes(data)


ARCH = pair("general.architecture", 8, text("llama"))

MALFORMED = {
    "empty": (b"", "does not begin with GGUF"),
    "cut in the counts": (b"GGUF\x03\0\0\0\x01", "header ends behind"),
    "magic": (gguf_file(magic=b"GGML"), "does not begin with GGUF"),
    "version": (gguf_file(version=1), "version 1"),
    "big-endian": (gguf_file(version=3 << 24), "big-endian"),
    "tensors that are not there": (gguf_file(counts=(2**63, 0)), "number of tensors is 9,223,372"),
    "pairs that are not there": (gguf_file(counts=(0, 2**64 - 1)), "number of metadata pairs is 18,446"),
    "key": (gguf_file((struct.pack("<Q", 2**63) + bytes(40),)), "key of metadata pair 0"),
    "key of another encoding": (gguf_file((pair("a\0", 4, bytes(4)).replace(b"a\0", b"\xff\xff"),)), "not UTF-8"),
    "string": (gguf_file((pair("general.name", 8, struct.pack("<Q", 2**40)),)), "'general.name' claims a string"),
    "string behind the end": (gguf_file((pair("general.name", 8, struct.pack("<Q", 2**20)),)), "'general.name' ends"),
    "value type": (gguf_file((pair("a.b", 13, bytes(8)),)), "'a.b' has value type 13"),
    "array": (gguf_file((pair("a.b", 9, array(4, 2**62)),)), "length of metadata 'a.b' is 4,611"),
    "array of strings": (gguf_file((pair("a.b", 9, array(8, 2**61)),)), "length of metadata 'a.b' is 2,305"),
    "array of arrays": (gguf_file((pair("a.b", 9, array(9, 1)),)), "'a.b' is a list of value type 9"),
    "key twice": (gguf_file((ARCH, ARCH)), "'general.architecture' is there twice"),
    "alignment": (gguf_file((pair("general.alignment", 4, struct.pack("<I", 24)),)), "general.alignment=24"),
    "dimensions": (gguf_file(tensors=(tensor("t", (1,) * 5),)), "tensor 't' has 5 dimensions"),
    "no dimension": (gguf_file(tensors=(tensor("t", ()),)), "tensor 't' has 0 dimensions"),
    "size": (gguf_file(tensors=(tensor("t", (2**63, 1)),)), "tensor 't' has shape [1, 9223372"),
    "size 0": (gguf_file(tensors=(tensor("t", (4, 0)),)), "tensor 't' has shape [0, 4]"),
    "sizes with a product beyond 64 bits": (gguf_file(tensors=(tensor("t", (2**30,) * 4),)), "tensor 't'"),
    "type": (gguf_file(tensors=(tensor("t", (4,), 99),)), "tensor 't' is of type 99"),
    "removed type": (gguf_file(tensors=(tensor("t", (32,), 4),)), "tensor 't' is of type 4"),
    "no whole block": (gguf_file(tensors=(tensor("t", (33,), 8),)), "Q8_0's block of 32"),
    "behind the end": (gguf_file(tensors=(tensor("t", (64,), start=32),)), "tensor 't' (F32 [64]) ends at byte"),
    "far behind the end": (gguf_file(tensors=(tensor("t", (4,), start=2**64 - 32),)), "tensor 't'"),
    "not aligned": (gguf_file(tensors=(tensor("t", (4,), start=5),)), "tensor 't' begins at 5"),
    "name twice": (gguf_file(tensors=(tensor("t", (4,)), tensor("t", (4,), start=32))), "tensor 't' is there twice"),
    "over another": (gguf_file(tensors=(tensor("t", (16,)), tensor("u", (4,), start=32))), "tensor 'u' lies over 't'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    raw, words = MALFORMED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    pairs = (
        *(ARCH, pair("a.numbers", 9, array(5, 3, struct.pack("<3i", -1, 2, 3)))),
        *(pair("a.words", 9, array(8, 2, text("x") + text("猫"))), pair("a.flag", 7, b"\1")),
    )
    path.write_bytes(gguf_file(pairs, (tensor("t", (8, 2)), tensor("u", (32, 2), 8, 64)), data=132))
    header = read_header(path)
    assert header.texts("a.words") == ["x", "猫"]
    assert header.texts("a.none") == []
    numbers = header.numbers("a.numbers")
    assert numbers is not None
    assert numbers.tolist() == [-1, 2, 3]
    assert header.numbers("a.none") is None
    assert header.metadata["a.flag"] is True
    assert (header.tensors["t"].shape, header.tensors["u"].num_bytes) == ((2, 8), 68)
    for wrong in (lambda: header.texts("a.numbers"), lambda: header.numbers("a.words"), lambda: header.texts("a.flag")):
        with pytest.raises(CheckpointError, match=r"metadata: a\."):
            wrong()


def test_what_is_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "model.GGUF").write_bytes(b"")
    assert is_gguf(tmp_path / "model.GGUF")
    assert not is_gguf(tmp_path / "folder.gguf")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file((ARCH,)))
    assert not read_header(path).tensors
    path.write_bytes(gguf_file((ARCH,), (tensor("t", (4,)),)))
    assert list(read_header(path).tensors) == ["t"]


def test_the_command_line_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(MALFORMED["size"][0])
    assert run(["generate", "--target", str(path), "--prompt", "x"]) == 3
    assert "tensor 't'" in capsys.readouterr().err


def test_broken_files(tmp_path: Path) -> None:
    """Some of the files that the proof tries by the thousand."""
    make_bases(tmp_path)
    counts: Counter[str] = Counter()
    start = random.Random(7).randrange(10**6)
    for seed in range(start, start + 60):
        outcome, what = try_case(tmp_path, tmp_path, seed)
        assert outcome in GOOD, what
        counts[outcome] += 1
    assert counts["refused"] > 20
    assert counts["ran"] > 3


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    """Its architecture is that of the model it belongs to, without the sizes of one."""
    path = tmp_path / "adapter.gguf"
    path.write_bytes(gguf_file((ARCH, pair("general.type", 8, text("adapter")))))
    with pytest.raises(UnsupportedModelError, match=r"holds an adapter .*llama-export-lora"):
        open_model(path)
