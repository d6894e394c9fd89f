"""Files that users name: bounded, UTF-8, JSON without NaN; and places tried before long work."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from foretoken import LLM, InputError, SamplingParams, SpecConfig, StorageError
from foretoken.engine.startup.profiling import load_profile
from foretoken.files import (
    as_plain,
    check_file,
    check_folder,
    check_readable,
    parse_json,
    read_json,
    read_text,
    replace_text,
    to_json,
)
from foretoken.measure.prompts import read_prompts
from foretoken.simulate.inputs import chances_from_bench, parse_trace

PROFILE = {"format": "foretoken-profile-1", "rows": [[1, 0.01], [8, 0.02]]}
ONE_JOB = '{"prompt_tokens": 1, "output_tokens": 1}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", r"field: cannot read .*x: line 1 is not UTF-8 \(byte 0xff\)"),
        (b"one\ntwo\xe9 three\n", r"line 2 is not UTF-8 \(byte 0xe9\)"),
        (b"a" * 101, "longer than"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str) -> None:
    monkeypatch.setattr("foretoken.files.MAX_BYTES", 100)
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(StorageError, match=message):
        read_text("field", tmp_path / "x")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert read_json("field", tmp_path / "x") == {"prompt": "a"}
    assert [prompt.text for prompt in read_prompts(tmp_path / "x")] == ["a"]


def test_a_replaced_file_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    replace_text("out", tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "old").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_text("out", tmp_path / "pipe", "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old", "pipe"]


def test_two_threads_may_replace_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is that of the one who was last, whole; neither takes the other's unfinished one for its own."""
    path, replace = tmp_path / "profile.json", Path.replace

    def overtaken(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        other = threading.Thread(target=replace_text, args=("out", path, "other"))
        other.start()
        other.join()
        assert path.read_text() == "other"
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", overtaken)
    replace_text("out", path, "mine")
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_hold_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.files.MAX_BYTES", 1 << 20)
    for path in (tmp_path, tmp_path / "nowhere", Path("a\0b"), Path("/dev/zero")):
        with pytest.raises(StorageError, match="field: cannot read"):
            read_text("field", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NaN", "NaN is not a number of JSON"),
        ('{"a": -Infinity}', "-Infinity is not a number of JSON"),
        ("[1e999]", "1e999 is too large"),
        ("9" * 5000, "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('"\\ud800"', "cannot be encoded"),
        ('{"\\udfff": 1}', "cannot be encoded"),
        ("{", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_w11_json_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_json("field", "file:3", text)
    assert str(caught.value).startswith("field='file:3'")
    assert parse_json("field", "", '{"\\ud83d\\ude00": [1e3, null]}') == {"\U0001f600": [1000.0, None]}


def test_w11_json_that_is_written_has_no_nan() -> None:
    nan, inf = float("nan"), float("inf")
    value = {"a": [1.5, nan, (inf, -inf)], "b": {"c": nan, "p": Path("x")}, "d": True}
    assert json.loads(to_json(value)) == {"a": [1.5, None, [None, None]], "b": {"c": None, "p": "x"}, "d": True}
    assert as_plain({"x": (nan, 2.0)}) == {"x": [None, 2.0]}


def test_places_are_tried_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_file("out", tmp_path / "new")
    check_file("out", tmp_path / "file")
    assert not (tmp_path / "new").exists()
    for path in (tmp_path, tmp_path / "nowhere" / "x", tmp_path / "file" / "x", Path("a\0b")):
        with pytest.raises(StorageError, match="out: cannot write"):
            check_file("out", path)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(StorageError, match=f"{nowhere / 'x'}: {nowhere} is not there; make it first"):
        check_file("out", nowhere / "x")
    with pytest.raises(StorageError, match=f"{tmp_path / 'file'} is a file; name another folder"):
        check_file("out", tmp_path / "file" / "x")
    check_folder(tmp_path / "made" / "here")
    with pytest.raises(StorageError, match="cannot write to"):
        check_folder(tmp_path / "file")
    check_readable("corpus", tmp_path / "file")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StorageError, match="corpus: cannot read"):
            check_readable("corpus", path)


def test_the_name_of_a_file_that_was_only_tried_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "tmp123"))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(StorageError, match=f"out: cannot write {tmp_path / 'x'}: Permission denied$"):
        check_file("out", tmp_path / "x")
    with pytest.raises(StorageError, match=f"cannot write to {tmp_path}: Permission denied$"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [[1, float("nan")]]},
        {"rows": [[1, "0.1"]]},
        {"rows": [[1.5, 0.1]]},
        {"rows": [[True, 0.1]]},
        {"rows": [[1, -0.1]]},
        {"rows": [[1, 1e300]]},
        {"rows": [[10**400, 0.1]]},
        {"rows": [[1, 10**400]]},
        {"rows": [[1]]},
        {"rows": [1]},
        {"rows": 5},
        {"rows": {"points": {"a": 1}}},
        {"rows": [[2, 0.1], [1, 0.1]]},
        {"rows": []},
        {"drafters": []},
        {"drafters": {"x": 5}},
        {"drafters": {"x": {"guesses": "no"}}},
        {"caveats": "text"},
        {"target": 5},
        {"roofline": {"step_bytes": "1"}},
        {
            "roofline": {
                "step_bytes": 1,
                "row_flops": 1,
                "kv_bytes_per_token": 1,
                "bytes_per_s": float("inf"),
                "flops_per_s": 1,
            }
        },
        {"roofline": [1]},
        {"format": 7},
    ],
    ids=str,
)
def test_w11_a_malformed_profile_is_refused_by_part_and_file(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PROFILE | change))
    with pytest.raises((InputError, StorageError), match=r"profile.*p\.json"):
        load_profile(path)


