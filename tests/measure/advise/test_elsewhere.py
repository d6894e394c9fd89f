"""Advice on another engine: what lookups would have drafted of its answers, and what its steps take by rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foretoken
from foretoken.backend.answering import Answer
from foretoken.backend.http_stream import Stream
from foretoken.config import SamplingParams, SpecConfig
from foretoken.errors import ConfigError, ForetokenError, InputError
from foretoken.measure.advise import elsewhere
from foretoken.measure.advise.candidates import candidates_of
from foretoken.measure.advise.elsewhere import rows_to_measure, steady_step_s
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.advise.rounds import RoundRecorder, known_rounds
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.measure.endpoint import Fake, Reply, serving, tokens

WORDS = "def a(self): return the list "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere") / "target"
    return tiny_tokenizer(tiny_checkpoint(folder, "llama", vocab_size=300, num_hidden_layers=1), 300)


def counted(target: Path, body: dict[str, Any], *texts: str, **last: Any) -> Reply:
    """An answer that says how many tokens the prompt has."""
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    count = len(tokenizer.encode(body["prompt"]))
    return tokens(*texts, usage={"completion_tokens": 2 * len(texts), "prompt_tokens": count}, **last)


@pytest.fixture
def copying(target: Path) -> Iterator[Fake]:
    """It answers with the words of the prompt, a token or so at a time."""
    with serving(Fake(lambda _number, body: counted(target, body, *(WORDS * 2).split(" ")))) as found:
        yield found


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n} {WORDS * 3}", "slice": "code"}) for n in range(4)))
    return path


def step_of_rows(streams: Sequence[Stream]) -> float:
    """A machine on which a hundred rows take twice as long as none."""
    return 1.0 + len(streams) / 100


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_rounds_of_a_known_answer_are_those_of_the_run_that_gave_it(drafter: str, target: Path) -> None:
    """The twin is the engine itself over the model: greedy, and sampled by the coupled rule."""
    (candidate,) = candidates_of(AdviseOptions(str(target), drafts=(drafter,), num_drafts=(6,)))
    with foretoken.LLM(target, SpecConfig(drafter=None)) as llm:
        prompt_ids, recorder = llm.encode(WORDS * 4), RoundRecorder()
        llm.engine.watchers.append(recorder)
        for temperature in (0.0, 1.0):
            few = dict.fromkeys(prompt_ids[:3], 30.0)  # so that the answer repeats itself
            params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True, logit_bias=few)
            (output,) = llm.generate([prompt_ids], params, spec=candidate.spec)
            expected = recorder.answer("p", "code")
            assert any(one.path for one in expected.rounds)
            tokenizer = load_tokenizer(target)
            found, drafting_s = known_rounds(
                candidate, EvalPrompt("p", "code", "x"), prompt_ids, output.token_ids, tokenizer, target
            )
            assert found == expected
            assert drafting_s > 0
            llm.reset_drafters(candidate.spec)


def stream(*times: float, count: int = 1) -> Stream:
    return Stream(pieces=[(at, count) for at in times], error="")


def test_a_step_is_timed_while_all_answers_come() -> None:
    """Two streams with a piece of two tokens each second, the second of which begins at 3 and goes on alone from 8."""
    early, late = stream(*range(9), count=2), stream(*(at + 0.5 for at in range(3, 12)), count=2)
    assert steady_step_s([early, late]) == pytest.approx(4.5 * 2 / (5 * 2 + 4 * 2))
    assert steady_step_s([stream(*range(9))]) == 1.0
    merged = stream(*range(9), count=1)
    merged.num_tokens = 36  # four in a piece, by the end of the answer
    assert steady_step_s([merged]) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "streams",
    [
        [stream(0, 1, 2, 3, 4), stream(4, 5, 6, 7, 8)],
        [stream(0, 1, 2)],
        [stream(*range(9)), Stream(error="500")],
        [Stream(error="")],
    ],
    ids=["one after the other", "too short", "one failed", "no text"],
)
def test_a_step_that_was_not_seen_is_not_known(streams: list[Stream]) -> None:
    assert steady_step_s(streams) is None


def test_rows_reach_the_largest_step_and_hold_every_load() -> None:
    assert rows_to_measure((3, 4), 5) == [1, 2, 3, 4, 8, 16, 32]
    assert rows_to_measure((1,), 1) == [1, 2]


def test_a_server_whose_answers_copy_gets_yes(
    copying: Fake, target: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "steady_step_s", step_of_rows)
    report = foretoken.advise(str(target), url=copying.url, prompts=texts, concurrency=(1, 2), num_drafts=(1, 4))
    assert report.results["answer"] == "yes"
    costs = report.results["step_costs"]
    assert costs.target[2].seconds(4) == pytest.approx(1.0 + 2 * 5 / 100)
    assert costs.plain_s(2) == pytest.approx(1.02)
    assert dict(report.results["sources"])["a step with draft tokens"].startswith("taken to cost")
    assert report.results["memory"] == ()
    (row,) = [one for one in report.results["rows"] if (one.candidate, one.concurrency) == ("ngram", 1)]
    assert f"--nextn {row.num_draft} --nextn-accepted {row.emitted_per_step - 1:.3g}" in report.tables[-2].notes[0]
    assert len(copying.asked) == 4 + sum(rows_to_measure((1, 2), 4))


@pytest.mark.parametrize(
    ("owner", "judged", "lines"),
    [
        ("llamacpp", {"ngram"}, ["llama.cpp"]),
        ("vllm", {"ngram", "suffix"}, ["vLLM"]),
        ("tensorrt_llm", {"ngram", "suffix"}, ["TensorRT-LLM"]),
        ("fake", {"ngram"}, ["TGI"]),  # which names its model as the owner
        ("foretoken", {"ngram", "suffix"}, ["foretoken"]),
        ("someone", {"ngram", "suffix"}, ["foretoken", "vLLM", "SGLang", "llama.cpp", "TensorRT-LLM", "TGI"]),
    ],
)
def test_only_what_the_servers_engine_has_is_advised(
    owner: str,
    judged: set[str],
    lines: list[str],
    copying: Fake,
    target: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elsewhere, "steady_step_s", step_of_rows)
    copying.owner = owner
    report = foretoken.advise(str(target), url=copying.url, prompts=texts, concurrency=(1,), num_drafts=(1,))
    assert {one.candidate for one in report.results["rows"]} == judged
    assert {*report.results["failed"]} == {"ngram", "suffix"} - judged
    assert [one.engine for one in report.results["launch"]] == lines
    said = " ".join(report.caveats)
    assert ("suffix was left out" in said) == ("suffix" not in judged)
    assert ("does not say which engine" in said) == (owner == "someone")
    (table,) = [one for one in report.tables if one.title == "To start it"]
    assert ("foretoken.toml:" in table.notes) == ("foretoken" in lines)


def test_a_drafter_that_the_servers_engine_lacks_is_refused_where_it_alone_is_named(
    copying: Fake, target: Path, texts: Path
) -> None:
    copying.owner = "llamacpp"
    with pytest.raises(InputError, match=r"llama\.cpp has none; of lookups it has ngram") as error:
        foretoken.advise(str(target), url=copying.url, prompts=texts, drafts=("suffix",))
    assert error.value.field == "drafts"


def test_answers_that_end_at_once_tell_nothing(target: Path, texts: Path) -> None:
    fake = Fake(lambda _number, body: counted(target, body, "a"))
    with serving(fake), pytest.raises(InputError, match="end with their first token"):
        foretoken.advise(str(target), url=fake.url, prompts=texts, concurrency=(1,))


def test_loads_that_the_server_does_not_take_are_said(
    copying: Fake, target: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "steady_step_s", lambda streams: None if len(streams) > 2 else 1.0)
    report = foretoken.advise(str(target), url=copying.url, prompts=texts, concurrency=(1,), num_drafts=(1, 6))
    assert any(one.startswith("Steps of more than 2 rows were not measured") for one in report.caveats)
    monkeypatch.setattr(elsewhere, "steady_step_s", lambda _streams: None)
    with pytest.raises(ForetokenError, match="no step could be timed"):
        foretoken.advise(str(target), url=copying.url, prompts=texts)


def test_a_server_that_drafts_already_is_refused(target: Path, texts: Path) -> None:
    def drafting(_number: int, _body: dict[str, Any]) -> Reply:
        return tokens("a", "b", timings={"draft_n": 4, "draft_n_accepted": 2})

    with serving(Fake(drafting)) as fake, pytest.raises(InputError, match="start it without speculation"):
        foretoken.advise(str(target), url=fake.url, prompts=texts)


def test_our_server_is_timed_as_plainly_as_it_is_asked(
    copying: Fake, target: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts unless a request asks it not to: then its steps would be those of drafts, too."""
    monkeypatch.setattr(elsewhere, "steady_step_s", step_of_rows)
    copying.owner = "foretoken"
    foretoken.advise(str(target), url=copying.url, prompts=texts, concurrency=(2,), num_drafts=(1,))
    assert [body["spec"] for _, _, body in copying.asked] == [{"drafter": None}] * (4 + 1 + 2 + 4)


