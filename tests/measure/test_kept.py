"""The file that keeps measurements: it resumes, and refuses another run's file by the field that differs."""

from __future__ import annotations

import errno
import io
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from foretoken.errors import InputError, StorageError
from foretoken.measure.kept import FORMAT, KeptFile, digest, run_of


@dataclass(frozen=True)
class Options:
    max_tokens: int = 4
    slices: tuple[str, ...] = ("code",)
    out: Path | None = None
    warmup: int = 1


def opened(path: Path, kind: str = "bench test", **values: object) -> KeptFile:
    return KeptFile(path, kind, run_of(Options(**values), ("warmup",), model="m"))


def test_a_run_resumes_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.jsonl"
    first = opened(path)
    first.append({"answer": 1})
    assert first.lines == [{"answer": 1}]
    first.close()
    with path.open("a") as file:
        file.write('{"answer": 2')  # cut off by the end of the process
    again = opened(path, out=tmp_path, warmup=9)  # no measurement depends on these
    assert again.restored(lambda line: line["answer"]) == [1]
    again.append({"answer": 3})
    again.close()
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head == {"format": FORMAT, "kind": "bench test", "run": {"max_tokens": 4, "slices": ["code"], "model": "m"}}
    assert lines == [{"answer": 1}, {"answer": 3}]


def test_two_runs_do_not_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    first = opened(path)
    first.append({"answer": 1})
    held = path.read_bytes()
    with pytest.raises(StorageError, match=r"^resume: another run adds to .*kept\.jsonl now; .* name another file"):
        opened(path)
    assert path.read_bytes() == held
    first.close()
    opened(path).close()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    """Closing such a file fails as well, which must not take the error's place."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        close = flush

    kept = opened(tmp_path / "kept.jsonl")
    kept.close()
    kept._file = Full()
    with pytest.raises(StorageError, match=r"cannot keep the measurements in .*kept\.jsonl: .*No space"), closing(kept):
        kept.append({"answer": 1})


def test_a_value_is_measured_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "kept.jsonl", list[str]()

    def measured() -> tuple[int, ...]:
        calls.append("")
        return (1, 2)

    for _ in range(2):
        with closing(opened(path)) as kept:
            assert kept.once("a name", tuple, measured) == (1, 2)
    assert len(calls) == 1
    with closing(opened(path)) as kept, pytest.raises(StorageError, match="does not hold the measurements"):
        kept.once("a name", lambda value: value["x"], measured)
    with closing(KeptFile(None, "bench test", {})) as kept:
        assert kept.once("a name", tuple, measured) == (1, 2)


def test_without_a_file_nothing_is_kept() -> None:
    kept = KeptFile(None, "bench test", {})
    kept.append({"answer": 1})
    assert kept.restored(lambda line: line) == kept.lines == []
    kept.close()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"max_tokens": 5}, r"resume=.*kept.*max_tokens=4, this run has 5"),
        ({"slices": ("code", "chat")}, r"slices=\['code'\]"),
        ({"kind": "bench other"}, r"kind='bench test', this run has 'bench other'"),
    ],
)
def test_another_runs_file_is_refused_by_the_field_that_differs(
    tmp_path: Path, changed: dict[str, object], told: str
) -> None:
    opened(tmp_path / "kept.jsonl").close()
    with pytest.raises(InputError, match=told):
        opened(tmp_path / "kept.jsonl", **changed)


def test_files_that_drafters_read_must_hold_the_same(tmp_path: Path) -> None:
    corpus, kept = tmp_path / "corpus.txt", tmp_path / "kept.jsonl"
    corpus.write_text("one")

    def about() -> dict[str, object]:
        return run_of(Options(), files=(str(corpus), None, "packaged", "none"))

    for _ in range(2):
        KeptFile(kept, "bench test", about()).close()
    corpus.write_text("two")
    with pytest.raises(InputError, match=rf"was measured with content of {corpus}="):
        KeptFile(kept, "bench test", about())
    corpus.unlink()
    with pytest.raises(StorageError, match=rf"cannot read {corpus}"):
        about()


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    for content in (
        '{"rows": []}\n',
        "words\n",
        "3\n",
        '{"format": "foretoken.kept/0", "kind": "x", "run": {}}\n',
        '{"my": 1}',
        f'{{"format": "{FORMAT}", "kind": "bench test", "run": [1]}}\n',
        f'{{"format": "{FORMAT}", "kind": "bench test", "run": "x"}}\n',
        "[" * 200_000 + "\n",
    ):
        path.write_text(content)
        with pytest.raises(StorageError, match="does not hold the measurements"):
            opened(path)
        assert path.read_text() == content
    opened(path.with_name("cut.jsonl")).close()
    header = path.with_name("cut.jsonl").read_text()
    path.write_text(header[:30])  # cut off by the end of the process
    kept = opened(path)
    assert path.read_text() == header
    kept.append({"setting": "plain"})
    with pytest.raises(StorageError, match="does not hold the measurements"):
        kept.restored(lambda line: line["answer"])
    with pytest.raises(StorageError, match="cannot keep the measurements"):
        opened(path / "below.jsonl")


@pytest.mark.parametrize("line", ["[]", "3", "null", '{"answer": []}', '{"answer": 1}', '{"answer": "x"}'])
def test_a_line_of_other_values_is_refused_by_the_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "kept.jsonl"
    opened(path).close()
    with path.open("a") as file:
        file.write(line + "\n")
    kept = opened(path)
    with pytest.raises(StorageError, match=r"kept.jsonl does not hold the measurements.*name another file"):
        kept.restored(lambda line: line["answer"][0].items())


def test_contents_have_different_digests() -> None:
    assert digest([1, 2]) == digest((1, 2)) != digest([1, 3])
