"""One seam for every engine: a new one is a file and a line; servers, OpenVINO and our own engine behind it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from foretoken import LLM
from foretoken.backend import openvino, registry
from foretoken.backend.answering import SERVED, Answer, Capabilities, Drafting, Question
from foretoken.backend.local_answers import LocalAnswers
from foretoken.backend.registry import BackendOptions, open_backend
from foretoken.errors import ForetokenError, InputError, UnavailableError, UnsupportedModelError
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.run import run_speed
from tests.helpers.gguf_files import write_gguf
from tests.measure.endpoint import Fake, Reply, serving, tokens
from tests.measure.fakes import FakeLLM

PLAIN, OWN = Drafting(), Drafting(SERVED)
ASKED = Question("def f(x):", max_tokens=6, ignore_eos=True)


# ---- a new backend


@dataclass
class Toy:
    """Counts up from the length of the text, two tokens a step where it drafts; samples nothing."""

    name: str = "toy"
    asked: list[tuple[Question, Drafting]] = field(default_factory=list)
    is_open: bool = True
    capabilities = Capabilities(True, True, False, True, "total", False)

    def version(self) -> str:
        return "7"

    def draftings(self, num_drafts, lookup_num_drafts=None):
        return [Drafting("echo", number, "", "ngram", True) for number in lookup_num_drafts or num_drafts]

    def notes(self):
        return ("toy counts.",)

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        self.asked.append((question, drafting))
        steps = question.max_tokens // (1 if drafting.kind is None else 2)
        ids = tuple(len(question.text) + i for i in range(question.max_tokens))
        return Answer(ids, "", len(ids), len(ids), float(steps), num_drafted=steps, num_accepted=len(ids) - steps)

    def counters(self):
        return None

    def reset(self) -> None:
        pass

    def close(self) -> None:
        self.is_open = False


OPENED: list[tuple[BackendOptions, Toy]] = []


def open_toy(options: BackendOptions) -> Toy:
    OPENED.append((options, Toy()))
    return OPENED[-1][1]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[BackendOptions, Toy]]]:
    monkeypatch.setitem(registry.BACKENDS, "toy", f"{__name__}:open_toy")
    yield OPENED
    OPENED.clear()


def options(**values: object) -> SpeedOptions:
    base = {"drafters": ("ngram",), "num_drafts": (3,), "slices": ("code",), "max_tokens": 12, "repeats": 1}
    return SpeedOptions("t", **base | {"peer_lookup_num_drafts": (4,), "threads": 1} | values)


def test_a_new_backend_is_one_file_and_one_line(toy) -> None:
    report = run_speed(options(backends=("local", "toy"), draft="d", dtype="float32"), FakeLLM())
    rows = {(row.setting, row.temperature): row for row in report.rows}
    assert {setting for setting, _ in rows} == {"plain", "ngram-3", "toy", "toy-echo-4"}
    assert {temperature for setting, temperature in rows if setting.startswith("toy")} == {0.0}
    assert rows["toy-echo-4", 0.0].tokens_per_s == 2.0
    assert rows["toy", 0.0].identical is True
    assert rows["ngram-3", 0.0].rival == "toy-echo-4"
    assert report.versions["toy"] == "7"
    assert "toy counts." in report.caveats
    assert "toy was measured greedily only: it does not repeat a sampled answer for a seed." in report.caveats
    ((given, backend),) = toy
    assert (given.model, given.draft, given.dtype, given.threads) == ("t", "d", "float32", 1)
    assert not backend.is_open


def test_without_ours_others_are_measured_alone(toy) -> None:
    report = run_speed(options(backends=("toy",)))
    assert {row.setting for row in report.rows} == {"toy", "toy-echo-4"}
    assert all(row.speedup is None for row in report.rows)
    assert {question.text for question, _ in toy[0][1].asked}
    with pytest.raises(InputError, match=r"nothing can be measured\. toy counts\. toy was measured greedily"):
        run_speed(options(backends=("toy",), temperatures=(0.8,)))


def test_conversations_reach_an_engine_that_renders_them_and_no_other(toy) -> None:
    chat = options(backends=("toy",), chat=True, temperatures=(0.0,))
    with pytest.raises(InputError, match="toy was not measured: it renders no conversations"):
        run_speed(chat)
    run_speed(options(backends=("local", "toy"), chat=True, temperatures=(0.0,)), FakeLLM())
    assert all(question.text.startswith("[user]") for question, _ in toy[-1][1].asked)


def test_only_the_kinds_that_are_named_run_and_they_must_be_there(toy) -> None:
    report = run_speed(options(backends=("local", "toy"), peer_drafters=("echo",)), FakeLLM())
    assert "toy-echo-4" in {row.setting for row in report.rows}
    with pytest.raises(InputError, match=r"peer_drafters='magic'.* with echo; or give all"):
        run_speed(options(backends=("local", "toy"), peer_drafters=("magic",)), FakeLLM())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"backends='nothing': choose from local, transformers, llama\.cpp, openvino"):
        open_backend(BackendOptions("nothing", "t"))


# ---- servers


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as found:
        yield found


@pytest.mark.parametrize(("texts", "decoded"), [(("abcdef",), 0), (("ab", "cd", "ef"), 4)])
def test_tokens_of_the_first_piece_were_not_decoded_behind_it(fake: Fake, texts: tuple[str, ...], decoded: int) -> None:
    """Six tokens, counted at the end of the answer alone: a server that speculates sends several at once."""
    events = [{"choices": [{"index": 0, "text": text}]} for text in texts]
    usage = {"choices": [], "usage": {"completion_tokens": 6, "prompt_tokens": 7}}
    fake.answer = lambda _number, _body: Reply((*events, usage))
    answer = open_backend(BackendOptions(fake.url, "whatever")).answer(ASKED, OWN)
    assert (answer.num_emitted, answer.decode_tokens) == (6, decoded)


def test_a_server_answers_as_it_was_started(fake: Fake) -> None:
    backend = open_backend(BackendOptions(fake.url, "whatever"))
    answer = backend.answer(ASKED, OWN)
    path, _, body = fake.asked[0]
    assert (path, body["model"], body["prompt"], body["max_tokens"]) == ("/v1/completions", "fake", "def f(x):", 6)
    assert body["ignore_eos"] is True
    assert "seed" not in body
    assert (answer.text, answer.num_emitted, answer.decode_tokens, answer.token_ids) == ("abc", 6, 4, ())
    assert answer.decode_s > 0
    assert answer.ttft_s is not None
    assert (answer.num_drafted, backend.capabilities.draft_counts) == (None, "none")
    assert (backend.capabilities.plain, backend.capabilities.sampling) == (False, False)
    with pytest.raises(InputError, match="cannot be asked to answer without drafting"):
        backend.answer(ASKED, PLAIN)
    with pytest.raises(InputError, match="drafts as it was started"):
        backend.answer(ASKED, Drafting("ngram"))
    backend.answer(Question(messages=(("user", "hi"),)), OWN)
    assert fake.asked[-1][0] == "/v1/chat/completions"
    backend.close()


def test_our_own_server_is_asked_without_drafting_and_with_a_prediction(fake: Fake) -> None:
    fake.owner = "foretoken"
    spec = {"num_drafted": 8, "num_accepted": 3, "num_steps": 3}
    fake.answer = lambda _number, _body: tokens("a", "b", "c", foretoken={"spec": spec})
    backend = open_backend(BackendOptions(fake.url, "whatever"))
    answer = backend.answer(Question("x", prediction="y", seed=3, temperature=0.5), OWN)
    assert (answer.num_drafted, answer.num_accepted, answer.num_steps) == (8, 3, 3)
    assert fake.asked[-1][2]["prediction"] == {"type": "content", "content": "y"}
    backend.answer(ASKED, PLAIN)
    assert fake.asked[-1][2]["spec"] == {"drafter": None}
    assert backend.version().startswith("foretoken")
    backend.close()


def test_counters_of_a_server_tell_what_its_answers_do_not(fake: Fake) -> None:
    drafted = iter(range(10, 1000, 10))

    def metrics() -> str:
        count = next(drafted)
        return (
            f"vllm:spec_decode_num_draft_tokens_total {count}\nvllm:spec_decode_num_accepted_tokens_total {count / 2}\n"
        )

    fake.metrics, fake.owner = metrics, "vllm"
    backend = open_backend(BackendOptions(fake.url, "whatever"))
    answer = backend.answer(ASKED, OWN)
    assert (answer.num_drafted, answer.num_accepted, backend.capabilities.draft_counts) == (10, 5, "total")
    backend.close()


def test_an_answer_that_ends_with_its_first_token_has_no_text(fake: Fake) -> None:
    usage = {"completion_tokens": 1, "prompt_tokens": 7}
    fake.answer = lambda _number, _body: Reply(({"choices": [{"index": 0, "text": ""}], "usage": usage},))
    backend = open_backend(BackendOptions(fake.url, "whatever"))
    answer = backend.answer(ASKED, OWN)
    assert (answer.text, answer.num_emitted, answer.decode_tokens, answer.decode_s) == ("", 1, 0, 0.0)
    backend.close()


@pytest.mark.parametrize(
    ("owner", "field"),
    [("vllm", "repetition_penalty"), ("sglang", "repetition_penalty"), ("llamacpp", "repeat_penalty")],
)
def test_penalties_of_a_server_are_switched_off(fake: Fake, owner: str, field: str) -> None:
    fake.owner = owner
    backend = open_backend(BackendOptions(fake.url, "whatever"))
    backend.answer(ASKED, OWN)
    assert fake.asked[-1][2][field] == 1.0
    backend.close()


@pytest.mark.parametrize("owner", ["vllm", "llamacpp"])
def test_filters_of_a_server_are_switched_off(fake: Fake, owner: str) -> None:
    fake.owner = owner
    backend = open_backend(BackendOptions(fake.url, "whatever"))
    backend.answer(ASKED, OWN)
    body = fake.asked[-1][2]
    assert (body["top_k"], body["top_p"], body["min_p"]) == (0, 1.0, 0.0)
    backend.close()


def test_failures_of_a_server_are_errors_that_say_what_it_said(fake: Fake) -> None:
    backend = open_backend(BackendOptions(fake.url, "whatever", served_model="m"))
    for reply, said in (
        (Reply(status=400, body=b'{"error": {"message": "too long"}}'), "status 400: too long"),
        (Reply(({"error": {"message": "out of blocks"}},), has_end=False), "stream: out of blocks"),
        (Reply((), has_end=True), "no text"),
    ):
        fake.answer = lambda _number, _body, reply=reply: reply
        with pytest.raises(ForetokenError, match=said):
            backend.answer(ASKED, OWN)
    backend.close()


def test_a_server_that_is_not_there_is_said() -> None:
    with serving(Fake()) as fake:
        pass
    with pytest.raises(UnavailableError, match="is the server running"):
        open_backend(BackendOptions(fake.url, "whatever"))


def test_openvino_model_server_is_asked_under_its_own_version_of_the_api(fake: Fake) -> None:
    backend = open_backend(BackendOptions(f"{fake.url}/v3", "whatever"))
    backend.answer(ASKED, OWN)
    path, _, body = fake.asked[0]
    assert path == "/v3/completions"
    assert body["stream_options"] == {"include_usage": True}
    backend.close()


def test_a_speed_run_on_a_server(fake: Fake) -> None:
    report = run_speed(options(backends=("local", fake.url), temperatures=(0.0,)), FakeLLM())
    row = next(row for row in report.rows if row.setting == f"{fake.url}-served")
    assert (row.drafter, row.num_emitted) == (SERVED, 12)
    assert f"{fake.url} was not measured without drafting: it cannot be asked to answer without." in report.caveats


# ---- our own engine


def test_our_engine_answers_through_the_seam(text_pair: SimpleNamespace) -> None:
    with LLM(text_pair.target, dtype="float32", cache_tokens=4096, profile="off") as llm:
        backend = LocalAnswers(llm, str(text_pair.draft))
        ways = {way.kind: way for way in backend.draftings((2,), (3,))}
        assert {"draft_model", "ngram", "suffix"} <= set(ways)
        assert (ways["ngram"].num_draft, ways["ngram"].is_free, ways["draft_model"].num_draft) == (3, True, 2)
        plain = backend.answer(ASKED, PLAIN)
        before = backend.counters()
        drafted = backend.answer(ASKED, Drafting("draft_model", 2, "rule=greedy"))
        assert drafted.token_ids == plain.token_ids
        assert drafted.num_drafted == backend.counters()["drafted"] - before["drafted"] > 0
        with pytest.raises(InputError, match="oracle"):
            backend.answer(ASKED, Drafting("oracle"))
        with pytest.raises(InputError, match="needs a draft"):
            LocalAnswers(llm).answer(ASKED, Drafting("draft_model", 2))


def test_our_engine_drafts_from_earlier_answers_until_it_is_reset(text_pair: SimpleNamespace) -> None:
    with LLM(text_pair.target, dtype="float32", cache_tokens=4096, profile="off") as llm:
        backend = LocalAnswers(llm)
        asked, way = Question(ASKED.text, max_tokens=24, ignore_eos=True), Drafting("suffix", 4)
        first, again = (backend.answer(asked, way) for _ in range(2))
        backend.reset()
        anew = backend.answer(asked, way)
        assert again.num_accepted > first.num_accepted == anew.num_accepted


# ---- OpenVINO


class FakePipeline:
    """What is used of openvino_genai.LLMPipeline: counts up from the length of the text."""

    opened: ClassVar[list[tuple[str, dict[str, object]]]] = []

    def __init__(self, path: str, device: str, **given: object) -> None:
        assert device == "CPU"
        self.given = given
        self.opened.append((path, given))
        if given.get("enable_save_ov_model"):
            Path(path).with_name("openvino_model.xml").write_text("")

    def get_tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(
            encode=lambda text, **_: len(text),
            decode=lambda ids: " ".join(map(str, ids)),
            apply_chat_template=lambda messages, add_generation_prompt: f"<{messages[0]['content']}>",
        )

    def get_generation_config(self) -> SimpleNamespace:
        return SimpleNamespace(repetition_penalty=1.1)  # the model's own

    def generate(self, ids: int, config: SimpleNamespace, streamer) -> SimpleNamespace:
        assert config.repetition_penalty == 1.0
        self.given["config"] = config
        found = list(range(ids, ids + config.max_new_tokens))
        streamer.write(found[0])
        streamer.write(found[1:])
        streamer.end()
        counts = SimpleNamespace(get_num_draft_tokens=lambda: 7, get_num_accepted_tokens=lambda: 5)
        return SimpleNamespace(tokens=[found], extended_perf_metrics=counts if "draft_model" in self.given else None)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("openvino_genai")
    found.__version__ = "1.2"
    found.LLMPipeline, found.StreamerBase = FakePipeline, object
    found.StreamingStatus = SimpleNamespace(RUNNING=0)
    found.draft_model = lambda path, device, **_given: path
    FakePipeline.opened = []
    monkeypatch.setitem(sys.modules, "openvino_genai", found)
    return found


def test_openvino_answers_plainly_with_lookups_and_with_a_draft(package, text_pair, tmp_path: Path) -> None:
    target, draft = (write_gguf(tmp_path / f"{name}.gguf", getattr(text_pair, name)) for name in ("target", "draft"))
    backend = open_backend(BackendOptions("openvino", str(target), str(draft), threads=2, dtype="float32"))
    plain = backend.answer(ASKED, PLAIN)
    assert (plain.num_emitted, plain.decode_tokens, plain.num_steps, plain.num_accepted) == (6, 5, 2, 4)
    assert plain.text.startswith("9 10")
    ways = backend.draftings((2,), (8,))
    assert [(way.kind, way.num_draft) for way in ways] == [
        *(("draft_model", "auto"), ("draft_model", 2)),
        *(("prompt_lookup", 5), ("prompt_lookup", 8)),
    ]
    answers = [backend.answer(ASKED, way) for way in ways]
    assert (answers[0].num_drafted, answers[0].num_accepted, answers[2].num_drafted) == (7, 5, None)
    properties = {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "f32"}
    opened = [given for path, given in FakePipeline.opened if path == str(target)]
    assert [given | {"config": None} for given in opened] == [
        properties | own | {"config": None}
        for own in ({}, {"draft_model": str(tmp_path / "draft-openvino")}, {"prompt_lookup": True})
    ]
    assert (tmp_path / "draft-openvino" / "openvino_model.xml").is_file()
    sampled = Question(messages=(("user", "hey"),), temperature=0.5, seed=4, max_tokens=3)
    assert backend.answer(sampled, PLAIN).token_ids == (5, 6, 7)
    assert (opened[0]["config"].rng_seed, opened[0]["config"].do_sample) == (4, True)
    with pytest.raises(InputError, match="drafting='eagle'"):
        backend.answer(ASKED, Drafting("eagle"))
    backend.close()


def test_openvino_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, package, text_pair) -> None:
    with pytest.raises(UnsupportedModelError, match="optimum-cli export openvino"):
        open_backend(BackendOptions("openvino", str(text_pair.target)))
    with pytest.raises(InputError, match="device='cuda'"):
        open_backend(BackendOptions("openvino", str(text_pair.target), device="cuda"))
    with pytest.raises(InputError, match="dtype='float64'"):
        open_backend(BackendOptions("openvino", str(text_pair.target), dtype="float64"))
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(InputError, match=r"pip install 'foretoken\[openvino\]'"):
        open_backend(BackendOptions("openvino", str(text_pair.target)))


def test_errors_of_openvino_are_ours() -> None:
    with pytest.raises(ForetokenError, match="openvino failed: bad weights"), openvino._as_ours():
        raise RuntimeError("bad\n weights")