def test_a_target_whose_tokenizer_is_not_the_servers_is_refused(target: Path, texts: Path) -> None:
    """It counts characters where the target counts tokens."""
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    longer = [{**line, "prompt": line["prompt"] * (1 + number)} for number, line in enumerate(lines)]
    texts.write_text("\n".join(map(json.dumps, longer)))

    def characters(_number: int, body: dict[str, Any]) -> Reply:
        return tokens("a", usage={"completion_tokens": 2, "prompt_tokens": len(body["prompt"])})

    with serving(Fake(characters)) as fake, pytest.raises(InputError, match="name the model that it serves") as error:
        foretoken.advise(str(target), url=fake.url, prompts=texts)
    assert error.value.field == "target"


@pytest.mark.parametrize("ids", [[5], [100_000]], ids=["another text", "beyond the vocabulary"])
def test_a_target_that_reads_the_servers_tokens_as_other_texts_is_refused(
    ids: list[int], target: Path, texts: Path
) -> None:
    """Its prompts have as many tokens."""

    def listed(_number: int, body: dict[str, Any]) -> Reply:
        reply = counted(target, body, "def", "return")
        events = [
            event | {"choices": [choice | {"token_ids": ids} for choice in event["choices"]]} for event in reply.events
        ]
        return Reply(tuple(events))

    with serving(Fake(listed)) as fake, pytest.raises(InputError, match="of 4 answers as other texts") as error:
        foretoken.advise(str(target), url=fake.url, prompts=texts)
    assert error.value.field == "target"


