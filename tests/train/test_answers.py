"""Answers to the user's own prompts: which prompts are read, what an interruption keeps, files longer than a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foretoken.config import SpecConfig
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.files import read_text, to_json
from foretoken.heads.formats.pairing import are_other_weights, weights_digest
from foretoken.train import answers
from foretoken.train.answers import AnswerConfig, folder_fingerprint, placed_prompts, read_answers, write_answers
from tests.helpers.checkpoints import tiny_checkpoint

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15]]
CONFIG = AnswerConfig(max_tokens=4, batch_size=2)
ASKED = {"role": "user", "content": "Weather?"}
ANSWERED = {"role": "assistant", "content": "Rain."}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")
    with LLM(folder, SpecConfig(), cache_tokens=512, max_batch_size=2, profile="off") as found:
        yield found


def written(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return path


def test_prompts_are_read_as_by_other_measurements(tmp_path: Path) -> None:
    """A last answer is not sent, parts are joined, and only a line feed ends a line."""
    parts = [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]
    path = written(
        tmp_path / "p.jsonl",
        {"messages": [ASKED, ANSWERED]},
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "a\u2028b\u0085c"},
    )
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    prompts = [(ASKED,), (ASKED,), "a\u2028b\u0085c"]
    assert placed_prompts(path) == [(f"{path}:{number}", prompt) for number, prompt in enumerate(prompts, start=1)]


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"messages": [ANSWERED]}, "an answer alone"),
        ({"messages": [ASKED], "tools": [{"type": "function"}]}, '"tools": tools and tool calls are not replayed'),
    ],
)
def test_conversations_that_cannot_be_answered_are_named(item: object, named: str, tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "good"}, item)
    with pytest.raises(InputError, match=rf"p\.jsonl:2.*{named}"):
        placed_prompts(path)


def test_calls_that_the_template_lays_out_stay(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "22 C"}
    path = written(tmp_path / "p.jsonl", {"messages": [ASKED, called, result], "tools": []})
    assert [prompt for _, prompt in placed_prompts(path)] == [(ASKED, called, result)]


@pytest.mark.parametrize(
    ("prompt", "named"), [([3] * 300, "has 300 tokens; the context holds 256"), ([10**6], "whole numbers from 0")]
)
def test_a_prompt_that_cannot_be_answered_is_named_before_the_first_answer(
    prompt: list[int], named: str, llm: LLM, tmp_path: Path
) -> None:
    sources = [f"p.jsonl:{number}" for number in range(1, 6)]
    with pytest.raises(InputError, match=rf"p\.jsonl:5.*{named}"):
        write_answers(llm, [*PROMPTS, prompt], tmp_path / "a.jsonl", CONFIG, lambda _: None, sources)
    with pytest.raises(InputError, match="prompt 5"):
        write_answers(llm, [*PROMPTS, prompt], tmp_path / "a.jsonl", CONFIG, lambda _: None)
    assert not (tmp_path / "a.jsonl").exists()


def test_an_interruption_keeps_every_answer_that_has_ended(llm: LLM, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    write_answers(llm, PROMPTS, whole, CONFIG, lambda _: None)

    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(llm, PROMPTS, part, CONFIG, stop)
    assert len(part.read_text().splitlines()) == 1 + 2
    assert not llm.engine.has_work
    told: list[int] = []
    count = write_answers(llm, PROMPTS, part, CONFIG, told.append)
    assert told == [2, 3, 4, 4]
    assert (count.num_prompts, count.num_answers, count.num_tokens) == (4, 4, 16)
    assert read_answers(part) == read_answers(whole)


def test_two_runs_do_not_add_to_one_file(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    refused = []

    def tell(_: int) -> None:
        if not refused:
            with pytest.raises(StorageError, match=r"^out: another run adds to .*a\.jsonl now") as error:
                write_answers(llm, PROMPTS, path, CONFIG, lambda _: None)
            refused.append(error)

    assert write_answers(llm, PROMPTS, path, CONFIG, tell).num_answers == len(PROMPTS)
    assert refused
    assert len(read_answers(path).pairs) == len(PROMPTS)


def test_an_answer_that_fails_is_named_and_those_before_it_are_kept(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.step

    def failing() -> object:
        found = step()
        for state in list(llm.engine.states.values()):
            if state.request.prompt_ids == (10, 11, 12, 13) and state.has_emitted:
                llm.engine.fail(state, RuntimeError("broken"))
        return found

    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(llm, "step", failing)
    with pytest.raises(RuntimeError, match="broken") as caught:
        write_answers(llm, PROMPTS, path, CONFIG, lambda _: None)
    assert caught.value.__notes__ == ["prompt 3"]
    assert [list(prompt) for prompt, _ in read_answers(path).pairs] == PROMPTS[:2]
    monkeypatch.undo()
    assert not llm.engine.has_work


def test_answers_are_ordered_by_their_prompts(llm: LLM, tmp_path: Path) -> None:
    """Which answers are held out must not depend on which ended first."""
    path = tmp_path / "a.jsonl"
    write_answers(llm, PROMPTS, path, CONFIG, lambda _: None)
    header, *rows = path.read_text().splitlines(keepends=True)
    path.write_text(header + "".join(reversed(rows)))
    assert [list(prompt) for prompt, _ in read_answers(path).pairs] == PROMPTS


def test_a_file_longer_than_a_text_may_be_is_read_and_continued(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    write_answers(llm, PROMPTS, path, CONFIG, lambda _: None)
    lines, whole = path.read_text().splitlines(keepends=True), read_answers(path)
    longest = max(map(len, lines))
    for name in ("foretoken.files.MAX_BYTES", "foretoken.train.answers.MAX_BYTES"):
        monkeypatch.setattr(name, longest)
    with pytest.raises(StorageError, match="longer than"):
        read_text("answers", path)
    path.write_text("".join(lines[:-1]) + lines[-1][:-9])
    write_answers(llm, PROMPTS, path, CONFIG, lambda _: None)
    assert read_answers(path) == whole
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]
    monkeypatch.setattr(answers, "MAX_BYTES", longest - 1)
    with pytest.raises(StorageError, match=r"line \d is longer"):
        read_answers(path)


@pytest.mark.parametrize(
    ("line", "error", "named"),
    [
        (b"\xff\n", StorageError, "line 2 is not UTF-8"),
        (b"[1]\n", InputError, r"a\.jsonl:2"),
        (b'{"place": 0}\n', InputError, r"a\.jsonl:2.*prompt_ids"),
        (b'{"prompt_ids": [3], "answer_ids": [-1]}\n', InputError, r"a\.jsonl:2.*token ids, from 0 on"),
        (b'{"prompt_ids": [1.7], "answer_ids": [1]}\n', InputError, r"a\.jsonl:2.*token ids"),
        (b'{"prompt_ids": "12", "answer_ids": [1]}\n', InputError, r"a\.jsonl:2.*token ids"),
        (b"{\n", InputError, r"a\.jsonl:2.*not JSON"),
    ],
)
def test_a_line_that_is_no_answer_is_named(line: bytes, error: type[Exception], named: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes((to_json({"kind": answers.ANSWERS_KIND}) + "\n").encode() + line)
    with pytest.raises(error, match=named):
        read_answers(path)


def test_a_file_whose_rows_another_program_wrote_is_not_continued(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_answers(llm, PROMPTS, path, CONFIG, lambda _: None)
    before = path.read_text() + '{"prompt_ids": [1], "answer_ids": [2]}\n{"unfinished'
    path.write_text(before)
    with pytest.raises(InputError, match=r"a\.jsonl:6.*has no place"):
        write_answers(llm, PROMPTS, path, CONFIG, lambda _: None)
    assert path.read_text() == before


def test_a_file_whose_first_line_was_cut_is_begun_again(llm: LLM, tmp_path: Path) -> None:
    """A full disk leaves an empty file, a kill a part of the line; what is no part of it is another file."""
    whole = tmp_path / "whole.jsonl"
    write_answers(llm, PROMPTS, whole, CONFIG, lambda _done: None)
    for kept in (0, 20):
        path = tmp_path / f"{kept}.jsonl"
        path.write_bytes(whole.read_bytes()[:kept])
        write_answers(llm, PROMPTS, path, CONFIG, lambda _done: None)
        assert read_answers(path) == read_answers(whole)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="use that, or another file"):
        write_answers(llm, PROMPTS, tmp_path / "notes", CONFIG, lambda _done: None)
    assert (tmp_path / "notes").read_text() == "mine"


def test_answers_with_other_ends_are_not_added(tmp_path: Path) -> None:
    """The ends of generation_config.json belong to an answer as its temperature does, and not to the checkpoint."""
    folder, path = tiny_checkpoint(tmp_path / "target", "llama"), tmp_path / "a.jsonl"
    for end in (0, 5):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
        with LLM(folder, SpecConfig(), cache_tokens=512, profile="off") as llm:
            if end:
                with pytest.raises(ConfigError, match=r"were made with end_tokens=\[0\]; use that, or another file"):
                    write_answers(llm, PROMPTS, path, CONFIG, lambda _done: None)
            else:
                write_answers(llm, PROMPTS, path, CONFIG, lambda _done: None)
    header, *rows = path.read_text().splitlines(keepends=True)
    earlier = json.loads(header)
    del earlier["end_tokens"]
    path.write_text(json.dumps(earlier) + "\n" + "".join(rows))
    with LLM(folder, SpecConfig(), cache_tokens=512, profile="off") as llm:  # an earlier version did not write them
        assert write_answers(llm, PROMPTS, path, CONFIG, lambda _done: None).num_answers == len(PROMPTS)


@pytest.mark.parametrize("place", [100, 1_500_000, 2_940_000])
def test_a_target_whose_other_weights_changed_is_another(place: int, tmp_path: Path) -> None:
    """Training may leave the embedding as it is, which the file begins with."""
    (tmp_path / "config.json").write_text("{}")
    weights = np.zeros(3_000_000, dtype=np.uint8)
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    before = folder_fingerprint(tmp_path), weights_digest(tmp_path)
    weights[place : place + 60_000] += 1
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    after = folder_fingerprint(tmp_path), weights_digest(tmp_path)
    assert before[0] != after[0]
    assert are_other_weights(before[1], after[1])
    assert not are_other_weights(before[1], before[1])
    assert not are_other_weights("sha256:0", after[1])  # made by an earlier version


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "quant_config.json", "chat_template.jinja"])
def test_a_target_whose_settings_changed_is_another(name: str, tmp_path: Path) -> None:
    """Of packed matrices some are in a file of their own."""
    (tmp_path / "config.json").write_text("{}")
    found = [folder_fingerprint(tmp_path)]
    for content in ('{"bits": 4}', '{"bits": 8}'):
        (tmp_path / name).write_text(content)
        found.append(folder_fingerprint(tmp_path))
    assert len(set(found)) == 3