def test_a_deep_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[" * 100_000)
    with pytest.raises(StorageError, match="nested too deeply"):
        read_json("profile", tmp_path / "p.json")


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_tokens": 1e400, "output_tokens": 1}',
        '{"prompt_tokens": 99999999999999999999, "output_tokens": 1}',
        '{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": 1e300}',
        '{"prompt_tokens": 1, "output_tokens": 1, "acceptance": [NaN]}',
        '{"prompt_tokens": 1, "output_tokens": 1, "acceptance": []}',
        "[" * 100_000,
        "x" * 1_000_000,
        "7",
    ],
    ids=lambda line: line[:60],
)
def test_a_malformed_trace_is_refused_by_line(line: str) -> None:
    with pytest.raises(InputError, match="trace line 2") as caught:
        parse_trace([ONE_JOB, line], "code")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "row",
    [
        5,
        {"drafter": 5, "slice": "s", "acceptance_per_position": [0.5]},
        {"drafter": "d", "acceptance_per_position": [0.5]},
    ],
)
def test_a_malformed_bench_result_is_refused(row: object) -> None:
    with pytest.raises(InputError, match="bench row 1"):
        chances_from_bench({"rows": [row]})
    for share in (-1, 2, "x", None):
        with pytest.raises(InputError, match="acceptance_per_position"):
            chances_from_bench({"rows": [{"drafter": "d", "slice": "s", "acceptance_per_position": [share]}]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": 5}', '"prompt" must be a text'),
        ('{"prompt": "x", "slice": ["a"]}', '"slice" must be a text'),
        ('{"prompt": "x", "name": 5}', '"name" must be a text'),
        ('{"prompt": NaN}', "NaN is not a number of JSON"),
        ('{"prompt": "\\ud800"}', "cannot be encoded"),
        ("[" * 100_000, "nested too deeply"),
        ("x" * 1_000_000, "not JSON"),
        ("5", "must be an object"),
    ],
    ids=lambda line: line[:60],
)
def test_a_malformed_file_of_prompts_is_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(InputError, match=r"p\.jsonl:2'.*") as caught:
        read_prompts(tmp_path / "p.jsonl")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


BAD = "a\udcffb"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SamplingParams(stop=BAD), "stop"),
        (lambda: SamplingParams(stop=["x", BAD]), "stop"),
        (lambda: SamplingParams(bad_words=[BAD]), "bad_words"),
        (lambda: SamplingParams(regex=BAD), "regex"),
        (lambda: SamplingParams(grammar=BAD), "grammar"),
        (lambda: SamplingParams(json_schema=BAD), "json_schema"),
        (lambda: SamplingParams(prediction=BAD), "prediction"),
        (lambda: SpecConfig("suffix", corpus=BAD), "corpus"),
        (lambda: SpecConfig("draft_model", draft=BAD), "draft"),
        (lambda: SamplingParams(tenant=BAD), "tenant"),
        (lambda: SamplingParams(slice=BAD), "slice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_c2_a_text_that_is_not_utf8_is_refused_by_name(make: object, field: str) -> None:
    with pytest.raises(InputError, match=f"{field}=.*character 2 is half of a surrogate pair") as caught:
        make()  # type: ignore[operator]
    assert caught.value.field == field


def test_c2_a_prompt_that_is_not_utf8_is_refused(text_pair: object) -> None:
    with LLM(text_pair.target, cache_tokens=256) as llm:  # type: ignore[attr-defined]
        for prompts in (BAD, [BAD], ["good", BAD]):
            with pytest.raises(InputError, match=r"prompt=.*half of a surrogate pair"):
                llm.generate(prompts, SamplingParams(max_tokens=2))
        with pytest.raises(InputError, match=r"text=.*half of a surrogate pair"):
            llm.tokenizer.encode(BAD)  # type: ignore[union-attr]
        assert llm.generate(["good"], SamplingParams(max_tokens=2))[0].error is None