def test_calls_of_tools_are_not_sent_as_texts(target: Path, texts: Path) -> None:
    """The tokens of the template would hold them, and the server's would not."""
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "c"}]
    texts.write_text(json.dumps({"messages": messages, "name": "call"}))
    fake, remedy = Fake(lambda _number, body: counted(target, body, "a")), "call.*tool calls are not replayed"
    with serving(fake), pytest.raises(InputError, match=remedy):
        foretoken.advise(str(target), url=fake.url, prompts=texts)


def test_marks_of_thinking_are_in_tokens_and_in_no_text(target: Path) -> None:
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    marked, text = "<think>\nthe list is a self</think>\n\nreturn", "the list is a selfreturn"
    answer = Answer(tuple(tokenizer.encode(marked)), text, 9, 8, 1.0)
    assert elsewhere._reads(tokenizer, answer)
    assert not elsewhere._reads(tokenizer, replace(answer, text="another text than that"))


@pytest.mark.parametrize(
    ("options", "named", "kind"),
    [
        ({"drafts": ("DRAFT",)}, "drafts", InputError),
        ({"memory": "1GiB"}, "memory", ConfigError),
        ({"weights": "int8"}, "weights", ConfigError),
        ({"url": "ftp://x"}, "url", InputError),
        ({"url": None, "model": "m"}, "model", ConfigError),
        ({"url": None, "key_variable": "MY_KEY"}, "key_variable", ConfigError),
        ({"prompts": "IDS"}, "prompts", InputError),
    ],
)
def test_what_an_address_cannot_answer_is_refused_by_name(
    options: dict[str, Any],
    named: str,
    kind: type[InputError],
    copying: Fake,
    target: Path,
    pair: SimpleNamespace,
    tmp_path: Path,
) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"prompt_ids": [1, 2, 3]}))
    given = {"url": copying.url} | options
    if "drafts" in given:
        given["drafts"] = (str(pair.draft),)
    if "prompts" in given:
        given["prompts"] = ids
    with pytest.raises(kind) as error:
        foretoken.advise(str(target), **given)
    assert error.value.field == named
